"""Verify every layout, causal and full, on the ranks of this launch: ``torchrun --nproc-per-node 8 -m cp_mesh``."""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from cp_mesh.layouts import LAYOUTS, Permuted
from cp_mesh.masks import Mask
from cp_mesh.verify import VerificationError, verify


def main() -> None:
    """Print one line a configuration; exit with 1 if any is wrong."""
    parser = argparse.ArgumentParser(description="Prove cp_mesh on the ranks of this launch.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="", help="float64, float32, bfloat16 or float16; default by device")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--seq-len", type=int, default=None, help="tokens in the whole sequence")
    args = parser.parse_args()
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    mesh = init_device_mesh(args.device, (dist.get_world_size(),), mesh_dim_names=("cp",))
    dtype = getattr(torch, args.dtype or ("bfloat16" if args.device == "cuda" else "float64"))
    failed = False
    for name, layout_type in LAYOUTS.items():
        if layout_type is Permuted:
            continue  # needs an index of the user's own
        for causal in (True, False):
            try:
                words = str(
                    verify(
                        mesh,
                        layout=layout_type(),
                        mask=Mask(causal=causal),
                        dtype=dtype,
                        kernel=args.kernel,
                        seq_len=args.seq_len,
                    )
                )
            except VerificationError as error:
                words, failed = str(error), True
            if dist.get_rank() == 0:
                print(f"{name:11} {'causal' if causal else 'full':6} {dtype}: {words}", flush=True)
    dist.destroy_process_group()
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
