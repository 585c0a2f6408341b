"""Hybrids of attention and recurrent layers in Transformers on ranks: logits, loss and every gradient, in float64.

Two oracles: the same model on one rank, and the family's own code, one document at a time, since without its GPU
kernels it ignores documents. Both cast to float32 in norms and recurrences; here these casts are to float64.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial, wraps
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

transformers = pytest.importorskip("transformers")

from families import HYBRIDS, IMAGE, OLD, VOCABULARY, build, build_with_images  # noqa: E402
from inside import inner  # noqa: E402
from oracle import (  # noqa: E402
    B,
    Case,
    S,
    Step,
    Wide,
    apart,
    batch,
    differences,
    documents_of,
    kept,
    over_ranks,
    tokens_of,
)
from ranks import on_ranks  # noqa: E402
from torch import Tensor  # noqa: E402

from cp_mesh import ArgumentError, Contiguous, Striped, UnsupportedError, ZigZag, verify_model  # noqa: E402
from cp_mesh.integrations.transformers import parallelize, sequence_of  # noqa: E402
from cp_mesh.tools import VerificationError  # noqa: E402

check_model = inner("families", "check_model")
FUNCTIONS, OF_ONE_TOKEN = inner("transformers.mixers", "FUNCTIONS", "_OF_ONE_TOKEN")

pytestmark = pytest.mark.skipif(OLD, reason="Transformers 4 computes recurrences inline")
BOUND, TABLES = 1e-10, 1e-7
"""The second one where the family keeps decays in tables in float32."""
OF_FLOAT32 = 1e-6, 1e-5
"""Where nothing is widened, from one rank and from the family's own code."""
LAYOUTS: dict[str, Any] = {"zigzag": ZigZag(), "contiguous": Contiguous(), "striped": Striped(), "auto": "auto"}
LEFT = "left padded, all but the first token"


