"""Recurrent layers and convolutions over sharded sequences, against one rank that has all tokens, in float64."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from inside import room
from ranks import mesh
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cp_mesh import Contiguous, Mask, ShardedSequence, Striped, ZigZag, mixers

H, HV, K, V, W = 2, 4, 3, 5, 4
LAYOUTS = {"contiguous": Contiguous(), "zigzag": ZigZag(), "striped": Striped()}
DOCUMENTS = {
    "one": None,
    "packed": [0] * 5 + [1] + [2] * 9 + [3] * 2 + [4] * 14,
    "excluded": [-1] * 3 + [0] * 9 + [-1] * 2 + [1] * 13 + [-1] * 4,
    "of each row": [[0] * 11 + [1] * 20, [5] * 4 + [7] * 27],
}


def direct(what: str, x: dict[str, Tensor], starts: list[int], initial: Tensor | None) -> tuple[Tensor, Tensor]:
    """One sequence of one document, token by token, written anew: [T, HV, V], and the last state."""
    q, k = (y.repeat_interleave(HV // H, 1) for y in (x["q"], x["k"]))
    v, state, out = x["v"], torch.zeros(HV, K, V, dtype=torch.float64) if initial is None else initial, []
    for t in range(len(v)):
        g = (
            x["g"][t]
            if what in ("gated_delta_rule", "gla")
            else x["gk"][t]
            if what in ("kda", "gla of channels")
            else None
        )
        if g is not None:
            state = torch.exp(g).reshape(HV, -1, 1) * state
        u = v[t]
        if what in ("gated_delta_rule", "kda", "delta_rule"):
            u = x["beta"][t][:, None] * (u - (k[t][:, :, None] * state).sum(1))
        state = state + k[t][:, :, None] * u[:, None]
        out.append((q[t][:, :, None] * state).sum(1) * K**-0.5)
    return torch.stack(out), state


RULES = ("gated_delta_rule", "kda", "delta_rule", "gla", "gla of channels", "gla without decay")


def given(what: str, x: dict[str, Tensor]) -> list[Tensor]:
    g, beta = [x["gk" if what in ("kda", "gla of channels") else "g"]], [x["beta"]]
    decay = [] if what in ("delta_rule", "gla without decay") else g
    return [x["q"], x["k"], x["v"], *decay, *(beta if "gla" not in what else [])]


def batch_of(S: int, B: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(B, S, *shape, dtype=torch.float64, generator=made)

    found = {"q": normal(H, K), "k": F.normalize(normal(H, K), dim=-1), "v": normal(HV, V)}
    found |= {"g": -normal(HV).abs(), "gk": -normal(HV, K).abs(), "beta": normal(HV).sigmoid()}
    return found | {"x": normal(6), "weight": normal(1)[0, :1].expand(6, W) * 1.0}


def runs_of(documents: Any, B: int, S: int) -> list[tuple[int, int, int]]:
    """(batch row, begin, end) of each document."""
    found = []
    for b in range(B):
        ids = [0] * S if documents is None else documents[b] if isinstance(documents[0], list) else documents
        begin = 0
        for t in range(1, S + 1):
            if t == S or ids[t] != ids[begin]:
                found += [(b, begin, t)] if ids[begin] >= 0 else []
                begin = t
    return found


def expected(what: str, x: dict[str, Tensor], documents: Any, initial: Tensor | None) -> tuple[Tensor, Tensor]:
    B, S = x["v"].shape[:2]
    out, states = torch.zeros_like(x["v"]), []
    for n, (b, begin, end) in enumerate(runs_of(documents, B, S)):
        own = {name: y[b, begin:end] for name, y in x.items() if name != "weight"}
        rows, state = direct(what, own, [], None if initial is None else initial[n])
        out[b, begin:end] = rows
        states.append(state)
    return out, torch.stack(states)


def compared(
    rank: int, size: int, what: str, layout: str, which: str, method: str, states: bool, kernel: str = "auto"
) -> float:
    """The largest difference from one rank, of outputs, of states and of gradients."""
    B, S, documents = 2, 31, DOCUMENTS[which]
    axis = mesh((size,), ("cp",))
    sequence = ShardedSequence(axis, layout=LAYOUTS[layout], length=S, pad=layout == "striped")
    mask = None if documents is None else Mask(documents=torch.tensor(documents))
    x = {name: y.requires_grad_() for name, y in batch_of(S, B).items()}
    number = len(runs_of(documents, B, S))
    initial = torch.randn(number, HV, K, V, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    initial = initial.requires_grad_() if states else None
    want, want_states = expected(what, x, documents, initial)
    made = torch.Generator().manual_seed(2)
    grad, of_states = (torch.randn(y.shape, dtype=y.dtype, generator=made) for y in (want, want_states))
    loss = (want * grad).sum() + (want_states * of_states).sum() * states
    inputs = [*given(what, x), *([initial] if states else [])]
    want_grads = torch.autograd.grad(loss, inputs)

    run = getattr(mixers, what.split()[0])
    local = sequence.shard(given(what, x), pad_value=0)
    options = {"sequence": sequence, "mask": mask, "method": method, "kernel": kernel}
    out, final = run(*local, initial_state=initial, output_final_state=states, **options)
    worst = (sequence.unshard(out) - want).abs().max()
    loss = (out * sequence.shard(grad)).sum()
    if states:
        worst = torch.maximum(worst, (final - want_states).abs().max())
        loss = loss + (final * of_states).sum() / size
    grads = torch.autograd.grad(loss, inputs)
    for own, whole in zip([x.contiguous() for x in grads], want_grads, strict=True):
        torch.distributed.all_reduce(own)
        worst = torch.maximum(worst, (own - whole).abs().max())
    return float(worst)


def some_rules(pool: Any, method: str) -> None:
    for what in ("gated_delta_rule", "gla"):
        for which in ("one", "packed"):
            found = pool(2).run(compared, 2, what, "zigzag", which, method, False)
            assert max(found) < 1e-12, (what, which, found)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rules_are_those_of_one_rank(pool: Any, size: int, layout: str) -> None:
    for what in RULES:
        for which in DOCUMENTS:
            for method in ("states", *(["heads"] if size in (1, 2) else [])):
                found = pool(size).run(compared, size, what, layout, which, method, which != "one" or what == "kda")
                assert max(found) < 1e-12, (what, which, method, found)


@pytest.mark.parametrize("kernel", ["torch", "reference"])
def test_kernels_over_ranks(pool: Any, kernel: str) -> None:
    for what in ("gated_delta_rule", "kda", "gla"):
        for method in ("states", "heads"):
            found = pool(2).run(compared, 2, what, "zigzag", "packed", method, True, kernel)
            assert max(found) < 1e-12, (what, method, found)


def convolved(rank: int, size: int, layout: str, which: str, W: int) -> float:
    B, S, documents = 2, 31, DOCUMENTS[which]
    sequence = ShardedSequence(mesh((size,), ("cp",)), layout=LAYOUTS[layout], length=S, pad=layout == "striped")
    mask = None if documents is None else Mask(documents=torch.tensor(documents))
    made = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, dtype=torch.float64, generator=made, requires_grad=True)
        for shape in ((B, S, 6), (6, W), (6,))
    )
    want, shifted = torch.zeros(B, S, 6, dtype=torch.float64), torch.zeros(B, S, 6, dtype=torch.float64)
    later = torch.full((B, S, 6), -100.0, dtype=torch.float64)
    for b, begin, end in runs_of(documents, B, S):
        padded = F.pad(x[b, begin:end], (0, 0, W - 1, 0))
        rows = sum(weight[:, j] * padded[j : j + end - begin] for j in range(W)) + bias
        want = want.index_put((torch.tensor(b), torch.arange(begin, end)), F.silu(rows))
        shifted[b, begin + 1 : end] = x[b, begin : end - 1].detach()
        later[b, begin : end - 3] = x[b, begin + 3 : end].detach()
    grad = torch.randn(B, S, 6, dtype=torch.float64, generator=made)
    if documents is not None:
        ids = torch.atleast_2d(torch.tensor(documents)).expand(B, S)
        grad = grad * (ids >= 0)[..., None]
    want_grads = torch.autograd.grad((want * grad).sum(), (x, weight, bias))
    local, options = sequence.shard(x), {"sequence": sequence, "mask": mask}
    out = mixers.causal_conv1d(local, weight, bias, activation="silu", **options)
    known = (grad != 0).any(-1, keepdim=True)
    worst = [((sequence.unshard(out) - want) * known).abs().max()]
    worst += [((sequence.unshard(mixers.token_shift(local, **options)) - shifted) * known).abs().max()]
    rolled = mixers.roll(local, -3, fill_value=-100, **options)
    worst += [((sequence.unshard(rolled) - later) * known).abs().max()]
    grads = torch.autograd.grad((out * sequence.shard(grad)).sum(), (x, weight, bias))
    for own, whole in zip([y.contiguous() for y in grads], want_grads, strict=True):
        torch.distributed.all_reduce(own)
        worst.append((own - whole).abs().max())
    return float(max(worst))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_convolutions_and_shifts_are_those_of_one_rank(pool: Any, size: int, layout: str) -> None:
    for which in DOCUMENTS:
        for width in (1, 2, 4, 9):
            found = pool(size).run(convolved, size, layout, which, width)
            assert max(found) < 1e-12, (which, width, found)


def mamba(rank: int, size: int, layout: str, which: str, method: str) -> float:
    """`ssd` against its recurrence, token by token."""
    B, S, G, P, N, documents = 2, 31, 2, 3, 5, DOCUMENTS[which]
    sequence = ShardedSequence(mesh((size,), ("cp",)), layout=LAYOUTS[layout], length=S, pad=layout == "striped")
    mask = None if documents is None else Mask(documents=torch.tensor(documents))
    made = torch.Generator().manual_seed(0)
    shapes = {"x": (B, S, HV, P), "dt": (B, S, HV), "A": (HV,), "B": (B, S, G, N), "C": (B, S, G, N), "D": (HV,)}
    given = {name: torch.randn(*shape, dtype=torch.float64, generator=made) for name, shape in shapes.items()}
    given |= {"dt": given["dt"].exp(), "A": -given["A"].exp()}
    given = {name: y.requires_grad_() for name, y in given.items()}
    x, dt, A, D = (given[name] for name in ("x", "dt", "A", "D"))
    of_b, of_c = (given[name].repeat_interleave(HV // G, 2) for name in ("B", "C"))
    rows = torch.zeros(B, S, HV, P, dtype=torch.float64)
    for b, begin, end in runs_of(documents, B, S):
        state = torch.zeros(HV, P, N, dtype=torch.float64)
        for t in range(begin, end):
            state = torch.exp(dt[b, t] * A)[:, None, None] * state
            state = state + (dt[b, t][:, None] * x[b, t])[:, :, None] * of_b[b, t][:, None]
            row = (state * of_c[b, t][:, None]).sum(-1) + D[:, None] * x[b, t]
            rows = rows.index_put((torch.tensor(b), torch.tensor(t)), row)
    ids = torch.zeros(1, S) if documents is None else torch.atleast_2d(torch.tensor(documents))
    grad = torch.randn(B, S, HV, P, dtype=torch.float64, generator=made) * (ids.expand(B, S) >= 0)[..., None, None]
    want_grads = torch.autograd.grad((rows * grad).sum(), [*given.values()])
    local = {name: y if name in "AD" else sequence.shard(y) for name, y in given.items()}
    out, _ = mixers.ssd(**local, sequence=sequence, mask=mask, method=method)
    worst = [((sequence.unshard(out) - rows) * (grad != 0)).abs().max()]
    grads = torch.autograd.grad((out * sequence.shard(grad)).sum(), [*given.values()])
    for own, whole in zip([y.contiguous() for y in grads], want_grads, strict=True):
        torch.distributed.all_reduce(own)
        worst.append((own - whole).abs().max())
    return float(max(worst))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_state_space_duality_is_that_of_one_rank(pool: Any, layout: str) -> None:
    for which in DOCUMENTS:
        for method in ("states", "heads"):
            found = pool(2).run(mamba, 2, layout, which, method)
            assert max(found) < 1e-12, (which, method, found)


class Sent(TorchDispatchMode):
    """Bytes that this rank gives to collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and "wait" not in func.__name__:
            self.calls.append(args[0].numel() * args[0].element_size())
        return func(*args, **(kwargs or {}))


