"""`tensor_parallel_plan` of the example's Llama: gradients are those of one rank, and what is not known is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import mesh, on_ranks
from set_ups import whole_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import SequenceParallel

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import llama

from cp_mesh import (
    ArgumentError,
    ContextParallel,
    Contiguous,
    Mask,
    ShardedModel,
    ShardedSequence,
    UnsupportedError,
    ZigZag,
    cross_entropy,
    parallelize,
    sum_gradients,
)
from cp_mesh.tensor_parallel import (
    OverlappedColwise,
    OverlappedRowwise,
    VocabParallelEmbedding,
    VocabParallelHead,
    tensor_parallel_plan,
)

V = 37  # which tp = 2 does not divide


class NormedHeads(llama.Attention):
    """With norms of queries and keys, as Qwen3."""

    def __init__(self, config: llama.LlamaConfig, core: type[nn.Module]) -> None:
        super().__init__(config, core)
        self.q_norm, self.k_norm = nn.RMSNorm(config.head_dim), nn.RMSNorm(config.head_dim)

    def forward(self, x: Tensor, rope: Tensor, documents: Tensor | None) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k, v = (x.transpose(1, 2) for x in (self.q_norm(q), self.k_norm(k), v))
        out = self.core(llama.rotate(q, rope), llama.rotate(k, rope), v, documents)
        return self.wo(out.transpose(1, 2).flatten(-2))


def model_of(core: type[nn.Module] = llama.CoreAttention, normed: bool = False, **sizes: int) -> llama.Llama:
    model = llama.Llama(llama.LlamaConfig(**({"vocab_size": V, "dim": 32, "num_layers": 2} | sizes)), core)
    if normed:
        for layer in model.layers:
            layer.attention = NormedHeads(model.config, core)
        model.output.bias = nn.Parameter(torch.linspace(-1, 1, V))
    model.init_weights(0)
    return model.double()


@dataclass(frozen=True)
class Case:
    """``recompute``, ``local``: options of the plan; ``length``: of a row.

    ``normed``: heads have norms, and the last linear a bias; ``packed``: documents.
    """

    mode: str = "reduce_scatter"
    recompute: bool = False
    local: bool = True
    packed: bool = False
    fsdp: bool = False
    length: int = 24
    normed: bool = False


CASES = [
    Case(recompute=True, packed=True, fsdp=True),
    Case(local=False, packed=True, length=25, normed=True),
    Case("all_reduce", packed=True, normed=True),
    Case("all_reduce", fsdp=True, length=25),
]


def mask(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Mask:
    return Mask(documents=documents)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.full
@on_ranks(4, timeout=180.0)
def test_loss_and_gradients_are_those_of_one_rank(case: Case) -> None:
    axes = mesh((2, 2), ("cp", "tp"))
    cp, tp = axes["cp"], axes["tp"]
    tokens, labels = torch.randint(V, (2, 2, case.length), generator=torch.Generator().manual_seed(1))
    labels[:, 3:5] = -100
    documents = torch.arange(case.length).expand(2, -1) // 9 if case.packed else None
    twin, model = (model_of(x, case.normed) for x in (llama.DenseDocumentAttention, llama.CoreAttention))
    loss = F.cross_entropy(twin(tokens, None, documents).flatten(0, 1), labels.flatten())
    loss.backward()
    options = {"mode": case.mode, "recompute_all_gather": case.recompute, "use_local_output": case.local}
    parallelize(model, tp, tensor_parallel_plan(model, tp, **options))
    sequence = ShardedSequence(cp, ZigZag() if case.local else Contiguous(), length=case.length)  # 13 rows for tp
    root = ShardedModel(sequence, inputs=("tokens",), positions="positions")
    parallelize(model, cp, {"": root, "layers.*.attention.core": ContextParallel(sequence, mask=mask)})
    if case.fsdp:
        for module in (*model.layers, model):
            fully_shard(module, mesh=cp)
        sum_gradients(model)
    share = cross_entropy(model(tokens, None, documents), sequence.shard({"labels": labels})["labels"], cp)
    share.backward()
    found = {"loss": share.detach()} | {name: whole_of(x.grad) for name, x in model.named_parameters()}
    for name, x in ({"loss": loss.detach()} | {name: x.grad for name, x in twin.named_parameters()}).items():
        if name == "loss" or not case.fsdp:
            dist.all_reduce(found[name], group=cp.get_group())
        # the rotary embedding is in float32
        assert (found[name] - x).abs().max() < 1e-6 * x.abs().max(), name


@on_ranks(2)
def test_options_arrive_and_what_is_frozen_stays_so() -> None:
    tp, model = mesh((2,), ("tp",)), model_of()
    plan = tensor_parallel_plan(model, tp)
    kinds = {name: type(style) for name, style in plan.items() if not isinstance(style, SequenceParallel)}
    assert kinds == {
        "tok_embeddings": VocabParallelEmbedding, "output": VocabParallelHead,
        "layers.*.attention": OverlappedColwise, "layers.*.attention.wo": OverlappedRowwise,
        "layers.*.feed_forward": OverlappedColwise, "layers.*.feed_forward.w2": OverlappedRowwise,
    }  # fmt: skip
    names = [plan[f"layers.*.{part}"].names for part in ("attention", "feed_forward")]
    assert names == [("wq", "wk", "wv"), ("w1", "w3")]
    norms = {"layers.*.attention_norm", "layers.*.feed_forward_norm", "norm"}
    assert plan.keys() - kinds.keys() == norms
    options = {"mode": "all_reduce", "recompute_all_gather": True, "transport": "functional", "use_local_output": False}
    for key, value in options.items():
        changed = tensor_parallel_plan(model, tp, **{key: value})
        of_styles = [{getattr(each[name], key, value) for name in kinds} for each in (changed, plan)]
        assert of_styles[0] == {value} != of_styles[1], key
        assert (changed.keys() - kinds.keys()) == (set() if value == "all_reduce" else norms)
    frozen = [name for name, _ in model.named_parameters() if "norm" in name or "wo" in name]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    parallelize(model, tp, plan)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == frozen


class Adapted(nn.Linear):
    """As adapters and quantized linears are."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class CountsHeads(llama.Attention):
    """As StableLM of Transformers."""

    num_heads = 8

    def forward(self, x: Tensor, rope: Tensor, documents: Tensor | None) -> Tensor:
        return x.view(-1, self.num_heads)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 32, 8))


