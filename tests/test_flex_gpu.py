"""The kernel of functions in low precision: a ring of two, played on one GPU, against float64.

Its error is at most 1.35 times that of PyTorch's compiled flex_attention, which sees the whole sequence. Where PyTorch
does not compile a function, plain products of the same dtype take its place. Errors are root mean squares over all of a
result, of as many draws as it takes to have some hundred numbers that count: of one number, a ratio of errors is luck,
and so is that of a bias of keys in one draw, as the first keys, which few share a row with, have most of the error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from flex_uses import MASKS, SCORES, as_kernels, dense
from inside import KERNELS, BackwardTile, Pairs, Scores, name_of_captured, room, trace
from test_kernels_gpu import play_ring
from torch import Tensor

from cp_mesh import Contiguous, Layout, Mask, Striped, ZigZag

flex = room("kernel")
flex_programs = room("programs")

FACTOR, ROUNDING, NUMBERS = 1.35, 1e-6, 256
B, H, K, D = 2, 4, 2, 64
LAYOUTS = {"striped": Striped(), "zigzag": ZigZag(), "contiguous": Contiguous()}
FROM_THE_END = "read from the end"  # PyTorch's kernels read memory before the tensor
RESULTS = ("out", "lse", "dq", "dk", "dv")


class Case(NamedTuple):
    score: str
    mask: str = "none"
    of_rows: str = "causal"
    layout: str = "striped"  # whose tiles have one shape: one compilation
    dtype: str = "bfloat16"


CASES = [
    *(Case(score) for score in SCORES if score not in ("none", FROM_THE_END, "pair bias of low rank")),
    Case(FROM_THE_END, "none", "all"),
    *(Case("none", "causal or of one image", "all", dtype=dtype) for dtype in ("bfloat16", "float16")),
    *(Case("tanh chain", mask, "all") for mask in MASKS if mask != "none"),
    Case("ALiBi", "none", "documents", "zigzag"),
    Case("relative table", "none", "prefix", "contiguous"),
    Case("bias of documents", "causal or of one image", "padding", "zigzag"),
    *(Case(x, dtype="float16") for x in ("ALiBi", "relative table", "one tensor twice", "one temperature")),
]


def mask_of_rows(name: str, S: int) -> Mask:
    rows = torch.arange(S)
    return {
        "causal": Mask(),
        "all": Mask(causal=False),
        "documents": Mask(documents=torch.stack([rows // 137, rows // 200 - 1])),
        "prefix": Mask(prefix=140, length=S - 50, window=(300, 0)),
        "padding": Mask(causal=False, key_padding=rows % 7 != 3),
    }[name]


class Problem:
    """Tensors of a case, and what computes it.

    Attributes:
        learned: captured tensors with gradients, float32.
        seen: bool [B, H, S, S].
    """

    def __init__(self, case: Case, S: int, device: torch.device) -> None:
        self.case, self.S, self.device, self.dtype = case, S, device, getattr(torch, case.dtype)
        of_score, of_mask = (table[name].tensors(B, H, S) for table, name in ((SCORES, case.score), (MASKS, case.mask)))
        self.of_score = {
            name: (x.float() if x.is_floating_point() else x).to(device).requires_grad_(x.is_floating_point())
            for name, x in of_score.items()
        }
        self.of_mask = {name: x.to(device) for name, x in of_mask.items()}
        self.learned = [x for x in self.of_score.values() if x.requires_grad]
        self.mask = mask_of_rows(case.of_rows, S).to(device)
        rows = torch.arange(S, device=device)
        allowed = MASKS[case.mask].dense(self.of_mask, rows[:, None], rows)
        self.seen = (allowed & self.mask.allowed(rows, rows)[:, None]).expand(B, H, S, S).contiguous()
        self.shown = replace(MASKS["none"], dense=lambda t, i, j: self.seen)
        self._torch: Callable[..., Any] | None = None

    def draw(self, seed: int) -> list[Tensor]:
        """q, k, v, dout."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return [
            torch.randn(B, n, self.S, D, generator=generator, device=self.device).to(self.dtype) for n in (H, K, K, H)
        ]

    def played(self, x: Sequence[Tensor]) -> list[Tensor]:
        """Of the kernel, on each rank of two in turn."""
        q = x[0]
        score_mod, captured = trace("score_mod", SCORES[self.case.score].make(self.of_score), q)
        mask_mod, of_mask = trace("mask_mod", MASKS[self.case.mask].make(self.of_mask), q)
        wanted = frozenset(name_of_captured(i) for i, y in enumerate(captured) if y.requires_grad)
        tensors = tuple(y.detach() for y in (*captured, *of_mask))
        functions: dict[str, Any] = {"score_mod": score_mod, "mask_mod": mask_mod}
        scores = Scores(D**-0.5, **functions, captured=tensors, wanted=wanted, seq_len=self.S)
        layout = LAYOUTS[self.case.layout]
        found = play_ring(KERNELS["flex"], layout, self.mask, 2, *x, scores=scores)
        order = [y for y in captured if y.requires_grad]
        of_captured = {id(y): grad for y, grad in zip(order, found[len(RESULTS) :], strict=True)}
        return [*found[: len(RESULTS)], *(of_captured[id(y)] for y in self.learned)]

    def exact(self, x: Sequence[Tensor]) -> list[Tensor]:
        wide = [y.double() for y in x]
        with mock.patch.dict(MASKS, seen=self.shown):
            return self._differentiated(
                lambda q, k, v: dense(q, k, v, self.case.score, "seen", self.of_score, {}), wide
            )

    def plain(self, x: Sequence[Tensor]) -> list[Tensor]:
        with mock.patch.dict(MASKS, seen=self.shown):
            return as_kernels(*x, self.case.score, "seen", self.of_score, {})

    def on_one_gpu(self, x: Sequence[Tensor]) -> list[Tensor]:
        """PyTorch's own function."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if self._torch is None:
            torch._dynamo.reset()
            score_mod, seen = SCORES[self.case.score].make(self.of_score), self.seen
            shown = create_block_mask(lambda b, h, i, j: seen[b, h, i, j], B, H, self.S, self.S, device=self.device)
            call = torch.compile(flex_attention, dynamic=False)
            self._torch = lambda q, k, v: call(q, k, v, score_mod, shown, D**-0.5, True, True)
        return self._differentiated(self._torch, x)

    def _differentiated(self, call: Callable[..., tuple[Tensor, Tensor]], x: Sequence[Tensor]) -> list[Tensor]:
        q, k, v = (y.detach().requires_grad_() for y in x[:3])
        out, lse = call(q, k, v)
        return [out.detach(), lse.detach(), *torch.autograd.grad(out, [q, k, v, *self.learned], x[3])]


def check(case: Case, S: int, device: torch.device) -> str:
    """A line of ratios; raises where one is too large."""
    problem = Problem(case, S, device)
    names = [*RESULTS, *(name for name, x in problem.of_score.items() if x.requires_grad)]
    fewest = min([NUMBERS, *(x.numel() for x in problem.learned)])
    sums, fourth = torch.zeros(3, len(names), dtype=torch.float64), torch.zeros(len(names), dtype=torch.float64)
    rival, against = problem.on_one_gpu, "flex_attention"
    try:
        assert device.type == "cuda", "PyTorch has no backward on CPUs"
        assert case.score != FROM_THE_END, "PyTorch is wrong"
        rival(problem.draw(0))
    except Exception as error:
        rival, against = problem.plain, f"plain products, as {type(error).__name__}"
    for seed in range(NUMBERS):
        effective = (sums[1].square() / fourth).nan_to_num(math.inf)  # numbers, were they of equal size
        if seed >= math.ceil(NUMBERS / fewest) and effective.min() >= NUMBERS / 3:  # of normal ones a third count
            break
        x = problem.draw(seed)
        exact, ours, theirs = (of(x) for of in (problem.exact, problem.played, rival))
        alone = exact[1].isinf()
        for of in (ours, theirs):
            assert torch.equal(of[1].isinf(), alone), "rows without keys"
        for i, (got, other, want) in enumerate(zip(ours, theirs, exact, strict=True)):
            want = want.double()
            for at, y in enumerate((got.double() - want, other.double() - want, want)):
                y = y[~alone] if names[i] == "lse" else y
                sums[at, i] += y.square().sum().cpu()
                if at == 1:
                    fourth[i] += y.square().square().sum().cpu()
    own, allowed, signal = sums.sqrt()
    ratios = own / (allowed + ROUNDING / FACTOR * signal)
    line = f"{' '.join(case)}: " + ", ".join(f"{n} {r:.2f}" for n, r in zip(names, ratios, strict=True))
    line += f"; against {against}"
    assert signal.all() and (ratios <= FACTOR).all(), line
    return line


def name_of(case: Case) -> str:
    return "-".join(case).replace(" ", "_")


@pytest.mark.gpu
@pytest.mark.parametrize("case", [pytest.param(case, id=name_of(case)) for case in CASES])
def test_error_is_that_of_flex_attention_on_one_gpu(case: Case) -> None:
    with mock.patch.object(flex_programs, "one_rank_compiles", nullcontext):  # tests compile beside each other
        print(check(case, 1030, torch.device("cuda")))


@pytest.mark.gpu
def test_tiles_are_not_rounded_and_have_no_backward() -> None:
    device, at = torch.device("cuda"), torch.arange(256, device="cuda")
    q, k, dout = (torch.randn(1, n, 256, 64, device=device, dtype=torch.bfloat16) for n in (H, K, H))
    scores, cover = Scores(0.1), Pairs(Mask(), at, at)
    out, lse = flex._forward(q.requires_grad_(), k.requires_grad_(), k, cover, scores)
    tile = BackwardTile(dout, q, k, k, None, lse, torch.zeros_like(lse), cover, scores)
    *grads, _ = flex._backward(tile)
    for x in (out, lse, *grads):
        assert x.dtype == torch.float32 and not x.requires_grad


def compared(
    S: int, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, device: str,
    index: Callable[..., Tensor], ring: tuple[Layout, Mask, int] = (Striped(), Mask(), 2),
) -> list[float]:  # fmt: skip
    """Of a learned table at an index, causal: the distance of each result from the reference kernel's."""
    (H, K), (D, Dv) = heads, dims
    generator = torch.Generator(device).manual_seed(0)
    shapes = (1, H, S, D), (1, K, S, D), (1, K, S, Dv), (1, H, S, Dv), (H, 2 * S)
    *x, table = (torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes)
    table = table.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    score_mod, captured = trace("score_mod", lambda s, b, h, i, j: s + table[h, index(i, j)], x[0])
    wanted = frozenset({name_of_captured(0)})
    scores = Scores(
        D**-0.5, score_mod=score_mod, captured=tuple(y.detach() for y in captured), wanted=wanted, seq_len=S
    )
    with mock.patch.object(flex_programs, "one_rank_compiles", nullcontext):
        found, want = (play_ring(KERNELS[name], *ring, *x, scores=scores) for name in ("flex", "reference"))
    return [float(((y - z).norm() / z.norm()).detach()) for y, z in zip(found, want, strict=True)]


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("dims", [(16, 16), (17, 17), (24, 24), (80, 80), (100, 100), (96, 96), (192, 128), (256, 256)])
def test_dims_of_heads(dims: tuple[int, int], dtype: torch.dtype) -> None:
    gaps = compared(300, (4, 2), dims, dtype, "cuda", lambda i, j: i - j + 300)
    assert max(gaps) <= (1e-5 if dtype == FP32 else 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(2, 2), (4, 1)])
