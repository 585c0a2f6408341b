"""What this rank saw of one sequence: what `shard` returned, what was sharded, and how attention was called last.

Labels, tokens and logits are plain tensors, so nothing in them says which rows they are. The first step compares what
is known of them here: a mark on what `shard` returned, which views and copies lose, and the tokens themselves, of which
labels usually are the next ones.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from cp_mesh._torch import resolve_group, saved_sizes, without_function_modes, world
from cp_mesh.comm.agreement import turned_off
from cp_mesh.comm.fingerprints import fingerprint
from cp_mesh.comm.first_calls import is_first_here, is_new_here
from cp_mesh.comm.group_state import state_of
from cp_mesh.errors import refuse
from cp_mesh.geometry.layouts import Contiguous, Layout, Striped, ZigZag
from cp_mesh.geometry.mask import Mask
from cp_mesh.sequence.losses import WAITING, note_wrapper

TOKENS = ("tokens", "input_ids", "inputs", "ids", "idx")
"""Names of leaves of which labels are usually the next ones."""
_MARKS = WeakTensorKeyDictionary()  # to rows and a dim; not attributes of tensors, which would be saved with them


class Rows(NamedTuple):
    """Which rows a tensor holds: those of a rank of this group, of a sequence of this length with padding."""

    layout: str
    seq_len: int
    group_name: str


class Called(NamedTuple):
    """The last call of attention.

    Attributes:
        rows: of its keys.
        shape: [B, rows of this rank].
        alike: whether all calls since the last loss were like it; else nobody knows of which one the logits are.
    """

    rows: Rows
    shape: tuple[int, int]
    alike: bool = True


class Given(NamedTuple):
    """The whole tokens [B, S] of a batch that a trained loss is to be compared with, and how they were sharded.

    ``group`` is a weak reference; see `_given`.
    """

    tokens: Tensor
    layout: Layout
    rows: Rows
    cp_size: int
    cp_rank: int
    group: Callable[[], dist.ProcessGroup | None]


CALLED: ContextVar[Called | None] = ContextVar("cp_mesh_called", default=None)
GIVEN: ContextVar[Given | None] = ContextVar("cp_mesh_given", default=None)
"""Holds on to one batch of tokens, until a loss has looked at it."""
COUNTED: ContextVar[frozenset[int]] = ContextVar("cp_mesh_counted", default=frozenset())
"""Of how many labels each count was taken, until a loss comes."""


def note_tokens(name: str, whole: Tensor, layout: Layout, rows: Rows, group: dist.ProcessGroup) -> None:
    """Of a tensor that is sharded, by its name; while a model waits for its first step, or the shape is a new one."""
    if name not in TOKENS or whole.ndim != 2 or whole.is_floating_point() or group.size() == 1 or turned_off(group):
        return
    if not WAITING and not is_new_here(group, whole.shape):
        return
    given = _given()
    if given is None or given.tokens.shape != whole.shape:  # a loader may be a batch ahead
        GIVEN.set(Given(whole, layout, rows, group.size(), group.rank(), weakref.ref(group)))


def _given() -> Given | None:
    """The batch of tokens that is held; none of a group that was destroyed, which later losses know nothing of."""
    given = GIVEN.get()
    return given if given is not None and given.group() in world().pg_map else None


def mark(x: Tensor, rows: Rows, dim: int) -> Tensor:
    """``x``, which says from now on which rows it holds, along ``dim``."""
    _MARKS[x] = rows, dim % x.ndim
    return x


def marked(x: Any) -> Rows | None:
    found: tuple[Rows, int] | None = _MARKS.get(x) if isinstance(x, Tensor) else None
    return None if found is None else found[0]


def check_marks(tensors: dict[str, Tensor], rows: Rows, seq_dim: int, group: dist.ProcessGroup) -> None:
    """Refuse tensors of a call of attention that `shard` cut along another dim, or in another layout or length.

    Raises:
        ArgumentError: on this rank.
    """
    for name, x in tensors.items():
        held, dim = _MARKS.get(x, (None, seq_dim))
        if held is None or held.group_name != rows.group_name:
            continue
        if dim != seq_dim:
            refuse("seq_dim", f"{dim}, the dim of {name} that shard has cut", seq_dim, f"pass seq_dim={dim}")
        if held != rows and _differ(held, rows, group):
            expected, got = (f"{x.layout}, {x.seq_len} tokens" for x in (rows, held))
            hint = "pass layout=sequence.layout and seq_len=sequence.seq_len of the sequence that cut them"
            refuse(name, f"rows of {expected}, as the call says", f"those of {got}, as shard returned them", hint)


def _differ(held: Rows, rows: Rows, group: dist.ProcessGroup) -> bool:
    """Whether these are other rows, as far as it can be known: not of layouts that are tensors."""
    if held.seq_len != rows.seq_len:
        return True
    plain = {x.spec(): x for x in (Contiguous(), ZigZag(), Striped())}
    if held.layout not in plain or rows.layout not in plain:
        return False
    own, called = (plain[x.layout].positions(x.seq_len, group.size(), group.rank()) for x in (held, rows))
    return not torch.equal(own, called)


class _Lengths(dict[int, int]):
    """Of the tensors that were sharded over a group last, by the length that they were padded to."""


def note_length(group: dist.ProcessGroup, seq_len: int, length: int) -> None:
    """Of a tensor of this ``length`` that was padded to ``seq_len`` and sharded; equal if it needed no padding."""
    state_of(group, _Lengths)[seq_len] = length


def warn_of_padding(group: dist.ProcessGroup, seq_len: int, mask: Mask) -> None:
    """In a first call: queries see the padding of the sequence that was sharded last, as no mask hides it."""
    length = state_of(group, _Lengths).get(seq_len, seq_len)
    hidden = mask.length is not None or mask.documents is not None or mask.key_padding is not None
    if length < seq_len and not hidden and (not mask.causal or mask.prefix > length):
        warnings.warn(
            f"cp_mesh: a sequence of {length} tokens was padded to {seq_len}, and attention over as many has a mask "
            "that lets queries see the padding: attention(..., mask=sequence.mask(mask)) hides it",
            stacklevel=2,
        )


def note_called(rows: Rows, shape: tuple[int, int]) -> None:
    """Of attention, whenever it runs."""
    before = CALLED.get()
    alike = before is None or (before.alike and (before.rows, before.shape) == (rows, shape))
    CALLED.set(Called(rows, shape, alike))
    note_wrapper()


def _called() -> Called | None:
    """The call of attention that logits come from, if it is known."""
    called = CALLED.get()
    return called if called is not None and called.alike else None


def is_whole(labels: Tensor) -> bool:
    """Whether these are labels of the whole sequence of the last attention, not of this rank's rows."""
    called = _called()
    if called is None or not called.shape[1] < called.rows.seq_len:
        return False
    return labels.ndim == 2 and labels.shape[1] > called.shape[1]


