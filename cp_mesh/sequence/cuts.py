"""Records of what `ShardedSequence` sharded last over a group: the rows that this rank holds, and their tokens.

Labels and tokens are plain tensors that do not contain their rows. The first step compares them with these records
(`training/checks/labels.py`, and the first call of attention).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from cp_mesh._torch import FakeTensor
from cp_mesh.comm.agreement import turned_off
from cp_mesh.comm.fingerprints import fingerprint
from cp_mesh.comm.group_state import state_of, states_of_all
from cp_mesh.errors import refuse
from cp_mesh.geometry.layouts import Layout

TOKENS = ("tokens", "input_ids", "input", "inputs", "ids", "idx", "x")
"""Names of leaves with tokens, whose labels are usually the next tokens."""


class Tokens(NamedTuple):
    """The whole tokens [B, S] of a batch, and how they were sharded: padded to ``seq_len``, this rank of ``ranks``."""

    whole: Tensor
    layout: Layout
    seq_len: int
    ranks: tuple[int, ...]
    rank: int

    @property
    def num_rows(self) -> int:
        """Of this rank, in each row of the batch."""
        return self.layout.shard_len(self.seq_len, len(self.ranks), self.rank)

    def rows(self, shift: int, layout: Layout | None = None, rank: int | None = None, fill: int = 0) -> Tensor:
        """Return the tokens ``shift`` places after each row of a rank, by default this one: [B, rows]."""
        rank = self.rank if rank is None else rank
        positions = (layout or self.layout).positions(self.seq_len, len(self.ranks), rank).to(self.whole.device)
        return F.pad(self.whole, (0, self.seq_len + shift - self.whole.shape[1]), value=fill)[:, positions + shift]


@dataclass
class Cuts:
    """Records of one group.

    Attributes:
        last: distinct layouts and padded lengths of the last tensors.
        tokens: the tokens of a first batch, until a trained loss has been compared with them.
        evaluated: an untrained loss has been compared with them; the next tokens take their place.
        done: a trained loss has been compared, and no model had a first step since; no other batch is kept.
        used: a first call of attention came since these tokens were sharded.
        count: batches of tokens since the last such call.
        gathered: length of the whole that `ShardedSequence.gather` made since tokens were sharded last; 0 if none.
    """

    last: tuple[tuple[Layout, int], ...] = ()
    tokens: Tokens | None = None
    evaluated: bool = False
    done: bool = False
    used: bool = False
    count: int = 0
    gathered: int = 0


def note_cut(name: str, whole: Tensor, layout: Layout, seq_len: int, group: dist.ProcessGroup) -> None:
    """Record a tensor that is sharded, by its name."""
    own = state_of(group, Cuts)
    if (layout, seq_len) not in own.last:
        own.last = (*own.last[-7:], (layout, seq_len))
    if isinstance(whole, FakeTensor) or name not in TOKENS or whole.ndim != 2 or whole.is_floating_point():
        return
    own.gathered, own.count = 0, own.count + 1
    # a loader may be a batch ahead, so the first batch is kept until a call uses it
    goes = own.tokens is None or own.evaluated or (own.used and own.tokens.whole.shape != whole.shape)
    if goes and not own.done and not turned_off(group):
        ranks = tuple(dist.get_process_group_ranks(group))
        own.tokens = Tokens(whole, layout, seq_len, ranks, group.rank())
        own.used = own.evaluated = False


def told_of_tokens(group: dist.ProcessGroup, compares: bool) -> dict[str, str]:
    """Return a fingerprint of the tokens for a first call of attention, if they are known to be its tokens.

    It is unknown after several batches, as with a loader that is ahead. ``compares``: no root compares them itself.
    """
    own = state_of(group, Cuts)
    known = compares and own.tokens is not None and own.count == 1
    own.used, own.count = True, 0
    return {"tokens": fingerprint(own.tokens.whole) if known and own.tokens is not None else ""}


def is_cut(x: Tensor, group: dist.ProcessGroup) -> bool:
    """Return whether a tensor has this rank's rows of the recorded tokens, and not the whole tokens."""
    tokens = state_of(group, Cuts).tokens
    if tokens is None or x.ndim != 2 or x.dtype != tokens.whole.dtype or x.device != tokens.whole.device:
        return False
    if x.shape == tokens.whole.shape or x.shape != (tokens.whole.shape[0], tokens.num_rows):
        return False
    own = tokens.rows(0)
    return torch.equal(own, x) and bool((own != own[:1, :1]).any())


def check_rows(group: dist.ProcessGroup, rows: int | None, layout: Layout, what: str) -> None:
    """Refuse attention over rows other than those sharded last, where no root and no length define them.

    Args:
        group: the cp group.
        rows: of this rank; None for a DTensor, which knows its rows.
        layout: of the call.
        what: the calls, for messages.

    Raises:
        ArgumentError: on this rank.
    """
    own, size = state_of(group, Cuts), group.size()
    if not own.last or rows is None or size == 1:
        return
    cuts = {(each.shard_len(length, size, group.rank()), each.spec()) for each, length in own.last}
    if (rows, layout.spec()) not in cuts:  # a loader may be ahead, or there may be several sequences
        hint = "set the length of this sequence, ShardedSequence(..., length=), which defines its rows"
        expected = ", or ".join(f"{cut} in {spec}" for cut, spec in sorted(cuts))
        refuse(what, f"rows that were sharded before, {expected}", f"{rows} in {layout.spec()}", hint)


def waits_for_labels(ranks: set[int]) -> bool:
    """Whether some tokens of these ranks were not yet compared with the labels of a loss."""
    return any(own.tokens is not None and ranks.issuperset(own.tokens.ranks) for own in states_of_all(Cuts))


def is_whole(x: Tensor) -> bool:
    """Return whether a tensor has the rows [B, S] of a sequence that was gathered after it was sharded."""
    return any(own.gathered and x.shape[1:] == (own.gathered,) for own in states_of_all(Cuts))
