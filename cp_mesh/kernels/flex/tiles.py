"""The functions of one tile, of local indices: users' score_mod and mask_mod, and the call's mask.

Tiles differ in data, never in code: positions of rows, the mask there, the first head and batch row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from cp_mesh._torch import FakeTensorMode
from cp_mesh.geometry.host_tensors import lasting
from cp_mesh.kernels.contract import Pairs, Steps
from cp_mesh.kernels.flex.programs import traced
from cp_mesh.kernels.flex.reads import reads_of
from cp_mesh.kernels.scores import Scores, name_of_captured

TABLES = 16
"""Maximum number of cache entries per tile: rows, numbers and, for recent masks, tables of blocks."""
ENDS = 10, 11
"""Where a tile's numbers hold its numbers of queries and of keys, without padding."""
_index = torch.ops.aten.index.Tensor


def rows_of(cover: Pairs) -> tuple[Tensor, ...]:
    """The tensors that functions read at a tile's rows, padded like q, k and v with copies of the last row.

    Returns:
        Positions int32 [Sq] and [Sk], a single one repeated: for a tensor of one element Inductor drops the index, and
        then cannot scatter to an index computed from it. Then the first and last query position of each key [Sk], and
        with documents their ids [Sq] and [Sk]; [B, Sq] and [B, Sk] if batch rows differ.
    """
    mask, q_pos, k_pos = cover.mask, padded(cover, cover.q_pos, False, 0), padded(cover, cover.k_pos, True, 0)
    first, last, k_ids = mask.key_intervals(k_pos)
    positions = (x.int().repeat(2 if len(x) == 1 else 1) for x in (q_pos, k_pos))
    return *positions, *(x.squeeze(0) for x in (first, last, mask.document_ids(q_pos), k_ids) if x is not None)


def padded(cover: Pairs, x: Tensor, of_keys: bool, dim: int = 2) -> Tensor:
    """Pad rows of a tile to its compiled size with copies of the last row, in dense memory; x itself without sizes.

    Functions give the same result for a copy and its row, in the same block of pairs. The result has its dims in order
    for keys, as they arrive from other ranks, and in x's memory order for queries, which saves a copy.
    """
    if cover.sizes is None:
        return x
    order = [*range(x.ndim)] if of_keys else sorted(range(x.ndim), key=x.stride, reverse=True)
    back = [order.index(i) for i in range(x.ndim)]
    x, dim = x.permute(order), order.index(dim)
    if short := cover.sizes[of_keys] - x.shape[dim]:
        last = x.narrow(dim, x.shape[dim] - 1, 1).expand(*(short if i == dim else n for i, n in enumerate(x.shape)))
        return torch.cat([x, last], dim).permute(back)
    return x.contiguous().view(-1).view(x.shape).permute(back)  # gives dims of size 1 the strides of a copy too


