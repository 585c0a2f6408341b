"""Which ranks' keys a mask_mod shows to each rank: computed once per layout, so that other keys are not sent.

Ranks must agree on what is sent before they send, and only evaluating mask_mod shows which pairs it keeps. So each rank
evaluates it on its own queries and the keys of all ranks, part by part. One all-gather of a flag per source rank gives
every rank the table. The table holds for the captured tensors as they were; a call that would read others is refused.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from cp_mesh._torch import funcol, times_written, untraced
from cp_mesh.comm.agreement import compare, refusing
from cp_mesh.comm.fingerprints import fingerprint
from cp_mesh.comm.store_messages import read_error, send_error
from cp_mesh.comm.waiting import wait_for
from cp_mesh.errors import RankMismatchError, UnsupportedError, refuse, written
from cp_mesh.flex.trace import trace
from cp_mesh.geometry.layouts import Layout
from cp_mesh.geometry.survey import say_sources
from cp_mesh.kernels.flex.programs import program
from cp_mesh.kernels.functions import ScalarFunction
from cp_mesh.sequence.sharded_sequence import ShardedSequence

PAIRS = 1 << 24
"""Pairs that are evaluated at once."""
FAILED = 2
"""The flag that a rank sends for all sources if it raised during the evaluation."""
AGAIN = "call create_block_mask again, or leave its sequence= out"


class Unchanged:
    """A snapshot of tensors, held weakly. Two are equal if they hold the same tensors, not written to in between.

    Snapshots of inference tensors are never equal, as those do not count writes.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [(weakref.ref(x), None if x.is_inference() else times_written(x)) for x in tensors]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Unchanged) or len(self._tensors) != len(other._tensors):
            return False
        pairs = zip(self._tensors, other._tensors, strict=True)
        return all(x() is not None and x() is y() and before == now is not None for (x, before), (y, now) in pairs)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class Sources:
    """Which ranks' keys each rank needs, and the mask and sequence for which the table holds.

    Attributes:
        table: as written by `cp_mesh.geometry.survey.say_sources`.
        of_mask: the handle of mask_mod, and the numbers of batch rows and heads in which it differs.
        read: the tensors that mask_mod reads.
        place: name of the group, layout and padded length of the sequence.
    """

    table: str
    of_mask: tuple[str, tuple[int, int]]
    read: Unchanged
    place: tuple[str, Layout, int]

    def check(self, mask_mod: ScalarFunction, read: Sequence[Tensor], batch: int, heads: int) -> None:
        """Refuse another mask_mod, other numbers of batch rows and heads, and captured tensors written to since."""
        if (mask_mod.handle, mask_mod.sizes(batch, heads)) != self.of_mask or Unchanged(read) != self.read:
            expected = "mask_mod, what it reads, and B and H as they were when the mask was made for a sequence"
            refuse("block_mask", expected, "others, or tensors that were written to since", AGAIN)

    def of_call(self, *place: str | Layout | int) -> str:
        """The table, for `AttentionSpec`; refuses a call with another group, layout or length."""
        if place != self.place:
            refuse("block_mask", f"one for the call's group, layout and length, {written(place)}", self.place, AGAIN)
        return self.table


class _Asked(NamedTuple):
    """The arguments of an evaluation, equal on all ranks.

    Attributes:
        function, read: mask_mod, and the tensors that it reads.
        sizes: the numbers of batch rows and heads in which it differs.
        layout, seq_len: of the padded sequence.
        keys: positions of each rank's keys.
    """

    function: ScalarFunction
    read: tuple[Tensor, ...]
    sizes: tuple[int, int]
    layout: Layout
    seq_len: int
    keys: list[Tensor]

    @property
    def said(self) -> dict[str, str]:
        """The same as text, which ranks compare."""
        place = {"layout": self.layout.spec(), "seq_len": f"{self.seq_len}"}
        return place | {"B and H": f"{self.sizes}", "mask_mod": self.function.said}


@untraced
def find_sources(
    mask_mod: Callable[..., Tensor], batch: int | None, heads: int | None, length: int, sequence: ShardedSequence
) -> Sources:
    """Evaluate mask_mod on all pairs of this rank's queries, and share the result with the sequence's other ranks.

    ``length``: of the sequence, with or without its padding. Without it, padding gets the index of the last token.
    """
    if not isinstance(sequence, ShardedSequence):
        refuse("create_block_mask: sequence", "a ShardedSequence", type(sequence).__name__, "it has mesh and layout")
    group = sequence.mesh.get_group()
    with refusing(group):
        asked = _checked(mask_mod, batch, heads, length, sequence, group)
    kind = "create_block_mask", *asked.said.values()
    compare(
        group,
        kind,
        lambda: (
            {"call": "create_block_mask", **asked.said, "layout index": fingerprint(asked.layout.tensor)}
            | {f"captured tensor {i} of mask_mod": fingerprint(x) for i, x in enumerate(asked.read)}
        ),
    )
    flags = _gather_flags(group, _look(asked, group), asked.keys[0].device)
    if (failed := (flags == FAILED).any(1)).any():
        error = read_error(dist.get_process_group_ranks(group))
        raise RankMismatchError(f"create_block_mask: cp rank {failed.argmax()} raised while this rank did not: {error}")
    of_mask, place = (asked.function.handle, asked.sizes), (group.group_name, asked.layout, asked.seq_len)
    return Sources(say_sources(flags == 1), of_mask, Unchanged(asked.read), place)


