"""Recurrent layers and convolutions over sharded sequences, against one rank that has all tokens, in float64."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from inside import inner, room
from ranks import mesh
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from cp_mesh import Contiguous, Mask, ShardedSequence, Striped, ZigZag, mixers
from cp_mesh.geometry import Joint, Permuted

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


def at_the_edge(rank: int, size: int, S: int, what: str, form: str) -> float:
    """As `compared`, of shards that may be empty and of losses that read one output alone."""
    x = {name: y.requires_grad_() for name, y in batch_of(S, 1).items()}
    sequence = ShardedSequence(mesh((size,), ("cp",)), layout=Contiguous(), length=S, pad=False)
    run = partial(getattr(mixers, what.split()[0]), sequence=sequence, method="states")
    inputs, (want, want_states) = given(what, x), expected(what, x, None, None)
    local = sequence.shard(inputs)
    if form == "checkpointed":
        out, _ = checkpoint(run, *local, use_reentrant=False)
    else:
        out, states = run(*local, output_final_state=True)
    loss = want_loss = torch.zeros((), dtype=torch.float64)
    if form != "states":
        loss, want_loss = out.square().sum(), want.square().sum()
    if form != "checkpointed":
        loss, want_loss = loss + states.square().sum() / size, want_loss + want_states.square().sum()
    wanted = [y for y in inputs if form != "states" or y is not x["q"]]
    grads, want_grads = (torch.autograd.grad(y, wanted) for y in (loss, want_loss))
    worst = (sequence.unshard(out) - want).abs().max()
    for own, whole in zip([y.contiguous() for y in grads], want_grads, strict=True):
        torch.distributed.all_reduce(own)
        worst = torch.maximum(worst, (own - whole).abs().max())
    return float(worst)


@pytest.mark.parametrize("what", RULES)
def test_shards_without_a_token(pool: Any, what: str) -> None:
    """One rank has a token, the other none: no state goes on. Of two tokens on three ranks one goes on."""
    for size, S in ((2, 1), (3, 2)):
        assert max(pool(size).run(at_the_edge, size, S, what, "both")) < 1e-12


@pytest.mark.parametrize("form", ["states", "checkpointed"])
@pytest.mark.parametrize("what", RULES)
def test_all_ranks_run_the_same_collectives(pool: Any, what: str, form: str) -> None:
    """A loss of the states alone, and a checkpoint, whose backward computes the forward again."""
    assert max(pool(3).run(at_the_edge, 3, 13, what, form, timeout=60)) < 1e-12


def rounded(rank: int, layout: str) -> list[float]:
    """Errors of `gla` in bfloat16 on two ranks, relative to those on one: of outputs and of gradients."""
    axes = mesh((2, 1), ("cp", "one"))
    one, two = (ShardedSequence(axes[name], layout=LAYOUTS[layout], length=512, pad=False) for name in ("one", "cp"))
    x = batch_of(512, 1) | {"g": batch_of(512, 1)["g"] / 100}
    inputs = [y.bfloat16() for y in (*given("gla", x), x["v"])]

    def errors(sequence: ShardedSequence, dtype: torch.dtype) -> list[Tensor]:
        *local, grad = (y.to(dtype).requires_grad_() for y in sequence.shard(inputs))
        out, _ = mixers.gla(*local, sequence=sequence, method="states", kernel="torch")
        found = out.detach(), *torch.autograd.grad(out, local, grad)
        return [sequence.unshard(y.contiguous()).double() for y in found]

    want, *both = errors(one, torch.float64), errors(one, torch.bfloat16), errors(two, torch.bfloat16)
    first, second = ([float((y - z).norm()) for y, z in zip(ys, want, strict=True)] for ys in both)
    return [y / z for y, z in zip(second, first, strict=True)]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_states_of_others_round_nothing_anew(pool: Any, layout: str) -> None:
    assert max(map(max, pool(2).run(rounded, layout))) < 1.05


class SumsOfGPUs(TorchDispatchMode):
    """Sums along the first dims one after another in float32, as PyTorch's kernel for GPUs; that for CPUs in float64.

    Source: tensor_kernel_scan_outer_dim in ATen/native/cuda/ScanUtils.cuh.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.cumsum.default and args[0].dtype is torch.float32:
            return torch.from_numpy(np.cumsum(args[0].numpy(), args[1], dtype=np.float32))
        return func(*args, **(kwargs or {}))


