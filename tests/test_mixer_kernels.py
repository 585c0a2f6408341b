"""The kernel of recurrent layers that computes in chunks, against the specification, token by token."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from inside import inner, room
from ranks import mesh
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cp_mesh import ShardedSequence, mixers

Inputs = inner("mixers.reference", "Inputs")
choose_kernel, Chunks = inner("mixers.kernels", "choose_kernel"), inner("chunks", "_Chunks")
H, HV, K, V = 2, 4, 3, 5
PACKINGS = {
    "one": [130],
    "less than a chunk": [3],
    "one token each": [1] * 7,
    "unlike": [0, 5, 0, 70, 1, 1, 64, 3, 0],
    "one long": [200, 1],
    "only empty": [0, 0],
    "none": [],
}
DECAYS = ("none", "of heads", "of channels")


def drawn(
    num_rows: int, decay: str, delta: bool, strong: float | None = None, K: int = K, V: int = V
) -> list[Tensor | None]:
    made = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(num_rows, *shape, dtype=torch.float64, generator=made)

    q, k, v, beta = normal(H, K), F.normalize(normal(H, K), dim=-1), normal(HV, V), normal(HV).sigmoid()
    shape = {"none": None, "of heads": (HV,), "of channels": (HV, K)}[decay]
    g = None if shape is None else -normal(*shape).abs()
    if g is not None and strong is not None:
        g = g.where(torch.rand(g.shape, generator=made) > 0.2, strong)
    return [q, k, v, g, beta if delta else None]


def found(kernel: str, given: list[Tensor | None], lens: list[int], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Outputs, states, and the gradients of all inputs and of the initial state, as float64."""
    made = torch.Generator().manual_seed(1)
    shape = len(lens), HV, given[1].shape[-1], given[2].shape[-1]
    initial = torch.randn(*shape, dtype=torch.float64, generator=made)
    inputs = [x if x is None else x.to(dtype).requires_grad_() for x in (*given, initial)]
    out, states = choose_kernel("a rule", kernel, *inputs[:5])(Inputs(*inputs[:5]), inputs[5], lens, 0.3)
    grads = [torch.randn(x.shape, dtype=torch.float64, generator=made) for x in (out, states)]
    known = [x for x in inputs if x is not None]
    grads = [grad.to(x.dtype) for grad, x in zip(grads, (out, states), strict=True)]
    of_inputs = torch.autograd.grad(
        (out, states), known, grads, allow_unused=not len(out), materialize_grads=not len(out)
    )
    return [x.detach().double() for x in (out, states, *of_inputs)]


def differences(a: list[Tensor], b: list[Tensor]) -> list[float]:
    assert [x.shape for x in a] == [x.shape for x in b]
    return [float((x - y).abs().nan_to_num(torch.inf).max()) for x, y in zip(a, b, strict=True) if x.numel()]


RULES = [(decay, delta) for decay in DECAYS for delta in (False, True)]


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(("decay", "delta"), RULES)
def test_chunks_are_the_specification(decay: str, delta: bool, packing: str) -> None:
    lens = PACKINGS[packing]
    given = drawn(sum(lens), decay, delta)
    assert max(differences(found("torch", given, lens), found("reference", given, lens)), default=0) < 1e-12


@pytest.mark.parametrize("strong", [-1e3, -1e6, -torch.inf])
@pytest.mark.parametrize(("decay", "delta"), [rule for rule in RULES if rule[0] != "none"])
def test_strong_decays(decay: str, delta: bool, strong: float) -> None:
    """Between them are weak ones, which differences of sums would round; -inf resets a state."""
    for lens in (PACKINGS["one"], PACKINGS["unlike"]):
        given = drawn(sum(lens), decay, delta, strong)
        assert max(differences(found("torch", given, lens), found("reference", given, lens))) < 1e-12


@pytest.mark.parametrize("decay", ["of heads", "of channels"])
def test_float32_keeps_weak_decays_among_strong_ones(decay: str) -> None:
    lens, dtype = PACKINGS["one"], torch.float32
    given = [x if x is None else x.float().double() for x in drawn(130, decay, True, -1e4)]
    exact = found("reference", given, lens)
    errors = [differences(found(kernel, given, lens, dtype), exact) for kernel in ("torch", "reference")]
    assert all(a < 3 * b + 1e-6 for a, b in zip(*errors, strict=True)), errors


