"""Hybrids of attention and recurrent layers in Transformers on ranks: logits, loss and every gradient, in float64.

Two oracles: the same model on one rank, and the family's own code, one document at a time, since without its GPU
kernels it ignores documents. Both cast to float32 in norms and recurrences; here these casts are to float64.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from functools import partial, wraps
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

transformers = pytest.importorskip("transformers")

from families import HYBRIDS, OLD, VOCABULARY, build  # noqa: E402
from inside import inner  # noqa: E402
from ranks import mesh  # noqa: E402
from test_transformers import documents_of, summed  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

from cp_mesh import (  # noqa: E402
    ArgumentError,
    Contiguous,
    Striped,
    UnsupportedError,
    ZigZag,
    sum_gradients,
    verify_model,
)
from cp_mesh.integrations.transformers import parallelize, sequence_of  # noqa: E402
from cp_mesh.tools import VerificationError  # noqa: E402

check_model = inner("families", "check_model")
FUNCTIONS = inner("transformers.mixers", "FUNCTIONS")

pytestmark = pytest.mark.skipif(OLD, reason="Transformers 4 computes recurrences inline")
BOUND, TABLES = 1e-10, 1e-7
"""The second one where the family keeps decays in tables in float32."""
OF_FLOAT32 = 1e-6, 1e-5
"""Where nothing is widened, from one rank and from the family's own code."""
B, S = 2, 45
LAYOUTS: dict[str, Any] = {"zigzag": ZigZag(), "contiguous": Contiguous(), "striped": Striped(), "auto": "auto"}


def batch(case: str) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (B, S), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, 5:9] = -100
    found = {"input_ids": ids, "labels": labels}
    if case == "packed":
        rows = [(7, 23, S - 30), (19, S - 20, 1)]
        found["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    if "padded" in case:
        found["attention_mask"] = torch.ones(B, S, dtype=torch.long)
        for row, kept in enumerate((40, 31)):
            hidden = slice(0, S - kept) if case == "left padded" else slice(kept, None)
            found["attention_mask"][row, hidden] = 0
            labels[row, hidden] = -100
            if case == "left padded":
                labels[row, S - kept] = -100  # which padding would predict
    return found


class Wide(TorchFunctionMode):
    """Casts to float32 are to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func, args = Tensor.double, args[:1]
        args = tuple(torch.float64 if x is torch.float32 else x for x in args)
        return func(*args, **{key: torch.float64 if x is torch.float32 else x for key, x in (kwargs or {}).items()})


def by_documents(model: Any, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits [B, S, V], zeros at padding, and the mean loss, by the family's own code; gradients stay in the model."""
    model.config.get_text_config().use_cache = False
    ids, labels = given["input_ids"], given["labels"]
    documents = documents_of(given)
    documents = torch.zeros(B, S, dtype=torch.long) if documents is None else documents.expand(B, S)
    kept = given.get("attention_mask", torch.ones(B, S)).bool()
    next_labels = F.pad(labels[:, 1:], (0, 1), value=-100)  # a document's last token has the next one's first, too
    logits, total = torch.zeros(B, S, VOCABULARY, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for b in range(B):
        for document in documents[b].unique():
            at = ((documents[b] == document) & kept[b]).nonzero()[:, 0]
            rows = model(input_ids=ids[b, at][None]).logits[0]
            logits[b, at] = rows.detach().double()
            total = total + F.cross_entropy(rows, next_labels[b, at], ignore_index=-100, reduction="sum")
    loss = total / (next_labels != -100).sum()
    loss.backward()
    return logits, loss.detach()


def step(model: Any, given: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    output = model(**given)
    output.loss.backward()
    grads = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in model.named_parameters()}
    return sequence_of(model).unshard(output.logits).detach(), output.loss.detach(), grads


def apart(ours: Tensor, theirs: Tensor, floor: float = 0.0) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=max(floor, 1e-12))).item()


def compare(rank: int, *args: Any) -> tuple[float, float]:
    with Wide():
        return _compare(*args)


