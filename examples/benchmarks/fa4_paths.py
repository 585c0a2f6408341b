"""Time what FlashAttention-4 offers beside what cp_mesh runs in its place: sinks, score functions, block sparsity.

One GPU, forward and backward, bf16, head dim 128; a pair of calls computes the same, and ``error`` is the largest
difference of their outputs. Each time is the median of ten calls in a row.

    python examples/benchmarks/fa4_paths.py --csv fa4_paths.csv
"""

from __future__ import annotations

import argparse
import csv
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from statistics import median
from typing import Any

import cutlass
import torch
import torch.distributed as dist
from cutlass import cute
from flash_attn.cute import flash_attn_func, flash_attn_varlen_func
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.utils import scalar_to_ssa
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import create_block_mask

import cp_mesh

TOKENS, HEADS, KV_HEADS, DIM, REPEATS = 16384, 32, 8, 128, 10
SEGMENT = 1024


@cute.jit
def alibi(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
    slope = cute.math.exp2((h + cute.full_like(h, 1)).to(cutlass.Float32) * cute.full_like(score, -8.0 / HEADS))
    return score - slope * (q_idx - kv_idx).to(cutlass.Float32)  # causal: no query is before its key


@cute.jit
def same_gradient(grad, score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
    return grad


@cute.jit
def of_document(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
    ids = aux_tensors[0]
    same = scalar_to_ssa(ids[q_idx[0]], cutlass.Int32) == scalar_to_ssa(ids[kv_idx[0]], cutlass.Int32)
    return same & (q_idx >= kv_idx)


def sparsity(ids: Tensor) -> tuple[Any, Any]:
    """Blocks of keys of each block of queries, and the transpose."""
    found = create_block_mask(lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k), 1, 1, TOKENS, TOKENS, device="cuda")
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    of_keys = (getattr(found, name) for name in names)
    of_queries = (getattr(found, name.replace("kv", "q")) for name in names)
    return tuple(BlockSparseTensorsTorch(*x, block_size=(128, 128)) for x in (of_keys, of_queries))


def cases(mesh: Any) -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """FlashAttention-4's call, of [1, S, H, D], and that of cp_mesh."""
    segments = torch.arange(TOKENS, device="cuda", dtype=torch.int32) // SEGMENT
    sinks = torch.linspace(-1, 1, HEADS, device="cuda").bfloat16().requires_grad_()
    slopes = 2.0 ** -(torch.arange(1, HEADS + 1, device="cuda") * 8 / HEADS)
    bounds = torch.arange(0, TOKENS + 1, SEGMENT, device="cuda", dtype=torch.int32)
    scores: dict[str, Any] = {"score_mod": alibi, "score_mod_bwd": same_gradient}
    back, back_bwd = sparsity(segments % 4)

    def ours(kernel: str, documents: Tensor | None = None, **options: Any) -> Callable[..., Any]:
        mask = cp_mesh.Mask(causal=True, documents=documents)
        return lambda q, k, v: cp_mesh.attention(q, k, v, mesh=mesh, seq_dim=1, mask=mask, kernel=kernel, **options)

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Any:
        given = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": SEGMENT, "max_seqlen_k": SEGMENT}
        return flash_attn_varlen_func(q[0], k[0], v[0], causal=True, **given, **scores)[0][None]

    def blocks(q: Tensor, k: Tensor, v: Tensor) -> Any:
        given: dict[str, Any] = {"block_sparse_tensors": back, "block_sparse_tensors_bwd": back_bwd}
        return flash_attn_func(q, k, v, mask_mod=of_document, aux_tensors=[segments % 4], **given)[0]

    return {
        "causal": (lambda q, k, v: flash_attn_func(q, k, v, causal=True)[0], ours("fa4")),
        "sinks": (
            lambda q, k, v: flash_attn_func(q, k, v, causal=True, learnable_sink=sinks)[0],
            ours("fa4", sinks=sinks),
        ),
        "ALiBi": (
            lambda q, k, v: flash_attn_func(q, k, v, causal=True, **scores)[0],
            ours("triton", alibi_slopes=slopes),
        ),
        "ALiBi, packed": (packed, ours("triton", documents=segments, alibi_slopes=slopes)),
        "documents that come back": (blocks, ours("triton", documents=segments % 4)),
    }


def time_of(run: Callable[[], Any]) -> float:
    for _ in range(3):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    for mark in marks:
        mark.record()
        run()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in pairwise(marks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", required=True)
    parser.add_argument("--commit", default=None)
    args = parser.parse_args()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("cp",))
    commit = args.commit or subprocess.check_output(["git", "describe", "--always", "--dirty"], text=True).strip()
    made = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, TOKENS, n, DIM, device="cuda", generator=made).bfloat16().requires_grad_(i < 3)
        for i, n in enumerate((HEADS, KV_HEADS, KV_HEADS, HEADS))
    )
    with open(args.csv, "w", newline="") as file:
        write = csv.writer(file, lineterminator="\n")
        columns = ("date", "commit", "gpu", "torch", "case", "call", "fwd_ms", "both_ms", "error", "status")
        write.writerow(columns)
        about = [f"{datetime.now(UTC):%Y-%m-%d}", commit, torch.cuda.get_device_name(), torch.__version__]
        for case, calls in cases(mesh).items():
            outs: list[Tensor] = []
            for name, call in zip(("flash-attn-4", "cp_mesh"), calls, strict=True):
                row: list[object] = ["", "", ""]
                try:
                    outs.append(call(q, k, v).detach().float())
                    with torch.no_grad():
                        row[0] = f"{time_of(lambda call=call: call(q, k, v)):.3f}"
                    row[1] = f"{time_of(lambda call=call: torch.autograd.grad(call(q, k, v), (q, k, v), dout)):.3f}"
                    row[2] = f"{(outs[0] - outs[-1]).abs().max().item():.2e}" if len(outs) == 2 else ""
                    status = "ok"
                except Exception as error:  # a case that a release lacks is a result
                    status = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
                write.writerow([*about, case, name, *row, status])
                print(case, name, *row, status, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
