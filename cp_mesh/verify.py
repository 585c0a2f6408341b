"""Prove a configuration on the ranks that will train with it; ``torchrun --nproc-per-node 8 -m cp_mesh`` is a tour.

Every rank draws the same random sequence, runs its part through `cp_mesh.attention`, forward and backward, and compares
with attention over the whole sequence in fp64, computed from the mask's boolean specification alone: no layout,
schedule or transport takes part in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cp_mesh.agreement import check_mode
from cp_mesh.attention import attention, seed_tensor
from cp_mesh.errors import ArgumentError, describe
from cp_mesh.kernels.combine import accumulation_dtype, make_delta
from cp_mesh.kernels.contract import Kernel, KernelTile, Pairs, Scores
from cp_mesh.kernels.reference import REFERENCE
from cp_mesh.layouts import Contiguous, Layout, ZigZag
from cp_mesh.masks import Mask
from cp_mesh.plan import SCORE_OPTIONS, Options, Tensors, make_plan, make_scores
from cp_mesh.ring import gradient_of_sinks, include_sinks
from cp_mesh.schedule import make_schedule

BLOCK = 128  # rows of a head over which an RMS error is taken
NAMES = ("out", "lse", "dq", "dk", "dv")


class VerificationError(AssertionError):
    """Sharded attention is not the attention of one device; ``report`` holds the figures."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


@dataclass(frozen=True)
class Report:
    """What `verify` measured, equal on all ranks.

    Attributes:
        kernel: the kernel that ran.
        errors: worst RMS error over blocks of 128 rows and head, by tensor, against fp64.
        ratios: worst ratio of that error to the allowed one, by tensor; at most 1 passes.
    """

    kernel: str
    errors: dict[str, float]
    ratios: dict[str, float]

    @property
    def passed(self) -> bool:
        return all(ratio <= 1 for ratio in self.ratios.values())

    def __str__(self) -> str:
        figures = ", ".join(f"{name} {self.errors[name]:.1e} ({self.ratios[name]:.2f})" for name in self.errors)
        return f"{'exact' if self.passed else 'WRONG'} [{self.kernel}] RMS error (of allowed): {figures}"