def _compare(family: str, case: str, layout: Any, changes: Any = None) -> tuple[float, float]:
    """How far logits, loss and the worst gradient are from one rank with our kernel, and from the family's code."""
    size, given = dist.get_world_size(), batch(case)
    kept = given.get("attention_mask", torch.ones(B, S)).bool()
    own = build(HYBRIDS[family], "eager")
    own_logits, own_loss = by_documents(own, given)
    own_grads = {name: x.grad for name, x in own.named_parameters() if x.grad is not None}
    alone = step(parallelize(build(HYBRIDS[family], "eager"), mesh((size, 1), ("of", "cp"))["cp"]), given)
    model = parallelize(build(HYBRIDS[family], "eager"), mesh((size,), ("cp",)), layout=layout)
    if changes is not None:
        changes(model)
    logits, loss, grads = step(model, given)
    loss, grads = summed(loss), {name: summed(x) for name, x in grads.items()}
    largest = max(x.abs().max().item() for x in own_grads.values())
    found = []
    for want_logits, want_loss, want_grads in (alone, (own_logits, own_loss, own_grads)):
        worst = [apart(grads[name], x, 1e-3 * largest) for name, x in want_grads.items()]
        found.append(max(apart(logits[kept], want_logits[kept]), apart(loss, want_loss), *worst))
    return found[0], found[1]


def labelled(rank: int, family: str) -> list[str]:
    """What is said of labels of padding, on the left and on the right."""
    model, said = parallelize(build(HYBRIDS[family], "eager"), mesh((2,), ("cp",))), []
    for case in ("left padded", "padded"):
        given = batch(case)
        given["labels"] = given["input_ids"].clone()
        if case == "left padded":
            given["labels"][given["attention_mask"] == 0] = -100  # the last of them still predicts the first token
        with pytest.raises(UnsupportedError) as refused:
            model(**given)
        said.append(str(refused.value))
    return said


@pytest.mark.parametrize("family", ["lfm2", "bamba", "qwen3_next"])
def test_labels_of_padding_are_refused(pool: Any, family: str) -> None:
    """Transformers computes something for padding, which differs between families and kernels."""
    for left, right in pool(2).run(labelled, family, timeout=120.0):
        assert "at position 4 of row 0" in left and "at position 40 of row 0" in right and "set labels of" in left


def with_router_loss(rank: int) -> str:
    model = parallelize(build(HYBRIDS["qwen3_next"], "eager"), mesh((2,), ("cp",)))
    with pytest.raises(UnsupportedError) as refused:
        model(**batch("plain"), output_router_logits=True)
    return str(refused.value)


def test_a_loss_of_routers_beside_masks_of_layers_is_refused(pool: Any) -> None:
    for words in pool(2).run(with_router_loss, timeout=120.0):
        assert "output_router_logits=False" in words


CASES = ("plain", "packed", "padded", "left padded")
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
    for one_rank, own in pool(size).run(compare, family, case, LAYOUTS[layout], timeout=120.0):
        assert one_rank < BOUND and own < (TABLES if family == "minimax" else BOUND), (one_rank, own)


def recomputed(rank: int, family: str, reentrant: bool) -> tuple[float, float]:
    """In the backward no mode widens anything, so nothing does here."""

    def checkpointed(model: Any) -> None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})

    return _compare(family, "packed", ZigZag(), checkpointed)


@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("family", ["qwen3_next", "bamba", "lfm2", "minimax", "mamba2"])
def test_layers_that_are_recomputed(pool: Any, family: str, reentrant: bool) -> None:
    for found in pool(2).run(recomputed, family, reentrant, timeout=120.0):
        assert all(x < bound for x, bound in zip(found, OF_FLOAT32, strict=True)), found


def evaluated(rank: int, family: str, case: str) -> tuple[float, str]:
    """How far logits are from the family's own code, in evaluation and without labels; and what `generate` says."""
    given = batch(case)
    kept = given.get("attention_mask", torch.ones(B, S)).bool()
    with Wide():
        wanted, _ = by_documents(build(HYBRIDS[family], "eager").eval(), given)
        del given["labels"]
        model = parallelize(build(HYBRIDS[family], "eager"), mesh((2,), ("cp",))).eval()
        found = []
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                output = model(**given)
                assert output.loss is None
                found.append(apart(sequence_of(model).unshard(output.logits)[kept], wanted[kept]))
    with pytest.raises((ArgumentError, UnsupportedError)) as refused:
        model.generate(given["input_ids"], max_new_tokens=2)
    return max(found), str(refused.value)