def put(path: str, make: Callable[[], Any]) -> Callable[[llama.Llama], None]:
    """A change of a model: another thing at a path, or none."""

    def change(model: llama.Llama) -> None:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, make())

    return change


def fused(model: llama.Llama) -> None:
    attention = model.layers[0].attention
    del attention.wq, attention.wk, attention.wv
    attention.wqkv = nn.Linear(32, 64)


def nothing(model: llama.Llama) -> None:
    model.layers = nn.ModuleList([nn.Linear(32, 32)])


linear = partial(nn.Linear, 32, 32, bias=False)
REFUSED: dict[str, tuple[Callable[[llama.Llama], None], str]] = {
    "fused projections": (fused, "got no such module beside wo, core, wqkv"),
    "a linear left over": (put("layers.1.feed_forward.gate", linear), "layers.1.feed_forward.gate"),
    "experts": (put("layers.0.feed_forward.experts", Experts), "layers.0.feed_forward.experts"),
    "an adapter": (put("layers.1.attention.wv", partial(Adapted, 32, 16)), "layers.1.attention.wv"),
    "a forward set on a linear": (put("layers.0.attention.wo.forward", lambda: torch.sin), "layers.0.attention.wo"),
    "an embedding of its own": (put("tok_embeddings", partial(nn.EmbeddingBag, V, 32)), "tok_embeddings"),
    "sinks": (put("layers.0.attention.sinks", lambda: nn.Parameter(torch.ones(8))), "layers.0.attention: expected"),
    "a norm of all heads": (put("layers.0.attention.q_norm", partial(nn.RMSNorm, 32)), "layers.0.attention.q_norm"),
    "a norm of an unknown name": (put("layers.0.extra_norm", partial(nn.RMSNorm, 32)), "layers.0.extra_norm"),
    "a last norm in a layer": (put("layers.0.norm", partial(nn.RMSNorm, 32)), "layers.0.norm"),
    "a norm of features": (put("layers.0.feed_forward.norm", partial(nn.RMSNorm, 96)), "layers.0.feed_forward.norm"),
    "no norm": (put("layers.1.attention_norm", nn.Identity), "layers.1.attention: expected a norm attention_norm"),
    "dropout": (put("layers.0.dropout", partial(nn.Dropout, 0.1)), "layers.0.dropout: expected dropout=0"),
    "functional dropout": (put("layers.1.resid_dropout", lambda: 0.1), "layers.1: expected resid_dropout=0"),
    "no head": (put("output", nn.Identity), "one module output or lm_head"),
    "two embeddings": (put("embed_tokens", partial(nn.Embedding, V, 32)), "one module tok_embeddings or embed_tokens"),
    "unequal features": (put("layers.0.feed_forward.w3", linear), "as many output features of w1, w3 as w2 has inputs"),
    "longer queries": (
        put("layers.0.attention.wq", partial(nn.Linear, 32, 64)), "queries as wide as the output projection's input"
    ),
    "no head dim": (
        put("layers.0.attention.head_dim", lambda: None), "expected an attribute head_dim of this module, got none"
    ),
    "numbers of all heads": (
        put("layers.0.attention", lambda: CountsHeads(llama.LlamaConfig(V, 32), llama.CoreAttention)),
        "takes the number of heads from its projections, got one that reads num_heads",
    ),
    "a parameter of the model": (put("scale", lambda: nn.Parameter(torch.ones(()))), "the model: expected"),
    "another model": (nothing, "attention with linears wq, wk, wv, wo or q_proj"),
}  # fmt: skip
DISAGREE: dict[str, tuple[dict[str, Any], str]] = {
    "DTensors of all rows": ({"mode": "all_reduce", "use_local_output": False}, "expected True in mode 'all_reduce'"),
    "nothing to gather": ({"mode": "all_reduce", "recompute_all_gather": True}, "expected False in mode 'all_reduce'"),
    "a mode": ({"mode": "sum"}, "mode"),
    "copy engines": ({"mode": "all_reduce", "transport": "symmetric_memory"}, "transport"),
}


