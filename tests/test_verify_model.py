"""`cp_mesh.verify_model` passes what is right, finds by probes alone what `mistaken` has, and says what it cannot tell.

`test_mistakes.py` has the mistakes that it finds against the model on one rank.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dense import dense_attention, dense_mask
from inside import Finding, ModelReport
from mistaken import MISTAKES
from model import Core, DenseScoredCore, Model, ScoredCore, batch
from ranks import mesh, on_ranks
from scripts import run_script
from set_ups import SET_UPS
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import cp_mesh
from cp_mesh import (
    ArgumentError,
    ContextParallel,
    Mask,
    ShardedModel,
    ShardedSequence,
    ZigZag,
    cross_entropy,
    parallelize,
    verify_model,
)
from cp_mesh.tools import VerificationError

S, B = 24, 2
Kwargs = dict[str, Any]


# --- models


class Positioned(Model):
    """With positions that may be left out, as in most models."""

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        positions = torch.arange(tokens.shape[1]) if positions is None else positions
        return super().forward(tokens, positions, documents)


class WindowCore(nn.Module):
    """The oracle with a window: 4 tokens, itself included."""

    window = 3

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        return dense_attention(q, k, v, dense_mask(q.shape[2], window=(self.window, 0)))[0]


class WideCore(WindowCore):
    window = 7


def windows() -> nn.Module:
    """A model whose layers have windows of 4 and 8 tokens."""
    model = Positioned(WindowCore)
    model.layers[1].core = WideCore()
    return model


class LastIgnored(Core):
    """Nothing for the last row of a shard."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        out = super().forward(q, k, v, documents)
        return torch.cat([out[:, :, :-1], torch.zeros_like(out[:, :, -1:])], 2)


class Leaky(Positioned):
    """A model that was told of documents and attends across them, as eager gpt-oss in transformers 5.24 does."""

    def forward(self, tokens: Tensor, positions: Tensor, documents: Tensor | None = None) -> Tensor:
        return super().forward(tokens, positions)


class OneLayer(Positioned):
    """Without the residual stream around attention, so that a row shows what its attention saw."""

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        x = torch.stack([x[..., :16], x[..., 16:]], 1)
        return self.head(self.layers[0].core(x, x, x).transpose(1, 2).flatten(-2))


# --- set-ups


def whole(names: str = "tokens labels", rows: int = B, length: int = S) -> dict[str, Tensor]:
    found = batch(rows, length)
    return {name: found[name] for name in names.split()}


def plan_of(sequence: ShardedSequence, root: Kwargs | None = None, **core: Any) -> Kwargs:
    return {"": ShardedModel(sequence, **(root or {})), "layers.*.core": ContextParallel(sequence, **core)}


def right(axis: DeviceMesh, **others: Any) -> Kwargs:
    """A set-up without a mistake, on one axis; ``others`` are those of the catalogue."""
    sequence = ShardedSequence(axis)
    given = {"make_model": Positioned, "plan": plan_of(sequence), "batch": whole(), "mesh": axis}
    return given | others


def shard(axis: DeviceMesh, **tensors: Tensor) -> dict[str, Tensor]:
    return ShardedSequence(axis).shard(tensors)


def gathered(axis: DeviceMesh) -> Kwargs:
    def loss(model: nn.Module, data: Kwargs) -> Tensor:
        return F.cross_entropy(model(data["tokens"]).flatten(0, 1), data["labels"].flatten())

    return right(axis, plan=plan_of(ShardedSequence(axis), {"gather_output": True}), loss=loss)


def in_windows(axis: DeviceMesh) -> Kwargs:
    sequence, plan = ShardedSequence(axis), {}
    masks = [Mask(window=(3, 0)), Mask(window=(7, 0))]
    for i, mask in enumerate(masks):
        plan[f"layers.{i}.core"] = ContextParallel(sequence, mask=mask)
    return right(axis, plan={"": ShardedModel(sequence), **plan}, make_reference=windows, mask=masks)


def with_scores(axis: DeviceMesh) -> Kwargs:
    make, dense = (functools.partial(Positioned, core) for core in (ScoredCore, DenseScoredCore))
    plan = plan_of(ShardedSequence(axis), scores=lambda core, *_: core.scores())
    return right(axis, make_model=make, plan=plan, make_reference=dense)


