"""The styles: a core, or a whole model, that a plan made context-parallel computes what one rank computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dense import dense_attention, dense_dropout, dense_mask, make_qkv
from inside import inner, replaced
from model import Core, DenseCore, Model, V, batch, overlapped_plan, tensor_parallel_plan
from ranks import mesh, num_collectives, on_ranks, refused, rejoin
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInputOutput, parallelize_module
from torch.utils.checkpoint import checkpoint

from cp_mesh import (
    ArgumentError,
    Checkpointed,
    ContextParallel,
    Contiguous,
    Mask,
    RecurrentParallel,
    ShardedModel,
    ShardedSequence,
    Striped,
    TiledMLP,
    UnsupportedError,
    ZigZag,
    parallelize,
    verify_model,
)
from cp_mesh.tensor_parallel import OverlappedColwise, OverlappedRowwise, VocabParallelEmbedding, VocabParallelHead
from cp_mesh.tools import verify
from cp_mesh.training import GatherOutput, ShardInput

STYLE = inner("wrap", "STYLE")

B, H, K, S, D = 2, 4, 2, 24, 6
TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}


def make_core(axis: DeviceMesh, core: nn.Module | None = None, layout: Any = None, **options: Any) -> nn.Module:
    style = ContextParallel(ShardedSequence(axis, layout or ZigZag()), **options)
    return parallelize(core or Core(), axis, {"": style})


def shard_whole(sequence: ShardedSequence) -> list[Tensor]:
    return [sequence.shard(x, dim=2) for x in make_qkv(B, H, K, S, D)]


def expected(bias: Tensor | None = None, **conditions: Any) -> list[Tensor]:
    """out, dq, dk, dv of the whole sequence."""
    q, k, v, dout = make_qkv(B, H, K, S, D)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, _ = dense_attention(q, k, v, dense_mask(S, **conditions), bias=bias)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def gather(sequence: ShardedSequence, *tensors: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return [sequence.unshard(x, dim=2) for x in tensors]


def assert_close(got: list[Tensor], want: list[Tensor]) -> None:
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE, msg=lambda m, name=name: f"{name}: {m}")


def check(core: Any, sequence: ShardedSequence, want: list[Tensor] | None = None, **given: Any) -> None:
    """A core's output for local rows, and its gradients, are those of the whole sequence."""
    *qkv, dout = shard_whole(sequence)
    q, k, v = (x.requires_grad_() for x in qkv)
    out = core(q, k, v, **given)
    assert type(out) is Tensor and out.shape == q.shape
    out.backward(dout)
    assert_close(gather(sequence, out, q.grad, k.grad, v.grad), want or expected(documents=given.get("documents")))


# Cores: plain tensors, DTensors over tp, DTensors over the whole mesh.


@pytest.mark.parametrize(
    ("method", "count"), [("auto", 6), ("ring", 6), ("all_gather", 3), ("ulysses", 4), ("hybrid", 7)]
)
@on_ranks(4)
def test_the_method_of_a_core(axis: DeviceMesh, method: str, count: int) -> None:
    """It is used: each has its number of collectives."""
    sequence = ShardedSequence(axis, ZigZag())
    core, (q, k, v, _) = make_core(axis, method=method), shard_whole(sequence)
    with torch.no_grad():
        core(q, k, v)  # the first call of the hybrid makes groups
    before = num_collectives()
    core(*(x.requires_grad_() for x in (q, k, v))).sum().backward()
    assert num_collectives() - before == count
    check(core, sequence)


