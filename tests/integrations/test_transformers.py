"""Models of Transformers on ranks, against one rank: logits, loss and every gradient, in fp64."""

from __future__ import annotations

import copy
import csv
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

transformers = pytest.importorskip("transformers")

from families import FAMILIES, HYBRIDS, OLD, VOCABULARY, WITH_IMAGES, build, build_with_images  # noqa: E402
from inside import inner  # noqa: E402
from oracle import (  # noqa: E402
    NAME,
    B,
    Case,
    S,
    apart,
    batch,
    batch_with_images,
    compare,
    documents_of,
    shifted,
    summed,
    whole_loss,
)
from ranks import REFUSALS, mesh, on_ranks  # noqa: E402
from scripts import blocks  # noqa: E402
from torch import Tensor  # noqa: E402

from cp_mesh import (  # noqa: E402
    ArgumentError,
    ShardedSequence,
    Striped,
    UnsupportedError,
    ZigZag,
    batch_mask,
)
from cp_mesh.integrations.transformers import parallelize, sequence_of  # noqa: E402

IMAGES, check_model = inner("families", "IMAGES", "check_model")
Said, read_mask = inner("masks", "Said", "read_mask")
replica_of = inner("root", "replica_of")

ROOT = Path(__file__).resolve().parents[2]
BOUND = 1e-6
newest = pytest.mark.skipif(OLD, reason="says what Transformers 4 says in another way, or has not")
LAYOUTS: dict[str, Any] = {"zigzag": ZigZag(), "striped": Striped(), "auto": "auto"}
ROUTED = partial(build, output_router_logits=True, router_aux_loss_coef=0.5)
LLAMA4 = [] if OLD else ["llama4"]  # the oracle's masks are of Transformers 4, which counts chunks through documents


def exact(pool: Any, num_ranks: int, *cases: Case) -> None:
    for each in pool(num_ranks).run(compare, *cases, timeout=120.0):
        for case, found in each:
            assert max(found.values()) < BOUND, (case, found)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(pool: Any, family: str, num_ranks: int) -> None:
    cases = [Case(family, case, x) for case in ("plain", "packed") for x in LAYOUTS.values()]
    exact(pool, num_ranks, *(case for case in cases if case.batch == "plain" or family not in {"llama4"} - {*LLAMA4}))


@newest
@pytest.mark.parametrize(
    ("case", "num_ranks"),
    [
        *(("plain", 2), ("packed", 3), ("left padded", 2)),
        *(pytest.param(*x, marks=pytest.mark.full) for x in [("plain", 3), ("packed", 4), ("left padded", 3)]),
    ],
)
@pytest.mark.parametrize("family", sorted(WITH_IMAGES.keys() - HYBRIDS))  # of which test_hybrids has those with images
def test_images(pool: Any, family: str, case: str, num_ranks: int) -> None:
    assert {*IMAGES} <= {*WITH_IMAGES}
    exact(pool, num_ranks, *(Case(family, case, x, build_with_images) for x in (ZigZag(), Striped())))


PADDED = sorted({"llama", "gemma3", "llama4", "bert", "deepseek_v32"} & {*FAMILIES})
OTHERS: dict[str, tuple[int, list[Case]]] = {
    "padding": (
        2,
        [Case(x, case, ZigZag()) for x in PADDED for case in ("padded", "left padded", "padded with labels")],
    ),
    "losses of routers": (
        3,
        [
            Case(family, case, made=ROUTED)
            for family in ("mixtral", "qwen3_moe", "gpt_oss")
            for case in ("plain", "packed", "padded", "left padded")
        ],
    ),
    "checkpoints and compiled layers": (
        2,
        [
            Case(family, case, ZigZag(), **{name: name == "compiled"})
            for name in ("checkpoint", "compiled")
            for family in ("llama", "gemma2")
            for case in ("plain", "packed")
        ]
        + [Case("glm_moe_dsa", "packed", ZigZag(), checkpoint=x) for x in (False, True)],
    ),
    "fsdp": (
        2,
        [
            Case(x, "packed", "auto", fsdp=True)
            for x in ("llama", "qwen3", "gemma2", "gemma3", "gpt_oss", "deepseek_v32", *LLAMA4)
        ]
        + [Case("mixtral", "packed", "auto", x, fsdp=True) for x in (build, ROUTED)],
    ),
    "fsdp over dp and cp": (4, [Case("llama", "packed", "auto", dp=2, fsdp=True)]),
}
if not OLD:
    OTHERS["fsdp, images"] = (
        2,
        [
            Case("gemma3", "plain", "auto", build_with_images, fsdp=True, checkpoint=False),
            *(Case(x, "packed", "auto", build_with_images, fsdp=True) for x in ("gemma4_e2b", "qwen3_vl")),
        ],
    )
    OTHERS["videos and sounds"] = (
        3,
        [
            *(Case(x, "videos", Striped(), build_with_images) for x in WITH_IMAGES if x.startswith(("qwen", "gemma4"))),
            Case("gemma4_e2b", "sounds", ZigZag(), build_with_images),
        ],
    )
    OTHERS["tp of Transformers"] = (
        4,
        [Case(family, case, tp=2) for family in ("llama", "mistral", "qwen3") for case in ("plain", "packed")],
    )


