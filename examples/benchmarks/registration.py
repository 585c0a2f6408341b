"""Measure host time of the ways to register the ops with PyTorch, in microseconds per call.

One rank, tiny tensors, the same functions: the ways differ only in the code around them.

- "own": as `cp_mesh/call/op.py` does it, with `Library.impl` and its own autograd kernel;
- "register_autograd": `Library.impl` and `torch.library.register_autograd`;
- "custom_op": `torch.library.custom_op` and its `register_autograd`.

And the code before the op, with the first way:

- "function": `cp_mesh.attention` on plain tensors;
- "DTensors": the same on DTensors on a mesh of cp and tp;
- "DTensor's own": a multiplication of two such DTensors, one dispatch per pass, without cp_mesh.

In each repeat every way runs ``--calls`` calls in sequence: forward without gradients ("no_grad"), forward with
gradients ("forward"), and forward and backward ("both"); on a GPU nothing waits for the device within them. Medians and
minima over the repeats are written to ``--csv``; the results of the ways are compared first.

    python examples/benchmarks/registration.py --csv registration.csv
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).parent)]  # a checkout not installed

from report import machine  # noqa: E402

from cp_mesh import attention  # noqa: E402
from cp_mesh.call import op as ops  # noqa: E402
from cp_mesh.call import passes  # noqa: E402
from cp_mesh.call.spec import NUM_TENSORS, AttentionSpec, Call, Tensors  # noqa: E402
from cp_mesh.geometry.mask import Mask  # noqa: E402

PASSES = ("no_grad", "forward", "both")


def forward(*arguments: Any) -> tuple[Tensor, ...]:
    return passes.forward(*arguments)[0]


FUNCTIONS = {ops.attention_op: forward, ops.attention_backward_op: passes.backward}


def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.captured, ctx.seq_len, ctx.seq_dim, ctx.group_name, ctx.spec = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*tensors, *output[:2])  # the ring keeps nothing else
    ctx.set_materialize_grads(False)


def backward_by(op: Callable[..., Any]) -> Callable[..., Any]:
    def backward(ctx: Any, dout: Tensor, dlse: None, *_: None) -> tuple[Any, ...]:
        q, k, v, *tensors, out, lse = ctx.saved_tensors
        call = ctx.captured, ctx.seq_len, ctx.seq_dim, ctx.group_name, ctx.spec
        dq, dk, dv, *_grads = op(dout, q, k, v, out, lse, dlse, None, *tensors, *call, "")
        return dq, dk, dv, *[None] * NUM_TENSORS, [], *[None] * (len(call) - 1)

    return backward


def register_ways() -> dict[str, Callable[..., Any]]:
    """The attention op by way of registration."""
    library = torch.library.Library("cp_mesh_by_library", "DEF")
    for op, function in FUNCTIONS.items():
        name, schema = op._opname, str(op._schema).partition("(")[2]
        library.define(f"{name}({schema}")
        library.impl(name, torch.compiler.disable(function), "CompositeExplicitAutograd")
        custom = torch.library.custom_op(
            f"cp_mesh_by_custom_op::{name}", function, mutates_args=(), schema=f"({schema}"
        )
        if name == "attention":
            custom.register_autograd(
                lambda ctx, *grads: backward_by(torch.ops.cp_mesh_by_custom_op.attention_backward.default)(ctx, *grads),
                setup_context=keep,
            )
    torch.library.register_autograd(
        "cp_mesh_by_library::attention",
        backward_by(torch.ops.cp_mesh_by_library.attention_backward.default),
        setup_context=keep,
        lib=library,
    )
    LIBRARIES.append(library)
    return {
        "own": ops.attention_op,
        "register_autograd": torch.ops.cp_mesh_by_library.attention.default,
        "custom_op": torch.ops.cp_mesh_by_custom_op.attention.default,
    }


LIBRARIES: list[torch.library.Library] = []  # whose ops are gone when they are


def run(call: Callable[..., Tensor], inputs: Sequence[Tensor], dout: Tensor, which: str) -> list[Tensor]:
    """Results of one call."""
    if which == "no_grad":
        with torch.no_grad():
            return [call(*inputs)]
    out = call(*inputs)
    return [out] if which == "forward" else [out, *torch.autograd.grad(out, inputs, dout, allow_unused=True)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--commit", help="recorded in the rows (default: ask git)")
    parser.add_argument("--csv", type=Path, required=True)
    options = parser.parse_args(argv)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=0, world_size=1)
        group: Any = dist.group.WORLD
        inputs = [torch.randn(1, 2, options.rows, 64, device=device, dtype=torch.bfloat16) for _ in range(3)]
        inputs = [x.requires_grad_() for x in inputs]
        spec = AttentionSpec("zigzag", Mask().spec(), 0.125, as_inputs=True)
        arguments = Call(Tensors(), options.rows, 2, group.group_name, spec).arguments()
        ways: dict[str, tuple[Callable[..., Tensor], Sequence[Tensor], Tensor]] = {}
        dout = torch.ones_like(inputs[0])
        for name, op in register_ways().items():
            ways[name] = partial(lambda op, *qkv: op(*qkv, *arguments)[0], op), inputs, dout
        mesh = init_device_mesh(device.type, (1, 1), mesh_dim_names=("cp", "tp"))
        cp, places = mesh["cp"], (Shard(2), Shard(1))
        ways["function"] = partial(attention, mesh=cp, scale=0.125), inputs, dout
        placed = [DTensor.from_local(x.detach(), mesh, places) for x in (*inputs, dout)]
        of_dtensors = [x.requires_grad_() for x in placed[:3]]
        ways["DTensors"] = partial(attention, mesh=cp, scale=0.125), of_dtensors, placed[3]
        for which in PASSES:
            first, *others = (run(*way, which) for way in ways.values())
            of_others = [[x.to_local() if isinstance(x, DTensor) else x for x in other] for other in others]
            assert all(torch.equal(a, b) for other in of_others for a, b in zip(first, other, strict=True)), which
        ways["DTensor's own"] = (lambda q, k, _: q * k), of_dtensors, placed[3]
        found: dict[tuple[str, str], list[float]] = {(way, which): [] for which in PASSES for way in ways}
        for _ in range(options.repeats):
            for (way, which), times in found.items():
                if on_gpu:
                    torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(options.calls):
                    run(*ways[way], which)
                times.append((time.perf_counter() - begin) / options.calls * 1e6)
        dist.destroy_process_group()
    about = machine(device, 1, options.commit) | {"rows": options.rows, "repeats": options.repeats}
    with options.csv.open("a", newline="") as file:
        writer = csv.writer(file)
        if file.tell() == 0:
            writer.writerow([*about, "way", "pass", "us", "us_min"])
        for (way, which), times in found.items():
            row = [way, which, f"{median(times):.1f}", f"{min(times):.1f}"]
            writer.writerow([*about.values(), *row])
            print(",".join(row))


if __name__ == "__main__":
    main()
