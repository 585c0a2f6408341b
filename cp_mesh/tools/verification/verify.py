"""Verify an attention configuration on the ranks that will train with it.

Every rank draws the same random sequence, runs its shard through `cp_mesh.attention`, forward and backward, and
compares with fp64 attention over the whole sequence (`dense.py`). That reference uses plain matrix products and the
mask's boolean specification, but no layout, schedule, kernel or transport. ``torchrun --nproc-per-node 8 -m cp_mesh``
runs this for several layouts and masks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cp_mesh.call.function import attention, with_degree
from cp_mesh.call.method import Backward
from cp_mesh.call.plan import make_plan
from cp_mesh.call.ring_loop import begin_backward
from cp_mesh.call.spec import FACTORS, SCORE_OPTIONS, Call, Tensors, make_scores, make_spec, read_keywords, seed_tensor
from cp_mesh.comm.agreement import check_mode
from cp_mesh.comm.groups import as_mesh, flat, is_cp_axis
from cp_mesh.errors import UnsupportedError, refuse, typed
from cp_mesh.geometry.layouts import Contiguous, Layout, ZigZag
from cp_mesh.geometry.mask import Mask
from cp_mesh.geometry.schedule import make_schedule
from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.kernels.contract import KernelTile
from cp_mesh.kernels.merge import Kernel, MergingForward, SummingBackward
from cp_mesh.kernels.scores import TERMS, Scores
from cp_mesh.tools.verification.dense import Dense, dense_attention
from cp_mesh.tools.verification.report import ModelReport

BLOCK = 128  # rows of a head per RMS error
NAMES = ("out", "lse", "dq", "dk", "dv")
EXACT = 1e-10  # allowed RMS error in float64
OWN_FACTOR = 1.5  # allowed error, over the error of the same kernel on one device
PLAIN_FACTOR = 2.0  # allowed error, over the error of plain matrix products of the same dtype
SUM_ROUNDING = 1e-6  # allowed beside both, relative to the signal, for sums in float32


class VerificationError(AssertionError):
    """Sharded results differ from one device; ``report`` is the report of `verify` or `verify_model`."""

    def __init__(self, report: Report | ModelReport) -> None:
        super().__init__(str(report))
        self.report = report


@dataclass(frozen=True)
class Report:
    """The errors that `verify` measured, equal on all ranks.

    Attributes:
        kernel: the kernel that ran.
        errors: largest RMS error of a block against fp64, by tensor.
        ratios: largest ratio of a block's error to the allowed error, by tensor; up to 1 passes.
        of_one_device: the same ratio for the kernel on one device, with the limit of plain matrix products. Above 1 the
            kernel is wrong without sharding. Empty for float64.
    """

    kernel: str
    errors: dict[str, float]
    ratios: dict[str, float]
    of_one_device: dict[str, float]

    @property
    def passed(self) -> bool:
        return all(ratio <= 1 for ratio in (*self.ratios.values(), *self.of_one_device.values()))

    def __str__(self) -> str:
        figures = ", ".join(f"{name} {self.errors[name]:.1e} ({self.ratios[name]:.2f})" for name in self.errors)
        wrong = ", ".join(f"{name} ({ratio:.2f})" for name, ratio in self.of_one_device.items() if not ratio <= 1)
        alone = f"; the kernel is wrong on one device too: {wrong}" if wrong else ""
        return f"{'exact' if self.passed else 'WRONG'} [{self.kernel}] RMS error (of allowed): {figures}{alone}"


@typed
def verify(
    mesh: DeviceMesh | dist.ProcessGroup,
    *,
    layout: Layout = ZigZag(),  # noqa: B008 - frozen
    mask: Mask = Mask(causal=True),  # noqa: B008 - frozen
    scores: Mapping[str, Any] | None = None,
    seq_len: int | None = None,
    batch: int = 1,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float64,
    kernel: str = "auto",
    method: str = "auto",
    transport: str = "auto",
    ulysses_degree: int | None = None,
    head_chunks: int | None = None,
    deterministic: bool | None = None,
    seed: int = 0,
) -> Report:
    """Compare sharded attention with attention on one device, in check mode; call it on all ranks.

    It compares RMS errors against fp64, over blocks of 128 rows of a head. In float64 an error may be 1e-10. In lower
    precision it has two limits, each plus 1e-6 of the signal for rounding of float32 sums: 1.5 times the error of the
    same kernel on one device, which bounds what sharding adds; and 2 times the error of plain matrix products of the
    same dtype, which bounds the kernel. The error in a limit is that of the same block, or the head's relative error
    times the block's signal if that is larger: kernels round partial results, so errors of blocks scatter.

    A block has rows of one rank. Below float64, if ranks have fewer than 128 rows on average, it has rows of all ranks,
    in their original order; with fewer than 128 tokens, of several heads. Errors of a few tokens may still scatter by
    more than the limits in half precision, and one wrong head may hide among others: take float64, or more tokens.

    Args:
        mesh: as in `cp_mesh.attention`.
        layout, mask, kernel, method, transport, ulysses_degree, head_chunks, deterministic: as in
            `cp_mesh.attention`; pass the settings of your training. A mask with tensors needs ``seq_len``, their
            length.
        scores: score options by their names in `cp_mesh.attention`: softcap, sinks, alibi_slopes, bias,
            dropout_p, dropout_seed (default 0), and scale. Tensors must be equal on all ranks. A bias is that of the
            whole sequence, [.., S or 1, S] in original order. Gradients of these tensors are compared too.
        seq_len: tokens in the whole sequence; None: 256 per rank. Every rank does O(seq_len²) work.
        batch, num_heads, num_kv_heads, head_dim: sizes of q, k, v.
        dtype: dtype of q, k, v.
        seed: of the random data.

    Returns:
        The errors, equal on all ranks.

    Raises:
        VerificationError: on every rank, if any rank's error is larger than allowed.
        UnsupportedError: below float64, if shards are so short that their kernel cannot compute the whole sequence.

    Example:
        >>> print(verify(mesh["cp"], mask=Mask(window=(17, 0))))  # doctest: +SKIP
        exact [reference] RMS error (of allowed): out 1.9e-16 (0.00), ...
    """
    axes = as_mesh(mesh)
    if not is_cp_axis(axes):
        refuse("verify: mesh", "the 1-D DeviceMesh of the cp axis, or a 2-D one of it", axes, 'pass mesh["cp"]')
    mesh = flat(axes)
    device = torch.device(mesh.device_type, torch.cuda.current_device()) if mesh.device_type == "cuda" else "cpu"
    size, rank, group = mesh.size(), mesh.get_local_rank(), mesh.get_group()
    seq_len = seq_len or 256 * size
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int) -> Tensor:
        # Standard normal: with heavier tails a few rows decide a block's RMS, and the ratio of two RMS is mostly noise.
        shape = (batch, heads, seq_len, head_dim)
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(device, dtype)

    q, k, v, dout = draw(num_heads), draw(num_kv_heads), draw(num_kv_heads), draw(num_heads)
    rows = layout.positions(seq_len, size, rank).to(device)
    local = [x[:, :, rows].detach().requires_grad_() for x in (q, k, v)]
    settings: dict[str, Any] = {"layout": layout, "mask": mask, "kernel": kernel, "transport": transport}
    settings |= {"method": method, "ulysses_degree": ulysses_degree}
    settings |= {"head_chunks": head_chunks, "deterministic": deterministic}
    given = dict(scores or {})
    if unknown := set(given) - {*SCORE_OPTIONS, "scale"}:
        names = f"names of scale, {', '.join(SCORE_OPTIONS)}"
        hint = "see cp_mesh.attention; to test a score_mod, compare with cp_mesh.flex_attention on a mesh of one rank"
        refuse("verify: scores", names, sorted(unknown), hint)
    given = read_keywords(given)
    if given.get("dropout_p"):
        given["dropout_seed"] = seed_tensor(given.get("dropout_seed", 0), device)
    whole_tensors = {name: x.detach().to(device) for name, x in given.items() if isinstance(x, Tensor)}
    if dtype == torch.float64:  # tensors of lower precision would have rounded gradients
        whole_tensors |= {name: x.double() for name, x in whole_tensors.items() if x.is_floating_point()}
    held = {name: x[_own(name, x, rows)] for name, x in whole_tensors.items()}
    leaves = {name: x.clone().requires_grad_() for name, x in held.items() if x.is_floating_point()}
    settings |= given | held | leaves
    with check_mode():
        out = attention(*local, mesh=axes, seq_dim=2, seq_len=seq_len, **settings)
        with torch.no_grad():
            _, lse = attention(*local, mesh=axes, seq_dim=2, seq_len=seq_len, return_lse=True, **settings)
    assert isinstance(out, Tensor)
    grads = torch.autograd.grad(out, [*local, *leaves.values()], dout[:, :, rows])
    scale = given.get("scale") or head_dim**-0.5
    asked = with_degree(axes, {name: settings[name] for name in ("method", "kernel", "ulysses_degree")})
    numbers = {"scale": scale, **{name: given[name] for name in FACTORS if name in given}}
    options = make_spec(layout, mask, deterministic=deterministic, **asked, **numbers)
    call = Call(Tensors.of(mask, layout, **held), seq_len, 2, group.group_name, options)
    plan = make_plan(q[:, :, rows], k[:, :, rows], v[:, :, rows], call, group, call.scores(q).features)
    wide, wanted = accumulation_dtype(dtype), list(leaves)
    on_device = mask.to(q.device)
    in_float64 = _dense_scores(scale, given, whole_tensors, torch.float64)
    exact = dense_attention(q.double(), k.double(), v.double(), dout.double(), on_device, in_float64, wanted)
    plain, alone = None, None
    if dtype != torch.float64:
        plain = dense_attention(q, k, v, dout, on_device, _dense_scores(scale, given, whole_tensors, wide), wanted)
        by_documents = "segments" in plan.schedule.covers
        schedule = make_schedule(Contiguous(), mask, seq_len, 1, 0, by_documents)
        if lacking := sorted(schedule.covers - set(plan.kernel.capability.covers)):
            hint = "pass a larger seq_len, dtype=torch.float64, or the kernel of your training"
            expected = f"a length at which {plan.kernel.name}, which serves the shards, serves one device too"
            refuse("verify: seq_len", expected, f"{seq_len}, with {lacking[0]} tiles", hint, UnsupportedError)
        tiles = replace(plan, layout=Contiguous(), schedule=schedule, prepared={}).tiles(None)
        of_kernel = make_scores(options, Tensors(**whole_tensors), wide)
        alone = _one_device(plan.kernel, tiles, of_kernel, q, k, v, dout, wanted)
    dq, dk, dv, *others = grads
    got = Dense(out.detach(), lse, dq, dk, dv, dict(zip(leaves, others, strict=True)))
    report = _compare(plan.kernel.name, got, exact, plain, alone, rows, group)
    if not report.passed:
        raise VerificationError(report)
    return report


def _own(name: str, x: Tensor, rows: Tensor) -> tuple[Any, ...]:
    """Index of the part of a score tensor that this rank holds: its rows if the tensor has rows, else all."""
    dim = TERMS[name].dim_of("rows", x.shape) if name in TERMS else None
    return (...,) if dim is None else (*[slice(None)] * dim, rows)


def _dense_scores(scale: float, given: Mapping[str, Any], tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Scores:
    """Scores for dense attention, made from the user's arguments directly, not from the parsed options of the call."""
    wide: dict[str, Any] = {name: x.to(dtype) for name, x in tensors.items() if x.is_floating_point()}
    seed = tensors.get("dropout_seed")
    if seed is not None:
        seed = torch.cat([seed.flatten(), seed.new_zeros(2 - seed.numel())])
    return Scores(scale, given.get("softcap"), dropout_p=given.get("dropout_p", 0.0), dropout_seed=seed, **wide)


