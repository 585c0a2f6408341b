"""CUDA kernels against plain products in fp64 and in their own dtype, on one GPU.

All ranks of a ring are played in turn by one process, through the same plans and passes but with no communication, so
that every tile which a kernel meets in a ring is met here.
"""

import itertools

import pytest
import torch
from inside import (
    CAUSAL,
    FULL,
    KERNELS,
    METHODS,
    AttentionSpec,
    Distances,
    KernelTile,
    MergingForward,
    Plan,
    Request,
    Scores,
    StageSettings,
    SummingBackward,
    Tensors,
    dense_attention,
    inner,
    make_delta,
    make_schedule,
    make_scores,
    shortfalls,
    travels_rounded,
)

from cp_mesh import Contiguous, Layout, Mask, Striped, ZigZag

ScoreGradients = inner("scores", "ScoreGradients")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

RESULTS = ("out", "lse", "dq", "dk", "dv")
KERNEL_DTYPES = [("cudnn", "bfloat16"), ("cudnn", "float16"), ("fa2", "bfloat16"), ("fa2", "float16")]
KERNEL_DTYPES += [("reference", "float32")]


def play_ring(
    kernel, layout: Layout, mask: Mask, cp_size: int, q, k, v, dout, segments: bool = False, scores=None
) -> list[torch.Tensor]:
    """(out, lse, dq, dk, dv) of the whole sequence, in original order; then those gradients that scores want."""
    seq_len, dtype = q.shape[2], torch.float64 if q.dtype == torch.float64 else torch.float32
    options = AttentionSpec(layout.spec(), mask.spec(), q.shape[3] ** -0.5)
    scores = make_scores(options, Tensors(), q.dtype) if scores is None else scores
    of_scores = ScoreGradients.zeros(scores, dtype)
    rows = [layout.positions(seq_len, cp_size, rank).to(q.device) for rank in range(cp_size)]
    out, dq = torch.empty_like(dout), torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=dtype, device=q.device)
    dk, dv = torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
    for rank in range(cp_size):
        schedule = make_schedule(layout, mask, seq_len, cp_size, rank, segments)
        plan = Plan(
            options,
            layout,
            mask,
            seq_len,
            schedule,
            kernel,
            scores.features,
            q.device,
            METHODS["ring"],
            StageSettings(1, q.dtype),
        )
        fetched = [(rows[rank], plan.tiles(None))]
        for stage in schedule.route.stages:
            if stage.fetch:
                index = [rows[source][begin:end] for source, ranges in stage.fetch for begin, end in ranges]
                fetched.append((torch.cat(index), plan.tiles(stage)))
        local = [x[:, :, rows[rank]] for x in (q, dout)]
        forward = MergingForward(kernel, local[0], v.shape[3], scores)
        for index, tiles in fetched:
            forward.step(k[:, :, index], v[:, :, index], tiles)
        out[:, :, rows[rank]], lse[:, :, rows[rank]] = forward.finish()
        out_rows, lse_rows = out[:, :, rows[rank]], lse[:, :, rows[rank]]
        delta = make_delta(local[1], out_rows) if kernel.uses_delta else None
        backward = SummingBackward(kernel, local[1], local[0], out_rows, lse_rows, delta, scores)
        wire = q.dtype if travels_rounded(kernel, schedule, scores.features) else dtype
        for index, tiles in fetched:
            written = [torch.empty_like(x[:, :, index], dtype=wire) for x in (k, v)]
            backward.step(k[:, :, index], v[:, :, index], tiles, tuple(written))
            for total, part in zip((dk, dv), written, strict=True):
                total.index_add_(2, index, part.to(dtype))
        dq[:, :, rows[rank]] = backward.dq.finish(torch.empty_like(local[0]))
        of_scores.add_(backward.of_scores)
    return [out, lse, dq, dk.to(k.dtype), dv.to(v.dtype), *of_scores.values()]


def block_rms(x: torch.Tensor, block: int = 128) -> torch.Tensor:
    """RMS per block of rows and head: [B, H, blocks]."""
    x = x.double() if x.ndim == 4 else x.double()[..., None]
    return torch.stack([part.square().mean(dim=(2, 3)).sqrt() for part in x.split(block, dim=2)], dim=-1)


