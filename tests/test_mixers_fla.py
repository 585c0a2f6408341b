"""Recurrent layers by the package fla-core, whose kernels Triton's interpreter runs here, in float16."""

from __future__ import annotations

import builtins
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest import mock

import fla_on_gpu
import pytest
import test_mixer_kernels as specified
import torch
from inside import room
from interpreted import INTERPRETED, Interpreted, is_that_run
from ranks import Pools, mesh
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from cp_mesh import Contiguous, Layout, Mask, RecurrentParallel, ShardedSequence, ZigZag, mixers, parallelize

needs_package = pytest.mark.skipif(not find_spec("fla"), reason="needs fla-core")
needs_interpreter = pytest.mark.skipif(not INTERPRETED or not find_spec("fla"), reason="test_interpreted runs it")
RULES = {
    "delta_rule": ("none", True),
    "simple_gla without decay": ("none", False),
    "gated_delta_rule": ("of heads", True),
    "simple_gla": ("of heads", False),
    "kda": ("of channels", True),
    "gla": ("of channels", False),
}
PACKINGS = {"one": [40], "unlike": [20, 0, 1, 70], "none": []}


class Step(int):
    """A step of a loop of a kernel, which the interpreter counts in Python: there it has no `to`."""

    def to(self, dtype: Any) -> Step:
        return self


def steps(*given: Any) -> list[Step]:
    bounds = (int(x.handle.data.item()) if hasattr(x, "handle") else x for x in given)
    return [Step(i) for i in builtins.range(*bounds)]


def in_interpreter(replace: Callable[..., Any]) -> None:
    """Kernels of the package run in the interpreter: without timing them first, and with such steps."""
    from triton.runtime.autotuner import Autotuner

    for rule in RULES:
        import_module(f"fla.ops.{rule.split()[0]}")
    import_module("fla.modules.causal_conv1d")
    replace(Autotuner, "_bench", lambda self, *args, **kwargs: [0.0] * 3)
    for name, module in sys.modules.items():
        if name.startswith(("fla.ops", "fla.modules.causal_conv1d")):
            replace(module, "range", steps)
    for name in ("chunk_fwd", "chunk_bwd"):
        replace(import_module(f"fla.ops.cp.{name}"), "_check_cp_device", lambda device: None)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    in_interpreter(partial(monkeypatch.setattr, raising=False))


def errors(kernel: str, given: list[Tensor | None], lens: list[int]) -> list[float]:
    """Of outputs, states and gradients in float16, relative to float64."""
    exact = specified.found("reference", given, lens)
    own = specified.found(kernel, given, lens, torch.float16)
    return [float((x - y).norm() / y.norm().clamp(min=1e-30)) for x, y in zip(own, exact, strict=True)]


def halves(num_rows: int, rule: str, strong: float | None = None, slow: bool = False) -> list[Tensor | None]:
    """Inputs; ``slow``: heads forget within tokens or hardly, so states from far away show in the results."""
    given = specified.drawn(num_rows, *RULES[rule], strong, K=16, V=8)
    if slow and given[3] is not None:
        given[3] *= torch.logspace(-3, 0, specified.HV).view(-1, *[1] * (given[3].ndim - 2))
    return [x if x is None else x.half().double() for x in given]


@needs_interpreter
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("rule", RULES)
def test_kernels_are_the_specification(kernels: None, rule: str, packing: str) -> None:
    """All round products to float16, whose unit is 5e-4."""
    lens = PACKINGS[packing]
    assert max(errors("fla", halves(sum(lens), rule), lens)) < 1.5e-3


