"""`probe`: run a model on the first tokens of a batch (the piece), sharded and whole, and compare the outputs.

Both runs use the same module in place, in eval mode, without gradients and in float32. For the whole run the
`ShardedSequence` of the styles gets a mesh of this rank alone. Ranks agree through the store after every step, because
a rank that continued alone would wait for the others in a collective.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import fields, is_dataclass, replace
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.random import fork_rng

from cp_mesh._torch import active_ddp, loaded_dynamo, meshes_of_fsdp, unwrapped
from cp_mesh.comm.agreement import check_mode, exchange, refusing
from cp_mesh.comm.group_state import states_of_all
from cp_mesh.errors import refuse, typed, warn
from cp_mesh.geometry.layouts import Layout, ZigZag
from cp_mesh.geometry.mask import Mask
from cp_mesh.sequence.auto import is_by_batch
from cp_mesh.sequence.cuts import Cuts
from cp_mesh.sequence.sharded_sequence import WHOLE, ShardedSequence
from cp_mesh.training.style_helpers import groups_over_tp, style_of, styles_of
from cp_mesh.training.traces import RowProducts, Trace, TracedPlace, gaps, output_of, pair
from cp_mesh.training.widening import widened

LIMIT, SHARE = 3e-4, 0.9
"""Largest relative difference of this share of the rows. Float32 rounding is a tenth of it at most, mistakes more."""
MOST_UNITS, LEAST_UNITS = 4, 2
"""Multiples of the layout's unit in a piece. In a longer one, fewer rows are at shard edges, where mistakes appear."""
_ALONE: dict[str, str | None] = dict.fromkeys(("kernel", "method", "transport"), "auto")
_ALONE |= dict.fromkeys(("ulysses_degree", "head_chunks"))
_CROSS = "equal sequence lengths (self-attention)"  # words of the error for keys that are not the sharded sequence
_LOSSES = ("labels", "shift_labels", "num_items_in_batch")  # arguments that the logits do not need, in Transformers
_PLAIN = bool | int | float | str | torch.dtype | torch.device | Layout | ShardedSequence | None
_CAUSES = "usually positions that the model counts, or layers outside of the plan that mix tokens"
_CAUSES += ": docs/guard.md#the-probe"


@typed
def probe(model: nn.Module, batch: Mapping[str, Any]) -> str:
    """Run a model on the first tokens of a batch, sharded over cp and whole on every rank, and compare the rows.

    Training continues as if the probe had not run, except for attributes that the model's own Python code changes in
    its forward; a warning names them. Call it on all ranks, before the first step or between steps, while no other
    thread shards, because the probe changes the sequence object for the time of its runs.

    Args:
        model: a model after `parallelize` with a `ShardedModel`, or after `parallelize` of
            `cp_mesh.integrations.transformers`; also after checkpointing, ``compile`` and ``fully_shard`` if used.
        batch: the arguments of the forward by name, with whole sequences, as in a step.

    Returns:
        "" if the rows agree; else the reason why it did not compare them, which it also warns of.

    Raises:
        ArgumentError: on all ranks, if over 10% of the rows differ by more than 3e-4 relative, or if only the sharded
            run raises. The message names the rows, the first module that differs, and the last one that agrees.

    Example:
        >>> cp_mesh.probe(model, {"tokens": tokens})  # doctest: +SKIP
    """
    roots = (part for part in model.modules() if hasattr(_root_of(style_of(part)), "shard_inputs"))
    if (module := next(roots, None)) is None:
        return _skip("the model has no ShardedModel, which the probe needs to run the whole piece on one rank")
    ddp = next((part for part in model.modules() if isinstance(part, DistributedDataParallel)), None)
    try:
        return _Probe(style_of(module), module, batch, module, ddp).run()
    finally:
        for part in module.modules():
            if isinstance(part, FSDPModule):  # FSDP2 leaves the root unsharded after a forward without gradients
                part.reshard()


def probe_once(style: Any, module: nn.Module, arguments: Mapping[str, Any], forward: Callable[..., Any]) -> None:
    """Run `probe` in the first eager forward of a root, with ``forward`` called on the piece."""
    style.probe = False
    _Probe(style, module, arguments, forward, active_ddp()).run()