@pytest.mark.parametrize(("name", "dtype"), KERNEL_DTYPES)
@pytest.mark.parametrize("layout", [Contiguous(), ZigZag(), Striped()], ids=lambda layout: layout.spec())
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("seq_len", "heads", "kv_heads", "head_dim"), [(1024, 4, 4, 64), (1030, 8, 2, 128), (9, 4, 2, 64)]
)
def test_error_is_that_of_one_device(name, dtype, layout, causal, seq_len, heads, kv_heads, head_dim) -> None:
    """9 tokens give tiles of one key; errors of so few rows scatter, so that those of all heads are one block."""

    def rms(x: torch.Tensor) -> torch.Tensor:
        return block_rms(x) if seq_len >= 128 else x.double().square().mean().sqrt()

    generator = torch.Generator("cuda").manual_seed(seq_len)

    def draw(num_heads: int) -> torch.Tensor:
        shape = (2, num_heads, seq_len, head_dim)
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.float64).to(getattr(torch, dtype))

    q, k, v, dout = draw(heads), draw(kv_heads), draw(kv_heads), draw(heads)
    mask, kernel, scores = Mask(causal=causal), KERNELS[name], Scores(head_dim**-0.5)
    exact = dense_attention(*(x.double() for x in (q, k, v, dout)), mask, scores)
    plain = dense_attention(q, k, v, dout, mask, scores)
    one_device = play_ring(kernel, Contiguous(), mask, 1, q, k, v, dout)
    ring = play_ring(kernel, layout, mask, 4, q, k, v, dout)
    for what, single, got in zip(RESULTS, one_device, ring, strict=True):
        want, dense = getattr(exact, what), getattr(plain, what)
        assert got.isfinite().all(), what
        # 1e-6 of the signal: the rounding of fp32 sums, where the single-device error happens to be less
        rounding = 1e-6 * rms(want)
        of_plain = 2.0 * rms(dense - want) + rounding
        of_single = 1.5 * rms(single - want) + rounding
        for whose, x, allowed in (("one device", single, of_plain), ("ring", got, torch.minimum(of_plain, of_single))):
            excess = (rms(x - want) / allowed).max().item()
            assert excess <= 1, f"{what} of {whose}: {excess:.2f} times the allowed error"


@pytest.mark.parametrize("layout", [Contiguous(), ZigZag(), Striped()], ids=lambda layout: layout.spec())
@pytest.mark.parametrize("window", [None, (100, None)])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 64), (8, 2, 128)])
def test_documents_as_sequences(layout, window, heads, kv_heads, head_dim) -> None:
    """Tokens alone, primes, one document longer than a shard, and rows outside of every sequence of a call."""
    kernel, seq_len = KERNELS["fa4"], 1030
    if lacking := kernel.capability.lacking():
        pytest.skip(lacking)
    generator = torch.Generator("cuda").manual_seed(heads)

    def draw(num_heads: int) -> torch.Tensor:
        shape = (2, num_heads, seq_len, head_dim)
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.float64).to(torch.bfloat16)

    q, k, v, dout = draw(heads), draw(kv_heads), draw(kv_heads), draw(heads)
    lens = [[1, 1, 131, 7, 600, 2, 288], [300, 1, 1, 129, 127, 128, 344]]
    ids = torch.stack([torch.repeat_interleave(torch.arange(7), torch.tensor(row)) for row in lens])
    mask = Mask(documents=ids, window=window)
    scores, on_device = Scores(head_dim**-0.5), mask.to(q.device)
    exact = dense_attention(*(x.double() for x in (q, k, v, dout)), on_device, scores)
    plain = dense_attention(q, k, v, dout, on_device, scores)
    one_device = play_ring(kernel, Contiguous(), mask, 1, q, k, v, dout, segments=True)
    ring = play_ring(kernel, layout, mask, 4, q, k, v, dout, segments=True)
    for what, single, got in zip(RESULTS, one_device, ring, strict=True):
        want, dense = getattr(exact, what), getattr(plain, what)
        assert got.isfinite().all() and single.isfinite().all(), what
        # dq of a token alone is 0, and a document of one token has errors of any ratio: signal counts as in `verify`
        signal = block_rms(want)

        def bound(x: torch.Tensor, factor: float, want=want, signal=signal) -> torch.Tensor:
            relative = (x.double() - want).square().mean().sqrt() / want.square().mean().sqrt()
            return factor * torch.maximum(block_rms(x - want), relative * signal) + 1e-6 * signal

        of_plain = bound(dense, 2.0)
        allowed = torch.minimum(of_plain, bound(single, 1.5))
        for whose, x, most in (("one device", single, of_plain), ("ring", got, allowed)):
            excess = (block_rms(x - want) / most).max().item()
            assert excess <= 1, f"{what} of {whose}: {excess:.2f} times the allowed error"


def both_passes(kernel, q, k, v, dout, tiles: list[KernelTile], scores: Scores) -> list[torch.Tensor]:
    """(out, lse, dq, dk, dv) of one step."""
    forward = MergingForward(kernel, q, v.shape[3], scores)
    forward.step(k, v, tiles)
    out, lse = forward.finish()
    delta = make_delta(dout, out) if kernel.uses_delta else None
    backward = SummingBackward(kernel, dout, q, out, lse, delta, scores)
    written = [torch.empty_like(x) for x in (k, v)]
    backward.step(k, v, tiles, tuple(written))
    return [out, lse, backward.dq.finish(torch.empty_like(q)), *written]