class FlexTile:
    """The functions of one tile as PyTorch's operators take them: of local indices.

    ``computed``: compute positions from their `Steps` if they have any, instead of reading them. Padded tiles always
    read positions, since these have `Steps` in some batches only.
    """

    def __init__(self, cover: Pairs, scores: Scores, dtype: torch.dtype, computed: bool = True) -> None:
        self.scores, self._dtype = scores, dtype
        self.rows = kept_of(cover, ("rows",), lambda: rows_of(cover))
        device = cover.q_pos.device
        ends = len(cover.q_pos), len(cover.k_pos)
        steps = [(x or Steps(0, 0, 0, 0)) for x in cover.steps]
        numbers = scores.first_batch, scores.first_head, *steps[0], *steps[1], *ends
        key, int32 = ("numbers", numbers), torch.int32
        self._numbers = kept_of(cover, key, lambda: torch.tensor(numbers, dtype=int32, device=device))
        self._is_padded = cover.sizes is not None
        self._stepped = tuple(computed and x is not None and not self._is_padded for x in cover.steps)
        functions = scores.score_mod, scores.mask_mod
        sizes = scores.seq_len, max(scores.first_head, scores.first_batch)
        self._score, self._mask = (None if x is None else reads_of(x, *sizes) for x in functions)
        num = 0 if scores.score_mod is None else scores.score_mod.num_captured
        self.reads = () if self._score is None else self._score.reads
        of_score = () if self._score is None else self._score.of_captured(scores.captured[:num])
        of_mask = () if self._mask is None else self._mask.of_captured(scores.captured[num:])
        self.of_score = self._numbers, *self.rows[:2], *of_score
        self.of_mask = self._numbers, *self.rows, *of_mask
        self.wanted = tuple(name_of_captured(read.source) in scores.wanted for read in self.reads)
        codes = tuple(
            x and (x.handle, reads and reads.key) for x, reads in zip(functions, (self._score, self._mask), strict=True)
        )
        self.key = codes, len(self.rows), self.wanted, self._stepped, self._is_padded
        self.cover = cover

    def score(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, *tensors: Tensor) -> Tensor:
        if self._score is None:
            return score
        score = score.to(self._dtype)
        reads = tensors[3:]
        return self._score.graph(score, *self._globals(b, h, i, j, *tensors[:3]), *reads).to(self._dtype)

    def mask(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, *tensors: Tensor) -> Tensor:
        numbers, q_pos, k_pos, first, last, *ids = tensors[: 1 + len(self.rows)]
        indices = self._globals(b, h, i, j, numbers, q_pos, k_pos)

        def read(x: Tensor, row: Tensor) -> Tensor:
            return _index(x, [b, row] if x.ndim == 2 else [row])

        seen = (indices[2] >= read(first, j)) & (indices[2] <= read(last, j))
        if ids:
            seen = seen & (read(ids[0], i) == read(ids[1], j))
        if self._is_padded:
            of_q, of_k = (_index(numbers, [b * 0 + n]) for n in ENDS)
            seen = seen & (i < of_q) & (j < of_k)
        return seen if self._mask is None else seen & self._mask.graph(*indices, *tensors[1 + len(self.rows) :])

    def _globals(
        self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, numbers: Tensor, *positions: Tensor
    ) -> tuple[Tensor, ...]:
        """Convert local indices to global ones."""

        def number(n: int) -> Tensor:
            return _index(numbers, [b * 0 + n])

        def position(at: int, row: Tensor) -> Tensor:
            if not self._stepped[at]:
                return _index(positions[at], [row])
            split, first, second, step = map(number, range(2 + 4 * at, 6 + 4 * at))
            return torch.where(row < split, first, second) + step * row

        return b + number(0), h + number(1), position(0, i), position(1, j)

    def joint(self, dtype: torch.dtype) -> GraphModule:
        """The graph of the gradients of a score of this dtype and of `of_score`, None if not wanted."""
        wanted = (False,) * (len(self.of_score) - len(self.wanted)) + self.wanted

        def joint(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, grad: Tensor, *tensors: Tensor) -> Any:
            score = score.to(self._dtype).detach().requires_grad_()
            tensors = tuple(x.detach().requires_grad_(w) for x, w in zip(tensors, wanted, strict=True))
            value = self.score(score, b, h, i, j, *tensors)
            inputs = [score, *(x for x, w in zip(tensors, wanted, strict=True) if w)]
            if not value.requires_grad:
                return [torch.zeros_like(score), None, None, None, None, *[None] * len(tensors)]
            dscore, *found = torch.autograd.grad(value, inputs, grad.to(self._dtype), allow_unused=True)
            grads = iter(found)
            dscore = torch.zeros_like(score) if dscore is None else dscore
            return [dscore, None, None, None, None, *(next(grads) if w else None for w in wanted)]

        # Traced on the CPU: autograd's thread for a GPU may wait for this one. Each input is a separate fake tensor, as
        # tracing goes by identity.
        device, mode = self.of_score[0].device, FakeTensorMode()
        with mode:
            scalars = (torch.empty((), dtype=x, device="cpu") for x in (dtype, *[torch.int32] * 4, dtype))
            captured = (torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu") for x in self.of_score)
            inputs = *scalars, *captured
        graph = traced(joint, inputs)
        for node in graph.graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = node.kwargs | {"device": device}
        graph.recompile()
        return graph

    def with_gradients(self, of_score: Sequence[Tensor], graded: Sequence[bool]) -> tuple[Tensor, ...]:
        """``of_score``; on the CPU with requires_grad: the eager operator returns gradients of such tensors only."""
        others = len(of_score) - len(self.wanted)
        if of_score[0].device.type != "cpu":
            return tuple(of_score)
        reads = (x.detach().requires_grad_(w) for x, w in zip(of_score[others:], graded, strict=True))
        return *of_score[:others], *reads


def kept_of(cover: Pairs, key: tuple[Hashable, ...], make: Callable[[], Any]) -> Any:
    """The cached result of ``make`` for a tile and key; above `TABLES` entries the oldest one is dropped."""
    name = "flex", *key
    if name not in cover.kept:
        of_flex = [k for k in cover.kept if isinstance(k, tuple) and k[:1] == ("flex",)]
        if len(of_flex) >= TABLES:
            del cover.kept[of_flex[0]]
        with lasting():
            cover.kept[name] = make()
    return cover.kept[name]