@pytest.mark.parametrize(("decay", "delta"), RULES)
def test_half_precision_rounds_as_the_specification(decay: str, delta: bool) -> None:
    lens, dtype = PACKINGS["unlike"], torch.bfloat16
    given = [x if x is None else x.bfloat16().double() for x in drawn(sum(lens), decay, delta)]
    exact = found("reference", given, lens)
    own, specified = (found(kernel, given, lens, dtype) for kernel in ("torch", "reference"))
    for x, y, z in zip(own, specified, exact, strict=True):
        assert (x - z).norm() <= 1.5 * (y - z).norm() + 1e-12 * z.norm()


@pytest.mark.parametrize("most", [1, 8 * 143 * 2, 8 * 143 * 3])
def test_some_heads_after_others(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """One head of v, those of one head of k, and as many at once."""
    lens = PACKINGS["unlike"]
    for rule in RULES:
        given = drawn(sum(lens), *rule)
        want = found("reference", given, lens)
        with monkeypatch.context() as patch:
            patch.setattr(room("mixers.kernels"), "MOST", most)
            assert max(differences(found("torch", given, lens), want)) < 1e-12


def test_places_without_a_row_are_few() -> None:
    for lens in (*PACKINGS.values(), [1000] + [1] * 500, [65] * 30, [63] * 5):
        chunks = Chunks(lens, torch.device("cpu")) if sum(lens) else None
        if chunks is not None:
            assert chunks.rows.numel() < 2 * sum(lens)
            assert len(chunks.rows) == sum(chunks.counts)


class Precision(TorchDispatchMode):
    """What matmuls may compute in."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::bmm", "aten::mm", "aten::linalg_solve_triangular"):
            self.calls.append((torch.backends.cuda.matmul.fp32_precision, args[0].dtype))
        return func(*args, **(kwargs or {}))


def ranks_in_less(rank: int, kernel: str) -> tuple[bool, set[Any], str]:
    """Whether autocast and TF32 change bits, forward or backward, what matmuls compute in, and what is set after."""
    sequence = ShardedSequence(mesh((2,), ("cp",)), length=32)
    given = [x.float()[None].requires_grad_() for x in drawn(32, "of heads", True) if x is not None]

    def run() -> list[Tensor]:
        local = sequence.shard(given)
        out, _ = mixers.gated_delta_rule(*local, sequence=sequence, method="states", kernel=kernel)
        return [out, *torch.autograd.grad(out.float().sum(), given)]

    want = run()
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with Precision() as mode, torch.autocast("cpu", torch.bfloat16):
            same = all(map(torch.equal, run(), want))
        return same, set(mode.calls), torch.backends.cuda.matmul.fp32_precision
    finally:
        torch.backends.cuda.matmul.fp32_precision = "ieee"


@pytest.mark.parametrize("kernel", ["torch", "reference"])
def test_autocast_and_tf32_are_off(pool: Any, kernel: str) -> None:
    for same, calls, after in pool(2).run(ranks_in_less, kernel):
        assert same
        assert calls == {("ieee", torch.float32)}
        assert after == "tf32"


def test_tf32_comes_back_after_calls_that_overlap() -> None:
    """As those of two threads."""
    unit, off, first = torch.backends.cuda.matmul, inner("precision", "without_tf32"), ExitStack()
    unit.fp32_precision = "tf32"
    first.enter_context(off())
    with off():
        first.close()
        within = unit.fp32_precision
    after, unit.fp32_precision = unit.fp32_precision, "ieee"
    assert (within, after) == ("ieee", "tf32")


def test_inputs_alone_are_held() -> None:
    given, held = [x.requires_grad_() for x in drawn(130, "of channels", True) if x is not None], []
    initial = torch.zeros(1, HV, K, V, dtype=torch.float64)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: held.append(x.numel()) or x, lambda x: x):
        choose_kernel("a rule", "torch", *given[:5])(Inputs(*given), initial, [130], 1.0)
    assert sum(held) == sum(x.numel() for x in (*given, initial))