def note_count(labels: Tensor) -> None:
    """Of labels that are to share one mean."""
    COUNTED.set(COUNTED.get() | {labels.numel()})


def forget(trained: bool) -> None:
    """After a loss: another one may be of other logits."""
    if trained and (given := _given()) is not None and (group := given.group()) is not None:
        is_first_here(group, given.tokens.shape)
    CALLED.set(None)
    GIVEN.set(None)
    COUNTED.set(frozenset())


_HIDE = ("CompiledFunctionBackward", "CheckpointFunctionBackward")
"""Nodes of autograd in which attention may be."""


def from_attention(x: Tensor) -> bool:
    """Whether attention is among what a tensor was computed from, or may be, in compiled code: by autograd's graph."""
    return any(node.name().endswith(("_AttentionBackward", *_HIDE)) for node in _nodes(x))


def _of_one_row(x: Tensor, rows: int) -> bool:
    """Whether one of a rank's ``rows`` was selected, and nothing fetched from other ranks since."""
    nodes = _nodes(x, (*_HIDE, *_COLLECTIVES))
    return any(node.name() == "SelectBackward0" and saved_sizes(node)[1:2] == (rows,) for node in nodes)


_COLLECTIVES = ("Unshard", "Gather", "gather", "Reduce", "reduce", "AllToAll", "all_to_all", "Redistribute", "ToTorch")


def _nodes(x: Tensor, until: tuple[str, ...] = ()) -> Iterator[Any]:
    """The nodes of autograd that a tensor comes from, up to attention, and to those whose names hold such a word."""
    nodes, known = [x.grad_fn], {x.grad_fn}
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        yield node
        ends = any(word in node.name() for word in ("_AttentionBackward", *until))
        for following, _ in () if ends else node.next_functions:
            if following not in known:
                known.add(following)
                nodes.append(following)


MOST_NODES = 64
"""Of autograd's graph that are looked at for a loss while a model waits for its first step."""


def first_leaf(x: Tensor) -> int | None:
    """What tells the logits of one model from another's: the first parameter that they were computed from."""
    nodes = [x.grad_fn]
    for node in nodes:  # which grows
        if node is None or len(nodes) > MOST_NODES:
            continue
        if isinstance(leaf := getattr(node, "variable", None), nn.Parameter):
            return id(leaf)
        nodes += [following for following, _ in node.next_functions]
    return None