@pytest.mark.parametrize("name", OTHERS)
def test_others(pool: Any, name: str) -> None:
    num_ranks, cases = OTHERS[name]
    exact(pool, num_ranks, *cases)


@on_ranks(2)
def test_losses(axis: Any) -> None:
    """Of labels, which are counted in three ways; of routers, beside them and alone."""
    given, model = batch("plain"), parallelize(build("mixtral", "eager", router_aux_loss_coef=0.5), axis)
    ids, rows = given["input_ids"], shifted(model, given["labels"])
    plain = model(**given)
    mean, count, again = (
        summed(model(**given, **more).loss)
        for more in ({}, {"num_items_in_batch": torch.tensor(10)}, {"shift_labels": rows})
    )
    assert mean > 1 and model(input_ids=ids).loss is None and plain.aux_loss is None
    assert torch.isclose(mean * (rows != -100).sum(), count * 10, rtol=1e-9) and torch.isclose(mean, again, rtol=1e-9)
    full, alone = (model(**x, output_router_logits=True) for x in (given, {"input_ids": ids}))
    term = summed(full.aux_loss)
    assert full.router_logits is not None and term > 1
    assert torch.isclose(summed(full.loss), mean + 0.5 * term) and torch.isclose(summed(alone.aux_loss), term)
    model.config.output_router_logits = True
    assert torch.equal(model(**given, output_router_logits=False).loss, plain.loss)


@on_ranks(2)
def test_evaluation_in_inference_mode(axis: Any) -> None:
    """With routers and without; and a term that is added in place."""
    given, found = batch("plain"), list[Tensor]()
    model = parallelize(build("mixtral", "eager", router_aux_loss_coef=0.5), axis).eval()
    for routers in (False, True):
        with torch.no_grad():
            wanted = model(**given, output_router_logits=routers).loss
        with torch.inference_mode():
            found.append(summed(model(**given, output_router_logits=routers).loss).clone())
        assert torch.isclose(found[-1], summed(wanted), rtol=1e-6 if routers else 1e-9)
    assert found[1] > found[0] + 0.1
    with torch.inference_mode(), pytest.raises(UnsupportedError, match="the loss of the labels alone"):
        _with_term(model, given)


@on_ranks(2)
def test_ranks_decide_alike_on_a_loss_of_routers(axis: Any) -> None:
    """Where logits are not numbers on one rank, or its loss has a term more."""
    model, other = (parallelize(build("mixtral", "eager"), axis) for _ in range(2))
    term, own = dist.get_rank(), other.loss_function
    model.lm_head.register_forward_hook(lambda module, args, logits: logits * torch.nan if term else logits)
    assert summed(model(**batch("plain"), output_router_logits=True).loss).isnan()
    other.loss_function = lambda *args, **kwargs: own(*args, **kwargs) + term
    with pytest.raises(ArgumentError, match="the losses of labels and of routers"):
        other(**batch("plain"), output_router_logits=True)


