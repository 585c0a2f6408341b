"""`ShardedModel`: the style of the whole model. It shards what the model is given, and watches its attention."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import ParallelStyle

from cp_mesh.agreement import checking, fingerprint, require_agreement
from cp_mesh.errors import ArgumentError, refuse
from cp_mesh.forwards import STYLE, replace_forward
from cp_mesh.layouts import Layout
from cp_mesh.sequence import ROOT, Root, ShardedSequence
from cp_mesh.styles import SUMS, announce, check_layout, claim, layout_of_call
from cp_mesh.watching import Watch, watch_encoders, watching

_WATCHED = "_cp_mesh_watched"  # a ShardedModel whose attention was found covered


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


class ShardedModel(ParallelStyle):
    """Makes a root module take whole batches: shards inputs, supplies positions, optionally gathers the output.

    Args:
        sequence: the sequence object that the attention styles share.
        inputs: names of forward arguments that hold [B, S, ...] tensors of the whole sequence, equal on all cp ranks.
        positions: name of the forward argument that takes int64 positions for the rotary embedding. If the caller
            leaves it out it gets the positions of this rank's rows, [S_local]; if given, whole-sequence position ids
            [S] or [B, S] are sharded like tokens. None for models without positions. Rows of padding have positions up
            to ``sequence.seq_len - 1``: a table of learned positions needs as many rows, or ``pad=False``.
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
        check_layout("ShardedModel", layout)
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
        claim(module, device_mesh, self.sequence, self)
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
            announce(self.sequence, error)
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
                announce(self.sequence, error)
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
            sequence = replace(sequence, layout=layout_of_call(self, **arguments))
        for name in present:
            given[name] = sequence.shard({name: given[name]}, dim=1)[name]
        if self.positions is not None:
            ids = given.get(self.positions)
            if ids is None:
                given[self.positions] = sequence.positions(whole.shape[1], device=whole.device)
            else:
                given[self.positions] = sequence.shard({"positions": ids}, dim=ids.ndim - 1)["positions"]
        return Root(sequence, whole.shape[1] if sequence.seq_len is None else sequence.seq_len), given


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
