"""MLPs in tiles of rows, against the plain module in float64: outputs, gradients, memory, and what is refused.

`test_gradients` has them in whole models, with FSDP2, checkpoints and styles over tp.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model import Core, DenseCore, Model, batch
from ranks import alone, group_of_one, mesh, on_ranks
from test_loss import peak_of
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from cp_mesh import (
    ArgumentError,
    Checkpointed,
    ContextParallel,
    RankMismatchError,
    ShardedModel,
    ShardedSequence,
    TiledMLP,
    UnsupportedError,
    parallelize,
    sum_gradients,
    verify_model,
)
from cp_mesh.training import GatherOutput

B, S, C = 2, 13, 8


class MLP(nn.Module):
    """A norm and a gated MLP, with a count of its forwards."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.dropout, self.rows = nn.LayerNorm(C), dropout, list[int]()
        self.gate, self.up, self.down = nn.Linear(C, 24), nn.Linear(C, 24), nn.Linear(24, C)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.rows.append(x.shape[1])
        x = self.norm(x)
        return scale * self.down(F.dropout(F.silu(self.gate(x)) * self.up(x), self.dropout, self.training))


class Experts(nn.Module):
    """The best 2 of 4 experts for each token; also router logits [B * S, E], and which experts, [B, S, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(C, 4, False), nn.ModuleList(nn.Linear(C, C) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        flat = x.view(-1, C)
        logits = self.router(flat)
        weights, chosen = logits.softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            token, slot = (chosen == i).nonzero(as_tuple=True)
            if len(token):  # an expert without tokens has no gradient
                out = out.index_add(0, token, expert(flat[token]) * weights[token, slot, None])
        out = out.view_as(x) if mask is None else out.view_as(x) * mask[..., None]
        return {"out": out, "router": (logits, None), "chosen": chosen.view(*x.shape[:2], 2)}


class Router(nn.Linear):
    """Also numbers a token, in three forms."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y, y.sum(-1), y.flatten(0, 1).sum(-1), y.flatten(0, 1)[:, :1]


def frozen() -> MLP:
    module = MLP()
    module.up.requires_grad_(False)
    module.norm.weight.requires_grad_(False)
    return module


@pytest.fixture(autouse=True, scope="module")
def _group() -> Iterator[None]:
    """A group of this process, for tests without ranks."""
    with group_of_one():
        yield


def pair(make: Callable[[], nn.Module], axis: Any, dtype: torch.dtype = torch.float64, **tiles: Any) -> Any:
    """A module, and the same in tiles, both behind a linear."""
    torch.manual_seed(0)
    plain = nn.ModuleDict({"first": nn.Linear(C, C), "mlp": make()}).to(dtype)
    tiled = copy.deepcopy(plain)
    parallelize(tiled, axis, {"mlp": TiledMLP(**tiles)})
    return plain, tiled


def run(model: nn.ModuleDict, *args: Any, x: Tensor | None = None) -> tuple[list[Tensor], list[Tensor | None]]:
    """Outputs, and gradients of the input and the parameters, by the sum of their squares."""
    x = rows(next(model.parameters()).dtype) if x is None else x
    x = x.detach().requires_grad_()
    found, _ = torch.utils._pytree.tree_flatten(model["mlp"](model["first"](x), *args))
    outs = [y for y in found if y is not None]
    sum(y.square().sum() for y in outs if y.is_floating_point()).backward()
    return [y.detach() for y in outs], [x.grad, *(p.grad for p in model.parameters())]


def rows(dtype: torch.dtype = torch.float64, S: int = S) -> Tensor:
    return torch.randn(B, S, C, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def assert_same(found: Any, want: Any, tolerance: float = 1e-12) -> None:
    for x, y in zip([*found[0], *found[1]], [*want[0], *want[1]], strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert x.dtype == y.dtype and x.shape == y.shape
            assert not x.numel() or (x - y).abs().max() <= tolerance * y.abs().max()


def assert_close(found: Any, want: Any) -> None:
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)


MODULES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "MLP": (MLP, (0.5,)),
    "experts": (Experts, ()),
    "two tensors": (Experts, (torch.rand(B, S, dtype=torch.float64),)),
    "frozen weights": (frozen, ()),
    "no weights": (nn.GELU, ()),
    "numbers": (lambda: Router(C, C), ()),
}
TILES = [{"tiles": 3}, {"tiles": 20}, {"tile_rows": 1}, {"tile_rows": 5}, {"tile_rows": 99}]


