"""Compare attention over a sharded sequence with `F.scaled_dot_product_attention` over the whole sequence.

torchrun --nproc-per-node 2 examples/attention.py
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

from cp_mesh import Mask, ShardedSequence, ZigZag, attention


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    sequence = ShardedSequence(mesh["cp"], ZigZag(), length=1000)
    generator = torch.Generator().manual_seed(0)  # the whole tensors are equal on all ranks
    q, k, v = (torch.randn(1, heads, 1000, 64, generator=generator, dtype=torch.float64) for heads in (8, 2, 2))

    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    local = [sequence.shard(x, dim=2) for x in (q, k, v)]  # [1, heads, rows of this rank, 64]
    out = attention(*local, mesh=mesh["cp"], layout=sequence.layout, mask=Mask(causal=True))

    difference = (sequence.unshard(out, dim=2) - whole).abs().max().item()
    print(f"rank {dist.get_rank()}: {local[0].shape[2]} rows, largest difference {difference:.1e}", flush=True)
    assert difference < 1e-10
    dist.barrier()  # gloo may still hold tensors of the last collective, which Python cannot release at exit
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
