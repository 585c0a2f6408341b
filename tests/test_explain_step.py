"""`cp_mesh.tools.explain_step` against what steps allocate, and the longest sequences that it names.

Steps of `examples/train_llama.py` run on CPU ranks in bfloat16, with a kernel that allocates what FlashAttention does
and norms that save what those of GPUs save. PyTorch's profiler counts every byte of its allocator. What is to wait in
host memory goes into memory of numpy's, which it does not count. On CPUs a sum of float32 and bfloat16 takes a copy
that GPUs do not make: the vocabulary is small where that would show.
"""

from __future__ import annotations

import csv
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from inside import inner, room
from ranks import mesh
from test_allocations import allocating_alone
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

import cp_mesh
from cp_mesh import ArgumentError
from cp_mesh.tools import explain_step

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples")]

import data  # noqa: E402
import llama  # noqa: E402
import parallel_llama  # noqa: E402, F401 - before sys.modules is patched
import train_llama  # noqa: E402

ModelSizes, PRESETS, FAMILIES, MOST = inner("explain.step", "ModelSizes", "PRESETS", "FAMILIES", "MOST")
token_losses, host_copies, checkpointed = room("losses_in_chunks"), room("host_copies"), room("checkpointed")
GIB = 1 << 30
WITHIN = {1: 0.02, 2: 0.05}
"""Of the measured peak, by ranks: what gloo's threads free late is not seen."""
SMALL = {
    "model_type": "llama", "hidden_size": 128, "num_hidden_layers": 3, "intermediate_size": 384,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
}  # fmt: skip


class _Norm(torch.autograd.Function):
    """Saves its input, as the fused kernel of GPUs does; on CPUs PyTorch's saves more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return torch.zeros_like(x), torch.zeros_like(weight)


class Norm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return _Norm.apply(x, self.weight)


class CopyStream(host_copies.CopyStream):
    """Buffers of numpy's memory, which is not counted here."""

    made = 0

    def buffer(self, size: int) -> Tensor:
        with mock.patch.object(host_copies.torch, "empty", self.take):
            return super().buffer(size)

    def take(self, size: int, **_: Any) -> Tensor:
        CopyStream.made += size
        return torch.from_numpy(np.empty(size + 1, dtype=np.uint8))[:size]  # of no bytes the stride would be 0


class Case(NamedTuple):
    """Sizes and options that differ from `SMALL`'s and the script's; ``rows`` are those of a rank."""

    rows: int
    sizes: dict[str, int]
    options: dict[str, Any]

    @property
    def model(self) -> dict[str, Any]:
        return SMALL | self.sizes


DEEP, WIDE = {"num_hidden_layers": 16, "intermediate_size": 64}, {"intermediate_size": 1024}
MANY_WORDS = {"vocab_size": 8192}
TIED, LONG = {"vocab_size": 2048, "tie_word_embeddings": True}, {"tiled_loss": True, "mlp_rows": 128}
EVERY = LONG | {"offload_checkpoints": True, "offload_optimizer": True, "recompute": "full"}
ONE_RANK = {
    "as it is": Case(2048, {}, {}),
    "few rows": Case(128, {}, {}),
    "states in bfloat16": Case(128, WIDE, {"optimizer_dtype": "bf16"}),
    "states in host memory": Case(512, WIDE, {"offload_optimizer": True}),
    "checkpoints": Case(2048, DEEP, {}),
    "checkpoints in host memory": Case(2048, DEEP, {"offload_checkpoints": True}),
    "attention recomputed": Case(2048, DEEP, {"recompute": "full"}),
    "inputs alone, in host memory": Case(2048, DEEP, {"recompute": "full", "offload_checkpoints": True}),
    "a wide MLP": Case(2048, WIDE, {}),
    "a tiled MLP": Case(2048, WIDE, {"mlp_rows": 128}),
    "logits": Case(2048, MANY_WORDS, {}),
    "tiled loss": Case(2048, MANY_WORDS, {"tiled_loss": True}),
    "tied": Case(2048, TIED, LONG),
    "every line": Case(2048, DEEP, EVERY),
}
TWO_RANKS = {
    "as it is": Case(1024, {"num_hidden_layers": 5}, {}),
    "few rows": Case(128, WIDE, {}),
    "tiled": Case(1024, {}, LONG),
    "logits": Case(512, MANY_WORDS, {}),
}
IN_USE = {"tiled_loss": False, "mlp_rows": None, "offload_checkpoints": False, "offload_optimizer": False}


