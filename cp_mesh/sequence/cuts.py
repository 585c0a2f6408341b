"""Records of what `ShardedSequence` sharded last over a group: the rows that this rank holds, and their tokens.

Labels and tokens are plain tensors that do not contain their rows. The first step compares them with these records
(`training/checks/labels.py`, and the first call of attention). Every sum of valid tokens compares digests of batches.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from cp_mesh._torch import FakeTensor, base_of, tree_leaves, world
from cp_mesh.comm.agreement import capturing, checking
from cp_mesh.comm.fingerprints import fingerprint
from cp_mesh.comm.group_state import groups_with, state_of
from cp_mesh.errors import describe, refuse, warn
from cp_mesh.geometry.host_tensors import Content
from cp_mesh.geometry.layouts import Layout, same
from cp_mesh.geometry.mask import EXCLUDED, TENSORS, Mask
from cp_mesh.sequence.auto import is_by_batch

TOKENS = ("tokens", "input_ids", "input", "inputs", "ids", "idx", "x")
"""Names of leaves with tokens, whose labels are usually the next tokens."""
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""A number without pattern, which mixes digests."""


class Tokens(NamedTuple):
    """The whole tokens [B, S] of a batch, and how they were sharded: padded to ``seq_len``, this rank of ``ranks``.

    ``documents``, [B or 1, S], are those of the mask that a style had since then.
    """

    whole: Tensor
    layout: Layout
    seq_len: int
    ranks: tuple[int, ...]
    rank: int
    documents: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Of this rank, in each row of the batch."""
        return self.layout.shard_len(self.seq_len, len(self.ranks), self.rank)

    def rows(self, shift: int, layout: Layout | None = None, rank: int | None = None, fill: int = 0) -> Tensor:
        """Return the tokens ``shift`` places after each row of a rank, by default this one: [B, rows].

        ``fill`` stands for those of another document, which a label there need not be: joined batches have labels of
        their own at their ends.
        """
        rank = self.rank if rank is None else rank
        positions = (layout or self.layout).positions(self.seq_len, len(self.ranks), rank)

        def moved(x: Tensor, by: int, value: int) -> Tensor:
            return F.pad(x, (0, self.seq_len + shift - x.shape[1]), value=value)[:, (positions + by).to(x.device)]

        found, ids = moved(self.whole, shift, fill), self.documents
        if ids is None:
            return found
        return found.where((moved(ids, 0, EXCLUDED) == moved(ids, shift, EXCLUDED)).to(found.device), fill)


class _Batches(threading.local):
    """Digests since the last sum of valid tokens: of tokens that were sharded, by device, and of styles' masks.

    Each thread has its own, since a loader's thread may be ahead on some ranks.
    """

    def __init__(self) -> None:
        self.sums: dict[torch.device, Tensor] = {}
        self.masks: tuple[Content, ...] = ()
        self.of_masks = 0


@dataclass
class Cuts:
    """Records of one group.

    Attributes:
        last: distinct layouts and padded lengths of the last tensors.
        tokens: the tokens of a first batch, until a trained loss has been compared with them.
        evaluated: an untrained loss has been compared with them; the next tokens take their place.
        done: a trained loss has been compared, and no model had a first step since; only the 2nd, 4th, 8th, ... batch
            is kept.
        used: a first call of attention came since these tokens were sharded.
        count: batches of tokens since the last such call.
        total: batches of tokens.
        gathered: length of the whole that `ShardedSequence.gather` made since tokens were sharded last; 0 if none.
        batches: digests of all batches.
        rows: floating-point tensors that `shard` returned, with their sequence dim and layout.
        labels: labels that `shard` returned, with their layout.
        outputs: rows that models returned, with their layout.
        roots: layouts in which models sharded their last batches.
    """

    last: tuple[tuple[Layout, int], ...] = ()
    tokens: Tokens | None = None
    evaluated: bool = False
    done: bool = False
    used: bool = False
    count: int = 0
    total: int = 0
    gathered: int = 0
    batches: _Batches = field(default_factory=_Batches)
    rows: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    labels: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    outputs: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    roots: tuple[Layout, ...] = ()


def check_mark(x: Tensor, dim: int, layout: Layout, group: dist.ProcessGroup) -> None:
    """Refuse rows that `shard` cut in another dim or layout, if they are the tensor that it returned."""
    cut, of_shard = state_of(group, Cuts).rows.get(x, (dim, layout))
    if cut % x.ndim != dim:
        refuse("seq_dim", f"{cut}, the dim in which shard cut", dim, f"pass seq_dim={cut}")
    if of_shard != layout:
        refuse("layout", f"{of_shard.spec()}, in which shard cut", layout.spec(), "pass layout=sequence.layout")


def note_output(output: Any, layout: Layout, group: dist.ProcessGroup) -> None:
    """Record the layout in which a root has sharded its batch, and the rows that its model returned."""
    own = state_of(group, Cuts)
    own.roots = (*[x for x in own.roots if x is not layout][-7:], layout)
    for x in tree_leaves(output):
        if isinstance(x, Tensor):
            own.outputs[_whole_of(x)] = layout


def check_output(what: str, output: Any, layout: Layout, group: dist.ProcessGroup) -> None:
    """Refuse to take rows that a model returned, or views of them, for those of another layout.

    Of other tensors, as those that code computes from an output, refuse the layout of a batch that no root had.
    """
    own = state_of(group, Cuts)
    of_output = own.outputs.get(_whole_of(output)) if isinstance(output, Tensor) else None
    of_batch = own.roots if is_by_batch(layout) and layout.tensor is not None else ()
    expected = of_batch if of_output is None else (of_output,)
    if expected and not any(same(layout, x) for x in expected):
        hint = "sequence.for_batch(length, mask) is the sequence of a batch, for its labels and outputs"
        refuse(what, f"the layout of the model's output, {expected[-1].spec()}", layout.spec(), hint)


def _whole_of(x: Tensor) -> Tensor:
    """The tensor of which this is a view, or itself."""
    base = base_of(x)
    return x if base is None else base


def check_loss(logits: Any, labels: Tensor) -> None:
    """Refuse labels in another layout than logits, if they are the tensor that `shard` returned."""
    for group, own in groups_with(Cuts) if isinstance(labels, Tensor) else ():
        if (layout := own.labels.get(labels, own.labels.get(_whole_of(labels)))) is not None:
            check_output("labels", logits, layout, group)


def note_cut(
    name: str, whole: Tensor, layout: Layout, seq_len: int, group: dist.ProcessGroup, rows: Tensor | None = None,
    dim: int = 1, labels: bool = False,
) -> None:  # fmt: skip
    """Record a tensor that is sharded, by its name, and this rank's ``rows`` of it, which may be labels."""
    own = state_of(group, Cuts)
    if rows is not None and rows.is_floating_point():
        own.rows[rows] = dim, layout
    elif rows is not None and labels and is_by_batch(layout):
        own.labels[rows] = layout
    if (layout, seq_len) not in own.last:
        own.last = (*own.last[-7:], (layout, seq_len))
    if isinstance(whole, FakeTensor) or name not in TOKENS or whole.ndim != 2 or whole.is_floating_point():
        return
    if not (whole.is_meta or capturing() or checking(group) is False):
        _note_batch(whole.reshape(-1), own.batches.sums)
    own.gathered, own.count, own.total = 0, own.count + 1, own.total + 1
    own.done &= own.total.bit_count() != 1
    # a loader may be a batch ahead, so the first batch is kept until a call uses it
    goes = own.tokens is None or own.evaluated or (own.used and own.tokens.whole.shape != whole.shape)
    if goes and not own.done and checking(group) is not False:
        ranks = tuple(dist.get_process_group_ranks(group))
        own.tokens = Tokens(whole, layout, seq_len, ranks, group.rank())
        own.used = own.evaluated = False