def of_document(given: dict[str, Tensor], b: int, at: Tensor, images: Iterator[Tensor]) -> dict[str, Tensor]:
    """What the family's own code gets for a document at these places of row b, with its own images alone."""
    found = {"input_ids": given["input_ids"][b, at][None]}
    if own := [next(images) for _ in range(int((found["input_ids"] == IMAGE).sum()) // tokens_of("qwen"))]:
        found |= {"pixel_values": torch.cat(own), "image_grid_thw": given["image_grid_thw"][: len(own)]}
        found["mm_token_type_ids"] = given["mm_token_type_ids"][b, at][None]
    if "pixel_values" in given and "position_ids" in given:
        found["position_ids"] = given["position_ids"][:, b : b + 1, at]
    return found


def by_documents(model: Any, given: dict[str, Tensor]) -> Step:
    """By the family's own code; logits of padding are zeros."""
    images = iter(given["pixel_values"].chunk(3) if "pixel_values" in given else ())
    model.config.get_text_config().use_cache = False
    labels = given["labels"]
    documents = documents_of(given)
    documents = torch.zeros(B, S, dtype=torch.long) if documents is None else documents.expand(B, S)
    next_labels = F.pad(labels[:, 1:], (0, 1), value=-100)  # a document's last token has the next one's first, too
    logits, total = torch.zeros(B, S, VOCABULARY, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for b in range(B):
        for document in documents[b].unique():
            at = ((documents[b] == document) & kept(given)[b]).nonzero()[:, 0]
            rows = model(**of_document(given, b, at, images)).logits[0]
            logits[b, at] = rows.detach().double()
            total = total + F.cross_entropy(rows, next_labels[b, at], ignore_index=-100, reduction="sum")
    loss = total / (next_labels != -100).sum()
    loss.backward()
    return logits, loss.detach(), {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def compare(rank: int, case: Case, wide: bool = True) -> tuple[float, float]:
    """How far the worst of logits, loss and gradients is from one rank with our kernel, and from the family's code."""
    with Wide() if wide else nullcontext():
        alone = over_ranks(Case(case.family, case.batch, "auto", case.made, cp=1))
        own, found = by_documents(case.made(case.family, "eager"), case.given), over_ranks(case)
        one, other = (max(differences(case, found, wanted, 1e-3).values()) for wanted in (alone, own))
        return one, other


CASES = ("plain", "packed", "padded", LEFT)
SOME = {("packed", "zigzag", 2), ("padded", "striped", 2), ("packed", "auto", 3), ("plain", "contiguous", 2)}


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [2, 3])
def test_hybrids(pool: Any, full: bool, family: str, case: str, layout: str, size: int) -> None:
    if layout == "auto" and case != "packed":
        pytest.skip("auto is zigzag but for packed documents")
    if not full and (case, layout, size) not in SOME:
        pytest.skip("in the full form")
    for found in pool(size).run(compare, Case(family, case, LAYOUTS[layout]), timeout=120.0):
        assert found[0] < BOUND and found[1] < (TABLES if family == "minimax" else BOUND), found


@pytest.mark.parametrize(
    ("case", "layout", "size"),
    [
        *(("plain", "zigzag", 2), ("packed", "striped", 2), (LEFT, "auto", 3)),
        *(pytest.param(*x, marks=pytest.mark.full) for x in [("packed", "auto", 4), ("padded", "contiguous", 3)]),
    ],
)
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_hybrids_with_images(pool: Any, family: str, case: str, layout: str, size: int) -> None:
    for found in pool(size).run(compare, Case(family, case, LAYOUTS[layout], build_with_images), timeout=120.0):
        assert max(found) < BOUND, found


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_hybrids_under_fsdp(pool: Any, family: str) -> None:
    for found in pool(2).run(compare, Case(family, "packed", "auto", fsdp=True), timeout=120.0):
        assert max(found) < BOUND, found


@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("family", ["qwen3_next", "bamba", "lfm2", "minimax", "mamba2"])
def test_layers_that_are_recomputed(pool: Any, family: str, reentrant: bool) -> None:
    """In the backward no mode widens anything, so nothing does here."""
    for found in pool(2).run(compare, Case(family, "packed", ZigZag(), checkpoint=reentrant), False, timeout=120.0):
        assert all(x < bound for x, bound in zip(found, OF_FLOAT32, strict=True)), found


@pytest.mark.parametrize("case", [pytest.param("packed", marks=pytest.mark.full), LEFT])
@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h", "lfm2"])
@on_ranks(2, timeout=120.0)
def test_evaluation_and_generation(axis: Any, family: str, case: str) -> None:
    """Without labels, against the family's own code."""
    given = batch(case)
    real = kept(given)
    with Wide():
        wanted, *_ = by_documents(build(family, "eager").eval(), given)
        del given["labels"]
        model = parallelize(build(family, "eager"), axis).eval()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                output = model(**given)
                assert output.loss is None
                assert apart(sequence_of(model).unshard(output.logits)[real], wanted[real]) < BOUND
    with pytest.raises((ArgumentError, UnsupportedError), match="cache"):
        model.generate(given["input_ids"], max_new_tokens=2)


@pytest.mark.parametrize("family", ["lfm2", "bamba", "qwen3_next"])
@on_ranks(2, timeout=120.0)
def test_refused(axis: Any, family: str) -> None:
    """Labels of padding, for which Transformers computes something that differs between families and kernels."""
    model = parallelize(build(family, "eager"), axis)
    for case, position in {"left padded": 4, "padded": 40}.items():
        given = batch(case)
        own = given["input_ids"].clone()  # of padding on the left the last token still predicts the first one
        given["labels"] = own.where(given["attention_mask"] > 0, -100) if "left" in case else own
        with pytest.raises(UnsupportedError, match=f"at position {position} of row 0.* set labels of"):
            model(**given)
    if family == "qwen3_next":  # whose layers have masks of their own
        with pytest.raises(UnsupportedError, match="output_router_logits=False"):
            model(**batch("plain"), output_router_logits=True)


# ---- kernels of one device, and other versions of Transformers


class Fused(Exception):
    """A kernel of one device was called."""


@pytest.mark.parametrize("family", sorted(HYBRIDS.keys() - {"minimax"}))  # which computes its recurrence inline
@on_ranks(2, timeout=120.0)
def test_kernels_of_one_device_are_not_called(axis: Any, family: str) -> None:
    """But by the family's own model."""
    given, alone, model = batch("packed"), *(build(family, "eager", torch.float32) for _ in range(2))
    parallelize(model, axis)
    names = {*FUNCTIONS, *OF_ONE_TOKEN} - {"apply_mask_to_padding_states"}
    file = sys.modules[type(model).__module__]
    with mock.patch.multiple(file, **dict.fromkeys(names & vars(file).keys(), mock.Mock(side_effect=Fused))):
        with pytest.raises(Fused):
            alone(**given)
        model(**given).loss.backward()


def of_attributes(self: Any, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
    """As in Transformers 4.57 to 5.5, which keep kernels in their modules."""
    return self.chunk_gated_delta_rule(self.causal_conv1d_fn(hidden_states))


def inline(self: Any, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
    return causal_conv1d_fn(hidden_states, self.conv1d.weight).cumsum(1)  # type: ignore[name-defined] # noqa: F821


@pytest.mark.parametrize("family", ["qwen3_next", "bamba"])
@pytest.mark.parametrize(
    ("forward", "words"),
    [(of_attributes, "it mixes rows of one shard only"), (inline, "calls no function for its recurrence")],
)
def test_recurrences_in_other_places_are_refused(family: str, forward: Any, words: str) -> None:
    model = build(family, "eager")
    check_model(model)
    (mixer,) = (x for x in model.modules() if hasattr(x, "A_log"))
    mixer.__class__ = type(type(mixer).__name__, (type(mixer),), {"forward": forward})
    with pytest.raises(UnsupportedError, match=words):
        check_model(model)


# ---- verify_model


def convolved(x: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
    """Of these rows alone, [B, D, T]."""
    inner("scope", "SCOPE").get().called.add("a mistake")
    rows = F.pad(x, (weight.shape[1] - 1, 0))  # not by conv1d, which the watch refuses
    found = (rows.unfold(-1, weight.shape[1], 1) * weight[:, None]).sum(-1)
    return F.silu(found if bias is None else found + bias[:, None])


def forgetting(rule: Any) -> Any:
    """A function of a mixer, without the documents of the batch."""

    @wraps(rule)
    def wrong(*args: Any, **kwargs: Any) -> Any:
        scope = inner("scope", "SCOPE").get()
        mask, scope.mask = scope.mask, replace(scope.mask, documents=None)
        try:
            return rule(*args, **kwargs)
        finally:
            scope.mask = mask

    return wrong


MISTAKES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "nothing": ("", "", {}),
    "a convolution of the shard": (
        r"WRONG: forward: model\.layers\.0\.",
        r"end of a document +WRONG",
        {"causal_conv1d_fn": convolved},
    ),
    "documents that rules are not given": (
        "",
        r"end of a document +WRONG",
        {name: forgetting(rule) for name, rule in FUNCTIONS.items() if "delta" in name or "scan" in name},
    ),
}
"""What the report must say of one document, if anything is wrong there, and of packed ones; and what is replaced."""


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("case", ["plain", "packed"])
@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
@on_ranks(2, timeout=120.0)
def test_verify_model(axis: Any, family: str, case: str, mistake: str) -> None:
    """By probes alone for packed documents, which the family's own code ignores."""
    *wrong, replaced = MISTAKES[mistake]
    given = batch(case)
    given["labels"] = F.pad(given["labels"][:, 1:], (0, 1), value=-100)

    def loss(model: Any, data: Any) -> Tensor:
        found: Tensor = model(**data, shift_labels=data["labels"]).loss
        return found

    def reduce(model: Any) -> None:
        for x in model.parameters():
            dist.all_reduce(x.grad, group=axis.get_group())

    with mock.patch.dict(FUNCTIONS, replaced):
        try:
            report = verify_model(
                partial(build, family, "sdpa"), lambda model: parallelize(model, axis), given, axis,
                loss=loss, reduce_gradients=reduce, dtype=torch.float32, reference=case != "packed",
            )  # fmt: skip
        except VerificationError as error:
            report = error.report
    assert re.search(wrong[case == "packed"] or r"^RIGHT \(", str(report), re.M), report