def wrong_labels(
    logits: Tensor, labels: Tensor, ignore_index: int, ranks: list[int], in_parts: bool
) -> tuple[str, str] | None:
    """What these labels of a loss over ``ranks`` seem to be, and what mends it; None if they may well be right.

    ``in_parts``: whether the loss was given a count; then it may be of some of the labels that were counted.
    """
    called, given, rows = _called(), _given(), marked(labels)
    if called is not None and is_whole(labels):
        if set(dist.get_process_group_ranks(resolve_group(called.rows.group_name))) <= set(ranks):
            got = f"{labels.shape[1]} rows, of the whole sequence, beside {called.shape[1]} of attention"
            return (
                got,
                'of gathered logits take F.cross_entropy, or cross_entropy over mesh["dp"], without the cp ranks',
            )
        return None
    if called is not None:
        if rows is not None and rows.group_name == called.rows.group_name and rows != called.rows:
            got = f"those of {rows.layout}, {rows.seq_len} tokens, beside attention in {called.rows.layout}"
            return f"{got}, {called.rows.seq_len}", "shard tokens and labels with one ShardedSequence"
        batch, length = called.shape
        if labels.shape == (batch,) and 1 < length < called.rows.seq_len and _of_one_row(logits, length):
            return "one for each sequence, beside logits of this rank's rows alone, such as logits[:, -1]", _LAST
        short = labels.shape[1] == length - 1 if labels.ndim == 2 else labels.numel() == batch * (length - 1)
        part = in_parts and batch * length in COUNTED.get()
        if short and not part and length > 1 and called.rows.seq_len > length:
            return f"{length - 1} rows of {length}", _SHIFT
    if given is None or labels.ndim > 2 or labels.is_floating_point():
        return None
    with without_function_modes():  # a watch over the model's forward may be on, and see what is counted here
        found = _unlike_tokens(labels, ignore_index, given)
    return found if rows is None or (found is not None and found[0].startswith((_UNSHIFTED, _RANK))) else None


def tokens_given() -> str:
    """What the tokens that a loss is compared with are, for other ranks of their cp group."""
    given = _given()
    return "" if given is None else fingerprint(given.tokens)


def likeness(labels: Tensor, ignore_index: int) -> str:
    """Whether labels are the next tokens of this rank's rows, "next", or hardly any is, "other"; "" if nobody knows.

    Labels of one value may be padding, and tell nothing.
    """
    given = _given()
    if given is None or labels.ndim > 2 or labels.is_floating_point():
        return ""
    with without_function_modes():
        compared = _next_tokens(labels, ignore_index, given)
        if compared is None:
            return ""
        found, tokens = compared
        known = (found != ignore_index) & (tokens != ignore_index)
        values, equal = found[known], (found == tokens)[known]
        if len(values) < LEAST_KNOWN or bool((values == values[0]).all()):
            return ""
        return "next" if bool(equal.all()) else "other" if bool(4 * equal.sum() < len(equal)) else ""


def _next_tokens(labels: Tensor, ignore_index: int, given: Given) -> tuple[Tensor, Tensor] | None:
    """Labels as [B, rows], and the next tokens of these rows; None if these are no labels of the rows."""
    (batch, length), seq_len = given.tokens.shape, given.rows.seq_len
    own = given.layout.positions(seq_len, given.cp_size, given.cp_rank).to(given.tokens.device)
    if labels.numel() != batch * len(own) or labels.device != given.tokens.device:
        return None
    padded = torch.nn.functional.pad(given.tokens, (0, seq_len + 1 - length), value=ignore_index)
    return labels.reshape(batch, len(own)), padded[:, own + 1]


_LAST = "take them of the whole, logits = sequence.unshard(logits); most ranks do not hold the last token"
_UNSHIFTED = "the tokens themselves, not the next ones"
_RANK = "the labels of rank "
_SHIFT = "shift the whole labels and then shard them: the token after a shard's last row is another rank's"


LEAST_KNOWN = 4
"""Labels that must be known to call them those of other rows: fewer may be equal by chance."""


def _unlike_tokens(labels: Tensor, ignore_index: int, given: Given) -> tuple[str, str] | None:
    """By content: labels that are not the next tokens of this rank's rows, but of other ones."""
    (batch, length), (seq_len, device) = given.tokens.shape, (given.rows.seq_len, given.tokens.device)

    def positions(layout: Layout, rank: int = given.cp_rank) -> Tensor:
        return layout.positions(seq_len, given.cp_size, rank).to(device)

    own = positions(given.layout)
    if labels.numel() != batch * len(own) or labels.device != device:
        return None
    labels = labels.reshape(batch, len(own))
    padded = torch.nn.functional.pad(given.tokens, (0, seq_len + 1 - length), value=ignore_index)

    def are(tokens: Tensor) -> bool:
        if tokens.shape != labels.shape:
            return False
        known = (labels != ignore_index) & (tokens != ignore_index)
        return bool(known.sum() >= LEAST_KNOWN) and bool((labels == tokens).masked_select(known).all())

    if are(padded[:, own + 1]):
        return None
    local = padded[:, own]
    if are(torch.cat([local[:, 1:], torch.full_like(local[:, :1], ignore_index)], 1)):
        return "the next tokens within this rank's shard", _SHIFT
    for layout in (Contiguous(), ZigZag(), Striped()):
        if layout != given.layout and are(padded[:, positions(layout) + 1]):
            got = f"the labels of {layout.spec()} rows, beside tokens in {given.layout.spec()}"
            return got, 'cut them with sequence.shard({"labels": labels}), not by chunk or another layout'
    if are(local):
        return _UNSHIFTED, "shift the whole labels by one, and then shard them"
    for rank in range(given.cp_size):
        if rank != given.cp_rank and are(padded[:, positions(given.layout, rank) + 1]):
            return f"{_RANK}{rank}, on cp rank {given.cp_rank}", 'cut them with sequence.shard({"labels": labels})'
    return None
