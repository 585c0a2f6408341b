"""Models of Transformers on ranks, against one rank: logits, loss and every gradient, in fp64."""

from __future__ import annotations

import copy
import csv
import functools
import re
import sys
from fnmatch import fnmatch
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist

transformers = pytest.importorskip("transformers")

import oracle  # noqa: E402
from families import FAMILIES, IMAGE, OLD, VOCABULARY, build, build_with_images  # noqa: E402
from inside import inner  # noqa: E402
from ranks import mesh  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from cp_mesh import (  # noqa: E402
    ArgumentError,
    ShardedSequence,
    Striped,
    UnsupportedError,
    ZigZag,
    batch_mask,
    sum_gradients,
)
from cp_mesh.integrations.transformers import parallelize, sequence_of  # noqa: E402

IMAGES, check_model = inner("families", "IMAGES", "check_model")
Said, read_mask = inner("masks", "Said", "read_mask")
replica_of = inner("root", "replica_of")

ROOT = Path(__file__).resolve().parents[2]
BOUND = 1e-6
newest = pytest.mark.skipif(OLD, reason="says what Transformers 4 says in another way, or has not")
LAYOUTS: dict[str, Any] = {"zigzag": ZigZag(), "striped": Striped(), "auto": "auto"}
B, S = 2, 45
"""Not a multiple of what any layout wants, so every batch is padded."""


