"""`flex_attention`: score_mod and mask_mod are functions of the user on the global indices of query and key.

Each call traces the functions (`flex.trace`). The tensors that they capture become arguments of the op, with gradients.
The op receives the traced graphs as string handles (`cp_mesh.kernels.functions`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cp_mesh._torch import forward_level, function_modes, in_transform, untraced
from cp_mesh.call.dtensor import find_cp_axis, group_that_waits
from cp_mesh.call.formats import FORMATS
from cp_mesh.call.function import attend, check_format
from cp_mesh.comm.agreement import refusing
from cp_mesh.errors import UnsupportedError, as_int, refuse
from cp_mesh.flex.block_mask import read_mask
from cp_mesh.flex.rank_mask import Sources
from cp_mesh.flex.trace import trace
from cp_mesh.geometry.layouts import Contiguous, Layout, ZigZag
from cp_mesh.geometry.mask import Mask
from cp_mesh.kernels.functions import ScalarFunction

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Alone:
    """The default mesh of calls without one: a mesh of this rank alone, set while a model runs on whole sequences.

    It is of the process: autograd runs backwards, and what they recompute, in threads of its own.
    """

    mesh: DeviceMesh | None = None


@untraced
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    *,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    seq_dim: int | None = None,
    seq_len: int | None = None,
    layout: Layout = ZigZag(),  # noqa: B008 - frozen
    mask: Mask = Mask(causal=False),  # noqa: B008 - frozen
    method: str = "auto",
    kernel: str = "auto",
    transport: str = "auto",
    ulysses_degree: int | None = None,
    head_chunks: int | None = None,
    deterministic: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`torch.nn.attention.flex_attention.flex_attention` over a sequence sharded on the cp axis of a mesh.

    score_mod and mask_mod are functions of scalar tensors and get the indices that they would get on one device:
    *global* indices of batch row, query head, query and key, on every rank. (With local tensors, heads and batch rows
    count from 0 on this rank; with DTensors they are global.) The functions may read captured tensors at any index.
    These are whole plain tensors, equal on all cp ranks. Those that score_mod reads get partial gradients, whose sum
    over ranks is the gradient, summed in float32 (float64) and rounded once. Those of mask_mod get none.

    On GPUs the functions are compiled (kernel="flex"), and blocks that mask_mod hides are skipped. The reference kernel
    computes every pair that ``mask`` keeps. torch.compile breaks the graph at this call; fullgraph=True raises.

    Without a mesh, in a process without other ranks, this calls PyTorch's function.
    In a core of `ContextParallel` call it like PyTorch's function, without ``mesh`` and the keywords after it: the
    style sets them, with Mask(causal=False). Padding rows then get the index of the last token.

    Args:
        query, key, value: local tensors or DTensors, as in `cp_mesh.attention`.
        score_mod: (score, b, h, q_idx, kv_idx) -> the new score, all scalars. score is scale · q·k in float32
            (float64), the indices are int64. torch must be able to trace it: no branch on values, no writes, no random
            numbers. None: the score is unchanged.
        block_mask: from `cp_mesh.flex.create_block_mask`, or a `BlockMask` from torch's function of the same name,
            built for the whole sequence. Its mask_mod decides; blocks that contradict mask_mod are refused. None: every
            query sees all keys. With ``sequence=`` given there, ranks are not sent shards that it hides from them.
        scale: factor on q·k; None: 1 / sqrt(D).
        enable_gqa: must be True if there are fewer kv heads than query heads, as in torch.
        return_lse: as in `cp_mesh.attention`.
        mesh, seq_dim, seq_len, layout: as in `cp_mesh.attention`.
        mask: hides further pairs. Keys that it hides from all queries of a rank are not sent there, so express as much
            of the mask here as you can, such as Mask(causal=True).
        method, kernel, transport, ulysses_degree, head_chunks, deterministic: as in `cp_mesh.attention`.

    Returns:
        out, or with ``return_lse`` (out, lse), as `cp_mesh.attention` returns them.

    Raises:
        ArgumentError, UnsupportedError, RankMismatchError: as in `cp_mesh.attention`; also if a function cannot be
            traced, and at first calls if functions or captured tensors differ between ranks.

    Example:
        >>> def score_mod(score, b, h, q_idx, kv_idx):  # doctest: +SKIP
        ...     return score + table[h, q_idx - kv_idx]
        >>> out = flex_attention(q, k, v, score_mod, mesh=mesh["cp"], mask=Mask(causal=True))  # doctest: +SKIP
        >>> out.sum().backward()  # table.grad is partial: sum it over ranks  # doctest: +SKIP

    Source: Dong et al. 2024, FlexAttention, arXiv:2412.05496.
    """
    options = {name: x for name, x in locals().items() if name in _DEFAULTS} | {"seq_len": as_int(seq_len)}
    if (core := _core()) is not None:
        if given := [name for name, x in options.items() if x is not _DEFAULTS[name]]:
            hint = "leave it out: ContextParallel sets it"
            refuse("flex_attention in a core", "functions, a mask of the whole sequence and a scale", given[0], hint)
        core.count()
        return core.attend_by_functions(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse)
    if mesh is None and (mesh := Alone.mesh) is not None:
        options |= {"mesh": mesh, "layout": Contiguous()}
    if mesh is None and not (dist.is_initialized() and dist.get_world_size() > 1):  # on one device, of any model
        from torch.nn.attention import flex_attention as module  # which takes a second to import

        of_torch: Any = module.flex_attention
        return of_torch(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse)
    seq_len = options["seq_len"]
    with refusing(lambda: group_that_waits(query, mesh, seq_dim)):
        axis = find_cp_axis((query, key, value), mesh, seq_dim)
        form = FORMATS[axis.seq_dim]
        check_format(query, key, value, form)
        num_heads, num_kv_heads = (x.shape[form.dims["heads"]] for x in (query, key))
        if num_heads != num_kv_heads and not enable_gqa:
            got = f"{num_heads} and {num_kv_heads}"
            refuse("heads", "as many kv heads as query heads", got, "enable_gqa=True takes fewer kv heads")
        length = query.shape[axis.seq_dim]
        whole = length if isinstance(query, DTensor) else length * axis.size if seq_len is None else seq_len
        batch = query.shape[form.dims["batch"]] if "batch" in form.dims else 1
        functions = Functions.of(score_mod, block_mask, query, (batch, num_heads, whole))
    return attend(query, key, value, scale=scale, return_lse=return_lse, **options, **functions.keywords())


