"""torchao's float8 linears, LoRA over them, and its optimizer in 8 bits: over dp and cp as on one rank, in fp64.

Float8 is emulated, as on CPUs. Scales of rows are the same on all ranks. Those over a rank's tokens are not those over
all tokens; if all are powers of two, only the smallest numbers are rounded otherwise.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from model import Core, DenseCore, Model, batch
from ranks import mesh, on_ranks
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from cp_mesh import ContextParallel, ShardedModel, ShardedSequence, cross_entropy, parallelize, sum_gradients

peft = pytest.importorskip("peft")
float8 = pytest.importorskip("torchao.float8")
optim = pytest.importorskip("torchao.optim")

S = 30


def made(core: Any, recipe: str, powers: bool, adapters: int) -> Model:
    """With weights in fp32, which the optimizer needs."""
    torch.manual_seed(0)
    model, config = Model(core), replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    config = replace(config, round_scales_to_power_of_2=powers)
    float8.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name != "head")
    if adapters:
        lora = peft.LoraConfig(r=adapters, target_modules=["wq", "wo"], init_lora_weights=False)
        peft.inject_adapter_in_model(lora, model)
    return model.float()


@pytest.mark.parametrize(
    ("recipe", "powers", "adapters", "least", "most"),
    [
        ("rowwise_with_gw_hp", True, 0, 0, 1e-7),
        ("rowwise", True, 0, 0, 1e-5),
        ("rowwise", True, 512, 0, 1e-7),  # has no gradients of linears; moments of larger adapters are in 8 bits
        ("tensorwise", True, 0, 0, 1e-5),
        ("tensorwise", False, 0, 0.1, 1),
    ],
)
@on_ranks(4, timeout=120.0)
def test_steps(recipe: str, powers: bool, adapters: int, least: float, most: float) -> None:
    """The relative error of the gradients; of adapters those of a second step, and the weights after it."""
    axes, given, sizes = mesh((2, 2), ("dp", "cp")), batch(2, S), (recipe, powers, adapters)
    rows, data = slice(at := axes["dp"].get_local_rank(), at + 1), axes["dp", "cp"]._flatten("dp_cp")
    sequence, model, one = ShardedSequence(axes["cp"], length=S), made(Core, *sizes), made(DenseCore, *sizes)
    whole = ShardedModel(sequence, inputs=("tokens",), positions="positions")
    parallelize(model, axes["cp"], {"": whole, "layers.*.core": ContextParallel(sequence)})
    for found, over in ((model, data), (one, mesh((4, 1), ("all", "one"))["one"])):
        for part in (*found.layers, found):
            fully_shard(part, mesh=over, mp_policy=MixedPrecisionPolicy(torch.float64, torch.float64))
    sum_gradients(model)
    trained = [[x for x in found.parameters() if x.requires_grad] for found in (model, one)]
    optimizers = [optim.AdamW8bit(found, lr=1e-2) for found in trained]
    labels = sequence.shard({"labels": given["labels"][rows]})["labels"]
    for _ in range(1 + bool(adapters)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        cross_entropy(model(given["tokens"][rows]), labels, data).backward()
        F.cross_entropy(one(given["tokens"], torch.arange(S)).flatten(0, 1), given["labels"].flatten()).backward()
        compared = [[x.grad.full_tensor() for x in found] for found in trained]
        with mock.patch.object(torch, "compile", lambda function, **_: function):  # to compile a step takes minutes
            for optimizer in optimizers if adapters else ():
                optimizer.step()
    if adapters:
        compared = [x + [y.full_tensor().detach() for y in found] for x, found in zip(compared, trained, strict=True)]
        states = [x["exp_avg"].to_local() for x in optimizers[0].state.values()]
        assert states and {type(x).__name__ for x in states} == {"OptimState8bit"}
    assert least <= max(((x - y).norm() / y.norm()).item() for x, y in zip(*compared, strict=True)) <= most
