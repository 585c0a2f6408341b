"""The styles: a core, or a whole model, that a plan made context-parallel computes what one rank computes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dense import dense_attention, dense_dropout, dense_mask, make_qkv
from inside import inner, replaced
from model import Core, DenseCore, Model, V, batch, tensor_parallel_plan
from ranks import mesh, num_collectives, on_ranks, rejoin
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInputOutput, parallelize_module
from torch.utils.checkpoint import checkpoint

from cp_mesh import (
    ArgumentError,
    ContextParallel,
    Contiguous,
    Mask,
    ShardedModel,
    ShardedSequence,
    Striped,
    ZigZag,
    parallelize,
    verify_model,
)
from cp_mesh.tools import verify

STYLE = inner("wrap", "STYLE")

B, H, K, S, D = 2, 4, 2, 24, 6
TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}


def make_core(axis: DeviceMesh, core: nn.Module | None = None, layout: Any = None, **options: Any) -> nn.Module:
    return parallelize(
        core or Core(), axis, {"": ContextParallel(ShardedSequence(axis, layout or ZigZag()), **options)}
    )


def shard_whole(sequence: ShardedSequence) -> list[Tensor]:
    return [sequence.shard(x, dim=2) for x in make_qkv(B, H, K, S, D)]


def expected(**conditions: Any) -> list[Tensor]:
    """out, dq, dk, dv of the whole sequence."""
    q, k, v, dout = make_qkv(B, H, K, S, D)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, _ = dense_attention(q, k, v, dense_mask(S, **conditions))
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def gather(sequence: ShardedSequence, *tensors: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return [sequence.unshard(x, dim=2) for x in tensors]


def assert_close(got: list[Tensor], want: list[Tensor]) -> None:
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE, msg=lambda m, name=name: f"{name}: {m}")


# Cores: plain tensors, DTensors over tp, DTensors over the whole mesh.


def core_of_plain_tensors(rank: int, layout: Any, documents: Tensor | None) -> list[Tensor]:
    axis = mesh((dist.get_world_size(),), ("cp",))
    sequence = ShardedSequence(axis, layout)
    options = {} if documents is None else {"mask": lambda q, k, v, documents: Mask(documents=documents)}
    core = make_core(axis, layout=layout, **options)
    q, k, v, dout = shard_whole(sequence)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = core(q, k, v) if documents is None else core(q, k, v, documents=documents)
    assert type(out) is Tensor and out.shape == q.shape
    out.backward(dout)
    return gather(sequence, out, q.grad, k.grad, v.grad)


def core_by(rank: int, method: str) -> tuple[list[Tensor], int]:
    axis = mesh((4,), ("cp",))
    sequence = ShardedSequence(axis, ZigZag())
    core, (q, k, v, dout) = make_core(axis, method=method), shard_whole(sequence)
    with torch.no_grad():
        core(q, k, v)  # the first call of the hybrid makes groups
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    before = num_collectives()
    out = core(q, k, v)
    out.backward(dout)
    count = num_collectives() - before
    return gather(sequence, out, q.grad, k.grad, v.grad), count


@pytest.mark.parametrize(
    ("method", "count"), [("auto", 6), ("ring", 6), ("all_gather", 3), ("ulysses", 4), ("hybrid", 7)]
)
def test_the_method_of_a_core(pool: Any, method: str, count: int) -> None:
    """It is used: each has its number of collectives."""
    for results, made in pool(4).run(core_by, method):
        assert_close(results, expected())
        assert made == count


DOCUMENTS = torch.tensor([[i // 7 for i in range(S)], [i % 3 for i in range(S)]])


@pytest.mark.parametrize("layout", [Contiguous(), ZigZag(), Striped()], ids=lambda layout: layout.spec())
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["causal", "documents"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_core_of_plain_tensors(pool: Any, layout: Any, documents: Tensor | None, world_size: int) -> None:
    for results in pool(world_size).run(core_of_plain_tensors, layout, documents):
        assert_close(results, expected(documents=documents))


def core_of_dtensors(rank: int, whole_mesh: bool, documents: Tensor | None, memory: str) -> list[Tensor]:
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
    return results


@pytest.mark.parametrize("whole_mesh", [False, True], ids=["tp", "whole mesh"])
@pytest.mark.parametrize("memory", ["contiguous", "transposed", "not as the spec says"])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["causal", "documents"])
def test_core_of_dtensors(pool: Any, whole_mesh: bool, documents: Tensor | None, memory: str) -> None:
    """Results can be viewed, however the heads lie in memory."""
    for results in pool(4).run(core_of_dtensors, whole_mesh, documents, memory):
        assert_close(results, expected(documents=documents))


class SinkCore(nn.Module):
    """A core with a parameter that its style reads, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.linspace(-1, 1, H, dtype=torch.float64))
        self.dropout_p = 0.3

    def forward(self, q: Tensor, k: Tensor, v: Tensor, softcap: float) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout_p, is_causal=True, enable_gqa=True)


