"""`ShardInput` and `GatherOutput`: styles of the modules where the sharded part of a model begins and ends.

Outside of that part every rank holds all rows, and computes them alike. A module may have both and `ContextParallel`
too, each by a `parallelize` of its own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from cp_mesh.comm.fingerprints import fingerprint, shape_of
from cp_mesh.comm.first_calls import agree_on_shapes
from cp_mesh.errors import refuse
from cp_mesh.geometry.layouts import Layout
from cp_mesh.sequence.sharded_sequence import ROOT, ShardedSequence
from cp_mesh.training.checks.coverage import unwatched, watched
from cp_mesh.training.sharded_model import POSITIONS, padding_of
from cp_mesh.training.style_helpers import announced, check_layout, check_layout_of_root, claim, layout_of_call
from cp_mesh.wrap import INPUT, OUTPUT, replace_forward


class _Boundary(ParallelStyle):
    """What both styles are told."""

    def __init__(self, sequence: ShardedSequence, dim: int, layout: Callable[..., Layout] | None) -> None:
        check_layout(type(self).__name__, layout)
        self.sequence, self.dim, self.layout = sequence, dim, layout

    def of_call(self, *args: Any, **kwargs: Any) -> ShardedSequence:
        """The sequence in the layout of one call of the module; these are its arguments."""
        sequence = self.sequence
        if self.layout is not None:
            sequence = replace(sequence, layout=layout_of_call(self, *args, **kwargs))
        root = None if torch.compiler.is_compiling() else ROOT.get()
        if root is not None and root.sequence.mesh == sequence.mesh:
            check_layout_of_root(root.sequence, sequence.layout, type(self).__name__)
        return sequence


class ShardInput(_Boundary):
    """Gives a module this rank's rows of tensors that come whole, and equal on all cp ranks.

    Their gradient is this rank's part, with zeros for the rows of other ranks. So gradients of the parameters that they
    were computed with are summed over the ranks, as those of all others.

    Args:
        sequence: the sequence object that the attention styles share.
        inputs: arguments of the module's forward that hold rows, by name or by place; None in the call stays None.
        dim: their sequence dim.
        layout: for layouts that change with the batch, a function of the module's arguments, as in `ContextParallel`.

    Raises:
        ArgumentError: at application if the module has no such argument; in the forward if none of them is in the call,
            or one was sharded already. Tensors that differ between ranks, in shape or as integers, are found in the
            first forward of each shape: RankMismatchError.

    Example:
        >>> plan = {  # whole hidden states between the embedding and the loss  # doctest: +SKIP
        ...     "layers": ShardInput(sequence, ("hidden_states",)),
        ...     "norm": GatherOutput(sequence, gradient="sum"),  # the loss is a share, as the head has parameters
        ... }
    """

    def __init__(
        self,
        sequence: ShardedSequence,
        inputs: tuple[str | int, ...] = (0,),
        *,
        dim: int = 1,
        layout: Callable[..., Layout] | None = None,
    ) -> None:
        super().__init__(sequence, dim, layout)
        if not isinstance(inputs, tuple) or not inputs or not all(isinstance(x, str | int) for x in inputs):
            refuse("ShardInput.inputs", "a tuple of names or places of arguments", inputs, 'such as ("hidden_states",)')
        self.inputs = inputs

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        parameters = inspect.signature(module.forward).parameters.values()
        placed = [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
        names = [*placed, *(x.name for x in parameters if x.kind is x.KEYWORD_ONLY)]
        more = {x.kind for x in parameters}
        chosen: list[tuple[str, int]] = []
        for each in self.inputs:
            is_name = isinstance(each, str)
            known = each in names if is_name else each in range(len(placed))
            if (
                not known
                and (inspect.Parameter.VAR_KEYWORD if is_name else inspect.Parameter.VAR_POSITIONAL) not in more
            ):
                what, hint = f"ShardInput({type(module).__name__})", "name them as the module's forward does"
                refuse(what, f"a forward argument {each!r}", names, hint)
            if isinstance(each, str):
                chosen.append((each, placed.index(each) if each in placed else NOWHERE))
            else:
                chosen.append((placed[each] if known else "", each))
        claim(module, device_mesh, self.sequence, self, INPUT)
        replace_forward(module, INPUT, type(self).__name__, functools.partial(self._run, chosen))
        return module

    @announced
    def _run(
        self,
        chosen: list[tuple[str, int]],
        module: nn.Module,
        forward: Callable[..., Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The module's forward on this rank's rows; ``chosen`` are the names and places of its inputs."""
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        sequence = self.of_call(*args, **kwargs)
        present = [(name, place if place in given else name) for name, place in chosen]
        present = [(name, key) for name, key in present if given.get(key) is not None]
        with unwatched():  # a layout counts rows
            for name, key in present:
                given[key] = self._shard(sequence, name, given[key])
        if not present:
            got = f"{len(args)} arguments by place, {[*kwargs]} by name"
            refuse(f"ShardInput({type(module).__name__})", f"one of {self.inputs} in the call", got, "pass it")
        self._watch_positions({name: given[key] for name, key in present})
        return forward(*(given[place] for place in range(len(args))), **{name: given[name] for name in kwargs})

    def _watch_positions(self, local: dict[str, Any]) -> None:
        """Tell the watch of a model without a root how many rows are here; a root has done so."""
        if (watch := watched()) is not None and ROOT.get() is None and not local.keys() & {*POSITIONS}:
            watch.local_rows = next(iter(local.values())).shape[self.dim] if self.sequence.cp_size > 1 else None

    def _shard(self, sequence: ShardedSequence, name: str, whole: Any) -> Any:
        """This rank's rows of a tensor, whose shape is compared with other ranks', and its integers where it is new."""
        if isinstance(whole, Tensor) and not torch.compiler.is_compiling():
            group, kind = sequence.mesh.get_group(), ("ShardInput", name, whole.shape, whole.dtype)
            contents = shape_of if whole.is_floating_point() else fingerprint
            agree_on_shapes(group, kind, {name or "input": whole}, contents)
        return sequence.shard({name: whole}, dim=self.dim, pad_value=padding_of(name))[name]


