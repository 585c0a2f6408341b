"""The probe: set-ups that are right are silent, mistakes that no other check sees are found, nothing is left behind."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import model as decoder
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from inside import inner, state_of
from ranks import mesh, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import cp_mesh
from cp_mesh import (
    ContextParallel,
    Contiguous,
    Mask,
    ShardedModel,
    ShardedSequence,
    Striped,
    ZigZag,
    cross_entropy,
    parallelize,
    sum_gradients,
)
from cp_mesh.training import GatherOutput

V, C, H, D, S = 40, 32, 4, 8, 64
Cuts, widened = inner("cuts", "Cuts"), inner("widening", "widened")


def angles(positions: Tensor) -> Tensor:
    return positions.double()[..., None] * 0.1 ** torch.arange(D // 2)


class Core(nn.Module):
    """Attention; its rotary embedding is that of ``rope``, or cut here from a table."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("table", angles(torch.arange(S)), persistent=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rope: Tensor, documents: Tensor | None = None) -> Tensor:
        rows = q.shape[2]
        rope = self.table[:rows] if self.kind == "core: slice" else rope
        scale = 1 + torch.log(torch.tensor(rows)).item() if self.kind == "scale by length" else 1.0
        return F.scaled_dot_product_attention(scale * rotate(q, rope), rotate(k, rope), v, is_causal=True)


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    cos, sin = (f(rope).to(x.dtype) for f in (torch.cos, torch.sin))
    if cos.ndim == 3:
        cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Experts(nn.Module):
    """Two of four for each token; "choice": each expert takes as many of a rank's tokens."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.router = kind, nn.Linear(C, 4)
        self.each = nn.ModuleList(nn.Linear(C, C) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        if self.kind == "expert choice":
            kept = torch.zeros_like(scores).scatter(1, scores.topk(x.shape[1] // 2, 1).indices, 1.0)
        else:
            kept = torch.zeros_like(scores).scatter(-1, scores.topk(2, -1).indices, 1.0)
        return sum(scores[..., i, None] * kept[..., i, None] * each(x) for i, each in enumerate(self.each))


class Mixer(nn.Module):
    """What a rank alone computes wrong, of [B, rows, C]."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.conv, self.gru = kind, nn.Conv1d(C, C, 3), nn.GRU(C, C, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        kinds: dict[str, Callable[[], Tensor]] = {
            "convolution": lambda: self.conv(F.pad(x.mT, (2, 0))).mT,
            "mean": lambda: x - x.mean(1, keepdim=True),
            "shift": lambda: F.pad(x, (0, 0, 1, 0))[:, :-1],
            "GRU": lambda: self.gru(x)[0],
            "random": lambda: F.dropout(x, 0.5, training=True),
        }
        return kinds[self.kind]()


MIXERS = ("convolution", "mean", "shift", "GRU", "random")


