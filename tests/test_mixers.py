"""Recurrent layers and convolutions over sharded sequences, against one rank that has all tokens, in float64."""

from __future__ import annotations

import inspect
import re
from functools import cache
from itertools import groupby, product
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from inside import inner, room
from ranks import REFUSALS, mesh, on_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from cp_mesh import Contiguous, Layout, Mask, ShardedSequence, Striped, ZigZag, mixers
from cp_mesh.geometry import Joint, Permuted

H, HV, K, V, C, W = 2, 4, 3, 5, 6, 4
LAYOUTS = {"contiguous": Contiguous(), "zigzag": ZigZag(), "striped": Striped()}

Documents = Any  # ids of the tokens, as tuples: [S] or [B, S]
DOCUMENTS: dict[str, Documents] = {
    "one": None,
    "packed": (0,) * 5 + (1,) + (2,) * 9 + (3,) * 2 + (4,) * 14,
    "excluded": (-1,) * 3 + (0,) * 9 + (-1,) * 2 + (1,) * 13 + (-1,) * 4,
    "of each row": ((0,) * 11 + (1,) * 20, (5,) * 4 + (7,) * 27),
}
RULES = {
    "gated_delta_rule": "q k v g beta",
    "kda": "q k v gk beta",
    "delta_rule": "q k v beta",
    "gla": "q k v g",
    "gla of channels": "q k v gk",
    "gla without decay": "q k v",
}
CALLS = RULES | {
    "ssd": "v dt A k q D",
    **{f"causal_conv1d of {width}": f"x weight{width} bias" for width in (1, 2, 4, 9)},
    "token_shift": "x",
    "roll": "x",
}
"""A function, and its tensors in `batch_of`."""
CONVOLUTION = f"causal_conv1d of {W}"


def call(what: str, *tensors: Tensor, **options: Any) -> tuple[Any, Any]:
    """Outputs, and states or None."""
    name, own = what.split()[0], {}
    if name == "ssd":
        *tensors, own["D"] = tensors  # type: ignore[assignment]
    own |= {"roll": {"shifts": -3, "fill_value": -100}, "causal_conv1d": {"activation": "silu"}}.get(name, {})
    found = getattr(mixers, name)(*tensors, **own, **options)
    return found if isinstance(found, tuple) else (found, None)


def batch_of(S: int, B: int) -> dict[str, Tensor]:
    """Rows [B, S, ...], and parameters of less dims."""
    made = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=made)

    x = {"q": normal(B, S, H, K), "k": F.normalize(normal(B, S, H, K), dim=-1), "v": normal(B, S, HV, V)}
    x |= {"g": -normal(B, S, HV).abs(), "gk": -normal(B, S, HV, K).abs(), "beta": normal(B, S, HV).sigmoid()}
    x |= {"dt": normal(B, S, HV).exp(), "A": -normal(HV).exp(), "D": normal(HV), "x": normal(B, S, C)}
    return x | {"bias": normal(C)} | {f"weight{width}": normal(C, width) for width in (1, 2, 4, 9)}


def runs_of(documents: Documents, B: int, S: int) -> list[tuple[int, int, int]]:
    """(batch row, begin, end) of each document."""
    found, ids = [], torch.zeros(S) if documents is None else torch.tensor(documents)
    for b, row in enumerate(ids.expand(B, S).tolist()):
        begin = 0
        for id, tokens in groupby(row):
            end = begin + len([*tokens])
            found += [(b, begin, end)] if id >= 0 else []
            begin = end
    return found


