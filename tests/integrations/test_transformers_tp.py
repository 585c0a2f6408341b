"""Models of Transformers over cp x tp with the linears of this library, against one rank, in fp64."""

from __future__ import annotations

import csv
import warnings
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

import oracle
from families import OLD, build
from inside import inner, replaced, room
from ranks import mesh
from test_transformers import ROOT, apart, batch, documents_of
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import cp_mesh
from cp_mesh import Striped, attention, sum_gradients
from cp_mesh.integrations.transformers import parallelize, sequence_of

vocabulary = room("vocab_parallel")
LINEAR = inner("wrap", "LINEAR")
masks = room("masks")
DeferredLogits = inner("vocab_parallel", "DeferredLogits")

pytestmark = pytest.mark.skipif(OLD, reason="forwards of Transformers 4 read other names")
BOUND = 1e-6


@dataclass(frozen=True)
class Case:
    """``changes``: of the family's config."""

    family: str
    batch: str = "plain"
    linears: dict[str, Any] = field(default_factory=dict)
    fsdp: bool = False
    changes: dict[str, Any] = field(default_factory=dict)
    checkpoint: bool = False
    compiled: bool = False


def over(axis: Any, x: Tensor) -> Tensor:
    x = x.detach().clone()
    dist.all_reduce(x, group=axis.get_group())
    return x


