"""PyTorch's FlexAttention as a kernel: users' score_mod and mask_mod, compiled by Inductor into its Triton templates.

A tile is a call of PyTorch's operator `flex_attention` or `flex_attention_backward`. The backward gets the lse over all
keys, so partial gradients sum to the full ones. Tiles differ in data, never in code: positions of rows, the mask there,
the first head and batch row. So a shape is compiled once, for all stages and ranks.

From bottom to top: `programs` compiles and caches, `bounds` bounds integers, `reads` rewrites users' functions for the
templates, `tiles` turns them into functions of a tile, and `blocks` finds the pairs to skip.

Sources: Dong et al. 2024, FlexAttention, arXiv:2412.05496; torch/_higher_order_ops/flex_attention.py of PyTorch 2.11.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from cp_mesh._torch import flex_lowering, flex_operators
from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.kernels.contract import Capability, Pairs
from cp_mesh.kernels.flex.blocks import blocks_of
from cp_mesh.kernels.flex.programs import program
from cp_mesh.kernels.flex.tiles import FlexTile, padded
from cp_mesh.kernels.merge import BackwardTile, Kernel
from cp_mesh.kernels.scores import FUNCTIONS, ScoreGradients, Scores, name_of_captured

_OPTIONS: dict[str, Any] = {
    "PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": False, "BLOCKS_ARE_CONTIGUOUS": False, "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False, "BACKEND": "TRITON", "RESULTS_IN_FLOAT32": 1,  # our own
}  # fmt: skip


def _stages(tile: FlexTile, q: Tensor, v: Tensor) -> dict[str, int]:
    """The number of stages that was fastest on an H200 (docs/log.md); PyTorch's choice if nothing was measured.

    One stage for reads at an index that is itself read: Triton would wait for a prefetched one in each block.
    """
    return {"num_stages": 1} if is_tuned(q, v) and any(read.chained and read.of_pairs for read in tile.reads) else {}


def is_tuned(q: Tensor, v: Tensor) -> bool:
    """Whether numbers of stages were measured for this device, head dim and dtype."""
    of_device = q.is_cuda and torch.cuda.get_device_capability(q.device) == (9, 0)
    return of_device and q.shape[3] == v.shape[3] == 128 and q.dtype.itemsize == 2


def _apart(blocks: Any) -> tuple[tuple[Tensor, ...], Callable[[Sequence[Tensor], Any], tuple[Any, ...]]]:
    """Split a BlockMask into its tensors and a function that makes the operators' argument from them and a mask_mod."""
    whole = blocks.as_tuple()
    at = [i for i, x in enumerate(whole) if isinstance(x, Tensor)]

    def together(tensors: Sequence[Tensor], mask_mod: Any) -> tuple[Any, ...]:
        parts = [*whole[:-1], mask_mod]
        for i, x in zip(at, tensors, strict=True):
            parts[i] = x
        return tuple(parts)

    return tuple(whole[i] for i in at), together


