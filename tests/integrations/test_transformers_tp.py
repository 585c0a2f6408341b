"""Models of Transformers over cp x tp with the linears of this library, against one rank, in fp64."""

from __future__ import annotations

import re
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from families import OLD, build
from inside import inner, replaced, room
from oracle import Case, batch, compare, shifted
from ranks import mesh, on_ranks
from torch import Tensor

import cp_mesh
from cp_mesh import ArgumentError, UnsupportedError, attention
from cp_mesh.integrations.transformers import parallelize, sequence_of

in_chunks = room("losses_in_chunks")
LINEAR = inner("wrap", "LINEAR")
masks = room("masks")
DeferredLogits = inner("vocab_parallel", "DeferredLogits")

pytestmark = pytest.mark.skipif(OLD, reason="forwards of Transformers 4 read other names")
BOUND = 1e-6
ALL_REDUCE, AGAIN = {"mode": "all_reduce"}, {"recompute_all_gather": True}
TIED = partial(build, tie_word_embeddings=True)
CASES = [
    Case("llama", tp=2, linears={}, fsdp=True),
    Case("llama", "packed", tp=2, linears=ALL_REDUCE),
    Case("mistral", "packed", tp=2, linears=AGAIN),
    Case("qwen2", made=TIED, tp=2, linears={}, fsdp=True),
    Case("qwen2", "padded", made=TIED, tp=2, linears=ALL_REDUCE),
    Case("qwen3", "packed", tp=2, linears=AGAIN, fsdp=True),
    Case("qwen3", tp=2, linears=ALL_REDUCE, fsdp=True),
    Case("smollm3", "left padded", tp=2, linears={}),
    Case("llama", "packed", tp=2, linears={}, fsdp=True, checkpoint=False),
    Case("qwen3", tp=2, linears={}, compiled=True),
]


@pytest.mark.parametrize("cp_size", [1, 2])
def test_loss_and_gradients_are_those_of_one_rank(pool: Any, cp_size: int) -> None:
    for case, found in pool(2 * cp_size).run(compare, *CASES, timeout=240.0)[0]:
        assert max(found.values()) < BOUND, (case, found)


@on_ranks(2)
def test_options_arrive_and_logits_are_computed_in_chunks() -> None:
    """What the plan is given; and the loss in chunks of rows, in place of logits."""
    axes = mesh((1, 2), ("cp", "tp"))
    for given in (ALL_REDUCE, AGAIN, {"transport": "functional"}, {}):
        model = parallelize(build("llama", "eager"), axes["cp"], tp=axes["tp"], linears=given)
        style = replaced(model.model.layers[1].self_attn, LINEAR).run.func.__self__
        wanted = {"mode": "reduce_scatter", "recompute_all_gather": False, "transport": "auto"} | given
        assert {name: getattr(style, name) for name in wanted} == wanted
    rows, chunks = [], in_chunks._chunks

    def recorded(*args: Any) -> Any:
        for of_chunk, logits in chunks(*args):
            rows.append(tuple(logits.shape))
            yield of_chunk, logits

    with mock.patch.object(in_chunks, "CHUNK_BYTES", 4 * 48 * 8), mock.patch.object(in_chunks, "_chunks", recorded):
        output = model(**batch("plain"))
        output.loss.backward()
    assert isinstance(output.logits, DeferredLogits)
    given = batch("plain")
    alone, labels = model(input_ids=given["input_ids"]), shifted(model, given["labels"])
    labels = sequence_of(model).shard({"labels": labels})["labels"]
    assert torch.equal(cp_mesh.cross_entropy(alone.logits, labels, axes["cp"]), output.loss) and alone.loss is None
    assert rows == [(4, 48)] * 2 * 23  # in forward and backward, of 2 x 46 rows, as zigzag pads them


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


REFUSED: dict[str, tuple[Any, str]] = {
    "the same tokens twice": (
        lambda cp, tp: parallelize(build("llama", "eager"), cp, tp=tp, data=dist.group.WORLD),
        "data: expected ranks that hold distinct tokens, got [0, 1] of one tp",
    ),
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


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(2)
def test_what_is_not_known_is_refused(name: str) -> None:
    axes = mesh((1, 2), ("cp", "tp"))
    call, words = REFUSED[name]
    with pytest.raises((UnsupportedError, ArgumentError), match=re.escape(words)):
        call(axes["cp"], axes["tp"])