def traffic(rank: int, S: int, which: str) -> tuple[list[int], list[int]]:
    """Of the operator and of the convolution, forward and backward, in float32 and zigzag."""
    sequence = ShardedSequence(mesh((2,), ("cp",)), length=S)
    documents = {"one": None, "cut nowhere": [i // (S // 4) for i in range(S)]}[which]
    mask = None if documents is None else Mask(documents=torch.tensor(documents))
    x = {name: y.float() for name, y in batch_of(S, 1).items()}
    q, k, v, g, beta = (y.requires_grad_() for y in sequence.shard(given("gated_delta_rule", x)))
    with Sent() as of_rule:
        out, _ = mixers.gated_delta_rule(q, k, v, g, beta, sequence=sequence, mask=mask, method="states")
        out.sum().backward()
    y = sequence.shard(x["x"]).requires_grad_()
    with Sent() as of_conv:
        mixers.causal_conv1d(y, x["weight"], sequence=sequence, mask=mask).sum().backward()
    return of_rule.calls, of_conv.calls


def test_what_travels_is_as_large_as_states(pool: Any) -> None:
    """Zigzag on two ranks: the second half of one and the first of the other follow one another, so each sends once."""
    state = HV * K * (K + V) * 4
    for S in (32, 128):
        for of_rule, of_conv in pool(2).run(traffic, S, "one"):
            assert of_rule == [state, 2 * state]  # gathered forward, summed and scattered backward
            assert of_conv == [6 * 3 * 4, 2 * 6 * 3 * 4]
        assert all(found == ([], []) for found in pool(2).run(traffic, S, "cut nowhere"))


class Left(TorchDispatchMode):
    """Bytes that leave this rank in collectives of a group of this size."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size, self.bytes = rank, size, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and "wait" not in func.__name__:
            x = args[0]
            own, others = x.numel() * x.element_size(), self.size - 1
            match func.__name__.partition(".")[0]:
                case "all_gather_into_tensor":
                    self.bytes += own * others
                case "reduce_scatter_tensor":
                    self.bytes += own // self.size * others
                case "all_to_all_single":
                    self.bytes += own * (sum(args[2]) - args[2][self.rank]) // sum(args[2])
                case other:
                    raise NotImplementedError(other)
        return func(*args, **(kwargs or {}))


def instantly(inputs: Any, initial: Tensor, lens: list[int], scale: float) -> tuple[Tensor, Tensor]:
    """In the place of a kernel: of the same shapes, and with gradients of all inputs."""
    count = sum(x.sum() for x in inputs if x is not None) + initial.sum()
    return inputs.v + count.to(inputs.v.dtype), initial + count


PACKINGS: dict[str, Any] = {
    "one": lambda S: None,
    "packed": lambda S: torch.arange(S).mul(7).div(S // 9, rounding_mode="floor"),
    "excluded": lambda S: torch.where(torch.arange(S) < S // 3, -1, torch.arange(S) // (S // 5)),
    "of each row": lambda S: torch.arange(2)[:, None] * 5 + torch.arange(S).add(11) // torch.tensor([[S // 4], [S]]),
}
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gated_delta_rule": ("gated_delta_rule", {}),
    "kda": ("kda", {"decay": "channel"}),
    "delta_rule": ("delta_rule", {"decay": None}),
    "gla": ("gla", {"delta": False}),
    "gla of channels": ("gla", {"delta": False, "decay": "channel"}),
    "gla without decay": ("gla", {"delta": False, "decay": None}),
}


def left(rank: int, size: int, S: int, layout: str, packing: str, what: str, dtype: torch.dtype) -> list[str]:
    """Where `mixers.explain` says other bytes than leave this rank."""
    axis, documents, B, heads = mesh((size,), ("cp",)), PACKINGS[packing](S), 2, 6
    mask = Mask() if documents is None else Mask(documents=documents)
    sequence = ShardedSequence(axis, layout=LAYOUTS[layout], length=S, pad=False)
    num_rows = len(sequence.positions(S))
    shapes = {"q": (heads, K), "k": (heads, K), "v": (2 * heads, V), "g": (2 * heads,), "gk": (2 * heads, K)}
    x = {name: torch.zeros(B, num_rows, *shape, dtype=dtype) for name, shape in shapes.items()}
    x |= {"g": x["g"].float(), "gk": x["gk"].float(), "beta": x["v"][..., 0].clone()}
    function, options = LAYERS[what]
    told = mixers.explain(
        S, size, heads=heads, v_heads=2 * heads, k_dim=K, v_dim=V, layout=LAYOUTS[layout], mask=mask, batch=B,
        dtype=dtype, conv_channels=5, **options,
    )  # fmt: skip
    found = []
    with mock.patch.object(room("mixers.rules"), "choose_kernel", lambda *args: instantly):
        for method in ("states", "heads", "auto"):
            inputs = [y.requires_grad_() for y in given(what, x)]
            with Left(rank, size) as forward:
                out, _ = getattr(mixers, function)(*inputs, sequence=sequence, mask=mask, method=method)
            with Left(rank, size) as backward:
                out.sum().backward()
            found.append((told.method if method == "auto" else method, forward.bytes, backward.bytes))
    rows, weight = torch.zeros(B, num_rows, 5, dtype=dtype, requires_grad=True), torch.zeros(5, 4, dtype=dtype)
    with Left(rank, size) as forward:
        out = mixers.causal_conv1d(rows, weight, sequence=sequence, mask=mask)
    with Left(rank, size) as backward:
        out.sum().backward()
    found.append(("convolution", forward.bytes, backward.bytes))
    return [
        f"{name} {layout} {packing}: {told.sent[name].forward[rank]}, {told.sent[name].backward[rank]}; {counted}"
        for name, *counted in found
        if counted != [told.sent[name].forward[rank], told.sent[name].backward[rank]]
    ]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_explain_tells_the_bytes_that_leave_a_rank(pool: Any, full: bool, size: int, layout: str) -> None:
    for what in LAYERS:
        for packing in PACKINGS if full or what == "kda" else ("packed",):
            for dtype in (torch.float32, torch.bfloat16):
                for problems in pool(size).run(
                    left, size, 254 if layout == "striped" else 1022, layout, packing, what, dtype
                ):
                    assert not problems, (what, dtype, problems)


@pytest.mark.parametrize("layout", [pytest.param("contiguous", marks=pytest.mark.full), "zigzag"])
def test_explain_of_a_million_tokens(pool: Any, layout: str) -> None:
    for packing in ("one", "packed"):
        for problems in pool(2).run(left, 2, 2**20, layout, packing, "gated_delta_rule", torch.bfloat16, timeout=120.0):
            assert not problems, problems


REFUSED = {
    "an id that comes back": ({"mask": Mask(documents=torch.tensor([0] * 8 + [1] * 8 + [0] * 16))}, "comes back"),
    "heads of odd ranks": ({"method": "heads", "size": 3}, "ranks that divide"),
    "another method": ({"method": "ring"}, "auto or states or heads"),
    "another kernel": ({"kernel": "triton"}, "auto or torch or fla or reference"),
    "other documents": ({"mask": Mask(documents=torch.zeros(30, dtype=torch.int64))}, "32"),
    "one state too many": ({"initial_state": torch.zeros(2, HV, K, V)}, "one state for each document"),
    "beta of other rows": ({"beta": torch.zeros(1, 3, HV)}, "gated_delta_rule: beta"),
}


def refused(rank: int, name: str, alone: bool) -> None:
    options, _ = REFUSED[name]
    size = options.get("size", 2)
    sequence = ShardedSequence(mesh((size,), ("cp",)), length=32, pad=False)
    x = batch_of(32, 1)
    local = dict(zip(("q", "k", "v", "g", "beta"), sequence.shard(given("gated_delta_rule", x)), strict=True))
    if rank == 0 or not alone:
        local |= {key: y for key, y in options.items() if key != "size"}
    mixers.gated_delta_rule(**local, sequence=sequence)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_on_every_rank(pool: Any, name: str) -> None:
    options, words = REFUSED[name]
    for alone in (False, True):
        errors = pool(options.get("size", 2)).run_expecting_error(refused, name, alone, timeout=20.0)
        assert all(error is not None and words in error.message for error in errors), errors


def options(rank: int) -> float:
    """Normalized queries and keys, and another scale, against inputs that were normalized and scaled before."""
    sequence, x = ShardedSequence(mesh((2,), ("cp",)), length=32), batch_of(32, 1)
    q, k, v, g, beta = sequence.shard(given("gated_delta_rule", x))
    unit = [y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (3 * q, 3 * k)]
    want, _ = mixers.gated_delta_rule(2 * unit[0], unit[1], v, g, beta, sequence=sequence, scale=1.0)
    found, _ = mixers.gated_delta_rule(
        3 * q, 3 * k, v, g, beta, sequence=sequence, scale=2.0, use_qk_l2norm_in_kernel=True
    )
    return float((found - want).abs().max())


def test_scale_and_normalization(pool: Any) -> None:
    assert max(pool(2).run(options)) < 1e-12


def scaled(rank: int) -> None:
    sequence = ShardedSequence(mesh((2,), ("cp",)), length=32)
    local = sequence.shard(given("gla", batch_of(32, 1)))
    mixers.gla(*local, sequence=sequence, scale=1.0 + rank)


def test_unlike_scales_are_refused(pool: Any) -> None:
    assert all("arguments" in error.message for error in pool(2).run_expecting_error(scaled))


def unlike(rank: int) -> None:
    """Ranks with other documents."""
    sequence = ShardedSequence(mesh((2,), ("cp",)), length=32)
    mask = Mask(documents=torch.arange(32) // (8 + 8 * rank))
    mixers.token_shift(sequence.shard(batch_of(32, 1)["x"]), sequence=sequence, mask=mask)


def test_unlike_documents_are_refused(pool: Any) -> None:
    assert all("documents" in error.message for error in pool(2).run_expecting_error(unlike))