@pytest.mark.parametrize("S", [2, 4, 6, 10])
def test_short_sequences(S: int, heads: tuple[int, int]) -> None:
    """Down to tiles of one query and one key."""
    assert max(compared(S, heads, (64, 64), FP16, "cuda", lambda i, j: i - j + S)) <= 1e-2


def of_one_row(device: str, dtype: torch.dtype, num_ranks: int, S: int, mask: Mask) -> list[float]:
    """A last rank with one row beside others with many, and documents of one token."""
    return compared(S, (4, 2), (64, 64), dtype, device, lambda i, j: i - j + S, (Contiguous(), mask, num_ranks))


ONE_ROW = (4, 13, Mask(length=12)), (3, 5, Mask(length=4)), (4, 13, Mask(documents=torch.arange(13) // 5 * (-1) + 3))


@pytest.mark.gpu
@pytest.mark.parametrize("case", ONE_ROW, ids=["13 on 4", "5 on 3", "documents"])
def test_one_query_of_many_keys_and_one_key_of_many_queries(case: tuple[int, int, Mask]) -> None:
    assert max(of_one_row("cuda", FP16, *case)) <= 1e-2


@pytest.mark.full
def test_tiles_of_one_row() -> None:
    for case in ONE_ROW:
        assert max(of_one_row("cpu", torch.float64, *case)) <= 1e-6


@pytest.mark.gpu
def test_products_of_positions_beyond_32_bits() -> None:
    assert max(compared(49152, (1, 1), (64, 64), BF16, "cuda", lambda i, j: i * j % 65537)) <= 1e-2


def test_the_two_kernels_are_compared() -> None:
    assert max(compared(20, (2, 1), (16, 8), torch.float64, "cpu", lambda i, j: i * j % 17)) <= 1e-6


@pytest.mark.full
def test_error_is_that_of_plain_products_on_the_cpu() -> None:
    print(check(Case("relative table", "causal or of one image", "padding"), 130, torch.device("cpu")))