def test_weak_decays_over_many_tokens() -> None:
    """The rows' products round to float32, whose unit is 6e-8; sums one after another would be off by 1e-2."""
    T, of_state = 2**17, room("mixers.states")._of_state
    g, state, q = torch.full((T, 1), -1e-4), torch.ones(1, 1, 1), torch.ones(T, 1, 1)
    with SumsOfGPUs():
        found = of_state(state, q, g)
    assert (found.flatten().double() / g.flatten().double().cumsum(0).exp() - 1).abs().max() < 3e-5


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
    grad = torch.randn(B, S, HV, P, dtype=torch.float64, generator=made)
    want_grads = torch.autograd.grad((rows * grad).sum(), [*given.values()])
    local = {name: y if name in "AD" else sequence.shard(y) for name, y in given.items()}
    out, _ = mixers.ssd(**local, sequence=sequence, mask=mask, method=method)
    worst = [(sequence.unshard(out) - rows).abs().max()]
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


def traffic(rank: int, S: int, which: str, layout: str = "zigzag") -> tuple[list[int], list[int]]:
    """Of the operator and of the convolution, forward and backward, in float32."""
    sequence = ShardedSequence(mesh((2,), ("cp",)), layout=LAYOUTS[layout], length=S)
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
        for of_rule, _ in pool(2).run(traffic, S, "one", "contiguous"):  # through no piece: nobody needs A
            assert of_rule == [HV * K * V * 4, 2 * HV * K * V * 4]