@on_ranks(2)
def test_what_is_not_known_is_refused_by_name() -> None:
    axes = mesh((1, 2), ("cp", "tp"))
    tp = axes["tp"]
    for what, (change, words) in REFUSED.items():
        model = model_of()
        change(model)
        with pytest.raises(UnsupportedError) as raised:
            tensor_parallel_plan(model, tp)
        assert words in str(raised.value), (what, str(raised.value))
    for what, (given, words) in DISAGREE.items():
        with pytest.raises(ArgumentError) as disagree:
            tensor_parallel_plan(model_of(), tp, **given)
        assert words in str(disagree.value), (what, str(disagree.value))
    with pytest.raises(ArgumentError, match="heads that tp=2 divides, got 4 of queries and 1 of keys; tp=1 divides"):
        tensor_parallel_plan(model_of(num_heads=4, num_kv_heads=1), tp)
    with pytest.raises(ArgumentError, match="one axis of a DeviceMesh"):
        tensor_parallel_plan(model_of(), axes)
    model = model_of()
    model.layers[1].attention_norm = nn.Identity()
    assert "layers.*.attention" in tensor_parallel_plan(model, tp, use_local_output=False)


@on_ranks(2)
def test_what_is_compiled_has_the_plan_of_the_module_inside() -> None:
    tp, model = mesh((1, 2), ("cp", "tp"))["tp"], model_of()
    wanted = {name: type(style) for name, style in tensor_parallel_plan(model, tp).items()}
    for i, layer in enumerate(model.layers):
        model.layers[i] = torch.compile(layer)
    model.output = torch.compile(model.output)
    for each in (model, torch.compile(model)):
        plan = tensor_parallel_plan(each, tp)
        assert {name: type(style) for name, style in plan.items()} == wanted
    parallelize(each, tp, plan)
    assert all(isinstance(x, DTensor) for name, x in model.named_parameters() if "attention.w" in name)
