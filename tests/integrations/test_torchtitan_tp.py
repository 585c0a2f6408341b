"""The plan of torchtitan's Llama over tp, beside cp: loss and gradients are those of one rank."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import mesh
from torch import Tensor
from torch.distributed.tensor import DTensor

from cp_mesh import ContextParallel, ShardedModel, ShardedSequence, cross_entropy, parallelize, tensor_parallel_plan

if find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed", allow_module_level=True)

import titan

pytestmark = pytest.mark.skipif(not titan.OLD, reason="of torchtitan 0.2")
V = 37


def model_of() -> Any:
    titan.on_cpus()
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    sizes = {"dim": 32, "n_layers": 2, "n_heads": 8, "n_kv_heads": 4, "vocab_size": V, "max_seq_len": 64}
    model = Transformer(TransformerModelArgs(**sizes))
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights()
    return model.double()


def compare(rank: int) -> list[float]:
    axes, found = mesh((2, 2), ("cp", "tp")), []
    tokens, labels = torch.randint(V, (2, 2, 25), generator=torch.Generator().manual_seed(1))
    for options in ({"use_local_output": False, "recompute_all_gather": True}, {"mode": "all_reduce"}):
        twin, model = model_of(), model_of()
        loss = F.cross_entropy(twin(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
        parallelize(model, axes["tp"], tensor_parallel_plan(model, axes["tp"], **options))
        sequence = ShardedSequence(axes["cp"], length=25)
        root = ShardedModel(sequence, inputs=("tokens",), positions="positions", position_dims=2)
        parallelize(model, axes["cp"], {"": root, "layers.*.attention.inner_attention": ContextParallel(sequence)})
        share = cross_entropy(model(tokens), sequence.shard({"labels": labels})["labels"], axes["cp"])
        share.backward()
        wanted = {name: x.grad for name, x in twin.named_parameters()} | {"loss": loss.detach()}
        own = {name: x.grad for name, x in model.named_parameters()} | {"loss": share.detach()}
        assert own.keys() == wanted.keys()
        for name, x in own.items():
            whole = x.full_tensor() if isinstance(x, DTensor) else x.clone()
            dist.all_reduce(whole, group=axes["cp"].get_group())
            found.append(apart(whole, wanted[name]))
    return found


def apart(x: Tensor, wanted: Tensor) -> float:
    return ((x - wanted).abs().max() / wanted.abs().max()).item()


def test_loss_and_gradients_are_those_of_one_rank(pool: Any) -> None:
    """Its rotary embedding computes in float32."""
    assert max(pool(4).run(compare, timeout=120.0)[0]) < 1e-6