def repeated(rank: int) -> list[str]:
    """Calls that were checked though they are known, or are known though something changed, or are wrong."""
    rules, S, problems = room("mixers.rules"), 44, []
    axis, zigzag = mesh((2,), ("cp",)), ZigZag()
    sequences = [ShardedSequence(axis, layout, length=S) for layout in (zigzag, zigzag, Contiguous())]
    documents = [[i // n for i in range(S)] for n in (5, 7, 9)]
    masks = [Mask(documents=torch.tensor(x)) for x in documents]
    x = batch_of(S, 1)
    shards = [each.shard(given("gated_delta_rule", x)) for each in sequences]

    def compare(
        what: str, which: int, is_known: bool, mask: Mask | None = None, sequence: int = 0, **more: Any
    ) -> None:
        options = {"sequence": sequences[sequence], "mask": masks[which] if mask is None else mask, **more}
        with mock.patch.object(rules, "_pieces", wraps=rules._pieces) as checked:
            out, _ = mixers.gated_delta_rule(*shards[sequence], **options)
        want, _ = expected("gated_delta_rule", x, documents[which], None)
        if (sequences[sequence].unshard(out) - want).abs().max() > 1e-12:
            problems.append(f"{what}: wrong")
        if checked.called is is_known:
            problems.append(f"{what}: {'known' if is_known else 'checked'} expected")

    compare("the first call", 0, False)
    compare("the same", 0, True)
    compare("another mask", 1, False)
    compare("the first mask", 0, True)
    compare("an equal mask", 0, False, mask=Mask(documents=torch.tensor(documents[0])))
    compare("an equal sequence, as of each layer", 0, True, sequence=1)
    compare("another layout", 0, False, sequence=2)
    compare("another method", 0, False, method="states")
    compare("that again", 0, True, method="states")
    compare("a third mask", 2, False)
    compare("a mask whose pieces are gone", 1, False)
    masks[1].documents.copy_(torch.tensor(documents[2]))
    documents[1] = documents[2]
    compare("a mask that was written", 1, False)
    return problems


def test_repeated_calls_are_one_look_up(pool: Any) -> None:
    assert pool(2).run(repeated) == [[], []]


class Copied(Sent):
    """Also the bytes of what copies as many numbers as these rows have."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.least, self.copied = rows.numel(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_dispatch__(func, types, args, kwargs)
        copies = ("cat", "index", "clone", "_to_copy", "constant_pad_nd", "index_select", "copy_", "index_copy")
        if func.__name__.partition(".")[0] in copies and found.numel() >= self.least:
            self.copied += found.numel() * found.element_size()
        return found


WHOLE: dict[str, tuple[Any, list[int], list[int]]] = {
    "some": (Joint(*[9] * 10), 10 * [1, 2, 6], 10 * [1, 2]),  # a stream of nine gives three to each rank, the last none
    "all": (Joint(*[9] * 10), 10 * [3, 1, 2, 3], 10 * [3]),
    "some, long": (Contiguous(), [20, 26, 138], [20, 26]),
}
"""Layouts on four ranks, documents, and those of the first rank, which are whole."""


def of_whole_documents(rank: int, what: str, which: str) -> tuple[float, list[list[int]], int, int]:
    """The largest error, calls of the kernel by their lengths, collectives of both passes, and bytes of copied rows."""
    (layout, lens, _), S = WHOLE[which], sum(WHOLE[which][1])
    documents = [i for i, n in enumerate(lens) for _ in range(n)]
    sequence = ShardedSequence(mesh((4,), ("cp",)), layout=layout, length=S, pad=False)
    options: dict[str, Any] = {"sequence": sequence, "mask": Mask(documents=torch.tensor(documents))}
    x, calls = {name: y.requires_grad_() for name, y in batch_of(S, 1).items()}, list[list[int]]()
    kernel, double = room("mixers.kernels").chunked, False

    def counting(inputs: Any, initial: Tensor, lens: list[int], scale: float) -> Any:
        calls.append([*lens])
        return (instantly if double else kernel)(inputs, initial, lens, scale)

    if what == "causal_conv1d":
        taps = x["weight"].detach() * torch.arange(1.0, W + 1, dtype=torch.float64)
        inputs, run = [x["x"]], partial(mixers.causal_conv1d, weight=taps, **options)
        want = torch.zeros_like(x["x"])
        for _, begin, end in runs_of(documents, 1, S):
            padded = F.pad(x["x"][0, begin:end], (0, 0, W - 1, 0))
            rows = sum(taps[:, j] * padded[j : j + end - begin] for j in range(W))
            want = want.index_put((torch.tensor(0), torch.arange(begin, end)), rows)
    else:
        inputs, want = given(what, x), expected(what, x, documents, None)[0]
        one = getattr(mixers, what.split()[0])
        run = lambda *rows: one(*rows, method="states", **options)[0]  # noqa: E731
    local, grad = sequence.shard(inputs), torch.randn(want.shape, dtype=want.dtype, generator=torch.Generator())
    with mock.patch.object(room("mixers.rules"), "choose_kernel", lambda *args: counting), Sent() as sent:
        out = run(*local)
        seen, calls = calls, []
        grads = torch.autograd.grad(out, local, sequence.shard(grad), retain_graph=True)
    worst = [(sequence.unshard(out) - want).abs().max()]
    for own, whole in zip(grads, torch.autograd.grad((want * grad).sum(), inputs), strict=True):
        worst.append((sequence.unshard(own) - whole).abs().max())
    double = True
    with Copied(local[0]) as copied:
        run(*local)
    return float(max(worst).detach()), seen, len(sent.calls), copied.copied


@pytest.mark.parametrize("what", [*RULES, "causal_conv1d"])
def test_whole_documents_are_one_local_call(pool: Any, what: str) -> None:
    """On rows as they lie. Where other ranks have cut documents, this one takes part in their collectives, no more."""
    for which, (_, _, lens) in WHOLE.items():
        found = pool(4).run(of_whole_documents, what, which)
        assert max(error for error, *_ in found) < 1e-12, (which, found)
        assert {collectives for _, _, collectives, _ in found} == {0 if which == "all" else 2}, which
        _, calls, _, copied = found[0]
        assert calls == ([] if what == "causal_conv1d" else [lens]), (which, calls)
        assert copied == 0 or "long" not in which, (which, copied)


def beside_alone(rank: int) -> tuple[float, int]:
    """A gradient of the rows before documents alone, where the last rank has no rows: error, collectives backward."""
    sequence = ShardedSequence(mesh((3,), ("cp",)), layout=Contiguous(), length=4, pad=False)
    made = torch.Generator().manual_seed(0)
    x, taps, initial = (torch.randn(*s, dtype=torch.float64, generator=made) for s in ((1, 4, 6), (6, W), (1, 6, W)))
    initial.requires_grad_()
    rows = torch.cat([initial[0].t(), x[0]])
    want = sum(taps[:, j] * rows[j + 1 : j + 5] for j in range(W))
    out = mixers.causal_conv1d(sequence.shard(x), taps, sequence=sequence, initial_state=initial)
    with Sent() as sent:
        own = torch.autograd.grad(out.square().sum(), initial)[0].contiguous()
    torch.distributed.all_reduce(own)
    whole = torch.autograd.grad(want.square().sum(), initial)[0]
    return float((own - whole).abs().max()), len(sent.calls)


def test_gradients_of_the_rows_before_documents_alone(pool: Any) -> None:
    for error, collectives in pool(3).run(beside_alone):
        assert error < 1e-12 and collectives == 0


def without_a_batch(rank: int, what: str, alone: bool) -> None:
    sequence = ShardedSequence(mesh((2,), ("cp",)), length=16)
    x = {name: y if name == "weight" or (alone and rank) else y[:0] for name, y in batch_of(16, 1).items()}
    if what == "causal_conv1d":
        mixers.causal_conv1d(sequence.shard(x["x"]), x["weight"], sequence=sequence)
    elif what == "token_shift":
        mixers.token_shift(sequence.shard(x["x"]), sequence=sequence)
    else:
        getattr(mixers, what)(*sequence.shard(given(what, x)), sequence=sequence)


@pytest.mark.parametrize("what", ["gated_delta_rule", "causal_conv1d", "token_shift"])
def test_no_batch_is_refused_on_every_rank(pool: Any, what: str) -> None:
    for alone in (False, True):
        for error in pool(2).run_expecting_error(without_a_batch, what, alone, timeout=20.0):
            assert error is not None and f"{what}: batch: expected 1 row or more, got 0" in error.message


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
    """Where other bytes leave this rank than `method="auto"` goes by."""
    axis, documents, B, heads = mesh((size,), ("cp",)), PACKINGS[packing](S), 2, 6
    mask = Mask() if documents is None else Mask(documents=documents)
    sequence = ShardedSequence(axis, layout=LAYOUTS[layout], length=S, pad=False)
    num_rows = len(sequence.positions(S))
    shapes = {"q": (heads, K), "k": (heads, K), "v": (2 * heads, V), "g": (2 * heads,), "gk": (2 * heads, K)}
    x = {name: torch.zeros(B, num_rows, *shape, dtype=dtype) for name, shape in shapes.items()}
    x |= {"g": x["g"].float(), "gk": x["gk"].float(), "beta": x["v"][..., 0].clone()}
    function, options = LAYERS[what]
    pieces = inner("mixers.pieces", "pieces_in")(LAYOUTS[layout], mask, S, S, size, 0, B)
    decays = {None: 0, "head": 1, "channel": K}[options.get("decay", "head")]
    sizes = room("mixers.traffic").Sizes(B, heads, 2 * heads, K, V, decays, options.get("delta", True), dtype)
    told = {
        "states": room("mixers.traffic").sent_by_states(pieces, sizes),
        "heads": room("mixers.traffic").sent_by_heads(pieces, sizes),
    }
    found = []
    with mock.patch.object(room("mixers.rules"), "choose_kernel", lambda *args: instantly):
        for method in ("states", "heads", "auto"):
            inputs = [y.requires_grad_() for y in given(what, x)]
            with Left(rank, size) as forward:
                out, _ = getattr(mixers, function)(*inputs, sequence=sequence, mask=mask, method=method)
            with Left(rank, size) as backward:
                out.sum().backward()
            of_auto = room("mixers.traffic").choose_method(pieces, sizes)
            found.append((of_auto if method == "auto" else method, forward.bytes, backward.bytes))
    return [
        f"{name} {layout} {packing}: {told[name].forward[rank]}, {told[name].backward[rank]}; {bytes_left}"
        for name, *bytes_left in found
        if bytes_left != [told[name].forward[rank], told[name].backward[rank]]
    ]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_auto_goes_by_the_bytes_that_leave_a_rank(pool: Any, full: bool, size: int, layout: str) -> None:
    for what in LAYERS:
        for packing in PACKINGS if full or what == "kda" else ("packed",):
            for dtype in (torch.float32, torch.bfloat16):
                for problems in pool(size).run(
                    left, size, 254 if layout == "striped" else 1022, layout, packing, what, dtype
                ):
                    assert not problems, (what, dtype, problems)


@pytest.mark.parametrize("layout", [pytest.param("contiguous", marks=pytest.mark.full), "zigzag"])
def test_bytes_of_a_million_tokens(pool: Any, layout: str) -> None:
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
    "no beta": ({"beta": None}, "gated_delta_rule: beta"),
    "q without a batch": ({"q": torch.zeros(16, H, K)}, "gated_delta_rule: q"),
    "integers": ({"v": torch.zeros(1, 16, HV, V, dtype=torch.int64)}, "gated_delta_rule: v"),
    "two dtypes": ({"k": torch.zeros(1, 16, H, K)}, "torch.float64"),
    "another device": ({"g": torch.zeros(1, 16, HV, device="meta")}, "a tensor on cpu"),
    "a decay per channel": ({"g": torch.zeros(1, 16, HV, K)}, "gated_delta_rule: g"),
    "an unknown option": ({"chunk_size": 64}, "chunk_size"),
    "kda with a decay per head": ({"what": "kda"}, "kda: g"),
    "heads that do not fit": ({"v": torch.zeros(1, 16, 3, V, dtype=torch.float64)}, "gated_delta_rule: g"),
    "half a head": (
        {
            "q": torch.zeros(1, 16, 3, K, dtype=torch.float64),
            "k": torch.zeros(1, 16, 3, K, dtype=torch.float64),
        },
        "a multiple of 3",
    ),
}


def refused(rank: int, name: str, alone: bool) -> None:
    options, _ = REFUSED[name]
    size = options.get("size", 2)
    sequence = ShardedSequence(mesh((size,), ("cp",)), length=32, pad=False)
    x = batch_of(32, 1)
    local = dict(zip(("q", "k", "v", "g", "beta"), sequence.shard(given("gated_delta_rule", x)), strict=True))
    what = options.get("what", "gated_delta_rule") if rank == 0 or not alone else "gated_delta_rule"
    if rank == 0 or not alone:
        local |= {key: y for key, y in options.items() if key not in ("size", "what")}
    getattr(mixers, what)(**local, sequence=sequence)


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


def without_package(rank: int) -> None:
    sequence = ShardedSequence(mesh((2,), ("cp",)), length=8)
    q, v = torch.zeros(1, 4, 2, 4), torch.zeros(1, 4, 2, 4)
    with mock.patch.object(room("mixers.rules"), "folds", lambda run: rank == 0):  # as where fla-core is installed
        mixers.gated_delta_rule(q, q, v, v[..., 0], v[..., 0], sequence=sequence)


def test_ranks_that_choose_other_kernels_are_refused(pool: Any) -> None:
    """States travel in other collectives with kernels of fla-core, so "auto" must choose alike on all ranks."""
    errors = pool(2).run_expecting_error(without_package, timeout=20.0)
    assert all("arguments" in error.message and "no fla" in error.message for error in errors)


OTHERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "D of other heads": ("ssd", {"D": torch.zeros(3, dtype=torch.float64)}, "ssd: D"),
    "A of other heads": ("ssd", {"A": torch.zeros(3, dtype=torch.float64)}, "ssd: A"),
    "dt of other rows": ("ssd", {"dt": torch.zeros(1, 3, HV, dtype=torch.float64)}, "ssd: dt"),
    "C of another width": ("ssd", {"C": torch.zeros(1, 16, 2, 4, dtype=torch.float64)}, "ssd: B"),
    "B in another dtype": ("ssd", {"B": torch.zeros(1, 16, 2, 5)}, "ssd: B"),
    "groups that do not fit": (
        "ssd",
        {name: torch.zeros(1, 16, 3, 5, dtype=torch.float64) for name in "BC"},
        "ssd: heads: expected a multiple of 3",
    ),
    "a scale of ssd": ("ssd", {"scale": 1.0}, "scale"),
    "A of integers": ("ssd", {"A": torch.zeros(HV, dtype=torch.int64)}, "floating-point"),
    "a convolution over time first": ("causal_conv1d", {"x": torch.zeros(1, 6, 16, dtype=torch.float64)}, "weight"),
    "a bias of other channels": ("causal_conv1d", {"bias": torch.zeros(5, dtype=torch.float64)}, "causal_conv1d: bias"),
    "a weight in another dtype": ("causal_conv1d", {"weight": torch.zeros(6, W)}, "causal_conv1d: weight"),
    "a bias elsewhere": ("causal_conv1d", {"bias": torch.zeros(6, device="meta")}, "a tensor on cpu"),
    "another activation": ("causal_conv1d", {"activation": "gelu"}, "activation"),
    "a state of W - 1": ("causal_conv1d", {"initial_state": torch.zeros(1, 6, W - 1)}, "causal_conv1d: initial_state"),
    "states of other documents": ("causal_conv1d", {"initial_state": torch.zeros(2, 6, W)}, "one state for each"),
    "no batch": ("roll", {"x": torch.zeros(16)}, "roll: x"),
    "half a token": ("roll", {"shifts": 0.5}, "roll: shifts"),
    "no tensor": ("token_shift", {"x": [1, 2]}, "token_shift: x"),
}


def refused_by(rank: int, name: str, alone: bool) -> None:
    what, options, _ = OTHERS[name]
    sequence, x = ShardedSequence(mesh((2,), ("cp",)), length=32, pad=False), torch.zeros(1, 16, 6, dtype=torch.float64)
    right: dict[str, dict[str, Any]] = {
        "ssd": {
            **{"x": x[..., None, :3].expand(1, 16, HV, 3), "dt": x[..., :HV], "A": x[0, 0, :HV]},
            **{"B": x[..., None, :5].expand(1, 16, 2, 5), "C": x[..., None, :5].expand(1, 16, 2, 5)},
        },
        "causal_conv1d": {"x": x, "weight": x[0, :6, :W]},
        "roll": {"x": x, "shifts": 1},
        "token_shift": {"x": x},
    }
    given = right[what] | (options if rank == 0 or not alone else {})
    getattr(mixers, what)(**given, sequence=sequence)


@pytest.mark.parametrize("name", OTHERS)
def test_what_others_refuse_on_every_rank(pool: Any, name: str) -> None:
    for alone in (False, True):
        errors = pool(2).run_expecting_error(refused_by, name, alone, timeout=20.0)
        assert all(error is not None and OTHERS[name][2] in error.message for error in errors), errors


def states_of_convolutions(rank: int, size: int, layout: str, which: str, width: int) -> float:
    """Outputs, states and gradients against documents that are convolved one by one."""
    B, S, documents = 2, 31, DOCUMENTS[which]
    sequence = ShardedSequence(mesh((size,), ("cp",)), layout=LAYOUTS[layout], length=S, pad=layout == "striped")
    mask = None if documents is None else Mask(documents=torch.tensor(documents))
    made, runs = torch.Generator().manual_seed(0), runs_of(documents, B, S)
    x, weight, bias, initial = (
        torch.randn(*shape, dtype=torch.float64, generator=made, requires_grad=True)
        for shape in ((B, S, 6), (6, width), (6,), (len(runs), 6, width))
    )
    want, states = torch.zeros(B, S, 6, dtype=torch.float64), []
    for n, (b, begin, end) in enumerate(runs):
        rows = torch.cat([initial[n].t(), x[b, begin:end]])
        found = sum(weight[:, j] * rows[j + 1 : j + 1 + end - begin] for j in range(width)) + bias
        want = want.index_put((torch.tensor(b), torch.arange(begin, end)), found)
        states.append(rows[len(rows) - width :].t())
    grad, of_states = (torch.randn(y.shape, dtype=y.dtype, generator=made) for y in (want, torch.stack(states)))
    ids = torch.zeros(1, S) if documents is None else torch.atleast_2d(torch.tensor(documents))
    grad = grad * (ids.expand(B, S) >= 0)[..., None]
    inputs = (x, weight, bias, initial)
    want_grads = torch.autograd.grad((want * grad).sum() + (torch.stack(states) * of_states).sum(), inputs)
    out, final = mixers.causal_conv1d(
        *(sequence.shard(x), weight, bias), sequence=sequence, mask=mask, initial_state=initial, output_final_state=True
    )
    worst = [((sequence.unshard(out) - want) * (grad != 0)).abs().max(), (final - torch.stack(states)).abs().max()]
    loss = (out * sequence.shard(grad)).sum() + (final * of_states).sum() / size
    for own, whole in zip(torch.autograd.grad(loss, inputs), want_grads, strict=True):
        own = own.contiguous()
        torch.distributed.all_reduce(own)
        worst.append((own - whole).abs().max())
    alone, nothing = sequence.shard(x), mixers.causal_conv1d(sequence.shard(x), weight, sequence=sequence, mask=mask)
    assert isinstance(nothing, Tensor)
    zeros = torch.zeros_like(initial)
    same = mixers.causal_conv1d(alone, weight, sequence=sequence, mask=mask, initial_state=zeros)
    return float(max(*worst, ((nothing - same) * sequence.shard((grad != 0) * 1.0)).abs().max()))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_states_of_convolutions_are_those_of_one_rank(pool: Any, size: int, layout: str) -> None:
    for which in DOCUMENTS:
        for width in (1, 2, 4, 9):
            found = pool(size).run(states_of_convolutions, size, layout, which, width)
            assert max(found) < 1e-12, (which, width, found)


CALLS = ("gated_delta_rule", "kda", "gla without decay", "ssd", "causal_conv1d", "token_shift")


def whole_call(what: str, x: dict[str, Tensor]) -> tuple[list[Tensor], dict[str, Any]]:
    """Tensors of a call in their order, by dims of rows or of heads alone, and keywords."""
    if what == "ssd":
        shape = x["v"]
        return [shape, x["dt"], x["A"], x["q"], x["k"]], {"D": x["D"]}
    if what == "causal_conv1d":
        return [x["x"], x["weight"], x["bias"]], {"activation": "silu"}
    return ([x["x"]], {}) if what == "token_shift" else (given(what, x), {})


def placed(rank: int, what: str, over: str, states: bool) -> float:
    """DTensors over heads, and over rows too, against one rank."""
    axes, B, S, documents = mesh((2, 2), ("cp", "tp")), 2, 32, [0] * 5 + [1] * 11 + [2] * 16
    sequence, mask = ShardedSequence(axes["cp"], layout=LAYOUTS["zigzag"]), Mask(documents=torch.tensor(documents))
    x, made = batch_of(S, B), torch.Generator().manual_seed(5)
    x |= {"dt": x["beta"], "A": -x["beta"][0, 0].exp(), "D": x["beta"][0, 1], "bias": x["x"][0, 0]}
    x |= {"weight": torch.randn(6, W, dtype=torch.float64, generator=made)}
    wide = {"causal_conv1d": (6, W)}.get(what, (HV, K, V))
    initial = torch.randn(6, *wide, dtype=torch.float64, generator=made)
    run, on = getattr(mixers, what.split()[0]), axes if over == "both" else axes["tp"]
    x = {name: y.requires_grad_() for name, y in x.items()}
    tensors, options = whole_call(what, x)
    keywords = {name: y for name, y in options.items() if isinstance(y, Tensor)}
    tensors = [y.requires_grad_() for y in [*tensors, *keywords.values()]]
    more: dict[str, Any] = {"initial_state": initial.requires_grad_(), "output_final_state": True} if states else {}
    plain = {name: y for name, y in options.items() if name not in keywords}

    def called(arguments: list[Tensor], **others: Any) -> Any:
        own = dict(zip(keywords, arguments[len(arguments) - len(keywords) :], strict=True))
        return run(*arguments[: len(arguments) - len(keywords)], **own, **plain, **others)

    def split(result: Any) -> tuple[Any, Any]:
        return result if isinstance(result, tuple) else (result, None)

    want, want_state = split(called(tensors, mask=mask, **more))
    grad = torch.randn(want.shape, dtype=want.dtype, generator=made)
    loss = (want * grad).sum() + (0 if want_state is None else want_state.square().sum())
    inputs = [*tensors, *([initial] if states else [])]
    want_grads = torch.autograd.grad(loss, inputs)

    def spread(y: Tensor) -> DTensor:
        rows = y.ndim > 2
        at = {True: 2, False: 0}[rows] if y is not initial else 1
        over_rows = [Shard(1) if rows and y is not initial else Replicate()] if over == "both" else []
        if rows and y is not initial and over != "both":
            y = sequence.shard(y)
        elif rows and y is not initial:
            y = y.index_select(1, sequence.layout.permutation(S, 2))
        return distribute_tensor(y.detach(), on, [*over_rows, Shard(at)]).requires_grad_()

    local = [spread(y) for y in tensors]
    if states:
        more["initial_state"] = spread(initial)
    out, state = split(called(local, sequence=sequence, mask=mask, **more))
    assert isinstance(out, DTensor) and out.placements == local[0].placements and out.device_mesh == on
    found = out.full_tensor()
    rows = sequence.unshard(found) if over != "both" else found.index_select(1, sequence.layout.inverse(S, 2))
    worst = [(rows - want).abs().max()]
    own_grad = sequence.shard(grad) if over != "both" else grad.index_select(1, sequence.layout.permutation(S, 2))
    total = (out * distribute_tensor(own_grad, on, out.placements)).sum()
    if states:
        worst.append((state.full_tensor() - want_state).abs().max())
        total = total + state.square().sum() / 2
    total = total.full_tensor() if isinstance(total, DTensor) else total
    given_grads = torch.autograd.grad(total, [*local, *([more["initial_state"]] if states else [])])
    for y, (own, whole) in zip(inputs, zip(given_grads, want_grads, strict=True), strict=True):
        full = own.full_tensor()
        if over != "both":
            full = full.contiguous()
            if y.ndim > 2 and y is not initial:
                full = sequence.unshard(full)
            else:
                torch.distributed.all_reduce(full, group=axes["cp"].get_group())
        elif y.ndim > 2 and y is not initial:
            full = full.index_select(1, sequence.layout.inverse(S, 2))
        worst.append((full - whole).abs().max())
    return float(max(worst))


@pytest.mark.parametrize("over", ["tp", "both"])
@pytest.mark.parametrize("what", CALLS)
def test_dtensors_over_heads(pool: Any, what: str, over: str) -> None:
    for states in (False, True)[: 2 - (over == "both" or what in ("ssd", "token_shift"))]:
        found = pool(4).run(placed, what, over, states)
        assert max(found) < 1e-12, (what, over, states, found)


MISPLACED: dict[str, tuple[dict[str, Any], str]] = {
    "a local one beside": ({"beta": None}, "all DTensors or all local"),
    "replicated keys": ({"k": [Shard(1), Replicate()]}, "gated_delta_rule: k"),
    "a sum of parts": ({name: [Shard(1), Partial()] for name in "qkv"}, "Shard of heads or batch, or Replicate"),
    "rows over tp": (
        {name: [Replicate(), Shard(1)] for name in ("q", "k", "v", "g", "beta")},
        "Shard(1), the sequence",
    ),
    "states over rows": ({"output_final_state": True}, "tensors sharded by heads"),
    "an odd length": ({"layout": "zigzag", "S": 35}, "torch.chunk"),
}


def misplaced(rank: int, name: str) -> None:
    axes, options = mesh((2, 2), ("cp", "tp")), dict(MISPLACED[name][0])
    sequence = ShardedSequence(axes["cp"], layout=LAYOUTS[options.pop("layout", "contiguous")])
    x = dict(
        zip(("q", "k", "v", "g", "beta"), given("gated_delta_rule", batch_of(options.pop("S", 32), 2)), strict=True)
    )
    spread: dict[str, Any] = {}
    for key, y in x.items():
        placements = options.pop(key, [Shard(1), Shard(2)])
        if placements is None:
            spread[key] = y
        elif Partial() in placements:
            spread[key] = DTensor.from_local(y, axes, placements)
        else:
            spread[key] = distribute_tensor(y, axes, placements)
    mixers.gated_delta_rule(**spread, **options, sequence=sequence)


@pytest.mark.parametrize("name", MISPLACED)
def test_dtensors_that_are_refused(pool: Any, name: str) -> None:
    errors = pool(4).run_expecting_error(misplaced, name, timeout=20.0)
    assert all(error is not None and MISPLACED[name][1] in error.message for error in errors), errors


def test_one_rank_without_a_sequence() -> None:
    """A model of one GPU, whose documents are the mask's."""
    for which, documents in DOCUMENTS.items():
        x = batch_of(31, 2)
        mask = None if documents is None else Mask(documents=torch.tensor(documents))
        want, want_state = expected("gated_delta_rule", x, documents, None)
        out, state = mixers.gated_delta_rule(*given("gated_delta_rule", x), mask=mask, output_final_state=True)
        assert (out - want).abs().max() < 1e-12 and (state - want_state).abs().max() < 1e-12, which


def rolled(rank: int) -> None:
    sequence = ShardedSequence(mesh((2,), ("cp",)), length=32)
    mixers.roll(sequence.shard(torch.arange(32)[None]), -1)


def test_labels_are_not_rolled_within_a_shard(pool: Any) -> None:
    errors = pool(2).run_expecting_error(rolled)
    assert all("the sequence of x" in error.message for error in errors), errors


def in_inference(rank: int) -> bool:
    """A layout whose tensor is made in each look, so that a call in it is never known."""
    layout = Joint((8, Permuted([*range(8)])), (4, ZigZag()))
    sequence = ShardedSequence(mesh((2,), ("cp",)), layout, length=12, pad=False)
    x = torch.arange(12.0, dtype=torch.float64).view(1, 12, 1)
    with torch.inference_mode():
        rolled = [mixers.roll(sequence.shard(x), 1, sequence=sequence) for _ in range(2)]
    return all(torch.equal(y, sequence.shard((x - 1).clamp(min=0))) for y in rolled)


def test_joint_layouts_in_inference(pool: Any) -> None:
    assert pool(2).run(in_inference) == [True, True]