def to_host(parameter: Tensor) -> None:
    """Where FSDP2 has sent a gradient."""
    assert isinstance(parameter.grad, DTensor)
    parameter.grad._local_tensor = torch.from_numpy(parameter.grad.to_local().numpy().copy())


@contextmanager
def as_on_gpus() -> Iterator[None]:
    attention, root = partial(cp_mesh.ContextParallel, kernel="stand_in"), cp_mesh.ShardedModel
    with (
        allocating_alone(),
        mock.patch.object(nn, "RMSNorm", Norm),
        mock.patch.object(cp_mesh, "ContextParallel", attention),
        # the stand-in computes nothing that a probe could compare
        mock.patch.object(cp_mesh, "ShardedModel", lambda *args, **given: root(*args, **given | {"probe": False})),
        mock.patch.object(checkpointed, "CopyStream", CopyStream),
        mock.patch.object(token_losses, "CHUNK_BYTES", 1 << 19),  # as small beside the rest as on GPUs
    ):
        yield


def told(case: Case, cp_size: int, **changed: Any) -> Any:
    options: dict[str, Any] = IN_USE | {"recompute": "selective", "optimizer_dtype": "fp32"} | case.options | changed
    dtype = train_llama.DTYPES[options.pop("optimizer_dtype")]
    given = {"optimizer_dtype": dtype, "device": "cpu", "kernel": "stand_in"}
    return explain_step(case.model, case.rows * cp_size, cp_size, **options, **given)