def of_length(length: int, pad: bool) -> Callable[[DeviceMesh], Kwargs]:
    return lambda axis: right(
        axis, plan=plan_of(ShardedSequence(axis, length=length, pad=pad)), batch=whole(length=length)
    )


def compiled(axis: DeviceMesh) -> Kwargs:
    def spread(model: nn.Module) -> None:
        parallelize(model, axis, plan_of(ShardedSequence(axis)))
        for layer in model.layers:
            layer.compile(backend="eager")

    def reduce(model: nn.Module) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=axis.get_group())

    return right(axis, plan=spread, reduce_gradients=reduce)


RIGHT: dict[str, tuple[Callable[[DeviceMesh], Kwargs], int]] = {
    "one rank": (right, 1),
    "a plan": (right, 2),
    "windows": (in_windows, 2),
    "scores": (with_scores, 2),
    "gathered logits, its own loss": (lambda axis: gathered(axis) | {"loss": None}, 2),
    "padded": (of_length(21, True), 2),
    "unequal shards": (of_length(21, False), 3),
    "compiled blocks": (compiled, 2),
}
"""What the set-ups of `set_ups` have not; and the number of ranks."""


def passes(axis: DeviceMesh, name: str, **options: Any) -> None:
    found = verify_model(**RIGHT[name][0](axis) | options)
    assert found.passed and found.verdict.startswith("RIGHT") and len(found.findings) >= 8
    note = {x.check: x.note for x in found.findings}["gradients of ranks"]
    counts = re.match(r"(\d+) of (\d+) parameters", note)
    assert counts and counts[1] == counts[2] > "0"


@pytest.mark.parametrize(("name", "size"), [(name, size) for name, (_, size) in RIGHT.items()])
@pytest.mark.quick("one rank", "unequal", "scores")
@on_ranks("size")
def test_what_is_right_passes(rank: int, axis: DeviceMesh, name: str) -> None:
    passes(axis, name)


@pytest.mark.full
@on_ranks(2, timeout=120.0)
def test_probes_pass_what_is_right(rank: int, axis: DeviceMesh) -> None:
    for name, (_, size) in RIGHT.items():
        if size == 2:
            passes(axis, name, reference=False)


# --- probes alone