@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.quick("3", "5")
def test_outputs_and_gradients(name: str, tiles: dict[str, int]) -> None:
    """Tiles of unequal length, and more of them than rows."""
    make, given = MODULES[name]
    plain, tiled = pair(make, alone(), **tiles)
    for _ in range(2):  # gradients add up
        assert_same(run(tiled, *given), run(plain, *given))
    for mode in (torch.no_grad, torch.inference_mode):
        plain, tiled = pair(make, alone(), **tiles)
        with mode():
            x, y = tiled["mlp"](rows(), *given), plain["mlp"](rows(), *given)
        assert_close(x, y)


def test_no_rows() -> None:
    """As on a rank that holds none."""
    plain, tiled = pair(MLP, alone(), tiles=2)
    x = rows(S=0)
    assert_same(run(tiled, x=x), run(plain, x=x))


def test_what_is_kept() -> None:
    """The input alone, in memory that hooks may move; each tile runs once in each pass, after a look."""
    plain, tiled = pair(MLP, alone(), tile_rows=5)
    want, saved = run(plain), list[tuple[int, ...]]()
    run(tiled)
    calls, tiled["mlp"].rows[:] = [*tiled["mlp"].rows], []
    assert max(calls) <= 6 and calls[-3:] == [4, 4, 5]
    with saved_tensors_hooks(lambda x: saved.append(tuple(x.shape)) or x, lambda x: x):
        y = tiled["mlp"](rows().requires_grad_())
    assert saved == [(B, S, C)]
    y.sum().backward()
    assert tiled["mlp"].rows == [4, 4, 5] * 2
    tiled.zero_grad()
    with save_on_cpu():
        assert_same(run(tiled), want)


