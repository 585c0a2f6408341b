"""`ShardInput` and `GatherOutput`: styles for the modules where the sharded part of a model begins and ends.

Outside of that part every rank computes all rows. One module may have both styles and `ContextParallel`, each applied
by a separate `parallelize` call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cp_mesh.comm.agreement import compare_batch
from cp_mesh.comm.fingerprints import fingerprint, shape_of
from cp_mesh.errors import refuse
from cp_mesh.geometry.layouts import Layout
from cp_mesh.geometry.mask import Mask
from cp_mesh.sequence.sharded_sequence import ROOT, ShardedSequence
from cp_mesh.training.checks.coverage import current_mode, suspended
from cp_mesh.training.compare_inputs import kind_of
from cp_mesh.training.sharded_model import POSITIONS, gather_entries
from cp_mesh.training.style_helpers import OverCP, announced, check_layout_of_root, layout_of_call
from cp_mesh.wrap import INPUT, OUTPUT


class _Boundary(OverCP):
    """The options that both styles share."""

    def __init__(self, sequence: ShardedSequence, dim: int, layout: Callable[..., Layout] | None) -> None:
        super().__init__(sequence, layout)
        self.dim = dim

    def sequence_of(self, *args: Any, **kwargs: Any) -> ShardedSequence:
        """Return the sequence with the layout of one call of the module, whose arguments these are."""
        mask = next((x for x in (*args, *kwargs.values()) if isinstance(x, Mask)), None)
        sequence, layout = self.sequence, layout_of_call(self, mask, *args, **kwargs)
        sequence = sequence if layout is sequence.layout else replace(sequence, layout=layout)
        root = None if torch.compiler.is_compiling() else ROOT.get()
        if root is not None and root.sequence.mesh == sequence.mesh:
            check_layout_of_root(root.sequence, sequence.layout, type(self).__name__)
        return sequence


class ShardInput(_Boundary):
    """Shards inputs of a module: tensors of the whole sequence, equal on all cp ranks, become this rank's rows.

    The gradient of such a tensor is zero at the rows of other ranks. So gradients of parameters before the module are
    summed over the cp ranks, like those of all other parameters.

    Args:
        sequence: the sequence object that the attention styles share.
        inputs: names or positions of the forward arguments to shard; an argument that is None stays None.
        dim: sequence dim of these tensors.
        layout: for layouts that change with the batch, a function of the module's arguments, as in `ContextParallel`.
            None: that of a `Mask` among them, else that of the sequence.

    Raises:
        ArgumentError: at application, if the module has no such argument; in the forward, if the call has none of the
            arguments or one is sharded already.
        RankMismatchError: in the first forward of each shape, if shapes or integer tensors differ between ranks.

    Example:
        >>> plan = {  # whole hidden states before the layers and after the norm  # doctest: +SKIP
        ...     "layers": ShardInput(sequence, ("hidden_states",)),
        ...     "norm": GatherOutput(sequence, gradient="sum"),  # the loss is a local share: the head has parameters
        ... }
    """

    key = INPUT

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
            refuse("ShardInput.inputs", "a tuple of argument names or positions", inputs, 'such as ("hidden_states",)')
        self.inputs = inputs

    def check(self, module: nn.Module, mesh: DeviceMesh, where: str = "") -> None:
        super().check(module, mesh, where)
        self.bind(module, mesh)

    def bind(self, module: nn.Module, mesh: DeviceMesh) -> tuple[Any, ...]:
        """Names and positions of the inputs; refuses those that the module's forward does not have."""
        parameters = inspect.signature(module.forward).parameters
        placed = [name for name, x in parameters.items() if x.kind is x.POSITIONAL_OR_KEYWORD]
        alone = [name for name, x in parameters.items() if x.kind is x.KEYWORD_ONLY]
        known: dict[str | int, tuple[str, int]] = {name: (name, NOWHERE) for name in alone}
        known |= {key: (name, place) for place, name in enumerate(placed) for key in (name, place)}
        for each in self.inputs:
            others = inspect.Parameter.VAR_KEYWORD if isinstance(each, str) else inspect.Parameter.VAR_POSITIONAL
            if each not in known and all(x.kind is not others for x in parameters.values()):
                what, hint = f"ShardInput({type(module).__name__})", "name them as the module's forward does"
                refuse(what, f"a forward argument {each!r}", [*placed, *alone], hint)
        return ([known.get(x, (x, NOWHERE) if isinstance(x, str) else ("", x)) for x in self.inputs],)

    @announced
    def run(
        self,
        chosen: list[tuple[str, int]],
        module: nn.Module,
        forward: Callable[..., Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run the module's forward on this rank's rows; ``chosen`` has the names and positions of its inputs."""
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        sequence = self.sequence_of(*args, **kwargs)
        present = [(name, place if place in given else name) for name, place in chosen]
        present = [(name, key) for name, key in present if given.get(key) is not None]
        whole = {name or f"input {key}": given[key] for name, key in present if isinstance(given[key], Tensor)}
        if whole and not torch.compiler.is_compiling():
            compare_batch(sequence.mesh.get_group(), ("ShardInput", *kind_of(whole)), whole, _content)
        with suspended():  # layouts call torch.arange, which the watch would report
            for name, key in present:
                given[key] = sequence.shard({name: given[key]}, dim=self.dim)[name]
        if not present:
            got = f"{len(args)} positional arguments and {[*kwargs]} by name"
            refuse(f"ShardInput({type(module).__name__})", f"one of {self.inputs} in the call", got, "pass it")
        self._watch_positions({name: given[key] for name, key in present})
        return forward(*(given[place] for place in range(len(args))), **{name: given[name] for name in kwargs})

    def _watch_positions(self, local: dict[str, Any]) -> None:
        """Give the watch the number of local rows, in a model without a root. A root has already set it."""
        if (watch := current_mode()) is not None and ROOT.get() is None and not local.keys() & {*POSITIONS}:
            watch.local_rows = next(iter(local.values())).shape[self.dim] if self.sequence.cp_size > 1 else None


def _content(x: Tensor | None) -> str:
    """What ranks compare of an input: of hidden states the shape alone."""
    return shape_of(x) if x is None or x.is_floating_point() else fingerprint(x)


NOWHERE = 1 << 30
"""The position of a keyword-only argument."""


class GatherOutput(_Boundary):
    """Gathers outputs of a module: this rank's rows become whole tensors, in original order, on every rank.

    The gradient of a whole tensor can mean two things, so the choice must be given:

    - "mean": every cp rank computes the same loss from the whole output, such as `F.cross_entropy` of whole logits and
      labels, as in ``ShardedModel(gather_output=True)``. The model must have no parameters after this module: their
      gradients would be cp times too large.
    - "sum": the loss is this rank's share of a sum. Also take it if a `ShardInput` follows, or layers that every rank
      computes on whole tensors. If all ranks compute the same loss, divide it: ``loss / cp_size``.

    Args:
        sequence: the sequence object that the attention styles share.
        gradient: "mean" or "sum" of the whole gradients over the cp ranks, as in `ShardedSequence.gather` ("mean") and
            `ShardedSequence.unshard` ("sum").
        outputs: the entries to gather, by index in a tuple or by name in a mapping; other entries stay as they are.
            None: the output is one tensor.
        dim: sequence dim of these tensors.
        layout: for layouts that change with the batch, a function of the module's arguments, as in `ContextParallel`.
            None: that of a `Mask` among them, else that of the sequence.

    Raises:
        ArgumentError: at application, if ``gradient`` is neither; in the forward, if the output lacks these entries or
            its local length is not this rank's.
    """

    key = OUTPUT

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
            hint = '"mean" if every rank computes the same loss from the output, "sum" if each computes its share'
            refuse("GatherOutput.gradient", "'mean' or 'sum'", repr(gradient), hint)
        self.gradient, self.outputs = gradient, outputs
        self.gather_output = gradient == "mean"  # the attribute of `ShardedModel`

    @announced
    def run(self, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        sequence = self.sequence_of(*args, **kwargs)
        gather = functools.partial(sequence.gather if self.gradient == "mean" else sequence.unshard, dim=self.dim)
        with suspended():
            return gather_entries(f"GatherOutput({type(module).__name__})", output, self.outputs, gather)
