"""The library's own Triton attention kernel: any mask, layout and score term, head dims up to 256, a gradient of lse.

It evaluates the mask at the positions of its rows, so it supports windows, documents, key padding, a prefix and
permuted layouts, and skips blocks of pairs that the mask excludes (`cp_mesh.kernels.triton_visits`). The backward is
one kernel for dk and dv, one for dq and, if needed, one for the gradient of a bias. All sum in a fixed order.

Nothing waits for the device. A compiled variant depends on head dims, group size, dtypes and score terms, and on
whether there are positions, documents and aligned rows; it does not depend on lengths, bounds, positions or document
ids. Block sizes come from a static table, so that all ranks compute alike. A variant must be compiled before a CUDA
graph captures it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cp_mesh.geometry.host_tensors import lasting
from cp_mesh.geometry.mask import Band
from cp_mesh.kernels.contract import Capability, Pairs
from cp_mesh.kernels.merge import BackwardTile, Kernel
from cp_mesh.kernels.scores import ADDED, ScoreGradients, Scores

MAX_ROWS = 1 << 30  # per tile: band bounds and local indices have 32 bits
LOG2_E = math.log2(math.e)
LEAST_UNIT = 1e-6  # minimum unit of scores: terms are divided by it, and maxima need it positive
BIAS_BY_BLOCKS = True  # load the bias by block copies that overlap the products if possible, not pair by pair
MAX_KEPT = 1 << 18  # largest list of blocks that is cached for other layers: 1 MiB


@dataclass(frozen=True)
class Blocks:
    """Block sizes of a kernel: rows of queries and of keys, powers of two, 16 or more."""

    q: int
    k: int
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True)
class Config:
    """Block sizes of all kernels; ``apart``: dk and dv in two launches, as both sums do not fit in registers."""

    forward: Blocks
    key_gradients: Blocks
    query_gradients: Blocks
    apart: bool = False


def config_for(dtype: torch.dtype, head_dim: int, scored: bool = False, capability: tuple[int, int] = (9, 0)) -> Config:
    """Block sizes from the static table; ``head_dim`` is the larger one, ``scored`` whether scores have features.

    Before Hopper a program has less shared memory: 163 KiB on compute capability 8.0, then 99.
    """
    if dtype != torch.float32 and capability < (9, 0) and head_dim > (128 if capability == (8, 0) else 64):
        return OLDER_CONFIG
    if dtype != torch.float32 and scored and head_dim > 128:
        return WIDE_SCORED_CONFIG
    configs = FLOAT_CONFIGS if dtype == torch.float32 else HALF_CONFIGS
    return next(config for largest, config in configs if head_dim <= largest)


# By the largest head dim. For 128, the fastest on a Hopper GPU; for others, similar sizes that spill no registers.
HALF_CONFIGS = (
    (64, Config(Blocks(64, 64, 4, 3), Blocks(64, 64), Blocks(64, 64, 4, 3))),
    (128, Config(Blocks(64, 64, 4, 3), Blocks(64, 64), Blocks(128, 64, 8, 3))),
    (256, Config(Blocks(128, 32, 8), Blocks(32, 128, 8), Blocks(128, 32, 8), apart=True)),
)
OLDER_CONFIG = Config(Blocks(64, 32), Blocks(32, 32), Blocks(64, 16), apart=True)
WIDE_SCORED_CONFIG = Config(Blocks(64, 32), Blocks(32, 64), Blocks(64, 16), apart=True)
# Tensor cores have no exact fp32 products. Products are computed in registers, which only fit small blocks.
FLOAT_CONFIGS = (
    (64, Config(Blocks(32, 16), Blocks(32, 16), Blocks(32, 16))),
    (128, Config(Blocks(16, 32, 8), Blocks(16, 32, 8), Blocks(16, 32, 8))),
    (256, Config(Blocks(32, 16, 8), Blocks(16, 32, 8), Blocks(32, 16, 8))),
)


def triton_kernel(config: Config | None = None) -> Kernel:
    """The kernel, with block sizes from the table or, for tests, as given."""
    return Kernel(
        "triton",
        Capability(
            devices=("cuda",),
            dtypes=(torch.float32, torch.bfloat16, torch.float16),
            compute_capability=(8, 0),
            covers=("full", "causal", "window", "pairs"),
            max_head_dim=256,
            v_head_dim=True,
            differentiable_lse=True,
            features=frozenset({"softcap", "alibi_slopes", "bias", "dropout"}),
            lacking=_lacks,
        ),
        partial(_forward, config),
        partial(_backward, config),
        int64_offsets=True,
        uses_delta=True,
        one_tile=True,
    )


def _lacks() -> str | None:
    found = "triton" in sys.modules or find_spec("triton") is not None
    return None if found else "package triton (pip install triton)"


def _forward(
    config: Config | None, q: Tensor, k: Tensor, v: Tensor, cover: Band | Pairs, scores: Scores
) -> tuple[Tensor, Tensor]:
    from cp_mesh.kernels.triton_forward import forward_kernel

    config = config or config_for(q.dtype, max(q.shape[3], v.shape[3]), bool(scores.features), _capability(q))
    out, lse = _empty_like(q, v.shape[3]), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):
        rows = None if isinstance(cover, Band) else _mask_rows(cover, (config.forward,))
        _Launch(cover, rows, scores, q)(forward_kernel, config.forward, (q, k, v), (), (out, lse))
    return out, lse


def _backward(
    config: Config | None, t: BackwardTile
) -> tuple[Tensor, Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, ScoreGradients]:
    from cp_mesh.kernels.triton_backward import bias_gradient_kernel, key_gradients_kernel, query_gradients_kernel

    assert t.delta is not None, "uses_delta is set"
    scores, cover = t.scores, t.cover
    assert isinstance(cover, Band | Pairs), "choose_kernel gives sequences to kernels that support them"
    largest = max(t.q.shape[3], t.v.shape[3])
    config = config or config_for(t.q.dtype, largest, bool(scores.features), _capability(t.q))
    by_key, by_query = config.key_gradients, config.query_gradients
    dq = _empty_like(t.q, t.q.shape[3])
    dk, dv = (_empty_like(x, x.shape[3]) if into is None else into for x, into in ((t.k, t.dk), (t.v, t.dv)))
    # scaled once per tile, not once per block of keys; inf makes all weights of a row 0
    rows_read = (torch.where(t.lse == -torch.inf, torch.inf, t.lse * LOG2_E).contiguous(), t.delta.contiguous())
    read = (t.q, t.k, t.v, t.dout)
    parts = _ScoreParts(scores, t.q, by_query)
    with torch.cuda.device_of(t.q):
        rows = None if isinstance(cover, Band) else _mask_rows(cover, (by_key, by_query))
        launch = _Launch(cover, rows, scores, t.q)
        for written in ((dk, None), (None, dv)) if config.apart else ((dk, dv),):
            launch(key_gradients_kernel, by_key, read, rows_read, written, of_keys=True)
        launch(query_gradients_kernel, by_query, read, rows_read, (dq,), (parts.slopes,))
        if parts.bias is not None and t.q.numel():
            launch.bias_gradient(bias_gradient_kernel, by_query, read, rows_read, parts.bias)
    return (dq, dk, dv, parts.sum()) if scores.wanted else (dq, dk, dv)


def _capability(x: Tensor) -> tuple[int, int]:
    """Of a GPU; on CPUs, where kernels are interpreted or compiled alone, that of Hopper."""
    return torch.cuda.get_device_capability(x.device) if x.is_cuda else (9, 0)


def _empty_like(x: Tensor, dim: int) -> Tensor:
    """An empty [B, H, S, dim] with heads and rows in x's memory order, so that the result needs no copy."""
    B, H, S, _ = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty((B, S, H, dim)).transpose(1, 2)
    return x.new_empty((B, H, S, dim))