@pytest.mark.unpoisoned
def test_memory() -> None:
    """Hidden units of a few tiles in place of all, beside rows and gradients."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(C, 512), nn.SiLU(), nn.Linear(512, C))
    tiled = parallelize(copy.deepcopy(plain), alone(), {"": TiledMLP(tile_rows=32)})
    x = rows(S=1024)[:1].float().requires_grad_()
    hidden, others = 1024 * 512 * 4, 8 * x.nbytes + 6 * sum(p.nbytes for p in plain.parameters())
    tiled(x)  # the first call looks
    assert peak_of(lambda: tiled(x).sum().backward()) <= 6 * hidden // 32 + others < hidden
    assert peak_of(lambda: plain(x).sum().backward()) >= 2 * hidden


def test_float32_sums() -> None:
    """Weights in bfloat16 have gradients that round once, after the sum over 64 tiles."""
    plain, tiled = pair(lambda: nn.Linear(C, C), alone(), torch.bfloat16, tile_rows=1)
    _, single = pair(lambda: nn.Linear(C, C), alone(), torch.bfloat16, tiles=1)
    x = rows(torch.bfloat16, 256).abs()
    (_, found), (_, want), exact = run(tiled, x=x), run(single, x=x), plain.double()
    exact_grads = run(exact, x=x.double())[1]
    for mine, one, right in zip(found[3:], want[3:], exact_grads[3:], strict=True):
        errors = [(y.double() - right).abs().max() / right.abs().max() for y in (mine, one)]
        assert errors[0] <= 2**-6 and errors[0] <= 2 * errors[1] + 2**-9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    """The backward computes as the forward did; the cache of autocast keeps its graphs."""
    plain, tiled = pair(MLP, alone(), torch.float32, tiles=3)
    tied = [copy.deepcopy(x) for x in (plain, tiled)]
    with torch.autocast("cpu", dtype):
        found, want = run(tiled), run(plain)
    assert want[0][0].dtype == dtype
    assert_same(found, want, 0.03)
    grads = []
    for model in tied:
        with torch.autocast("cpu", dtype):
            y = model["mlp"](rows(torch.float32))
            y = y + model["mlp"].gate(rows(torch.float32)).sum()  # the weight again, in the same autocast
            y.sum().backward()
        grads.append(model["mlp"].gate.weight.grad)
    assert (grads[0] - grads[1]).abs().max() <= 0.03 * grads[0].abs().max()


def test_dropout() -> None:
    """The backward draws what the forward drew, and nothing else changes the random numbers."""
    plain, tiled = pair(lambda: MLP(0.5), alone(), tiles=3)
    x = rows()
    torch.manual_seed(3)
    found = run(tiled, x=x)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    leaf = x.requires_grad_()
    hidden = plain["first"](leaf)
    out = torch.cat([plain["mlp"](hidden[:, a:b]) for a, b in ((0, 4), (4, 8), (8, 13))], 1)
    out.square().sum().backward()
    assert torch.equal(after, torch.get_rng_state())
    assert_same(found, ([out.detach()], [leaf.grad, *(p.grad for p in plain.parameters())]))
    assert tiled["mlp"].training


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool) -> None:
    """A checkpoint without reentry does not run the module to learn what it keeps."""
    plain, tiled = pair(MLP, alone(), tiles=3)
    found = []
    for model in (plain, tiled):
        x = rows().requires_grad_()
        for _ in range(2):  # the first call looks
            model.zero_grad()
            model["mlp"].rows.clear()
            block = functools.partial(residual, model)
            y = checkpoint(block, x, use_reentrant=reentrant) if model is tiled else block(x)
            (grad,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True) if not reentrant else (None,)
            y.square().sum().backward()
        found.append(([y.detach()], [grad, *(p.grad for p in model.parameters())]))
    assert tiled["mlp"].rows == [4, 4, 5] * 3  # forward, and two backwards; with reentry a recomputation and one
    assert_same(found[1], found[0], 1e-11)


def residual(model: nn.ModuleDict, x: Tensor) -> Tensor:
    return x + model["mlp"](model["first"](x))


def test_graphs_that_are_kept() -> None:
    """A graph runs twice, in parts, and not a second derivative."""
    plain, tiled = pair(Experts, alone(), tiles=3)
    grads = []
    for model in (plain, tiled):
        x = rows().requires_grad_()
        found = model["mlp"](x)
        y, logits = found["out"], found["router"][0]
        assert not found["chosen"].requires_grad
        once = torch.autograd.grad(y.sum(), [x, *model["mlp"].parameters()], retain_graph=True, allow_unused=True)
        grads.append([*once, *torch.autograd.grad(logits.square().sum(), x)])
    assert_close(*grads)
    x = rows().requires_grad_()
    (first,) = torch.autograd.grad(tiled["mlp"](x)["out"].square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()


def test_compile() -> None:
    """Left out of the graph, whose rest is compiled; modules inside may be compiled, or the module before."""
    plain, tiled = pair(MLP, alone(), tiles=3)
    graphs, x = list[Any](), rows()

    def backend(graph: Any, examples: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def step(model: Any, x: Tensor) -> Tensor:
        return model["mlp"](model["first"](x) * 2) + 1

    def grads(run: Callable[..., Tensor], model: Any) -> Any:
        return torch.autograd.grad(run(model, x).square().sum(), [*model.parameters()])

    want = grads(step, plain)
    assert_close(grads(torch.compile(step, backend=backend), tiled), want)
    assert len(graphs) == 2 and all("silu" not in graph.code for graph in graphs)
    tiled["mlp"].gate = torch.compile(tiled["mlp"].gate, backend=backend)
    assert_close(grads(step, tiled), want)
    assert len(graphs) > 2
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(step, backend="eager", fullgraph=True)(tiled, x)
    plain["mlp"] = torch.compile(plain["mlp"], backend="eager")
    assert_close(grads(step, parallelize(plain, alone(), {"mlp": TiledMLP(tiles=3)})), want)


# --- on ranks


@pytest.mark.parametrize(
    ("how", "reshard"), [("DDP", True), *((f"FSDP{x}", y) for x in ("", " of the MLP") for y in (True, False))]
)
@on_ranks(2)
def test_reduced_gradients(rank: int, axis: Any, how: str, reshard: bool) -> None:
    """Reduced once for each backward, over tiles of unlike numbers."""
    plain, tiled = pair(MLP, axis, tile_rows=3)
    want = [(1 if how == "DDP" else 2) * grad for grad in run(plain)[1][1:]]
    model: Any = nn.Sequential(tiled["first"], tiled["mlp"])
    whole = rows()
    x = whole[:, :9] if rank == 0 else whole[:, 9:]
    if how == "DDP":
        model = DistributedDataParallel(model, process_group=axis.get_group())
        sum_gradients(model)
    else:
        for part in (model[1], model) if how == "FSDP of the MLP" else (model,):
            fully_shard(part, mesh=axis, reshard_after_forward=reshard)
        sum_gradients(model)
    for _ in range(1 if how == "DDP" else 2):  # DDP would sum what it has summed
        model(x).square().sum().backward()
    found = [p.grad if how == "DDP" else p.grad.full_tensor() for p in model.parameters()]
    for x, y in zip(found, want, strict=True):
        assert (x - y).abs().max() <= 1e-12 * y.abs().max()


@on_ranks(2, timeout=20.0)
def test_one_rank_evaluates_alone(rank: int) -> None:
    """The first rank evaluates by itself, then both train."""
    model = parallelize(MLP(), mesh((2,), ("cp",)), {"": TiledMLP(tiles=3)})
    if rank == 0:
        with torch.no_grad():
            model(rows(torch.float32))
    torch.distributed.barrier()
    model(rows(torch.float32)).sum().backward()


@on_ranks(2)
def test_mixed_precision(axis: Any) -> None:
    """FSDP2's mixed precision: weights that it casts, gradients that it reduces in float32."""
    grads = []
    for model in pair(MLP, axis, torch.float32, tiles=3):
        model = nn.Sequential(model["first"], model["mlp"])
        fully_shard(model, mesh=axis, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        sum_gradients(model)
        model(rows(torch.float32)).square().sum().backward()
        grads.append([p.grad.full_tensor() for p in model.parameters()])
    plain, tiled = grads
    for x, y in zip(tiled, plain, strict=True):
        assert x.dtype == torch.float32 and (x - y).abs().max() <= 0.02 * y.abs().max()


@pytest.mark.parametrize(
    "styles",
    [{"layers.*.ff": TiledMLP(tiles=3)}, {"layers.*": Checkpointed(offload=True)}],
    ids=["tiles", "checkpoints"],
)
@on_ranks(2)
def test_verified(axis: Any, styles: dict[str, Any]) -> None:
    sequence = ShardedSequence(axis)
    plan = {"": ShardedModel(sequence), "layers.*.core": ContextParallel(sequence)} | styles
    given = {name: x for name, x in batch(2, 24).items() if name in ("tokens", "labels", "positions")}
    given["positions"] = torch.arange(24).expand(2, 24)
    report = verify_model(lambda: Model(Core), plan, given, axis, make_reference=lambda: Model(DenseCore))
    assert report.verdict.startswith("RIGHT")


# --- refusals


class Places(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(99, C))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: x.shape[1]]


