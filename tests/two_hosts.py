"""The double ring on hosts that have launchers of their own, against one device; exits with 1 if it is wrong.

    torchrun --nnodes 2 --nproc-per-node 2 --master-addr HOST --node-rank 0 tests/two_hosts.py   # and 1 on the other

`test_two_launchers` starts it twice on one machine. At last a bug is planted, which must be found.
"""

from __future__ import annotations

import os
import sys
from itertools import product
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

from inside import inner

import cp_mesh

RelayedIncoming = inner("relayed", "RelayedIncoming")

real = RelayedIncoming._begin


def mixed_up(self: RelayedIncoming, rows: tuple[torch.Tensor, ...]) -> None:
    """Rows that crossed are passed on in another order."""
    real(self, rows if self._visits[0].crossing is None else tuple(x.flip(2) for x in rows))


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    host, hosts = int(os.environ["GROUP_RANK"]), int(os.environ["GROUP_WORLD_SIZE"])
    options = {"method": "double_ring", "dtype": torch.float64, "kernel": "reference"}
    layouts = cp_mesh.Contiguous(), cp_mesh.ZigZag(), cp_mesh.Striped()
    for layout, causal in product(layouts, (True, False)):
        cp_mesh.verify(mesh, layout=layout, mask=cp_mesh.Mask(causal=causal), **options)  # type: ignore[arg-type]
        print(f"host {host} of {hosts}: exact", layout.spec(), flush=True)
    with mock.patch.object(RelayedIncoming, "_begin", mixed_up):
        try:
            cp_mesh.verify(mesh, **options)  # type: ignore[arg-type]
        except cp_mesh.VerificationError:
            print("found a bug", flush=True)
        else:
            raise SystemExit(1)
    dist.barrier()  # gloo may still hold tensors of the last collective
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