def _checked(
    mask_mod: Callable[..., Tensor],
    batch: int | None,
    heads: int | None,
    length: int,
    sequence: ShardedSequence,
    group: dist.ProcessGroup,
) -> _Asked:
    """The arguments of the evaluation; refuses those that it cannot serve."""
    layout, what = sequence.layout, "create_block_mask with a sequence"
    if sequence.length is not None and length not in (sequence.length, sequence.seq_len):
        refuse(f"{what}: Q_LEN", f"{sequence.length}, its length", length, "sequence.for_batch(Q_LEN) has this length")
    seq_len = sequence.seq_len or length
    device = torch.empty(0, device=sequence.mesh.device_type).device
    last = length - 1 if length < seq_len else None
    given = "mask_mod", mask_mod, torch.empty(0, device=device), last, 0 not in (batch, heads, seq_len)
    (function, read), (_, again) = trace(*given), trace(*given)
    assert function is not None
    if any(x is not y for x, y in zip(read, again, strict=True)):
        refuse(what, "a mask_mod that reads the same tensors in each call", "it makes one", "make it outside mask_mod")
    for name, number, used in zip(("B", "H"), (batch, heads), function.sizes(2, 2), strict=True):
        if number is None and used > 1:
            refuse(f"{what}: {name}", "a number, since mask_mod reads the index", None, f"pass {name}=")
    if any(x.is_inference() for x in read):
        got = "tensors of torch.inference_mode, which do not count writes"
        refuse(what, "a mask_mod of plain tensors", got, "leave sequence= out", UnsupportedError)
    function.check(read, (batch or 1, heads or 1, seq_len, seq_len))
    keys = [layout.positions(seq_len, group.size(), i).to(device) for i in range(group.size())]
    return _Asked(function, read, function.sizes(batch or 1, heads or 1), layout, seq_len, keys)


def _look(asked: _Asked, group: dist.ProcessGroup) -> list[bool]:
    """Whether this rank's queries see each source; reports an error to the other ranks before raising it."""
    try:
        with refusing(group, known=True), torch.no_grad():
            own = asked.keys[group.rank()]
            found = [_seen(asked.function, x, asked.sizes, own, asked.keys) for x in _as_read(asked.read)]
    except Exception as error:  # the other ranks wait in the all-gather for this rank's flags
        send_error(f"{type(error).__name__}: {error}", dist.get_process_group_ranks(group))
        _gather_flags(group, [FAILED] * group.size(), asked.keys[0].device)
        raise
    return [any(of_source) for of_source in zip(*found, strict=True)]


def _gather_flags(group: dist.ProcessGroup, seen: Sequence[int], device: torch.device) -> NDArray[np.uint8]:
    """All-gather the flags: a row for each rank of the group, a column for each source."""
    own, name = torch.tensor(seen, dtype=torch.uint8, device=device), group.group_name
    flags = wait_for(funcol.all_gather_into_tensor(own, len(seen), name), "create_block_mask", name)
    return flags.view(len(seen), -1).cpu().numpy()


def _as_read(read: Sequence[Tensor]) -> list[list[Tensor]]:
    """The tensors in the dtypes in which calls read them: float32 and float64, which may show different pairs."""
    rounded = any(x.is_floating_point() and x.dtype != torch.float64 for x in read)
    return [
        [x.detach().to(torch.promote_types(x.dtype, dtype)) if x.is_floating_point() else x for x in read]
        for dtype in ((torch.float32, torch.float64) if rounded else (torch.float64,))
    ]


def _seen(
    mask_mod: ScalarFunction, read: Sequence[Tensor], sizes: tuple[int, int], own: Tensor, keys: Sequence[Tensor]
) -> list[bool]:
    """For each source: whether some query at the positions ``own`` sees one of its keys."""
    if not len(own):
        return [False] * len(keys)
    b, h = (torch.arange(n, device=own.device) for n in sizes)
    side = math.isqrt(PAIRS // max(1, sizes[0] * sizes[1])) or 1
    num_q, num_k = min(side, len(own)), min(side, max(map(len, keys)))

    def some(b: Tensor, h: Tensor, i: Tensor, j: Tensor, *read: Tensor) -> Tensor:
        return mask_mod.of_pairs(None, (b, h, i, j), read).any()

    def parts(x: Tensor, num: int) -> list[Tensor]:
        """Parts of equal length, so that one program serves all; the last position fills up the last part."""
        at = torch.arange(num, device=x.device)
        return [x[(at + begin).clamp(max=len(x) - 1)] for begin in range(0, len(x), num)]

    queries = parts(own, num_q)[::-1]  # under a causal mask the last queries see most keys
    inputs = b, h, own[:num_q], own.new_zeros(num_k), *read
    run = program(("sources", mask_mod.handle), inputs, lambda options: some)
    return [any(bool(run(b, h, i, j, *read)) for j in parts(x, num_k) for i in queries) for x in keys]