def _note_batch(x: Tensor, sums: dict[torch.device, Tensor]) -> None:
    """Add the sum of the tokens, each times a number that is made from its place, to the digest, on the device."""
    place = torch.arange(1, len(x) + 1, device=x.device) * _ODD
    place = (place ^ (place >> 29)) * _ODD
    new = ((place ^ (place >> 32)) * x).sum()
    sums[x.device] = sums.get(x.device, torch.zeros_like(new)) * _ODD + new


def note_documents(mask: Mask, group: dist.ProcessGroup) -> None:
    """Record the documents of a batch's mask, which tell where labels may be any."""
    own, ids = state_of(group, Cuts), mask.documents
    if own.tokens is not None and ids is not None and ids.device.type == "cpu":
        length, seq_len = own.tokens.whole.shape[1], own.tokens.seq_len
        if ids.shape[-1] in (length, seq_len) and ids.shape[:-1] in ((), (1,), (len(own.tokens.whole),)):
            own.tokens = own.tokens._replace(documents=torch.atleast_2d(ids))


def note_mask(mask: Mask, group: dist.ProcessGroup) -> None:
    """Add the tensors of a style's mask to the digest, if the last mask had others."""
    cuts = state_of(group, Cuts)
    if cuts.tokens is not None:
        note_documents(mask, group)
    own = cuts.batches
    given = [x for name in TENSORS if (x := getattr(mask, name)) is not None and x.device.type == "cpu"]
    if given and (masks := tuple(Content.of(x) for x in given)) != own.masks and checking(group) is not False:
        own.masks = masks
        own.of_masks = sum((own.of_masks, *(x.number for x in masks))) * _ODD % (1 << 64)