@needs_interpreter
@pytest.mark.parametrize("strong", [-1e4, -torch.inf])
@pytest.mark.parametrize("rule", [rule for rule, (decay, _) in RULES.items() if decay != "none"])
def test_strong_decays(kernels: None, rule: str, strong: float) -> None:
    assert max(errors("fla", halves(70, rule, strong), [70])) < 1.5e-3


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def of_rank(
    rank: int, rule: str, layout: Layout, lens: list[int], with_states: bool, kernel: str, dtype: torch.dtype,
    size: int = 2, of_states_alone: bool = False, default: torch.dtype = torch.float32,
) -> list[Tensor]:  # fmt: skip
    """Outputs, states, and gradients of a rank, as float64."""
    if kernel == "fla":
        in_interpreter(setattr)
    given, name = halves(sum(lens), rule, slow=True), {"simple_gla": "gla"}.get(rule.split()[0], rule)
    made, shape = torch.Generator().manual_seed(1), (len(lens), specified.HV, 16, 8)
    initial, of_states = (torch.randn(*shape, dtype=torch.float64, generator=made) for _ in range(2))
    sequence = ShardedSequence(mesh((size,), ("cp",)), length=sum(lens), layout=layout, pad=False)
    grad = torch.randn(1, *given[2].shape, dtype=torch.float64, generator=made)
    *shards, grad = sequence.shard([*(x[None] for x in given if x is not None), grad])
    inputs = [x.to(dtype).requires_grad_() for x in shards]
    rows = [x.repeat_interleave(2, -1)[..., ::2] for x in inputs]  # as parts of one projection: not contiguous
    options = {"sequence": sequence, "mask": Mask.from_cu_seqlens(torch.tensor([0, *lens]).cumsum(0))}
    options |= {"kernel": kernel, "method": "states", "output_final_state": with_states, "scale": 0.3}
    options["use_qk_l2norm_in_kernel"] = with_states
    if with_states:
        initial = initial.to(torch.promote_types(dtype, torch.float32))
        options["initial_state"] = initial.requires_grad_(not of_states_alone)
    with default_dtype(default):
        outs = [x for x in getattr(mixers, name)(*rows, **options) if x is not None]
        wanted = [*inputs, options["initial_state"]] if with_states else inputs
        grads = [y.to(x.dtype) for x, y in zip(outs, (grad, of_states / size), strict=False)]
        if of_states_alone:
            wanted, outs, grads = inputs[1:], outs[1:], grads[1:]
        return [x.detach().double() for x in (*outs, *torch.autograd.grad(outs, wanted, grads))]


@needs_interpreter
@pytest.mark.parametrize(
    ("layout", "lens", "with_states"),
    [(Contiguous(), [70], False), (ZigZag(), [30, 35, 6], True), (ZigZag(), [280], True)],
    ids=["one", "packed", "through"],
)
@pytest.mark.parametrize("rule", RULES)
def test_states_of_other_ranks(pool: Pools, rule: str, layout: Layout, lens: list[int], with_states: bool) -> None:
    """What travels is added between the package's summaries and its rows, forward and backward."""
    given = rule, layout, lens, with_states
    found, exact = (
        pool(2).run(of_rank, *given, kernel, dtype, timeout=300)
        for kernel, dtype in (("fla", torch.float16), ("reference", torch.float64))
    )
    for own, want in zip(found, exact, strict=True):
        assert max(float((x - y).norm() / y.norm()) for x, y in zip(own, want, strict=True)) < 1.5e-3


@needs_interpreter
def test_default_dtypes_change_nothing(pool: Pools) -> None:
    given = "simple_gla", ZigZag(), [70], False, "fla", torch.float16, 2, False
    want, *others = (
        pool(2).run(of_rank, *given, x, timeout=300) for x in (torch.float32, torch.float64, torch.bfloat16)
    )
    for found in (x for ranks in others for x in zip(ranks, want, strict=True)):
        assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@needs_interpreter
@pytest.mark.parametrize("form", ["outputs", "states", "states alone"])
@pytest.mark.parametrize("rule", RULES)
def test_ranks_without_rows(pool: Pools, rule: str, form: str) -> None:
    """The last of three has none. One document is cut, or none; gradients of outputs, of final states too, or alone.

    Of few numbers, so what rounds to float16 does not even out.
    """
    for lens in ([1, 3], [2, 2]):
        given = rule, Contiguous(), lens, form != "outputs"
        found, exact = (
            pool(3).run(of_rank, *given, kernel, dtype, 3, form == "states alone", timeout=120)
            for kernel, dtype in (("fla", torch.float16), ("reference", torch.float64))
        )
        for own, want in zip(found, exact, strict=True):
            for x, y in zip(own, want, strict=True):
                assert float((x - y).norm() / y.norm().clamp(min=1e-3)) < 3e-3


def convolved(rank: int, kernel: str, dtype: torch.dtype, activation: str | None) -> list[Tensor]:
    """The output of a rank and gradients, as float64."""
    if kernel == "fla":
        in_interpreter(setattr)
    made, lens = torch.Generator().manual_seed(0), [30, 2, 35, 6]
    x, grad = (torch.randn(1, sum(lens), 6, generator=made).half().double() for _ in range(2))
    sequence = ShardedSequence(mesh((2,), ("cp",)), length=sum(lens), pad=False)
    shard, grad = sequence.shard([x, grad])
    given = [shard, torch.randn(6, 4, generator=made).half(), torch.randn(6, generator=made).half()]
    given = [x.to(dtype).requires_grad_() for x in given]
    mask = Mask.from_cu_seqlens(torch.tensor([0, *lens]).cumsum(0))
    initial = torch.randn(len(lens), 6, 4, generator=made).half().to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.float16, enabled=dtype == torch.float32):
        options = {"sequence": sequence, "mask": mask, "activation": activation, "output_final_state": True}
        out, states = mixers.causal_conv1d(*given, kernel=kernel, initial_state=initial, **options)
    given.append(initial)
    assert states.dtype == dtype  # as the rows came
    return [x.double() for x in (out.detach(), states.detach(), *torch.autograd.grad(out, given, grad.to(out.dtype)))]