def measured(rank: int, case: Case) -> dict[str, int]:
    """Peak bytes of a second step with AdamW's states; bytes that went to the host; what is predicted."""
    size = torch.distributed.get_world_size()
    words = ["--device", "cpu", "--seq-len", str(case.rows * size), "--batch-size", "1", "--cp", str(size)]
    args = train_llama.parse_arguments([*words, "--precision", "bf16", "--model", json.dumps(case.model)])
    vars(args).update({"recompute": "selective"} | case.options)
    peaks, CopyStream.made = [], 0
    with as_on_gpus():
        trainer = train_llama.setup_on(mesh((1, 1, size, 1), ("pp", "dp", "cp", "tp")), args, torch.device("cpu"))
        parameters = list(trainer.model.parameters())
        for parameter in parameters if args.offload_optimizer else ():
            parameter.register_post_accumulate_grad_hook(to_host)
        optimizer = torch.optim.AdamW(parameters, fused=True)
        tokens = data.random_tokens(case.rows * size + 1, case.model["vocab_size"], seed=0)
        batch = data.Corpus(tokens, case.rows * size, 1).batch(0)

        def step() -> None:
            trainer.share_of_loss({**batch}).backward()
            trainer.clip(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()

        step()
        held = 3 * sum(x.to_local().nbytes for x in parameters)
        for _ in range(1 if size == 1 else 12):  # what gloo's threads free late is not seen: the least counts
            time.sleep(0.02)
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as notes:
                step()
            live = most = 0
            for event in sorted(notes.profiler.kineto_results.events(), key=lambda x: x.start_ns()):
                live += event.nbytes() if event.name() == "[memory]" else 0
                most = max(most, live)
            peaks.append(most + held * (not args.offload_optimizer))
            host = CopyStream.made + 4 * held // 3 * args.offload_optimizer
        found = told(case, size)
    return {"peak": min(peaks), "host": host, "told": found.peak, "told_host": found.host}


def check(figures: list[dict[str, int]], case: Case) -> None:
    for of_rank in figures:
        assert of_rank["told"] == pytest.approx(of_rank["peak"], rel=WITHIN[len(figures)]), (case, figures)
        assert of_rank["told_host"] == pytest.approx(of_rank["host"], rel=0.001), (case, figures)
    if len(case.options) == 1:  # a prediction that ignored the option would not pass
        (name,) = case.options
        before = {"recompute": "selective", "optimizer_dtype": "fp32"} | IN_USE
        with as_on_gpus():
            without = told(case, len(figures), **{name: before[name]}).peak
        assert abs(without / figures[0]["peak"] - 1) > 0.1, (name, without, figures)


@pytest.mark.unpoisoned
@pytest.mark.parametrize("name", ONE_RANK)
@pytest.mark.quick("every line")
def test_a_step_takes_what_is_predicted(pool: Any, name: str) -> None:
    """With each line of a plan and without it; and a prediction without the line is wrong by over a tenth."""
    check(pool(1).run(measured, ONE_RANK[name], timeout=120.0), ONE_RANK[name])


@pytest.mark.unpoisoned
@pytest.mark.full
@pytest.mark.parametrize("name", TWO_RANKS)
def test_a_step_on_two_ranks_takes_what_is_predicted(pool: Any, name: str) -> None:
    check(pool(2).run(measured, TWO_RANKS[name], timeout=240.0), TWO_RANKS[name])


# ---- what is read of a model


BUILT = {
    "llama-3-8b": PRESETS["llama-3-8b"],
    "small": SMALL,
    "tied": SMALL | {"tie_word_embeddings": True},
    "all heads alike, wide": SMALL | {"num_key_value_heads": None, "head_dim": None, "model_type": "mistral"},
}


@pytest.mark.unpoisoned
@pytest.mark.parametrize("name", BUILT)
def test_parameters_are_those_of_the_model(name: str) -> None:
    m = ModelSizes.read(BUILT[name])
    config = llama.LlamaConfig.read(json.dumps(vars(m)))
    with torch.device("meta"):
        model = llama.Llama(config)
    blocks = sum(x.numel() for x in model.layers.parameters())
    assert m.num_hidden_layers * m.of_block == blocks
    assert m.of_ends == sum(x.numel() for x in model.parameters()) - blocks


def test_a_config_is_a_file_a_folder_or_its_content(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"rope_theta": 1e6, "head_dim": 32}))
    found = [ModelSizes.read(x) for x in (tmp_path, str(tmp_path / "config.json"), SMALL, SMALL | {"head_dim": 32})]
    assert found == [found[0]] * 4
    assert replace(found[0], head_dim=64) == ModelSizes.read(SMALL | {"head_dim": 64})
    assert set(FAMILIES) == {"llama", "mistral", "qwen2"}


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no file": ("llama-4", {}, "model: expected a config.json of Transformers, or its folder, got llama-4; llama-3-8b"),
    "experts": (
        SMALL | {"model_type": "mixtral"}, {}, "model_type: expected one of llama, mistral, qwen2, got 'mixtral'"
    ),
    "a size": (
        {k: x for k, x in SMALL.items() if k != "vocab_size"}, {}, "model: expected the key vocab_size, got ['h"
    ),
    "memory": (SMALL, {"gpu_memory": float("nan")}, "gpu_memory: expected a number above 0, in GiB, got nan"),
    "text for a switch": (SMALL | {"tie_word_embeddings": "yes"}, {}, "tie_word_embeddings: expected true or false"),
    "recompute": (SMALL, {"recompute": "all"}, "recompute: expected one of selective, full, got 'all'"),
    "rows": (SMALL, {"mlp_rows": 0}, "explain_step: mlp_rows: expected an int of 1 to 1099511627776, got 0; 1 works"),
    "the host's alone": (SMALL, {"host_memory": 4.0}, "host_memory: expected gpu_memory with it"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_others_are_refused_by_name(name: str) -> None:
    model, options, says = WRONG[name]
    with pytest.raises(ArgumentError) as refused:
        explain_step(model, 512, **options)
    assert says in str(refused.value)


@pytest.mark.parametrize(("text", "says"), [("x", "JSONDecodeError"), ("[]", "list")])
def test_files_that_are_no_config(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ArgumentError, match=f"expected a config.json of Transformers, got .*: {says}"):
        explain_step(tmp_path, 512)


# ---- what fits


command = room("__main__")
ON_H200 = {"kernel": "fa4", "optimizer_dtype": torch.bfloat16}


def test_what_fits_is_the_longest_that_fits() -> None:
    """And a sixteenth more does not: attention is planned at eight lengths of each doubling."""
    found = explain_step("llama-3-8b", 65536, gpu_memory=138, **ON_H200)
    changed = {
        "": {}, "cross_entropy(weight=)": {"tiled_loss": True}, "TiledMLP(tile_rows=8192)": {"mlp_rows": 8192},
        "checkpoints in host memory": {"offload_checkpoints": True}, "attention recomputed too": {"recompute": "full"},
        "CPUOffloadPolicy of FSDP2": {"offload_optimizer": True}, "cp 2": {"cp_size": 2},
    }  # fmt: skip
    every = {key: x for change in changed.values() for key, x in change.items() if key != "cp_size"}
    changed["all of these"] = every
    assert set(found.longest) == set(changed)
    for name, change in changed.items():
        length = found.longest[name]
        assert explain_step("llama-3-8b", length, **ON_H200 | change).peak <= 138 * GIB, name
        assert explain_step("llama-3-8b", length * 17 // 16, **ON_H200 | change).peak > 138 * GIB, name
        assert f"{length:,}" in found.text and (name or "this plan") in found.text
    assert found.longest["cross_entropy(weight=)"] > found.longest[""]
    assert found.longest["cp 2"] > 1.5 * found.longest[""]
    used = explain_step("llama-3-8b", 65536, gpu_memory=138, **ON_H200 | every)
    assert [*used.longest] == ["", "all of these", "cp 2"] and used.longest[""] == found.longest["all of these"]


def test_the_host_limits_too() -> None:
    given = ON_H200 | {"tiled_loss": True, "mlp_rows": 8192, "offload_checkpoints": True, "recompute": "full"}
    free = explain_step("llama-3-8b", 65536, gpu_memory=138, **given)
    held = explain_step("llama-3-8b", 65536, gpu_memory=138, host_memory=64, **given)
    row = 32 * 4096 * 2
    assert 0.98 * 64 * GIB < held.longest[""] * row <= 64 * GIB < free.longest[""] * row
    none = explain_step("llama-3-8b", 65536, gpu_memory=1, **given)
    assert none.longest[""] == 0
    most = explain_step(SMALL, 4096, gpu_memory=1000, kernel="fa4", mask=cp_mesh.Mask(window=(64, 0)))
    assert most.longest[""] > MOST // 2 and "or more" in most.text


def run(*words: str) -> None:
    with mock.patch.object(sys, "argv", ["cp_mesh", "explain", *words]):
        command.main()


def test_the_command_prints_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Each option reaches the function."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    given = ["--seq-len", "64K", "--cp-size", "4", "--model", str(tmp_path), "--kernel", "fa4"]
    options: dict[str, dict[str, Any]] = {
        "": {},
        "--dp-size 2": {"dp_size": 2},
        "--batch 3": {"batch": 3},
        "--gpu-memory 1.5": {"gpu_memory": 1.5},
        "--gpu-memory 1.5 --host-memory 0.25 --offload-checkpoints": {
            "gpu_memory": 1.5, "host_memory": 0.25, "offload_checkpoints": True,
        },
        "--recompute full": {"recompute": "full"},
        "--tiled-loss": {"tiled_loss": True},
        "--mlp-rows 1K": {"mlp_rows": 1024},
        "--offload-optimizer": {"offload_optimizer": True},
        "--optimizer-dtype bfloat16": {"optimizer_dtype": torch.bfloat16},
        "--dtype float16 --head-chunks 2": {"dtype": torch.float16, "head_chunks": 2},
        "--mlp-rows 128 --method all_gather --layout contiguous --window 99": {
            "mlp_rows": 128, "method": "all_gather", "layout": cp_mesh.Contiguous(),
            "mask": cp_mesh.Mask(window=(98, 0)),
        },
    }  # fmt: skip
    printed = set()
    for words, changed in options.items():
        run(*given, *words.split())
        printed.add(out := capsys.readouterr().out)
        assert out == f"{explain_step(SMALL, 1 << 16, 4, **{'kernel': 'fa4'} | changed)}\n", words
    assert len(printed) == len(options)
    for words, says in (
        ("--documents 5", "unrecognized arguments: --documents"),
        ("--dp-size 0", "explain_step: dp_size: expected"),
    ):
        with pytest.raises(SystemExit) as left:
            run(*given, *words.split())
        assert left.value.code == 2 and says in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("--model=none.json", "--seq-len", "64", "--cp-size", "2")
    assert "expected a config.json of Transformers" in " ".join(capsys.readouterr().err.split())


def test_moments_sum_to_the_peak() -> None:
    found = explain_step("llama-3-8b", 1 << 18, 8, dp_size=2, kernel="fa4", tiled_loss=True)
    assert found.peak == max(sum(terms.values()) for terms in found.moments.values()) and found.longest == {}
    assert found.moments["optimizer"]["weights"] == 4 * (32 * ModelSizes.read("llama-3-8b").of_block + 1050677248) // 16
    assert str(found) == found.text and "262,144 tokens, cp 8, dp 2: 32,768 rows on a GPU" in found.text
    assert max(map(len, found.text.splitlines())) <= 100


def test_measured_steps_took_about_that() -> None:
    """Those of an older script, whose MLP and loss were other modules in checkpoints: within a tenth."""
    with (ROOT / "docs" / "results" / "long_2xh200.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["seq_len"] in ("262144", "1048576")]
    assert len(rows) == 5
    for row in rows:
        sizes = PRESETS["llama-3-8b"] | {"num_hidden_layers": int(row["layers"])}
        given = {"tiled_loss": True, "offload_checkpoints": True, "recompute": row["recompute"], "kernel": "fa4"}
        found = explain_step(sizes, int(row["seq_len"]), 2, mlp_rows=int(row["mlp_rows"]), **given)
        assert found.peak / GIB == pytest.approx(float(row["peak_gib"]), rel=0.1)
