"""`ContextParallel`: the parallel style for the attention core of a model.

During the core's forward a `TorchFunctionMode` (`sdpa_mode`) replaces `F.scaled_dot_product_attention` with sharded
attention, and `cp_mesh.flex_attention` looks the mode up. No function of torch is patched. Inside the module, tensors
stay as the model made them (plain, DTensors over tp, or DTensors over the whole mesh). They are not wrapped as DTensors
over cp, because DTensors cannot describe shards of unequal length and model code may not support DTensors. `wrap.py`
describes how a style replaces the forward of its module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cp_mesh.call.dtensor import (
    check_placements,
    check_score_placements,
    first_index,
    local_part,
    local_scores,
    wrap,
    wrap_results,
)
from cp_mesh.call.formats import FORMATS
from cp_mesh.call.function import attend, check_format
from cp_mesh.call.plan import choose_method
from cp_mesh.call.spec import EXECUTION, SCORE_OPTIONS, check_choice, check_dense, make_spec
from cp_mesh.comm.agreement import checked, checking
from cp_mesh.comm.exchange import TRANSPORTS
from cp_mesh.comm.groups import ranks_of_tp
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.geometry.layouts import Layout
from cp_mesh.geometry.mask import Mask
from cp_mesh.kernels.table import KERNELS
from cp_mesh.sequence.cuts import check_rows
from cp_mesh.sequence.sharded_sequence import ROOT, ShardedSequence
from cp_mesh.training.checks.config import (
    StatedReach,
    check_mask_read,
    check_reach,
    check_scores_stated,
    stated_reach,
)
from cp_mesh.training.checks.coverage import current_mode, suspended
from cp_mesh.training.sdpa_mode import PUT_BACK, SDPAMode, keep_uncompiled, replaced_sdpa
from cp_mesh.training.style_helpers import Core, announced, ask, has_axis
from cp_mesh.wrap import STYLE, replaced

_SCORE_OPTIONS = frozenset(SCORE_OPTIONS) - {"dropout_p"}  # dropout_p is an argument of the SDPA call


@dataclass(frozen=True)
class _CoreCall:
    """The arguments of attention in one call of a core.

    Attributes:
        given: keywords of `attend`, except the scale and the score options; the mask covers the padded sequence.
        scores: score options.
        stated: in the first call, the module and the window or chunk size that the mask must match; else None.
    """

    given: dict[str, Any]
    scores: Mapping[str, Any]
    stated: tuple[nn.Module, StatedReach] | None = None


class ContextParallel(Core):
    """Makes an attention core attend over the whole sequence.

    The module's forward must call `F.scaled_dot_product_attention` at least once, on [B, H, S_local, D] tensors, with
    ``is_causal`` equal to the mask's ``causal`` and without ``attn_mask``, because a mask tensor of local shape is
    ambiguous. Or the forward calls `cp_mesh.flex_attention` like PyTorch's flex_attention, without a mesh and with a
    block mask of the whole sequence (docs/flex.md); the style then needs `Mask(causal=False)`. Other attention of
    PyTorch (its own flex_attention, `nn.MultiheadAttention`, aten operators) is refused, and so is a checkpoint that
    begins inside the core: checkpoint the module that holds the core. The style does not see torch.jit.script, C++,
    other threads, attention written as matmul and softmax, kernels of other packages and, in compiled code, the bodies
    of higher-order operators such as torch.cond. The module may do anything else; its output is not changed.

    Under a `ShardedModel`, every SDPA call must have the local length that the root sharded, unless ``sequence`` has a
    length, which then takes precedence. Without both, each call's local length is taken as this rank's whole shard. A
    root that is compiled as a whole with ``watch=False`` skips the comparison of lengths.

    The module's class becomes a subclass of the same name, so `copy.copy` and `copy.deepcopy` keep the style. Pickling
    is refused because a style holds process groups: save the state_dict.

    Args:
        sequence: the sequence object that also shards the data.
        mask: the mask. For masks that change with the batch, a function of the core's call arguments that returns the
            mask: ``mask=lambda q, k, v, mask: mask`` if the core is called with one. The function must depend on its
            arguments alone, because activation checkpointing calls it again in the backward.
        scores: score options by their names in `cp_mesh.attention` (softcap, sinks, ...). For tensors, a function of
            the module and its call arguments that returns the options: ``scores=lambda core, q, k, v: {"sinks":
            core.sinks}``. It must depend on its arguments alone. ``dropout_p`` comes from the SDPA call and needs a
            ``dropout_seed`` here that differs in every layer and step; head 0 is the first head of this tp rank.
        layout: for layouts that change with the batch, a function of the core's call arguments that returns the layout:
            ``layout=lambda q, k, v, packed: packed.layout``. It must depend on its arguments alone. Pass the layout
            inside an object, because FSDP2 moves tensors to the device. None: the layout of the batch that its mask
            has (`Mask.layout`), else that of the sequence.
        kernel, method, transport, ulysses_degree, head_chunks, deterministic: as in `cp_mesh.attention`. None
            for the degree: the sequence's ulysses_degree, or its inner mesh axis.

    Raises:
        ArgumentError, UnsupportedError: at application, if the mesh is wrong, the style is applied twice, or the module
            is cross-attention; in the forward, if the core does not call attention or the call disagrees with the mask.
    """

    def __init__(
        self,
        sequence: ShardedSequence,
        *,
        mask: Mask | Callable[..., Mask] = Mask(causal=True),  # noqa: B008 - frozen
        scores: Mapping[str, Any] | Callable[..., Mapping[str, Any]] | None = None,
        layout: Callable[..., Layout] | None = None,
        kernel: str = "auto",
        method: str = "auto",
        transport: str = "auto",
        ulysses_degree: int | None = None,
        head_chunks: int | None = None,
        deterministic: bool | None = None,
    ) -> None:
        super().__init__(sequence, mask, layout)
        self.scores = scores if callable(scores) else _check_scores(scores or {})
        self.options = {name: x for name, x in locals().items() if name in EXECUTION}
        if method == "hybrid" and ulysses_degree is None:
            self.options["ulysses_degree"] = sequence.ulysses_degree
        self._checked: set[ref[nn.Module]] = set()
        make_spec(**self.options)
        choose_method(method)
        check_choice("kernel", kernel, ("auto", *KERNELS), "auto")
        check_choice("transport", transport, TRANSPORTS, "functional")

    def check(self, module: nn.Module, mesh: DeviceMesh, where: str = "") -> None:
        for name in (where, type(module).__name__):
            if "cross" in name.lower():
                raise UnsupportedError(cross_attention(name))
        super().check(module, mesh, where)

    @announced
    def run(self, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module's forward with SDPA calls that attend over the whole sequence."""
        call, watch = self.prepare(module, *args, **kwargs), current_mode()
        if not torch.compiler.is_compiling():
            keep_uncompiled()
            if checking(self.sequence.mesh.get_group()) and (found := replaced(module, STYLE)) is not None:
                forward = checked(where=found.where)(forward)
        sdpa, flex = functools.partial(self.sdpa, call), functools.partial(self.flex, call)
        mode = SDPAMode(sdpa, flex, watch)
        with suspended(), mode:
            result = forward(*args, **kwargs)
        if mode.calls == 0:
            got = "none"
            hint = "call F.scaled_dot_product_attention in it, or apply the style to the module that does"
            if wrapper := replaced_sdpa():
                got, hint = f"none, and {wrapper} in place of F.scaled_dot_product_attention", PUT_BACK
            expected = "a call of F.scaled_dot_product_attention, or of cp_mesh.flex_attention, in its forward"
            where = found.where if (found := replaced(module, STYLE)) is not None else ""
            refuse(f"ContextParallel({type(module).__name__}{where and f' at {where}'})", expected, got, hint)
        return result

    def prepare(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> _CoreCall:
        """Return the arguments of attention for one call of the wrapped module, whose call arguments these are."""
        mask, layout = self.of_call(*args, **kwargs)
        if isinstance(self.scores, Mapping):  # Dynamo cannot evaluate callable() on a dict
            scores = self.scores
        else:
            scores = _check_scores(ask(self, "scores", self.scores, module, *args, **kwargs))
        first = torch.compiler.is_compiling() or ref(module) not in self._checked
        stated = self._first(module, (*args, *kwargs.values())) if first else None
        sequence = self.sequence
        given: dict[str, Any] = dict(
            mesh=sequence.mesh, seq_dim=2, seq_len=sequence.seq_len_in(layout), layout=layout,
            mask=sequence.mask(mask, layout), of_root=sequence.length is None, **self.options,
        )  # fmt: skip
        return _CoreCall(given, scores, stated)

    def _first(self, module: nn.Module, given: tuple[Any, ...]) -> tuple[nn.Module, StatedReach]:
        """Refuse, in the first call of a module, settings of its attention that the style lacks."""
        if isinstance(self.mask, Mask):
            check_mask_read(module, self.mask, given)
        if not torch.compiler.is_compiling():
            self._checked = {known for known in self._checked if known() is not None} | {ref(module)}
        return module, stated_reach(module)

    def sdpa(
        self,
        call: _CoreCall,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Compute `F.scaled_dot_product_attention` over the whole sequence for one call: [B, H, S_local, D]."""
        form, over_tp = FORMATS[2], _over_others(query, self.sequence.mesh)
        check_dense(query=query, key=key, value=value)
        if over_tp is not None:
            check_placements(over_tp, key, value, (), form)
            check_score_placements(call.scores, over_tp, form)
        if attn_mask is not None:
            raise UnsupportedError(
                "ContextParallel: a tensor attn_mask cannot be read on positions; pass it as ContextParallel(mask="
                "Mask(causal=, window=, documents=, key_padding=, prefix=, blocks=)), or by cp_mesh.batch_mask of the "
                "whole batch, and call SDPA without attn_mask. Any other mask is exactly a bias of 0 and -inf, "
                "mask=Mask(causal=False) with scores={'bias': [1 or B, 1 or H, rows of this rank, all keys]}; it "
                "needs memory for each pair and the Triton or reference kernel"
            )
        mask = call.given["mask"]
        if is_causal != mask.causal:
            refuse(
                "is_causal", f"{mask.causal}, as in the style's {mask}", is_causal, "make the call and the style agree"
            )
        if call.stated is not None:
            whole = isinstance(query, DTensor) and over_tp is None
            rows = query.shape[-2] * (1 if whole else self.sequence.cp_size)
            module, reach = call.stated
            check_scores_stated(module, call.scores)
            check_reach(type(module).__name__, reach, mask, self.sequence.length or rows)
            if not torch.compiler.is_compiling() and ROOT.get() is None:
                what, group = f"ContextParallel({type(module).__name__})", self.sequence.mesh.get_group()
                has_length = not call.given["of_root"]
                check_rows(group, None if whole else query.shape[-2], call.given["layout"], what, has_length)
        _check_heads(query, key, enable_gqa)
        given = call.given | {"scale": scale, "dropout_p": dropout_p}
        if over_tp is None:
            return cast(Tensor, attend(query, key, value, **given | dict(call.scores)))
        # DTensors over tp alone: this rank's rows, with heads sharded over tp. No collective runs over their mesh.
        q, k, v = (local_part(x, x.placements) for x in (query, key, value) if isinstance(x, DTensor))
        out = cast(Tensor, attend(q, k, v, **given | local_scores(call.scores, over_tp, form)))
        shape = *query.shape[:-1], value.shape[-1]
        return wrap(out, over_tp.device_mesh, over_tp.placements, shape, over_tp.stride())

    def flex(
        self,
        call: _CoreCall,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Callable[..., Tensor] | None,
        block_mask: Any,
        scale: float | None,
        enable_gqa: bool,
        return_lse: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute `cp_mesh.flex_attention` over the whole sequence for one call in the core.

        score_mod and mask_mod get global indices. The block mask covers the whole sequence without padding.
        """
        from cp_mesh.flex.function import Functions

        form, mask, over_tp = FORMATS[2], call.given["mask"], _over_others(query, self.sequence.mesh)
        check_format(query, key, value, form)
        if call.scores:
            refuse("ContextParallel.scores", "none with flex_attention", [*call.scores], "write them in score_mod")
        if mask.causal or mask.window or mask.elementwise:
            hint = "mask=Mask(causal=False) leaves masking to mask_mod"
            refuse("ContextParallel.mask", "a mask that hides nothing, with flex_attention", mask, hint)
        _check_heads(query, key, enable_gqa)
        if over_tp is not None:
            check_placements(over_tp, key, value, (), form)
        rows = query.shape[2] * (1 if isinstance(query, DTensor) and over_tp is None else self.sequence.cp_size)
        length = self.sequence.length or rows
        last = None if call.given["seq_len"] in (None, length) else length - 1
        sizes = query.shape[0], query.shape[1], length
        functions = Functions.of(score_mod, block_mask, query, sizes, last)
        if not isinstance(query, DTensor):
            functions.check_heads(sizes, ranks_of_tp(self.sequence.mesh.get_group()))
        given = call.given | functions.keywords() | {"scale": scale, "return_lse": return_lse}
        if over_tp is None:
            return attend(query, key, value, **given)
        q, k, v = (local_part(x, x.placements) for x in (query, key, value) if isinstance(x, DTensor))
        first_head, first_batch = (first_index(query, form.dims[name]) for name in ("heads", "batch"))
        found = attend(q, k, v, **given, first_head=first_head, first_batch=first_batch)
        out, lse = cast(tuple[Tensor, Tensor], found if return_lse else (found, q.new_empty(q.shape[:3])))
        results = wrap_results(out, lse, over_tp, form)
        return results if return_lse else results[0]


def _check_heads(query: Tensor, key: Tensor, enable_gqa: bool) -> None:
    if not enable_gqa and query.shape[-3] != key.shape[-3]:
        refuse("heads", f"{query.shape[-3]} kv heads", key.shape[-3], "pass enable_gqa=True, as SDPA wants")


def _over_others(query: Tensor, mesh: DeviceMesh) -> DTensor | None:
    """Return the query if it is a DTensor without the cp axis (tp alone), whose rows are local; else None."""
    return query if isinstance(query, DTensor) and not has_axis(query.device_mesh, mesh) else None


def _check_scores(scores: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(scores, Mapping) or set(scores) - _SCORE_OPTIONS:
        got = [*scores] if isinstance(scores, Mapping) else type(scores).__name__
        hint = "see cp_mesh.attention"
        refuse("ContextParallel.scores", f"names of {', '.join(sorted(_SCORE_OPTIONS))}", got, hint)
    return scores


def cross_attention(name: str) -> str:
    return (
        f"ContextParallel: {name!r} is cross-attention, whose keys are not the sharded sequence; "
        "leave it out of the plan and keep its keys replicated over cp"
    )
