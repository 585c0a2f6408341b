"""Saved graphs name the ops: after ``import cp_mesh`` alone they load and run, and so does whatever is used first."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from inside import AttentionSpec, Tensors
from torch import Tensor, nn

PINS = json.loads((Path(__file__).parent / "pins" / "ops.json").read_text())
SCHEMAS = {name.partition("::")[2]: text for name, text in PINS.items() if isinstance(text, str)}
B, H, S, D, V = 2, 4, 12, 6, 10


def arguments(name: str) -> list[Any]:
    """Of an op, on one rank."""
    group = dist.group.WORLD.group_name
    options = AttentionSpec(layout="zigzag", mask="1,,,0,", scale=1 / math.sqrt(D), differentiable_lse=True)
    q, k, v, dout = (torch.randn(B, heads, S, D) for heads in (H, 2, 2, H))
    x, weight, labels = torch.randn(B, S, D), torch.randn(V, D), torch.arange(B * S) % V
    dlosses, of_rows = torch.randn(B * S), torch.ones(4, B * S, 1)
    of_call = [*Tensors(), [], S, 2, group, options.text()]
    of_linear = [S, group, True, V, "auto"]
    of_head = [-100, 1.0, 0.0, 0.0, 0, V, S, group, True]
    latent, up = [torch.randn(B, 1, S, 3), torch.randn(B, 1, S, 2)], torch.randn(H * (D - 2 + 4), 3)
    of_latent = torch.randn(B, H, S, 4)
    return {
        "attention": [q, k, v, *of_call],
        "attention_backward": [dout, q, k, v, dout, torch.ones(B, H, S), None, None, *of_call, ""],
        "column_linears": [x, [weight], [None], True, "none", *of_linear],
        "column_linears_backward": [[x @ weight.mT], x, [weight], [True, True, False], True, *of_linear],
        "compare_inputs": [[labels], "tokens", group, "zigzag"],
        "gather_rows": [x, S, group, True],
        "latent_attention": [q, *latent, up, *of_call],
        "latent_attention_backward": [of_latent, q, *latent, up, of_latent, torch.ones(B, H, S), None, *of_call, ""],
        "own": [labels, torch.int32],
        "row_linear": [x, weight, torch.randn(V), "none", *of_linear],
        "row_linear_awaited": [x, V, *of_linear],
        "row_linear_backward": [x @ weight.mT, x, weight, True, *of_linear],
        "sum_rows": [x, labels, "none", group, True],
        "token_losses": [x, weight, None, labels, [], *of_head, "none"],
        "token_losses_backward": [dlosses, x, weight, None, labels, of_rows, [], [True, True, False], *of_head],
    }[name]


class Op(nn.Module):
    """One call of an op, of the tensors that it is given, and constants in the place of others."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.op, given = getattr(torch.ops.cp_mesh, name).default, arguments(name)
        self.leaves, self.tree = torch.utils._pytree.tree_flatten(given)

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(x for x in self.leaves if isinstance(x, Tensor))

    def forward(self, *tensors: Tensor) -> Any:
        given = iter(tensors)
        leaves = [next(given) if isinstance(x, Tensor) else x for x in self.leaves]
        return self.op(*torch.utils._pytree.tree_unflatten(leaves, self.tree))


def save(rank: int, folder: Path) -> None:
    for name in sorted(SCHEMAS):
        module = Op(name)
        torch.export.save(torch.export.export(module, module.tensors()), folder / f"{name}.pt2")
        found = torch.utils._pytree.tree_map(torch.clone, module(*module.tensors()))  # plain: `own` notes what it reads
        torch.save((module.tensors(), found), folder / f"{name}.pt")


ALONE = """
import json, sys
from pathlib import Path
import torch, torch.distributed as dist
import cp_mesh
"""
LOAD = (
    ALONE
    + """
from torch.distributed.tensor import DTensor
strategies = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
found = {}
for schema in torch._C._jit_get_all_schemas():
    name = schema.name
    if name.startswith("cp_mesh::"):
        overload = getattr(torch.ops.cp_mesh, name.partition("::")[2]).default
        keys = [key for key in json.loads(sys.argv[2]) if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)]
        found[name] = str(schema)
        found[f"{name}, tags"] = sorted(tag.name for tag in overload.tags)
        found[f"{name}, registered"] = keys + ["sharding"] * (overload in strategies)
print(json.dumps(found))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for file in sorted(Path(sys.argv[1]).glob("*.pt2")):
    module = torch.export.load(file).module()
    tensors, expected = torch.load(file.with_suffix(".pt"))
    torch.testing.assert_close(module(*tensors), expected, rtol=0, atol=0)
q = torch.randn(2, 4, 12, 6, requires_grad=True)
torch.export.load(Path(sys.argv[1]) / "attention.pt2").module()(q, q[:, :2], q[:, :2])[0].sum().backward()
assert q.grad.abs().sum() > 0
"""
)


def run(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_exported_programs_of_each_op(pool: Any, tmp_path: Path) -> None:
    """With schema, tags, fake, autograd and sharding rule of each; and they run as where they were saved."""
    pool(1).run(save, tmp_path)
    assert len([*tmp_path.glob("*.pt2")]) == len(SCHEMAS)
    keys = ("Meta", "Autograd", "AutocastCPU", "AutocastCUDA", "CompositeExplicitAutograd")
    found = json.loads(run(LOAD, str(tmp_path), json.dumps(keys)).splitlines()[0])
    assert found == PINS


FIRST_USES = (
    ALONE
    + """
import os, threading, traceback

def attend(q):
    return cp_mesh.attention(q, q, q, mesh=dist.group.WORLD, kernel="reference")

def compiled(q):
    return torch.compile(attend, backend="aot_eager", fullgraph=True)(q)

def imported_in_the_trace(q):
    def attend(q):
        from cp_mesh import attention
        return attention(q, q, q, mesh=dist.group.WORLD, kernel="reference")
    return torch.compile(attend, backend="aot_eager", fullgraph=True)(q)

def exported(q):
    class Model(torch.nn.Module):
        def forward(self, q):
            return attend(q)
    return torch.export.export(Model(), (q,)).module()(q)

def in_inference(q):
    with torch.inference_mode():
        first = attend(q.detach())
    assert torch.equal(first, attend(q))
    return attend(q)

def on_another_device(q):
    with torch.device("meta"):
        return attend(q)

def in_threads(q):
    found, begin = [], threading.Barrier(8)
    def use():
        begin.wait()
        found.append((cp_mesh.attention, cp_mesh.flex_attention, cp_mesh.parallelize, cp_mesh.cross_entropy))
    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1
    return attend(q)

failed = []
for use in (attend, compiled, imported_in_the_trace, exported, in_inference, on_another_device, in_threads):
    if pid := os.fork():
        failed += [use.__name__] * (os.waitpid(pid, 0)[1] != 0)
        continue
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        q = torch.randn(1, 2, 8, 4, requires_grad=True)
        out = use(q)
        out.sum().backward()
        expected = torch.nn.functional.scaled_dot_product_attention(*[q.detach()] * 3, is_causal=True)
        torch.testing.assert_close(out, expected)
        assert q.grad.abs().sum() > 0
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
assert not failed, failed
assert "cp_mesh.call.plan" not in sys.modules
"""
)


@pytest.mark.full
def test_first_uses() -> None:
    """In processes that were forked after the import: in traces, in modes, in threads."""
    run(FIRST_USES)