def apart(ranks: set[int], device: torch.device) -> Tensor:
    """Return an int64 scalar whose sum over these ranks is 0 if batches since the last call were equal in each group.

    A rank adds the digest of each group of such ranks, times its number in the group; the first subtracts all of these.
    """
    total = torch.zeros((), dtype=torch.int64, device=device)
    for group, cuts in groups_with(Cuts):
        if group in world().pg_map and ranks.issuperset(dist.get_process_group_ranks(group)):
            own, factor = cuts.batches, group.rank() or -group.size() * (group.size() - 1) // 2
            total = total + ((factor * own.of_masks + (1 << 63)) % (1 << 64) - (1 << 63))
            for x in own.sums.values():
                total = total + factor * x.to(device, non_blocking=x.device.type == "cpu")
            own.sums, own.of_masks = {}, 0
    return total


def field_of_tokens(group: dist.ProcessGroup, compares: bool) -> dict[str, str]:
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


def check_rows(group: dist.ProcessGroup, rows: int | None, layout: Layout, what: str, has_length: bool) -> None:
    """Refuse attention over rows other than those sharded last, where no root and no length define them.

    Of a sequence with a length, warn of another layout: rows of several sequences may have several.

    Args:
        group: the cp group.
        rows: of this rank; None for a DTensor, which knows its rows.
        layout: of the call.
        what: the calls, for messages.
        has_length: whether the sequence has a length.

    Raises:
        ArgumentError: on this rank.
    """
    own, size = state_of(group, Cuts), group.size()
    if not own.last or rows is None or size == 1:
        return
    cuts = {(each.shard_len(length, size, group.rank()), each.spec()) for each, length in own.last}
    expected = ", or ".join(f"{cut} in {spec}" for cut, spec in sorted(cuts))
    if has_length and layout.spec() not in {spec for _, spec in cuts}:
        hint = "give the plan the sequence that shards the batch"
        warn(describe(what, f"a layout in which tensors were sharded before, {expected}", layout.spec(), hint))
    if not has_length and (rows, layout.spec()) not in cuts:  # a loader may be ahead, or there may be several sequences
        hint = "set the length of this sequence, ShardedSequence(..., length=), which defines its rows"
        refuse(what, f"rows that were sharded before, {expected}", f"{rows} in {layout.spec()}", hint)


def waits_for_labels(ranks: set[int]) -> bool:
    """Whether some tokens of these ranks were not yet compared with the labels of a loss."""
    return any(own.tokens is not None and ranks.issuperset(own.tokens.ranks) for _, own in groups_with(Cuts))


def is_whole(x: Tensor) -> bool:
    """Return whether a tensor has the rows [B, S] of a sequence that was gathered after it was sharded."""
    return any(own.gathered and x.shape[1:] == (own.gathered,) for _, own in groups_with(Cuts))