class Block(nn.Module):
    def __init__(self, kind: str, last: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(C)
        self.q, self.k, self.v, self.o = (nn.Linear(C, C) for _ in range(4))
        self.core, self.dropout = Core(kind), nn.Dropout(0.1)
        self.experts: nn.Module = Experts(kind)
        self.mixer = Mixer(kind) if kind in MIXERS and last else None
        self.register_buffer("mean", torch.zeros(C))
        self.kind = kind

    def forward(self, x: Tensor, rope: Tensor, documents: Tensor | None = None) -> Tensor:
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (H, D)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.dropout(self.o(self.core(q, k, v, rope, documents).transpose(1, 2).flatten(2)))
        if self.training or self.kind == "running mean":
            with torch.no_grad():
                self.mean.lerp_(x.mean((0, 1)).to(self.mean.dtype), 0.1)
        x = x + self.experts(x)
        return x if self.mixer is None else x + self.mixer(x)


class Net(nn.Module):
    """tokens [B, S] to logits [B, S, V]; ``kind``: a mistake, or what is right and might be taken for one."""

    def __init__(self, kind: str = "", dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.kind, self.count, self.kept = kind, 0, []
        self.embedding, self.table = nn.Embedding(V, C), nn.Embedding(S, C)
        self.layers = nn.ModuleList(Block(kind, i == 1) for i in range(2))
        self.head = nn.Linear(C, V, bias=False)
        if kind == "tied":
            self.head.weight = self.embedding.weight
        self.register_buffer("ids", torch.arange(S)[None], persistent=False)
        self.to(dtype)
        for each in self.layers:
            each.core.table = angles(torch.arange(S))

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None, cu_seqlens: Any = None
    ) -> Tensor:
        x, rows = self.embedding(tokens), tokens.shape[1]
        if self.kind == "embedded arange":
            x = x + self.table(torch.arange(rows))
        elif self.kind == "buffer of ids":
            x = x + self.table(self.ids[:, :rows])
        if self.kind == "counter":
            self.count += 1
            self.kept.append(rows)
        if self.kind == "positions ignored" or positions is None:
            positions = torch.arange(rows)
        rope = angles(positions)
        for layer in self.layers:
            if self.kind == "checkpointed":
                x = checkpoint(layer, x, rope, documents, use_reentrant=False)
            else:
                x = layer(x, rope, documents)
        if self.kind == "registers":
            x = torch.cat([x.new_ones(len(x), 1, C), x], 1)
        return self.head(x)


def tokens_of(seed: int = 0, length: int = S) -> Tensor:
    return torch.randint(V, (2, length), generator=torch.Generator().manual_seed(seed))


def spread(net: nn.Module, sequence: ShardedSequence, root: dict[str, Any] = {}, **core: Any) -> nn.Module:  # noqa: B006
    style = ShardedModel(sequence, watch=False, **root)  # whose watch finds some of the mistakes
    return parallelize(net, sequence.mesh, {"": style, "layers.*.core": ContextParallel(sequence, **core)})


def told(net: nn.Module, batch: dict[str, Any]) -> str:
    """What the probe returns or raises; no warning but that it was skipped."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = cp_mesh.probe(net, batch)
        except cp_mesh.ArgumentError as error:
            return str(error)
    others = [str(x.message) for x in caught if "cp_mesh" in str(x.message)]
    if bool(found) != bool(others):
        return f"warned: {others}"
    return found


# What is wrong.

FROM = {
    **dict.fromkeys(("embedded arange", "buffer of ids"), "table"),
    **dict.fromkeys(("positions ignored", "scale by length", "core: slice"), "layers.0.core"),
    "expert choice": "layers.0.experts",
    **dict.fromkeys(("mean", "shift"), "layers.1.mixer"),
    "GRU": "layers.1.mixer.gru",
    "convolution": "layers.1.mixer.conv",
}
"""The first module that differs, by mistake; the catalogue has more of them."""


@pytest.mark.parametrize(
    ("size", "dtype", "layout"),
    [
        (2, torch.bfloat16, ZigZag()),
        (2, torch.float32, ZigZag()),
        *(pytest.param(3, torch.float32, x, marks=pytest.mark.full) for x in (Contiguous(), Striped())),
    ],
)
@on_ranks("size", timeout=200.0)
def test_mistakes_are_found(rank: int, size: int, dtype: torch.dtype, layout: cp_mesh.Layout) -> None:
    sequence = ShardedSequence(mesh((size,), ("cp",)), layout)
    for kind, first in FROM.items():
        said = told(spread(Net(kind, dtype), sequence), {"tokens": tokens_of()})
        if kind == "GRU" and dtype == torch.bfloat16:
            assert "with all rows of the piece on one rank the model raised" in said, said
        else:
            assert "of their size apart, at positions" in said and (f"from {first} on (" in said or size == 3), said
            assert size == 3 or (" agrees); usually positions" in said and len(said) < 330), (kind, said)


class Crossing(Net):
    """Its last attention is to a context that is as long as a rank's rows."""

    def forward(self, tokens: Tensor, positions: Tensor, context: Tensor) -> Tensor:  # type: ignore[override]
        q, k = (y.unflatten(-1, (H, D)).transpose(1, 2) for y in (self.embedding(tokens), context))
        core = self.layers[0].core
        return self.head(core(q, k, k, torch.zeros(1, D // 2)).transpose(1, 2).flatten(2))


class Only(Net):
    """Of another number of rows it raises; the piece has 16, and a rank half of them."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        if tokens.shape[1] != self.rows:
            raise ValueError("other rows")
        return super().forward(tokens, positions)


@on_ranks(2)
def test_what_is_no_difference_of_rows(rank: int, axis: DeviceMesh) -> None:
    sequence = ShardedSequence(axis)
    cross = told(spread(Crossing(), sequence), {"tokens": tokens_of(), "context": torch.randn(2, S // 2, C)})
    assert "whose keys are not rows of the sequence" in cross and "leave cross-attention out" in cross
    whole = "with all rows of the piece on one rank the model raised ValueError: other rows"
    for net, says in (
        (Net("registers"), "outputs of shapes (2, 9, 40), sharded, and (2, 17, 40), whole"),
        (Only(16), "the sharded run alone raised ValueError: other rows"),
        (Only(8), f"{whole}; sharded it did"),
        (Only(0), whole),
    ):
        said = told(spread(net, sequence), {"tokens": tokens_of()})
        assert says in said and (says != whole or said == whole), said


# What is right.


def documents_of(net: nn.Module, sequence: ShardedSequence, dtype: torch.dtype) -> str:
    ids = torch.arange(S).ge(5).long().expand(2, S)
    by_call = spread(net, sequence, mask=lambda q, k, v, rope, documents: Mask(documents=documents, window=(3, 0)))
    static = spread(Net("", dtype), sequence, mask=Mask(documents=ids, key_padding=ids >= 0))
    packed = {"tokens": tokens_of(), "cu_seqlens": torch.tensor([0, 5, 30, S])}
    return told(by_call, {"tokens": tokens_of(), "documents": ids}) + told(static, packed)


def compiled(net: nn.Module, sequence: ShardedSequence, dtype: torch.dtype) -> str:
    spread(net, sequence)
    for layer in net.layers:
        layer.compile(backend="aot_eager")
    with torch.no_grad():
        net(tokens_of())
    return told(net, {"tokens": tokens_of()})


def compiled_root(net: nn.Module, sequence: ShardedSequence, dtype: torch.dtype) -> str:
    return told(torch.compile(spread(net, sequence), backend="aot_eager"), {"tokens": tokens_of()})


def gathered(net: nn.Module, sequence: ShardedSequence, dtype: torch.dtype) -> str:
    parallelize(net, sequence.mesh, {"layers.1": GatherOutput(sequence, gradient="sum")})
    below = told(spread(net, sequence), {"tokens": tokens_of()})
    return below + told(spread(Net("", dtype), sequence, {"gather_output": True}), {"tokens": tokens_of()})


def autocast(net: nn.Module, sequence: ShardedSequence, dtype: torch.dtype) -> str:
    net.forward = torch.autocast("cpu", torch.bfloat16)(net.forward)
    with torch.autocast("cpu", torch.bfloat16):
        return told(spread(net, sequence), {"tokens": tokens_of()})


def of_layout(layout: cp_mesh.Layout, **options: Any) -> Callable[..., str]:
    def look(net: nn.Module, sequence: ShardedSequence, dtype: torch.dtype) -> str:
        return told(spread(net, ShardedSequence(sequence.mesh, layout), **options), {"tokens": tokens_of()})

    return look


def batch_layout(net: nn.Module, sequence: ShardedSequence, dtype: torch.dtype) -> str:
    ids = torch.arange(S).ge(5).long().expand(2, S)
    style = ShardedModel(sequence, layout=lambda documents, **others: documents[1])
    core = ContextParallel(
        sequence,
        mask=lambda q, k, v, rope, packed: packed[0],
        layout=lambda q, k, v, rope, packed: packed[1],
    )
    parallelize(net, sequence.mesh, {"": style, "layers.*.core": core})
    mask = Mask(documents=ids)
    return told(net, {"tokens": tokens_of(), "documents": (mask, sequence.balanced(mask).layout)})


def padded(net: nn.Module, sequence: ShardedSequence, dtype: torch.dtype) -> str:
    sequence = ShardedSequence(sequence.mesh, length=61)
    ids = torch.arange(61).ge(5).long()[None]
    packed = {"ids": ids, "features": torch.ones(2, 3, 64)}  # as many as tokens with padding

    def mask(q: Any, k: Any, v: Any, rope: Any, documents: Any) -> Mask:
        assert documents["features"].shape == (2, 3, 64)
        return Mask(documents=documents["ids"])

    spread(net, sequence, mask=mask)
    return told(net, {"tokens": tokens_of(length=61), "documents": packed, "positions": torch.arange(61)})


def few(net: nn.Module, sequence: ShardedSequence, dtype: torch.dtype) -> str:
    """The piece is as long as a rank's rows of the batch."""
    spread(net, ShardedSequence(sequence.mesh, Contiguous()), {"probe": True})(tokens_of(length=16))
    return ""


def plain(net: nn.Module, sequence: ShardedSequence, dtype: torch.dtype) -> str:
    return told(spread(net, sequence), {"tokens": tokens_of()})


RIGHT: dict[str, Callable[..., str]] = {
    **dict.fromkeys(("", "tied", "checkpointed", "running mean"), plain),
    "documents": documents_of,
    "compiled blocks": compiled,
    "compiled root": compiled_root,
    "gathered": gathered,
    "autocast": autocast,
    "contiguous": of_layout(Contiguous()),
    "striped": of_layout(Striped(), method="all_gather", kernel="reference"),
    "ulysses": of_layout(ZigZag(), method="ulysses", head_chunks=2),
    "a layout for each batch": batch_layout,
    "padded": padded,
    "few tokens": few,
}


@pytest.mark.parametrize(
    "dtype", (torch.float32, torch.bfloat16, pytest.param(torch.float64, marks=pytest.mark.full)), ids=str
)
@on_ranks(2, timeout=200.0)
def test_what_is_right_is_silent(rank: int, axis: DeviceMesh, dtype: torch.dtype) -> None:
    for kind, look in RIGHT.items():
        said = look(Net(kind, dtype), ShardedSequence(axis), dtype)
        assert not said, (kind, said)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("plan", ("reduce_scatter", "all_reduce", "heads", "rows"))
@on_ranks(4)
def test_tensor_parallel_is_silent(rank: int, plan: str, dtype: torch.dtype) -> None:
    grid = mesh((2, 2), ("cp", "tp"))
    net = decoder.Model(dtype=dtype)
    if plan in ("reduce_scatter", "all_reduce"):
        parallelize(net, grid["tp"], decoder.overlapped_plan(plan))
    else:
        parallelize_module(net, grid["tp"], decoder.tensor_parallel_plan(plan == "rows"))
    spread(net, ShardedSequence(grid["cp"]))
    tokens = torch.randint(decoder.V, (2, 32), generator=torch.Generator().manual_seed(0))
    assert told(net, {"tokens": tokens}) == ""


def test_half_precision_is_computed_in_float32():
    """Each number as of a model whose weights are wide, and nothing of the model is."""
    net = Net("convolution", torch.bfloat16)
    wide = copy.deepcopy(net).float()
    knobs = torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32
    with torch.no_grad():
        with widened(net):
            rows = net.eval()(tokens_of())
        want = wide.eval()(tokens_of())
    assert rows.dtype == torch.float32
    torch.testing.assert_close(rows, want, atol=1e-5, rtol=1e-5)
    assert {x.dtype for x in net.parameters()} == {torch.bfloat16}
    assert knobs == (torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32)


# What is left behind.


def shard_fully(net: nn.Module, data: Any, mixed: bool) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    for layer in net.layers:
        fully_shard(layer, mesh=data, mp_policy=policy)
    sum_gradients(fully_shard(net, mesh=data, mp_policy=policy))


def trained(rank: int, how: str, by: str) -> list[Any]:
    """Weights, buffers, generators, modes and losses of two steps; ``how`` the model was probed before the first."""
    grid = mesh((2, 2), ("dp", "cp")) if by else mesh((1, 2), ("dp", "cp"))
    data = grid._get_root_mesh()["dp", "cp"]._flatten("probed")
    dtype = torch.bfloat16 if by == "bfloat16" else torch.float32
    net, sequence = Net("running mean", dtype), ShardedSequence(grid["cp"])
    spread(net, sequence, {"probe": how == "in the first forward"})
    net.layers[1].eval()
    replica = 0
    if by:
        shard_fully(net, data, by == "mixed")
        replica = grid.get_local_rank("dp")
    torch.manual_seed(7 + rank)
    optimizer, losses = torch.optim.SGD(net.parameters(), 0.1), []
    for step in range(2):
        batch = tokens_of(10 * step + replica, S + 1)
        tokens, labels = batch[:, :-1].contiguous(), batch[:, 1:]
        if how == "before each step":
            said = told(net, {"tokens": tokens})
            assert not said, said
        loss = cross_entropy(net(tokens), sequence.shard({"labels": labels})["labels"], data)
        loss.backward()
        for x in [] if by else net.parameters():
            if x.grad is not None:
                dist.all_reduce(x.grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    whole = [x.full_tensor() if by else x for x in net.parameters()]
    state = [x.detach().clone() for x in (*whole, *net.buffers())]
    return [*state, torch.get_rng_state(), torch.tensor(losses), torch.tensor([x.training for x in net.modules()])]


@pytest.mark.parametrize("by", ("", "float32", "bfloat16", "mixed"))
def test_training_goes_on_as_without(pool, by):
    """Bit for bit: under FSDP2 too, whose first forward the probe has."""
    size = 4 if by else 2
    want = pool(size).run(trained, "", by)
    for how in ("before each step", "in the first forward"):
        for got, expected in zip(pool(size).run(trained, how, by), want, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), how


FORWARDS = ContextVar("forwards", default=0)


@on_ranks(2)
def test_the_guard_looks_as_without(rank: int, axis: DeviceMesh) -> None:
    """And context variables of the model are as before."""
    sequence = ShardedSequence(axis)
    net = spread(Net(), sequence)
    net.register_forward_pre_hook(lambda *_: FORWARDS.set(FORWARDS.get() + 1) and None)
    logits = net(tokens_of())
    own = state_of(axis.get_group(), Cuts)
    before = dict(vars(own))
    assert told(net, {"tokens": tokens_of()}) == ""
    assert vars(own) == before and own.last and FORWARDS.get() == 1
    with pytest.raises(cp_mesh.ArgumentError, match="the labels of contiguous rows"):
        cross_entropy(logits, tokens_of().roll(-1, 1).chunk(2, 1)[rank], axis)
    windowed = Net()
    for layer in windowed.layers:
        layer.core.sliding_window = 20
    spread(windowed, sequence)
    assert told(windowed, {"tokens": tokens_of()}) == ""
    with pytest.raises(cp_mesh.ArgumentError, match="the module's window of 20 keys"):
        windowed(tokens_of())


@on_ranks(2)
def test_what_python_counts_is_named(rank: int, axis: DeviceMesh) -> None:
    with pytest.warns(UserWarning, match="the probe ran the model 2 times.*count, kept"):
        cp_mesh.probe(spread(Net("counter"), ShardedSequence(axis)), {"tokens": tokens_of()})


# What is skipped, and by whom.


@on_ranks(4)
def test_a_replica_does_not_skip_alone(rank: int) -> None:
    """One replica's batch has what cannot be cut: under FSDP2 the other one must not wait for its rows."""
    grid = mesh((2, 2), ("dp", "cp"))
    data, replica = grid._get_root_mesh()["dp", "cp"]._flatten("probed"), grid.get_local_rank("dp")
    for in_first in (False, True):
        net = spread(Net(), ShardedSequence(grid["cp"]), {"probe": in_first})
        shard_fully(net, data, False)
        batch = {"tokens": tokens_of(replica), "cu_seqlens": object() if replica else None}
        if in_first:
            with pytest.warns(UserWarning, match="the probe did not compare anything: no piece can be cut of cu_seql"):
                net(**batch)
        else:
            assert told(net, batch) == "no piece can be cut of cu_seqlens, of type object"


@on_ranks(2)
def test_what_is_skipped(rank: int, axis: DeviceMesh) -> None:
    sequence, fixed, later, pooled = ShardedSequence(axis), ShardedSequence(axis, length=8), Net(), Net()
    later.embedding = nn.Identity()  # type: ignore[assignment]
    pooled.head.register_forward_hook(lambda part, given, output: output.flatten(0, 1))
    rootless = parallelize(Net(), axis, {"layers.*.core": ContextParallel(sequence)}, watch=False)
    one = ShardedSequence(mesh((2, 1), ("dp", "cp"))["cp"])
    for net, given, says in (
        (spread(Net("random"), sequence), tokens_of(), "random in eval mode"),
        (parallelize(later, axis, {"": ShardedModel(fixed, inputs=())}), torch.randn(1, 4, C), "a later stage of a pi"),
        (rootless, tokens_of(), "no ShardedModel"),
        (spread(Net(), sequence), tokens_of(length=4), "at least 8 tokens, the batch has 4"),
        (spread(pooled, sequence), tokens_of(), "has no rows along dim 1"),
        (spread(Net(), one), tokens_of(), ""),
    ):
        said = told(net, {"tokens": given})
        assert says in said and bool(says) == bool(said), said


@on_ranks(2)
def test_the_first_forward_probes(rank: int, axis: DeviceMesh) -> None:
    with pytest.raises(cp_mesh.ArgumentError, match=r"from layers\.1\.mixer on"):
        spread(Net("mean"), ShardedSequence(axis), {"probe": True})(tokens_of())
    net = spread(Net(), ShardedSequence(axis), {"probe": True})
    with pytest.raises(Exception, match="expected a root in eager mode"):
        torch.compile(net, backend="eager", fullgraph=True)(tokens_of())


@on_ranks(2)
def test_ranks_agree_with_checks_off(rank: int, axis: DeviceMesh) -> None:
    with cp_mesh.check_mode(False):
        net = spread(Net(), ShardedSequence(axis))
        said = told(net, {"tokens": tokens_of(), "cu_seqlens": object() if rank else None})
    assert said == "no piece can be cut of cu_seqlens, of type object"