def verify(
    mesh: DeviceMesh,
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
    transport: str = "auto",
    head_chunks: int | None = None,
    deterministic: bool | None = None,
    seed: int = 0,
) -> Report:
    """Compare sharded attention with that of one device, on these ranks, in check mode.

    RMS errors over blocks of 128 rows of a head are compared. In float64 they must be at most 1e-10; in lower precision
    at most 1.5 times the error of the same kernel on one device, plus 1e-6 of the signal for the rounding of fp32 sums.
    That error is the block's own or, where the block was rounded by luck, the head's relative error times the block's
    signal: stock kernels round every partial result, so that single blocks scatter around the mean.

    Args:
        mesh: the 1-D mesh of the cp axis; call on all of its ranks.
        layout, mask, kernel, transport, head_chunks, deterministic: as in `cp_mesh.attention`; prove the settings that
            will train. A mask with tensors needs ``seq_len``, their length.
        scores: options of the scores by their names in `cp_mesh.attention`: softcap, sinks, alibi_slopes,
            relative_bias, bias, dropout_p, dropout_seed (0 if left out). Tensors are equal on all ranks, a bias is that
            of the whole sequence, [.., S or 1, S] in original order; their gradients are compared too.
        seq_len: tokens in the whole sequence; None: 256 per rank. O(seq_len²) work on every rank.
        batch, num_heads, num_kv_heads, head_dim: sizes of q, k, v.
        dtype: dtype of q, k, v.
        seed: of the random data.

    Returns:
        The figures, equal on all ranks.

    Raises:
        VerificationError: on every rank, if any rank's error is larger than allowed.

    Example:
        >>> print(verify(mesh["cp"], mask=Mask(window=(17, 0))))  # doctest: +SKIP
        exact [reference] RMS error (of allowed): out 1.9e-16 (0.00), ...
    """
    if mesh.ndim != 1:
        raise ArgumentError(describe("verify: mesh", "the 1-D DeviceMesh of the cp axis", mesh, 'pass mesh["cp"]'))
    device = torch.device(mesh.device_type, torch.cuda.current_device()) if mesh.device_type == "cuda" else "cpu"
    size, rank, group = mesh.size(), mesh.get_local_rank(), mesh.get_group()
    seq_len = seq_len or 256 * size
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int) -> Tensor:
        # standard normal: heavier tails let a few rows decide a block's RMS, and then the ratio of two is mostly luck
        shape = (batch, heads, seq_len, head_dim)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    q, k, v, dout = draw(num_heads), draw(num_kv_heads), draw(num_kv_heads), draw(num_heads)
    rows = layout.positions(seq_len, size, rank).to(device)
    local = [x[:, :, rows].detach().requires_grad_() for x in (q, k, v)]
    settings: dict[str, Any] = {"layout": layout, "mask": mask, "kernel": kernel, "transport": transport}
    settings |= {"head_chunks": head_chunks, "deterministic": deterministic}
    given = dict(scores or {})
    if unknown := set(given) - {*SCORE_OPTIONS, "scale"}:
        names = f"names of scale, {', '.join(SCORE_OPTIONS)}"
        raise ArgumentError(describe("verify: scores", names, sorted(unknown), "see cp_mesh.attention"))
    if given.get("dropout_p"):
        given["dropout_seed"] = seed_tensor(given.get("dropout_seed", 0), device)
    whole_tensors = {name: x.detach().to(device) for name, x in given.items() if isinstance(x, Tensor)}
    if dtype == torch.float64:  # else their gradients were rounded to less
        whole_tensors |= {name: x.double() for name, x in whole_tensors.items() if x.is_floating_point()}
    held = dict(whole_tensors)
    if "bias" in held and held["bias"].shape[2] > 1:
        held["bias"] = held["bias"][:, :, rows]
    leaves = {name: x.clone().requires_grad_() for name, x in held.items() if x.is_floating_point()}
    settings |= given | held | leaves
    with check_mode():
        out = attention(*local, mesh=mesh, seq_dim=2, seq_len=seq_len, **settings)
        with torch.no_grad():
            _, lse = attention(*local, mesh=mesh, seq_dim=2, seq_len=seq_len, return_lse=True, **settings)
    assert isinstance(out, Tensor)
    grads = torch.autograd.grad(out, [*local, *leaves.values()], dout[:, :, rows])
    softcap, dropout_p = given.get("softcap") or 0.0, given.get("dropout_p", 0.0)
    scale = given.get("scale") or head_dim**-0.5
    fixed = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    options = Options(layout.spec(), mask.spec(), scale, softcap, dropout_p, kernel=kernel, deterministic=fixed)
    tensors = Tensors(mask.documents, mask.key_padding, layout.tensor, **held)
    plan = make_plan(q[:, :, rows], k[:, :, rows], v[:, :, rows], tensors, seq_len, group, options)
    whole_scores = [
        replace(make_scores(options, Tensors(**whole_tensors), to), wanted=frozenset(leaves) - {"sinks"})
        for to in (torch.float64, accumulation_dtype(dtype))
    ]
    whole = (0, seq_len)
    positions = torch.arange(seq_len, device=device)
    specification = [KernelTile(whole, whole, Pairs(mask.to(positions.device), positions, positions))]
    exact = _one_device(REFERENCE, specification, whole_scores[0], *(x.double() for x in (q, k, v, dout)))
    single = exact
    if dtype != torch.float64:
        segments = "segments" in plan.schedule.covers
        schedule = make_schedule(Contiguous(), mask, seq_len, 1, 0, segments)
        tiles = replace(plan, layout=Contiguous(), schedule=schedule, kept={}).local_tiles
        single = _one_device(plan.kernel, tiles, whole_scores[1], q, k, v, dout)
    errors, ratios = {}, {}
    for name, got, want, alone in zip(NAMES, (out, lse, *grads[:3]), exact, single, strict=False):
        hidden = want == float("-inf")  # lse of a query that sees no key
        wrong_hidden = not torch.equal(got == float("-inf"), hidden[:, :, rows])
        want, alone = (x.double().masked_fill(hidden, 0.0) for x in (want, alone))
        relative = _rms(alone - want) / _rms(want).clamp(min=1e-30)
        got = got.double().masked_fill(hidden[:, :, rows], 0.0)
        want, alone = want[:, :, rows], alone[:, :, rows]
        error, signal = _block_rms(got - want), _block_rms(want)
        allowed = torch.full_like(error, 1e-10)
        if dtype != torch.float64:
            allowed = 1.5 * torch.maximum(_block_rms(alone - want), relative * signal) + 1e-6 * signal + 1e-30
        worst = torch.stack([error.max(), (error / allowed).max()]).nan_to_num(float("inf"))
        worst[1] = float("inf") if wrong_hidden else worst[1]
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
        errors[name], ratios[name] = worst.tolist()
    for name, got in zip(leaves, grads[3:], strict=True):
        total, want, alone = got.double(), exact[-1][name].double(), single[-1][name].double()
        if name == "bias" and want.shape[2] > 1:  # of this rank's rows alone
            want, alone = want[:, :, rows], alone[:, :, rows]
        else:
            dist.all_reduce(total, group=group)
        error = (total - want).square().mean().sqrt()
        # They are few numbers, which scatter around the error of one device: that of rounding them comes on top.
        eps = max(torch.finfo(x).eps for x in (dtype, got.dtype))
        rounding = eps * want.square().mean().sqrt()
        allowed = torch.full_like(error, 1e-10)
        if dtype != torch.float64:
            allowed = 1.5 * (alone - want).square().mean().sqrt() + rounding
        worst = torch.stack([error, error / allowed]).nan_to_num(float("inf"))
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
        errors[f"d{name}"], ratios[f"d{name}"] = worst.tolist()
    report = Report(plan.kernel.name, errors, ratios)
    if not report.passed:
        raise VerificationError(report)
    return report


