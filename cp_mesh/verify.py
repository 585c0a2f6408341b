"""Prove a configuration on the ranks that will train with it; ``torchrun --nproc-per-node 8 -m cp_mesh`` is a tour.

Every rank draws the same random sequence, runs its part through `cp_mesh.attention`, forward and backward, and compares
with attention over the whole sequence in fp64, computed from the mask's boolean specification alone: no layout,
schedule or transport takes part in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cp_mesh.agreement import check_mode
from cp_mesh.attention import attention
from cp_mesh.errors import ArgumentError, describe
from cp_mesh.kernels.contract import Kernel, KernelTile, Pairs, make_delta
from cp_mesh.kernels.reference import REFERENCE
from cp_mesh.layouts import Contiguous, Layout, ZigZag
from cp_mesh.masks import Mask
from cp_mesh.plan import Options, make_plan
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
        figures = ", ".join(f"{name} {self.errors[name]:.1e} ({self.ratios[name]:.2f})" for name in NAMES)
        return f"{'exact' if self.passed else 'WRONG'} [{self.kernel}] RMS error (of allowed): {figures}"


def verify(
    mesh: DeviceMesh,
    *,
    layout: Layout = ZigZag(),  # noqa: B008 - frozen
    mask: Mask = Mask(causal=True),  # noqa: B008 - frozen
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
    with check_mode():
        out = attention(*local, mesh=mesh, seq_dim=2, seq_len=seq_len, **settings)
        with torch.no_grad():
            _, lse = attention(*local, mesh=mesh, seq_dim=2, seq_len=seq_len, return_lse=True, **settings)
    assert isinstance(out, Tensor)
    grads = torch.autograd.grad(out, local, dout[:, :, rows])
    options = Options(layout.spec(), mask.spec(), head_dim**-0.5, kernel=kernel)
    index = layout.tensor
    plan = make_plan(
        q[:, :, rows], k[:, :, rows], v[:, :, rows], mask.documents, mask.key_padding, index, seq_len, group, options
    )
    whole = (0, seq_len)
    positions = torch.arange(seq_len, device=device)
    specification = [KernelTile(whole, whole, Pairs(mask.to(positions.device), positions, positions))]
    exact = _one_device(REFERENCE, specification, *(x.double() for x in (q, k, v, dout)))
    single = exact
    if dtype != torch.float64:
        segments = "segments" in plan.schedule.covers
        schedule = make_schedule(Contiguous(), mask, seq_len, 1, 0, segments)
        tiles = replace(plan, layout=Contiguous(), schedule=schedule).local_tiles
        single = _one_device(plan.kernel, tiles, q, k, v, dout)
    errors, ratios = {}, {}
    for name, got, want, alone in zip(NAMES, (out, lse, *grads), exact, single, strict=True):
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
    report = Report(plan.kernel.name, errors, ratios)
    if not report.passed:
        raise VerificationError(report)
    return report


def _one_device(
    kernel: Kernel, tiles: list[KernelTile], q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> tuple[Tensor, ...]:
    """(out, lse, dq, dk, dv) of a whole sequence, by one kernel and without communication."""
    scale = q.shape[3] ** -0.5
    forward = kernel.begin_forward(q, v.shape[3], scale)
    forward.step(k, v, tiles)
    out, lse = forward.finish()
    delta = make_delta(dout, out) if kernel.uses_delta else None
    backward = kernel.begin_backward(dout, q, out, lse, delta, scale)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    backward.step(k, v, tiles, (dk, dv))
    return out, lse, backward.finish(torch.empty_like(q)), dk, dv


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