def _forward(q: Tensor, k: Tensor, v: Tensor, cover: Pairs, scores: Scores) -> tuple[Tensor, Tensor]:
    num_q = q.shape[2]
    q, k, v = padded(cover, q, False), padded(cover, k, True), padded(cover, v, True)
    tile = FlexTile(cover, scores, accumulation_dtype(q.dtype))
    of_blocks, together = _apart(blocks_of(tile, (*q.shape[:3], k.shape[2])))
    ends = len(of_blocks), len(of_blocks) + len(tile.of_score)
    chosen = _OPTIONS | _stages(tile, q, v)

    def make(options: dict[str, int]) -> Callable[..., Any]:
        flex_attention = flex_operators().flex_attention

        def function(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
            blocks = together(tensors[: ends[0]], tile.mask)
            given = tuple(tensors[ends[0] : ends[1]]), tuple(tensors[ends[1] :])
            out, lse, *_ = flex_attention(q, k, v, tile.score, blocks, scores.scale, chosen | options, *given)
            return out, lse * math.log(2)

        return function

    inputs = q, k, v, *of_blocks, *tile.of_score, *tile.of_mask
    key = "forward", tile.key, scores.scale, *chosen.items()
    out, lse = program(key, inputs, make, chosen.get("num_stages"))(*inputs)
    return out[:, :, :num_q], lse[:, :, :num_q]


def _backward(tile: BackwardTile) -> tuple[Tensor, Tensor, Tensor, ScoreGradients]:
    assert isinstance(tile.cover, Pairs) and tile.delta is not None
    num_q, num_k, scores = tile.q.shape[2], tile.k.shape[2], tile.scores
    q, dout, lse, delta = (padded(tile.cover, x, False) for x in (tile.q, tile.dout, tile.lse, tile.delta))
    k, v = (padded(tile.cover, x, True) for x in (tile.k, tile.v))
    # computed=False: if positions are computed, the assembler keeps parts of them across blocks, and registers spill.
    of = FlexTile(tile.cover, scores, tile.delta.dtype, computed=False)
    of_blocks, together = _apart(blocks_of(of, (*q.shape[:3], k.shape[2])))
    ends = len(of_blocks), len(of_blocks) + len(of.of_score)
    lse = lse.contiguous()  # the template reads it so
    chosen = _OPTIONS | _stages(of, q, v)

    def make(options: dict[str, int]) -> Callable[..., Any]:
        joint, flex_attention_backward = of.joint(q.dtype), flex_operators().flex_attention_backward
        outputs = joint.graph.output_node().args[0]
        graded = [x is not None for x in outputs[len(outputs) - len(of.wanted) :]]  # type: ignore[arg-type,index,union-attr]

        def function(
            q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, dout: Tensor, *tensors: Tensor
        ) -> Any:
            blocks = together(tensors[: ends[0]], of.mask)
            given = of.with_gradients(tensors[ends[0] : ends[1]], graded), tuple(tensors[ends[1] :])
            # The operator computes rowsum(dout * out) - dlse / log 2; with these inputs that is delta.
            out, dlse = dout.new_zeros(()).expand(dout.shape), delta * -math.log(2)
            graphs = of.score, joint
            *grads, found = flex_attention_backward(
                q, k, v, out, lse / math.log(2), dout, dlse, *graphs, blocks, scores.scale, chosen | options, *given
            )
            reads = found[len(found) - len(of.wanted) :]
            own = (x if there else None for x, there in zip(reads, graded, strict=True))
            return *grads, *(x for x, wanted in zip(own, of.wanted, strict=True) if wanted)

        return function

    inputs = q, k, v, lse, delta, dout, *of_blocks, *of.of_score, *of.of_mask
    key = "backward", of.key, scores.scale, *chosen.items()
    dq, dk, dv, *found = program(key, inputs, make, chosen.get("num_stages"))(*inputs)
    grads = ScoreGradients.zeros(scores, tile.delta.dtype)
    reads = (read for read, wanted in zip(of.reads, of.wanted, strict=True) if wanted)
    for read, grad in zip(reads, found, strict=True):
        if grad is not None:  # None if score_mod only detaches or compares it
            grads[name_of_captured(read.source)] += read.home(grad)
    return dq[:, :, :num_q], dk[:, :, :num_k], dv[:, :, :num_k], grads


def _lacks() -> str | None:
    """What is not installed. The operators, and the lowering that `programs` patches, are private to PyTorch."""
    if find_spec("triton") is None:
        return "package triton (pip install triton)"
    try:
        ops, lowering = flex_operators(), flex_lowering()
        found = hasattr(ops, "flex_attention") and hasattr(ops, "flex_attention_backward")
        found = found and hasattr(lowering, "FixedLayout") and hasattr(lowering, "empty_strided")
    except ImportError:
        found = False
    return None if found else f"the operators of flex_attention as in PyTorch 2.11 to 2.15 (found {torch.__version__})"


FLEX = Kernel(
    "flex",
    Capability(
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
        compute_capability=(8, 0),
        covers=("pairs",),
        max_head_dim=256,
        min_head_dim=16,  # Triton's minimum for products
        v_head_dim=True,
        differentiable_lse=True,
        features=frozenset(FUNCTIONS),
        deterministic_features=frozenset({"mask_mod"}),
        lacking=_lacks,
    ),
    _forward,
    _backward,
    uses_delta=True,
    rounds=False,
    one_tile=True,
)