def _compare(
    kernel: str,
    got: Dense,
    exact: Dense,
    plain: Dense | None,
    alone: Dense | None,
    rows: Tensor,
    group: dist.ProcessGroup,
) -> Report:
    """Compute the report, with the largest errors over all ranks.

    Args:
        kernel: its name.
        got: this rank's rows, and its partial gradients of score tensors.
        exact: float64 results of the whole sequence.
        plain, alone: results of the whole sequence, by plain matrix products of the dtype and by the same kernel on one
            device; None for float64.
        rows: positions of this rank's rows.
        group: the cp group.
    """
    errors, ratios, of_one_device = {}, {}, {}
    few = plain is not None and exact.out.shape[2] < BLOCK * group.size()  # rows on a rank: RMS errors scatter
    computed = [x for x in (plain, alone) if x is not None]

    def rms(x: Tensor) -> Tensor:
        return _block_rms(x if few else x[:, :, rows])

    def note(name: str, error: Tensor, others: Sequence[tuple[Tensor, Tensor]], rounding: Tensor) -> None:
        """Note an error; ``others``: those of plain products and of one device, in this block, and at most allowed."""
        allowed, of_kernel = torch.full_like(error, EXACT), torch.zeros_like(error)
        if others:
            (_, of_plain), (own, of_alone) = others
            bound = PLAIN_FACTOR * of_plain + rounding
            allowed, of_kernel = torch.minimum(bound, OWN_FACTOR * of_alone + rounding), own / bound
        worst = torch.stack([error.max(), (error / allowed).max(), of_kernel.max()]).nan_to_num(float("inf"))
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
        errors[name], ratios[name], of_one_device[name] = worst.tolist()

    for name in NAMES:
        want, here = getattr(exact, name), getattr(got, name).double()
        hidden = want == float("-inf")  # lse of a query that sees no key
        agree = torch.equal(here == float("-inf"), hidden[:, :, rows])
        want, here = want.masked_fill(hidden, 0.0), here.masked_fill(hidden[:, :, rows], 0.0)
        off = here - want[:, :, rows] if agree else torch.full_like(here, float("nan"))
        others = [getattr(x, name).double().masked_fill(hidden, 0.0) - want for x in computed]
        if few:
            off = torch.zeros_like(want).index_copy_(2, rows, off)
            dist.all_reduce(off, group=group)
            want, off, *others = [_as_one_head(x, want) for x in (want, off, *others)]
        signal, of_head = rms(want), _rms(want).clamp(min=1e-30)
        sizes = [(rms(x), torch.maximum(rms(x), _rms(x) / of_head * signal)) for x in others]
        note(name, _block_rms(off), sizes, SUM_ROUNDING * signal + 1e-30)
    for name, grad in got.of_scores.items():
        total, want = grad.double(), exact.of_scores[name]
        mine = _own(name, want, rows)
        if mine == (...,):
            dist.all_reduce(total, group=group)
        want = want[mine]
        of_others = [_mean_rms(x.of_scores[name][mine].double() - want) for x in computed]
        # These gradients have few elements, whose errors scatter: allow the rounding of the result on top.
        eps = max(torch.finfo(x).eps for x in (got.out.dtype, grad.dtype))
        note(f"d{name}", _mean_rms(total - want), [(x, x) for x in of_others], eps * _mean_rms(want) + 1e-30)
    return Report(kernel, errors, ratios, of_one_device if plain is not None else {})