_DEFAULTS = {
    name: x.default for name, x in inspect.signature(flex_attention).parameters.items() if x.kind is x.KEYWORD_ONLY
}
"""Defaults of the keywords that PyTorch's function does not have."""


def _core() -> Any:
    """The function mode of the `ContextParallel` core whose forward is running, or None."""
    return next((mode for mode in function_modes() if hasattr(mode, "attend_by_functions")), None)


@dataclass(frozen=True, eq=False)
class Functions:
    """score_mod and mask_mod of a call, traced; the tensors that each reads; and the mask's `Sources`, if known."""

    score_mod: ScalarFunction | None
    mask_mod: ScalarFunction | None
    of_score: tuple[Tensor, ...]
    of_mask: tuple[Tensor, ...]
    sources: Sources | None = None

    @classmethod
    def of(
        cls,
        score_mod: ScoreMod | None,
        block_mask: Any,
        query: Tensor,
        sizes: tuple[int, int, int],
        last: int | None = None,
    ) -> Functions:
        """Trace the functions of a `flex_attention` call.

        Args:
            sizes: batch rows, query heads and tokens of the whole sequence, for which the mask must be built.
            last: the index of the last token. Functions see it in place of the greater indices of padding.
        """
        given = score_mod is not None or block_mask is not None
        if given and (in_transform() or forward_level() >= 0):
            # Tracing would treat captured tensors as constants and lose their derivatives.
            expected, hint = "no transform of torch.func around functions", "use torch.autograd.grad, or backward()"
            refuse("flex_attention", expected, "torch.func.grad, a dual level or the like", hint, UnsupportedError)
        score_function, of_score = trace("score_mod", score_mod, query, last, 0 not in sizes)
        if score_function is not None:
            score_function.check(of_score, (*sizes, sizes[2]))
        if block_mask is None:
            return cls(score_function, None, of_score, ())
        mask_mod, of_mask = read_mask(block_mask, query, sizes, last)
        return cls(score_function, mask_mod, of_score, of_mask, getattr(block_mask, "sources", None))

    def check_heads(self, sizes: tuple[int, int, int], tp_size: int) -> None:
        """Refuse captured tensors with the heads of all tp ranks, where h counts this rank's heads."""
        for function, read in ((self.score_mod, self.of_score), (self.mask_mod, self.of_mask)):
            if function is not None and tp_size > 1:
                function.check(read, (*sizes, sizes[2]), tp_size)

    def keywords(self) -> dict[str, Any]:
        """The keywords that `attend` takes for these functions."""
        score_mod, mask_mod = ("" if x is None else x.handle for x in (self.score_mod, self.mask_mod))
        sources, read = self.sources and self.sources.of_call, (*self.of_score, *self.of_mask)
        return {"score_mod": score_mod, "mask_mod": mask_mod, "captured": read, "sources": sources}