def batch(case: str, first: int | None = None) -> dict[str, Tensor]:
    """A whole batch; ``first``: the position of a document's first token, which is then said in every case."""
    numbers = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (B, S), generator=numbers)
    labels = ids.roll(1, 0)  # other tokens: BERT's are not those that it sees
    labels[:, 5:9] = -100
    found = {"input_ids": ids, "labels": labels}
    if case == "packed":  # other documents in every row
        rows = [(7, 23, S - 30), (19, S - 20, 1)]
        found["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
        found["position_ids"] += first or 0
    elif first is not None:
        found["position_ids"] = torch.arange(first, first + S)[None]
    if "padded" in case:
        found["attention_mask"] = torch.ones(B, S, dtype=torch.long)
        for row, kept in enumerate((40, 31)):
            hidden = slice(0, S - kept) if case == "left padded" else slice(kept, None)
            found["attention_mask"][row, hidden] = 0
            if case != "padded with labels":
                labels[row, hidden] = -100
    return found


def batch_with_images(family: str, case: str) -> dict[str, Tensor]:
    """Three images in two rows, each within one document and not in padding."""
    given, width = batch(case), 16 if family == "gemma3" else 4
    ids = given["input_ids"] = given["input_ids"].clamp(max=IMAGE - 5)  # other tokens than those with a meaning
    for row, begin in ((0, 8), (1, 20), (0, 26) if case == "left padded" else (1, 1)):
        ids[row, begin : begin + width] = IMAGE
    of_images = (ids == IMAGE).long()
    numbers = torch.Generator().manual_seed(2)
    side = {"got_ocr2": 32, "internvl": 16, "mistral3": 16}.get(family, 4 * int(width**0.5))
    shape = (3, 3, side, side)
    if "qwen" in family:
        shape = (3 * 16, 3 * 4)
        given |= {"image_grid_thw": torch.tensor([[1, 4, 4]] * 3), "mm_token_type_ids": of_images}
        if case == "packed":  # counted as text; and by time, height and width, in ways of their own
            counted = given["position_ids"]
            given["position_ids"] = torch.stack([counted, counted, counted // 2, counted % 5])
            if family == "qwen2_5_vl":  # where documents are said beside them
                given |= {"documents": (counted == 0).cumsum(-1), "position_ids": given["position_ids"][1:]}
    elif family == "mistral3":
        given["image_sizes"] = torch.tensor([[side, side]] * 3)
    elif family == "gemma3":
        given["token_type_ids"] = of_images
    elif family == "paligemma":  # beginnings that see each other
        given["token_type_ids"] = (given.get("position_ids", torch.arange(S).expand(B, S)) >= 6).long()
    given["pixel_values"] = torch.randn(shape, generator=numbers, dtype=torch.float64)
    return given


def documents_of(given: dict[str, Tensor]) -> Tensor | None:
    ids = given.get("position_ids")
    if ids is not None and ids.ndim == 3:
        ids = ids[0]
    return given.get("documents") if ids is None or "documents" in given else (ids == ids[0, 0]).cumsum(-1)


def apart(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12)).item()


def summed(x: Tensor) -> Tensor:
    x = x.detach().clone()
    dist.all_reduce(x)
    return x


def compare(
    rank: int,
    family: str,
    case: str,
    layout: Any,
    changes: Any = None,
    made: Any = build,
    first: int | None = None,
) -> dict[str, float]:
    """How far a parallel model is from the oracle: of logits, loss and the worst gradient."""
    images = made is build_with_images
    given = batch_with_images(family, case) if images else batch(case, first)
    reference = made(family, oracle.NAME)
    # with padding to look at, Transformers looks for no documents, within which it would misplace blocks
    whole = {"attention_mask": torch.ones(B, S, dtype=torch.long)} if images else {}
    whole |= {name: x for name, x in given.items() if name != "documents"}
    logits, loss = oracle.whole_loss(reference, documents_of(given), **whole)
    cp = mesh((dist.get_world_size(),), ("cp",))
    model = parallelize(made(family, "eager"), cp, layout=layout, gather_output=images)
    if changes is not None:
        changes(model)
    output = model(**given)
    output.loss.backward()
    kept = given.get("attention_mask", torch.ones(B, S)).bool()
    assert output.get("past_key_values") is output.get("cache") is None
    found = output.logits if images else sequence_of(model).unshard(output.logits)
    grads = {name: summed(torch.zeros_like(x) if x.grad is None else x.grad) for name, x in model.named_parameters()}
    wanted = {name: x.grad for name, x in reference.named_parameters() if x.grad is not None}
    assert len(wanted) > 5 and set(wanted) <= set(grads)
    largest = max(x.abs().max().item() for x in wanted.values())
    worst = max(
        ((grads[name] - x).abs().max() / x.abs().max().clamp(min=1e-3 * largest)).item() for name, x in wanted.items()
    )
    return {"logits": apart(found[kept], logits[kept]), "loss": apart(summed(output.loss), loss), "gradient": worst}


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("case", ["plain", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(pool: Any, family: str, case: str, num_ranks: int) -> None:
    if OLD and (family, case) == ("llama4", "packed"):
        pytest.skip("the oracle's masks are of Transformers 4, which counts chunks through all documents")
    for name, layout in LAYOUTS.items():
        if name != "auto" or case == "packed":
            for found in pool(num_ranks).run(compare, family, case, layout):
                assert max(found.values()) < BOUND, (name, found)


@newest
@pytest.mark.parametrize(
    ("case", "num_ranks"),
    [
        *(("plain", 2), ("packed", 3), ("left padded", 2)),
        *(pytest.param(*x, marks=pytest.mark.full) for x in [("plain", 3), ("packed", 2), ("left padded", 3)]),
    ],
)
@pytest.mark.parametrize("family", IMAGES)
def test_images(pool: Any, family: str, case: str, num_ranks: int) -> None:
    for layout in (ZigZag(), Striped()):
        for found in pool(num_ranks).run(compare, family, case, layout, None, build_with_images):
            assert max(found.values()) < BOUND, (layout, found)


def images_under_fsdp(rank: int) -> list[float]:
    """Loss and every gradient, those of the images' tower among them; and whole logits and hidden states."""
    cp, given = mesh((dist.get_world_size(),), ("cp",)), batch_with_images("gemma3", "plain")
    reference = build_with_images("gemma3", oracle.NAME)
    logits, loss = oracle.whole_loss(reference, **given)
    model = parallelize(build_with_images("gemma3", "eager"), cp, gather_output=True)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in model.model.language_model.layers:
        fully_shard(layer, mesh=cp)
    fully_shard(model, mesh=cp)
    sum_gradients(model)
    output = model(**given, output_hidden_states=True)
    output.loss.backward()
    assert output.image_hidden_states.shape[0] == 3 and output.hidden_states[0].shape[1] == S
    wanted = {name: x.grad for name, x in reference.named_parameters()}
    assert sum("vision" in name and x is not None and bool(x.any()) for name, x in wanted.items()) > 5
    grads = [apart(x.grad.full_tensor(), wanted[name]) for name, x in model.named_parameters() if x.grad is not None]
    assert len(grads) == sum(x is not None for x in wanted.values())
    return [apart(output.logits, logits), apart(summed(output.loss), loss), *grads]


@newest
def test_images_under_fsdp(pool: Any) -> None:
    assert max(pool(2).run(images_under_fsdp)[0]) < BOUND


def _changed(family: str, **changes: Any) -> Any:
    def call(cp: Any) -> None:
        given = batch_with_images(family, "plain")
        given |= {name: change(given) for name, change in changes.items()}
        model = parallelize(build_with_images(family, "eager"), cp)
        model(**{name: x for name, x in given.items() if x is not None})

    return call


def _attends_in_text(cp: Any) -> None:
    model = parallelize(build_with_images("gemma3", "eager"), cp)
    model.model.language_model.norm.register_forward_pre_hook(_attends)
    model(**batch_with_images("gemma3", "plain"))


def _other_arguments_of_text(cp: Any) -> None:
    model = build_with_images("llava", "eager")
    tower = model.model.language_model
    tower.register_forward_pre_hook(lambda _, args, kwargs: (args, kwargs | {"visual": 1}), with_kwargs=True)
    parallelize(model, cp)(**batch_with_images("llava", "plain"))


def _pairs_of_text(cp: Any) -> None:
    model = build_with_images("llava", "eager")
    pairs = {"attention_mask": torch.ones(B, 1, S, S, dtype=torch.bool)}
    model.model.language_model.register_forward_pre_hook(lambda _, args, x: (args, x | pairs), with_kwargs=True)
    parallelize(model, cp)(**batch_with_images("llava", "plain"))


def _text_alone(cp: Any) -> None:
    model = parallelize(build_with_images("gemma3", "eager"), cp)
    model.model.language_model(inputs_embeds=torch.ones(B, S, 32, dtype=torch.float64))


REFUSED_IMAGES: dict[str, tuple[Any, str]] = {
    "blocks beyond a window": (
        _changed("paligemma", token_type_ids=lambda x: (torch.arange(S).expand(B, S) >= 11).long()),
        "blocks with a window: expected at most 10 tokens in each, got 11",
    ),
    "a beginning that is not told": (_changed("paligemma", token_type_ids=lambda x: None), "is_causal"),
    "documents without positions": (
        _changed("qwen2_vl", documents=lambda x: torch.zeros(B, S, dtype=torch.long)),
        "pass position_ids of the whole batch, [3, B, S]",
    ),
    "positions of a part": (_changed("qwen2_vl", position_ids=lambda x: torch.zeros(3, B, 9)), "position_ids"),
    "images of each rank": (
        _changed("llava", pixel_values=lambda x: x["pixel_values"] + dist.get_rank()),
        "the same pixel_values on every cp rank",
    ),
    "attention of its own": (_attends_in_text, "scaled_dot_product_attention"),
    "arguments that are not known": (_other_arguments_of_text, "visual"),
    "masks of pairs": (_pairs_of_text, "expected padding [B, S]"),
    "the text tower alone": (_text_alone, "not a part of it"),
}


def refused_images(rank: int, name: str) -> None:
    REFUSED_IMAGES[name][0](mesh((dist.get_world_size(),), ("cp",)))


@newest
@pytest.mark.parametrize("name", REFUSED_IMAGES)
def test_refused_images(pool: Any, name: str) -> None:
    for raised in pool(2).run_expecting_error(refused_images, name):
        assert raised is not None and raised.type in ("UnsupportedError", "ArgumentError", "RankMismatchError"), raised
        assert REFUSED_IMAGES[name][1] in raised.message, raised.message


@pytest.mark.parametrize("case", ["padded", "left padded", "padded with labels"])
@pytest.mark.parametrize("family", sorted({"llama", "gemma3", "llama4", "bert"} & set(FAMILIES)))
def test_padding(pool: Any, family: str, case: str) -> None:
    for found in pool(2).run(compare, family, case, ZigZag()):
        assert max(found.values()) < BOUND, found


def routers(family: str, implementation: str) -> Any:
    return build(family, implementation, output_router_logits=True, router_aux_loss_coef=0.5)


@pytest.mark.parametrize("case", ["plain", "packed", "padded", "left padded"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_losses_of_routers(pool: Any, family: str, case: str) -> None:
    """In float32, as Transformers has them."""
    for found in pool(3).run(compare, family, case, Striped(), None, routers):
        assert max(found.values()) < BOUND, found


def router_outputs(rank: int) -> list[Tensor]:
    """Of labels and without; without the term; and with one that nobody knows."""
    cp, given = mesh((dist.get_world_size(),), ("cp",)), batch("plain")
    model = parallelize(build("mixtral", "eager", router_aux_loss_coef=0.5), cp)
    ids = given["input_ids"]
    plain, full = model(**given), model(**given, output_router_logits=True)
    alone = model(input_ids=ids, output_router_logits=True)
    assert plain.aux_loss is None and full.router_logits is not None
    model.config.output_router_logits = True
    assert torch.equal(model(**given, output_router_logits=False).loss, plain.loss)
    model.config.output_router_logits = False
    scope = sys.modules[type(model).__module__].__dict__
    kept = scope["load_balancing_loss_func"]
    scope["load_balancing_loss_func"] = lambda *given: 2 * kept(*given)
    try:
        other = parallelize(build("mixtral", "eager"), cp)
        with pytest.raises(UnsupportedError, match="another loss of routers"):
            other(input_ids=ids, output_router_logits=True)
    finally:
        scope["load_balancing_loss_func"] = kept
    return [summed(x) for x in (plain.loss, full.loss, full.aux_loss, alone.aux_loss)]


def test_what_routers_return(pool: Any) -> None:
    for plain, full, routed, alone in pool(2).run(router_outputs):
        assert routed > 1 and torch.isclose(full, plain + 0.5 * routed) and torch.isclose(alone, routed)


def unlike_losses(rank: int, what: str) -> bool:
    """Of a model with routers whose logits are not numbers on one rank, or whose loss has a term more there."""
    model = parallelize(build("mixtral", "eager"), mesh((dist.get_world_size(),), ("cp",)))
    own = model.loss_function
    if rank == 1 and what == "not a number":
        model.lm_head.register_forward_hook(lambda module, args, logits: logits * torch.nan)
    elif rank == 1:
        model.loss_function = lambda *args, **kwargs: own(*args, **kwargs) + 1
    return bool(summed(model(**batch("plain"), output_router_logits=True).loss).isnan())


def test_ranks_decide_alike_on_a_loss_of_routers(pool: Any) -> None:
    assert pool(2).run(unlike_losses, "not a number") == [True, True]
    for raised in pool(2).run_expecting_error(unlike_losses, "a term"):
        assert raised is not None and "the losses of labels and of routers" in raised.message, raised


def checkpointed(model: Any) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert model.is_gradient_checkpointing


def compiled(model: Any) -> None:
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("changes", [checkpointed, compiled])
@pytest.mark.parametrize("case", ["plain", "packed"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_checkpointing_and_compile(pool: Any, family: str, case: str, changes: Any) -> None:
    for found in pool(2).run(compare, family, case, ZigZag(), changes):
        assert max(found.values()) < BOUND, found


def ways_to_say_documents(rank: int, lengths: list[int]) -> list[Tensor]:
    """Whole logits of one packed row, said in four ways, and of one that is not packed."""
    cp = mesh((dist.get_world_size(),), ("cp",))
    model = parallelize(build("gpt2", "eager"), cp, gather_output=True)
    ids = batch("plain")["input_ids"][:1]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    edges = torch.tensor([0, *lengths]).cumsum(0)
    documents = (positions == 0).cumsum(-1)
    calls: list[dict[str, Any]] = [
        {"position_ids": positions},
        {"documents": documents},
        {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": 30, "max_length_k": 30},
        {"documents": documents, "position_ids": positions},
        {},
    ]
    return [model(input_ids=ids, **call).logits for call in calls]


def test_documents_are_said_in_three_ways(pool: Any) -> None:
    first, *others, plain = pool(2).run(ways_to_say_documents, [7, 23, S - 30])[0]
    assert first.shape == (1, S, VOCABULARY)
    assert all(apart(x, first) < BOUND for x in others)
    assert apart(plain, first) > 0.1


def losses(rank: int) -> tuple[dict[str, Tensor], Tensor]:
    given = batch("plain")
    cp = mesh((dist.get_world_size(),), ("cp",))
    model = parallelize(build("llama", "eager"), cp)
    ids, labels = given["input_ids"], given["labels"]
    calls: dict[str, dict[str, Any]] = {
        "mean": {"labels": labels},
        "count": {"labels": labels, "num_items_in_batch": torch.tensor(10)},
        "shifted": {"labels": labels, "shift_labels": oracle.shifted(model, labels)},
        "none": {},
    }
    found = {name: model(input_ids=ids, **call).loss for name, call in calls.items()}
    assert found.pop("none") is None
    return {name: summed(x) for name, x in found.items()}, oracle.shifted(model, labels)


def test_the_loss(pool: Any) -> None:
    found, rows = pool(2).run(losses)[0]
    number = (rows != -100).sum()
    assert torch.isclose(found["mean"] * number, found["count"] * 10, rtol=1e-9)
    assert torch.isclose(found["mean"], found["shifted"], rtol=1e-9)
    assert found["mean"] > 1


def evaluated(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Losses under inference_mode and under no_grad, with routers and without; and a term that is added in place."""
    cp, given = mesh((dist.get_world_size(),), ("cp",)), batch("plain")
    model = parallelize(build("mixtral", "eager", router_aux_loss_coef=0.5), cp).eval()
    found = []
    for routers in (False, True):
        with torch.no_grad():
            wanted = model(**given, output_router_logits=routers).loss
        with torch.inference_mode():
            found.append((summed(model(**given, output_router_logits=routers).loss).clone(), summed(wanted)))
    with torch.inference_mode(), pytest.raises(UnsupportedError, match="the loss of the labels alone"):
        _with_term(model, given)
    return found


def test_evaluation_in_inference_mode(pool: Any) -> None:
    for (plain, wanted), (routed, with_routers) in pool(2).run(evaluated):
        assert torch.isclose(plain, wanted, rtol=1e-9) and torch.isclose(routed, with_routers, rtol=1e-6)
        assert routed > plain + 0.1


def lengths_that_change(rank: int) -> list[float]:
    cp = mesh((dist.get_world_size(),), ("cp",))
    model, reference = build("mistral", "eager"), build("mistral", oracle.NAME)
    model.model.layers[1] = copy.deepcopy(model.model.layers[1])  # which has a config of its own then
    parallelize(model, cp)
    found = []
    for length in (S, 16, 33, S):
        ids = batch("plain")["input_ids"][:, :length]
        logits = model(input_ids=ids).logits
        assert sequence_of(model).length == length
        found.append(apart(sequence_of(model).unshard(logits), reference(input_ids=ids, use_cache=False).logits))
    return found


def test_lengths_change_from_batch_to_batch(pool: Any) -> None:
    assert max(pool(2).run(lengths_that_change)[0]) < BOUND


def gathered(rank: int) -> list[float]:
    cp = mesh((dist.get_world_size(),), ("cp",))
    given, reference = batch("packed"), build("llama", oracle.NAME)
    whole = reference(**given, output_hidden_states=True, use_cache=False)
    model = parallelize(build("llama", "eager"), cp, gather_output=True)
    output = model(**given, output_hidden_states=True)
    assert len(output.hidden_states) == 3 and type(output) is type(whole)
    pairs = zip([output.logits, *output.hidden_states], [whole.logits, *whole.hidden_states], strict=True)
    return [apart(x, y) for x, y in pairs] + [apart(summed(output.loss), whole.loss)]


def test_gathered_outputs(pool: Any) -> None:
    assert max(pool(2).run(gathered)[0]) < BOUND


def dropped(rank: int, layout: Any, **options: Any) -> list[Tensor]:
    """Logits of three forwards in training, and of one in evaluation; dropout is that of the config."""
    cp = mesh((dist.get_world_size(),), ("cp",))
    model = parallelize(
        build("llama", "eager", attention_dropout=0.3), cp, layout=layout, gather_output=True, **options
    )
    ids = batch("plain")["input_ids"]
    found = [model(input_ids=ids).logits for _ in range(3)]
    return [*found, model.eval()(input_ids=ids).logits]


def test_dropout_is_the_same_on_any_ranks(pool: Any) -> None:
    one = pool(1).run(dropped, ZigZag())[0]
    for ranks, layout in ((2, ZigZag()), (3, Striped())):
        assert all(apart(x, y) < BOUND for x, y in zip(pool(ranks).run(dropped, layout)[0], one, strict=True))
    for i in range(4):
        assert all(apart(one[i], one[j]) > 1e-2 for j in range(i))
    other = pool(1).run(dropped, ZigZag(), *())[0]
    assert apart(other[0], one[0]) == 0


def test_dropout_follows_its_seed(pool: Any) -> None:
    assert apart(*(pool(1).run(seeded, seed)[0] for seed in (0, 1))) > 1e-2


def seeded(rank: int, seed: int) -> Tensor:
    return dropped(rank, ZigZag(), dropout_seed=seed)[0]


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


def with_other_data(rank: int) -> None:
    whole = mesh((2, 2), ("dp", "cp"))
    with pytest.raises(ArgumentError, match=r"data: expected ranks .* of cp among its own"):
        parallelize(build("llama", "eager"), whole["cp"], data=whole["dp"])


def test_data_has_the_ranks_of_cp(pool: Any) -> None:
    pool(4).run(with_other_data)


def dropped_gradients(rank: int, reentrant: bool | None) -> list[Tensor]:
    cp = mesh((dist.get_world_size(),), ("cp",))
    model = parallelize(build("llama", "eager", attention_dropout=0.3), cp)
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model(**batch("packed")).loss.backward()
    return [x.grad for x in model.parameters()]


def test_recomputed_layers_drop_the_same(pool: Any) -> None:
    plain = pool(2).run(dropped_gradients, None)
    for reentrant in (False, True):
        for found, wanted in zip(pool(2).run(dropped_gradients, reentrant), plain, strict=True):
            assert all(apart(x, y) < BOUND for x, y in zip(found, wanted, strict=True))


def inputs_embeds(rank: int) -> tuple[float, float]:
    cp = mesh((dist.get_world_size(),), ("cp",))
    model, reference = parallelize(build("llama", "eager"), cp), build("llama", oracle.NAME)
    given = batch("packed")
    ids = given.pop("input_ids")
    leaves = [reference.model.embed_tokens(ids).detach().requires_grad_() for _ in range(2)]
    _, loss = oracle.whole_loss(reference, documents_of(given), inputs_embeds=leaves[0], **given)
    output = model(inputs_embeds=leaves[1], **given)
    output.loss.backward()
    return apart(summed(output.loss), loss), apart(summed(leaves[1].grad), leaves[0].grad)


def test_inputs_embeds(pool: Any) -> None:
    assert max(pool(2).run(inputs_embeds)[0]) < BOUND


# ---- what is refused


def refused_call(rank: int, name: str) -> None:
    family, call, options, _ = CALLS[name]
    model = parallelize(build(family, "eager", **options), mesh((dist.get_world_size(),), ("cp",)))
    call(model, batch("plain"))


NEW_CALLS = ("the model's own mask", "blocks of some rows")


def _pairs(model: Any, given: Any) -> None:
    model(**given, attention_mask=torch.ones(B, 1, S, S, dtype=torch.bool))


def _with_mask(model: Any, given: Any, **options: Any) -> None:
    """Call a model that asks for its mask with these options, as models of images do."""
    scope = sys.modules[type(model).__module__].__dict__
    kept = scope["create_causal_mask"]
    scope["create_causal_mask"] = functools.partial(kept, **options)
    try:
        model(**given)
    finally:
        scope["create_causal_mask"] = kept


def _own_mask(model: Any, given: Any) -> None:
    _with_mask(model, given, or_mask_function=lambda b, h, q, k: k < 4)


def _blocks(model: Any, given: Any) -> None:
    _with_mask(model, given, block_sequence_ids=torch.zeros(B, 5, dtype=torch.long))


def _with_term(model: Any, given: Any) -> None:
    own = model.loss_function
    model.loss_function = lambda *args, **kwargs: own(*args, **kwargs).add_(1)
    model(**given)


def _without_weight(model: Any, given: Any) -> None:
    """As JetMoE, which calls it aux_loss_coef."""
    del model.router_aux_loss_coef
    model(**given, output_router_logits=True)


def _other_arguments(model: Any, given: Any) -> None:
    """As Doge, whose third one is a number of keys."""
    scope = sys.modules[type(model).__module__].__dict__
    kept = scope["load_balancing_loss_func"]
    scope["load_balancing_loss_func"] = lambda logits, experts, keys, top_k=2, mask=None: kept(
        logits, experts, top_k, mask
    )
    try:
        model(**given, output_router_logits=True)
    finally:
        scope["load_balancing_loss_func"] = kept


CALLS: dict[str, tuple[str, Any, dict[str, Any], str]] = {
    "a mask of pairs": ("llama", _pairs, {}, "documents=ids [B, S] can"),
    "the model's own mask": ("llama", _own_mask, {}, "got or_masks"),
    "blocks of some rows": ("llama", _blocks, {}, "blocks: expected ids of 45 tokens, got 24"),
    "a cache": ("llama", lambda m, x: m(**x, use_cache=True), {}, "pass use_cache=False"),
    "keys of before": ("llama", lambda m, x: m(**x, cache=object()), {}, "cp_mesh.inference.decode reads sharded ones"),
    "last logits": ("llama", lambda m, x: m(**x, logits_to_keep=1), {}, "logits_to_keep"),
    "weights": ("llama", lambda m, x: m(**x, output_attentions=True), {}, "output_attentions"),
    "tuples": ("llama", lambda m, x: m(**x, return_dict=False), {}, "return_dict=True"),
    "an unknown argument": ("llama", lambda m, x: m(**x, pixels=torch.ones(1)), {}, "pixels"),
    "mRoPE": ("llama", lambda m, x: m(**x, position_ids=torch.zeros(3, B, S)), {}, "mRoPE"),
    "lengths of a shorter row": (
        *("llama", lambda m, x: m(input_ids=x["input_ids"][:1], cu_seq_lens_q=torch.tensor([0, 7, S - 1])), {}),
        f"cu_seq_lens_q: expected an end at {S}, in one batch row, got an end at {S - 1}, in 1 batch row; ",
    ),
    "labels of other rows": ("llama", lambda m, x: m(**x | {"labels": x["labels"][:, :9]}), {}, "labels"),
    "routers of another kind": (
        *("llama", lambda m, x: m(**x, output_router_logits=True)),
        *({}, "another loss of routers; model.config.output_router_logits = False"),
    ),
    "routers with other weights": ("mixtral", _without_weight, {}, "a model without router_aux_loss_coef"),
    "a loss of routers with other arguments": ("mixtral", _other_arguments, {}, "another loss of routers"),
    "a term added in place": ("llama", _with_term, {}, "the loss of the labels alone"),
    "compiled as a whole": (
        *("llama", lambda m, x: torch.compile(m, backend="aot_eager")(**x), {}),
        "for layer in model.model.layers: layer.compile()",
    ),
    "a part of the model": ("llama", lambda m, x: m.model(x["input_ids"]), {}, "not a part of it"),
}


@pytest.mark.parametrize("name", [name for name in CALLS if not OLD or name not in NEW_CALLS])
def test_refused_calls(pool: Any, name: str) -> None:
    words = CALLS[name][-1]
    for raised in pool(2).run_expecting_error(refused_call, name):
        assert raised is not None and raised.type in ("UnsupportedError", "ArgumentError"), raised
        assert words in raised.message, raised.message


def sharded_by_fsdp(rank: int, family: str, made: Any = build) -> list[float]:
    """Over dp x cp, each dp rank with a batch of its own: loss and gradients against those of all batches."""
    whole = mesh((dist.get_world_size() // 2, 2), ("dp", "cp"))
    data = whole["dp", "cp"]._flatten("dp_cp")
    given, dp = batch("packed"), whole["dp"].get_local_rank()
    reference = made(family, oracle.NAME)
    rows = slice(None) if whole["dp"].size() == 1 else slice(dp, dp + 1)
    _, loss = oracle.whole_loss(reference, documents_of(given), **given)
    model = parallelize(made(family, "eager"), whole["cp"], data=data)
    for layer in model.model.layers:
        fully_shard(layer, mesh=data)
    fully_shard(model, mesh=data)
    sum_gradients(model)
    output = model(**{name: x[rows] for name, x in given.items()})
    output.loss.backward()
    wanted = dict(reference.named_parameters())
    grads = [apart(x.grad.full_tensor(), wanted[name].grad) for name, x in model.named_parameters()]
    torch.optim.SGD(model.parameters(), lr=0.1).step()  # before which reductions are looked at
    return [apart(summed(output.loss), loss), *grads]


WITH_FSDP = ["llama", "qwen3", "gemma2", "gemma3", "gpt_oss", "mixtral"]
WITH_FSDP += [] if OLD else ["llama4"]  # the batch is packed, and see `test_families`


@pytest.mark.parametrize(("family", "num_ranks"), [*((family, 2) for family in WITH_FSDP), ("llama", 4)])
def test_fsdp(pool: Any, family: str, num_ranks: int) -> None:
    assert max(pool(num_ranks).run(sharded_by_fsdp, family)[0]) < BOUND


def test_fsdp_with_a_loss_of_routers(pool: Any) -> None:
    assert max(pool(2).run(sharded_by_fsdp, "mixtral", routers)[0]) < BOUND


# ---- what is refused of models

_TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}

_VISION = {"vision_config": {"model_type": "siglip_vision_model", **_TINY}}


def tiny(name: str, **options: Any) -> Any:
    """Without memory for weights."""
    made = getattr(transformers, name)
    with torch.device("meta"):
        return made(made.config_class(**_TINY | options))


MODELS: dict[str, tuple[Any, str]] = {
    "a module": (lambda: torch.nn.Linear(1, 1), "a PreTrainedModel"),
    "cross-attention": (lambda: tiny("BertLMHeadModel", is_decoder=True, add_cross_attention=True), "cross-attention"),
    "an encoder and a decoder": (lambda: tiny("T5ForConditionalGeneration"), "cross-attention"),
    "keys chosen by an indexer": (
        lambda: tiny("MiniMaxM3VLForCausalLM", layer_types=["full_attention", "minimax_m3_sparse"]),
        "layer_types minimax_m3_sparse",
    ),
    "state space layers": (lambda: tiny("MambaForCausalLM", state_size=4), "MambaMixer that calls mamba_inner_fn"),
    "another head": (lambda: tiny("LlamaForSequenceClassification"), "a class whose outputs may not be rows"),
    "a pooler": (lambda: tiny("BertModel"), "pass add_pooling_layer=False"),
    "attention of its own": (lambda: tiny("FalconForCausalLM"), "0 modules that mix rows in a known way"),
    "no positions": (lambda: tiny("BloomForCausalLM"), "a forward without position_ids"),
    "other images": (
        lambda: tiny("AyaVisionForConditionalGeneration", text_config={"model_type": "cohere2", **_TINY}, **_VISION),
        "vision_config",
    ),
    "a part of a model with images": (
        lambda: build_with_images("gemma3", "eager").model,
        "classes named ...ForConditionalGeneration",
    ),
    "a loss of Liger": (lambda: _with_liger(tiny("LlamaForCausalLM")), "got Liger's fused_linear_cross_entropy"),
    "layers that are dropped": (
        lambda: tiny("OPTForCausalLM", layerdrop=0.1, ffn_dim=16),
        "layerdrop=0.1; layerdrop=0",
    ),
    "adapters that read whole rows": (
        lambda: _adapted("LoraConfig", alora_invocation_tokens=[5]),
        "IA3, LN_TUNING, LOHA, LOKR, MISS, VERA, got ALORA; others may read the whole sequence",
    ),
    "adapters with a loss": (lambda: _adapted("AdaLoraConfig", total_step=9), "got ADALORA"),
    "a convolution": (lambda: _with_convolution(tiny("LlamaForCausalLM")), "model.extra, a Conv1d"),
}


def _with_liger(model: Any) -> Any:
    """As liger_kernel.transformers.apply_liger_kernel_to_llama(model=model) of 0.8.5 does, which needs Triton."""

    def lce_forward(self: Any, input_ids: Any = None, labels: Any = None) -> None: ...

    lce_forward.__module__ = "liger_kernel.transformers.model.llama"
    model.forward = MethodType(lce_forward, model)
    return model


def _adapted(name: str, **options: Any) -> Any:
    import peft

    config = getattr(peft, name)(task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(tiny("LlamaForCausalLM"), config).get_base_model()


def _with_convolution(model: Any) -> Any:
    model.model.extra = torch.nn.Conv1d(1, 1, 1, device="meta")
    return model


NEW_MODELS = (
    *("keys chosen by an indexer", "state space layers", "other images", "a part of a model with images"),
    *("adapters that read whole rows", "adapters with a loss"),
)


@pytest.mark.parametrize("name", [name for name in MODELS if not OLD or name not in NEW_MODELS])
def test_refused_models(name: str) -> None:
    make, words = MODELS[name]
    with pytest.raises((ArgumentError, UnsupportedError), match=re.escape(words)):
        check_model(make())


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


def lengths_refused(rank: int, kind: str) -> list[str]:
    """What is said of lengths beyond which a model depends on the largest position, in two layouts."""
    cp, found = mesh((dist.get_world_size(),), ("cp",)), []
    ids = batch("plain")["input_ids"]
    for layout in (ZigZag(), Striped()):
        if kind == "scale":
            model = build("llama4", "eager", attn_temperature_tuning=True, floor_scale=40)
        else:
            model = build("llama", "eager")
            model.config.rope_parameters |= {"rope_type": kind, "original_max_position_embeddings": 40}
            model.config.max_position_embeddings = 40
        parallel = parallelize(model, cp, layout=layout)
        parallel(input_ids=ids[:, :39])
        for length in (41, ids.shape[1]):
            try:
                parallel(input_ids=ids[:, :length])
                found.append("")
            except UnsupportedError as error:
                found.append(str(error))
    return found


@newest
@pytest.mark.parametrize("kind", ["dynamic", "longrope", "scale"])
def test_refused_lengths(pool: Any, kind: str) -> None:
    words = "attn_temperature_tuning" if kind == "scale" else kind
    for short_zigzag, zigzag, short_striped, striped in pool(2).run(lengths_refused, kind):
        assert words in zigzag and words in short_zigzag and words in short_striped
        assert striped == "" if kind == "longrope" else words in striped
        if kind == "dynamic":
            assert "Striped" not in zigzag + striped and "documents of 40 tokens at most: in every layout" in striped
        if kind == "longrope":
            assert "; or layout=Striped(), where every rank has later positions" in zigzag
            assert short_zigzag.endswith("; or longer ones in layout=Striped()")
            assert short_striped.endswith("documents of 40 tokens at most; or longer ones")


def counts_positions_from_tokens(rank: int) -> None:
    model = transformers.RobertaForCausalLM(transformers.RobertaConfig(**_TINY, is_decoder=True))
    parallelize(model, mesh((2,), ("cp",)))(input_ids=torch.ones(1, 8, dtype=torch.long))


@newest
def test_positions_that_a_model_counts_from_tokens_are_asked_for(pool: Any) -> None:
    for raised in pool(2).run_expecting_error(counts_positions_from_tokens):
        assert raised is not None and "pass position_ids of the whole batch" in raised.message


def test_the_table_has_every_causal_family() -> None:
    """Of the version that it was made with, which is the one that is pinned."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    rows = list(csv.DictReader((ROOT / "docs" / "results" / "transformers_families.csv").open()))
    if transformers.__version__ != rows[0]["transformers"]:
        pytest.skip(f"the table is of Transformers {rows[0]['transformers']}")
    assert [row["family"] for row in rows] == [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "mistral4"]
    assert {row["verdict"] for row in rows} == {"exact", "refused"}
    for row in rows:
        assert row["reason"] if row["verdict"] == "refused" else float(row["gradient"]) < BOUND
    released = {row["family"]: row for row in rows if row["checkpoint"] != "default"}
    assert released["mistral4"]["verdict"] == "exact"
    for family in ("deepseek_v32", "glm_moe_dsa", "minimax_m3_vl_text"):  # whose keys are chosen by an indexer
        assert released[family]["verdict"] == "refused" and "layer_types" in released[family]["reason"]
    assert {"lfm2", "llama4_text", "gemma4_text", "gpt_oss"} < {*released} and len(released) > 60
    assert f"transformers=={rows[0]['transformers']}" in (ROOT / "pyproject.toml").read_text()


def run_page(rank: int) -> None:
    whole = mesh((1, 2, 1), ("dp", "cp", "tp"))
    given = batch("packed")
    positions = given["position_ids"]
    names = {
        **{"model": build("llama", "eager"), "mesh": whole, "data": whole["dp", "cp"]._flatten("dp_cp")},
        **{"tokens": given["input_ids"], "position_ids": positions, "documents": documents_of(given)},
        "large_model": build("qwen3", "eager"),
        "cumulative_lengths": torch.tensor([0, 7, 30, S]),
        "attention_mask": torch.ones(B, S, dtype=torch.long),
    }
    if not OLD:
        inputs = batch_with_images("gemma3", "plain")
        labels = inputs.pop("labels")
        names |= {"vision_model": build_with_images("gemma3", "eager"), "inputs": inputs, "labels": labels}
    text = (ROOT / "docs" / "transformers.md").read_text()
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if not OLD or not {"vision_model", "large_model"} & {*re.findall(r"\w+", block)}:
            exec(block, names)
    reference = build("llama", oracle.NAME)
    whole_logits = reference(input_ids=given["input_ids"], use_cache=False).logits
    assert apart(names["logits"], whole_logits) < BOUND
    assert apart(names["same"].logits, names["packed"].logits) < BOUND
    sequence = ShardedSequence(whole["cp"], "auto")
    masks = [batch_mask(position_ids=x) for x in (positions, positions[:1])]
    of_all, of_row = (sequence.for_batch(S, mask) for mask in masks)  # another batch has another layout
    row, of_packed = of_row.unshard(names["row"].logits), of_all.unshard(names["packed"].logits)
    assert of_row != of_all and apart(row, of_packed[:1]) < BOUND
    assert OLD or names["share"].requires_grad


def test_the_page_runs(pool: Any) -> None:
    pool(2).run(run_page)


def with_tp(rank: int, family: str, case: str) -> list[float]:
    """Over cp x tp, with the plan of Transformers."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    whole, given = mesh((2, 2), ("cp", "tp")), batch(case)
    reference, model = build(family, oracle.NAME), build(family, "eager")
    logits, loss = oracle.whole_loss(reference, documents_of(given), **given)
    names = [*dict(model.named_modules()), *dict(model.named_parameters())]
    plan = {name: style for name in names for key, style in model.tp_plan.items() if fnmatch(name, key)}
    for name, style in [(name, style) for name, style in plan.items() if name not in dict(model.named_parameters())]:
        own = model.get_submodule(name).named_parameters(recurse=False)
        plan |= {f"{name}.{parameter}": style for parameter, _ in own}
    apply_tensor_parallelism(model, whole["tp"], plan)
    parallelize(model, whole["cp"], layout=Striped())
    output = model(**given)
    output.loss.backward()
    found = [apart(sequence_of(model).unshard(output.logits), logits), apart(_over(whole["cp"], output.loss), loss)]
    wanted = dict(reference.named_parameters())
    assert any(isinstance(x, DTensor) and x.to_local().shape != x.shape for x in model.parameters())
    for name, x in model.named_parameters():
        grad = x.grad.full_tensor() if isinstance(x.grad, DTensor) else x.grad
        found.append(apart(_over(whole["cp"], grad), wanted[name].grad))
    return found


def _over(axis: Any, x: Tensor) -> Tensor:
    x = x.detach().clone()
    dist.all_reduce(x, group=axis.get_group())
    return x


@newest
@pytest.mark.parametrize("case", ["plain", "packed"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_tp(pool: Any, family: str, case: str) -> None:
    assert max(pool(4).run(with_tp, family, case)[0]) < BOUND


def layouts_and_kernels(rank: int) -> list[str]:
    cp, found = mesh((dist.get_world_size(),), ("cp",)), []
    model = parallelize(build("llama", "eager"), cp)
    for case in ("packed", "plain"):
        model(**batch(case))
        found.append(type(sequence_of(model).layout).__name__)
    for options in ({"kernel": "fa4"}, {"watch": False}, {}):
        model = build("llama", "eager")
        if "kernel" not in options:  # attention beside AttentionInterface
            model.model.norm.register_forward_pre_hook(_attends)
        try:
            parallelize(model, cp, **options)(**batch("plain"))
            found.append("")
        except (ArgumentError, UnsupportedError) as error:
            found.append(str(error))
    return found


def _attends(module: Any, args: tuple[Tensor]) -> None:
    q = args[0][:, None]
    torch.nn.functional.scaled_dot_product_attention(q, q, q)


def test_layout_kernel_and_watch_are_followed(pool: Any) -> None:
    for packed, plain, kernel, unwatched, watched in pool(2).run(layouts_and_kernels):
        assert (packed, plain) == ("Balanced", "ZigZag")
        assert "fa4" in kernel and unwatched == "" and "scaled_dot_product_attention" in watched