def core_with_scores(rank: int, on_tp: bool) -> list[Tensor]:
    """out, dq, dk, dv, and the gradient of the sinks summed over cp, and over tp where they are shards."""
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
    return [*gather(sequence, *results[:-1]), results[-1]]


@pytest.mark.parametrize("on_tp", [False, True], ids=["plain", "tp"])
def test_core_with_scores(pool: Any, on_tp: bool) -> None:
    q, k, v, dout = make_qkv(B, H, K, S, D)
    leaves = [x.requires_grad_() for x in (q, k, v, SinkCore().sinks)]
    kept = None if on_tp else dense_dropout(B, H, S, 0.3, 5)
    out, _ = dense_attention(*leaves[:3], dense_mask(S), softcap=0.8, sinks=leaves[3], kept=kept)
    want = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    for got in pool(4).run(core_with_scores, on_tp):
        torch.testing.assert_close(got, want, **TOLERANCE)


class OddCore(nn.Module):
    """Several calls, by keyword and by position, with a scale, among other work."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        sdpa = F.scaled_dot_product_attention
        first = sdpa(query=q, key=k, value=v, attn_mask=None, dropout_p=0.0, is_causal=True, scale=0.7, enable_gqa=True)
        return first, {"second": sdpa(q, k, v, None, 0.0, True, enable_gqa=True) * 2 + first}


def odd_core(rank: int) -> list[Tensor]:
    axis = mesh((3,), ("cp",))
    sequence = ShardedSequence(axis)
    q, k, v, _ = shard_whole(sequence)
    first, rest = make_core(axis, OddCore())(q, k, v)
    return gather(sequence, first, rest["second"])


def test_a_core_with_several_calls(pool: Any) -> None:
    q, k, v, _ = make_qkv(B, H, K, S, D)
    first, _ = dense_attention(q, k, v, dense_mask(S), scale=0.7)
    second = 2 * dense_attention(q, k, v, dense_mask(S))[0] + first
    for got in pool(3).run(odd_core):
        torch.testing.assert_close(got, [first, second], **TOLERANCE)


@on_ranks(2)
def test_nothing_is_patched(axis: DeviceMesh) -> None:
    sdpa = F.scaled_dot_product_attention
    core = make_core(axis)
    q, k, v, _ = shard_whole(ShardedSequence(axis))
    core(q, k, v)
    with pytest.raises(ArgumentError):
        make_core(axis, mask=Mask(causal=False))(q, k, v)  # leaves the forward by an error
    assert F.scaled_dot_product_attention is sdpa
    assert torch._C._len_torch_function_stack() == 0
    before = num_collectives()
    local = sdpa(q, k, v, is_causal=True, enable_gqa=True)  # outside the core it is PyTorch's own
    torch.testing.assert_close(local, dense_attention(q, k, v, dense_mask(S // 2))[0])
    assert num_collectives() == before


class CheckpointedInside(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(Core(), q, k, v, use_reentrant=self.use_reentrant)


def checkpointed(rank: int, inside: bool, use_reentrant: bool) -> list[Tensor]:
    axis = mesh((2,), ("cp",))
    sequence = ShardedSequence(axis)
    core = make_core(axis, CheckpointedInside(use_reentrant) if inside else Core())
    q, k, v, dout = shard_whole(sequence)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = core(q, k, v) if inside else checkpoint(core, q, k, v, use_reentrant=use_reentrant)
    out.backward(dout)
    return gather(sequence, out, q.grad, k.grad, v.grad)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_around_a_core(pool: Any, use_reentrant: bool) -> None:
    for results in pool(2).run(checkpointed, False, use_reentrant):
        assert_close(results, expected())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_inside_a_core_is_refused(pool: Any, use_reentrant: bool) -> None:
    """The recomputation would run outside of the style's forward, where attention is local."""
    for error in pool(2).run_expecting_error(checkpointed, True, use_reentrant):
        assert error is not None and error.type == "UnsupportedError" and error.num_collectives == 0
        assert "checkpoint the module that holds the core" in error.message