@needs_interpreter
@pytest.mark.parametrize(("dtype", "activation"), [(torch.float16, None), (torch.float32, "silu")], ids=str)
def test_convolutions(pool: Pools, dtype: torch.dtype, activation: str | None) -> None:
    """Under autocast of float32, too."""
    cases = ("fla", dtype), ("torch", torch.float64)
    found, exact = (pool(2).run(convolved, *case, activation, timeout=300) for case in cases)
    for own, want in zip(found, exact, strict=True):
        assert max(float((x - y).norm() / y.norm()) for x, y in zip(own, want, strict=True)) < 1.5e-3


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(8.0, dtype=torch.float64).view(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return mixers.causal_conv1d(x, self.weight)


def convolved_beside_rules(rank: int) -> None:
    """In float64, which the kernel of the style's rules does not compute."""
    axis, module = mesh((2,), ("cp",)), Convolution()
    sequence = ShardedSequence(axis, length=16)
    x = sequence.shard([torch.arange(32.0, dtype=torch.float64).view(1, 16, 2)])[0]
    want = mixers.causal_conv1d(x, module.weight, sequence=sequence)
    model = parallelize(nn.Sequential(module), axis, {"0": RecurrentParallel(sequence, kernel="fla")})
    assert torch.equal(model(x), want)


def test_kernels_of_styles_are_of_rules(pool: Pools) -> None:
    pool(2).run(convolved_beside_rules)


def convolved_in_two_dtypes(rank: int) -> None:
    """Under autocast rows travel in half precision with "fla" alone."""
    given = torch.zeros(1, 4, 2), torch.zeros(2, 3)
    sequence = ShardedSequence(mesh((2,), ("cp",)), length=8)
    with mock.patch.object(room("mixers.fla"), "_interprets", lambda: True), torch.autocast("cpu", torch.float16):
        mixers.causal_conv1d(*given, sequence=sequence, kernel=("torch", "fla")[rank])


@needs_package
def test_convolutions_that_differ(pool: Pools) -> None:
    for raised in pool(2).run_expecting_error(convolved_in_two_dtypes):
        assert raised is not None and raised.type == "RankMismatchError"


@pytest.mark.parametrize("kernel", ["fla", "cudnn"])
def test_convolutions_that_it_does_not_compute(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    monkeypatch.setattr(room("mixers.fla"), "_interprets", lambda: True)
    error, words = (NotImplementedError, "x in bfloat16") if kernel == "fla" else (ValueError, "auto or torch or fla")
    with pytest.raises(error, match=words):
        mixers.causal_conv1d(torch.zeros(1, 4, 2), torch.zeros(2, 3), kernel=kernel)


@needs_package
@is_that_run
@pytest.mark.nightly("interpreted")
def test_interpreted(interpreted: Interpreted) -> None:
    assert interpreted(__file__) >= len(RULES) * (len(PACKINGS) + 6) + 5


LACKING = {
    "float32": "q, k and v in bfloat16",
    "K": "at most 256",
    "odd V": "K and V even",
    "old package": "fla-core 0.6",
    "new package": "fla-core 0.6",
    "no package": "no such package",
    "hopper": "right on Hopper",
    "cpu": "tensors on a GPU",
}


@pytest.mark.parametrize("name", LACKING)
def test_what_it_does_not_compute(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fla = room("mixers.fla")
    releases = {"fla-core": (0, 6, 0), "triton": (3, 7, 1)}
    of_name = {
        "old package": {"fla-core": (0, 5, 9)},
        "new package": {"fla-core": (0, 7)},
        "no package": {"fla-core": ()},
        "hopper": {"triton": (3, 6)},
    }
    releases |= of_name.get(name, {})
    monkeypatch.setattr(fla, "_release", releases.get)
    monkeypatch.setattr(fla, "_interprets", lambda: name != "cpu")
    monkeypatch.setattr(fla, "_is_hopper", lambda device: True)
    x = torch.zeros(
        1, 4, 2, {"K": 300, "odd V": 7}.get(name, 8), dtype=torch.float32 if name == "float32" else torch.float16
    )
    with pytest.raises(NotImplementedError, match=LACKING[name]):
        specified.choose_kernel("a rule", "fla", x, x, x, None, None)
    if name == "hopper":
        with pytest.raises(NotImplementedError, match=LACKING[name]):
            mixers.causal_conv1d(x[..., 0], torch.zeros(2, 3).half(), kernel="fla")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("style", ["auto", "fla", "torch", "reference"])
@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_which_convolutions_auto_takes_it_for(
    monkeypatch: pytest.MonkeyPatch, kernel: str, style: str, device: str
) -> None:
    fla = room("mixers.fla")
    monkeypatch.setattr(fla, "_release", {"fla-core": (0, 6, 0), "triton": (3, 7, 1)}.get)
    takes = room("mixers.kernels").convolves_by_fla
    with FakeTensorMode():
        half, single = (torch.empty(4, 2, dtype=x, device=device) for x in (torch.bfloat16, torch.float32))
        found = takes("a layer", kernel, style, half), takes("a layer", kernel, style, single)
    assert found == (kernel == "auto" and style in ("auto", "fla") and device == "cuda", False)


def test_float64_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast leaves it as it is, and the package does not compute it."""
    monkeypatch.setattr(room("mixers.fla"), "_interprets", lambda: True)
    given = torch.zeros(1, 4, 2, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(NotImplementedError, match="float64"):
        mixers.causal_conv1d(*given, kernel="fla")


def a_of_calls(rank: int) -> list[Tensor]:
    """A of every call that something still holds after its backward, while its output lives."""
    in_interpreter(setattr)
    calls, seen = room("mixers.seam").RuleCall, []
    sequence = ShardedSequence(mesh((2,), ("cp",)), length=140, layout=ZigZag(), pad=False)
    shards = sequence.shard([x[None] for x in halves(140, "gated_delta_rule") if x is not None])
    made = calls.__init__

    def seeing(self: Any, *given: Any, **rows: Any) -> None:
        made(self, *given, **rows)
        seen.append(self)

    with mock.patch.object(calls, "__init__", seeing):
        inputs = [x.half().requires_grad_() for x in shards]
        out = mixers.gated_delta_rule(*inputs, sequence=sequence, kernel="fla", method="states")[0]
    before = [x.a for x in seen if x.a is not None]
    out.sum().backward()
    assert len(seen) == 1
    return [*before, *(x.a for x in seen if x.a is not None)]


@needs_interpreter
def test_a_is_among_what_autograd_saves(pool: Pools) -> None:
    assert pool(2).run(a_of_calls, timeout=300) == [[], []]


@pytest.mark.parametrize("release", [(0, 6, 0), (0, 5, 9), ()], ids=str)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("rule", RULES)
def test_what_auto_takes(monkeypatch: pytest.MonkeyPatch, rule: str, device: str, release: tuple[int, ...]) -> None:
    """On GPUs it says once what it lacks, and what to do."""
    fla, kernels, (decay, delta) = room("mixers.fla"), room("mixers.kernels"), RULES[rule]
    kernels._warn_of_torch.cache_clear()
    monkeypatch.setattr(fla, "_release", {"fla-core": release, "triton": (3, 7, 1)}.get)
    shapes = {"none": None, "of heads": (1, 4, 2), "of channels": (1, 4, 2, 8)}
    with FakeTensorMode(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        x = torch.empty(1, 4, 2, 8, dtype=torch.bfloat16, device=device)
        g = None if shapes[decay] is None else torch.empty(shapes[decay], device=device)
        beta = torch.empty(1, 4, 2, device=device) if delta else None
        found = [specified.choose_kernel("a rule", name, x, x, x, g, beta) for name in ("auto", "auto", "torch")]
    taken = device == "cuda" and release == (0, 6, 0) and rule != "gla"
    assert [x is fla.by_fla for x in found] == [taken, taken, False]
    words = "passed its gate on GPUs.*fla" if release == (0, 6, 0) else "expected fla-core 0.6.*pip install"
    said = [bool(re.search(f"a rule: kernels of fla-core: .*{words}.*Plain PyTorch", str(x.message))) for x in warned]
    assert said == [True] * (device == "cuda" and not taken)


@needs_interpreter
@pytest.mark.parametrize("name", ["delta_rule", "gla, equal channels"])
def test_gate_of_gpus(kernels: None, name: str) -> None:
    assert fla_on_gpu.passes(name, fla_on_gpu.Sizes([40], 16, torch.float16, "cpu"))