def _one_device(
    kernel: Kernel, tiles: list[KernelTile], scores: Scores, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, wanted: Any
) -> Dense:
    """Run the kernel on the whole sequence on one device."""
    forward = MergingForward(kernel, q, v.shape[3], scores)
    forward.step(k, v, tiles)
    out, lse = forward.finish()
    rows = begin_backward(Backward(dout, q, k, v, out, lse, None, None, scores, wanted), kernel)
    delta = rows.out_or_delta if kernel.uses_delta else None
    backward = SummingBackward(kernel, dout, q, out, rows.lse, delta, rows.scores)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    backward.step(k, v, tiles, (dk, dv))
    of_scores = rows.of_scores | backward.of_scores
    return Dense(out, lse, backward.dq.finish(torch.empty_like(q)), dk, dv, of_scores)


def _rms(x: Tensor) -> Tensor:
    """RMS per head: [B, H, 1]."""
    return x.flatten(2).square().mean(dim=2, keepdim=True).sqrt()


def _mean_rms(x: Tensor) -> Tensor:
    return x.square().sum().div(max(1, x.numel())).sqrt()


def _as_one_head(x: Tensor, want: Tensor) -> Tensor:
    """The rows of all heads and batch rows, [1, 1, B H S, ..], in units in which all heads have the same signal."""
    even = _mean_rms(want) / _rms(want).clamp(min=1e-30)
    return (x * even.view(*even.shape, *[1] * (x.ndim - 3))).flatten(0, 2)[None, None]


def _block_rms(x: Tensor) -> Tensor:
    """RMS per block of rows and head: [B, H, blocks]."""
    squares = x.square() if x.ndim == 3 else x.square().mean(dim=3)
    num_blocks = squares.shape[2] // BLOCK  # the last block also has the remaining rows: few rows give a noisy RMS
    if num_blocks == 0:
        return squares.sum(dim=2, keepdim=True).div(max(1, squares.shape[2])).sqrt()
    sizes = [BLOCK] * (num_blocks - 1) + [squares.shape[2] - BLOCK * (num_blocks - 1)]
    return torch.stack([part.mean(dim=2).sqrt() for part in squares.split(sizes, dim=2)], dim=-1)