class _ScoreParts:
    """Buffers for the wanted gradients of scores."""

    def __init__(self, scores: Scores, q: Tensor, blocks: Blocks) -> None:
        B, H, num_q, _ = q.shape
        shape = (B, H, -(-num_q // blocks.q))

        def zeros(name: str, *shape: int) -> Tensor | None:
            return torch.zeros(shape, dtype=torch.float32, device=q.device) if name in scores.wanted else None

        self.slopes = zeros("alibi_slopes", *shape)
        self.bias = None if scores.bias is None else zeros("bias", *scores.bias.shape)

    def sum(self) -> ScoreGradients:
        slopes = None if self.slopes is None else self.slopes.sum((0, 2))
        found = {"alibi_slopes": slopes, "bias": self.bias}
        return ScoreGradients({name: x for name, x in found.items() if x is not None})


class _Launch:
    """Launches kernels on one tile. Kernels take the tensors that they read first, then the tensors that they write."""

    def __init__(self, cover: Band | Pairs, rows: _MaskRows | None, scores: Scores, q: Tensor) -> None:
        assert not (scores.needs_positions and rows is None), "the plan passes positions"
        self._cover, self._rows, self._scores = cover, rows, scores
        self._words = _dropout_words(cover, scores, q) if scores.dropout_p else None

    def __call__(
        self,
        kernel: Any,
        blocks: Blocks,
        read: Sequence[Tensor],
        rows: Sequence[Tensor],
        written: Sequence[Tensor | None],
        more: Sequence[Any] = (),
        *,
        of_keys: bool = False,
        grid: tuple[int, ...] | None = None,
        **flags: int,
    ) -> None:
        """Launch a kernel.

        Args:
            kernel, blocks: what to launch.
            read: q, k, v and, in a backward, dout, with unit last stride.
            rows: in a backward, lse and delta, contiguous.
            written: results: tensors of four dims with unit last stride, and lse.
            more: additional arguments of the kernel.
            of_keys: a program owns a block of keys, not of queries.
            grid: the launch grid; None: a program per block, which may load the bias by blocks.
            flags: additional compile-time constants of the kernel.
        """
        q, k, v = read[:3]
        num_q, num_k = q.shape[2], k.shape[2]
        blocks_of = [x for x in (*read, *written) if x is not None and x.ndim == 4]
        assert max(num_q, num_k) < MAX_ROWS and all(x.stride(3) == 1 or x.shape[3] == 1 for x in blocks_of)
        one_each = grid is None
        if grid is None:
            num_blocks = -(-num_k // blocks.k) if of_keys else -(-num_q // blocks.q)
            grid = (q.shape[0] * (k if of_keys else q).shape[1] * num_blocks,)
        if not min(grid):
            return
        affine = not self._scores.features.isdisjoint(ADDED)
        described, sizes = all(_describable(x) for x in read), (blocks.q, blocks.k, blocks.k, blocks.q)
        bias_blocks = self._bias_blocks(blocks, q) if one_each else None
        step = 0 if bias_blocks is None else 1
        pairs = None if self._rows is None else self._rows.visits(blocks, not of_keys, affine, step)
        tensors, numbers = _score_arguments(self._scores, self._words)
        kernel[grid](
            *((_descriptor(x, size) for x, size in zip(read, sizes, strict=False)) if described else read),
            *rows,
            *written,
            *(None if described else x.stride()[:3] for x in read),
            *(None if x is None else x.stride()[:3] for x in written if x is None or x.ndim == 4),
            pairs,
            tensors,
            numbers,
            q.shape[1],
            num_q,
            num_k,
            1 if pairs is None else len(pairs[0]),
            *(_bounds(self._cover, num_q, num_k) if isinstance(self._cover, Band) else (0, 0)),
            self._scores.scale,
            *more,
            *((bias_blocks,) if one_each else ()),
            GROUP=q.shape[1] // k.shape[1],
            HEAD_DIM=q.shape[3],
            V_HEAD_DIM=v.shape[3],
            BLOCK_DIM=block_dim(q.shape[3]),
            BLOCK_V_DIM=block_dim(v.shape[3]),
            BLOCK_Q=blocks.q,
            BLOCK_K=blocks.k,
            PAIRS=pairs is not None,
            DOCUMENTS=pairs is not None and pairs[3] is not None,
            SCALED=self._scores.scale < LEAST_UNIT,
            POSITIONS=affine,
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
            **flags,
        )

    def _bias_blocks(self, blocks: Blocks, q: Tensor) -> Any:
        """A descriptor of blocks of the bias if neighbouring keys have neighbouring columns; else None."""
        bias = self._scores.bias
        if bias is None or not (isinstance(self._cover, Pairs) and self._cover.adjacent and BIAS_BY_BLOCKS):
            return None
        whole = bias.shape[2] == q.shape[2] and bias.stride(3) == 1
        return _descriptor(bias, blocks.q, blocks.k) if whole and q.element_size() <= 2 and _describable(bias) else None

    def bias_gradient(
        self, kernel: Any, blocks: Blocks, read: Sequence[Tensor], rows: Sequence[Tensor], dbias: Tensor
    ) -> None:
        """Launch a program for each block of dbias, which sums over the dims that dbias broadcasts."""
        q, k = read[:2]
        each = [size == whole for size, whole in zip(dbias.shape, q.shape[:3], strict=False)]
        counts = (q.shape[0], q.shape[1], -(-q.shape[2] // blocks.q))
        others = math.prod(count if own else 1 for own, count in zip(each, counts, strict=True))
        self(
            kernel, blocks, read, rows, (dbias,), (q.shape[0],), grid=(others, -(-k.shape[2] // blocks.k)),
            EACH_BATCH=each[0], EACH_HEAD=each[1], EACH_ROW=each[2],
        )  # fmt: skip


def _describable(x: Tensor) -> bool:
    """Whether to load blocks of [B, H, S, D] by descriptor (TMA); not for fp32, where pointers need fewer registers."""
    if x.element_size() > 2 or _capability(x) < (9, 0):
        return False
    strides = [stride for stride, size in zip(x.stride()[:3], x.shape, strict=False) if size > 1]
    aligned = x.data_ptr() % 16 == 0 and all(stride * x.element_size() % 16 == 0 for stride in strides)
    return aligned and x.numel() > 0 and 0 not in strides


def _descriptor(x: Tensor, rows: int, columns: int | None = None) -> Any:
    """A descriptor of blocks [rows, columns or head dim]. A dim of size 1 needs an aligned stride too: 16."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    strides = [16 if size == 1 else stride for stride, size in zip(x.stride()[:3], x.shape, strict=False)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, columns or block_dim(x.shape[3])])


def _dropout_words(cover: Band | Pairs, scores: Scores, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Dropout words, int32: first and second words of queries [B, H, Sq], words of keys [Sk]."""
    from cp_mesh.kernels.triton_dropout import words_kernel

    assert isinstance(cover, Pairs) and scores.dropout_seed is not None
    B, H, num_q, _ = q.shape
    queries, keys = (
        torch.empty(shape, dtype=torch.int32, device=q.device) for shape in ((2, B, H, num_q), cover.k_pos.shape)
    )
    for words, positions, count in ((queries, cover.q_pos, B * H), (keys, cover.k_pos, 1)):
        if words.numel():
            words_kernel[(-(-len(positions) // 256), count)](
                scores.dropout_seed, positions.contiguous(), words, len(positions), H, scores.first_head,
                scores.first_batch, KEYS=words is keys, ROWS=256,
            )  # fmt: skip
    return queries[0], queries[1], keys


def _score_arguments(
    scores: Scores, words: tuple[Tensor, Tensor, Tensor] | None
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """The kernels' arguments ``scores`` and ``numbers``."""
    slopes, bias = scores.alibi_slopes, scores.bias
    dropout = None if words is None else (*words, 1 / (1 - scores.dropout_p))
    tensors = (
        None if scores.softcap is None else float(scores.softcap),
        None if slopes is None else slopes.contiguous(),
        bias,
        dropout,
    )
    threshold = math.floor(scores.dropout_p * 2**32) - 2**31  # as int32
    columns, strides, each = 0, [0, 0, 0, 0], [0, 0]
    if bias is not None:
        columns = bias.shape[3]
        strides = [0 if size == 1 else stride for size, stride in zip(bias.shape[:3], bias.stride(), strict=False)]
        strides += [bias.stride(3)]
        each = [int(size > 1) for size in bias.shape[:2]]
    return tensors, (threshold, columns, *strides, *each)


def block_dim(dim: int) -> int:
    return max(16, 1 << (dim - 1).bit_length())


def _bounds(band: Band, num_q: int, num_k: int) -> tuple[int, int]:
    """Finite bounds (lo, hi) of ``lo <= i - j <= hi``: no distance is below -num_k or above num_q."""
    lo = -num_k if band.right is None else min(max(num_q - num_k - band.right, -num_k), num_q)
    hi = num_q if band.left is None else min(max(num_q - num_k + band.left, -num_k), num_q)
    return (lo, hi) if lo <= hi else (num_q, num_q)


def _mask_rows(cover: Pairs, blocks: tuple[Blocks, ...]) -> _MaskRows:
    """The `_MaskRows` of a cover, cached there for all layers, since it depends on the mask only."""
    if blocks not in cover.kept:
        with lasting():
            cover.kept[blocks] = _MaskRows(cover, blocks)
    rows: _MaskRows = cover.kept[blocks]
    return rows


class _GrainRows(NamedTuple):
    """Rows of queries or of keys, and bounds of their grains: the arguments of `grains_kernel`."""

    positions: Tensor
    firsts: Tensor
    lasts: Tensor
    ids: Tensor | None
    bounds: Tensor
    id_bounds: Tensor | None
    runs: Tensor


class _MaskRows:
    """A mask at the rows of a tile, on the device, for kernels with these block sizes."""

    def __init__(self, cover: Pairs, blocks: Sequence[Blocks]) -> None:
        self.grain = min(size for block in blocks for size in (block.q, block.k))
        firsts, lasts, k_ids = cover.mask.key_intervals(cover.k_pos)
        self._num_masks = len(firsts)
        at = cover.q_pos.int().expand(self._num_masks, -1).contiguous()
        self._q = self._bounded(cover.q_pos, at, at, cover.mask.document_ids(cover.q_pos))
        self._k = self._bounded(cover.k_pos, firsts, lasts, k_ids)
        self._visits: dict[tuple[Blocks, bool, bool, int], tuple[Any, ...]] = {}

    def _bounded(self, positions: Tensor, firsts: Tensor, lasts: Tensor, ids: Tensor | None) -> _GrainRows:
        from cp_mesh.kernels.triton_visits import grains_kernel

        num_masks, num_grains = self._num_masks, -(-len(positions) // self.grain)

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=positions.device)

        rows = _GrainRows(
            positions.contiguous(),  # kernels read all of these as contiguous
            firsts.contiguous(),
            lasts.contiguous(),
            None if ids is None else ids.expand(num_masks, -1).contiguous(),
            empty(4, num_masks, num_grains),
            None if ids is None else empty(2, num_masks, num_grains, dtype=ids.dtype),
            empty(3, num_grains),
        )
        if num_grains:
            grains_kernel[(num_grains, num_masks)](*rows, len(positions), GRAIN=self.grain, num_warps=1)
        return rows

    def visits(self, blocks: Blocks, keys_inside: bool, affine: bool, step: int = 0) -> tuple[Any, ...]:
        """The ``pairs`` of programs that own blocks of queries and loop over keys (``keys_inside``), or the reverse.

        With ``affine``, a block counts as masked unless its distances are affine and of one sign.
        With ``step`` not 0, its keys must also be ``step`` positions apart and begin at an aligned position.
        """
        if (kept := self._visits.get((blocks, keys_inside, affine, step))) is not None:
            return kept
        from cp_mesh.kernels.triton_visits import blocks_kernel

        q, k = self._q, self._k
        (outer, outer_rows), (inner, inner_rows) = ((q, blocks.q), (k, blocks.k))[:: 1 if keys_inside else -1]
        num_blocks, num_inner_blocks = -(-len(outer.positions) // outer_rows), -(-len(inner.positions) // inner_rows)
        shape = (self._num_masks, num_blocks, num_inner_blocks)
        with lasting():
            listed = torch.empty(shape, dtype=torch.int32, device=q.firsts.device)
            counts = torch.empty((*shape[:2], 2), dtype=torch.int32, device=listed.device)
        if num_blocks:
            blocks_kernel[(num_blocks, self._num_masks)](
                outer.bounds, outer.id_bounds, inner.bounds, inner.id_bounds,
                (outer.runs, inner.runs) if affine else None, listed, counts, outer.bounds.shape[2],
                inner.bounds.shape[2], len(inner.positions), step, INNER_KEYS=keys_inside,
                OUTER=outer_rows // self.grain, INNER=inner_rows // self.grain, INNER_ROWS=inner_rows, num_warps=4,
            )  # fmt: skip
        pairs = q.firsts, k.firsts, k.lasts, q.ids, k.ids, listed, counts, k.positions
        if listed.numel() <= MAX_KEPT:
            self._visits[blocks, keys_inside, affine, step] = pairs
        return pairs


TRITON = triton_kernel()