def without_probe(model: nn.Module) -> None:
    """Turn off the probe in the first forward of a model."""
    for style in styles_of(model):
        if hasattr(style, "probe"):
            style.probe = False


@contextmanager
def mesh_of_one(mesh: DeviceMesh) -> Iterator[DeviceMesh]:
    """Yield a mesh of this rank alone. It sends nothing; on gloo, because NCCL would split a communicator."""
    group = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    try:
        yield DeviceMesh.from_group(group, mesh.device_type, mesh_dim_names=("cp",))
    finally:
        dist.destroy_process_group(group)


def _root_of(owner: Any) -> Any:
    """Return the `ShardedModel` of a root's owner: the owner itself, or its ``style``."""
    return getattr(owner, "style", owner)


def _skip(reason: str) -> str:
    warn(f"the probe did not compare anything: {reason}. cp_mesh.verify_model compares a whole step")
    return reason


class _Skip(Exception):
    """The probe cannot compare."""


class _Probe:
    """One run of `probe` on the root ``module``, which ``owner`` runs; ``forward`` is called with the piece.

    The result of a rank begins with its kind and a colon: "skipped", "found" or "differ"; "" if the rows agree.
    """

    def __init__(
        self, owner: Any, module: nn.Module, batch: Mapping[str, Any], forward: Callable[..., Any],
        ddp: DistributedDataParallel | None,
    ) -> None:  # fmt: skip
        self.root, self.module, self.forward, self.runs = _root_of(owner), module, forward, 0
        losses = _LOSSES if self.root is not owner else ()
        self.batch = {name: x for name, x in batch.items() if name not in losses}
        self.sequence: ShardedSequence = self.root.sequence
        self.styles = [*{id(x): x for x in (self.root, *styles_of(module))}.values()]
        found = (getattr(style, "sequence", None) for style in self.styles)
        self.sequences = [*{id(x): x for x in found if x is not None}.values()]
        over_tp = sorted(groups_over_tp(module), key=lambda group: group.group_name)
        self.tp_size = math.prod(group.size() for group in over_tp)
        # Ranks in these groups run the model together: cp, tp, and the meshes of parameters.
        groups = [self.sequence.mesh.get_group(), *over_tp]
        meshes = [x.device_mesh for x in module.parameters() if isinstance(x, DTensor)]
        meshes += [mesh for part in module.modules() if isinstance(part, FSDPModule) for mesh in meshes_of_fsdp(part)]
        groups += [mesh.get_group(axis) for mesh in meshes for axis in range(mesh.ndim)]
        groups += [] if ddp is None else [ddp.process_group]
        self.groups = [*{group.group_name: group for group in groups}.values()]

    def run(self) -> str:
        if self.sequence.cp_size == 1:
            return ""
        before, said = _states(self.module), ""
        try:
            self._cut_batch()
        except Exception as error:  # a batch may hold any objects
            said = f"skipped: {error}"
        with mesh_of_one(self.sequence.mesh) as alone:
            said = self._vote(said) or self._compare(alone)
        if changed := [name for name, state in _states(self.module).items() if before.get(name) != state]:
            told = f"{', '.join(changed[:8])}{', ...' * (len(changed) > 8)}; reset them if training uses them"
            words = "times, which changed these attributes of its modules"
            warn(f"the probe ran the model {self.runs} {words}: {told}")
        kind, _, words = said.partition(": ")
        if kind in ("", "skipped"):
            return _skip(words) if kind else ""
        expected = f"the same rows as on one rank, within {LIMIT:g} on {self.length} tokens"
        with refusing(None, known=True):
            refuse("cp_mesh.probe", expected, words, _CAUSES)

    def _compare(self, alone: DeviceMesh) -> str:
        """Run the model whole and sharded; return the result on which all ranks agree."""
        whole, raised = self._attempt(alone)
        said = "skipped: " + _words("with all rows of the piece on one rank the model", raised) if raised else ""
        if _CROSS in str(raised):
            said = f"found: a core whose keys are not rows of the sequence: {raised}"
        if (failed := self._vote(said)).startswith("found"):
            return failed
        rows, raised = self._attempt(None)
        if failed:
            return failed if self._vote("raised" if raised else "") else f"found: {failed[9:]}; sharded it did not"
        said = "found: " + _words("the sharded run alone", raised) if raised else self._difference(rows, whole)
        said = self._vote(said)
        if not said.startswith("differ"):
            return said
        other, raised = self._attempt(alone, seed=1)
        is_random = raised is not None or self._difference(other, whole)
        again = self._vote("skipped: the model is random in eval mode: no two runs agree" if is_random else "")
        return again or said + self._vote(self._first_module(alone)).partition(" ")[2]

    def _vote(self, word: str) -> str:
        """Return the alphabetically first nonempty result of all ranks, the same on each rank; "" if all are empty."""
        for group in self.groups:
            with check_mode():  # ranks must agree even with checks turned off
                answers = exchange(group, {"call": "cp_mesh.probe", "probe": word})
            word = min(filter(None, (answer["probe"] for answer in answers)), default="")
        return word

    # The piece.

    def _cut_batch(self) -> None:
        present = [self.batch[name] for name in self.root.inputs if self.batch.get(name) is not None]
        if not present:
            raise _Skip("the model gets no whole sequence, as in a later stage of a pipeline")
        self.sizes = present[0].shape[:2]
        cp_size = self.sequence.cp_size
        unit = math.lcm(self.sequence.layout.multiple(cp_size), cp_size * self.tp_size)
        units = min(self.sizes[1] // unit, MOST_UNITS)
        if units < LEAST_UNITS:
            raise _Skip(f"a piece needs at least {LEAST_UNITS * unit} tokens, the batch has {self.sizes[1]}")
        self.length = units * unit
        self.piece = self._cut("", self.batch)

    def _cut(self, name: str, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self._cut_tensor(name, x)
        if isinstance(x, Mask):
            return _cut_mask(x, self.length)
        if isinstance(x, _PLAIN):
            return x
        if isinstance(x, Mapping):
            return {key: self._cut(str(key), value) for key, value in x.items()}
        if isinstance(x, list | tuple):
            parts = [self._cut(name, each) for each in x]
            return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
        if is_dataclass(x) and not isinstance(x, type):
            return replace(x, **{f.name: self._cut(f.name, getattr(x, f.name)) for f in fields(x) if f.init})
        raise _Skip(f"no piece can be cut of {name}, of type {type(x).__name__}")

    def _cut_tensor(self, name: str, x: Tensor) -> Tensor:
        """Cut a tensor by its name; under an unknown name, cut every dim that has the length of the sequence.

        The last dim of floating [B, rows, C], or [n, C], is of features, which may be as many.
        """
        length, (batch, whole) = self.length, self.sizes
        if name.startswith("cu_seq"):
            return torch.cat([x[x < length], x.new_tensor([length])])
        if name in self.root.inputs:
            return x[:, :length]
        if name in (self.root.positions, *WHOLE):
            return x[..., :length]
        of_features = x.is_floating_point() and x.ndim == (3 if x.shape[:1] in ((1,), (batch,)) else 2)
        for dim in range(x.ndim - of_features):
            if x.shape[dim] in (whole, self.sequence.seq_len) and not (dim == 0 < x.ndim - 1 and x.shape[0] == batch):
                x = x.narrow(dim, 0, length)
        return x

    # The runs.

    def _attempt(self, mesh: DeviceMesh | None, seed: int = 0) -> tuple[Any, Exception | None]:
        """Return the rows of a run or its exception. The run is whole on ``mesh``, of one rank; None: sharded."""
        self.runs += 1
        on_gpu = self.sequence.mesh.device_type == "cuda"
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        # Our tp linears refuse mixed dtypes unless autocast casts; the dtype that autocast asks for is widened, too.
        cast = torch.autocast(device.type, torch.bfloat16, enabled=self.tp_size > 1, cache_enabled=False)
        try:
            with _unchanged(self.module, [*self.styles, *self.sequences], device), cast, widened(self.module):
                self._tell(mesh)
                torch.default_generator.manual_seed(seed)
                if on_gpu:
                    torch.cuda.manual_seed(seed)
                rows = _rows_of(copy_context().run(self.forward, **self.piece))
                if mesh is None and rows.shape[1] * self.sequence.cp_size == self.length:
                    rows = self.sequence.unshard(rows)
                return rows, None
        except Exception as error:  # the user's model may raise anything
            return None, error

    def _tell(self, mesh: DeviceMesh | None) -> None:
        """Set styles and sequences to the piece and, for a whole run, to the mesh of this rank alone."""
        options = {"kernel": "auto"} if mesh is None else _ALONE  # FlashAttention has no float32
        others = {"layout": None, "watch": False, "probe": False}
        for own in (style.__dict__ for style in self.styles):
            own.update({name: x for name, x in others.items() if name in own})
            if "options" in own:
                own["options"] = own["options"] | {name: x for name, x in options.items() if name in own["options"]}
            if isinstance(own.get("mask"), Mask):
                own["mask"] = _cut_mask(own["mask"], self.length)
        for own in (sequence.__dict__ for sequence in self.sequences):
            own["_positions"] = {}  # cached positions depend on the mesh
            own["layout"] = ZigZag() if is_by_batch(own["layout"]) else own["layout"]
            own.update({} if own["length"] is None else {"length": self.length})
            own.update({} if mesh is None else {"mesh": mesh, "ulysses_degree": None})

    def _difference(self, rows: Tensor, whole: Tensor) -> str:
        """Describe the rows that differ; "" if they agree."""
        if self.length != whole.shape[1] == rows.shape[1]:
            return f"skipped: the output, of shape {tuple(whole.shape)}, has no rows along dim 1"
        if rows.shape != whole.shape:
            return f"found: outputs of shapes {tuple(rows.shape)}, sharded, and {tuple(whole.shape)}, whole"
        apart = _apart(rows, whole)
        if not _too_far(apart):
            return ""
        where = (apart > LIMIT).any(0).nonzero().flatten().tolist()
        return f"differ: rows that are {float(apart.max()):.2g} of their size apart, at positions {_ranges(where)}"

    def _first_module(self, alone: DeviceMesh) -> str:
        """Find the first module, in order of completion, whose output differs on this rank: its number, and words."""
        layout = ZigZag() if is_by_batch(self.sequence.layout) else self.sequence.layout
        own = layout.positions(self.length, self.sequence.cp_size, self.sequence.cp_rank)
        whole, here = self._trace(alone, torch.arange(self.length, device=own.device)), self._trace(None, own)
        agreed = ""
        for number, (place, rows) in enumerate(whole.items()):
            if place.what.startswith("output") and (found := pair(here.get(place), rows, self.length)) is not None:
                if _too_far(gaps(found, self.length)[found.positions]):
                    words = f", from {place.module or 'the root'} on" + f" ({agreed} agrees)" * bool(agreed)
                    return f"{number:06d} {words}"
                agreed = place.module
        return ""

    def _trace(self, mesh: DeviceMesh | None, positions: Tensor) -> Mapping[TracedPlace, RowProducts]:
        """The rows of all modules in a run, which has those at ``positions``."""
        trace = Trace(self.length, lambda: positions)
        with trace.of(self.module, ((unwrapped(path), part) for path, part in self.module.named_modules())):
            self._attempt(mesh)
        return trace.forward


def _words(what: str, error: Exception) -> str:
    said = " ".join(str(error).split())
    short = f"{what} raised {type(error).__name__}: {said[:300]}{'...' * (len(said) > 300)}"
    return said if isinstance(error, _Skip) else short


def _cut_mask(mask: Mask, length: int) -> Mask:
    tensors = {name: x for name in WHOLE if isinstance(x := getattr(mask, name, None), Tensor)}
    cut: dict[str, Any] = {name: x[..., :length] for name, x in tensors.items()}
    end = None if mask.length is None else min(mask.length, length)
    return replace(mask, **cut, length=end, prefix=min(mask.prefix, length), layout=None)


def _rows_of(output: Any) -> Tensor:
    """Return the rows of an output: [B, rows, ...]."""
    x = output_of(output, 2)
    if x is None or x.ndim < 2:
        raise _Skip(f"no rows were found in what the model returned, of type {type(output).__name__}")
    return x if x.dtype == torch.float64 else x.float()


def _apart(rows: Tensor, whole: Tensor) -> Tensor:
    """Return differences [B, rows], relative to the RMS of the row, or to a tenth of the average RMS if larger."""
    off = (rows - whole).masked_fill(rows.isnan() & whole.isnan(), 0.0)
    off, size = (x.unsqueeze(-1).flatten(2).square().mean(-1) for x in (off, whole.nan_to_num(0.0, 0.0, 0.0)))
    size = torch.maximum(size.sqrt(), 0.1 * size.mean().sqrt()).clamp_min(1e-30)
    return (off.sqrt() / size).nan_to_num(math.inf, math.inf)


def _too_far(apart: Tensor) -> bool:
    return apart.numel() > 0 and float(apart.flatten().quantile(SHARE)) > LIMIT  # a rank may have no rows


def _ranges(positions: list[int]) -> str:
    """Format positions as "0-3, 6"."""
    runs = ([x for _, x in run] for _, run in groupby(enumerate(positions), lambda pair: pair[1] - pair[0]))
    return ", ".join("-".join(map(str, dict.fromkeys((run[0], run[-1])))) for run in runs)


def _states(module: nn.Module) -> dict[str, Any]:
    """Return the plain Python attributes of modules: numbers, strings, and entries of collections."""
    own, found = {*vars(nn.Module())}, dict[str, Any]()
    for path, part in module.named_modules():
        for name, x in vars(part).items():
            if name in own or name.startswith("_cp_mesh"):
                continue
            if isinstance(x, list | dict | set):
                inside = (*x, *x.values()) if isinstance(x, dict) else x
                x = [y if isinstance(y, int | float) else id(y) for y in inside]
            if isinstance(x, int | float | str | list):
                found[f"{path}.{name}".lstrip(".")] = x
    return found


@contextmanager
def _unchanged(module: nn.Module, told: list[Any], device: torch.device) -> Iterator[None]:
    """Run modules in eval mode, without gradients and compiled code, and restore their state afterwards."""
    parts = [*module.modules()]
    modes = [part.training for part in parts]
    tables = [(x.__dict__, "") for x in (*told, *states_of_all(Cuts))]
    tables += [(x, "") for part in parts if isinstance(x := vars(part).get("_buffers"), dict)]  # not those of torch.jit
    tables += [(vars(part), "_cp_mesh") for part in parts]  # attributes that cp_mesh sets
    before = [_starting(table, prefix) for table, prefix in tables]
    copies = [(x, x.clone()) for x in module.buffers() if not x.is_meta]
    devices = [device.index] if device.type == "cuda" else []
    stance: Any = nullcontext() if loaded_dynamo() is None else torch.compiler.set_stance("force_eager")
    try:
        _set_modes(parts, [False] * len(parts))
        for cuts in states_of_all(Cuts):  # the piece may equal this rank's rows of the batch
            vars(cuts).update(vars(Cuts()))
        with fork_rng(devices), torch.no_grad(), warnings.catch_warnings(), stance:
            warnings.simplefilter("ignore")  # the next forward repeats them
            yield
    finally:
        _set_modes(parts, modes)
        for (table, prefix), held in zip(tables, before, strict=True):
            for name in _starting(table, prefix):
                del table[name]
            table.update(held)
        _set_buffers(copies)


def _starting(table: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {name: x for name, x in table.items() if name.startswith(prefix)}


def _set_modes(parts: list[nn.Module], modes: list[bool]) -> None:
    """Set ``training`` directly, since some modules override ``train()``."""
    for part, mode in zip(parts, modes, strict=True):
        part.training = mode


@torch.no_grad()
def _set_buffers(copies: list[tuple[Tensor, Tensor]]) -> None:
    for x, before in copies:
        if not torch.equal(x, before):
            x.copy_(before)
