"""MLA layers of Transformers: their latent travels, and logits, loss and gradients are those of one rank, in fp64."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import textwrap
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

transformers = pytest.importorskip("transformers")

from families import OLD, build  # noqa: E402
from inside import inner, room  # noqa: E402
from oracle import Case, batch, compare  # noqa: E402
from ranks import on_ranks, refused  # noqa: E402
from test_transformers import BOUND  # noqa: E402
from transformers_families import FAMILIES, small_model  # noqa: E402

from cp_mesh import ArgumentError, RankMismatchError, Striped, UnsupportedError, ZigZag, verify_model  # noqa: E402
from cp_mesh.integrations.transformers import parallelize  # noqa: E402
from cp_mesh.tools import VerificationError  # noqa: E402

pytestmark = pytest.mark.skipif(OLD, reason="Transformers 4 expands the latent in the forward")
WITH_MLA = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "mistral4", "youtu")
"""Beside these kimi_linear and bailing_hybrid, of test_hybrids.py."""
latents = room("latents")


def made(family: str, implementation: str) -> Any:
    return small_model(FAMILIES[family], family, implementation)


def calls(run: Any) -> int:
    """Calls of `latent_attention`."""
    attend, counted = latents.latent_attention, list[int]()

    def counting(*tensors: Any, **options: Any) -> Any:  # not a mock, which Dynamo cannot trace
        counted.append(1)
        return attend(*tensors, **options)

    with mock.patch.object(latents, "latent_attention", counting):
        run()
    return len(counted)


def steps(rank: int, *cases: Case) -> tuple[int, list[Any]]:
    found: list[Any] = []
    return calls(lambda: found.extend(compare(rank, *cases))), found


def exact(pool: Any, num_ranks: int, *cases: Case) -> None:
    for num_calls, each in pool(num_ranks).run(steps, *cases, timeout=120.0):
        assert num_calls, "keys travelled"
        for case, found in each:
            assert max(found.values()) < BOUND, (case, found)


@pytest.mark.parametrize("family", WITH_MLA)
def test_families(pool: Any, family: str) -> None:
    exact(pool, 2, Case(family, "plain", ZigZag(), made), Case(family, "packed", Striped(), made))


@pytest.mark.parametrize("family", ["kimi_linear", "bailing_hybrid"])
@on_ranks(2)
def test_hybrids(rank: int, axis: Any, family: str) -> None:
    model = parallelize(build(family, "eager"), axis)
    assert calls(lambda: model(**batch("plain"))) == 1


def test_steps(pool: Any) -> None:
    """Under FSDP2, in layers that are recomputed or compiled."""
    ways: tuple[dict[str, Any], ...] = ({"fsdp": True}, {"checkpoint": False}, {"checkpoint": True})
    compiled = Case("minicpm3", "packed", "auto", made, compiled=True)  # experts of others are no single graph
    exact(pool, 2, compiled, *(Case("deepseek_v3", "packed", "auto", **way) for way in ways))


@on_ranks(2)
def test_when_the_latent_travels(rank: int, axis: Any) -> None:
    """Where that is fewer numbers, if not told; and never past what a projection does beside its product."""
    given = batch("plain")

    def calls_of(change: Any = None, rank: int = 16, **options: Any) -> tuple[int, Any]:
        model = build("deepseek_v3", "eager", kv_lora_rank=rank)
        for layer in model.model.layers if change else ():
            change(layer.self_attn)
        model = parallelize(model, axis, **options)
        found: list[Any] = []
        return calls(lambda: found.append(model(**given).logits)), found[0]

    # 16 + 8 features of a latent row, 4 · (24 + 12) of keys and values
    num, logits = calls_of()
    assert num == 2
    for num_calls, options in ((0, {"latent_keys": False}), (2, {"method": "ulysses"}), (2, {"latent_keys": True})):
        num, other = calls_of(**options)
        assert num == num_calls and torch.allclose(other, logits, rtol=0, atol=1e-10), options
    # 128 + 8, and twice as many for Ulysses
    assert [calls_of(rank=128, **x)[0] for x in ({}, {"method": "ulysses"}, {"latent_keys": True})] == [2, 0, 2]
    assert calls_of(rank=144)[0] == 0

    def hooked(layer: Any) -> None:
        layer.kv_b_proj.register_forward_hook(lambda module, given, out: 2 * out)

    def doubled(layer: Any) -> None:
        with torch.no_grad():
            layer.kv_b_proj.weight.mul_(2)

    (num, other), (num_doubled, want) = calls_of(hooked), calls_of(doubled)
    assert (num, num_doubled) == (0, 2) and torch.allclose(other, want, rtol=0, atol=1e-10)


@on_ranks(2)
def test_copies(rank: int, axis: Any) -> None:
    """A copy of a layer expands by its own projection."""
    model = parallelize(build("deepseek_v3", "eager"), axis)
    own = model.model.layers[1].self_attn
    other = copy.deepcopy(own)
    assert pickle.loads(pickle.dumps(vars(other)["expand_kv"])) is vars(own)["expand_kv"]
    x = torch.ones(1, dtype=torch.float64)
    _, tensors = latents.attention_of(other, x, x, x)
    assert tensors[3] is other.kv_b_proj.weight is not own.kv_b_proj.weight


@on_ranks(1)
def test_one_rank_expands_once(rank: int, axis: Any) -> None:
    for wanted, num in ((None, 0), (True, 2)):
        model = parallelize(build("deepseek_v3", "eager"), axis, latent_keys=wanted)
        assert calls(partial(model, **batch("plain"))) == num


@pytest.mark.parametrize("wrong", [False, True])
@on_ranks(2, timeout=120.0)
def test_verify_model(axis: Any, wrong: bool) -> None:
    """It runs what training runs: the latent travels though each module is watched."""
    given = batch("plain")
    given["labels"] = F.pad(given["labels"][:, 1:], (0, 1), value=-100)
    attend = latents.latent_attention

    def loss(model: Any, data: Any) -> Tensor:
        found: Tensor = model(**data, shift_labels=data["labels"]).loss
        return found

    def reduce(model: Any) -> None:
        for x in model.parameters():
            dist.all_reduce(x.grad, group=axis.get_group())

    def doubled(*tensors: Any, **options: Any) -> Any:
        return 2 * attend(*tensors, **options)

    with mock.patch.object(latents, "latent_attention", doubled if wrong else attend):
        try:
            report = verify_model(
                partial(build, "deepseek_v3", "sdpa"), lambda model: parallelize(model, axis), given, axis,
                loss=loss, reduce_gradients=reduce, dtype=torch.float32,
            )  # fmt: skip
        except VerificationError as error:
            report = error.report
    said = r"WRONG: forward: model\.layers\.0\.self_attn\.o_proj" if wrong else r"^RIGHT \("
    assert re.search(said, str(report), re.M), report


def projections(model: Any) -> list[Any]:
    return [layer.self_attn.kv_b_proj for layer in model.model.layers]


def with_forward(linear: Any) -> None:
    """As Accelerate adds its hooks."""
    own = linear.forward
    linear.forward = lambda x: 2 * own(x)


CHANGES: dict[str, Any] = {
    "forward": with_forward,
    "hook": lambda linear: linear.register_forward_hook(lambda *_: None),
    "pre-hook": lambda linear: linear.register_forward_pre_hook(lambda *_: None),
    "backward hook": lambda linear: linear.register_full_backward_hook(lambda *_: None),
    "backward pre-hook": lambda linear: linear.register_full_backward_pre_hook(lambda *_: None),
    "bias": lambda linear: linear.register_parameter("bias", torch.nn.Parameter(linear.weight[:, 0].detach())),
    "weight": lambda linear: torch.nn.utils.parametrizations.weight_norm(linear),
}


@pytest.mark.parametrize("change", CHANGES)
@on_ranks(2)
def test_projections_that_do_more(rank: int, axis: Any, change: str) -> None:
    """Before `parallelize` their layer sends keys; later they are refused, on all ranks if on one."""
    more, given = CHANGES[change], batch("plain")
    model = build("deepseek_v3", "eager")
    more(projections(model)[0])
    assert calls(lambda: parallelize(model, axis)(**given)) == 1
    model = parallelize(build("deepseek_v3", "eager"), axis)
    model(**given)
    if rank == 0:
        more(projections(model)[1])
    with refused(
        "of layer 1: kv_b_proj: expected a plain linear", UnsupportedError if rank == 0 else RankMismatchError
    ):
        model(**given)


@on_ranks(2)
def test_ranks_that_decide_otherwise(rank: int, axis: Any) -> None:
    model = build("deepseek_v3", "eager")
    if rank == 0:
        CHANGES["hook"](projections(model)[1])
    model = parallelize(model, axis)
    with refused(r"layers that send latents .* rank 0: \[0\] of 2; cp rank 1: \[0, 1\] of 2", RankMismatchError):
        model(**batch("plain"))


OTHER_TEXTS = {
    "forward": (__name__, "attention_interface: ", "key_states = 2 * key_states\n    attention_interface: "),
    "expand_kv": (
        "transformers.models.deepseek_v3",
        "k_nope, value_states = torch.split(kv_nope, [self.qk_nope_head_dim, self.v_head_dim]",
        "value_states, k_nope = torch.split(kv_nope, [self.v_head_dim, self.qk_nope_head_dim]",
    ),
}
"""By method: the module of the class that has it, and what its text says in place of what."""


@pytest.mark.parametrize("method", OTHER_TEXTS)
@on_ranks(2)
def test_other_texts(axis: Any, method: str) -> None:
    """Keys that a user's forward changes, or whose values come first in the projection, travel themselves."""
    module, old, new = OTHER_TEXTS[method]
    model = build("deepseek_v3", "eager")
    for layer in model.model.layers:
        kind = type(layer.self_attn)
        text, names = textwrap.dedent(inspect.getsource(getattr(kind, method))), dict(vars(inspect.getmodule(kind)))
        assert old in text
        exec("from __future__ import annotations\n" + text[text.index("def ") :].replace(old, new), names)
        layer.self_attn.__class__ = type("Own", (kind,), {method: names[method], "__module__": module})
    with refused("latent_keys=True: expected a model that has layers with MLA", ArgumentError):
        parallelize(model, axis, latent_keys=True)
    assert calls(lambda: parallelize(model, axis)(**batch("plain"))) == 0