class Says(nn.Module):
    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run, self.losses = run, list[Tensor]()

    def forward(self, *args: Any) -> Any:
        return self.run(self, *args)


OUTER = torch.ones(C, requires_grad=True)
MIXING: dict[str, Callable[[], nn.Module]] = {
    "learned positions": Places,
    "a mean": lambda: Says(lambda _, x: x - x.mean(1, keepdim=True)),
    "a running sum": lambda: Says(lambda _, x: x.cumsum(1)),
    "the next row": lambda: Says(lambda _, x: x.roll(-1, 1)),
}
WRITING: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(C)),
    "an attribute": lambda: Says(lambda self, x: setattr(self, "seen", x.sum()) or x),
    "a list": lambda: Says(lambda self, x: self.losses.append(x.sum()) or x),
    "its input": lambda: Says(lambda _, x: x.mul_(2) * 1),
}


@pytest.mark.parametrize("num_rows", [2, 13])
@pytest.mark.parametrize("name", MIXING)
def test_modules_that_mix_tokens_are_refused(name: str, num_rows: int) -> None:
    with pytest.raises(UnsupportedError, match=r"rows of \d+ that depend on other rows, or on their place"):
        apply(MIXING[name]())(rows(torch.float32, num_rows))


def test_mixing_by_less_than_rounding_is_refused() -> None:
    module = Says(lambda _, x: x + 0.001 * x.mean(1, keepdim=True))
    with pytest.raises(UnsupportedError, match=r"one row that depends on \d+ others"):
        apply(module)(rows(torch.bfloat16, 13)[:1])


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", WRITING)
def test_modules_that_write_are_refused(name: str, trained: bool) -> None:
    x = rows(torch.float32).requires_grad_(trained)
    with pytest.raises(UnsupportedError, match="expected buffers, attributes and an input that stay, got a write"):
        apply(WRITING[name]())(x)
    assert torch.equal(x, rows(torch.float32))


def apply(module: nn.Module, **options: Any) -> nn.Module:
    return parallelize(module, alone(), {"": TiledMLP(**options or {"tiles": 2})})


def hooked(kind: str) -> nn.Module:
    module = nn.Sequential(nn.Linear(C, C))
    if kind == "weight":
        module[0].weight.register_hook(lambda grad: grad)
    else:
        getattr(module[0], f"register_{kind}")(lambda *_: None)
    return module