@on_ranks(2)
def test_ways_to_say_documents(axis: Any) -> None:
    """Of one packed row."""
    model = parallelize(build("gpt2", "eager"), axis, gather_output=True)
    ids, lengths = batch("plain")["input_ids"][:1], [7, 23, S - 30]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    edges, documents = torch.tensor([0, *lengths]).cumsum(0), (positions == 0).cumsum(-1)
    calls: list[dict[str, Any]] = [
        {"position_ids": positions},
        {"documents": documents},
        {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": 30, "max_length_k": 30},
        {"documents": documents, "position_ids": positions},
        {},
    ]
    first, *others, plain = (model(input_ids=ids, **call).logits for call in calls)
    assert first.shape == (1, S, VOCABULARY)
    assert all(apart(x, first) < BOUND for x in others) and apart(plain, first) > 0.1


@on_ranks(2)
def test_lengths_change_from_batch_to_batch(axis: Any) -> None:
    model, reference = build("mistral", "eager"), build("mistral", NAME)
    model.model.layers[1] = copy.deepcopy(model.model.layers[1])  # which has a config of its own then
    parallelize(model, axis)
    for length in (S, 16, 33, S):
        ids = batch("plain")["input_ids"][:, :length]
        logits = model(input_ids=ids).logits
        assert sequence_of(model).length == length
        whole = reference(input_ids=ids, use_cache=False).logits
        assert apart(sequence_of(model).unshard(logits), whole) < BOUND


@on_ranks(2)
def test_gathered_outputs_and_inputs_embeds(axis: Any) -> None:
    given, reference = batch("packed"), build("llama", NAME)
    whole = reference(**given, output_hidden_states=True, use_cache=False)
    output = parallelize(build("llama", "eager"), axis, gather_output=True)(**given, output_hidden_states=True)
    assert len(output.hidden_states) == 3 and type(output) is type(whole)
    pairs = zip([output.logits, *output.hidden_states], [whole.logits, *whole.hidden_states], strict=True)
    assert all(apart(x, y) < BOUND for x, y in [*pairs, (summed(output.loss), whole.loss)])
    embeds = reference.model.embed_tokens(given.pop("input_ids")).detach()
    leaves = [embeds.clone().requires_grad_() for _ in range(2)]
    _, loss = whole_loss(reference, documents_of(given), inputs_embeds=leaves[0], **given)
    output = parallelize(build("llama", "eager"), axis)(inputs_embeds=leaves[1], **given)
    output.loss.backward()
    assert apart(summed(output.loss), loss) < BOUND and apart(summed(leaves[1].grad), leaves[0].grad) < BOUND


# ---- dropout


def dropped(rank: int, layout: Any, seed: int = 0) -> list[Tensor]:
    """Logits of three forwards in training, and of one in evaluation."""
    cp, ids = mesh((dist.get_world_size(),), ("cp",)), batch("plain")["input_ids"]
    model = build("llama", "eager", attention_dropout=0.3)
    parallelize(model, cp, layout=layout, gather_output=True, dropout_seed=seed)
    return [*(model(input_ids=ids).logits for _ in range(3)), model.eval()(input_ids=ids).logits]


def test_dropout_is_the_same_on_any_ranks(pool: Any) -> None:
    """And another with another seed."""
    one, again, other = (pool(1).run(dropped, ZigZag(), *x)[0] for x in ((), (0,), (1,)))
    for ranks, layout in ((2, ZigZag()), (3, Striped())):
        assert all(apart(x, y) < BOUND for x, y in zip(pool(ranks).run(dropped, layout)[0], one, strict=True))
    assert all(apart(one[i], one[j]) > 1e-2 for i in range(4) for j in range(i))
    assert torch.equal(again[0], one[0]) and apart(other[0], one[0]) > 1e-2


def replicas(rank: int, shape: tuple[int, ...], names: tuple[str, ...]) -> tuple[list[int], list[int], int]:
    """This rank's place in dp and in cp, its index as ``data`` says it in three ways, and the seed of a forward."""
    whole = mesh(shape, names)
    data = whole["dp", "cp"] if names.index("dp") < names.index("cp") else whole["cp", "dp"]
    flat = data._flatten("data")
    model = parallelize(build("llama", "eager"), whole["cp"], data=flat)
    seen: list[int] = []
    model.model.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(int(kwargs["attention_mask"].seed)), with_kwargs=True
    )
    model(input_ids=batch("plain")["input_ids"])
    found = [replica_of(whole["cp"], x) for x in (data, flat, flat.get_group())]
    with pytest.raises(ArgumentError, match=r"data: expected ranks .* of cp among its own"):
        parallelize(build("llama", "eager"), mesh((2, 2), ("dp", "cp"))["cp"], data=mesh((2, 2), ("dp", "cp"))["dp"])
    return [whole.get_local_rank(x) for x in ("dp", "cp")], found, seen[0]