DOCUMENTS = torch.tensor([[i // 7 for i in range(S)], [i % 3 for i in range(S)]])


LAYOUTS = [Contiguous(), ZigZag(), Striped()]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.spec())
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["causal", "documents"])
@on_ranks(3)
def test_core_of_plain_tensors(axis: DeviceMesh, layout: Any, documents: Tensor | None) -> None:
    if documents is None:
        check(make_core(axis, layout=layout), ShardedSequence(axis, layout))
    else:
        core = make_core(axis, layout=layout, mask=lambda q, k, v, documents: Mask(documents=documents))
        check(core, ShardedSequence(axis, layout), documents=documents)


@pytest.mark.parametrize("whole_mesh", [False, True], ids=["tp", "whole mesh"])
@pytest.mark.parametrize(
    ("memory", "documents"), [("contiguous", None), ("transposed", DOCUMENTS), ("not as the spec says", None)]
)
@on_ranks(4)
def test_core_of_dtensors(whole_mesh: bool, documents: Tensor | None, memory: str) -> None:
    """Results can be viewed, however the heads lie in memory."""
    axes = mesh((2, 2), ("cp", "tp"))
    sequence = ShardedSequence(axes["cp"], ZigZag())
    options = {} if documents is None else {"mask": lambda q, k, v, documents: Mask(documents=documents)}
    core = make_core(axes["cp"], **options)
    core.sliding_window = S  # as long as the sequence, so the style needs none
    on, placements = (axes, [Shard(2), Shard(1)]) if whole_mesh else (axes["tp"], [Shard(1)])

    def place(x: Tensor) -> DTensor:
        heads = x.chunk(2, dim=1)[axes.get_local_rank("tp")]
        if memory == "transposed":
            heads = heads.transpose(1, 2).contiguous().transpose(1, 2)
        shape = list(x.shape) if not whole_mesh else [*x.shape[:2], S, x.shape[3]]
        spec = torch.empty(shape, device="meta")
        if memory != "contiguous":
            spec = spec.transpose(1, 2).contiguous().transpose(1, 2)
        local = heads if memory == "transposed" else heads.contiguous()
        return DTensor.from_local(local, on, placements, run_check=False, shape=spec.shape, stride=spec.stride())

    q, k, v, dout = (place(x) for x in shard_whole(sequence))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = core(q, k, v) if documents is None else core(q, k, v, documents)
    assert type(out) is DTensor and type(out.to_local()) is Tensor
    assert out.placements == q.placements and out.device_mesh == q.device_mesh and out.shape == q.shape
    assert out.transpose(1, 2).reshape(out.shape[0], out.shape[2], -1).to_local().numel() == out.to_local().numel()
    out.backward(dout)
    results = []
    for x in (out, q.grad, k.grad, v.grad):
        assert x.placements == q.placements and type(x.to_local()) is Tensor
        shards = x.redistribute(placements=[*placements[:-1], Replicate()]).to_local()  # every head of these rows
        results += gather(sequence, shards)
    assert_close(results, expected(documents=documents))


class SinkCore(nn.Module):
    """A core with a parameter that its style reads, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.linspace(-1, 1, H, dtype=torch.float64))
        self.dropout_p = 0.3

    def forward(self, q: Tensor, k: Tensor, v: Tensor, softcap: float) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout_p, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize("on_tp", [False, True], ids=["plain", "tp"])
@on_ranks(4)
def test_core_with_scores(rank: int, on_tp: bool) -> None:
    """out, dq, dk, dv, and the gradient of the sinks summed over cp, and over tp where they are shards."""
    q, k, v, dout = make_qkv(B, H, K, S, D)
    leaves = [x.requires_grad_() for x in (q, k, v, SinkCore().sinks)]
    kept = None if on_tp else dense_dropout(B, H, S, 0.3, 5)
    out, _ = dense_attention(*leaves[:3], dense_mask(S), softcap=0.8, sinks=leaves[3], kept=kept)
    want = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    axes = mesh((2, 2), ("cp", "tp"))
    sequence, core = ShardedSequence(axes["cp"], ZigZag()), SinkCore()

    def scores(core: nn.Module, q: Tensor, k: Tensor, v: Tensor, softcap: float) -> dict[str, Any]:
        return {"sinks": core.sinks, "softcap": softcap, "dropout_seed": 5}

    style = ContextParallel(sequence, scores=scores, mask=lambda q, k, v, softcap: Mask())
    q, k, v, dout = shard_whole(sequence)
    if on_tp:
        core.dropout_p = 0.0  # which would count heads from each tp rank's first
        core.sinks = nn.Parameter(distribute_tensor(core.sinks.detach(), axes["tp"], [Shard(0)]))
        q, k, v, dout = (distribute_tensor(x, axes["tp"], [Shard(1)]) for x in (q, k, v, dout))
    core = copy.deepcopy(parallelize(core, axes["cp"], {"": style}))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = core(q, k, v, softcap=0.8)
    out.backward(dout)
    results = [out, q.grad, k.grad, v.grad, core.sinks.grad]
    if on_tp:
        results = [x.full_tensor() for x in results]
    dist.all_reduce(results[-1], group=axes["cp"].get_group())
    got = [*gather(sequence, *results[:-1]), results[-1]]
    torch.testing.assert_close(got, want, **TOLERANCE)


class OddCore(nn.Module):
    """Several calls, by keyword and by position, with a scale, among other work."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        sdpa = F.scaled_dot_product_attention
        first = sdpa(query=q, key=k, value=v, attn_mask=None, dropout_p=0.0, is_causal=True, scale=0.7, enable_gqa=True)
        return first, {"second": sdpa(q, k, v, None, 0.0, True, enable_gqa=True) * 2 + first}


@on_ranks(3)
def test_a_core_with_several_calls(axis: DeviceMesh) -> None:
    sequence, (q, k, v, _) = ShardedSequence(axis), make_qkv(B, H, K, S, D)
    want = dense_attention(q, k, v, dense_mask(S), scale=0.7)[0]
    first, rest = make_core(axis, OddCore())(*shard_whole(sequence)[:3])
    got = gather(sequence, first, rest["second"])
    torch.testing.assert_close(got, [want, 2 * dense_attention(q, k, v, dense_mask(S))[0] + want], **TOLERANCE)


@on_ranks(2)
def test_nothing_is_patched(axis: DeviceMesh) -> None:
    """Also after an error; outside of the core the function is PyTorch's own."""
    sdpa, (q, k, v, _) = F.scaled_dot_product_attention, shard_whole(ShardedSequence(axis))
    make_core(axis)(q, k, v)
    with pytest.raises(ArgumentError):
        make_core(axis, mask=Mask(causal=False))(q, k, v)
    assert F.scaled_dot_product_attention is sdpa and torch._C._len_torch_function_stack() == 0
    before = num_collectives()
    local = sdpa(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(local, dense_attention(q, k, v, dense_mask(S // 2))[0])
    assert num_collectives() == before


@pytest.mark.parametrize("use_reentrant", [False, True])
@on_ranks(2)
def test_checkpoint_around_a_core(axis: DeviceMesh, use_reentrant: bool) -> None:
    core = make_core(axis)
    check(lambda *qkv: checkpoint(core, *qkv, use_reentrant=use_reentrant), ShardedSequence(axis))


@pytest.mark.parametrize("use_reentrant", [False, True])
@on_ranks(2)
def test_checkpoint_inside_a_core_is_refused(axis: DeviceMesh, use_reentrant: bool) -> None:
    """The recomputation would run outside of the style's forward, where attention is local."""
    core = Core()
    attend = core.forward
    core.forward = lambda *qkv: checkpoint(attend, *qkv, use_reentrant=use_reentrant)  # type: ignore[method-assign]
    with refused("checkpoint the module that holds the core", UnsupportedError):
        check(make_core(axis, core), ShardedSequence(axis))


@on_ranks(2)
def test_any_mask_is_a_bias(axis: DeviceMesh) -> None:
    """As the message says that refuses a tensor attn_mask."""
    hidden = (torch.arange(S)[:, None] * 7 + torch.arange(S) * 5) % 3 == 0
    bias = torch.zeros(1, 1, S, S, dtype=torch.float64).masked_fill(hidden, -torch.inf)
    sequence, core = ShardedSequence(axis), Core()
    core.forward = lambda *qkv: F.scaled_dot_product_attention(*qkv, enable_gqa=True)  # type: ignore[method-assign]
    options = {"scores": {"bias": sequence.shard(bias, dim=2)}, "mask": Mask(causal=False)}
    check(make_core(axis, core, ZigZag(), **options), sequence, expected(bias, causal=False))


# Whole models.


def make_model(axis: DeviceMesh, tp: DeviceMesh | None = None, length: int | None = None, **options: Any) -> nn.Module:
    model, sequence = Model(), ShardedSequence(axis, options.pop("layout", ZigZag()), length=length)
    if tp is not None:
        parallelize(model, tp, tensor_parallel_plan())

    def mask(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Mask:
        return Mask(documents=documents)

    plan = {"": ShardedModel(sequence, **options), "layers.*.core": ContextParallel(sequence, mask=mask)}
    return parallelize(model, axis, plan)


def model_batch(S: int, *names: str) -> dict[str, Tensor]:
    return {name: batch(B, S)[name] for name in ("tokens", *names)}


@pytest.mark.parametrize(
    ("size", "layout", "length", "given"),
    [
        (1, ZigZag(), 24, ("documents", "positions")),
        *((3, layout, 22, ("documents", "positions")) for layout in LAYOUTS),
        (3, ZigZag(), 24, ("documents",)),
        (3, Striped(), 22, ()),
    ],
    ids=str,
)
@on_ranks("size")
def test_whole_model(axis: DeviceMesh, size: int, layout: Any, length: int, given: tuple[str, ...]) -> None:
    """Causal, and with documents, whose positions restart; one rank moves nothing."""
    arguments = model_batch(length, *given)
    with torch.no_grad():
        want = Model(DenseCore)(**{"positions": torch.arange(length)} | arguments)
    model, before = make_model(axis, layout=layout, length=length, gather_output=True), num_collectives()
    logits = model(**arguments)
    logits.sum().backward()
    torch.testing.assert_close(logits.detach(), want, **TOLERANCE)
    assert size > 1 or num_collectives() == before


@on_ranks(3)
def test_arguments_of_a_whole_model(axis: DeviceMesh) -> None:
    """Arguments by position, or one row of position ids for all rows, or a sharded output."""
    arguments = batch(B, S)
    model, tokens, documents = Model(DenseCore), arguments["tokens"], arguments["documents"]
    with torch.no_grad():
        plain = model(tokens, torch.arange(S), documents)
        own = model(tokens, arguments["positions"][0], documents)
    assert not torch.allclose(plain, own)
    gathered, sharded = make_model(axis, gather_output=True), make_model(axis)(tokens, documents=documents)
    assert sharded.shape == (B, S // 3, V)
    for got, want in (
        (gathered(tokens, None, documents), plain),
        (gathered(tokens, arguments["positions"][0], documents), own),
        (ShardedSequence(axis).unshard(sharded), plain),
    ):
        torch.testing.assert_close(got.detach(), want, **TOLERANCE)


@on_ranks(2)
def test_outputs_that_are_mappings_are_gathered(axis: DeviceMesh) -> None:
    whole, sequence = torch.arange(S)[None].double(), ShardedSequence(axis, length=S)
    style, rows = ShardedModel(sequence, gather_output=True), sequence.shard({"rows": whole})["rows"]
    with pytest.raises(ArgumentError, match="router_logits"):  # which may not hold rows
        style.gather(sequence, {"router_logits": rows})
    output = {"logits": rows, "hidden_states": (rows, rows + 1), "loss": torch.tensor(2.0)}
    output = style.gather(sequence, output)
    assert torch.equal(output["logits"], whole) and output["loss"] == 2
    assert torch.equal(output["hidden_states"][1], whole + 1)


@pytest.mark.parametrize("dtensors", [False, True], ids=["plain", "DTensors"])
@on_ranks(4)
def test_whole_model_over_cp_and_tp(dtensors: bool) -> None:
    arguments = model_batch(S, "documents", "positions")
    with torch.no_grad():
        expected = Model(DenseCore)(**arguments)
    axes, seen = mesh((2, 2), ("cp", "tp")), []
    model, theirs, plan = Model(), Model(), tensor_parallel_plan()
    if dtensors:  # hooks around the core, which then takes and gives DTensors over tp
        heads = {"input_layouts": (Shard(1),) * 3 + (None,), "output_layouts": Shard(1)}
        desired = {"desired_input_layouts": heads["input_layouts"], "desired_output_layouts": Shard(1)}
        plan["layers.*.core"] = PrepareModuleInputOutput(**heads, **desired, use_local_output=True)
    parallelize(model, axes["tp"], plan)
    parallelize_module(theirs, axes["tp"], plan)
    for (name, parameter), other in zip(model.named_parameters(), theirs.parameters(), strict=True):
        assert getattr(parameter, "placements", None) == getattr(other, "placements", None), name

    def mask(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Mask:
        seen.append(type(q))
        return Mask(documents=documents)

    sequence = ShardedSequence(axes["cp"], ZigZag())
    styles = {"": ShardedModel(sequence, gather_output=True), "layers.*.core": ContextParallel(sequence, mask=mask)}
    logits = parallelize(model, axes["cp"], styles)(**arguments)
    assert seen == [DTensor if dtensors else Tensor] * len(model.layers)
    torch.testing.assert_close(logits.detach(), expected, **TOLERANCE)


# Plans.


def styled(module: nn.Module) -> bool:
    return replaced(module, STYLE) is not None


@on_ranks(2)
def test_plans(axis: DeviceMesh) -> None:
    sequence = ShardedSequence(axis)
    # Nothing is applied where any key is wrong, so the plan can be corrected and applied.
    model = Model()
    with pytest.raises(ArgumentError, match=r"plan key: .*'layers\.\*\.cores'.*near it: layers\.\d\.core"):
        parallelize(model, axis, {"layers.*.core": ContextParallel(sequence), "layers.*.cores": ColwiseParallel()})
    assert all(not styled(layer.core) for layer in model.layers)
    parallelize(model, axis, {"layers.0.core": ContextParallel(sequence), "": ShardedModel(sequence)})
    assert styled(model.layers[0].core) and not styled(model.layers[1].core)
    with pytest.raises(ArgumentError, match="apply once"):
        parallelize(model, axis, {"layers.*.core": ContextParallel(sequence)})
    with pytest.raises(ArgumentError, match=r"ShardedModel: expected .*apply once"):
        parallelize(model, axis, {"": ShardedModel(sequence)})
    # A wildcard stands for one part of a name.
    with pytest.raises(ArgumentError, match="plan key"):
        parallelize(Model(), axis, {"*.core": ContextParallel(sequence)})
    model = nn.Sequential(Core(), Core())
    parallelize(model, axis, {"*": ContextParallel(sequence)})
    assert styled(model[0]) and styled(model[1]) and not styled(model)
    # Styles of PyTorch live in the same plan as ours.
    model = parallelize(Model(), axis, {"head": ColwiseParallel(), "layers.*.core": ContextParallel(sequence)})
    assert isinstance(model.head.weight, DTensor) and styled(model.layers[1].core)


@on_ranks(2)
def test_a_plan_whose_group_is_gone_is_told(rank: int, axis: DeviceMesh) -> None:
    core = parallelize(Core(), axis, {"": ContextParallel(ShardedSequence(axis))})
    dist.barrier()
    dist.destroy_process_group()
    try:
        with pytest.raises(ArgumentError, match="before destroy_process_group"):
            core(*(torch.randn(1, 2, 4, 8) for _ in range(3)))
    finally:
        rejoin(rank)


class CrossCore(Core):
    pass


def elsewhere() -> ShardedSequence:
    return ShardedSequence(mesh((2, 1), ("cp", "other"))["other"])


REFUSED: dict[str, tuple[Callable[[ShardedSequence], dict[str, Any]], str]] = {
    "ContextParallel": (lambda own: {"cross": ContextParallel(own)}, "'cross' is cross-attention"),
    "over another axis": (lambda own: {"core": ContextParallel(elsewhere())}, "the axis of the ShardedSequence"),
    "RecurrentParallel": (lambda own: {"conv": RecurrentParallel(own)}, "causal by padding"),
    "ShardedModel": (lambda own: {"": ShardedModel(own, inputs=("nope",))}, "argument named 'nope'"),
    "ShardInput": (lambda own: {"norm": ShardInput(own, ("nope",))}, "argument 'nope'"),
    "GatherOutput": (lambda own: {"layers": GatherOutput(own, gradient="sum")}, "never called"),
    "TiledMLP": (lambda own: {"layers": TiledMLP(tiles=2)}, "never called"),
    "Checkpointed": (lambda own: {"layers": Checkpointed()}, "never called"),
}
OF_TP = {"mode": "all_reduce"}
REFUSED_OVER_TP: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "OverlappedColwise": (lambda: {"": OverlappedColwise("head", "layers.1.ff.2", **OF_TP)}, "one in_features"),
    "OverlappedRowwise": (lambda: {"norm": OverlappedRowwise(**OF_TP)}, "expected nn.Linear"),
    "VocabParallelEmbedding": (lambda: {"small": VocabParallelEmbedding(**OF_TP)}, "a vocabulary of 1"),
    "VocabParallelHead": (lambda: {"norm": VocabParallelHead(**OF_TP)}, "expected nn.Linear"),
    "two for one linear": (lambda: {"layers.1.wq": OverlappedRowwise(**OF_TP)}, "'layers.1' and 'layers.1.wq'"),
    "a tied tensor": (lambda: {"twin": OverlappedRowwise(**OF_TP)}, r"twin.weight \(Shard\(1\),\)"),
}


def all_of(model: nn.Module) -> list[Any]:
    """Classes, attributes and hooks of modules, and tensors by identity with their attributes."""
    tensors = [(name, id(x), [*vars(x)]) for name, x in (*model.named_parameters(), *model.named_buffers())]
    hooks = [len(x) for part in model.modules() for name, x in vars(part).items() if name.endswith("hooks")]
    return [[(name, type(part), [*vars(part)]) for name, part in model.named_modules()], tensors, hooks]


@pytest.mark.parametrize("style", [*REFUSED, *REFUSED_OVER_TP])
@on_ranks(2)
def test_a_refused_plan_leaves_the_model_as_it_was(axis: DeviceMesh, style: str) -> None:
    """The styles before the refused one are not applied; without it the plan computes what one rank computes."""
    model, own, over_tp = Model(), ShardedSequence(axis), style in REFUSED_OVER_TP
    model.core, model.cross, model.conv, model.small = Core(), CrossCore(), nn.Conv1d(2, 2, 3), nn.Embedding(1, 2)
    model.layers[0].core.forward = Core().forward  # which a style takes off
    if over_tp:
        axis, good, (make, words) = mesh((2,), ("tp",)), overlapped_plan("all_reduce"), REFUSED_OVER_TP[style]
        model.twin = nn.Linear(*reversed(model.head.weight.shape), bias=False)
        model.twin.weight = model.head.weight if style == "a tied tensor" else model.twin.weight
        good["twin"] = VocabParallelHead(mode="all_reduce")
        bad = good | make()
    else:
        good, (of_sequence, words) = {"layers.*.core": ContextParallel(own)}, REFUSED[style]
        bad = good | of_sequence(own)
    before, tokens = all_of(model), batch(B, S)["tokens"]
    with refused(words):
        parallelize(model, axis, bad)
    assert all_of(model) == before
    parallelize(model, axis, good)
    want = Model(DenseCore)(tokens, torch.arange(S))
    if over_tp:
        got = model(tokens, torch.arange(S)).whole()
    else:
        got = own.unshard(model(own.shard(tokens, pad_value=0), own.positions(S)))
    torch.testing.assert_close(got, want, **TOLERANCE)


class Rowwise(Model):
    """Whose positions have batch rows, as those of Transformers."""

    def forward(self, tokens: Tensor, positions: Tensor, documents: Tensor | None = None) -> Tensor:
        assert positions.ndim == 2 and positions.shape[1] == tokens.shape[1]
        return super().forward(tokens, positions[0], documents)


@pytest.mark.parametrize("length", [24, 21])
@pytest.mark.full
@on_ranks(2)
def test_a_group_in_the_place_of_a_mesh_and_positions_of_batch_rows(axis: DeviceMesh, length: int) -> None:
    """Positions [1, S_local] that the root supplies or the call gives."""
    tokens, group = batch(B, length)["tokens"], axis.get_group()
    with torch.no_grad():
        want = Model(DenseCore)(tokens, torch.arange(length))
    sequence = ShardedSequence(group, length=length)
    root = ShardedModel(sequence, gather_output=True, position_dims=2)
    cores = {"layers.*.core": ContextParallel(sequence)}
    model = parallelize(Rowwise(), group, {"": root} | cores)
    given = {name: x for name, x in batch(B, length).items() if name in ("tokens", "labels")}
    report = verify_model(Model, {"": ShardedModel(sequence)} | cores, given, group)
    assert report.passed and verify(group, seq_len=16).passed
    with pytest.raises(ArgumentError, match="position_dims: expected 1 or 2, got 3"):
        ShardedModel(sequence, position_dims=3)  # type: ignore[arg-type]
    for logits in (model(tokens), model(tokens, positions=torch.arange(length)[None])):
        torch.testing.assert_close(logits.detach(), want, **TOLERANCE)


@on_ranks(2)
def test_positions_are_not_made_up(axis: DeviceMesh) -> None:
    """A model with positions under a style that supplies none."""
    model = make_model(axis, positions=None)
    with refused("positions=None and none in the call", ArgumentError):
        model(**model_batch(S))