@pytest.mark.parametrize("case", [pytest.param("packed", marks=pytest.mark.full), "left padded"])
@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h", "lfm2"])
def test_evaluation_and_generation(pool: Any, family: str, case: str) -> None:
    for far, words in pool(2).run(evaluated, family, case, timeout=120.0):
        assert far < BOUND and "cache" in words, (far, words)


def sharded(rank: int, family: str) -> float:
    with Wide():
        return _sharded(family)


def _sharded(family: str) -> float:
    """Under FSDP2: the worst gradient, from the family's own code."""
    given, axis = batch("packed"), mesh((2,), ("cp",))
    own = build(HYBRIDS[family], "eager")
    by_documents(own, given)
    model = parallelize(build(HYBRIDS[family], "eager"), axis)
    for layer in model.model.layers:
        fully_shard(layer, mesh=axis)
    fully_shard(model, mesh=axis)
    sum_gradients(model)
    model(**given).loss.backward()
    wanted = {name: x.grad for name, x in own.named_parameters() if x.grad is not None}
    largest = max(x.abs().max().item() for x in wanted.values())
    found = {name: x.grad.full_tensor() for name, x in model.named_parameters() if isinstance(x.grad, DTensor)}
    assert len(found) >= len(wanted)
    return max(apart(found[name], x, 1e-3 * largest) for name, x in wanted.items())


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_hybrids_under_fsdp(pool: Any, family: str) -> None:
    assert max(pool(2).run(sharded, family, timeout=120.0)) < BOUND


# ---- kernels of one device, and other versions of Transformers


class Fused(Exception):
    """A kernel of one device was called."""


def with_kernels(rank: int, family: str) -> list[str]:
    """Who calls kernels that were installed: the family's own model, and the parallel one."""

    def fused(*args: Any, **kwargs: Any) -> Any:
        raise Fused

    found, given = [], batch("packed")
    alone = build(HYBRIDS[family], "eager", torch.float32)
    model = parallelize(build(HYBRIDS[family], "eager", torch.float32), mesh((2,), ("cp",)))
    names = {*FUNCTIONS, *inner("transformers.mixers", "_OF_ONE_TOKEN")} - {"apply_mask_to_padding_states"}
    file = sys.modules[type(model).__module__]
    with mock.patch.multiple(file, **dict.fromkeys(names & vars(file).keys(), fused)):
        for name, each in {"alone": alone, "parallel": model}.items():
            try:
                each(**given).loss.backward()
            except Fused:
                found.append(name)
    return found


@pytest.mark.parametrize("family", sorted(HYBRIDS.keys() - {"minimax"}))
def test_kernels_of_one_device_are_not_called(pool: Any, family: str) -> None:
    """MiniMax computes its recurrence inline."""
    assert pool(2).run(with_kernels, family, timeout=120.0) == [["alone"]] * 2


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
    model = build(HYBRIDS[family], "eager")
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


def verified(rank: int, family: str, case: str, mistake: str) -> str:
    """The report of `verify_model`; by probes alone for packed documents, which the family's own code ignores."""
    axis, given = mesh((2,), ("cp",)), batch(case)
    given["labels"] = F.pad(given["labels"][:, 1:], (0, 1), value=-100)

    def spread(model: Any) -> None:
        parallelize(model, axis)

    def loss(model: Any, data: Any) -> Tensor:
        found: Tensor = model(**data, shift_labels=data["labels"]).loss
        return found

    def reduce(model: Any) -> None:
        for x in model.parameters():
            dist.all_reduce(x.grad, group=axis.get_group())

    with mock.patch.dict(FUNCTIONS, MISTAKES[mistake][2]):
        try:
            report = verify_model(
                partial(build, HYBRIDS[family], "sdpa"), spread, given, axis,
                loss=loss, reduce_gradients=reduce, dtype=torch.float32, reference=case != "packed",
            )  # fmt: skip
        except VerificationError as error:
            report = error.report
    return str(report)


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("case", ["plain", "packed"])
@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_verify_model(pool: Any, family: str, case: str, mistake: str) -> None:
    wrong = MISTAKES[mistake][case == "packed"]
    for report in pool(2).run(verified, family, case, mistake, timeout=120.0):
        assert re.search(wrong or r"^RIGHT \(", report, re.M), report
