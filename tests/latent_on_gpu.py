"""Latent and picked keys in low precision on GPUs, against one process in float64; a line each. Exits with 1 if wrong.

    torchrun --nproc-per-node 2 tests/latent_on_gpu.py [--one-gpu] [--kernel triton]

Errors of ranks are at most 1.5 times those of one process that expands keys and values in the same dtype.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys

import torch
import torch.distributed as dist
from ranks import device, join_on_gpus, mesh
from torch import Tensor

from cp_mesh import Mask, ShardedSequence, ZigZag, attention
from cp_mesh.latent import indexed_attention, latent_attention, select_keys

H, S, R, P, N, E, TOP_K = 16, 2050, 512, 64, 128, 128, 256
NAMES = ("out", "query", "latent", "rope", "up")
FACTOR, ROUNDING = 1.5, 2.0**-9


def inputs() -> list[Tensor]:
    """query, latent, rope, up, the gradient of out; index queries, keys and weights."""
    shapes = (1, H, S, N + P), (1, 1, S, R), (1, 1, S, P), (H * (N + E), R), (1, H, S, E)
    shapes += (1, S, 64, 128), (1, S, 128), (1, S, 64)  # type: ignore[assignment]
    made = torch.Generator().manual_seed(0)
    found = [torch.randn(x, generator=made) for x in shapes]
    found[3] *= R**-0.5
    return [x.bfloat16().to(device()) for x in found]


def expanded(latent: Tensor, rope: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    k, v = torch.einsum("btr,hfr->bhtf", latent[:, 0], up.view(H, -1, R)).split([N, E], -1)
    return torch.cat((k, rope.expand(-1, H, -1, -1)), -1), v


def of_one(x: list[Tensor], dtype: torch.dtype, hidden: Tensor) -> list[Tensor]:
    """Out and gradients by plain products; ``hidden`` [S, S]."""
    q, *others = leaves = [y.detach().to(dtype).requires_grad_() for y in x[:4]]
    k, v = expanded(*others)
    scores = (q @ k.transpose(2, 3)).to(torch.promote_types(dtype, torch.float32)) * (N + P) ** -0.5
    out = scores.masked_fill(hidden, -torch.inf).softmax(-1).to(dtype) @ v
    return [out.detach(), *torch.autograd.grad(out, leaves, x[4].to(dtype))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one-gpu", action="store_true")
    parser.add_argument("--kernel", nargs="+", default=["triton", "fa4"])
    args = parser.parse_args()
    faulthandler.enable()
    join_on_gpus(args.one_gpu)
    axis = mesh((dist.get_world_size(),), ("cp",))
    sequence = ShardedSequence(axis, ZigZag(), length=S)
    x = inputs()
    positions = torch.arange(S, device=device())
    causal = ~Mask().allowed(positions, positions)[0]
    local = [sequence.shard(y, dim=2, pad_value=0) if y.ndim == 4 else y for y in x[:5]]
    index = [sequence.shard(y, pad_value=0) for y in x[5:]]
    picked = select_keys(*index, TOP_K, sequence=sequence, scale=128**-0.5)
    whole = sequence.unshard(picked)[0].long()
    pairs = torch.zeros(S, S + 1, dtype=torch.bool, device=device()).scatter(-1, whole.where(whole >= 0, S), True)
    num_wrong = 0

    def judge(what: str, out: Tensor, leaves: list[Tensor], hidden: Tensor) -> None:
        nonlocal num_wrong
        grads = torch.autograd.grad(out, leaves, local[4])
        found = [*(sequence.unshard(y, 2) for y in (out.detach(), *grads[:3])), sequence.all_reduce(grads[3].float())]
        ratios = []
        for got, one, want in zip(
            found, of_one(x, torch.bfloat16, hidden), of_one(x, torch.float64, hidden), strict=True
        ):
            error, allowed = ((y.double() - want).norm() / want.norm() for y in (got, one))
            ratios.append(float(error / (FACTOR * allowed + ROUNDING)))
        num_wrong += not max(ratios) <= 1
        words = "  ".join(f"{name} {ratio:.2f}" for name, ratio in zip(NAMES, ratios, strict=True))
        if dist.get_rank() == 0:
            print(f"{what:40} {words}  {'ok' if max(ratios) <= 1 else 'WRONG'}", flush=True)

    def leaves() -> list[Tensor]:
        return [y.detach().clone().requires_grad_() for y in local[:4]]

    given = leaves()
    judge("picked keys", indexed_attention(*given, picked, sequence=sequence), given, ~pairs[:, :S])
    for kernel in args.kernel:
        for method in ("ring", "all_gather", "ulysses"):
            for transport in ("functional", "symmetric_memory"):
                options = {"mesh": axis, "seq_len": sequence.seq_len, "kernel": kernel, "method": method}
                options |= {"transport": transport, "layout": sequence.layout, "mask": sequence.mask(Mask())}
                given = leaves()
                out = latent_attention(*given, **options)
                judge(f"latent {kernel} {method} {transport}", out, given, causal)
        given = leaves()
        out = attention(given[0], *expanded(*given[1:]), mesh=axis, kernel=kernel, layout=sequence.layout)
        judge(f"expanded {kernel}", out, given, causal)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(min(num_wrong, 1))


if __name__ == "__main__":
    main()