def of_document(what: str, x: dict[str, Tensor], state: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Rows of one document, token by token, and what follows; written anew."""
    name, rows = what.split()[0], x["x"]
    if name == "token_shift":
        return F.pad(rows, (0, 0, 1, 0))[:-1], None
    if name == "roll":
        return F.pad(rows[3:], (0, 0, 0, 3), value=-100)[: len(rows)], None
    if name == "causal_conv1d":
        weight = x[CALLS[what].split()[1]]
        width = weight.shape[1]
        before = rows.new_zeros(width, C) if state is None else state.t()
        padded = torch.cat([before, rows])
        out = sum(weight[:, j] * padded[j + 1 : j + 1 + len(rows)] for j in range(width)) + x["bias"]
        return F.silu(out), padded[len(padded) - width :].t()
    if name == "ssd":
        out, state = of_document("gla", x | {"v": x["v"] * x["dt"][..., None], "g": x["dt"] * x["A"]}, state)
        return out * K**0.5 + x["D"][:, None] * x["v"], state
    q, k = (x[name].repeat_interleave(HV // H, 1) for name in "qk")
    decay = x["gk"] if "gk" in CALLS[what] else x["g"][..., None] if " g" in CALLS[what] else None
    out, state = [], torch.zeros(HV, K, V, dtype=torch.float64) if state is None else state
    for t in range(len(k)):
        state = state if decay is None else decay[t, ..., None].exp() * state
        v = x["v"][t]
        if "beta" in CALLS[what]:
            v = x["beta"][t, :, None] * (v - (k[t, ..., None] * state).sum(1))
        state = state + k[t, ..., None] * v[:, None]
        out.append((q[t, ..., None] * state).sum(1) * K**-0.5)
    return torch.stack(out), state


class Case(NamedTuple):
    """What one rank computes, with gradients of inputs, the last of which is the initial state if there is one."""

    inputs: list[Tensor]
    initial: Tensor | None
    out: Tensor
    states: Tensor | None
    of_out: Tensor | None
    of_states: Tensor | None
    grads: tuple[Tensor, ...]


@cache
def case_of(what: str, documents: Documents, form: str, S: int = 31, B: int = 2) -> Case:
    """``form``: "out", "states", "from zeros" or "from states", by what the loss reads and documents begin from."""
    x, runs, made = batch_of(S, B), runs_of(documents, B, S), torch.Generator().manual_seed(1)
    inputs = [x[name].requires_grad_() for name in CALLS[what].split()]
    states, out = [], torch.zeros_like(x["v"] if what in RULES or what == "ssd" else x["x"])
    shape, initial = inputs[1].shape if "conv" in what else (HV, K, V), None
    if form == "from states":
        initial = torch.randn(len(runs), *shape, dtype=torch.float64, generator=made, requires_grad=True)
    for n, (b, begin, end) in enumerate(runs):
        own = {name: y[b, begin:end] if y.ndim > 2 else y for name, y in x.items()}
        out[b, begin:end], state = of_document(what, own, None if initial is None else initial[n])
        states.append(state)
    of_out, of_states = torch.randn(out.shape, dtype=torch.float64, generator=made), None
    if documents is not None and what not in RULES:  # rows of no document are unspecified
        of_out = of_out * (torch.tensor(documents).expand(B, S) >= 0).view(B, S, *[1] * (out.ndim - 2))
    loss = torch.zeros((), dtype=torch.float64)
    if form != "states":
        loss = loss + (out * of_out).sum()
    if form != "out":
        states = torch.stack(states)
        of_states = torch.randn(states.shape, dtype=torch.float64, generator=made)
        loss = loss + (states * of_states).sum()
    wanted = inputs if initial is None else [*inputs, initial]
    grads = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
    of_out = None if form == "states" else of_out
    return Case(inputs, initial, out.detach(), None if form == "out" else states.detach(), of_out, of_states, grads)


def off(got: Tensor, want: Tensor) -> float:
    return float((got - want).detach().abs().max())


def check(
    axis: Any, what: str, layout: Layout, documents: Documents = None, form: str = "out", S: int = 31, B: int = 2,
    checkpointed: bool = False, **options: Any,
) -> None:  # fmt: skip
    """Outputs, states and gradients of a call on the ranks are those of one rank."""
    one, told = case_of(what, documents, form, S, B), (what, documents, form, options)
    sequence = ShardedSequence(axis, layout=layout, length=S, pad=layout == Striped())
    options |= {"sequence": sequence, "mask": mask_of(documents)}
    options |= {} if one.initial is None else {"initial_state": one.initial}
    options |= {} if one.states is None else {"output_final_state": True}
    local = [sequence.shard(y) if y.ndim > 2 else y for y in one.inputs]
    run = lambda *local: call(what, *local, **options)  # noqa: E731
    out, states = checkpoint(run, *local, use_reentrant=False) if checkpointed else run(*local)
    got = sequence.unshard(out)
    known = True if one.of_out is None or what in RULES else one.of_out != 0
    assert off(got * known, one.out * known) < 1e-12, told
    loss = torch.zeros((), dtype=torch.float64)
    if one.of_out is not None:
        loss = loss + (out * sequence.shard(one.of_out)).sum()
    if one.states is not None:
        assert off(states, one.states) < 1e-12, told
        loss = loss + (states * one.of_states).sum() / axis.size()
    wanted = one.inputs if one.initial is None else [*one.inputs, one.initial]
    for own, want in zip(
        torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True), one.grads, strict=True
    ):
        total = own.contiguous()
        dist.all_reduce(total, group=axis.get_group())
        assert off(total, want) < 1e-12, told


def mask_of(documents: Documents) -> Mask | None:
    return None if documents is None else Mask(documents=torch.tensor(documents))


on_sizes = pytest.mark.parametrize(("size", "layout"), [(1, "zigzag"), *product((2, 3), LAYOUTS)])


@pytest.mark.parametrize("method", ["states", "heads"])
@on_ranks(2)
def test_a_few(axis: Any, method: str) -> None:
    for what in ("gated_delta_rule", "gla"):
        for which in ("one", "packed"):
            check(axis, what, ZigZag(), DOCUMENTS[which], method=method)


@on_sizes
@on_ranks("size", timeout=300.0)
def test_rules_are_those_of_one_rank(axis: Any, size: int, layout: str) -> None:
    for what in (*RULES, "ssd"):
        for which, documents in DOCUMENTS.items():
            form = "from states" if which != "one" or what == "kda" else "out"
            for method in ("states", "heads")[: 1 if size == 3 else 2]:
                check(axis, what, LAYOUTS[layout], documents, form, method=method)


@on_sizes
@on_ranks("size", timeout=300.0)
def test_convolutions_and_shifts_are_those_of_one_rank(axis: Any, size: int, layout: str) -> None:
    for what in (what for what in CALLS if what not in RULES and what != "ssd"):
        for documents in DOCUMENTS.values():
            for form in ("out", "from states") if "conv" in what else ("out",):
                check(axis, what, LAYOUTS[layout], documents, form)


@pytest.mark.parametrize("kernel", ["torch", "reference"])
@on_ranks(2)
def test_kernels_over_ranks(axis: Any, kernel: str) -> None:
    for what in ("gated_delta_rule", "kda", "gla"):
        for method in ("states", "heads"):
            check(axis, what, ZigZag(), DOCUMENTS["packed"], "from states", method=method, kernel=kernel)


FEW_TOKENS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank has a token, the other none: no state goes on": (2, {"form": "from zeros", "S": 1}),
    "of two tokens on three ranks one goes on": (3, {"form": "from zeros", "S": 2}),
    "a loss of the states alone": (3, {"form": "states", "S": 13}),
    "a checkpoint, whose backward computes the forward again": (3, {"checkpointed": True, "S": 13}),
}


@pytest.mark.parametrize(("size", "options"), FEW_TOKENS.values(), ids=FEW_TOKENS)
@on_ranks("size")
def test_all_ranks_run_the_same_collectives(axis: Any, options: dict[str, Any]) -> None:
    for what in RULES:
        check(axis, what, Contiguous(), B=1, method="states", **options)


def test_one_rank_without_a_sequence() -> None:
    """A model of one GPU, whose documents are the mask's."""
    for documents in DOCUMENTS.values():
        one = case_of("gated_delta_rule", documents, "from zeros")
        out, states = call("gated_delta_rule", *one.inputs, mask=mask_of(documents), output_final_state=True)
        assert off(out, one.out) < 1e-12 and off(states, one.states) < 1e-12


@on_ranks(2)
def test_scale_and_normalization(axis: Any) -> None:
    sequence = ShardedSequence(axis, length=31, pad=False)
    q, k, v, g, beta = (sequence.shard(x) for x in case_of("gated_delta_rule", None, "out").inputs)
    unit = [y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (3 * q, 3 * k)]
    want, _ = mixers.gated_delta_rule(2 * unit[0], unit[1], v, g, beta, sequence=sequence, scale=1.0)
    options: Any = {"scale": 2.0, "use_qk_l2norm_in_kernel": True}
    assert off(mixers.gated_delta_rule(3 * q, 3 * k, v, g, beta, sequence=sequence, **options)[0], want) < 1e-12


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@on_ranks(2)
def test_states_of_others_round_nothing_anew(layout: str) -> None:
    """Errors of `gla` in bfloat16 on two ranks, of outputs and of gradients, are those of one."""
    axes = mesh((2, 1), ("cp", "one"))
    one, two = (ShardedSequence(axes[name], layout=LAYOUTS[layout], length=512, pad=False) for name in ("one", "cp"))
    x = batch_of(512, 1)
    inputs = [y.bfloat16() for y in (x["q"], x["k"], x["v"], x["g"] / 100, x["v"])]

    def results(sequence: ShardedSequence, dtype: torch.dtype) -> list[Tensor]:
        *local, grad = (y.to(dtype).requires_grad_() for y in sequence.shard(inputs))
        out, _ = mixers.gla(*local, sequence=sequence, method="states", kernel="torch")
        found = out.detach(), *torch.autograd.grad(out, local, grad)
        return [sequence.unshard(y.contiguous()).double() for y in found]

    want, *both = results(one, torch.float64), results(one, torch.bfloat16), results(two, torch.bfloat16)
    for exact, y, z in zip(want, *both, strict=True):
        assert (z - exact).norm() < 1.05 * (y - exact).norm()


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
    T, of_state = 2**17, inner("mixers.states", "_of_state")
    g, state, q = torch.full((T, 1), -1e-4), torch.ones(1, 1, 1), torch.ones(T, 1, 1)
    with SumsOfGPUs():
        found = of_state(state, q, g)
    assert (found.flatten().double() / g.flatten().double().cumsum(0).exp() - 1).abs().max() < 3e-5


class Sent(TorchDispatchMode):
    """Bytes that this rank gives to each collective, those that leave it, and those of rows that it copies."""

    COPIES = ("cat", "index", "clone", "_to_copy", "constant_pad_nd", "index_select", "copy_", "index_copy")

    def __init__(self, axis: Any, rows: Tensor | None = None) -> None:
        super().__init__()
        self.rank, self.size = axis.get_local_rank(), axis.size()
        self.given, self.left, self.copied = list[int](), 0, 0
        self.least = 1 << 60 if rows is None else rows.numel()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        found = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional" and name != "wait_tensor":
            own, others = args[0].nbytes, self.size - 1
            self.given.append(own)
            match name:
                case "all_gather_into_tensor":
                    self.left += own * others
                case "reduce_scatter_tensor":
                    self.left += own // self.size * others
                case "all_to_all_single":
                    self.left += own * (sum(args[2]) - args[2][self.rank]) // sum(args[2])
                case other:
                    raise NotImplementedError(other)
        if name in self.COPIES and found.numel() >= self.least:
            self.copied += found.nbytes
        return found


@on_ranks(2)
def test_what_travels_is_as_large_as_states(axis: Any) -> None:
    """Zigzag on two ranks: the second half of one and the first of the other follow one another, so each sends once."""

    def traffic(what: str, layout: str = "zigzag", mask: Mask | None = None, **options: Any) -> list[int]:
        sequence, x = ShardedSequence(axis, layout=LAYOUTS[layout], length=S), batch_of(S, 1)
        inputs = [x[name].float() for name in CALLS[what].split()]
        inputs = [(sequence.shard(y) if y.ndim > 2 else y).requires_grad_() for y in inputs]
        with Sent(axis) as sent:
            call(what, *inputs, sequence=sequence, mask=mask, **options)[0].sum().backward()
        return sent.given

    rule, state, rows = "gated_delta_rule", HV * K * V * 4, C * (W - 1) * 4
    for S in (32, 128):
        a = HV * K * K * 4
        assert traffic(rule, method="states") == [a + state, 2 * (a + state)]  # gathered, and summed and scattered
        assert traffic(rule, "contiguous", method="states") == [state, 2 * state]  # through no piece: nobody needs A
        assert traffic(CONVOLUTION) == [rows, 2 * rows]
        cut_nowhere = Mask(documents=torch.arange(S) // (S // 4))
        assert traffic(rule, mask=cut_nowhere, method="states") == traffic(CONVOLUTION, mask=cut_nowhere) == []


@on_ranks(2)
def test_repeated_calls_are_one_look_up(axis: Any) -> None:
    """What changed is looked at anew, and never taken for what was known."""
    rules, S, zigzag = room("mixers.rules"), 44, ZigZag()
    sequences = [ShardedSequence(axis, layout, length=S) for layout in (zigzag, zigzag, Contiguous())]
    documents = [tuple(i // n for i in range(S)) for n in (5, 7, 9)]
    masks = [mask_of(x) for x in documents]

    def compare(
        what: str, which: int, is_known: bool, mask: Mask | None = None, sequence: int = 0, **more: Any
    ) -> None:
        one, at = case_of("gated_delta_rule", documents[which], "out", S, 1), sequences[sequence]
        with mock.patch.object(rules, "_pieces", wraps=rules._pieces) as checked:
            out, _ = call("gated_delta_rule", *at.shard(one.inputs), sequence=at, mask=mask or masks[which], **more)
        assert off(at.unshard(out), one.out) < 1e-12, what
        assert checked.called is not is_known, what

    compare("the first call", 0, False)
    compare("the same", 0, True)
    compare("another mask", 1, False)
    compare("the first mask", 0, True)
    compare("an equal mask", 0, False, mask=mask_of(documents[0]))
    compare("an equal sequence, as of each layer", 0, True, sequence=1)
    compare("another layout", 0, False, sequence=2)
    compare("another method", 0, False, method="states")
    compare("that again", 0, True, method="states")
    compare("a third mask", 2, False)
    compare("a mask whose pieces are gone", 1, False)
    masks[1].documents.copy_(torch.tensor(documents[2]))
    documents[1] = documents[2]
    compare("a mask that was written", 1, False)


class Instantly:
    """In the place of a kernel: with its shapes, and gradients of all inputs; notes the lengths of its calls."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __call__(self, inputs: Any, initial: Tensor, lens: list[int], scale: float) -> tuple[Tensor, Tensor]:
        self.calls.append([*lens])
        count = sum(x.sum() for x in inputs if x is not None) + initial.sum()
        return inputs.v + count.to(inputs.v.dtype), initial + count

    def patch(self) -> Any:
        return mock.patch.object(room("mixers.rules"), "choose_kernel", lambda *args: self)


WHOLE: dict[str, tuple[Layout, list[int], list[int]]] = {
    "some": (Joint(*[9] * 10), 10 * [1, 2, 6], 10 * [1, 2]),  # a stream of nine gives three to each rank, the last none
    "all": (Joint(*[9] * 10), 10 * [3, 1, 2, 3], 10 * [3]),
    "some, long": (Contiguous(), [20, 26, 138], [20, 26]),
}
"""Layouts on four ranks, documents, and those of the first rank, which are whole."""


@pytest.mark.parametrize("what", ["gated_delta_rule", "gla without decay", CONVOLUTION])
@on_ranks(4)
def test_whole_documents_are_one_local_call(rank: int, axis: Any, what: str) -> None:
    """On rows as they lie. Where other ranks have cut documents, this one takes part in their collectives, no more."""
    for which, (layout, lens, own) in WHOLE.items():
        documents, S = tuple(i for i, n in enumerate(lens) for _ in range(n)), sum(lens)
        more = {"method": "states"} if what in RULES else {}
        check(axis, what, layout, documents, S=S, B=1, **more)
        sequence, kernel = ShardedSequence(axis, layout=layout, length=S, pad=False), Instantly()
        local = [sequence.shard(y) if y.ndim > 2 else y for y in case_of(what, documents, "out", S, 1).inputs]
        with kernel.patch(), Sent(axis, local[0]) as sent:
            out, _ = call(what, *local, sequence=sequence, mask=mask_of(documents), **more)
            copied = sent.copied
            out.sum().backward()
        assert len(sent.given) == (0 if which == "all" else 2), which
        if rank == 0:
            assert kernel.calls == ([own] if what in RULES else []), which
            assert copied == 0 or which != "some, long", which


@on_ranks(3)
def test_gradients_of_the_rows_before_documents_alone(axis: Any) -> None:
    """The last rank has no rows; the gradient needs no collective."""
    sequence = ShardedSequence(axis, layout=Contiguous(), length=4, pad=False)
    made = torch.Generator().manual_seed(0)
    x, taps, initial = (torch.randn(*s, dtype=torch.float64, generator=made) for s in ((1, 4, C), (C, W), (1, C, W)))
    initial.requires_grad_()
    rows = torch.cat([initial[0].t(), x[0]])
    want = sum(taps[:, j] * rows[j + 1 : j + 5] for j in range(W))
    out = mixers.causal_conv1d(sequence.shard(x), taps, sequence=sequence, initial_state=initial)
    with Sent(axis) as sent:
        own = torch.autograd.grad(out.square().sum(), initial)[0].contiguous()
    assert not sent.given
    dist.all_reduce(own)
    assert off(own, torch.autograd.grad(want.square().sum(), initial)[0]) < 1e-12


@on_ranks(2)
def test_second_derivatives_of_convolutions_are_refused(axis: Any) -> None:
    sequence, taps = ShardedSequence(axis, length=8), torch.ones(C, W, dtype=torch.float64)
    x = sequence.shard(torch.randn(1, 8, C, dtype=torch.float64)).requires_grad_()
    out = mixers.causal_conv1d(x, taps, sequence=sequence, activation="silu")
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="causal_conv1d of documents that are cut has no second derivative"):
        grad.square().sum().backward()


PACKINGS: dict[str, Any] = {
    "one": lambda S: None,
    "packed": lambda S: torch.arange(S).mul(7).div(S // 9, rounding_mode="floor"),
    "excluded": lambda S: torch.where(torch.arange(S) < S // 3, -1, torch.arange(S) // (S // 5)),
    "of each row": lambda S: torch.arange(2)[:, None] * 5 + torch.arange(S).add(11) // torch.tensor([[S // 4], [S]]),
}


def check_bytes(axis: Any, S: int, layout: Layout, packing: str, what: str, dtype: torch.dtype) -> None:
    """As many bytes leave this rank as `method="auto"` goes by."""
    documents, B, heads, traffic = PACKINGS[packing](S), 2, 6, room("mixers.traffic")
    mask, told = Mask() if documents is None else Mask(documents=documents), (layout, packing, what, dtype)
    sequence = ShardedSequence(axis, layout=layout, length=S, pad=False)
    shapes = {"q": (heads, K), "k": (heads, K), "v": (2 * heads, V), "g": (2 * heads,), "gk": (2 * heads, K)}
    x = {name: torch.zeros(B, len(sequence.positions(S)), *shape, dtype=dtype) for name, shape in shapes.items()}
    x |= {"g": x["g"].float(), "gk": x["gk"].float(), "beta": x["v"][..., 0].clone()}
    names = CALLS[what].split()
    pieces = inner("mixers.pieces", "pieces_in")(layout, mask, S, S, axis.size(), 0, B)
    decays = K if "gk" in names else int("g" in names)
    sizes = traffic.StateSizes(B, heads, 2 * heads, K, V, decays, "beta" in names, dtype)
    want = {"states": traffic.sent_by_states(pieces, sizes), "heads": traffic.sent_by_heads(pieces, sizes)}
    want["auto"] = want[traffic.choose_method(pieces, sizes)]
    assert want["auto"].max() == min(x.max() for x in want.values()), told
    with Instantly().patch():
        for method, bytes_of in want.items():
            inputs = [x[name].requires_grad_() for name in names]
            with Sent(axis) as forward:
                out, _ = call(what, *inputs, sequence=sequence, mask=mask, method=method)
            with Sent(axis) as backward:
                out.sum().backward()
            assert forward.left + backward.left == bytes_of[axis.get_local_rank()], (method, *told)


@on_sizes
@on_ranks("size", timeout=300.0)
def test_auto_goes_by_the_bytes_that_leave_a_rank(axis: Any, full: bool, layout: str) -> None:
    for what in RULES:
        for packing in PACKINGS if full or what == "kda" else ("packed",):
            for dtype in (torch.float32, torch.bfloat16)[1 - (what == "kda") :]:
                check_bytes(axis, 62 if layout == "striped" else 1022, LAYOUTS[layout], packing, what, dtype)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@on_ranks(2, timeout=120.0)
def test_bytes_of_a_million_tokens(axis: Any, layout: str) -> None:
    for packing in ("one", "packed"):
        check_bytes(axis, 2**20, LAYOUTS[layout], packing, "gated_delta_rule", torch.bfloat16)


def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


RULE, CONV, NO_ROW = "gated_delta_rule", "causal_conv1d", "batch: expected 1 row or more, got 0"
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "an id that comes back": (RULE, {"mask": mask_of((0,) * 8 + (1,) * 8 + (0,) * 16)}, "comes back"),
    "heads of fewer than ranks": (
        RULE, {"method": "heads", **{x: zeros(1, 16, 1, K) for x in "qk"}}, "ranks that divide",
    ),
    "another method": (RULE, {"method": "ring"}, "auto or states or heads"),
    "another kernel": (RULE, {"kernel": "triton"}, "auto or torch or fla or reference"),
    "other documents": (RULE, {"mask": mask_of((0,) * 30)}, "32"),
    "one state too many": (RULE, {"initial_state": zeros(2, HV, K, V)}, "one state for each document"),
    "beta of other rows": (RULE, {"beta": zeros(1, 3, HV)}, "gated_delta_rule: beta"),
    "no beta": (RULE, {"beta": None}, "gated_delta_rule: beta"),
    "q without a batch": (RULE, {"q": zeros(16, H, K)}, "gated_delta_rule: q"),
    "integers": (RULE, {"v": zeros(1, 16, HV, V, dtype=torch.int64)}, "gated_delta_rule: v"),
    "two dtypes": (RULE, {"k": torch.zeros(1, 16, H, K)}, "torch.float64"),
    "another device": (RULE, {"g": torch.zeros(1, 16, HV, device="meta")}, "a tensor on cpu"),
    "a decay per channel": (RULE, {"g": zeros(1, 16, HV, K)}, "gated_delta_rule: g"),
    "an unknown option": (RULE, {"chunk_size": 64}, "chunk_size"),
    "heads that do not fit": (RULE, {"v": zeros(1, 16, 3, V)}, "gated_delta_rule: g"),
    "half a head": (RULE, {x: zeros(1, 16, 3, K) for x in "qk"}, "a multiple of 3"),
    "no batch": (RULE, {x: batch_of(16, 1)[x][:0] for x in RULES[RULE].split()}, NO_ROW),
    "kda with a decay per head": ("kda", {"g": zeros(1, 16, HV)}, "kda: g"),
    "D of other heads": ("ssd", {"D": zeros(3)}, "ssd: D"),
    "A of other heads": ("ssd", {"A": zeros(3)}, "ssd: A"),
    "dt of other rows": ("ssd", {"dt": zeros(1, 3, HV)}, "ssd: dt"),
    "C of another width": ("ssd", {"C": zeros(1, 16, 2, 4)}, "ssd: B"),
    "B in another dtype": ("ssd", {"B": torch.zeros(1, 16, 2, K)}, "ssd: B"),
    "groups that do not fit": ("ssd", {x: zeros(1, 16, 3, K) for x in "BC"}, "ssd: heads: expected a multiple of 3"),
    "a scale of ssd": ("ssd", {"scale": 1.0}, "scale"),
    "A of integers": ("ssd", {"A": zeros(HV, dtype=torch.int64)}, "floating-point"),
    "a convolution over time first": (CONV, {"x": zeros(1, C, 16)}, "weight"),
    "a convolution of no batch": (CONV, {"x": zeros(0, 16, C)}, NO_ROW),
    "a bias of other channels": (CONV, {"bias": zeros(5)}, "causal_conv1d: bias"),
    "a weight in another dtype": (CONV, {"weight": torch.zeros(C, W)}, "causal_conv1d: weight"),
    "a bias elsewhere": (CONV, {"bias": torch.zeros(C, device="meta")}, "a tensor on cpu"),
    "another activation": (CONV, {"activation": "gelu"}, "activation"),
    "a state of W - 1": (CONV, {"initial_state": zeros(1, C, W - 1)}, "causal_conv1d: initial_state"),
    "states of other documents": (CONV, {"initial_state": zeros(2, C, W)}, "one state for each"),
    "rows without a batch": ("roll", {"x": zeros(16)}, "roll: x"),
    "a shift of no batch": ("token_shift", {"x": zeros(0, 16, C)}, NO_ROW),
    "half a token": ("roll", {"shifts": 0.5}, "roll: shifts"),
    "no tensor": ("token_shift", {"x": [1, 2]}, "token_shift: x"),
}  # fmt: skip
"""A function, what is changed in a call of it that is right, and words of the refusal."""


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(2)
def test_what_is_refused_on_every_rank(rank: int, axis: Any, name: str) -> None:
    """On all ranks, and if one alone has it."""
    what, changed, words = REFUSED[name]
    sequence, x = ShardedSequence(axis, length=32, pad=False), batch_of(32, 1)
    tensors = {"causal_conv1d": CALLS[CONVOLUTION], **CALLS}[what].split()
    local = (sequence.shard(y) if y.ndim > 2 else y for y in (x[name] for name in tensors))
    right = dict(zip(inspect.signature(getattr(mixers, what)).parameters, local, strict=False)) | {"sequence": sequence}
    right |= {"shifts": 1} if what == "roll" else {}
    for given in (right | changed, right | (changed if rank == 0 else {})):
        with pytest.raises(REFUSALS, match=re.escape(words)):
            getattr(mixers, what)(**given)


@on_ranks(2)
def test_ranks_that_differ(rank: int, axis: Any) -> None:
    sequence, x = ShardedSequence(axis, length=32), batch_of(32, 1)
    q, k, v, g, beta, rows = sequence.shard([x[name] for name in ("q", "k", "v", "g", "beta", "x")])
    with pytest.raises(REFUSALS, match="arguments"):
        mixers.gla(q, k, v, g, sequence=sequence, scale=1.0 + rank)
    with pytest.raises(REFUSALS, match="documents"):
        mixers.token_shift(rows, sequence=sequence, mask=Mask(documents=torch.arange(32) // (8 + 8 * rank)))
    # states travel in other collectives with kernels of fla-core, so "auto" must choose alike on all ranks
    with mock.patch.object(room("mixers.rules"), "folds", lambda run: rank == 0):  # as where it is installed
        with pytest.raises(REFUSALS, match=r"arguments(?s:.*)no fla"):
            mixers.gated_delta_rule(q, k, v, g, beta, sequence=sequence)


@on_ranks(2)
def test_labels_are_not_rolled_within_a_shard(axis: Any) -> None:
    with pytest.raises(REFUSALS, match="the sequence of x"):
        mixers.roll(ShardedSequence(axis, length=32).shard(torch.arange(32)[None]), -1)


@on_ranks(2)
def test_joint_layouts_in_inference(axis: Any) -> None:
    """A layout whose tensor is made in each look, so that a call in it is never known."""
    layout = Joint((8, Permuted([*range(8)])), (4, ZigZag()))
    sequence, x = ShardedSequence(axis, layout, length=12, pad=False), torch.arange(12.0)[None]  # as labels
    with torch.inference_mode():
        for _ in range(2):
            rolled = mixers.roll(sequence.shard(x), 1, sequence=sequence)
            assert torch.equal(rolled, sequence.shard((x - 1).clamp(min=0)))


@pytest.mark.parametrize("over", ["tp", "both"])
@pytest.mark.parametrize("what", ["gated_delta_rule", "kda", "gla without decay", "ssd", CONVOLUTION, "token_shift"])
@on_ranks(4)
def test_dtensors_over_heads(what: str, over: str) -> None:
    """DTensors over heads, and over rows too, against one rank."""
    axes, S, both = mesh((2, 2), ("cp", "tp")), 32, over == "both"
    sequence, on = ShardedSequence(axes["cp"], layout=ZigZag()), axes if both else axes["tp"]
    documents = (0,) * 5 + (1,) * 11 + (2,) * 16
    order, inverse = ZigZag().permutation(S, 2), ZigZag().inverse(S, 2)

    def spread(y: Tensor, rows: bool, dim: int) -> DTensor:
        if rows:
            y = y[:, order] if both else sequence.shard(y)
        placements = [Shard(1) if rows else Replicate()] * both + [Shard(dim)]
        return distribute_tensor(y.detach(), on, placements).requires_grad_()

    def whole(y: DTensor, rows: bool) -> Tensor:
        y = y.full_tensor().contiguous()
        if rows:
            return y[:, inverse] if both else sequence.unshard(y)
        if not both:
            dist.all_reduce(y, group=axes["cp"].get_group())
        return y

    for form in ("out",) if both or what in ("ssd", "token_shift") else ("out", "from states"):
        one, more = case_of(what, documents, form, S), {}
        are_rows = [y.ndim > 2 for y in one.inputs]
        local = [spread(y, rows, 2 if rows else 0) for y, rows in zip(one.inputs, are_rows, strict=True)]
        if form == "from states":
            more = {"initial_state": spread(one.initial, False, 1), "output_final_state": True}
        out, states = call(what, *local, sequence=sequence, mask=mask_of(documents), **more)
        assert isinstance(out, DTensor) and out.placements == local[0].placements and out.device_mesh == on
        assert off(whole(out.detach(), True), one.out) < 1e-12
        loss = (out * spread(one.of_out, True, 2)).sum().full_tensor()
        if states is not None:
            assert off(states.full_tensor(), one.states) < 1e-12
            loss = loss + (states * spread(one.of_states, False, 1)).sum().full_tensor() / 2
        inputs = [*local, *([more["initial_state"]] if more else [])]
        for own, want, rows in zip(
            torch.autograd.grad(loss, inputs), one.grads, [*are_rows, *[False] * bool(more)], strict=True
        ):
            assert off(whole(own, rows), want) < 1e-12, form


MISPLACED: dict[str, tuple[dict[str, Any], str]] = {
    "a local one beside": ({"beta": None}, "all DTensors or all local"),
    "replicated keys": ({"k": [Shard(1), Replicate()]}, "gated_delta_rule: k"),
    "a sum of parts": ({name: [Shard(1), Partial()] for name in "qkv"}, "Shard of heads or batch, or Replicate"),
    "rows over tp": ({x: [Replicate(), Shard(1)] for x in CALLS[RULE].split()}, "Shard(1), the sequence"),
    "states over rows": ({"output_final_state": True}, "tensors sharded by heads"),
    "an odd length": ({"layout": "zigzag", "S": 35}, "torch.chunk"),
}
"""Placements of arguments, None for a local tensor, or options; and words of the refusal."""


@pytest.mark.parametrize("name", MISPLACED)
@on_ranks(4)
def test_dtensors_that_are_refused(name: str) -> None:
    axes, (options, words) = mesh((2, 2), ("cp", "tp")), MISPLACED[name]
    options = dict(options)
    sequence = ShardedSequence(axes["cp"], layout=LAYOUTS[options.pop("layout", "contiguous")])
    x, spread = batch_of(options.pop("S", 32), 2), dict[str, Any]()
    for key in CALLS[RULE].split():
        placements = options.pop(key, [Shard(1), Shard(2)])
        if placements is None:
            spread[key] = x[key]
        elif Partial() in placements:
            spread[key] = DTensor.from_local(x[key], axes, placements)
        else:
            spread[key] = distribute_tensor(x[key], axes, placements)
    with pytest.raises(REFUSALS, match=re.escape(words)):
        mixers.gated_delta_rule(**spread, **options, sequence=sequence)
