"""Use PyTorch's context_parallel with one import changed, and compare with attention on one rank.

    torchrun --nproc-per-node 2 examples/context_parallel.py

With PyTorch's own import, shown in the comment, it needs GPUs and a causal mask. `docs/migrating.md` has the options.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

# from torch.distributed.tensor.experimental import context_parallel
# from torch.distributed.tensor.experimental._attention import context_parallel_unshard, set_rotate_method
from cp_mesh.integrations.torch_api import context_parallel, context_parallel_unshard, set_rotate_method

BATCH, HEADS, LENGTH, HEAD_DIM = 8, 8, 64, 32


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("cp",))
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    for method in ("allgather", "alltoall"):
        set_rotate_method(method)
        for causal in (True, False):
            torch.manual_seed(0)
            qkv = [torch.randn(BATCH, HEADS, LENGTH, HEAD_DIM, device=device, dtype=dtype) for _ in range(3)]
            parts = [x.detach().clone() for x in qkv]
            for x in qkv:
                x.requires_grad_()
            out = F.scaled_dot_product_attention(*qkv, is_causal=causal)
            out.square().sum().backward()

            # Inside the context each buffer holds this rank's rows, and attention sees all rows.
            with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2, 2, 2]):
                for x in parts:
                    x.requires_grad_()
                cp_out = F.scaled_dot_product_attention(*parts, is_causal=causal)
                cp_out.square().sum().backward()
                grads = [x.grad for x in parts]
                for x in parts:
                    x.requires_grad_(False)

            # Results hold this rank's rows, too.
            cp_out, *grads = context_parallel_unshard(mesh, [cp_out, *grads], [2] * 4)
            wanted = [out, *(x.grad for x in qkv)]
            pairs = zip([cp_out, *grads], wanted, strict=True)
            apart = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
            bound = 2e-2 if dtype == torch.bfloat16 else 1e-5
            if dist.get_rank() == 0:
                print(f"{method}, {'causal' if causal else 'full'}: at most {apart:.1e} from one rank, relatively")
            assert apart < bound, f"expected at most {bound}, got {apart}"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
