"""FlashAttention-4 (package flash-attn-4): its calls on tiles, bound once for each memory order.

It takes [B, S, H, D] views with unit last stride and rows aligned to 16 bytes, and writes gradients into such views.
Its lse follows `contract`; given the global out and lse it returns a tile's share of the gradients, rounded to the
inputs' dtype. Its softcap computes tanh with a relative error of 2⁻¹¹. What it compiles and launches is in
`flash_attn_4_package`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from cp_mesh.geometry.mask import Band
from cp_mesh.geometry.schedule import Rows
from cp_mesh.geometry.varlen import Segments, SequenceTable
from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.kernels.contract import Capability, KernelTile, Pairs
from cp_mesh.kernels.flash_attn_4_package import (
    MOST_SEQUENCES,
    FlashCall,
    Kernels,
    Launches,
    backward_launches,
    forward_launches,
    lacks,
    run_backward,
    run_forward,
)
from cp_mesh.kernels.merge import BackwardTile, Kernel
from cp_mesh.kernels.scores import Scores


def _head_dims(q: Tensor, k: Tensor, v: Tensor, *, backward: bool) -> tuple[int, int]:
    """The head dims to pad to: the package compiles equal ones, and (192, 128), but not all other pairs."""
    head_dim, v_head_dim, grouped = q.shape[3], v.shape[3], q.shape[1] != k.shape[1]
    if head_dim == v_head_dim or ((head_dim, v_head_dim) == (192, 128) and not (backward and grouped)):
        return head_dim, v_head_dim
    return max(head_dim, v_head_dim), max(head_dim, v_head_dim)


def _writable(buffer: Tensor | None, like: Tensor) -> Tensor:
    """The caller's buffer, or one on meta if the buffer's rows are not aligned to 16 bytes, which no kernel checks."""
    if buffer is not None and buffer.shape == like.shape:
        unit = 16 // buffer.element_size()
        if buffer.data_ptr() % 16 == 0 and all(stride % unit == 0 for stride in buffer.stride()[:-1]):
            return buffer
    return torch.empty_like(like, device="meta")


def _widen(x: Tensor, dim: int) -> Tensor:
    """Pad the last dim with zeros, which change no score and no output."""
    return x if x.shape[3] == dim else torch.nn.functional.pad(x, (0, dim - x.shape[3]))


def _narrow(x: Tensor, dim: int) -> Tensor:
    """Undo `_widen`; the same object if nothing changes, so that the caller sees that its buffer was used."""
    return x if x.shape[3] == dim else x[..., :dim]


def _forward(q: Tensor, k: Tensor, v: Tensor, cover: Band | Pairs | Segments, scores: Scores) -> tuple[Tensor, Tensor]:
    """A tile whose head dims may have to be padded; others are bound."""
    dim, v_dim = _head_dims(q, k, v, backward=False)
    q, k, v_ = _widen(q, dim), _widen(k, dim), _widen(v, v_dim)
    tile = KernelTile((0, q.shape[2]), (0, k.shape[2]), cover)
    out, lse = _bind_forward(tile, q, k, v_, scores)(q, k, v_, scores)
    return _narrow(out, v.shape[3]), lse


def _backward(t: BackwardTile, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """As `_forward`."""
    assert t.out is not None, "uses_delta is not set"
    dim, v_dim = _head_dims(t.q, t.k, t.v, backward=True)
    q, k, v, dout, out = *(_widen(x, dim) for x in (t.q, t.k)), *(_widen(x, v_dim) for x in (t.v, t.dout, t.out))
    tile, given = KernelTile((0, q.shape[2]), (0, k.shape[2]), t.cover), (dout, q, k, v, out, t.lse)
    run = _bind_backward(tile, *given, t.scores, t.dk, t.dv, deterministic)
    dq, dk, dv = run(*given, None, t.scores, t.dk, t.dv)
    return _narrow(dq, t.q.shape[3]), _narrow(dk, t.q.shape[3]), _narrow(dv, t.v.shape[3])


class _BoundTile:
    """A pass of a tile, as in `merge.BoundForward` and `merge.BoundBackward`.

    Args:
        tile, scores: of the pass.
        reads: the tensors that a call takes first, in its order: each with the tile's rows of it, and its place among
            the arguments.
        writes: its results, [B, H, n, D] or [B, H, n]: each with its place among the arguments, or None for a new
            tensor like it; and what its rows are filled with if some are outside of all blocks, else None.
        run, launches_of: functions of `flash_attn_4_package`.
    """

    def __init__(
        self, tile: KernelTile, scores: Scores, reads: Sequence[tuple[Tensor, Rows, int]],
        writes: Sequence[tuple[Tensor, int | None, float | None]], run: Callable[..., Kernels],
        launches_of: Callable[[FlashCall], Launches],
    ) -> None:  # fmt: skip
        cover = tile.cover
        assert isinstance(cover, Band | Segments), "choose_kernel gives tensor masks to kernels that read them"
        left, right = cover.left, cover.right
        assert left is None or right is None or left + right >= 0, "a schedule has no empty tiles"
        self.factors: Any = left, right, scores.scale, scores.softcap
        self.take = itemgetter(*(place for *_, place in reads))
        self.results = [(place, x.shape, x.stride(), x.dtype, fill) for x, place, fill in writes]
        rows_of = [(x, rows) for x, rows, _ in reads] + [(x, (0, x.shape[2])) for x, *_ in writes]
        batch_rows = _by_batch_row(cover, reads[0][0])
        self.calls = [(table, [_view(x, rows, i) for x, rows in rows_of]) for i, table in batch_rows]
        self.run, self.launches_of = run, launches_of
        self.kernels: Kernels = ()
        self.launches: list[Launches | None] = [None] * len(self.calls)  # those that skip the package

    def __call__(self, *given: Any) -> tuple[Tensor, ...]:
        every_bhsd: list[Tensor] = [*self.take(given)]
        for place, size, stride, dtype, fill in self.results:
            x = every_bhsd[0].new_empty_strided(size, stride, dtype=dtype) if place is None else given[place]
            if fill is not None:
                x.fill_(fill) if fill else x.zero_()
            every_bhsd.append(x)
        for i, (table, views) in enumerate(self.calls):
            views_bshd: Any = []
            for x, view in zip(every_bhsd, views, strict=True):
                views_bshd.append(x if view is None else x.as_strided(view[0], view[1], x.storage_offset() + view[2]))
            if (launches := self.launches[i]) is not None:
                for kernel, arguments in zip(self.kernels, launches(views_bshd), strict=True):
                    kernel(*arguments)
            else:
                call = FlashCall(*views_bshd[:3], *self.factors, table)  # type: ignore[call-arg]
                self.kernels = self.run(call, *views_bshd[3:])
                self.launches[i] = self.launches_of(call) if self.kernels else None
        return (*every_bhsd[-len(self.results) :],)


def _view(x: Tensor, rows: Rows, batch_row: int | None) -> tuple[Any, ...] | None:
    """Size, stride and first element of rows of a tensor [B, H, S, D] as [B, n, H, D], or of one batch row as
    [n, H, D]; of lse [B, H, S] as [B, H, n] or [H, n]. None for a tensor itself."""
    (B, H, _, *dim), (batch, head, row, *last) = x.shape, x.stride()
    num, first = rows[1] - rows[0], rows[0] * row
    size, stride = ((num, H, *dim), (row, head, *last)) if dim else ((H, num), (head, row))
    if batch_row is not None:
        return size, stride, first + batch_row * batch
    return None if (B, *size) == x.shape and not dim else ((B, *size), (batch, *stride), first)


def _gaps(tile: KernelTile) -> tuple[bool, bool]:
    """Whether some rows, and some keys, of a tile are outside of all its blocks."""
    if not isinstance(tile.cover, Segments):
        return False, False
    lens = [(blocks[:, 1::2] - blocks[:, 0::2]).sum(0).tolist() for blocks in tile.cover.blocks]
    sizes = tile.q[1] - tile.q[0], tile.k[1] - tile.k[0]
    return any(rows < sizes[0] for rows, _ in lens), any(keys < sizes[1] for _, keys in lens)


def _bind_forward(tile: KernelTile, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Any:
    """A `_BoundTile`; None for head dims that `_forward` pads."""
    if _head_dims(q, k, v, backward=False) != (q.shape[3], v.shape[3]):
        return None
    (B, H, _, _), num = q.shape, tile.q[1] - tile.q[0]
    out = q.new_empty((B, num, H, v.shape[3]), device="meta").transpose(1, 2)
    lse = out.new_empty((B, H, num), dtype=accumulation_dtype(q.dtype))
    out_fill, lse_fill = (0.0, float("-inf")) if _gaps(tile)[0] else (None, None)  # these rows have no key
    reads = (q, tile.q, 0), (k, tile.k, 1), (v, tile.k, 2)
    return _BoundTile(
        tile, scores, reads, ((out, None, out_fill), (lse, None, lse_fill)), run_forward, forward_launches
    )


def _bind_backward(
    tile: KernelTile, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, lse: Tensor, scores: Scores,
    dk: Tensor | None, dv: Tensor | None, deterministic: bool = False,
) -> Any:  # fmt: skip
    """As `_bind_forward`."""
    assert out is not None, "uses_delta is not set"
    if _head_dims(q, k, v, backward=True) != (q.shape[3], v.shape[3]):
        return None
    of_q, of_k, gaps, writes = slice(*tile.q), slice(*tile.k), _gaps(tile), []
    places = (q[:, :, of_q], None, 0, gaps[0]), (k[:, :, of_k], dk, 8, gaps[1]), (v[:, :, of_k], dv, 9, gaps[1])
    for like, buffer, place, has_gaps in places:
        grad = _writable(buffer, like)
        writes.append((grad, place if grad is buffer else None, 0.0 if has_gaps else None))
    reads = (q, tile.q, 1), (k, tile.k, 2), (v, tile.k, 3), (dout, tile.q, 0), (out, tile.q, 4), (lse, tile.q, 5)
    run = partial(run_backward, deterministic=True) if deterministic else run_backward
    return _BoundTile(tile, scores, reads, writes, run, backward_launches)


def _by_batch_row(cover: Band | Segments, x: Tensor) -> Iterator[tuple[int | None, SequenceTable | None]]:
    """Batch row and packed sequences of each call: a call takes sequences of one batch row; None and None for a band.

    Lengths are passed beside the begins, so there may be gaps between sequences. The kernel does not read or write
    rows and keys in gaps.
    """
    if not isinstance(cover, Segments):
        yield None, None
        return
    tables = cover.on(x.device)
    for row in range(x.shape[0]):
        t = tables[row if len(tables) > 1 else 0]
        for i in range(0, len(t.q_lens), MOST_SEQUENCES):
            j = i + MOST_SEQUENCES
            lens = t.q_lens[i:j], t.k_lens[i:j]
            yield row, SequenceTable(t.q_begins[i : j + 1], lens[0], t.k_begins[i : j + 1], lens[1], t.max_q, t.max_k)


_HAS = Capability(
    devices=("cuda",),
    dtypes=(torch.bfloat16, torch.float16),
    compute_capability=(9, 0),
    # it has Blackwell kernels too, with other limits of head dims; they were never run here
    only_on=((9, 0),),
    covers=("full", "causal", "window", "segments"),
    max_head_dim=256,
    head_dim_multiple=8,
    v_head_dim=True,
    # not tried with windows and sequences
    deterministic_covers=frozenset({"full", "causal"}),
    features=frozenset({"softcap"}),
    lacking=lacks,
)
_reproducible = Kernel(
    "fa4",
    _HAS,
    _forward,
    partial(_backward, deterministic=True),
    bind=(_bind_forward, partial(_bind_backward, deterministic=True)),
    # FlashAttention-4 treats other bands as windows, with which its deterministic backward was not tried.
    squares=True,
)
FA4 = Kernel("fa4", _HAS, _forward, _backward, bind=(_bind_forward, _bind_backward), reproducible=_reproducible)