REFUSED: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "a gradient that is lost": (
        UnsupportedError, r"another, \(8,\)", lambda: apply(Says(lambda _, x: x * OUTER))(rows())
    ),
    "rows of one expert": (
        ArgumentError, r"3 dims at least, got \[\(12, 8\)\]; name the block of experts",
        lambda: apply(nn.Linear(C, C).double())(rows(S=6).flatten(0, 1))
    ),
    "a scalar output": (
        ArgumentError, r"outputs of rows.*got \(\)", lambda: apply(Says(lambda _, x: (x, x.sum())))(rows())
    ),
    "an output without rows": (
        ArgumentError, "outputs of rows.*got 3", lambda: apply(Says(lambda _, x: (x, 3)))(rows())
    ),
    "no rows": (ArgumentError, r"same first 2 dims, got \[\]", lambda: apply(Says(lambda _: None))()),
    "one dim": (ArgumentError, r"got \[\(8,\)\]", lambda: apply(nn.ReLU())(torch.ones(8))),
    "another tensor": (
        ArgumentError, r"got \[\(2, 13, 8\), \(8,\)\]", lambda: apply(Says(lambda _, x, y: x * y))(rows(), OUTER)
    ),
    **{
        f"a {kind}": (UnsupportedError, "hook", lambda kind=kind: apply(hooked(kind))(rows(torch.float32)))
        for kind in ("forward_hook", "forward_pre_hook", "full_backward_hook", "weight")
    },
    "tiles inside": (
        UnsupportedError, "Linear with TiledMLP",
        lambda: apply(nn.Sequential(apply(nn.Linear(C, C))))(rows(torch.float32))
    ),
    "twice": (UnsupportedError, "Linear with TiledMLP", lambda: apply(apply(nn.Linear(C, C)))),
    "behind a boundary": (
        UnsupportedError, "Linear with GatherOutput", lambda: apply(
            parallelize(nn.Linear(C, C), alone(), {"": GatherOutput(ShardedSequence(alone()), gradient="sum")})
        )
    ),
    "both": (ArgumentError, "one of tiles= and tile_rows=", lambda: TiledMLP(tiles=2, tile_rows=2)),
    "neither": (ArgumentError, "got tiles=None, tile_rows=None", TiledMLP),
    "none": (ArgumentError, "at least 1", lambda: TiledMLP(tiles=0)),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    error, match, fn = REFUSED[name]
    with pytest.raises(error, match=match):
        fn()


@pytest.mark.parametrize("change", ["step", "swap", "freeze"])
def test_other_weights_in_the_backward_are_refused(change: str) -> None:
    module, x = apply(nn.Linear(C, C)), rows(torch.float32)
    others = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    y = torch.func.functional_call(module, others, x) if change == "swap" else module(x)
    if change == "step":
        with torch.no_grad():
            module.weight.mul_(2)
    elif change == "freeze":
        module.bias.requires_grad_(False)
    with pytest.raises(UnsupportedError, match="the weights of the forward in the backward"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("how", "said"),
    {
        "one rank": "depend on other rows",
        "fully_shard inside": "FSDPLinear with fully_shard",
        "sharded output": "outputs of rows",
        "sharded input": "rows that tp does not shard",
    }.items(),
)
@on_ranks(2)
def test_refused_on_every_rank(rank: int, axis: Any, how: str, said: str) -> None:
    """Of two ranks or modules only one mixes tokens, or shards rows over tp; both raise."""
    if how == "one rank":
        module: nn.Module = Says(lambda _, x: x.cumsum(1) if rank == 0 else x)
    elif how == "fully_shard inside":
        module = nn.Sequential(nn.Linear(C, C))
        fully_shard(module[0], mesh=axis)
    else:
        module = nn.Sequential(nn.Linear(C, C), nn.Linear(C, C))
        first = ColwiseParallel() if how == "sharded output" else ColwiseParallel(input_layouts=Shard(1))
        parallelize(module, axis, {"0": first, "1": RowwiseParallel(output_layouts=Shard(1))})
    x = rows(torch.float32, 8)
    parallelize(module, axis, {"": TiledMLP(tiles=2)})
    error = RankMismatchError if how == "one rank" and rank else Exception
    with pytest.raises(error, match=said):
        module(distribute_tensor(x, axis, [Shard(1)]) if how == "sharded input" else x)