@on_ranks(1)
def test_settings(axis: Any) -> None:
    with refused("latent_keys: expected True, False or None, got no", ArgumentError):
        parallelize(build("deepseek_v3", "eager"), axis, latent_keys="no")
    with refused("latent_keys=True: expected a model that has layers with MLA", ArgumentError):
        parallelize(build("llama", "eager"), axis, latent_keys=True)


@on_ranks(4)
def test_hybrid_sends_to_its_degree(axis: Any) -> None:
    """Twice 48 + 8 features of a latent are fewer than 4 · (24 + 12), four times are more."""
    for rank, num in ((48, 2), (128, 0)):
        model = parallelize(build("deepseek_v3", "eager", kv_lora_rank=rank), axis, method="hybrid", ulysses_degree=2)
        assert calls(partial(model, **batch("plain"))) == num


def test_steps_of_an_indexer_that_choose_otherwise_are_refused() -> None:
    """A mask that hides what it should show, and scores in place of positions."""
    keys, shown, picked = inner("transformers.indexed", "_IndexKeys", "_Shown", "_Picked")
    state = keys(None, torch.zeros(1, 2, 3), torch.zeros(1, 2, 1, 3), is_positive=True, weights=torch.ones(1, 2, 1))
    assert state.masked_fill(~shown(), -torch.inf).is_masked
    for mask in (shown(), ~~shown()):
        with pytest.raises(UnsupportedError, match="masked_fill with another mask"):
            state.masked_fill(mask, -torch.inf)
    with pytest.raises(TypeError, match="not subscriptable"):
        picked(torch.zeros(1))[0]
