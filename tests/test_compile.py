"""Under torch.compile, autocast and activation checkpointing the numbers are those of eager mode, in one graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import test_gradients
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from dense import dense_attention, dense_mask, make_qkv
from inside import NUM_TENSORS, AttentionSpec, attention_op, room
from model import Core, Model, batch, tensor_parallel_plan
from ranks import Pool, mesh, num_collectives, on_ranks, refused
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.utils.checkpoint import checkpoint

import cp_mesh
from cp_mesh import ContextParallel, Mask, ShardedModel, ShardedSequence, Striped, ZigZag, attention
from cp_mesh.geometry import Permuted
from cp_mesh.tensor_parallel import OverlappedColwise, OverlappedRowwise, VocabParallelEmbedding

token_losses = room("losses_in_chunks")

B, H, K, S, D = 2, 4, 2, 24, 8
TOLERANCE = {"rtol": 1e-11, "atol": 1e-11}
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly("compiled"))]


def step(fn: Callable[..., Any], *inputs: Tensor) -> list[Tensor]:
    """Results of ``fn`` and the gradients of its inputs, whose incoming gradient differs in every entry."""
    inputs = tuple(x.detach().requires_grad_() for x in inputs)
    results = fn(*inputs)
    results = [local(r) for r in (results if isinstance(results, tuple) else (results,))]
    sum((r * torch.linspace(-1, 1, r.shape[-1], dtype=r.dtype)).sum() for r in results).backward()
    return [local(x.detach()) for x in (*results, *(x.grad for x in inputs))]


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def assert_compiles(fn: Callable[..., Any], backend: str, *inputs: Tensor) -> None:
    eager = step(fn, *inputs)
    torch._dynamo.reset()
    compiled = step(torch.compile(fn, backend=backend, fullgraph=True), *inputs)
    for a, b in zip(compiled, eager, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)


# Local tensors and DTensors.


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.full
@on_ranks(2, timeout=180.0)
def test_local_tensors(axis: DeviceMesh, backend: str) -> None:
    sequence = ShardedSequence(axis, ZigZag())
    documents, keep = torch.arange(S).expand(B, S) // 7, torch.arange(S) != 3
    permuted = Permuted(torch.arange(S).flip(0))
    q, k, v, _ = (sequence.shard(x, dim=2) for x in make_qkv(B, H, K, S, D))

    def every_format(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        out, lse = attention(q, k, v, mesh=axis, mask=Mask(window=(9, None), blocks=documents), return_lse=True)
        masked = attention(q, k, v, mesh=axis, mask=Mask(causal=False, documents=documents, key_padding=keep))
        bshd = attention(*(x.transpose(1, 2) for x in (q, k, v)), mesh=axis, seq_dim=1, layout=Striped())
        packed = attention(*(x[0].transpose(0, 1) for x in (q, k, v)), mesh=axis, seq_dim=0, layout=permuted)
        methods = (attention(q, k, v, mesh=axis, method=method) for method in ("all_gather", "ulysses"))
        return out, lse, masked, bshd.transpose(1, 2), packed, *methods

    assert_compiles(every_format, backend, q, k, v)
    bias = sequence.shard(torch.linspace(-1, 1, S * S, dtype=torch.float64).view(1, 1, S, S), dim=2)
    sinks, slopes = torch.linspace(-1, 1, 2 * H, dtype=torch.float64).chunk(2)

    def scored(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, slopes: Tensor, bias: Tensor) -> Tensor:
        given = {"softcap": 2.0, "sinks": sinks, "alibi_slopes": slopes, "bias": bias}
        return attention(q, k, v, mesh=axis, dropout_p=0.2, dropout_seed=11, **given)

    assert_compiles(scored, backend, q, k, v, sinks, slopes, bias)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(every_format, backend=backend)(q, k, v), every_format(q, k, v))


@pytest.mark.parametrize(
    ("size", "tp", "backend"),
    [(4, 2, "aot_eager"), pytest.param(2, 1, "inductor", marks=pytest.mark.nightly("compiled"))],
)
@on_ranks("size", timeout=180.0)
def test_dtensors(backend: str, tp: int) -> None:
    axes = mesh((2, tp), ("cp", "tp"))
    placements = [Shard(2), Shard(1)]
    sequence = ShardedSequence(axes["cp"], ZigZag())

    def place(x: Tensor) -> DTensor:
        heads = sequence.shard(x, dim=2).chunk(tp, dim=1)[axes.get_local_rank("tp")]
        return DTensor.from_local(heads.contiguous(), axes, placements, run_check=False)

    q, k, v, _ = (place(x) for x in make_qkv(B, H, K, S, D))
    documents = torch.arange(S).expand(B, S) // 7

    sinks = distribute_tensor(torch.linspace(-1, 1, H, dtype=torch.float64), axes, [Replicate(), Shard(0)])

    slopes = torch.linspace(0, 1, H // tp, dtype=torch.float64)  # plain: of this rank's heads

    def both(q: DTensor, k: DTensor, v: DTensor, sinks: DTensor, slopes: Tensor) -> tuple[Tensor, ...]:
        out, lse = attention(q, k, v, return_lse=True)
        scored = attention(q, k, v, sinks=sinks, softcap=2.0)
        beside = attention(q, k, v, mask=Mask(documents=documents), sinks=sinks, alibi_slopes=slopes)
        return out, lse, scored, beside

    assert_compiles(both, backend, q, k, v, sinks, slopes)


# Styled models over cp and tp.


MODEL_CALL = {name: x for name, x in batch(B, S).items() if name in ("tokens", "positions")}


def assert_same(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert found.keys() == want.keys()
    for name, x in want.items():
        torch.testing.assert_close(found[name], x, **TOLERANCE, msg=lambda m, name=name: f"{name}: {m}")


def make_model(axes: DeviceMesh, **options: Any) -> nn.Module:
    model, sequence = Model(), ShardedSequence(axes["cp"], ZigZag())
    if axes.size(1) > 1:
        cp_mesh.parallelize(model, axes["tp"], tensor_parallel_plan())

    def mask(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Mask:
        return Mask(documents=documents)

    styles = {"": ShardedModel(sequence, **options), "layers.*.core": ContextParallel(sequence, mask=mask)}
    return cp_mesh.parallelize(model, axes["cp"], styles)


def gradients(model: nn.Module, arguments: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    logits = model(**arguments)
    (logits * torch.linspace(-1, 1, logits.shape[-1], dtype=logits.dtype)).sum().backward()
    grads = {name: local(parameter.grad) for name, parameter in model.named_parameters()}
    return grads | {"logits": logits.detach()}


@pytest.mark.full
@pytest.mark.parametrize(
    ("size", "cp", "part", "backend"),
    [
        (4, 2, "blocks", "aot_eager"),
        (2, 2, "model", "aot_eager"),
        pytest.param(2, 1, "blocks", "inductor", marks=pytest.mark.nightly("compiled")),
    ],
)
@on_ranks("size", timeout=180.0)
def test_compiled_models(size: int, cp: int, part: str, backend: str) -> None:
    """Blocks over cp and tp, or a model that gathers its output."""
    axes, options = mesh((cp, size // cp), ("cp", "tp")), {"gather_output": part == "model"}
    arguments = {name: x for name, x in batch(B, S).items() if name != "labels"}
    model = make_model(axes, **options)
    # PyTorch's own trap: a collective in flight at a compiled block's door takes the embedding's gradient with it.
    model.embedding.register_forward_hook(lambda module, inputs, output: output.clone())
    for each in model.layers if part == "blocks" else [model]:
        each.compile(backend=backend, fullgraph=True)
    compiled = gradients(model, arguments)
    assert compiled["embedding.weight"].abs().max() > 0
    assert_same(compiled, gradients(make_model(axes, **options), arguments))


@pytest.mark.full
@pytest.mark.parametrize("per_document", (False, True), ids=("balanced", "zigzag per document"))
@on_ranks(2)
def test_layouts_that_change_compile_twice(axis: DeviceMesh, per_document: bool) -> None:
    """How often the core was compiled for batches whose masks and layouts travel as objects, with unlike numbers of
    runs, or documents."""
    sequence, core = ShardedSequence(axis), Core()
    style = ContextParallel(sequence, mask=test_gradients.mask, layout=test_gradients.layout_of_core)
    cp_mesh.parallelize(core, axis, {"": style})
    counter, runs = CompileCounterWithBackend("aot_eager"), set()
    compiled = torch.compile(core, backend=counter, fullgraph=True)
    for seed in range(5):
        ids = batch(1, S, seed)["documents"]
        packed = sequence.balanced(Mask(documents=ids))
        if per_document:
            edges = torch.cat([torch.zeros(1, dtype=torch.int64), ids[0].bincount().cumsum(0)]) // 4 * 4
            packed = replace(packed, layout=cp_mesh.geometry.ZigZagDocuments(edges))
        runs.add(len(packed.layout.tensor))
        whole = make_qkv(1, H, K, S, D)
        q, k, v, dout = (packed.shard(x, dim=2).requires_grad_() for x in whole)
        out = compiled(q, k, v, test_gradients.Packed(Mask(documents=ids), packed.layout))
        out.backward(dout.detach())
        leaves = [x.detach().requires_grad_() for x in whole[:3]]
        want, _ = dense_attention(*leaves, dense_mask(S, documents=ids))
        want.backward(whole[3])
        torch.testing.assert_close(packed.unshard(out.detach(), dim=2), want.detach(), rtol=1e-10, atol=1e-10)
        for x, leaf in zip((q, k, v), leaves, strict=True):
            torch.testing.assert_close(packed.unshard(x.grad, dim=2), leaf.grad, rtol=1e-10, atol=1e-10)
    assert len(runs) > 1
    assert counter.frame_count <= 2


@pytest.mark.parametrize("backend", BACKENDS)
@on_ranks(2, timeout=180.0)
def test_documents_of_compiled_code_are_digested_once(axis: DeviceMesh, backend: str) -> None:
    """How often documents are digested in each of three steps of a function that makes the mask itself."""
    read = room("host_tensors")._digest
    sequence = ShardedSequence(axis)

    def layers(x: Tensor, ids: Tensor) -> Tensor:
        mask = Mask(documents=ids)
        for _ in range(3):
            x = attention(x, x, x, mesh=axis, mask=mask)
        return x

    compiled, counts = torch.compile(layers, backend=backend, fullgraph=True), []
    for seed in range(3):
        ids = batch(1, S, seed)["documents"]
        x = sequence.shard(make_qkv(1, H, H, S, D)[0], dim=2)
        with mock.patch.object(room("host_tensors"), "_digest", side_effect=read) as digest:
            found = step(partial(compiled, ids=ids), x)
            counts.append(digest.call_count)
        for got, want in zip(found, step(partial(layers, ids=ids), x), strict=True):
            torch.testing.assert_close(got, want, **TOLERANCE)
    assert counts == [1, 1, 1]


# What was compiled before the plan.


@pytest.mark.parametrize("what", ["cores", "graphs", "blocks", "model", "ends", "linears"])
@pytest.mark.quick("cores", "graphs", "blocks")
@on_ranks(2, timeout=180.0)
def test_what_was_compiled_before_the_plan(what: str) -> None:
    """The numbers are those of the same plan on what is not compiled."""
    tp = 1 + (what == "linears")
    axes = mesh((2 // tp, tp), ("cp", "tp"))
    sequence = ShardedSequence(axes["cp"])
    compiled = partial(torch.compile, backend="aot_eager", fullgraph=True, dynamic=False)
    plan: dict[str, Any] = {"": ShardedModel(sequence), "layers.*.core": ContextParallel(sequence)}
    if what == "ends":
        plan[""] = cp_mesh.training.ShardInput(sequence, ("tokens", "positions"))
        plan["norm"] = cp_mesh.training.GatherOutput(sequence, gradient="sum")
    over_tp = {
        "embedding": VocabParallelEmbedding(mode="all_reduce"),
        "layers.*.w[qkv]": OverlappedColwise(mode="all_reduce"),
        "layers.*.wo": OverlappedRowwise(mode="all_reduce"),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    found: list[dict[str, Tensor]] = []
    for compiles in (False, True):
        model: nn.Module = Model()
        if compiles:
            for i, layer in enumerate(model.layers):
                if what == "cores":
                    layer.core = compiled(layer.core)
                elif what == "graphs":
                    layer.core = torch.fx.symbolic_trace(layer.core)
                elif what == "linears":
                    layer.wq, layer.wo = compiled(layer.wq), compiled(layer.wo)
                elif what == "blocks":
                    model.layers[i] = compiled(layer)
            if what in ("linears", "ends"):
                model.embedding, model.norm, model.head = map(compiled, (model.embedding, model.norm, model.head))
            model = compiled(model) if what in ("model", "ends") else model
        if tp > 1:
            cp_mesh.parallelize(model, axes["tp"], over_tp)
        made = cp_mesh.parallelize(model, axes["cp"], plan)
        assert made is model
        found.append({name.replace("_orig_mod.", ""): x for name, x in gradients(model, MODEL_CALL).items()})
    assert_same(found[1], found[0])


# Lengths that change.


UNLESS_2_11 = pytest.mark.skipif(
    torch.__version__.startswith("2.11."),
    reason="where sizes are symbols PyTorch 2.11 traces the propagation of shapes too: a call with whole lengths",
)
LENGTHS, SYMBOLS = [(S, 8) for S in (16, 24, 40, 8, 64)], [(24, 8), (40, 8), (64, 16)]


@pytest.mark.parametrize(
    ("dynamic", "kind", "backend"),
    [(None, kind, "aot_eager") for kind in ("formats", "block", "documents")]
    + [(True, "formats", "eager"), *((True, kind, "aot_eager") for kind in ("formats", "options", "block"))]
    + [pytest.param(dynamic, "DTensors", "aot_eager", marks=UNLESS_2_11) for dynamic in (None, True)]
    + [pytest.param(True, x, "eager", marks=pytest.mark.nightly("compiled")) for x in ("options", "DTensors", "block")]
    + [pytest.param(True, kind, "inductor", marks=pytest.mark.nightly("compiled")) for kind in ("formats", "block")],
)
@pytest.mark.quick("formats-eager")
@on_ranks(2, timeout=180.0)
def test_sizes_that_change(kind: str, dynamic: bool | None, backend: str) -> None:
    """Lengths compile twice; none again where all sizes are symbols from the first call on, the head dim too."""
    axes = mesh((2, 1), ("cp", "tp"))
    sequence, counter = ShardedSequence(axes["cp"]), CompileCounterWithBackend(backend)
    core = cp_mesh.parallelize(Core(), axes["cp"], {"": ContextParallel(sequence)})
    cp, number = axes["cp"], 0.3

    def formats(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        bshd = attention(*(x.transpose(1, 2) for x in (q, k, v)), mesh=cp, seq_dim=1)
        packed = attention(*(x[0].transpose(0, 1) for x in (q, k, v)), mesh=cp, seq_dim=0)
        return attention(q, k, v, mesh=cp), bshd.transpose(1, 2), packed.transpose(0, 1)[None]

    def options(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        scaled = attention(q, k, v, mesh=cp, scale=number, softcap=10 * number)
        return scaled, attention(q, k, v, mesh=cp, scale=q.shape[-1] ** -0.6)

    def placed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (DTensor.from_local(x, axes, [Shard(2), Shard(1)], run_check=False) for x in (q, k, v))
        dropout = {"dropout_p": 0.2, "dropout_seed": 3} if dynamic else {}  # of heads that count from a symbol
        return attention(q, k, v, **dropout)

    def with_documents(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
        return attention(q, k, v, mesh=cp, mask=Mask(documents=documents, blocks=documents))

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return core(2 * q, k, v) / 2

    fn: Any = {"formats": formats, "options": options, "DTensors": placed, "block": block}.get(kind, with_documents)
    compiled, counts = torch.compile(fn, backend=counter, fullgraph=True, dynamic=dynamic), []
    for S, D in SYMBOLS if dynamic else LENGTHS:
        q, k, v, _ = (sequence.shard(x, dim=2) for x in make_qkv(1, H, K, S, D))
        own = {"documents": torch.arange(S)[None] // 5} if kind == "documents" else {}
        for found, want in zip(*(step(partial(each, **own), q, k, v) for each in (compiled, fn)), strict=True):
            torch.testing.assert_close(found, want, **TOLERANCE)
        counts.append(counter.frame_count)  # of the first call Dynamo may run the backend twice
    if dynamic:
        assert counts[-1] - counts[0] == (kind == "options")  # for each number that a scale was computed to
    else:
        assert counts[-1] <= 2


# Autocast.


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.nightly("compiled"))], ids=["eager", "compiled"]
)
@on_ranks(2)
def test_autocast(compiled: bool) -> None:
    axes = mesh((2, 1), ("cp", "tp"))
    sequence = ShardedSequence(axes["cp"])
    q, k, v, _ = (sequence.shard(x, dim=2).float() for x in make_qkv(B, H, K, S, D))
    low = [x.bfloat16() for x in (q, k, v)]
    core = cp_mesh.parallelize(Core(), axes["cp"], {"": ContextParallel(sequence)})

    def placed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (DTensor.from_local(x, axes, [Shard(2), Replicate()], run_check=False) for x in (q, k, v))
        return attention(q, k, v).to_local()

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, mesh=axes["cp"])

    with torch.autocast("cpu", torch.bfloat16):
        assert F.scaled_dot_product_attention(q, q, q).dtype == torch.bfloat16  # whose ways are followed
    for fn in (plain, placed, core):
        want = step(plain, *low)
        call = torch.compile(fn, backend="aot_eager", fullgraph=True) if compiled else fn
        with torch.autocast("cpu", torch.bfloat16):
            out, *grads = step(call, q, k, v)
            mixed = call(q.bfloat16(), k, v)  # as a projection under autocast and a rotary embedding in fp32 give
        assert out.dtype == mixed.dtype == torch.bfloat16
        assert all(grad.dtype == torch.float32 for grad in grads)
        assert torch.equal(out, want[0]) and torch.equal(mixed, want[0])
        for grad, of_low in zip(grads, want[1:], strict=True):
            assert torch.equal(grad, of_low.float())
        with torch.autocast("cpu", torch.bfloat16):
            assert call(q.double(), k.double(), v.double()).dtype == torch.float64
            with torch.autocast("cpu", enabled=False):
                assert call(q, k, v).dtype == torch.float32


# Activation checkpointing.


@pytest.mark.parametrize(
    ("how", "backend"),
    [(how, None) for how in ("none", "full", "selective")]
    + [pytest.param(how, "aot_eager", marks=pytest.mark.full) for how in ("none", "full", "selective")]
    + [pytest.param("selective", "inductor", marks=pytest.mark.nightly("compiled"))],
    ids=str,
)
@on_ranks(3, timeout=180.0)
def test_checkpointing(how: str, backend: str | None) -> None:
    """Full checkpointing replays the ring, the selective one does not."""
    ring = 2 * 2  # steps, layers
    replayed = ring * (how == "full")
    axes = mesh((3, 1), ("cp", "tp"))
    want = gradients(make_model(axes), MODEL_CALL)
    model = make_model(axes)
    options = {"context_fn": cp_mesh.training.checkpoint_context_fn} if how == "selective" else {}

    def recomputing(forward: Callable) -> Callable:
        return lambda *args: checkpoint(forward, *args, use_reentrant=False, **options)

    for layer in model.layers:
        if how != "none":
            layer.forward = recomputing(layer.forward)
        if backend is not None:
            layer.compile(backend=backend, fullgraph=True)
    # Entering and leaving the style's function mode is a side effect to Dynamo; recomputation need not repeat it.
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        before = num_collectives()
        logits = model(**MODEL_CALL)
        between = num_collectives()
        (logits * torch.linspace(-1, 1, logits.shape[-1], dtype=logits.dtype)).sum().backward()
        after = num_collectives()
    assert_same({name: x.grad for name, x in model.named_parameters()} | {"logits": logits}, want)
    assert (between - before, after - between) == (ring, 2 * ring + replayed)


# The loss.


@pytest.mark.parametrize("backend", BACKENDS)
@on_ranks(2, timeout=180.0)
def test_the_loss(rank: int, axis: DeviceMesh, backend: str) -> None:
    """How many graphs are made for three lengths, each of several chunks, of which there are more or fewer."""
    dtype = torch.float64
    logits = torch.randn(B, S, 7, generator=torch.Generator().manual_seed(rank), dtype=dtype)
    labels = torch.arange(B * S).view(B, S) % 7
    labels[:, ::5] = -100

    def share(logits: Tensor, labels: Tensor) -> Tensor:
        return cp_mesh.cross_entropy(3 * logits, labels, axis)[None]

    with mock.patch.object(token_losses, "CHUNK_BYTES", 5 * 7 * 8):
        assert_compiles(lambda x: share(x, labels), backend, logits)
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)
        compiled = torch.compile(share, backend=counter, fullgraph=True, dynamic=True)
        for length in (S, S // 2, S // 3):
            x, y = (z[:, :length].clone() for z in (logits, labels))
            for found, expected in zip(*(step(partial(fn, labels=y), x) for fn in (compiled, share)), strict=True):
                torch.testing.assert_close(found, expected, **TOLERANCE)
    assert counter.frame_count == 1


# Nothing leaves the library with a collective in flight.


def in_flight(x: Tensor) -> Tensor:
    """The same values as an AsyncCollectiveTensor that nobody waited for."""
    scattered = funcol.all_reduce(x / dist.get_world_size(), "sum", dist.group.WORLD)
    assert type(scattered) is funcol.AsyncCollectiveTensor
    return scattered


def is_plain(x: Tensor) -> bool:
    return type(x) is Tensor or (type(x) is DTensor and type(x._local_tensor) is Tensor)


@on_ranks(2)
def test_nothing_is_left_in_flight(rank: int) -> None:
    axes = mesh((2, 1), ("cp", "tp"))
    sequence = ShardedSequence(axes["cp"], ZigZag(), length=S - 2)
    q, k, v, _ = make_qkv(1, H, K, S, D)
    rows = slice(rank * S // 2, (rank + 1) * S // 2)
    results: dict[str, Any] = {}
    for arrive in (lambda x: x, in_flight):
        kind = "" if arrive is not in_flight else " of collectives in flight"
        tensors = [arrive(x[:, :, rows]) for x in (q, k, v)]
        leaves = [x[:, :, rows].clone().requires_grad_() for x in (q, k, v)]
        results["attention" + kind] = attention(*tensors, mesh=axes["cp"])
        results["attention, lse" + kind] = attention(*tensors, mesh=axes["cp"], return_lse=True)
        placed = [DTensor.from_local(x, axes, [Shard(2), Replicate()], run_check=False) for x in tensors]
        results["attention of DTensors" + kind] = attention(*placed, return_lse=True)
        mask = Mask(documents=torch.zeros(S, dtype=torch.int64))
        results["attention of DTensors with documents" + kind] = attention(*placed, mask=mask, return_lse=True)
        out = attention(*(arrive(x) for x in leaves), mesh=axes["cp"])
        results["gradients" + kind] = torch.autograd.grad(arrive(out).sum(), leaves)
        whole = {"x": arrive(torch.ones(1, S - 2, 3)), "labels": arrive(torch.ones(1, S - 2))}
        results["shard" + kind] = list(sequence.shard(whole).values())
        results["unshard" + kind] = sequence.unshard(arrive(torch.ones(1, S // 2, 3)))
        logits = arrive(torch.ones(1, S // 2, 3))
        results["cross_entropy" + kind] = cp_mesh.cross_entropy(logits, torch.ones(1, S // 2).long(), axes)
        core = cp_mesh.parallelize(Core(), axes["cp"], {"": ContextParallel(sequence)})
        results["ContextParallel" + kind] = core(*tensors)
        tp = [DTensor.from_local(x, axes["tp"], [Shard(1)], run_check=False) for x in tensors]
        results["ContextParallel of tp DTensors" + kind] = core(*tp)
        whole_mesh = [DTensor.from_local(x, axes, [Shard(2), Shard(1)], run_check=False) for x in tensors]
        results["ContextParallel of DTensors" + kind] = core(*whole_mesh)
    tokens = batch(B, S - 2)["tokens"]
    for gather_output in (False, True):
        model = cp_mesh.parallelize(
            Model(),
            axes["cp"],
            {"": ShardedModel(sequence, gather_output=gather_output), "layers.*.core": ContextParallel(sequence)},
        )
        logits = model(tokens)
        logits.sum().backward()
        results[f"ShardedModel, gather_output={gather_output}"] = logits
        results[f"gradients of ShardedModel, gather_output={gather_output}"] = [p.grad for p in model.parameters()]
    for name, result in results.items():
        assert all(map(is_plain, result if isinstance(result, (tuple, list)) else [result])), name


# Refusals.


@on_ranks(2)
def test_refusals_in_compiled_code(axis: DeviceMesh) -> None:
    q, kv = torch.randn(B, H, S // 2, D), torch.randn(B, 3, S // 2, D)
    unknown = torch.compile(lambda q: attention(q, q, q, mesh=axis, kernel="flash"), backend="aot_eager")
    with refused("kernel: expected one of auto", Exception):
        unknown(q)
    uneven = torch.compile(lambda q, kv: attention(q, kv, kv, mesh=axis), backend="aot_eager", fullgraph=True)
    with refused("4 and 3", Exception):
        uneven(q, kv)


@on_ranks(1)
def test_the_op_is_not_traced_into() -> None:
    """Graph breaks where Dynamo leaves out the frame that calls the op, but not what that calls."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    q, k, v, _ = (x.requires_grad_() for x in make_qkv(B, H, K, S, D))
    arguments = S, 2, mesh((1,), ("cp",)).get_group().group_name, AttentionSpec("zigzag", Mask().spec(), 0.3).text()

    @torch.compiler.disable(recursive=False)
    def skipped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_op(q, k, v, *[None] * NUM_TENSORS, [], *arguments)[0]

    torch.compile(lambda *qkv: 2 * skipped(*qkv), backend="eager")(q, k, v).sum().backward()
    (only,) = list(torch._dynamo.utils.counters["graph_break"])
    assert "torch.compiler.disable" in only


def first_call(rank: int) -> bool:
    axis = mesh((1,), ("cp",))
    q, k, v = make_qkv(1, 2, 2, 8, 4)[:3]

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cp_mesh.attention(q, k, v, mesh=axis)

    compiled = torch.compile(fn, backend="eager", fullgraph=True)(q, k, v)
    return torch.equal(compiled, fn(q, k, v))


def test_the_first_call_of_a_process_may_be_compiled() -> None:
    """What is made on first use must be made so that Dynamo can trace it."""
    pool = Pool(1)
    try:
        assert pool.run(first_call) == [True]
    finally:
        pool.close()