@pytest.mark.parametrize(
    ("shape", "names"),
    [((2, 2), ("dp", "cp")), ((2, 2), ("cp", "dp")), ((2, 2, 1), ("dp", "cp", "tp")), ((2, 1, 2), ("dp", "cp", "tp"))],
    ids=str,
)
def test_dropout_of_replicas(pool: Any, shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    """Ranks with the same tokens, of cp and of tp, have one seed, and replicas others."""
    answers = pool(4).run(replicas, shape, names)
    assert all(found == [dp] * 3 for (dp, _), found, _ in answers)
    assert len({(dp, seed) for (dp, _), _, seed in answers}) == len({seed for *_, seed in answers}) == 2


@on_ranks(2)
def test_recomputed_layers_drop_the_same(axis: Any) -> None:
    found = []
    for reentrant in (None, False, True):
        model = parallelize(build("llama", "eager", attention_dropout=0.3), axis)
        if reentrant is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model(**batch("packed")).loss.backward()
        found.append([x.grad for x in model.parameters()])
    for others in found[1:]:
        assert all(apart(x, y) < BOUND for x, y in zip(others, found[0], strict=True))


# ---- what is refused


def call(of: Callable[[Any, dict[str, Any]], Any], family: str = "llama") -> Callable[[Any], Any]:
    return lambda axis: of(parallelize(build(family, "eager"), axis), batch("plain"))


def given(family: str = "llama", **more: Any) -> Callable[[Any], Any]:
    """A call with these arguments too."""
    return call(lambda model, x: model(**x | more), family)


def patched(name: str, of: Callable[[Any], Any], family: str = "llama", **more: Any) -> Callable[[Any], Any]:
    """A call of a model in whose file a function is another, made from the one that it is."""

    def run(model: Any, x: dict[str, Any]) -> None:
        file = sys.modules[type(model).__module__]
        with mock.patch.object(file, name, of(getattr(file, name))):
            model(**x | more)

    return call(run, family)


def _with_term(model: Any, x: Any) -> None:
    own = model.loss_function
    model.loss_function = lambda *args, **kwargs: own(*args, **kwargs).add_(1)
    model(**x)


def _without_weight(model: Any, x: Any) -> None:
    """As JetMoE, which calls it aux_loss_coef."""
    del model.router_aux_loss_coef
    model(**x, output_router_logits=True)


def images(family: str, text: Any = None, norm: Any = None, **changes: Any) -> Callable[[Any], Any]:
    """A call with arguments changed, those of the text tower too; or with a hook of its norm."""

    def run(axis: Any) -> None:
        x = batch_with_images(family, "plain")
        x |= {name: change(x) for name, change in changes.items()}
        model = build_with_images(family, "eager")
        tower = model.model.language_model
        if text:
            tower.register_forward_pre_hook(lambda _, args, kwargs: (args, kwargs | text), with_kwargs=True)
        if norm:
            tower.norm.register_forward_pre_hook(norm)
        parallelize(model, axis)(**{name: value for name, value in x.items() if value is not None})

    return run


def _text_alone(axis: Any) -> None:
    model = parallelize(build_with_images("gemma3", "eager"), axis)
    model.model.language_model(inputs_embeds=torch.ones(B, S, 32, dtype=torch.float64))


def _attends(module: Any, args: tuple[Tensor]) -> None:
    q = args[0][:, None]
    torch.nn.functional.scaled_dot_product_attention(q, q, q)


def counts_from_tokens(axis: Any) -> None:
    model = transformers.RobertaForCausalLM(transformers.RobertaConfig(**_TINY, is_decoder=True))
    parallelize(model, axis)(input_ids=torch.ones(1, 8, dtype=torch.long))


_TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
_VISION = {"vision_config": {"model_type": "siglip_vision_model", **_TINY}}


def tiny(name: str, **options: Any) -> Any:
    """Without memory for weights."""
    made = getattr(transformers, name)
    with torch.device("meta"):
        return made(made.config_class(**_TINY | options))


def model_of(name: str, **options: Any) -> Callable[[Any], Any]:
    return lambda _: check_model(tiny(name, **options))


def adapted(name: str, **options: Any) -> Callable[[Any], Any]:
    def run(_: Any) -> None:
        import peft

        config = getattr(peft, name)(task_type="CAUSAL_LM", **options)
        check_model(peft.get_peft_model(tiny("LlamaForCausalLM"), config).get_base_model())

    return run


def changed(change: Callable[[Any], None]) -> Callable[[Any], Any]:
    """A model that was changed."""

    def run(_: Any) -> None:
        change(model := tiny("LlamaForCausalLM"))
        check_model(model)

    return run


def _with_liger(model: Any) -> None:
    """As liger_kernel.transformers.apply_liger_kernel_to_llama(model=model) of 0.8.5 does, which needs Triton."""

    def lce_forward(self: Any, input_ids: Any = None, labels: Any = None) -> None: ...

    lce_forward.__module__ = "liger_kernel.transformers.model.llama"
    model.forward = MethodType(lce_forward, model)


def _with_convolution(model: Any) -> None:
    model.model.extra = torch.nn.Conv1d(1, 1, 1, device="meta")


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a mask of pairs": (given(attention_mask=torch.ones(B, 1, S, S, dtype=torch.bool)), "documents=ids [B, S] can"),
    "a cache": (given(use_cache=True), "pass use_cache=False"),
    "keys of before": (given(cache=object()), "cp_mesh.inference.decode reads sharded ones"),
    "last logits": (given(logits_to_keep=1), "logits_to_keep"),
    "weights": (given(output_attentions=True), "output_attentions"),
    "tuples": (given(return_dict=False), "return_dict=True"),
    "an unknown argument": (given(pixels=torch.ones(1)), "pixels"),
    "mRoPE": (given(position_ids=torch.zeros(3, B, S)), "mRoPE"),
    "lengths of a shorter row": (
        call(lambda m, x: m(input_ids=x["input_ids"][:1], cu_seq_lens_q=torch.tensor([0, 7, S - 1]))),
        f"cu_seq_lens_q: expected an end at {S}, in one batch row, got an end at {S - 1}, in 1 batch row; ",
    ),
    "labels of other rows": (given(labels=torch.ones(B, 9, dtype=torch.long)), "labels"),
    "routers of another kind": (
        given(output_router_logits=True),
        "another loss of routers; model.config.get_text_config().output_router_logits = False",
    ),
    "routers with other weights": (call(_without_weight, "mixtral"), "a model without router_aux_loss_coef"),
    "another loss of routers": (
        patched("load_balancing_loss_func", lambda own: lambda *x: 2 * own(*x), "mixtral", output_router_logits=True),
        "another loss of routers",
    ),
    "a loss of routers with other arguments": (  # as Doge, whose third one is a number of keys
        patched(
            *("load_balancing_loss_func", lambda own: lambda x, e, keys, top_k=2, mask=None: own(x, e, top_k, mask)),
            *("mixtral",),
            output_router_logits=True,
        ),
        "another loss of routers",
    ),
    "a term added in place": (call(_with_term), "the loss of the labels alone"),
    "compiled as a whole": (
        call(lambda m, x: torch.compile(m, backend="aot_eager")(**x)),
        "for layer in model.model.layers: layer.compile()",
    ),
    "a part of the model": (call(lambda m, x: m.model(x["input_ids"])), "not a part of it"),
    "an unknown kernel": (
        lambda axis: parallelize(build("llama", "eager"), axis, kernel="fa4")(**batch("plain")),
        "fa4",
    ),
    "a module": (lambda _: check_model(torch.nn.Linear(1, 1)), "a PreTrainedModel"),
    "cross-attention": (model_of("BertLMHeadModel", is_decoder=True, add_cross_attention=True), "cross-attention"),
    "an encoder and a decoder": (model_of("T5ForConditionalGeneration"), "cross-attention"),
    "another head": (model_of("LlamaForSequenceClassification"), "a class whose outputs may not be rows"),
    "a pooler": (model_of("BertModel"), "pass add_pooling_layer=False"),
    "no attention of the interface": (model_of("FalconForCausalLM"), "0 modules that mix rows in a known way"),
    "no positions": (model_of("BloomForCausalLM"), "a forward without position_ids"),
    "a loss of Liger": (changed(_with_liger), "got Liger's fused_linear_cross_entropy"),
    "layers that are dropped": (model_of("OPTForCausalLM", layerdrop=0.1, ffn_dim=16), "layerdrop=0.1; layerdrop=0"),
    "a convolution": (changed(_with_convolution), "model.extra, a Conv1d"),
}
REFUSED |= {} if OLD else {
    "the model's own mask": (  # as models of images ask for one
        patched("create_causal_mask", lambda own: partial(own, or_mask_function=lambda b, h, q, k: k < 4)),
        "got or_masks",
    ),
    "blocks of some rows": (
        patched("create_causal_mask", lambda own: partial(own, block_sequence_ids=torch.zeros(B, 5).long())),
        "blocks: expected ids of 45 tokens, got 24",
    ),
    "keys chosen by an indexer": (
        model_of("MiniMaxM3VLForCausalLM", layer_types=["full_attention", "minimax_m3_sparse"]),
        "layer_types minimax_m3_sparse",
    ),
    "state space layers": (model_of("MambaForCausalLM", state_size=4), "MambaMixer that calls mamba_inner_fn"),
    "other images": (
        model_of("AyaVisionForConditionalGeneration", text_config={"model_type": "cohere2", **_TINY}, **_VISION),
        "vision_config",
    ),
    "a part of a model with images": (
        lambda _: check_model(build_with_images("gemma3", "eager").model),
        "classes named ...ForConditionalGeneration",
    ),
    "adapters that read whole rows": (
        adapted("LoraConfig", alora_invocation_tokens=[5]),
        "IA3, LN_TUNING, LOHA, LOKR, MISS, VERA, got ALORA; others may read the whole sequence",
    ),
    "adapters with a loss": (adapted("AdaLoraConfig", total_step=9), "got ADALORA"),
    "positions that a model counts from tokens": (counts_from_tokens, "pass position_ids of the whole batch"),
    "blocks beyond a window": (
        images("paligemma", token_type_ids=lambda x: (torch.arange(S).expand(B, S) >= 11).long()),
        "blocks with a window: expected at most 10 tokens in each, got 11",
    ),
    "a beginning that is not told": (images("paligemma", token_type_ids=lambda x: None), "is_causal"),
    "documents without positions": (
        images("qwen2_vl", documents=lambda x: torch.zeros(B, S, dtype=torch.long)),
        "pass position_ids of the whole batch, [3, B, S]",
    ),
    "positions of a part": (images("qwen2_vl", position_ids=lambda x: torch.zeros(3, B, 9)), "position_ids"),
    "images of each rank": (
        images("llava", pixel_values=lambda x: x["pixel_values"] + dist.get_rank()),
        "the same pixel_values on every cp rank",
    ),
    "attention of its own": (images("gemma3", norm=_attends), "scaled_dot_product_attention"),
    "arguments that are not known": (images("llava", text={"visual": 1}), "visual"),
    "masks of pairs": (
        images("llava", text={"attention_mask": torch.ones(B, 1, S, S, dtype=torch.bool)}),
        "expected padding [B, S]",
    ),
    "the text tower alone": (_text_alone, "not a part of it"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(2)
def test_refused(axis: Any, name: str) -> None:
    run, words = REFUSED[name]
    with pytest.raises(REFUSALS, match=re.escape(words)):
        run(axis)


@newest
def test_masks_are_read_by_name() -> None:
    masks = transformers.masking_utils
    window, none = masks.sliding_window_causal_mask_function(5), torch.zeros(1, dtype=torch.long)
    assert read_mask(masks.causal_mask_function) == Said(True, None, None)
    assert read_mask(window) == Said(True, 4, None)
    assert read_mask(masks.chunked_causal_mask_function(7, none)) == Said(True, None, 7)
    assert read_mask(masks.sliding_window_bidirectional_mask_function(5)) == Said(False, 5, None)
    remapped = masks.remap_positions_for_packed_sequence(window, none[None])
    packed = masks.and_masks(remapped, documents := masks.packed_sequence_mask_function(none[None]))
    assert read_mask(packed) == Said(True, 4, None)
    blocks = masks.blockwise_overlay(none)
    relaxed = masks.or_masks(masks.causal_mask_function, blocks)
    assert read_mask(relaxed) == Said(True, None, None, none)
    assert read_mask(masks.and_masks(relaxed, masks.sliding_window_overlay(5))) == Said(True, 4, None, none)
    for both in (masks.or_masks(packed, blocks), masks.and_masks(masks.or_masks(remapped, blocks), documents)):
        assert read_mask(both) == Said(True, 4, None, none, beyond=True)
    for twice in ((relaxed, masks.causal_mask_function), (window, masks.sliding_window_overlay(6))):
        with pytest.raises(ArgumentError, match="one window, chunk or kind of blocks at most"):
            read_mask(masks.and_masks(*twice))
    for unknown in (lambda *_: True, masks.and_masks(window, lambda *_: True), masks.or_masks(window, window)):
        with pytest.raises(UnsupportedError, match="one of masking_utils"):
            read_mask(unknown)


@newest
@pytest.mark.parametrize("kind", ["dynamic", "longrope", "scale"])
@on_ranks(2)
def test_refused_lengths(axis: Any, kind: str) -> None:
    """Beyond which a model depends on the largest position, in two layouts."""
    said, ids = [], batch("plain")["input_ids"]
    for layout in (ZigZag(), Striped()):
        if kind == "scale":
            model = build("llama4", "eager", attn_temperature_tuning=True, floor_scale=40)
        else:
            model = build("llama", "eager")
            model.config.rope_parameters |= {"rope_type": kind, "original_max_position_embeddings": 40}
            model.config.max_position_embeddings = 40
        parallel = parallelize(model, axis, layout=layout)
        parallel(input_ids=ids[:, :39])
        for length in (41, S):
            try:
                parallel(input_ids=ids[:, :length])
                said.append("")
            except UnsupportedError as error:
                said.append(str(error))
    short_zigzag, zigzag, short_striped, striped = said
    words = "attn_temperature_tuning" if kind == "scale" else kind
    assert all(words in x for x in (zigzag, short_zigzag, short_striped))
    assert striped == "" if kind == "longrope" else words in striped
    if kind == "dynamic":
        assert "Striped" not in zigzag + striped and "documents of 40 tokens at most: in every layout" in striped
    if kind == "longrope":
        assert "; or layout=Striped(), where every rank has later positions" in zigzag
        assert short_zigzag.endswith("; or longer ones in layout=Striped()")
        assert short_striped.endswith("documents of 40 tokens at most; or longer ones")


@on_ranks(2)
def test_layout_and_watch_are_followed(axis: Any) -> None:
    model = parallelize(build("llama", "eager"), axis)
    for case, layout in {"packed": "Balanced", "plain": "ZigZag"}.items():
        model(**batch(case))
        assert type(sequence_of(model).layout).__name__ == layout
    for watch in (False, True):
        model = build("llama", "eager")
        model.model.norm.register_forward_pre_hook(_attends)  # attention beside AttentionInterface
        parallelize(model, axis, **({} if watch else {"watch": False}))
        with pytest.raises(REFUSALS, match="scaled_dot_product_attention") if watch else nullcontext():
            model(**batch("plain"))


def test_the_table_has_every_causal_family() -> None:
    """Of the version that it was made with, which is the one that is pinned."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    rows = list(csv.DictReader((ROOT / "docs" / "results" / "transformers_families.csv").open()))
    if transformers.__version__ != rows[0]["transformers"]:
        pytest.skip(f"the table is of Transformers {rows[0]['transformers']}")
    assert [row["family"] for row in rows] == [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "mistral4"]
    check_table(rows)
    of_all = {row["family"]: row for row in rows}
    released = {row["family"]: row for row in rows if row["checkpoint"] != "default"}
    assert released["mistral4"]["verdict"] == "exact"
    for family in ("minimax_m3_vl_text", "qwen4_exp"):  # whose keys are chosen by an indexer of pools
        assert of_all[family]["verdict"] == "refused"
    assert {"lfm2", "llama4_text", "gemma4_text", "gpt_oss"} < {*released} and len(released) > 60
    assert f"transformers=={rows[0]['transformers']}" in (ROOT / "pyproject.toml").read_text()
    over_tp = list(csv.DictReader((ROOT / "docs" / "results" / "transformers_families_tp.csv").open()))
    assert [row["family"] for row in rows] == [row["family"] for row in over_tp]
    check_table(over_tp)
    served = {row["family"] for row in over_tp if row["verdict"] == "exact"}
    assert {"llama", "mistral", "qwen2", "qwen3"} < served <= {x["family"] for x in rows if x["verdict"] == "exact"}


def check_table(rows: list[dict[str, str]]) -> None:
    assert {row["verdict"] for row in rows} == {"exact", "refused"}
    for row in rows:
        assert row["reason"] if row["verdict"] == "refused" else float(row["gradient"]) < BOUND


@newest
def test_what_the_page_says_of_towers() -> None:
    """FLOPs of a step: 6 for a weight and token, 12 for a pair and channel; and inputs of layers in bfloat16."""
    vision, patches, length = transformers.Qwen3_5Config().vision_config, 4, 2**16
    shape = {"num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 24}
    shape |= {"num_key_value_heads": 4, "linear_num_value_heads": 48, "head_dim": 256}
    vision.out_hidden_size = shape["hidden_size"]
    config = transformers.Qwen3_5TextConfig(**shape)
    with torch.device("meta"):
        models = transformers.AutoModel.from_config(vision), transformers.Qwen3_5ForCausalLM(config)
    of_tower, of_text = (
        sum(x.numel() for name, x in model.named_parameters() if "embed" not in name or "patch" in name)
        for model in models
    )
    of_image = patches * (6 * of_tower + 12 * patches * 1024 * vision.hidden_size * vision.depth) / 2
    of_token = 6 * of_text + 12 * length / 2 * 24 * 256 * config.layer_types.count("full_attention")
    shares = [round(100 * of_image / (of_image + of_token / size)) for size in (2, 8)]
    kept = patches * vision.depth * vision.hidden_size * 2 / 1024
    page = " ".join((ROOT / "docs" / "transformers.md").read_text().split())
    assert "{} % of a rank's FLOPs on 2 ranks, {} % on 8;".format(*shares) in page
    assert f"the tower keeps {kept:.0f} KiB per image token" in page


@on_ranks(2)
def test_the_page_runs() -> None:
    whole, packed = mesh((1, 2, 1), ("dp", "cp", "tp")), batch("packed")
    positions = packed["position_ids"]
    names = {
        **{"model": build("llama", "eager"), "mesh": whole, "data": whole["dp", "cp"]._flatten("dp_cp")},
        **{"tokens": packed["input_ids"], "position_ids": positions, "documents": documents_of(packed)},
        "large_model": build("qwen3", "eager"),
        "cumulative_lengths": torch.tensor([0, 7, 30, S]),
        "attention_mask": torch.ones(B, S, dtype=torch.long),
    }
    if not OLD:
        inputs = batch_with_images("gemma3", "plain")
        labels = inputs.pop("labels")
        names |= {"vision_model": build_with_images("gemma3", "eager"), "inputs": inputs, "labels": labels}
    for block in blocks("transformers"):
        if not OLD or not {"vision_model", "large_model"} & {*re.findall(r"\w+", block)}:
            exec(block, names)
    whole_logits = build("llama", NAME)(input_ids=packed["input_ids"], use_cache=False).logits
    assert apart(names["logits"], whole_logits) < BOUND
    assert apart(names["same"].logits, names["packed"].logits) < BOUND
    sequence = ShardedSequence(whole["cp"], "auto")
    of_all, of_row = (sequence.for_batch(S, batch_mask(position_ids=x)) for x in (positions, positions[:1]))
    row, of_packed = of_row.unshard(names["row"].logits), of_all.unshard(names["packed"].logits)
    assert of_row != of_all and apart(row, of_packed[:1]) < BOUND  # another batch has another layout
    assert OLD or names["share"].requires_grad