def any_mask(rank: int) -> list[Tensor]:
    """A tensor mask, as a bias of this rank's rows and all keys."""
    axis = mesh((2,), ("cp",))
    sequence, core = ShardedSequence(axis), Core()
    core.forward = lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    scores = {"scores": lambda core, q, k, v, bias: {"bias": bias}, "mask": Mask(causal=False)}
    core = make_core(axis, core, **scores)
    q, k, v, dout = shard_whole(sequence)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    bias = torch.zeros(1, 1, S, S, dtype=q.dtype).masked_fill(~MASK, -torch.inf)
    out = core(q, k, v, sequence.shard(bias, dim=2))
    out.backward(dout)
    return gather(sequence, out, q.grad, k.grad, v.grad)


MASK = (torch.arange(S)[:, None] * 7 + torch.arange(S) * 5) % 3 != 0


def test_any_mask_is_a_bias(pool: Any) -> None:
    """As the message says that refuses a tensor attn_mask."""
    q, k, v, dout = make_qkv(B, H, K, S, D)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=MASK, enable_gqa=True)
    want = [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]
    for results in pool(2).run(any_mask):
        assert_close(results, want)


# Whole models.


def make_model(axis: DeviceMesh, tp: DeviceMesh | None = None, length: int | None = None, **options: Any) -> nn.Module:
    model, sequence = Model(), ShardedSequence(axis, options.pop("layout", ZigZag()), length=length)
    if tp is not None:
        parallelize(model, tp, tensor_parallel_plan())

    def mask(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Mask:
        return Mask(documents=documents)

    plan = {"": ShardedModel(sequence, **options), "layers.*.core": ContextParallel(sequence, mask=mask)}
    return parallelize(model, axis, plan)


def whole_model(rank: int, arguments: dict[str, Tensor], layout: Any, length: int | None) -> Tensor:
    model = make_model(mesh((3,), ("cp",)), layout=layout, length=length, gather_output=True)
    return model(**arguments).detach()


def model_batch(S: int, documents: bool, own_positions: bool) -> dict[str, Tensor]:
    whole = batch(B, S)
    names = ["tokens"] + ["documents"] * documents + ["positions"] * own_positions
    return {name: whole[name] for name in names}


@pytest.mark.parametrize("layout", [Contiguous(), ZigZag(), Striped()], ids=lambda layout: layout.spec())
@pytest.mark.parametrize(
    ("documents", "own_positions"),
    [(False, False), (True, False), (True, True)],
    ids=["causal", "documents", "restart"],
)
@pytest.mark.parametrize("S", [24, 22], ids=["even", "padded"])
def test_whole_model(pool: Any, layout: Any, documents: bool, own_positions: bool, S: int) -> None:
    arguments = model_batch(S, documents, own_positions)
    with torch.no_grad():
        logits = Model(DenseCore)(**{"positions": torch.arange(S)} | arguments)
    for got in pool(3).run(whole_model, arguments, layout, S):
        torch.testing.assert_close(got, logits, **TOLERANCE)


def model_by_position(rank: int, arguments: dict[str, Tensor]) -> list[Tensor]:
    """Arguments by position, or one row of position ids for all rows, or a sharded output."""
    axis = mesh((3,), ("cp",))
    gathered, tokens, documents = make_model(axis, gather_output=True), arguments["tokens"], arguments["documents"]
    sharded = make_model(axis)(tokens, documents=documents)
    assert sharded.shape == (B, S // 3, V)
    own = gathered(tokens, arguments["positions"][0], documents)
    results = [gathered(tokens, None, documents), own, ShardedSequence(axis).unshard(sharded)]
    return [x.detach() for x in results]


def test_arguments_of_a_whole_model(pool: Any) -> None:
    arguments = batch(B, S)
    model, tokens, documents = Model(DenseCore), arguments["tokens"], arguments["documents"]
    with torch.no_grad():
        plain = model(tokens, torch.arange(S), documents)
        own = model(tokens, arguments["positions"][0], documents)
    assert not torch.allclose(plain, own)
    for got in pool(3).run(model_by_position, arguments):
        torch.testing.assert_close(got, [plain, own, plain], **TOLERANCE)


def model_of_one(rank: int, arguments: dict[str, Tensor]) -> tuple[Tensor, int]:
    model = make_model(mesh((1,), ("cp",)), layout=ZigZag())
    before = num_collectives()
    logits = model(**arguments)
    logits.sum().backward()
    return logits.detach(), num_collectives() - before


def test_one_rank_is_the_same_function(pool: Any) -> None:
    arguments = model_batch(S, documents=True, own_positions=True)
    with torch.no_grad():
        expected = Model(DenseCore)(**arguments)
    ((logits, collectives),) = pool(1).run(model_of_one, arguments)
    assert collectives == 0
    torch.testing.assert_close(logits, expected, **TOLERANCE)


def model_with_tp(rank: int, arguments: dict[str, Tensor], dtensors: bool) -> Tensor:
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
    return logits.detach()


def entries_of_outputs(rank: int) -> tuple[dict[str, Any], str]:
    """Of a mapping, gathered by a root; and what is said of an entry that may not hold rows."""
    style = ShardedModel(sequence := ShardedSequence(mesh((2,), ("cp",)), length=S), gather_output=True)
    rows = sequence.shard({"rows": torch.arange(S)[None].double()})["rows"]
    output = {"logits": rows, "hidden_states": (rows, rows + 1), "loss": torch.tensor(2.0)}
    with pytest.raises(ArgumentError) as raised:
        style.gather(sequence, {"router_logits": rows})
    return style.gather(sequence, output), str(raised.value)


def test_outputs_that_are_mappings_are_gathered(pool: Any) -> None:
    whole = torch.arange(S)[None].double()
    for output, refused in pool(2).run(entries_of_outputs):
        assert torch.equal(output["logits"], whole) and output["loss"] == 2
        assert torch.equal(output["hidden_states"][1], whole + 1)
        assert "router_logits" in refused


@pytest.mark.parametrize("dtensors", [False, True], ids=["plain", "DTensors"])
def test_whole_model_over_cp_and_tp(pool: Any, dtensors: bool) -> None:
    arguments = model_batch(S, documents=True, own_positions=True)
    with torch.no_grad():
        expected = Model(DenseCore)(**arguments)
    for logits in pool(4).run(model_with_tp, arguments, dtensors):
        torch.testing.assert_close(logits, expected, **TOLERANCE)


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


@pytest.mark.parametrize("style", ["ContextParallel", "ShardedModel"])
@on_ranks(4)
def test_a_refused_style_can_be_corrected(style: str) -> None:
    cp, other = mesh((2, 2), ("cp", "tp"))["cp"], mesh((2, 2), ("cp", "tp"))["tp"]
    sequence, model = ShardedSequence(cp), Model()
    wrong, right = {
        "ContextParallel": (ContextParallel(ShardedSequence(other)), ContextParallel(sequence)),
        "ShardedModel": (ShardedModel(sequence, positions="position_ids"), ShardedModel(sequence)),
    }[style]
    key, before = "layers.0.core" if style == "ContextParallel" else "", {"layers.1.core": ContextParallel(sequence)}
    own = model.layers[1].core.forward = Core().forward
    with pytest.raises(ArgumentError):
        parallelize(model, cp, before | {key: wrong})
    assert type(model.layers[1].core) is Core and model.layers[1].core.forward is own  # as before the plan
    parallelize(model, cp, before | {key: right})


def wildcard(rank: int) -> bool:
    axis = mesh((2,), ("cp",))
    root = nn.ModuleDict({"a": Core(), "b": Core()})
    parallelize(root, axis, {"*": ContextParallel(ShardedSequence(axis))})
    assert all(styled(core) for core in root.values())
    return styled(root)


def test_a_wildcard_leaves_the_root_alone(pool: Any) -> None:
    assert pool(2).run(wildcard) == [False, False]


class Rowwise(Model):
    """Whose positions have batch rows, as those of Transformers."""

    def forward(self, tokens: Tensor, positions: Tensor, documents: Tensor | None = None) -> Tensor:
        assert positions.ndim == 2 and positions.shape[1] == tokens.shape[1]
        return super().forward(tokens, positions[0], documents)


def by_a_group(rank: int, length: int) -> list[Tensor]:
    """A plan over a process group, and positions [1, S_local] that the root supplies or the call gives."""
    group = mesh((2,), ("cp",)).get_group()
    sequence = ShardedSequence(group, length=length)
    root = ShardedModel(sequence, gather_output=True, position_dims=2)
    model = parallelize(Rowwise(), group, {"": root, "layers.*.core": ContextParallel(sequence)})
    tokens = batch(B, length)["tokens"]
    plan = {"": ShardedModel(sequence), "layers.*.core": ContextParallel(sequence)}
    given = {name: x for name, x in batch(B, length).items() if name in ("tokens", "labels")}
    report = verify_model(Model, plan, given, group)
    assert report.passed and verify(group, seq_len=16).passed
    with pytest.raises(ArgumentError, match="position_dims: expected 1 or 2, got 3"):
        ShardedModel(sequence, position_dims=3)  # type: ignore[arg-type]
    return [model(tokens).detach(), model(tokens, positions=torch.arange(length)[None]).detach()]


@pytest.mark.full
def test_a_group_in_the_place_of_a_mesh_and_positions_of_batch_rows(pool: Any) -> None:
    for length in (24, 21):
        with torch.no_grad():
            expected = Model(DenseCore)(batch(B, length)["tokens"], torch.arange(length))
        for found in pool(2).run(by_a_group, length):
            for logits in found:
                torch.testing.assert_close(logits, expected, **TOLERANCE)


class Scaled(nn.Module):
    """A core with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.scale * F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@on_ranks(2)
def test_a_copy_has_its_own_parameters(axis: DeviceMesh) -> None:
    core = make_core(axis, Scaled())
    twin = copy.deepcopy(core)
    q, k, v, _ = shard_whole(ShardedSequence(axis))
    with torch.no_grad():
        twin.scale.fill_(3.0)
        torch.testing.assert_close(twin(q, k, v), 3 * core(q, k, v))


def leave_out_positions(rank: int, positions: str | None) -> None:
    axis = mesh((2,), ("cp",))
    make_model(axis, positions=positions)(**model_batch(S, documents=False, own_positions=False))


def test_positions_are_not_made_up(pool: Any) -> None:
    """A model with positions under a style that supplies none."""
    for error in pool(2).run_expecting_error(leave_out_positions, None):
        assert (
            error is not None
            and error.type == "ArgumentError"
            and "positions=None and none in the call" in error.message
        )
        assert error.num_collectives == 0
