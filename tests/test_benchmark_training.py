"""The training benchmark on two CPU ranks: all variants train the model that one rank trains; wrong ones are caught.

PyTorch's `context_parallel` has no kernel on CPUs. Run as a script, this file lends it one, its own ring around the CPU
kernel, and goes on with the benchmark.
"""

from __future__ import annotations

import csv
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from ranks import mesh
from scripts import run_script
from torch.multiprocessing.reductions import StorageWeakRef

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "examples" / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import tables  # noqa: E402
import training  # noqa: E402

TINY = shlex.split(
    "--device cpu --precision fp32 --seq-len 64 --layers 2 --dim 32 --heads 4 --kv-heads 2 --ffn 48 --vocab 64 "
    "--warmup 1 --steps 2"
)


def run(script: Path, path: Path, *options: str, num_ranks: int = 2) -> tuple[list[dict[str, str]], str, int]:
    """The rows that the ranks wrote, what they printed, and the exit code."""
    done = run_script(script, [*TINY, *options, "--csv", path], num_ranks)
    assert path.exists(), done.printed
    with path.open(newline="") as file:
        return list(csv.DictReader(file)), done.printed, done.returncode


def check_against_one_rank(row: dict[str, str]) -> None:
    """The loss and the gradient norm are those of the benchmark's model and batch without any mesh."""
    args = training.parse_arguments(TINY)
    (args.seq_len,) = args.seq_len
    model = training.Llama(training.llama_config(args))
    model.init_weights(args.seed)
    tokens, labels = training.make_batch(args)
    loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
    loss.backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    assert float(row["loss"]) == pytest.approx(loss.item(), rel=1e-6)
    assert float(row["grad_norm"]) == pytest.approx(norm.item(), rel=1e-5)


def test_flops_are_those_of_llama_3_8b() -> None:
    config = training.llama_config(training.parse_arguments(["--layers", "32", "--vocab", "128256"]))
    seq_len = 131072
    matrices = 8_030_261_248 - 128256 * 4096 - 65 * 4096  # its published size without embedding and norms
    attention_forward = 32 * 4 * 4096 * seq_len**2 // 2
    rated, trainers = training.model_flops(config, seq_len)
    assert rated == 6 * matrices * seq_len + 3.5 * attention_forward
    assert trainers == 6 * matrices * seq_len + 3 * attention_forward


@pytest.mark.nightly("benchmarks")
def test_all_variants_train_the_same_model(tmp_path: Path) -> None:
    variants = ["cp_mesh", "torch_allgather", "torch_alltoall", "ulysses"]
    rows, printed, code = run(Path(__file__), tmp_path / "rows.csv", "--variants", *variants, "--seq-len", "64", "32")
    assert code == 0, printed
    assert [(row["seq_len"], row["variant"]) for row in rows] == [(n, x) for n in ("64", "32") for x in variants]
    own = {"cp_mesh": "cp_mesh.cross_entropy"}
    for row in rows:
        assert tuple(row) == training.COLUMNS
        assert row["status"] == "ok"
        assert row["loss_function"] == own.get(row["variant"], "F.cross_entropy")
        if row["seq_len"] == "64":
            check_against_one_rank(row)
        assert float(row["grad_difference"]) < 1e-5
        assert int(row["steps"]) == 2
        assert 0 < float(row["step_ms_min"]) <= float(row["step_ms_median"]) <= float(row["step_ms_max"])
    settings = [row["settings"] for row in rows]
    assert settings[0].startswith("kernel=cpu_flash transport=functional")
    assert [text.split()[1:] for text in settings[1:3]] == [
        [f"rotate={rotation}", "kv_heads=native"] for rotation in ("allgather", "alltoall")
    ]
    # For each of the two and each length: once to ask it, then 2 layers in 4 forwards, none of them computed again.
    assert "36 forward rings" in printed
    assert "| ms a step (GiB) | 64 tokens, eager | 32 tokens, eager |" in printed


