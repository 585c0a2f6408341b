"""What `ShardedSequence` cut last over a group: which rows this rank holds, and of which tokens.

Labels and tokens are plain tensors, so nothing in them says which rows they hold. The first step compares them with
what is known here (`training/checks/labels.py`, and the first call of attention).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from cp_mesh.comm.agreement import turned_off
from cp_mesh.comm.fingerprints import fingerprint
from cp_mesh.comm.group_state import state_of, states_of_all
from cp_mesh.errors import refuse
from cp_mesh.geometry.layouts import Layout

TOKENS = ("tokens", "input_ids", "inputs", "ids", "idx")
"""Names of leaves of which labels are usually the next ones."""


class Tokens(NamedTuple):
    """The whole tokens [B, S] of a batch, and how they were cut: padded to ``seq_len``, for this rank of ``ranks``."""

    whole: Tensor
    layout: Layout
    seq_len: int
    ranks: tuple[int, ...]
    rank: int

    def rows(self, shift: int, layout: Layout | None = None, rank: int | None = None, fill: int = 0) -> Tensor:
        """The tokens ``shift`` places after each row of a rank, this one if none is said: [B, rows]."""
        rank = self.rank if rank is None else rank
        positions = (layout or self.layout).positions(self.seq_len, len(self.ranks), rank).to(self.whole.device)
        return F.pad(self.whole, (0, self.seq_len + shift - self.whole.shape[1]), value=fill)[:, positions + shift]


@dataclass
class Cuts:
    """Of one group.

    Attributes:
        layout, seq_len: of the last tensor; None before the first.
        tokens: of a first batch, until a loss has looked at them; after a trained one, ``done``, there are no others.
        used: whether attention was called since these tokens were cut.
        count: how often tokens were cut since attention was last called for the first time in a kind.
        gathered: the tokens of the last sequence that was gathered since; 0 if none was.
    """

    layout: Layout | None = None
    seq_len: int = 0
    tokens: Tokens | None = None
    done: bool = False
    used: bool = False
    count: int = 0
    gathered: int = 0


def note_cut(name: str, whole: Tensor, layout: Layout, seq_len: int, group: dist.ProcessGroup) -> None:
    """Of a tensor that is sharded, by its name."""
    own = state_of(group, Cuts)
    own.layout, own.seq_len = layout, seq_len
    if name not in TOKENS or whole.ndim != 2 or whole.is_floating_point():
        return
    own.gathered, own.count = 0, own.count + 1
    # a loader may be a batch ahead, so the first batch stays until it was used
    goes = own.tokens is None or (own.used and own.tokens.whole.shape != whole.shape)
    if goes and not own.done and not turned_off(group):
        ranks = tuple(dist.get_process_group_ranks(group))
        own.tokens, own.used = Tokens(whole, layout, seq_len, ranks, group.rank()), False


def told_of_tokens(group: dist.ProcessGroup, compares: bool) -> dict[str, str]:
    """In a first call of attention: what the tokens are, for the other ranks, where they are those of the call.

    Nobody knows if several were cut, as by a loader that is ahead. Where there is a root, it ``compares`` them itself.
    """
    own = state_of(group, Cuts)
    known = compares and own.tokens is not None and own.count == 1
    own.used, own.count = True, 0
    return {"tokens": fingerprint(own.tokens.whole) if known and own.tokens is not None else ""}


def is_cut(x: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether these are this rank's rows of the tokens that were cut, unlike those of the whole."""
    tokens = state_of(group, Cuts).tokens
    if tokens is None or x.device != tokens.whole.device or x.shape == tokens.whole.shape:
        return False
    own = tokens.rows(0)
    return own.shape == x.shape and torch.equal(own, x) and bool((own != own[:1, :1]).any())


def check_rows(group: dist.ProcessGroup, rows: int | None, layout: Layout, what: str) -> None:
    """Refuse attention over other rows than were cut last, where no root and no length say which they are.

    Args:
        group: the cp group.
        rows: of this rank; None of a DTensor, which knows them.
        layout: of the call.
        what: calls, for messages.

    Raises:
        ArgumentError: on this rank.
    """
    own, size = state_of(group, Cuts), group.size()
    if own.layout is None or rows is None or size == 1:
        return
    cut = own.layout.shard_len(own.seq_len, size, group.rank())
    if (cut, own.layout.spec()) != (rows, layout.spec()):
        hint = "a sequence with a length of its own, ShardedSequence(..., length=), says which rows they are"
        expected, got = f"the {cut} rows that were sharded last, in {own.layout.spec()}", f"{rows} in {layout.spec()}"
        refuse(what, expected, got, hint)


def is_whole(x: Tensor) -> bool:
    """Whether this has the rows [B, S] of a whole sequence that was gathered since it was cut."""
    return any(own.gathered and x.shape[1:] == (own.gathered,) for own in states_of_all(Cuts))