STOCK = ("cudnn", "fa2")  # which are not compiled for each head dim and number of heads


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("name", [*STOCK, "triton", "fa4"])
def test_rows_of_every_remainder(name: str, window: int | None) -> None:
    """The last rows of a sequence see earlier keys by a full tile or a window, and themselves by a causal square.

    Scores are ordinary, or so low that exp(-lse) overflows float32, where cuDNN returns NaN for some tiles.
    """
    kernel, heads, batch, dtype = KERNELS[name], 4, 2, torch.bfloat16
    covers = frozenset({"causal", "window" if window else "full"})
    request = Request("cuda", torch.cuda.get_device_capability(), dtype, covers, 64, 64, False, False)
    if lacks := shortfalls(kernel.capability, request):
        pytest.skip("; ".join(lacks))
    some = [(kv_heads, dim) for kv_heads in (1, 2, 4) for dim in (64, 128)] if name in STOCK else [(2, 64)]
    cases = [(128 + r, 128 + (5 * r + 1) % 128, some[r % len(some)]) for r in range(128)]
    cases += [(rows, keys, x) for rows, keys in ((64, 97), (97, 64), (192, 192), (1, 64), (1, 128)) for x in some]
    generator, wrong = torch.Generator("cuda").manual_seed(0), []
    for (rows, keys, (kv_heads, dim)), low in itertools.product(cases, (False, True)):
        shape, scores = (rows + keys, dim), Scores(dim**-0.5)
        q, k, v, dout = (
            torch.randn(batch, n, *shape, generator=generator, device="cuda").to(dtype)
            for n in (heads, kv_heads, kv_heads, heads)
        )
        dout[:, :, :keys] = 0.0
        if low:
            q[..., 0], k[..., 0] = 1.0, 0.0
        mask = Mask(window=window and (window, None))
        exact = vars(dense_attention(*(x.double() for x in (q, k, v, dout)), mask, scores))
        plain = vars(dense_attention(q, k, v, dout, mask, scores))
        if low:  # of all pairs alike, so that lse alone changes
            k[..., 0] = -128 * dim**0.5
            exact["lse"] += (below := k[0, 0, 0, 0].double() * scores.scale)
            plain["lse"] = plain["lse"] + below
        cover = Distances(None, window - keys).band(rows, keys) if window else FULL
        tiles = [KernelTile((0, rows), (0, keys), cover), KernelTile((0, rows), (keys, rows + keys), CAUSAL)]
        results = both_passes(kernel, q[:, :, keys:], k, v, dout[:, :, keys:], tiles, scores)
        for what, got in zip(RESULTS, results, strict=True):
            of_rows = slice(None) if what in ("dk", "dv") else slice(keys, None)
            want, dense = (x[what][:, :, of_rows] for x in (exact, plain))
            worst = torch.inf
            if got.isfinite().all():
                if low and what == "dq":  # a sum of dS, which is 0, times this column of k: rounding alone
                    got, want, dense = (x[..., 1:] for x in (got, want, dense))
                error, of_plain, signal = (
                    x.double().square().mean().sqrt().item() for x in (got - want, dense - want, want)
                )
                worst = error / (2.0 * of_plain + 1e-6 * signal)
            if worst > 1:
                wrong.append(f"{what}: {worst:.2f} times the allowed error; {rows=} {keys=} {low=} {kv_heads=} {dim=}")
    assert not wrong, "\n".join([f"{len(wrong)} of {10 * len(cases)} results", *wrong[:40]])


@pytest.mark.parametrize("rows_first", [True, False])
@pytest.mark.parametrize("name", [name for name, x in KERNELS.items() if x.capability.covers[0] == "full"])
def test_large_tensors(name: str, rows_first: bool) -> None:
    """More than 2**31 elements, in both orders of dims: the results of the same heads a few at a time.

    cuDNN's own backward fails this, which is why it gets few heads of such tensors.
    """
    heads, kv_heads, seq_len, dim, few = 4096, 1024, 4200, 128, 32
    capability = KERNELS[name].capability
    if lacks := capability.lacking() or (capability.devices[0] == "cpu" and "it runs on the CPU"):
        pytest.skip(lacks)
    dtype, gib = torch.bfloat16, 50
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < gib << 30:
        pytest.skip(f"needs {gib} GiB")
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(num: int) -> torch.Tensor:
        shape = (1, seq_len, num, dim) if rows_first else (1, num, seq_len, dim)
        x = torch.empty(shape, dtype=dtype, device="cuda")
        for part in x.unbind(1):
            part.normal_(generator=generator)
        return x.transpose(1, 2) if rows_first else x

    def passes(*given: torch.Tensor) -> list[torch.Tensor]:
        tiles = [KernelTile((0, seq_len), (0, seq_len), CAUSAL)]
        return both_passes(KERNELS[name], *given, tiles, Scores(dim**-0.5))

    given = [draw(heads), draw(kv_heads), draw(kv_heads), draw(heads)]
    assert given[0].numel() > 2**31
    whole = passes(*given)
    for first in (0, heads // 2, heads - few):
        of_q, of_kv = slice(first, first + few), slice(first // 4, (first + few) // 4)
        cut = (of_q, of_kv, of_kv, of_q)
        few_heads = passes(*(x[:, part].contiguous() for x, part in zip(given, cut, strict=True)))
        for what, x, y, part in zip(RESULTS, whole, few_heads, (of_q, of_q, of_q, of_kv, of_kv), strict=True):
            error = (x[:, part].float() - y.float()).abs().max() / y.float().abs().max()
            assert error <= 2**-8, (what, first, error.item())  # fa2 and cuDNN add dq in any order