def logits_in_backward(rank: int, loss: str) -> dict[str, list[bool]]:
    """Of each variant, whether its logits are held when the backward begins, and after that of the loss."""
    args = training.parse_arguments([*TINY, "--variants", "cp_mesh", "ulysses", "--loss", loss])
    (args.seq_len,) = args.seq_len
    trainer = training.Trainer(args, mesh((2,), ("cp",)), torch.device("cpu"))
    held: dict[str, list[bool]] = {}
    real_backward = torch.Tensor.backward
    for variant in trainer.variants:
        storages: list[StorageWeakRef] = []
        found = held[variant.name] = []

        def look(*_: Any, storages: list[StorageWeakRef] = storages, found: list[bool] = found) -> None:
            found.append(not storages[0].expired())

        def watch(module: Any, inputs: Any, output: torch.Tensor, storages: Any = storages, look: Any = look) -> None:
            storages.append(StorageWeakRef(output.untyped_storage()))
            assert output.grad_fn is not None
            output.grad_fn.register_prehook(look)

        def backward(loss: torch.Tensor, look: Any = look) -> None:
            look()
            real_backward(loss)

        handle = trainer.model.output.register_forward_hook(watch)
        with mock.patch.object(torch.Tensor, "backward", backward):
            trainer.loss_and_backward(variant)
        handle.remove()
    return held


@pytest.mark.parametrize("loss", ["own", "torch"])
def test_logits_are_given_back(loss: str, pool: Any) -> None:
    """cp_mesh's loss needs them for its gradient, `F.cross_entropy` of a float32 copy does not; and then none does:
    logits that a variable names add a tenth to the peak."""
    needed = loss == "own"
    assert pool(2).run(logits_in_backward, loss) == [{"cp_mesh": [needed, False], "ulysses": [False, False]}] * 2


@pytest.mark.nightly("benchmarks")
def test_without_a_kernel_the_rival_is_refused(tmp_path: Path) -> None:
    options = ("--recompute", "full", "--compile", "aot_eager", "--loss", "torch")
    rows, printed, code = run(BENCHMARKS / "training.py", tmp_path / "rows.csv", *options)
    assert code == 0, printed
    assert [row["variant"] for row in rows] == ["cp_mesh", "ulysses", "torch_allgather"]
    for row in rows[:2]:
        check_against_one_rank(row)
        assert row["status"] == "ok" and row["steps"] == "2" and row["blocks"] == "aot_eager"
    assert [row["loss_function"] for row in rows] == ["F.cross_entropy"] * 3
    assert rows[2]["status"].startswith("refused: NotImplementedError")
    assert rows[2]["loss"] == rows[2]["step_ms_median"] == ""


@pytest.mark.nightly("benchmarks")
def test_variants_that_disagree_are_not_timed(tmp_path: Path) -> None:
    rows, printed, code = run(Path(__file__), tmp_path / "rows.csv", "--lend-wrong-kernel")
    assert code != 0
    assert "the variants disagree" in printed
    assert rows[2]["status"].startswith("differs from cp_mesh")
    assert [row["step_ms_median"] for row in rows] == [""] * len(rows)
    assert [row["status"] == "ok" for row in rows] == [True, True, False]


@pytest.mark.nightly("benchmarks")
def test_linears_over_tp_train_the_same_model(tmp_path: Path) -> None:
    """cp 2 x tp 2; and linears that leave out other ranks' rows are found."""
    rows, printed, code = run(BENCHMARKS / "training.py", tmp_path / "rows.csv", "--tp", "2", num_ranks=4)
    assert code == 0, printed
    assert [(row["variant"], row["world"], row["tp"]) for row in rows] == [(x, "4", "2") for x in training.OF_TP]
    for row in rows:
        check_against_one_rank(row)
        assert row["status"] == "ok" and row["steps"] == "2" and float(row["grad_difference"]) < 1e-5
    assert float(rows[1]["grad_difference"]) > 0, "two sums of one thing"
    assert "| ms a step (GiB) | 64 tokens, eager, tp 2 |" in printed
    script = tmp_path / "broken.py"
    script.write_text(BROKEN_LINEARS)
    rows, printed, code = run(script, tmp_path / "broken.csv", "--tp", "2", num_ranks=4)
    assert code != 0 and rows[1]["status"].startswith("differs from cp_mesh"), printed
    assert not rows[0]["step_ms_median"]


BROKEN_LINEARS = f"""
import sys
sys.path[:0] = [{str(BENCHMARKS)!r}, {str(ROOT / "tests")!r}]
import training
from inside import inner
Shards = inner("shards", "Shards")
Shards.scatter_sum = lambda self, x: lambda: x[..., : self.own, :].clone()
training.main()
"""