def _one_device(
    kernel: Kernel, tiles: list[KernelTile], scores: Scores, q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> tuple[Any, ...]:
    """(out, lse, dq, dk, dv, gradients of the scores' tensors) of a whole sequence, by one kernel alone."""
    forward = kernel.begin_forward(q, v.shape[3], scores)
    forward.step(k, v, tiles)
    out, lse = forward.finish()
    delta = make_delta(dout, out) if kernel.uses_delta else None
    of_sinks, of_all = {}, lse
    if scores.sinks is not None:
        of_sinks["sinks"] = gradient_of_sinks(dout, out, lse, scores.sinks)
        of_all, _ = include_sinks(lse, None, scores.sinks)
    backward = kernel.begin_backward(dout, q, out, of_all, delta, scores)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    backward.step(k, v, tiles, (dk, dv))
    of_tensors = of_sinks | vars(backward.score_gradients())
    return out, lse, backward.finish(torch.empty_like(q)), dk, dv, of_tensors


def _rms(x: Tensor) -> Tensor:
    """RMS of every head: [B, H, 1]."""
    return x.flatten(2).square().mean(dim=2, keepdim=True).sqrt()


def _block_rms(x: Tensor) -> Tensor:
    """RMS over blocks of rows, for every head: [B, H, blocks]."""
    squares = x.square() if x.ndim == 3 else x.square().mean(dim=3)
    num_blocks = squares.shape[2] // BLOCK  # rows after the last whole block count to it: a few alone are all luck
    if num_blocks == 0:
        return squares.sum(dim=2, keepdim=True).div(max(1, squares.shape[2])).sqrt()
    sizes = [BLOCK] * (num_blocks - 1) + [squares.shape[2] - BLOCK * (num_blocks - 1)]
    return torch.stack([part.mean(dim=2).sqrt() for part in squares.split(sizes, dim=2)], dim=-1)
