"""`TiledMLP`: a module that computes each token alone runs on a few rows at a time, and keeps its input only.

The forward runs tile after tile without a graph. The backward runs each tile again, with its graph, and adds the
gradients of weights in float32. The whole call is one node of autograd, so a weight gets its gradient once, as FSDP2
and DistributedDataParallel require. The idea is that of DeepSpeed's ALST (arXiv 2506.13996); the code is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from cp_mesh._torch import tree_unflatten, untraced
from cp_mesh.comm.agreement import exchange, refusing
from cp_mesh.errors import refuse
from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.training.tile_call import TiledCall, drawing, random_state
from cp_mesh.wrap import TILES, Style, replaced


class TiledMLP(Style):
    """Makes a module that computes each token alone, such as an MLP, run on a few rows at a time.

    The module keeps its inputs and nothing else for the backward, which computes each tile again. Outputs and gradients
    are those of the plain module, up to rounding; dropout draws other numbers. The first call computes some rows among
    others, in another order, and compares. It composes with FSDP2 around the module, checkpointing, autocast, frozen
    weights, and styles over tp inside. torch.compile leaves the module out of its graph; compile modules inside it.

    Every tensor among the arguments holds rows, [B, S, ...]; other arguments are passed on. Every output is a tensor
    [B, S, ...] or [B * S, ...], as router logits are, or None.

    Args:
        tiles: how many, the same on every rank. A module that communicates, as with expert parallelism, needs this.
            Every rank must call the module in the same step: name the block of experts, not one of them.
        tile_rows: or the most rows of a tile.
        dim: dim of the rows; dims before it belong to the batch.

    Raises:
        ArgumentError: on other arguments, or outputs that are no rows.
        UnsupportedError: at application, on a module with another style; in the first call, on every rank of the mesh,
            if the module mixes tokens or positions, writes buffers, attributes or its input, or reads tensors with a
            gradient that are neither arguments nor parameters. In any call, on modules inside that have hooks,
            `fully_shard` or a style over cp, on hooks of weights, on DTensors, and on weights that were changed or
            replaced before the backward.

    Example:
        >>> plan["layers.*.mlp"] = TiledMLP(tile_rows=8192)  # doctest: +SKIP
    """

    key, alone = TILES, "apply TiledMLP first, and not to attention"

    def __init__(self, *, tiles: int | None = None, tile_rows: int | None = None, dim: int = 1) -> None:
        given = [x for x in (tiles, tile_rows) if x is not None]
        if len(given) != 1 or not isinstance(given[0], int) or given[0] < 1:
            got = f"tiles={tiles}, tile_rows={tile_rows}"
            refuse("TiledMLP", "one of tiles= and tile_rows=, at least 1", got, "tile_rows=8192 suits most GPUs")
        self.tiles, self.tile_rows, self.dim = tiles, tile_rows, dim
        self._checked: set[tuple[ref[nn.Module], bool, bool]] = set()

    def bind(self, module: nn.Module, mesh: DeviceMesh) -> tuple[Any, ...]:
        return (mesh.get_group(),)

    @untraced
    def run(
        self, group: dist.ProcessGroup, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        where = getattr(replaced(module, TILES), "where", "")
        key = ref(module), module.training, torch.is_grad_enabled()
        with refusing(group):
            call = TiledCall(f"TiledMLP({type(module).__name__}{where and f' at {where}'})", module, forward, self.dim)
            rows = call.read(args, kwargs)
            call.cut_into(self.tiles, self.tile_rows)
            if first := key not in self._checked:
                call.look(rows)
        if first:
            if torch.is_grad_enabled():  # one rank may evaluate alone; ranks that refused have told the others
                exchange(group, {"call": "TiledMLP", "module": where})
            self._checked = {known for known in self._checked if known[0]() is not None} | {key}
        outs = _Tiles.apply(call, *_Keep.apply(call, *rows), *call.weights)
        return tree_unflatten([None if i is None else outs[i] for i in call.places], call.out_spec)


class _Keep(torch.autograd.Function):
    """Saves the rows before the module runs: a checkpoint around it, which then has all, need not run it again."""

    @staticmethod
    def forward(ctx: Any, call: TiledCall, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*rows)
        call.kept = ctx if any(ctx.needs_input_grad) else None
        return tuple(x.view_as(x) for x in rows)

    @staticmethod
    def backward(ctx: Any, *drows: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *drows


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: TiledCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        rows = tensors[: len(call.at)]
        ctx.call, ctx.random = call, random_state(rows)
        ctx.set_materialize_grads(False)
        if call.kept is None:
            ctx.save_for_backward(*rows)
        wholes: list[Tensor] = []
        for tile in call.tiles:
            outs = call.run([call.part(x, tile) for x in rows])
            wholes = wholes or [y.new_empty(call.lead + y.shape[call.dim + 1 :]) for y in outs]
            for whole, y in zip(wholes, outs, strict=True):
                call.part(whole, tile).copy_(y)
        wholes = [y.flatten(0, call.dim) if flat else y for y, flat in zip(wholes, call.flat, strict=True)]
        ctx.mark_non_differentiable(*(y for y in wholes if not (y.is_floating_point() or y.is_complex())))
        return tuple(wholes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *douts: Tensor | None) -> tuple[Tensor | None, ...]:
        call, wants = ctx.call, ctx.needs_input_grad[1:]
        rows = (call.kept or ctx).saved_tensors
        call.check_weights()
        weights = [x for x, want in zip(call.weights, wants[len(rows) :], strict=True) if want]
        drows = [torch.empty_like(x) if want else None for x, want in zip(rows, wants, strict=False)]
        sums: list[Tensor | None] = [None] * len(weights)
        grads = [y if y is None or not f else y.unflatten(0, call.lead) for y, f in zip(douts, call.flat, strict=True)]
        with torch.enable_grad(), drawing(ctx.random):
            for tile in call.tiles:
                parts = [call.part(x.detach(), tile).requires_grad_(want) for x, want in zip(rows, wants, strict=False)]
                outs = zip(call.run(parts), grads, strict=True)
                pairs = [(y, call.part(g, tile)) for y, g in outs if g is not None and y.requires_grad]
                inputs = [*(x for x in parts if x.requires_grad), *weights]
                found = iter(_gradients(pairs, inputs))
                for drow in (x for x in drows if x is not None):
                    dpart = next(found)
                    call.part(drow, tile).copy_(torch.zeros((), device="cpu") if dpart is None else dpart)
                for i, grad in enumerate(found):
                    if grad is not None:
                        known, dtype = sums[i], accumulation_dtype(grad.dtype)
                        sums[i] = grad.to(dtype, copy=True) if known is None else known.add_(grad)
        each = iter(x if x is None else x.to(w.dtype) for x, w in zip(sums, weights, strict=True))
        return None, *drows, *(next(each) if want else None for want in wants[len(rows) :])


def _gradients(pairs: Any, inputs: list[Tensor]) -> Sequence[Tensor | None]:
    if not pairs or not inputs:
        return [None] * len(inputs)
    outs, grads = zip(*pairs, strict=True)
    return torch.autograd.grad(outs, inputs, grads, allow_unused=True)