def compare(case: Case, tp_size: int = 2, made: Any = build) -> dict[str, float]:
    """How far a model on cp x tp ranks is from one rank: of logits, loss and the worst gradient."""
    axes, given = mesh((dist.get_world_size() // tp_size, tp_size), ("cp", "tp")), batch(case.batch)
    model, reference = (made(case.family, name, **case.changes) for name in ("eager", oracle.NAME))
    logits, loss = oracle.whole_loss(reference, documents_of(given), **given)
    parallelize(model, axes["cp"], tp=axes["tp"], linears=case.linears, layout=Striped())
    if case.checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if case.compiled:
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
    if case.fsdp:
        for layer in model.model.layers:
            fully_shard(layer, mesh=axes["cp"])
        sum_gradients(fully_shard(model, mesh=axes["cp"]))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="FSDP2-wrapped module .* returned a view tensor")
        output = model(**given)
    whole = sequence_of(model).unshard(output.logits.whole())
    output.loss.backward()
    found, wanted = dict(model.named_parameters()), dict(reference.named_parameters())
    assert found.keys() == wanted.keys()
    if case.fsdp:  # of others gradients are not summed over cp
        torch.optim.SGD(model.parameters(), 0.0).step()
    assert sum(isinstance(x, DTensor) and x.to_local().numel() < x.numel() for x in found.values()) > 10
    grads = {name: x.grad.full_tensor() if isinstance(x.grad, DTensor) else x.grad for name, x in found.items()}
    if not case.fsdp:
        grads = {name: over(axes["cp"], x) for name, x in grads.items()}
    worst = max(apart(grads[name], x.grad) for name, x in wanted.items())
    kept = given.get("attention_mask", torch.ones(logits.shape[:2])).bool()
    return {
        "logits": apart(whole[kept], logits[kept]),
        "loss": apart(over(axes["cp"], output.loss), loss),
        "gradient": worst,
    }


ALL_REDUCE, AGAIN = {"mode": "all_reduce"}, {"recompute_all_gather": True}
TIED = {"tie_word_embeddings": True}
CASES = [
    Case("llama", fsdp=True),
    Case("llama", "packed", ALL_REDUCE),
    Case("mistral", "packed", AGAIN),
    Case("qwen2", changes=TIED, fsdp=True),
    Case("qwen2", "padded", ALL_REDUCE, changes=TIED),
    Case("qwen3", "packed", AGAIN, fsdp=True),
    Case("qwen3", linears=ALL_REDUCE, fsdp=True),
    Case("smollm3", "left padded"),
    Case("llama", "packed", fsdp=True, checkpoint=True),
    Case("qwen3", compiled=True),
]


def run(rank: int, cases: list[Case]) -> list[tuple[Case, dict[str, float]]]:
    return [(case, compare(case)) for case in cases]


@pytest.mark.parametrize("cp_size", [1, 2])
def test_loss_and_gradients_are_those_of_one_rank(pool: Any, cp_size: int) -> None:
    for case, found in pool(2 * cp_size).run(run, CASES, timeout=240.0)[0]:
        assert max(found.values()) < BOUND, (case, found)


def options(rank: int) -> None:
    """What the plan is given; and the loss in chunks of rows, in place of logits."""
    axes = mesh((1, 2), ("cp", "tp"))
    for given in (ALL_REDUCE, AGAIN, {"transport": "functional"}, {}):
        model = parallelize(build("llama", "eager"), axes["cp"], tp=axes["tp"], linears=given)
        style = replaced(model.model.layers[1].self_attn, LINEAR).run.func.__self__
        wanted = {"mode": "reduce_scatter", "recompute_all_gather": False, "transport": "auto"} | given
        assert {name: getattr(style, name) for name in wanted} == wanted
    rows, chunks = [], vocabulary._chunks

    def recorded(*args: Any) -> Any:
        for of_chunk, logits in chunks(*args):
            rows.append(tuple(logits.shape))
            yield of_chunk, logits

    with mock.patch.object(vocabulary, "CHUNK_BYTES", 4 * 48 * 8), mock.patch.object(vocabulary, "_chunks", recorded):
        output = model(**batch("plain"))
        output.loss.backward()
    assert isinstance(output.logits, DeferredLogits)
    given = batch("plain")
    alone, labels = model(input_ids=given["input_ids"]), oracle.shifted(model, given["labels"])
    labels = sequence_of(model).shard({"labels": labels})["labels"]
    assert torch.equal(cp_mesh.cross_entropy(alone.logits, labels, axes["cp"]), output.loss) and alone.loss is None
    assert rows == [(4, 48)] * 2 * 23  # in forward and backward, of 2 x 46 rows, as zigzag pads them


def test_options_arrive_and_logits_are_computed_in_chunks(pool: Any) -> None:
    pool(2).run(options)


def seeds_of(rank: int) -> list[tuple[int, ...]]:
    """Seeds of dropout, one a layer, in two steps."""
    axes, seeds = mesh((2, 2), ("cp", "tp")), []
    model = build("llama", "eager", attention_dropout=0.5)
    parallelize(model, axes["cp"], tp=axes["tp"])

    def record(*args: Any, dropout_seed: Tensor, **kwargs: Any) -> Any:
        seeds.append(int(dropout_seed))
        return attention(*args, dropout_seed=dropout_seed, **kwargs)

    with mock.patch.object(masks, "attention", record):
        for _ in range(2):
            model(**batch("plain"))
    return seeds


def test_heads_of_each_tp_rank_draw_their_own_dropout(pool: Any) -> None:
    first, second, *of_other_cp_rank = pool(4).run(seeds_of)
    assert of_other_cp_rank == [first, second] and len({*first, *second}) == 8


def adapted(cp: Any, tp: Any) -> None:
    model = build("llama", "eager")
    model.model.layers[1].mlp.up_proj.forward = torch.sin
    parallelize(model, cp, tp=tp)


def twice(cp: Any, tp: Any) -> None:
    model = build("llama", "eager")
    model.set_attn_implementation("eager")
    cp_mesh.parallelize(model, tp, cp_mesh.tensor_parallel.tensor_parallel_plan(model, tp))
    parallelize(model, cp, tp=tp)


def made(family: str, **options: Any) -> Any:
    return lambda cp, tp: parallelize(build(family, "eager"), cp, **({"tp": tp} | options))


def called(**options: Any) -> Any:
    return lambda cp, tp: parallelize(build("llama", "eager"), cp, tp=tp)(**(batch("plain") | options))


def data_with_tp(cp: Any, tp: Any) -> None:
    parallelize(build("llama", "eager"), cp, tp=tp, data=dist.group.WORLD)


REFUSED: dict[str, tuple[Any, str]] = {
    "the same tokens twice": (data_with_tp, "data: expected ranks that hold distinct tokens, got [0, 1] of one tp"),
    "capped logits": (made("gemma2"), "final_logit_softcapping"),
    "scaled logits": (made("granite"), "logits_scaling in its forward"),
    "routers": (made("mixtral"), "router_logits"),
    "fused projections": (made("phi3"), "self_attn.q_proj: expected an nn.Linear"),
    "a norm of all heads": (made("olmo3"), "self_attn.q_norm"),
    "an adapter": (adapted, "model.layers.1.mlp.up_proj: expected an nn.Linear with the forward of its class"),
    "two plans": (twice, "model.layers.0.self_attn.q_proj"),
    "whole logits": (made("llama", gather_output=True), "sequence_of(model).unshard(output.logits.whole())"),
    "an unknown option": (
        made("llama", linears={"use_local_output": True}),
        "options among mode, recompute_all_gather",
    ),
    "options of no tp": (made("llama", tp=None, linears={}), 'pass tp=mesh["tp"]'),
    "embeddings": (called(input_ids=None, inputs_embeds=torch.ones(2, 45, 32)), "no inputs_embeds with tp"),
    "hidden states": (called(output_hidden_states=True), "no output_hidden_states with tp"),
}


def refuse(rank: int, name: str) -> None:
    axes = mesh((1, 2), ("cp", "tp"))
    REFUSED[name][0](axes["cp"], axes["tp"])


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused(pool: Any, name: str) -> None:
    for raised in pool(2).run_expecting_error(refuse, name):
        assert raised is not None and raised.type in ("UnsupportedError", "ArgumentError"), raised
        assert REFUSED[name][1] in raised.message, raised.message


def test_the_table_has_every_family_that_is_served_without_tp() -> None:
    alone, over_tp = (
        list(csv.DictReader((ROOT / "docs" / "results" / f"transformers_families{name}.csv").open()))
        for name in ("", "_tp")
    )
    assert [row["family"] for row in alone] == [row["family"] for row in over_tp]
    assert {row["verdict"] for row in over_tp} == {"exact", "refused"}
    exact = {row["family"] for row in over_tp if row["verdict"] == "exact"}
    assert {"llama", "mistral", "qwen2", "qwen3"} < exact <= {x["family"] for x in alone if x["verdict"] == "exact"}
    for row in over_tp:
        assert row["reason"] if row["verdict"] == "refused" else float(row["gradient"]) < BOUND