NOWHERE = 1 << 30
"""The place of an argument that is given by name alone."""


class GatherOutput(_Boundary):
    """Makes a module return whole tensors, in original order and on every rank, of which it computes this rank's rows.

    What their gradient means must be said, since it is not seen from here:

    - "mean": every cp rank computes the same loss from the whole, as `F.cross_entropy` of whole logits and labels, with
      no parameters behind the module, whose gradients would be cp times too large;
      as in ``ShardedModel(gather_output=True)``.
    - "sum": the loss is this rank's share of a sum, also where a `ShardInput` follows, or more layers that every rank
      computes alike. Of a loss that is the same on every rank the share is its part, ``loss / cp_size``.

    Args:
        sequence: the sequence object that the attention styles share.
        gradient: "mean" or "sum" over the cp ranks of the gradients of the whole, as `ShardedSequence.gather` and
            `ShardedSequence.unshard` take them.
        outputs: of a tuple the places, of a mapping the names of entries that hold rows; the others are returned as
            they are. None: the output is one tensor.
        dim: their sequence dim.
        layout: for layouts that change with the batch, a function of the module's arguments, as in `ContextParallel`.

    Raises:
        ArgumentError: at application if ``gradient`` is neither; in the forward if the output has no such entries, or
            has other rows than this rank.
    """

    def __init__(
        self,
        sequence: ShardedSequence,
        *,
        gradient: Literal["mean", "sum"],
        outputs: tuple[str | int, ...] | None = None,
        dim: int = 1,
        layout: Callable[..., Layout] | None = None,
    ) -> None:
        super().__init__(sequence, dim, layout)
        if gradient not in ("mean", "sum"):
            hint = '"mean" for a loss that every rank computes alike from the output, "sum" for shares of one'
            refuse("GatherOutput.gradient", "'mean' or 'sum'", repr(gradient), hint)
        self.gradient, self.outputs = gradient, outputs
        self.gather_output = gradient == "mean"  # as `ShardedModel` says it

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        claim(module, device_mesh, self.sequence, self, OUTPUT)
        replace_forward(module, OUTPUT, type(self).__name__, self._run)
        return module

    @announced
    def _run(self, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        sequence = self.of_call(*args, **kwargs)
        gather = functools.partial(sequence.gather if self.gradient == "mean" else sequence.unshard, dim=self.dim)
        with unwatched():
            return self._gather(type(module).__name__, gather, output)

    def _gather(self, where: str, gather: Callable[[Tensor], Tensor], output: Any) -> Any:
        if self.outputs is None:
            if not isinstance(output, Tensor):
                hint = "say which entries of it hold rows, outputs=(0,) or names"
                refuse(f"GatherOutput({where})", "one tensor as output", type(output).__name__, hint)
            return gather(output)
        entries: dict[Any, Any] = dict(output if isinstance(output, Mapping) else enumerate(output))
        for name in self.outputs:
            if not isinstance(entries.get(name), Tensor):
                got = [x for x, entry in entries.items() if isinstance(entry, Tensor)]
                refuse(f"GatherOutput({where}).outputs", f"a tensor at {name!r}", f"tensors at {got}", "name those")
            entries[name] = gather(entries[name])
        if isinstance(output, Mapping):
            return type(output)(entries)  # type: ignore[call-arg]
        made = type(output)
        return made(*entries.values()) if hasattr(made, "_fields") else made(entries.values())