class FullCore(nn.Module):
    """Attention that is not causal."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def on_one_rank(make: Callable[[], nn.Module], names: str = "tokens labels", **others: Any) -> Callable[..., Kwargs]:
    """A model that does not use cp_mesh."""
    return lambda axis: {"make_model": make, "plan": None, "batch": whole(names), **others}


def seen(*lookbacks: int) -> list[Mask]:
    return [Mask(window=(lookback, 0)) for lookback in lookbacks]


def cut_off(axis: DeviceMesh) -> Kwargs:
    """A length that ranks do not divide: the tail is dropped."""

    def loss(model: nn.Module, data: Kwargs) -> Tensor:
        cut = {name: x[:, : S - 4] for name, x in data.items()}
        return cross_entropy(model(cut["tokens"]), shard(axis, labels=cut["labels"])["labels"], axis)

    rows = ZigZag().positions(S - 4, 2, axis.get_local_rank())
    return right(axis, batch=whole(length=S - 1), loss=loss, rows=rows)


# What finds it, and what it says, of a model that does not use cp_mesh.
OF_ONE_RANK: dict[str, tuple[str, str, Callable[[DeviceMesh], Kwargs]]] = {
    "a model that leaks": (
        "end of a document", "packed documents leak", on_one_rank(Leaky, "tokens labels documents positions"),
    ),
    "a model that leaks, told by its positions": (
        "end of a document", "packed documents leak", on_one_rank(Positioned, "tokens labels positions"),
    ),
    "not causal": ("last token", "attention is not causal", on_one_rank(functools.partial(Positioned, FullCore))),
    "a window too wide": ("window edge", "outside of the window of that", on_one_rank(windows, mask=seen(2, 7))),
    "a window too narrow": ("window edge", "do not change with", on_one_rank(windows, mask=seen(4, 7))),
    "last tokens ignored": (
        "far token",
        "logits at position 23 do not change with token 0",
        on_one_rank(functools.partial(OneLayer, LastIgnored)),
    ),
    "sinks dropped": (
        "sinks", "layers.0.core.sinks; logits do not change", on_one_rank(functools.partial(Positioned, ScoredCore)),
    ),
    "rows that nobody has": ("rows", "position 20; 0 of 2 ranks", cut_off),
}  # fmt: skip
# The same of mistakes, each with its set-up.
PROBED = {
    "no layer in the plan, watch=False": ("eager", "far token", "do not change with token 0"),
    "the mean of a rank's rows": ("eager", "loss of the logits", "times the right value|times too large"),
    "labels by chunk": ("eager", "loss of the logits", "times the right value"),
    "gradients that are averaged by hand": ("cores", "scale of gradients", "0.5 of the right value, one over the"),
    "gradients that nobody reduces": ("eager", "gradients of ranks", "nothing sums gradients"),
    "a part of the gradient of v": ("eager", "scale of gradients", "times the right value"),
}


def says(verify: Callable[[], Any], check: str, text: str) -> None:
    with pytest.raises(VerificationError) as error:
        verify()
    found = {x.check: f"{x.where}; {x.note}" for x in error.value.report.findings if not x.passed}
    assert re.search(text, found.get(check, "")), (check, text, found)


@pytest.mark.full
@pytest.mark.parametrize("name", OF_ONE_RANK)
@on_ranks(2)
def test_probes_need_no_reference(rank: int, axis: DeviceMesh, name: str) -> None:
    check, text, setup = OF_ONE_RANK[name]
    says(lambda: verify_model(**setup(axis) | {"reference": False}), check, text)


def probe(rank: int, name: str) -> None:
    set_up, check, text = PROBED[name]
    training = MISTAKES[name](rank, SET_UPS[set_up])
    says(functools.partial(training.verify, reference=False, probes=True), check, text)


@pytest.mark.full
@pytest.mark.parametrize("name", PROBED)
@on_ranks(2, timeout=120.0)
def test_probes_find_mistakes(rank: int, name: str) -> None:
    probe(rank, name)


@pytest.mark.full
@on_ranks(2, timeout=120.0)
def test_a_few_mistakes(rank: int, axis: DeviceMesh) -> None:
    """By probes and by the reference, for bugs of `verify_model` itself."""
    check, text, leaks = OF_ONE_RANK["a model that leaks"]
    says(lambda: verify_model(**leaks(axis) | {"reference": False}), check, text)
    for name in ("labels by chunk", "no layer in the plan, watch=False", "gradients that nobody reduces"):
        probe(rank, name)
    for name, words in {
        "gradients that nobody reduces": "each rank has a partial gradient: nothing sums them over cp",
        "one parameter that nobody reduces": "gradients: head.weight; ",
        "a layer left out of the plan, watch=False": "forward: layers.0.core, output, position 6",  # of rank 1
    }.items():
        with pytest.raises(VerificationError) as error:
            MISTAKES[name](rank, SET_UPS["eager"]).verify()
        said = error.value.report.verdict
        assert said.startswith("WRONG: ") and words in said, said
    MISTAKES["right"](rank, SET_UPS["flex"]).verify(make_reference=None)  # cores without a mesh on one rank
    passes(axis, "a plan")


# --- what cannot be told, options, the report


class Random(Positioned):
    """With dropout that nobody switched off."""

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        return F.dropout(super().forward(tokens, positions), 0.5)


def left_out(axis: DeviceMesh) -> Kwargs:
    sequence = ShardedSequence(axis)
    plan = {"": ShardedModel(sequence, watch=False), "layers.0.core": ContextParallel(sequence)}
    return right(axis, plan=plan)


def refused_on_one_rank(axis: DeviceMesh) -> Kwargs:
    def loss(model: nn.Module, data: Kwargs) -> Tensor:
        if axis.get_local_rank() == 0:
            raise NotImplementedError("positions are read as packed documents")
        return cross_entropy(model(data["tokens"]), shard(axis, labels=data["labels"])["labels"], axis)

    return right(axis, loss=loss)


def wrong_norm(axis: DeviceMesh) -> Kwargs:
    """Of the gradients before they are summed."""
    norms: list[float] = []

    def loss(model: nn.Module, data: Kwargs) -> Tensor:
        return cross_entropy(model(data["tokens"]), shard(axis, labels=data["labels"])["labels"], axis)

    def reduce(model: nn.Module) -> None:
        norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=axis.get_group())

    return right(axis, loss=loss, reduce_gradients=reduce, gradient_norm=lambda model: torch.tensor(norms[-1]))


class OfRanks(Positioned):
    """Other weights on each rank."""

    def __init__(self) -> None:
        super().__init__(seed=dist.get_rank())


def other_names(axis: DeviceMesh) -> Kwargs:
    def loss(model: nn.Module, data: Kwargs) -> Tensor:
        return cross_entropy(model(data["ids"]), shard(axis, labels=data["targets"])["labels"], axis)

    def of_one(model: nn.Module, data: Kwargs) -> Tensor:
        return F.cross_entropy(model(data["ids"]).flatten(0, 1), data["targets"].flatten())

    data = {"ids": whole()["tokens"], "targets": whole()["labels"]}
    return right(axis, batch=data, loss=loss, reference_loss=of_one, tokens="ids", labels="targets")


def spread_already(axis: DeviceMesh) -> nn.Module:
    return parallelize(Positioned(), axis, plan_of(ShardedSequence(axis)))


def grid() -> DeviceMesh:
    return mesh((1, 2), ("data", "context"))


SAID: dict[str, tuple[str, Callable[[DeviceMesh], Kwargs]]] = {
    "dropout": (r"WRONG: repeats: .*switch dropout off", lambda axis: right(axis, make_model=Random)),
    "weights": (r"WRONG: weights: .*differ between ranks", lambda axis: right(axis, make_model=OfRanks)),
    "names": (
        r"WRONG: runs: ArgumentError; .*the same names on one rank",
        lambda axis: right(axis, make_reference=functools.partial(Positioned, DenseScoredCore)),
    ),
    "spread": (
        r"WRONG: runs: ArgumentError; .*pass a make_reference= that makes the plain one",
        lambda axis: right(axis, make_model=lambda: spread_already(axis), plan=None),
    ),
    "logits": (
        r"WRONG: runs: ArgumentError; .*a call of the model, got none",
        lambda axis: right(axis, plan=None, loss=lambda model, data: model.head.weight.sum()),
    ),
    "a loss of its own": (r"^RIGHT", other_names),
    "axes of other names": (
        r"^RIGHT",
        lambda axis: right(axis, plan=plan_of(ShardedSequence(grid()["context"])), mesh=grid(), cp="context"),
    ),
    "the same tokens": (r"^RIGHT", lambda axis: right(axis, plan=None, mesh=grid(), same=("data", "context"))),
    "bfloat16": (r"^RIGHT", lambda axis: right(axis, dtype=torch.bfloat16)),
    "a layer left out, in bfloat16": (
        r"WRONG: forward: layers\.1\.core, output, position",
        lambda axis: left_out(axis) | {"dtype": torch.bfloat16},
    ),
    "of its own dtype": (
        r"^RIGHT", lambda axis: right(axis, make_model=lambda: Positioned(dtype=torch.float32), dtype=None),
    ),
    "refused on one rank": (r"runs: \w+; .*positions are read as packed documents", refused_on_one_rank),
    "the norm before the sum": (r"gradient norm: ", wrong_norm),
    "a tail that is cut off": (r"rows: position 20; 0 of 2 ranks have its logits", cut_off),
    "windows of the plan": (
        r"forward: layers\.0\.core, .* window or scores; its style in the plan has mask=Mask\(causal=True, "
        r"window=\(3, 0\)\): if the model's own code does not apply it, pass a make_reference= that does",
        lambda axis: in_windows(axis) | {"make_reference": None},
    ),
    "windows of the plan, by probes": (
        r"or documents, pass mask=, one for each layer.* has .*make_reference=",
        lambda axis: in_windows(axis) | {"reference": False, "mask": None},
    ),
}  # fmt: skip
"""Verdicts on what cannot be compared, and of options."""

REFUSED: dict[str, Kwargs] = {
    r"int64 \[B, S\] under one of tokens, input_ids": {"batch": {"x": torch.zeros(2, 3)}},
    r"labels \[B, S\] under 'labels'": {"batch": {"tokens": torch.zeros(2, 8, dtype=torch.int64)}},
    r'expected "sum" or "mean", got max': {"total": "max"},
    r"expected True or False, got chunks; reference=False runs only probes": {"reference": "chunks"},
    r"one for each layer if there are windows": {"mask": Mask(window=(3, 0))},
}


@pytest.mark.full
@on_ranks(2, timeout=120.0)
def test_what_cannot_be_told_and_options(rank: int, axis: DeviceMesh) -> None:
    for name, (pattern, setup) in SAID.items():
        try:
            said = verify_model(**setup(axis)).verdict
        except VerificationError as error:
            said = error.report.verdict
        assert re.search(pattern, said), (name, said)
    for pattern, changed in REFUSED.items():
        with pytest.raises(ArgumentError, match=pattern):
            verify_model(**right(axis) | changed)


def test_the_report_is_a_table_and_json() -> None:
    long = "position 6; " + "words that go on " * 20
    findings = [Finding("batch", True), Finding("forward", False, float("inf"), 1e-9, long, "a note")]
    report = ModelReport(findings, 1.25)
    lines = str(report).splitlines()
    assert max(map(len, lines)) < 100 and "WRONG" in lines[2] and lines[2].split()[2:] == ["inf", "1.0e-09"]
    read = json.loads(report.to_json())
    assert read["passed"] is False and read["verdict"] == report.verdict and read["findings"][1]["error"] == "inf"
    assert report.verdict.startswith("WRONG: forward: position 6; words that go on")
    assert report.verdict.endswith("a note (2 checks, 1.2 s)")
    assert ModelReport(findings[:1]).verdict.startswith("RIGHT (1 checks")
    factor = Finding("gradients", False, where="head.weight", note="0.5 of the right value", named=True)
    last = [*findings, Finding("loss", False, note="1.2 times"), factor, Finding("gradient norm", False, named=True)]
    said = ModelReport(last).verdict
    assert said.startswith("WRONG: forward: position 6") and "1.2" not in said and "gradient norm" not in said
    assert said.endswith("a note. gradients: head.weight; 0.5 of the right value (5 checks, 0.0 s)")
    assert ModelReport([factor]).verdict.count("gradients") == 1
    assert not ModelReport().passed and ModelReport().verdict.startswith("WRONG: nothing")


FACTORIES = """
import sys
sys.path.insert(0, {tests!r})
from test_verify_model import left_out, right
from torch.distributed.device_mesh import init_device_mesh