@pytest.mark.parametrize(
    ("options", "expected"), [("--tp 2 --variants ulysses", "torch_linears"), ("--variants torch_linears", "ulysses")]
)
def test_variants_of_tp_are_others(options: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        training.parse_arguments(options.split())
    assert expected in capsys.readouterr().err.splitlines()[-1].partition("got")[0]


def test_a_rival_that_raises_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(variant: SimpleNamespace) -> tuple[float, float, dict]:
        if variant.name in raising:
            raise ValueError("on purpose")
        return 1.0, 1.0, {}

    monkeypatch.setattr(training, "say", lambda text: None)
    variants = [SimpleNamespace(name=name, settings="", refusal=None) for name in ("cp_mesh", "ulysses", "other")]
    args = SimpleNamespace(precision="fp32")
    trainer: Any = SimpleNamespace(
        variants=variants, args=args, check=check, gradient_difference=lambda a, b: (0.0, "somewhere")
    )
    figures = {variant.name: training.Figures() for variant in variants}
    raising = {"ulysses"}
    training.compare([trainer], figures)
    assert [figures[x.name].status for x in variants] == ["ok", "refused: ValueError: on purpose", "ok"]
    raising = {"cp_mesh"}
    with pytest.raises(ValueError, match="on purpose"):
        training.compare([trainer], figures)


def test_the_table_of_steps() -> None:
    rows = [
        {"variant": "ulysses", "blocks": "eager", "seq_len": "8192", "step_ms_median": "12.6", "peak_gib": "3.25"},
        {"variant": "cp_mesh", "blocks": "eager", "seq_len": "8192", "step_ms_median": "11.4", "peak_gib": ""},
        {"variant": "cp_mesh", "blocks": "inductor", "seq_len": "100", "step_ms_median": "9.0", "peak_gib": "1.00"},
        {"variant": "ulysses", "blocks": "inductor", "seq_len": "100", "status": "refused: 3 kv heads"},
    ]
    head, _, *lines = tables.steps_table(rows).splitlines()
    assert head == "| ms a step (GiB) | 8K tokens, eager | 100 tokens, compiled |"
    assert lines == ["| cp_mesh | 11 | 9 (1.00) |", "| Ulysses, same kernel | 13 (3.25) | refused |"]


def lend_kernel(calls: list[str], right: bool) -> None:
    """Let PyTorch's `context_parallel` run its ring around the CPU's flash kernel; a wrong one uses another scale."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental._context_parallel import _attention

    aten = torch.ops.aten
    forward_op = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward_op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def local(tensors: tuple[Any, ...]) -> list[torch.Tensor]:
        return [x.to_local() if isinstance(x, DTensor) else x for x in tensors]

    def forward(op: Any, args: tuple, kwargs: dict) -> tuple[DTensor, ...]:
        calls.append("forward")
        query = args[0]
        q, k, v = local(args[:3])
        group = query.device_mesh.get_group()
        kwargs = kwargs | ({} if right else {"scale": 2 * q.shape[-1] ** -0.5})
        results = _attention._templated_ring_attention(group, 2, forward_op, q, k, v, is_causal=True, **kwargs)
        return tuple(DTensor.from_local(x, query.device_mesh, query.placements, run_check=False) for x in results)

    def backward(op: Any, args: tuple, kwargs: dict) -> tuple[DTensor, ...]:
        query = args[1]
        grad_out, q, k, v, out, lse = local(args[:6])
        results = _attention._templated_ring_attention_backward(
            query.device_mesh.get_group(), 2, backward_op, grad_out, "grad_out", q, k, v, out, lse, True,
            dropout_p=0.0, **kwargs,
        )  # fmt: skip
        return tuple(DTensor.from_local(x, query.device_mesh, query.placements, run_check=False) for x in results)

    handlers: dict[Any, Any] = {forward_op: forward, backward_op: backward}
    _attention.custom_ops |= handlers


if __name__ == "__main__":
    calls: list[str] = []
    right = "--lend-wrong-kernel" not in sys.argv
    lend_kernel(calls, right)
    sys.argv = [argument for argument in sys.argv if argument != "--lend-wrong-kernel"]
    try:
        training.main()
    finally:
        print(len(calls), "forward rings")
