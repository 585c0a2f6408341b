"""`ShardedModel`: the style of the root module. It shards the inputs, and checks attention in the first forwards."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cp_mesh._torch import constant_in_traces
from cp_mesh.comm.agreement import compare_batch
from cp_mesh.errors import ArgumentError, UnsupportedError, describe, refuse, warn
from cp_mesh.geometry.host_tensors import Content
from cp_mesh.geometry.layouts import Layout
from cp_mesh.geometry.mask import Mask
from cp_mesh.sequence.auto import PLAIN, is_by_batch
from cp_mesh.sequence.cuts import note_documents, note_output
from cp_mesh.sequence.losses import any_ran, note_callers
from cp_mesh.sequence.sharded_sequence import PADDING, ROOT, Root, ShardedSequence
from cp_mesh.training.checks.coverage import first_forward, look_of, run_in_mode, watch_encoders
from cp_mesh.training.compare_inputs import compare_inputs, kind_of
from cp_mesh.training.foreign_functions import refuse_unplanned
from cp_mesh.training.style_helpers import OverCP, announced, cores_of, layout_of_call

POSITIONS = ("positions", "position_ids", "pos_ids", "input_pos", "cache_position")
"""Names of forward arguments that take positions."""
OUTPUTS = ("logits", "last_hidden_state", "hidden_states")
"""Names of output entries with the sequence along dim 1."""


class ShardedModel(OverCP):
    """Makes a root module take whole batches: shards inputs, supplies positions, optionally gathers the output.

    Args:
        sequence: the sequence object that the attention styles share.
        inputs: names of forward arguments that hold [B, S, ...] tensors of the whole sequence, equal on all cp ranks.
            They are padded by name as in `ShardedSequence.shard`, which refuses to pad integers of other names.
            () for a later pipeline stage, which gets this rank's rows from the stage before; the sequence then needs a
            length.
        positions: name of the forward argument that takes int64 positions for the rotary embedding. If the call leaves
            it out, the style passes the positions of this rank's rows, [S_local]. If the call passes position ids of
            the whole sequence, [S] or [B, S], they are sharded like tokens. None for models without positions. Padding
            rows have positions up to ``sequence.seq_len - 1``: make a learned table that long, or take ``pad=False``.
        gather_output: gather the output along dim 1, in original order; in a mapping, gather logits, last_hidden_state
            and hidden_states. By default the output stays sharded, as `cross_entropy` over cp requires. Every cp rank
            must compute the same loss from a gathered output (see `ShardedSequence.gather`): `F.cross_entropy(output,
            labels)`, or `cross_entropy` over dp alone.
        position_dims: dims of the supplied positions, 1 or 2: 2 for models that take [1, S_local], such as models of
            Transformers.
        watch: refuse self-attention outside of the plan: a call of any attention function of PyTorch with equal lengths
            of query and key. Eager code is checked in the first forward of training and of evaluation, with and without
            gradients, and again after modules were added or replaced. Compiled code is checked whenever it is traced,
            at no cost at run time. The check does not see calls that `ContextParallel` does not see either, or
            attention with different lengths of query and key, which is taken for cross-attention. With several cp ranks
            also recurrences and convolutions outside of `RecurrentParallel`: modules that name functions which that
            style knows, and `F.conv1d` over as many columns as a rank has tokens; in a root that is compiled as a whole
            `nn.RNNBase` too. Pass False for models that also mix sequences which are not sharded, such as a vision
            tower.
        layout: None: that of the sequence. If it is "auto", a `Mask` among the forward's arguments decides
            (`ShardedSequence.for_batch`), and masks reach the model with the layout, which cores take from them. Or,
            for layouts that change with the batch, a function of the forward's arguments (by name) that returns the
            layout; all attention styles need the same: ``layout=lambda packed, **others: packed.layout``. With a
            function, compile the blocks of the root, not the root as a whole.
        probe: in the first forward, run `cp_mesh.probe` on the first tokens of the batch: two more forwards without
            gradients, sharded and whole, whose rows must agree. The probe finds mistakes that no other check sees, such
            as positions that the model counts itself. Compile the blocks of the root, not the root as a whole.

    Raises:
        ArgumentError: at application, if the module lacks these arguments; in the forward, if the model calls
            self-attention outside of the modules that `ContextParallel` was applied to (see ``watch``), or the local
            length in a core is not the one that the root sharded.
    """

    def __init__(
        self,
        sequence: ShardedSequence,
        *,
        inputs: tuple[str, ...] = ("tokens",),
        positions: str | None = "positions",
        gather_output: bool = False,
        position_dims: Literal[1, 2] = 1,
        watch: bool = True,
        layout: Callable[..., Layout] | None = None,
        probe: bool = False,
    ) -> None:
        super().__init__(sequence, layout)
        if not isinstance(inputs, tuple | list) or not all(isinstance(x, str) for x in inputs):
            refuse("ShardedModel.inputs", "a tuple of argument names", inputs, 'such as ("tokens",)')
        if not inputs and sequence.length is None:
            hint = "ShardedSequence(..., length=)"
            refuse("ShardedModel(inputs=())", "a sequence with a length, as no input has it", None, hint)
        self.inputs, self.positions, self.gather_output = inputs, positions, gather_output
        if position_dims not in (1, 2):
            refuse("ShardedModel.position_dims", "1 or 2", position_dims, "2 supplies positions as [1, S_local]")
        self.watch, self.position_dims, self.probe = watch, position_dims, probe
        self._checked_modes: frozenset[tuple[Any, ...]] = frozenset()

    def check(self, module: nn.Module, mesh: DeviceMesh, where: str = "") -> None:
        super().check(module, mesh, where)
        names = names_of(module.forward)
        for name in (*self.inputs, *([self.positions] if self.positions else [])):
            if name not in names:
                refuse(
                    f"ShardedModel({type(module).__name__})",
                    f"a forward argument named {name!r}",
                    names,
                    "name the model's own arguments in inputs= and positions=",
                )

    def bind(self, module: nn.Module, mesh: DeviceMesh) -> tuple[Any, ...]:
        if self.watch:
            watch_encoders(module)
        return names_of(module.forward), check_traced(module)

    @announced
    def run(
        self,
        names: list[str],
        check: Callable[[], None],
        module: nn.Module,
        forward: Callable[..., Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run the root's forward on this rank's rows.

        Args:
            names: of its arguments.
            check: refuses recurrent layers outside of the plan, while torch.compile traces the root.
        """
        given = dict(zip(names, args, strict=False))
        if len(args) > len(names) or given.keys() & kwargs.keys():
            expected, got = f"arguments {', '.join(names)}, each once", f"{len(args)} + {[*kwargs]}"
            refuse("ShardedModel", expected, got, "see forward")
        named = given | kwargs
        self._check_inputs(names, named)
        root, arguments = self.shard_inputs(self._compared(named) if torch.compiler.is_compiling() else named)
        if torch.compiler.is_compiling():
            if self.probe:
                _refuse_compiled()
            if self.watch and self.sequence.cp_size > 1:
                check()
            output = self._run_traced(root, module, forward, arguments)
        else:
            self.compare(named, root.sequence.layout)
            if self.probe:
                from cp_mesh.training.probe import probe_once

                probe_once(self, module, named, functools.partial(self.run, names, check, module, forward))
            output = self.run_eagerly(root, module, forward, arguments)
            if is_by_batch(root.sequence.layout):
                note_output(output, root.sequence.layout, self.sequence.mesh.get_group())
        return self.gather(root.sequence, output) if self.gather_output else output

    def _run_traced(self, root: Root, module: nn.Module, forward: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Run the forward while torch.compile traces it, with checks that cost nothing at run time."""
        _check_masks(module, arguments)
        if not self.watch:
            return forward(**arguments)
        group_name = root.sequence.mesh.get_group().group_name
        return run_in_mode(group_name, root.seq_len, self._tokens(arguments), forward, **arguments)

    @announced
    def run_eagerly(
        self,
        root: Root,
        module: nn.Module,
        forward: Callable[..., Any],
        arguments: dict[str, Any],
        part: nn.Module | None = None,
    ) -> Any:
        """Run the eager forward of a root with this rank's ``arguments``, and send its error to the other ranks.

        ``part``: the one that gets rows of a shard; None: all of the root.
        """
        note_callers()
        token = ROOT.set(root)
        try:
            return self._run_watched(root, module, forward, arguments, part or module)
        finally:
            ROOT.reset(token)

    def _run_watched(
        self, root: Root, module: nn.Module, forward: Callable[..., Any], arguments: dict[str, Any], part: nn.Module
    ) -> Any:
        """Run the forward; watch the first one of training or evaluation, with or without gradients.

        A watch costs a Python call for every operation. So later ones are watched only if modules were added or
        replaced.
        """
        if not self.watch or (look := look_of(module)) in self._checked_modes:
            return forward(**arguments)
        _check_masks(module, arguments)
        try:
            if self.sequence.cp_size > 1:
                refuse_unplanned(part)
                if self.positions is None:
                    own = {name: x for name, x in arguments.items() if name not in self.inputs}
                    refuse_counted(root.sequence, cores_of(module), own, self._local_rows(arguments))
            with first_forward(module, self._local_rows(arguments), self.positions is None, self._tokens(arguments)):
                result = forward(**arguments)
        except IndexError as error:
            if self.sequence.length in (None, self.sequence.seq_len):
                raise
            expected = f"tables for {self.sequence.seq_len} positions, padding included, and for token 0"
            hint = "make the table of learned positions that long, or use ShardedSequence(..., pad=False)"
            raise ArgumentError(describe("ShardedModel", expected, error, hint)) from error
        self._warn_of_losses(arguments, result)
        self._checked_modes |= {look}
        return result

    def _tokens(self, arguments: dict[str, Any]) -> int | None:
        """Return the local length, if it is not the whole length."""
        return self._local_rows(arguments) if self.sequence.cp_size > 1 else None

    def _local_rows(self, arguments: dict[str, Any]) -> int:
        if not self.inputs:
            return len(self.sequence.positions())
        rows: int = next(arguments[name] for name in self.inputs if arguments.get(name) is not None).shape[1]
        return rows

    def _check_inputs(self, names: list[str], arguments: dict[str, Any]) -> None:
        """Refuse inputs without rows, and positions that are missing, or that are not those of the whole sequence."""
        for name, x in self._whole(arguments).items():
            if x is not None and not (isinstance(x, Tensor) and x.ndim > (name != self.positions)):
                got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
                hint = f"{name}[None] makes [1, S] of [S]" if isinstance(x, Tensor) else "leave it out of inputs"
                refuse(f"ShardedModel: {name}", "a tensor [B, S, ...]", got, hint)
        if self.positions is not None:
            ids, whole = arguments.get(self.positions), [arguments.get(name) for name in self.inputs]
            lengths = [self.sequence.length, self.sequence.seq_len, *(x.shape[1] for x in whole if x is not None)]
            if ids is not None and all(length is None or ids.shape[-1] != length for length in lengths):
                got, hint = f"{ids.shape[-1]} of them", "leave them out of the call, and each rank gets its own"
                refuse(f"ShardedModel: {self.positions}", "as many as the inputs have tokens", got, hint)
            return
        for name in names:
            if name in POSITIONS and name not in self.inputs and arguments.get(name) is None:
                hint = f"ShardedModel(sequence, positions={name!r}) gives each rank the positions of its rows"
                got = f"positions=None and none in the call, so that every rank counts its {name} from 0"
                refuse("ShardedModel", f"a source of the forward's {name}", got, hint)

    def _warn_of_losses(self, arguments: dict[str, Any], output: Any) -> None:
        """Warn if a model gets the labels of its rows and returns a loss that is not `cp_mesh.cross_entropy`."""
        labelled = [name for name in self.inputs if PADDING.get(name) == -100 and arguments.get(name) is not None]
        loss = output if isinstance(output, Tensor) else _loss_of(output)
        if labelled and isinstance(loss, Tensor) and loss.ndim == 0 and loss.requires_grad and not any_ran():
            warn(
                f"the model was given this rank's rows of {labelled[0]} and returned a loss of its own: a "
                "mean over these rows, with labels that it may shift within the shard. Expected this rank's share of "
                "the loss: leave labels out of inputs, and call cp_mesh.cross_entropy on logits and shifted labels"
            )

    def compare(self, arguments: dict[str, Any], layout: Layout) -> None:
        """Raise on every rank if the batch's layout, or whole inputs or positions, differ between ranks.

        Layouts and shapes are compared in every forward; contents in the first one of each shape, in check mode in all.
        """
        group, found = self.sequence.mesh.get_group(), self._whole(arguments)
        if any(x is not None for x in found.values()):
            of_batch = "" if layout.tensor is None else f" {Content.of(layout.tensor).number:x}"
            compare_batch(group, kind_of(found), found, layout=layout.spec() + of_batch)

    def _compared(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return ``arguments`` of a traced forward through an op that compares them at run time, as in `compare`."""
        name = self.sequence.mesh.get_group().group_name
        found = {key: x for key, x in self._whole(arguments).items() if x is not None and not x.is_floating_point()}
        layout, tables = self.sequence.layout, self._tables(arguments)
        layout = PLAIN if is_by_batch(layout) else layout
        told = layout.spec() if layout.tensor is None and not tables and self.sequence.pad else ""
        copies = compare_inputs([*found.values(), *tables], " ".join(found), name, told)
        return arguments | dict(zip(found, copies, strict=False))

    def _tables(self, arguments: dict[str, Any]) -> list[Tensor]:
        """The tensors of the layouts that masks among the arguments have."""
        layouts = [x.layout for x in arguments.values() if isinstance(x, Mask) and x.layout is not None]
        return [layout.tensor for layout in layouts if layout.tensor is not None]

    def _whole(self, arguments: dict[str, Any]) -> dict[str, Any]:
        names = [*self.inputs, *([self.positions] if self.positions else [])]
        return {name: arguments.get(name) for name in names}

    def gather(self, sequence: ShardedSequence, output: Any) -> Any:
        """Gather the output of a forward in original order; ``sequence`` is the one of that forward.

        In a mapping, such as an output of Transformers, the entries named in `OUTPUTS`; scalars stay as they are.
        """
        found = None if not isinstance(output, Mapping) else [name for name in OUTPUTS if output.get(name) is not None]
        for name, x in () if found is None else output.items():
            if name not in (found or ()) and (not isinstance(x, Tensor) or x.ndim > 0):
                expected = f"entries of the output named {', '.join(OUTPUTS)}, and scalars"
                hint = "leave it out, or gather_output=False"
                refuse("gather_output", expected, f"{name}, a {type(x).__name__}", hint)
        return gather_entries("ShardedModel.gather_output", output, found, sequence.gather)

    def shard_inputs(self, arguments: dict[str, Any]) -> tuple[Root, dict[str, Any]]:
        """Return the `Root` of one forward, and its arguments by name with inputs and positions sharded."""
        given = dict(arguments)
        present = [name for name in self.inputs if given.get(name) is not None]
        if self.inputs and not present:
            refuse("ShardedModel", f"one of {self.inputs} in the call", list(given), "pass it")
        sequence, masks = self.sequence, {name: x for name, x in given.items() if isinstance(x, Mask)}
        tensors = [given[name] for name in present] or [x for x in given.values() if isinstance(x, Tensor)]
        length = tensors[0].shape[1] if present else sequence.length

        def fits(mask: Mask) -> bool:  # others are of another sequence
            return mask.documents is None or mask.documents.shape[-1] in (length, sequence.seq_len)

        if self.layout is not None:
            sequence = replace(sequence, layout=layout_of_call(self, None, **arguments))
        else:
            masks = {name: x for name, x in masks.items() if fits(x)}
            telling = (x for x in masks.values() if x.documents is not None or x.layout is not None)
            sequence = sequence.of_mask(next(telling, None))
            if is_by_batch(sequence.layout) or sequence.layout.tensor is not None:  # cores take it from their masks
                given |= {name: replace(x, layout=x.layout or sequence.layout) for name, x in masks.items()}
        for name in present:
            given[name] = sequence.shard({name: given[name]})[name]
        for mask in () if torch.compiler.is_compiling() else masks.values():
            note_documents(mask, sequence.mesh.get_group())
        if self.positions is not None:
            ids = given.get(self.positions)
            if ids is None:
                own = sequence.positions(length, device=tensors[0].device)
                given[self.positions] = own if self.position_dims == 1 else own[None]
            else:
                given[self.positions] = sequence.shard({"positions": ids}, dim=ids.ndim - 1)["positions"]
        assert length is not None
        return Root(sequence, length if sequence.seq_len is None else sequence.seq_len), given


@constant_in_traces  # so that Dynamo raises the error, and does not fall back to eager code
def _refuse_compiled() -> None:
    hint = "compile its blocks, or call cp_mesh.probe(model, batch) before the first step"
    expected, got = "a root in eager mode", "one that is compiled as a whole"
    refuse("ShardedModel(probe=True)", expected, got, hint, UnsupportedError)


def names_of(forward: Callable[..., Any]) -> list[str]:
    """Names of a forward's arguments."""
    return [name for name, x in inspect.signature(forward).parameters.items() if x.kind is not x.VAR_POSITIONAL]


def check_traced(module: nn.Module) -> Callable[[], None]:
    """Return what refuses recurrent layers outside of the plan while torch.compile traces the module."""
    own = ref(module)
    return constant_in_traces(lambda: None if (root := own()) is None else refuse_unplanned(root, traced=True))


def gather_entries(
    what: str, output: Any, names: Sequence[str | int] | None, gather: Callable[[Tensor], Tensor]
) -> Any:
    """Gather one tensor, or these entries of a tuple or mapping, which may be tuples of tensors."""
    if names is None:
        if not isinstance(output, Tensor):
            hint = "gather entries that hold rows by GatherOutput(outputs=), or by sequence.gather"
            refuse(what, "one tensor as output", type(output).__name__, hint)
        return gather(output)
    made, entries = type(output), dict[Any, Any](output if isinstance(output, Mapping) else enumerate(output))
    for name in names:
        x = entries.get(name)
        if not isinstance(x, Tensor | tuple):
            got = [key for key, entry in entries.items() if isinstance(entry, Tensor)]
            refuse(f"{what}: outputs", f"a tensor at {name!r}", f"tensors at {got}", "name one")
        entries[name] = gather(x) if isinstance(x, Tensor) else tuple(gather(y) for y in x)
    if isinstance(output, Mapping):
        return made(entries)
    return made(*entries.values()) if hasattr(made, "_fields") else made(entries.values())


def _check_masks(module: nn.Module, arguments: dict[str, Any]) -> None:
    """Refuse a `Mask` among the arguments of a model if none of its cores reads one."""
    given = [name for name, x in arguments.items() if isinstance(x, Mask)]
    if given and all(isinstance(style.mask, Mask) for style in cores_of(module)):
        hint = f"ContextParallel(sequence, mask=lambda ..., {given[0]}: {given[0]}) reads it from the core's arguments"
        refuse("ShardedModel", f"a core that reads {given[0]}", "styles with fixed masks", hint)


def refuse_counted(sequence: ShardedSequence, cores: list[Any], given: Mapping[str, Any], rows: int) -> None:
    """Refuse positions 0, 1, 2, ... of ``rows`` that have others; documents and layouts of a batch may explain them."""
    if any(callable(style.mask) or style.mask.documents is not None or style.layout for style in cores):
        return
    for name in POSITIONS:
        if isinstance(x := given.get(name), Tensor) and x.ndim in (1, 2) and x.shape[-1] == rows:
            counted = torch.arange(rows, device=x.device)
            own = sequence.positions(rows * sequence.cp_size if sequence.length is None else None, x.device)
            if (x == counted).all() and (len(own) != rows or not torch.equal(own, counted)):
                hint = "pass sequence.positions(seq_len)"
                refuse(name, f"the positions of this rank's {rows} rows", "0, 1, 2, ...", hint)


def _loss_of(output: Any) -> Any:
    if isinstance(output, dict):
        return output.get("loss")
    return next(iter(output)) if isinstance(output, tuple) and output else getattr(output, "loss", None)