def good(): return right(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)))
def bad(): return left_out(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)))
"""


@pytest.mark.parametrize("which", ["good", pytest.param("bad", marks=pytest.mark.full)])
def test_the_command(tmp_path: Path, which: str) -> None:
    (tmp_path / "my_factories.py").write_text(FACTORIES.format(tests=str(Path(__file__).parent)))
    script, written = Path(cp_mesh.__file__).parent / "__main__.py", tmp_path / "report.json"
    arguments = ["verify", f"{tmp_path / 'my_factories.py'}:{which}", "--device", "cpu", "--json", str(written)]
    done = run_script(script, arguments, num_ranks=2)
    assert done.returncode == (which == "bad"), done.printed
    read = json.loads(written.read_text())
    assert read["passed"] == (which == "good") and read["verdict"].split(" (")[0][:40] in done.printed
    assert "] building the reference" in done.printed
    assert " s] the step: forward and backward" in done.printed and "scale of gradients" in done.printed


@pytest.mark.full
@pytest.mark.parametrize(("which", "ranks"), [("packed", 2), ("checkpointed", 2), ("overlapped", 4)])
def test_the_llama_trainer_passes(which: str, ranks: int) -> None:
    root = Path(__file__).resolve().parent.parent
    arguments = ["verify", f"{root / 'examples' / 'verify_llama.py'}:{which}", "--device", "cpu"]
    done = run_script(Path(cp_mesh.__file__).parent / "__main__.py", arguments, num_ranks=ranks)
    assert done.returncode == 0 and "RIGHT (" in done.printed, done.printed
