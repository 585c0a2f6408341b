"""The low-precision gate: sharding may cost half of a kernel's rounding error, a kernel twice the plain formula's.

    torchrun --nproc-per-node 2 tests/test_gpu.py             # a table; exits with 1 if any line fails
    torchrun --nproc-per-node 2 tests/test_gpu.py --scores    # that of masks and scores; every backward 20 times
    torchrun --nproc-per-node 2 tests/test_gpu.py --flex      # that of functions of users
    torchrun --nproc-per-node 4 tests/test_gpu.py --one-gpu   # ranks that share a GPU
    pytest tests/test_gpu.py                                  # a small part of it on the CPU

Errors are RMS over blocks of 128 rows of a head, against fp64, of the sequence in its original order. They are compared
with those of the same kernel on a mesh of one rank that sees the whole sequence, and both with those of plain matrix
products of the same dtype, which share no code with the kernel: an error of the kernel itself must not pass for
rounding. Masks and scores are compared by `cp_mesh.tools.verify`, whose rules differ for few rows, and for blocks that
one device rounded by luck. Functions of users, and gradients of what they read, are compared with plain products alone;
`test_flex_gpu.py` has one GPU's flex_attention.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense import dense_attention
from flex_uses import MASKS, SCORES, as_kernels, dense
from gpu import part_of
from ranks import device, join_on_gpus, mesh
from torch import Tensor

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # torchrun of a checkout that is not installed

from inside import KERNELS as TABLE
from inside import METHODS, Scores
from inside import dense_attention as plain_products

from cp_mesh import Contiguous, Mask, Striped, ZigZag, attention, balance, flex_attention
from cp_mesh.flex import create_block_mask
from cp_mesh.tools import VerificationError, verify

BLOCK = 128
FACTOR = 1.5
PLAIN_FACTOR = 2.0
FP32_ROUNDING = 1e-6  # of the signal: what sums in fp32 may add, where the error of one device happens to be less
B = 2
NAMES = ("out", "dq", "dk", "dv")
LAYOUTS = {"contiguous": Contiguous(), "zigzag": ZigZag(), "striped": Striped()}
FLASH = [name for name in ("fa4",) if TABLE[name].capability.lacking() is None]
KERNELS = {
    "cuda": [(kernel, dtype) for kernel in ("cudnn", "fa2", *FLASH) for dtype in ("bfloat16", "float16")],
    "cpu": [("cpu_flash", "bfloat16"), ("cpu_flash", "float16"), ("cpu_flash", "float32")],
}
HEADS = [(8, 8), (8, 2)]
HEAD_DIMS = [64, 128]
LENGTHS = [1024, 2050]  # over two ranks 512 and 1025 rows each


@dataclass(frozen=True)
class Case:
    kernel: str
    dtype: str
    layout: str
    causal: bool
    heads: tuple[int, int]
    head_dim: int
    seq_len: int
    compiled: bool = False

    def __str__(self) -> str:
        mode, mask = "compiled" if self.compiled else "eager", "causal" if self.causal else "full"
        (H, K), D = self.heads, self.head_dim
        return f"{self.kernel:10}{self.dtype:9} {self.layout:11}{mask:7} H{H} K{K} D{D:<4} S{self.seq_len:<5} {mode:9}"


def cases(kernel: str, dtype: str, lengths: list[int] = LENGTHS) -> Iterator[Case]:
    """Eager: the whole product. Compiled: what a graph could change, each layout and mask at one size."""
    # Cases that differ in the layout alone share their fp64 reference, so the layout varies fastest.
    for heads, head_dim, seq_len, causal, layout in itertools.product(
        HEADS, HEAD_DIMS, lengths, (True, False), LAYOUTS
    ):
        yield Case(kernel, dtype, layout, causal, heads, head_dim, seq_len)
    for causal, layout in itertools.product((True, False), LAYOUTS):
        yield Case(kernel, dtype, layout, causal, HEADS[-1], HEAD_DIMS[0], lengths[-1], compiled=True)


def problem(case: Case) -> Case:
    """The case without what leaves its inputs and its one-device figures as they are: the key of their caches."""
    return replace(case, layout="", compiled=False)


@functools.lru_cache(maxsize=1)
def inputs(case: Case) -> list[Tensor]:
    """q, k, v, dout of the whole sequence, the same on every rank.

    Standard normal: with heavier tails a few rows decide a block's error, and the ratio of two errors is luck.
    """
    (H, K), S, D = case.heads, case.seq_len, case.head_dim
    generator = torch.Generator().manual_seed(S + D + H + K)
    whole = (torch.randn(B, heads, S, D, generator=generator) for heads in (H, K, K, H))
    return [x.to(device(), getattr(torch, case.dtype)) for x in whole]


def attend(case: Case, axis: Any, layout: Any, tensors: list[Tensor]) -> list[Tensor]:
    """out, dq, dk, dv of this rank's rows."""
    q, k, v, dout = (x.detach() for x in tensors)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    mask, seq_len, kernel = Mask(causal=case.causal), case.seq_len, case.kernel

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, mesh=axis, seq_len=seq_len, layout=layout, mask=mask, kernel=kernel)

    if case.compiled:
        torch._dynamo.reset()  # every case is a first one: no limit on recompilation is met
        call = torch.compile(call, fullgraph=True)
    out = call(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


@functools.lru_cache(maxsize=1)
def one_device(case: Case) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """For out, dq, dk, dv: the fp64 result, and by block the error of the kernel on one rank, that which plain products
    allow it, and the signal."""
    q, k, v, dout = inputs(case)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    pairs = torch.ones(1, case.seq_len, case.seq_len, dtype=torch.bool, device=q.device)
    out, _ = dense_attention(*leaves, pairs.tril() if case.causal else pairs)
    exact = [out.detach(), *torch.autograd.grad(out, leaves, dout.double())]
    dense = plain_products(q, k, v, dout, Mask(causal=case.causal), Scores(case.head_dim**-0.5))
    alone = mesh((dist.get_world_size(), 1), ("others", "alone"))["alone"]
    single = attend(case, alone, Contiguous(), [q, k, v, dout])
    rows, found = torch.arange(case.seq_len, device=q.device), []
    for name, got, want in zip(NAMES, single, exact, strict=True):
        plain, own, signal = (
            block_squares(x, rows, want).sqrt() for x in (getattr(dense, name) - want, got - want, want)
        )
        found.append((want, own, PLAIN_FACTOR * plain + FP32_ROUNDING * signal, signal))
    return found


def block_squares(x: Tensor, rows: Tensor, whole: Tensor) -> Tensor:
    """Mean squares of x over the blocks of every head of ``whole``: [H, num_blocks].

    Args:
        x: [B, H, S_local, D], the rows at positions ``rows``; means over all ranks' rows are sums of these.
        rows: int64 [S_local].
        whole: [B, H, S, D]; rows beyond its last whole block count to that block.
    """
    num_blocks = max(1, whole.shape[2] // BLOCK)
    block = (torch.arange(whole.shape[2], device=x.device) // BLOCK).clamp(max=num_blocks - 1)
    sums = x.new_zeros(x.shape[1], num_blocks).index_add_(1, block[rows], x.square().sum(dim=(0, 3)))
    return sums / (block.bincount() * whole.shape[0] * whole.shape[3])


def worst_ratios(case: Case) -> dict[str, tuple[float, float, float]]:
    """By result: the worst ratio over blocks of the sharded error to that of one rank, of the error of one rank to what
    plain products allow it, and of the sharded error to the allowed one. The same on every rank.
    """
    size, layout = dist.get_world_size(), LAYOUTS[case.layout]
    rows = layout.positions(case.seq_len, size, dist.get_rank()).to(device())
    reference, tensors = one_device(problem(case)), inputs(problem(case))
    sharded = attend(case, mesh((size,), ("cp",)), layout, [x[:, :, rows].contiguous() for x in tensors])
    worst = {}
    for name, got, (want, single, of_plain, signal) in zip(NAMES, sharded, reference, strict=True):
        squares = block_squares(got.double() - want[:, :, rows], rows, want)
        dist.all_reduce(squares)
        error = squares.sqrt()
        allowed = torch.minimum(FACTOR * single + FP32_ROUNDING * signal, of_plain)
        ratios = error / single, single / of_plain, error / allowed
        worst[name] = tuple(ratio.max().nan_to_num(torch.inf).item() for ratio in ratios)
    return worst


def run_gate(rank: int, chosen: list[Case], echo: bool = False) -> list[dict[str, tuple[float, float, float]]]:
    """The figures of every case, printed as they come where asked."""
    torch.backends.cuda.matmul.allow_tf32 = False
    results = []
    for case in chosen:
        results.append(worst_ratios(case))
        if echo and rank == 0:
            print(line(case, results[-1]), flush=True)
    return results


def passes(figures: dict[str, tuple[float, float, float]]) -> bool:
    return all(of_plain <= 1.0 and of_allowed <= 1.0 for _, of_plain, of_allowed in figures.values())


def line(case: Case, figures: dict[str, tuple[float, float, float]]) -> str:
    ratios = "  ".join(f"{name} {of_single:4.2f}/{of_plain:4.2f}" for name, (of_single, of_plain, _) in figures.items())
    return f"{case}  {ratios}  {'ok' if passes(figures) else 'WRONG'}"


@dataclass(frozen=True)
class Scored:
    """A mask and features of the scores for `cp_mesh.tools.verify`."""

    kernel: str
    dtype: str
    layout: str
    mask: str
    features: tuple[str, ...]
    head_dim: int = 128
    seq_len: int = 2050
    method: str = "auto"

    def __str__(self) -> str:
        words = "+".join(self.features) or "none"
        method = "" if self.method == "auto" else f" by {self.method}"
        return f"{self.kernel:10}{self.dtype:9} {self.layout:11}{self.mask:10} D{self.head_dim:<4} {words:44}{method}"


LEARNED = ("sinks", "alibi_slopes", "bias")
FEATURES = ("softcap", *LEARNED, "dropout_p")
SCORED_HEADS = (8, 2)


def scores(case: Scored) -> dict[str, Any]:
    """The options of the features, equal on every rank."""
    H, S = SCORED_HEADS[0], case.seq_len
    generator = torch.Generator().manual_seed(1)
    given = {
        "softcap": 5.0,
        "sinks": torch.randn(H, generator=generator),
        "alibi_slopes": 2.0 ** -torch.arange(1, H + 1),
        "bias": torch.randn(1, H, S, S, generator=generator).bfloat16(),
        "dropout_p": 0.1,
    }
    return {name: given[name] for name in case.features}


def masks(case: Scored) -> Mask:
    lens = [1, 17, case.seq_len // 3, 130 if case.seq_len > 1000 else 7, 64]
    documents = torch.repeat_interleave(torch.arange(6), torch.tensor([*lens, case.seq_len - sum(lens)]))[None]
    return {
        "causal": Mask(),
        "full": Mask(causal=False),
        "window": Mask(window=(300, None)),
        "documents": Mask(documents=documents),
        "padding": Mask(key_padding=torch.arange(case.seq_len) % 7 != 3),
    }[case.mask]


def scored_cases(kernels: tuple[str, ...]) -> Iterator[Scored]:
    """What a kernel has, alone and all at once."""
    for kernel in kernels:
        has = TABLE[kernel].capability
        known = tuple(x for x in FEATURES if x == "sinks" or x.removesuffix("_p") in has.features)
        takes = {"causal": "causal", "window": "window", "documents": "segments", "padding": "pairs"}
        able = [mask for mask, cover in takes.items() if {cover, "pairs"} & set(has.covers)]
        some = [((), mask, layout) for mask in able for layout in ("zigzag", "striped", "balanced")]
        some += [((name,), "causal", "zigzag") for name in known]
        some += [(known, mask, "striped" if mask == "causal" else "balanced") for mask in able if known]
        for features, mask, layout in some:
            yield Scored(kernel, "bfloat16", layout, mask, features)
        yield Scored(kernel, "float16", "zigzag", able[-1], known)
        for method in METHODS:
            if method != "ring":
                for features, mask in (((), able[0]), ((), able[-1]), (known, able[0])):
                    yield Scored(kernel, "bfloat16", "zigzag", mask, features, method=method)


def run_scored(rank: int, chosen: list[Scored], echo: bool = False) -> list[tuple[float, str]]:
    """By case the largest error over what is allowed (inf if it is NaN), sharded and on one rank, and its line."""
    axis, results = mesh((dist.get_world_size(),), ("cp",)), []
    for case in chosen:
        mask = masks(case)
        balanced = case.layout == "balanced"
        of_mask = replace(mask, key_padding=None)
        layout = balance(of_mask, case.seq_len, axis.size()) if balanced else LAYOUTS[case.layout]
        H, K = SCORED_HEADS
        try:
            report = verify(
                axis, layout=layout, mask=mask, scores=scores(case), seq_len=case.seq_len, num_heads=H,
                num_kv_heads=K, head_dim=case.head_dim, dtype=getattr(torch, case.dtype), kernel=case.kernel,
                method=case.method,
            )  # fmt: skip
        except VerificationError as error:
            report = error.report
        worst = max(*report.ratios.values(), *report.of_one_device.values())
        ratios = "  ".join(
            f"{name} {ratio:4.2f}/{report.of_one_device[name]:4.2f}" for name, ratio in report.ratios.items()
        )
        results.append((worst, f"{case}  {ratios}  {'ok' if worst <= 1 else 'WRONG'}"))
        if echo and rank == 0:
            print(results[-1][1], flush=True)
    return results


def repeats(
    rank: int, kernel: str, mask: str, features: tuple[str, ...], times: int, head_dim: int = 64, kv_heads: int = 2
) -> bool:
    """Whether out and every gradient are bitwise the same in each of some runs, between which others run."""
    on_gpu = device().type == "cuda"
    dtype_name, seq_len = ("bfloat16", 2050) if on_gpu else ("float32", 258)
    case = Scored(kernel, dtype_name, "zigzag", mask, features, head_dim, seq_len)
    axis, dtype = mesh((dist.get_world_size(),), ("cp",)), getattr(torch, case.dtype)
    rows = ZigZag().positions(case.seq_len, axis.size(), axis.get_local_rank())
    generator = torch.Generator().manual_seed(2)
    whole = (torch.randn(B, n, seq_len, head_dim, generator=generator) for n in (8, kv_heads, kv_heads, 8))
    q, k, v, dout = (x[:, :, rows].to(device(), dtype) for x in whole)
    given = {name: x.to(device()) if isinstance(x, Tensor) else x for name, x in scores(case).items()}
    if "bias" in given:
        given["bias"] = given["bias"][:, :, rows.to(device())]
    seed = {"dropout_seed": 7} if "dropout_p" in given else {}
    leaves = [x.requires_grad_() for x in (q, k, v, *(x for x in given.values() if isinstance(x, Tensor)))]
    options = {"layout": ZigZag(), "mask": masks(case), "kernel": kernel, "deterministic": True} | seed

    def run() -> list[Tensor]:
        out = attention(q, k, v, mesh=axis, seq_len=case.seq_len, **given, **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    first, same = run(), True
    for _ in range(times - 1):
        attention(k.detach(), k.detach(), v.detach(), mesh=axis, seq_len=case.seq_len, kernel=kernel)
        same &= all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))
    return same


@dataclass(frozen=True)
class Function:
    """Functions of `flex_uses`.

    ``mask``: "causal" is a `Mask`, others are mask_mods.
    """

    score: str
    mask: str
    method: str
    layout: str
    transport: str
    dtype: str = "bfloat16"
    kernel: str = "flex"

    def __str__(self) -> str:
        words = f"{self.kernel:10}{self.dtype:9} {self.layout:11}{self.method:11}{self.transport:17}"
        return f"{words}{self.score}, {self.mask}"


FUNCTION_FACTOR = 1.35  # of the error of plain products, which round scores too
TRANSPORTS = {"cuda": ("functional", "symmetric_memory"), "cpu": ("functional",)}


def functions(on: str, kernel: str) -> list[Function]:
    """Those that share a compilation follow each other; what matters most comes first."""
    *_, shared = TRANSPORTS[on]
    twice = [("ring", "striped"), ("ulysses", "zigzag"), ("all_gather", "zigzag")]
    chosen = [Function("gate", "windows of heads", "ring", "striped", shared)]
    chosen += [
        Function("relative table", "causal or of one image", method, layout, transport)
        for (method, layout), transport in itertools.product(twice, TRANSPORTS[on])
    ]
    chosen += [
        Function("ALiBi", "causal", "ring", "zigzag", shared),
        Function("one tensor twice", "documents", "ring", "striped", "functional", "float16"),
        Function("bias of documents", "causal", "ring", "striped", shared),
    ]
    chosen = [replace(x, kernel=kernel) for x in chosen]
    return [*chosen, Function("pair bias of low rank", "causal", "ring", "zigzag", shared, kernel="reference")]


def function_errors(case: Function, seq_len: int, head_dim: int) -> dict[str, float]:
    """By result the error over that of plain products, of out, dq, dk, dv and captured tensors: RMS over all ranks."""
    axis, on, dtype = mesh((dist.get_world_size(),), ("cp",)), device(), getattr(torch, case.dtype)
    layout, (H, K), S = LAYOUTS[case.layout], SCORED_HEADS, seq_len
    generator = torch.Generator().manual_seed(3)
    whole = [torch.randn(B, n, S, head_dim, generator=generator).to(on, dtype) for n in (H, K, K, H)]
    rows = layout.positions(S, axis.size(), axis.get_local_rank()).to(on)
    score, pairs = SCORES[case.score], MASKS[case.mask]
    of_score, of_mask = ({name: x.to(on) for name, x in use.tensors(B, H, S).items()} for use in (score, pairs))
    of_score = {name: x.float() if x.is_floating_point() else x for name, x in of_score.items()}
    leaves = [x.double().requires_grad_() for x in whole[:3]]
    learned = [x.requires_grad_() for x in of_score.values() if x.is_floating_point()]
    exact_out, _ = dense(*leaves, case.score, case.mask, of_score, of_mask)
    exact = [exact_out.detach(), *torch.autograd.grad(exact_out, [*leaves, *learned], whole[3].double())]
    rival_out, _, *rival = as_kernels(*whole, case.score, case.mask, of_score, of_mask)
    rival.insert(0, rival_out)
    q, k, v, dout = (x[:, :, rows].detach().contiguous() for x in whole)
    own = {name: x.detach().clone().requires_grad_(x.requires_grad) for name, x in of_score.items()}
    leaves = [x for x in own.values() if x.requires_grad]
    seen = None if case.mask == "causal" else create_block_mask(pairs.make(of_mask), B, H, S, S)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = flex_attention(
        q, k, v, score.make(own), seen, enable_gqa=True, mesh=axis, seq_dim=2, seq_len=S, layout=layout,
        mask=Mask(causal=seen is None), method=case.method, kernel=case.kernel, transport=case.transport,
    )  # fmt: skip
    found = [out.detach(), *torch.autograd.grad(out, [q, k, v, *leaves], dout)]
    learned_names = [name for name, x in of_score.items() if x.is_floating_point()]
    ratios = {}
    for i, name in enumerate((*NAMES, *learned_names)):
        got, want, other = found[i].double(), exact[i], rival[i].double()
        if i < len(NAMES):
            want, other = want[:, :, rows], other[:, :, rows]
        else:
            dist.all_reduce(got)
        squares = torch.stack([x.double().square().sum() for x in (got - want, other - want, want)])
        dist.all_reduce(squares)
        error, of_plain, signal = squares.sqrt().tolist()
        ratios[name] = error / (FUNCTION_FACTOR * of_plain + FP32_ROUNDING * signal) if signal else torch.inf
    return ratios


def run_functions(rank: int, chosen: list[Function], seq_len: int, head_dim: int, echo: bool = False) -> list[Any]:
    """By case the largest error over what is allowed, and its line."""
    results = []
    for case in chosen:
        ratios = function_errors(case, seq_len, head_dim)
        worst = max(torch.inf if x != x else x for x in ratios.values())
        words = "  ".join(f"{name} {ratio:4.2f}" for name, ratio in ratios.items())
        results.append((worst, f"{case}  {words}  {'ok' if worst <= 1 else 'WRONG'}"))
        if echo and rank == 0:
            print(results[-1][1], flush=True)
    return results


REPEATED: list[tuple[str, str, tuple[str, ...], int, int]] = [  # kernel, mask, features, head dim, kv heads
    *(("triton", "documents", x, 64, 2) for x in ((), ("softcap", "sinks"), ("alibi_slopes",), ("bias", "dropout_p"))),
    *(("fa4", mask, ("softcap",), 64, 2) for mask in ("causal", "full") if "fa4" in FLASH),
    *(("fa4", "causal", (), head_dim, n) for head_dim in (128, 256) for n in (2, 8) if "fa4" in FLASH),
]


def assert_right(results: list[tuple[float, str]]) -> None:
    assert not (wrong := [line for worst, line in results if not worst <= 1]), "\n".join(wrong)


@pytest.mark.full
def test_masks_and_scores_on_the_cpu(pool: Any) -> None:
    chosen = [replace(case, head_dim=16, seq_len=258) for case in scored_cases(("reference",))]
    chosen += [Scored("cpu_flash", "bfloat16", "zigzag", "causal", ("sinks",), 16, 258)]
    assert_right(pool(2).run(run_scored, chosen)[0])


@pytest.mark.full
def test_functions_of_users_on_the_cpu(pool: Any) -> None:
    assert_right(pool(2).run(run_functions, functions("cpu", "reference"), 258, 16)[0])


def test_backward_repeats_on_the_cpu(pool: Any) -> None:
    assert all(pool(2).run(repeats, "reference", "documents", ("softcap", "bias", "dropout_p"), 3))


@pytest.mark.parametrize(("kernel", "dtype"), KERNELS["cpu"])
def test_low_precision_gate_on_the_cpu(pool: Any, kernel: str, dtype: str) -> None:
    chosen = [Case(kernel, dtype, layout, causal, (4, 2), 32, 258) for causal in (True, False) for layout in LAYOUTS]
    figures, *_ = pool(2).run(run_gate, chosen)
    wrong = [line(case, result) for case, result in zip(chosen, figures, strict=True) if not passes(result)]
    assert not wrong, "\n".join(["ratios of sharded to single-device error", *wrong])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if on_gpu else "cpu")
    parser.add_argument("--kernel", help="only this one")
    parser.add_argument("--seq-len", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--scores", action="store_true", help="masks and scores instead")
    parser.add_argument("--flex", action="store_true", help="functions of users instead")
    parser.add_argument("--one-gpu", action="store_true", help="all ranks on the first GPU")
    parser.add_argument("--part", help="1/2: one half of the cases")
    args = parser.parse_args()
    if args.device == "cuda":
        join_on_gpus(args.one_gpu)
    else:
        dist.init_process_group("gloo")
    pairs = [pair for pair in KERNELS[args.device] if args.kernel in (None, pair[0])]
    chosen = part_of([case for pair in pairs for case in cases(*pair, args.seq_len)], args.part)
    rank = dist.get_rank()
    if rank == 0:
        hardware = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
        print(f"{dist.get_world_size()} ranks on {hardware}, torch {torch.__version__}")
        rule = f"error over that of one rank, allowed is {FACTOR}, plus {FP32_ROUNDING} of the signal"
        rule = "error over what `cp_mesh.tools.verify` allows" if args.scores else rule
        rule = f"Worst block's {rule} / error of one rank over {PLAIN_FACTOR} times that of plain products."
        rule = f"Error over {FUNCTION_FACTOR} times that of plain products." if args.flex else rule
        print(rule)
    results: list[Any]
    if args.flex:
        on_cpu = args.device == "cpu"
        listed_functions = functions(args.device, args.kernel or ("reference" if on_cpu else "flex"))
        results = run_functions(
            rank, part_of(listed_functions, args.part), max(args.seq_len), 16 if on_cpu else 128, echo=True
        )
        num_wrong = sum(not worst <= 1 for worst, _ in results)
    elif args.scores:
        wanted = ("cudnn", "triton", *FLASH) if args.device == "cuda" else ("cpu_flash", "reference")
        listed = part_of(list(scored_cases(tuple(x for x in wanted if args.kernel in (None, x)))), args.part)
        listed = [replace(case, seq_len=max(args.seq_len)) for case in listed]
        results = run_scored(rank, listed, echo=True)
        num_wrong = sum(not worst <= 1 for worst, _ in results)
        for kernel, mask, features, head_dim, kv_heads in part_of(REPEATED, args.part):
            kernel = kernel if args.device == "cuda" else "reference"
            results.append(repeats(rank, kernel, mask, features, 20, head_dim, kv_heads))
            num_wrong += not results[-1]
            if rank == 0:
                verdict, words = "equal" if results[-1] else "WRONG", "+".join(features) or "none"
                print(f"20 deterministic runs, {kernel}, {mask}, D{head_dim}, {kv_heads} kv heads, {words}: {verdict}")
    else:
        results = run_gate(rank, chosen, echo=True)
        num_wrong = sum(not passes(figures) for figures in results)
    if rank == 0:
        print(f"{len(results) - num_wrong} of {len(results)} cases passed")
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(min(num_wrong, 1))


if __name__ == "__main__":
    main()
