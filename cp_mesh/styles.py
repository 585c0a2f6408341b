"""ParallelStyles: what turns a plain model context-parallel.

`ContextParallel` wraps an attention core. During its forward a `TorchFunctionMode` that lives for this one call turns
`F.scaled_dot_product_attention` into the sharded one (`watching.py`); no function of torch is patched. Inside the
module tensors stay as the model made them (plain, or DTensors over tp, or over the whole mesh) instead of being
re-wrapped as DTensors over cp: shards of unequal length have no DTensor, and no model code has to be DTensor-proof.
`ShardedModel` wraps the root. A style takes the place of its module's forward as `forwards.py` says.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from cp_mesh.agreement import announce_refusal, checking, fingerprint, require_agreement
from cp_mesh.attention import Asked, attend
from cp_mesh.call import SCORE_OPTIONS
from cp_mesh.errors import ArgumentError, UnsupportedError, describe, refuse
from cp_mesh.formats import FORMATS
from cp_mesh.forwards import STYLE, replace_forward, replaced
from cp_mesh.layouts import Layout
from cp_mesh.masks import Mask
from cp_mesh.placements import check_placements, check_score_placements, local_scores, wrap
from cp_mesh.sequence import ROOT, Root, ShardedSequence
from cp_mesh.watching import Interception, Watch, unwatched, watch_encoders, watched, watching

_WATCHED = "_cp_mesh_watched"  # a ShardedModel whose attention was found covered
SUMS = "_cp_mesh_sums"  # set on FSDP2 modules that sum gradients, or that their user was warned of
RANKS = "_cp_mesh_ranks"  # the ranks of its cp axis
_SCORE_OPTIONS = frozenset(SCORE_OPTIONS) - {"dropout_p"}  # which the SDPA call tells


@dataclass
class _Watched:
    """Which forwards of a `ShardedModel` were watched.

    Attributes:
        module: the id of the module.
        counts: how many cores a watched forward called, by (training, gradients).
        due: modes in which a forward called another number of cores since: the next one is watched.
    """

    module: int
    counts: dict[tuple[bool, bool], set[int]] = field(default_factory=dict)
    due: set[tuple[bool, bool]] = field(default_factory=set)


@dataclass(frozen=True)
class _Call:
    """What one call of an attention core attends with; the mask is that of the padded sequence."""

    layout: Layout
    mask: Mask
    scores: Mapping[str, Any]


class ContextParallel(ParallelStyle):
    """Makes the attention core that it is applied to attend over the whole sequence.

    The module's forward must call `F.scaled_dot_product_attention` on [B, H, S_local, D] tensors at least once, with
    ``is_causal`` equal to the mask's ``causal`` and no ``attn_mask``: local shapes cannot tell what a tensor mask
    means. Other attention of PyTorch (`flex_attention`, `nn.MultiheadAttention`, operators of aten) is refused there,
    and so is a checkpoint that the core itself begins: checkpoint the module that holds the core. Not seen are
    torch.jit.script, C++, other threads, matmul with softmax, kernels of other packages, and in compiled code bodies of
    higher-order operators such as torch.cond. Everything else about the module is free, and what it returns is returned
    as it is.

    Under a `ShardedModel` every SDPA call must have the rows that the root sharded, unless ``sequence`` has a length of
    its own, which then counts. Without either, each call's own rows are taken for this rank's whole shard. A root that
    is compiled as a whole with ``watch=False`` does not compare them.

    The module's class becomes a subclass of the same name, so `copy.copy` and `copy.deepcopy` make modules with the
    style. Pickling is refused, as a style holds process groups: save the state_dict.

    Args:
        sequence: the sequence object that also shards the data.
        mask: the mask, or a function of the wrapped module's call arguments that returns it, for masks that change
            with the batch: ``mask=lambda q, k, v, mask: mask`` of a core that is called with one. It must depend on its
            arguments alone: activation checkpointing calls it again in the backward.
        scores: options of the scores by their names in `cp_mesh.attention` (softcap, sinks, ...), or a function of the
            wrapped module and its call arguments that returns them, for tensors: ``scores=lambda core, q, k, v:
            {"sinks": core.sinks}``. It too must depend on these alone. ``dropout_p`` is that of the SDPA call, and
            needs a ``dropout_seed`` here, another in every layer and step; heads are counted from this tp rank's first.
        layout: for layouts that change with the batch, a function of the wrapped module's call arguments that returns
            the layout, and like ``mask`` depends on these alone: ``layout=lambda q, k, v, packed: packed.layout``.
            Pass it on as an object: FSDP2 moves tensors to the device. None: the sequence's. Data, labels and
            `ShardedModel` need the same (`ShardedSequence.balanced`).
        kernel, method, transport, head_chunks, deterministic: as in `cp_mesh.attention`.

    Raises:
        ArgumentError, UnsupportedError: at application on a wrong mesh, a repeated application or a cross-attention
            module; in the forward if no attention call was intercepted or if it disagrees with the mask.
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
        head_chunks: int | None = None,
        deterministic: bool | None = None,
    ) -> None:
        if not isinstance(mask, Mask) and not callable(mask):
            refuse("ContextParallel.mask", "a Mask or a function that returns one", type(mask).__name__, "Mask(...)")
        _check_layout("ContextParallel", layout)
        self.sequence, self.mask, self.layout = sequence, mask, layout
        self.scores = scores if callable(scores) else _check_scores(scores or {})
        self.options: dict[str, Any] = {
            "kernel": kernel,
            "method": method,
            "transport": transport,
            "head_chunks": head_chunks,
            "deterministic": deterministic,
        }

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if "cross" in type(module).__name__.lower():
            raise UnsupportedError(cross_attention(type(module).__name__))
        _claim(module, device_mesh, self.sequence, self)
        replace_forward(module, STYLE, type(self).__name__, self._run)
        return module

    def _run(self, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward, whose SDPA calls attend over the whole sequence."""
        call = self.of_call(module, *args, **kwargs)
        attend, announce = functools.partial(self.sharded_sdpa, call), functools.partial(_announce, self.sequence)
        interception = Interception(attend, announce)
        if watched():
            with unwatched(), interception:
                result = forward(*args, **kwargs)
        else:
            with interception:
                result = forward(*args, **kwargs)
        if interception.calls == 0:
            what, expected = f"ContextParallel({type(module).__name__})", "a call of F.scaled_dot_product_attention"
            hint = "apply the style to the module that calls it; otherwise each rank attends to its shard alone"
            error = ArgumentError(describe(what, f"{expected} in its forward", "none", hint))
            _announce(self.sequence, error)
            raise error
        return result

    def of_call(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> _Call:
        """What one call of the wrapped module attends with; these are its arguments."""
        try:
            layout = _layout_of_call(self, *args, **kwargs)
            _check_root(self.sequence, layout)
            mask = self.mask if isinstance(self.mask, Mask) else self.mask(*args, **kwargs)
            if not isinstance(mask, Mask):
                refuse("ContextParallel.mask", "a function that returns a Mask", type(mask).__name__, "return one")
            scores = _check_scores(self.scores(module, *args, **kwargs)) if callable(self.scores) else self.scores
            return _Call(layout, self.sequence.mask(mask, layout), scores)
        except Exception as error:
            _announce(self.sequence, error)
            raise

    def sharded_sdpa(
        self,
        call: _Call,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """`F.scaled_dot_product_attention` over the whole sequence, for one intercepted call.

        Args:
            call: the style's for the module's call.
            query, key, value: [B, H or K, S_local, D], plain or DTensors.
            attn_mask, dropout_p, is_causal, scale, enable_gqa: as in `F.scaled_dot_product_attention`.

        Raises:
            ArgumentError, UnsupportedError: as in `ContextParallel`; in check mode all ranks hear of it.
        """
        try:
            self._check_call(call, query, key, value, attn_mask, is_causal, enable_gqa)
        except Exception as error:
            _announce(self.sequence, error)
            raise
        sequence, tensors = self.sequence, (query, key, value)

        asked = Asked(
            mesh=sequence.mesh,
            seq_dim=2,
            seq_len=sequence.seq_len_in(call.layout),
            layout=call.layout,
            mask=call.mask,
            scale=scale,
            dropout_p=dropout_p,
            of_root=sequence.length is None,
            **self.options,
        )
        if not isinstance(query, DTensor) or _has_axis(query.device_mesh, sequence.mesh):
            return cast(Tensor, attend(*tensors, asked._replace(**call.scores)))
        # DTensors over tp alone: the rows of this rank, with heads sharded. No collective runs over their mesh.
        q, k, v = (x.to_local(grad_placements=x.placements) for x in tensors if isinstance(x, DTensor))
        out = cast(Tensor, attend(q, k, v, asked._replace(**local_scores(call.scores, query, FORMATS[2]))))
        return wrap(out, query.device_mesh, query.placements, (*query.shape[:-1], value.shape[-1]), query)

    def _check_call(
        self,
        call: _Call,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        is_causal: bool,
        enable_gqa: bool,
    ) -> None:
        if isinstance(query, DTensor) and not _has_axis(query.device_mesh, self.sequence.mesh):
            check_placements(query, key, value, None, FORMATS[2])
            check_score_placements(call.scores, query, FORMATS[2])
        if attn_mask is not None:
            raise UnsupportedError(
                "ContextParallel: a tensor attn_mask cannot be read on positions; say it as ContextParallel(mask="
                "Mask(causal=, window=, documents=, key_padding=, prefix=)) and call SDPA without attn_mask. Any other "
                "mask is, exactly, a bias of 0 and -inf, mask=Mask(causal=False) with scores={'bias': [1 or B, 1 or H, "
                "rows of this rank, all keys]}; that needs memory for each pair and the Triton or reference kernel"
            )
        if is_causal != call.mask.causal:
            refuse(
                "is_causal",
                f"{call.mask.causal}, as in the style's mask",
                is_causal,
                "make the call and the style agree",
            )
        if not enable_gqa and query.shape[-3] != key.shape[-3]:
            refuse("heads", f"{query.shape[-3]} kv heads", key.shape[-3], "pass enable_gqa=True, as SDPA wants")


class ShardedModel(ParallelStyle):
    """Makes a root module take whole batches: shards inputs, supplies positions, optionally gathers the output.

    Args:
        sequence: the sequence object that the attention styles share.
        inputs: names of forward arguments that hold [B, S, ...] tensors of the whole sequence, equal on all cp ranks.
        positions: name of the forward argument that takes int64 positions for the rotary embedding. If the caller
            leaves it out it gets the positions of this rank's rows, [S_local]; if given, whole-sequence position ids
            [S] or [B, S] are sharded like tokens. None for models without positions.
        gather_output: gather the output along dim 1, in original order; otherwise it stays sharded, as the loss wants.
        watch: refuse self-attention outside of the plan: attention, by any function of PyTorch, in which query and key
            have equal lengths. Eager code is looked at in the first forward in training and in evaluation, with and
            without gradients, and again after a forward that called another number of cores than before; compiled code
            whenever it is traced, which costs nothing when it runs. What Python does not call by a function of PyTorch
            is not seen, as in `ContextParallel`, nor is attention to more or fewer keys than queries, which is taken
            for cross-attention. False for models that also attend to sequences which are not sharded, such as a vision
            tower.
        layout: for layouts that change with the batch, a function of the forward's arguments by name that returns the
            layout, that of all attention styles: ``layout=lambda packed, **others: packed.layout``. None: the
            sequence's. With it the root is not compiled as a whole; its blocks may be.

    Raises:
        ArgumentError: at application if the module has no such arguments; in the forward, if the model calls
            self-attention outside of the modules that `ContextParallel` was applied to (see ``watch``), or a core
            attends to other rows than the root sharded.
    """

    def __init__(
        self,
        sequence: ShardedSequence,
        *,
        inputs: tuple[str, ...] = ("tokens",),
        positions: str | None = "positions",
        gather_output: bool = False,
        watch: bool = True,
        layout: Callable[..., Layout] | None = None,
    ) -> None:
        _check_layout("ShardedModel", layout)
        self.sequence, self.inputs, self.positions, self.gather_output = sequence, inputs, positions, gather_output
        self.watch, self.layout = watch, layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        parameters = inspect.signature(module.forward).parameters
        names = [name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_POSITIONAL]
        for name in (*self.inputs, *([self.positions] if self.positions else [])):
            if name not in names:
                refuse(
                    f"ShardedModel({type(module).__name__})",
                    f"a forward argument named {name!r}",
                    names,
                    "name the model's own arguments in inputs= and positions=",
                )
        _claim(module, device_mesh, self.sequence, self)
        replace_forward(module, STYLE, type(self).__name__, functools.partial(self._run, names))
        if self.watch:
            watch_encoders(module)
        return module

    def _run(
        self, names: list[str], module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """The root's forward on this rank's rows; ``names`` are those of its arguments."""
        given = dict(zip(names, args, strict=False))
        try:
            if len(args) > len(names) or given.keys() & kwargs.keys():
                expected, got = f"arguments {', '.join(names)}, each once", f"{len(args)} + {[*kwargs]}"
                refuse("ShardedModel", expected, got, "see forward")
            root, arguments = self.shard_inputs(given | kwargs)
        except Exception as error:
            _announce(self.sequence, error)
            raise
        if torch.compiler.is_compiling():
            output = self._run_traced(root, forward, arguments)
        else:
            if checking():
                self.compare(given | kwargs)
            token = ROOT.set(root)
            try:
                output = self._run_eagerly(root, module, forward, arguments)
            finally:
                ROOT.reset(token)
        return self.gather(root.sequence, output) if self.gather_output else output

    def _run_traced(self, root: Root, forward: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """The forward while torch.compile traces it; what is looked for then costs nothing when the code runs."""
        if not self.watch:
            return forward(**arguments)
        with Watch(root.sequence.mesh.get_group().group_name, root.seq_len):
            return forward(**arguments)

    def _run_eagerly(
        self, root: Root, module: nn.Module, forward: Callable[..., Any], arguments: dict[str, Any]
    ) -> Any:
        """The eager forward.

        A watch costs a Python call for every operation, so only the first forward is watched: of a model in training
        and in evaluation, with gradients and without; and the one after a forward that called another number of cores
        than those before, as it does when a core was replaced.
        """
        _warn_of_averages(module, self.sequence)
        if not self.watch:
            return forward(**arguments)
        record: _Watched | None = module.__dict__.get(_WATCHED)
        if record is None or record.module != id(module):  # a copy may be changed before it runs
            record = module.__dict__[_WATCHED] = _Watched(id(module))
        mode = module.training, torch.is_grad_enabled()
        if mode not in record.counts or mode in record.due:
            try:
                with watching(module):
                    result = forward(**arguments)
            except ArgumentError as error:
                _announce(self.sequence, error)
                raise
            record.counts.setdefault(mode, set()).add(root.cores)
            record.due.discard(mode)
            return result
        result = forward(**arguments)
        if root.cores not in record.counts[mode]:
            record.due.add(mode)
        return result

    def compare(self, arguments: dict[str, Any]) -> None:
        """In check mode: raise on every rank if whole inputs or positions among ``arguments`` differ between ranks."""
        names = [*self.inputs, *([self.positions] if self.positions else [])]
        found = {name: arguments.get(name) for name in names}
        require_agreement(self.sequence.mesh.get_group(), {name: fingerprint(x) for name, x in found.items()})

    def gather(self, sequence: ShardedSequence, output: Any) -> Tensor:
        """The whole output of a forward in original order; ``sequence`` is that forward's."""
        if not isinstance(output, Tensor):
            got, hint = type(output).__name__, "unshard it yourself"
            refuse("ShardedModel.gather_output", "one tensor as output", got, hint)
        return sequence.unshard(output, dim=1)

    def shard_inputs(self, arguments: dict[str, Any]) -> tuple[Root, dict[str, Any]]:
        """The root of one forward, and its arguments by name, with this rank's rows of the inputs and positions."""
        given = dict(arguments)
        present = [name for name in self.inputs if given.get(name) is not None]
        if not present:
            refuse("ShardedModel", f"one of {self.inputs} in the call", list(given), "pass it")
        whole, sequence = given[present[0]], self.sequence
        if self.layout is not None:
            sequence = replace(sequence, layout=_layout_of_call(self, **arguments))
        for name in present:
            given[name] = sequence.shard({name: given[name]}, dim=1)[name]
        if self.positions is not None:
            ids = given.get(self.positions)
            if ids is None:
                given[self.positions] = sequence.positions(whole.shape[1], device=whole.device)
            else:
                given[self.positions] = sequence.shard({"positions": ids}, dim=ids.ndim - 1)["positions"]
        return Root(sequence, whole.shape[1] if sequence.seq_len is None else sequence.seq_len), given


def _layout_of_call(style: ContextParallel | ShardedModel, /, *args: Any, **kwargs: Any) -> Layout:
    """The layout that the style's function returns for these arguments, or its sequence's."""
    if style.layout is None:
        return style.sequence.layout
    found = style.layout(*args, **kwargs)
    if not isinstance(found, Layout):
        name, hint = type(style).__name__, "is it in the call? ShardedSequence.balanced(mask).layout makes one"
        refuse(f"{name}.layout", "a function that returns a Layout", type(found).__name__, hint)
    return found


def _check_root(sequence: ShardedSequence, layout: Layout) -> None:
    """Refuse a core's call in another layout than that of the rows which its root sharded over the same ranks."""
    found = None if torch.compiler.is_compiling() else ROOT.get()
    if found is None or found.sequence.mesh != sequence.mesh:
        return
    found.cores += 1
    root = found.sequence
    if root.layout != layout:
        hint = "give ShardedModel and ContextParallel one sequence, or functions that return one layout for a batch"
        got = f"{layout.spec()} in the core, {root.layout.spec()} at the root"
        refuse("layout", "one for the whole model", got, hint)


def _warn_of_averages(module: nn.Module, sequence: ShardedSequence) -> None:
    """Once: FSDP2 averages the gradients of ranks whose losses are shares of a sum."""
    if (
        isinstance(module, FSDPModule)
        and sequence.cp_size > 1
        and torch.is_grad_enabled()
        and not hasattr(module, SUMS)
    ):
        setattr(module, SUMS, False)
        warnings.warn(
            "cp_mesh: this model is under fully_shard, which averages gradients over its ranks, while losses of "
            "cp_mesh.cross_entropy are shares of a sum: call cp_mesh.sum_gradients(model) after fully_shard",
            stacklevel=2,
        )


def _check_layout(style: str, layout: Any) -> None:
    if layout is not None and not callable(layout):
        hint = "a layout for all batches is the sequence's, ShardedSequence(..., layout=)"
        refuse(f"{style}.layout", "a function that returns a Layout", layout, hint)


def _announce(sequence: ShardedSequence, error: Exception) -> None:
    """In check mode: let the ranks that wait for this one raise, too."""
    if not torch.compiler.is_compiling() and checking():
        announce_refusal(sequence.mesh.get_group(), error)


def _claim(module: nn.Module, mesh: DeviceMesh, sequence: ShardedSequence, style: ParallelStyle) -> None:
    """Check that the style fits; called when nothing else can fail."""
    name = type(style).__name__
    if mesh.ndim != 1:
        refuse(f"{name}: mesh", "one axis", f"{mesh.ndim} axes", 'pass mesh["cp"]')
    if (other := replaced(module, STYLE)) is not None:
        got = f"{type(module).__name__} with {other.name}"
        refuse(name, "a module without a style", got, "apply once")
    if not _has_axis(mesh, sequence.mesh):
        refuse("mesh", f"the axis of the ShardedSequence, {sequence.mesh}", mesh, "apply the style to that axis")
    setattr(module, RANKS, tuple(dist.get_process_group_ranks(sequence.mesh.get_group())))


def _check_scores(scores: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(scores, Mapping) or set(scores) - _SCORE_OPTIONS:
        got = [*scores] if isinstance(scores, Mapping) else type(scores).__name__
        hint = "see cp_mesh.attention"
        refuse("ContextParallel.scores", f"names of {', '.join(sorted(_SCORE_OPTIONS))}", got, hint)
    return scores


def _has_axis(mesh: DeviceMesh, axis: DeviceMesh) -> bool:
    wanted = axis.get_group().group_name
    return any(mesh.get_group(i).group_name == wanted for i in range(mesh.ndim))


def cross_attention(name: str) -> str:
    return (
        f"ContextParallel: {name!r} is cross-attention, whose keys are not the sharded sequence; "
        "leave it out of the plan and keep its keys replicated over cp"
    )
