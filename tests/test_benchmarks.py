"""The benchmark as users run it, on two CPU ranks: its rows, its gate, its pictures. No figure is judged here."""

from __future__ import annotations

import csv
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from checks import forget_plans
from ranks import mesh
from scripts import run_script

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "examples" / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import attention as benchmark  # noqa: E402
import batches  # noqa: E402
import contestants as field  # noqa: E402
import planning  # noqa: E402
import plot  # noqa: E402
import raw_kernels  # noqa: E402
import report  # noqa: E402
import tiles  # noqa: E402
from inside import KERNELS, Kernel  # noqa: E402

from cp_mesh import explain  # noqa: E402

# The command, with two more contestants: one is wrong, one fails, and that on one rank only.
WITH_STRANGERS = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import attention, contestants
import torch.distributed as dist
from torch.distributed.tensor._decompositions import DecompShardingStrategy

# PyTorch would look for a way to shard what its rivals call, which is not there, for ten seconds each time.
DecompShardingStrategy.has_decomp = staticmethod(lambda op: False)

class Wrong(contestants.Ulysses):
    def setup(self, case, inputs):
        run = super().setup(case, inputs)
        backward = run.backward
        run.backward = lambda state: [gradient * scale for gradient, scale in zip(backward(state), (1, 1, 1.1))]
        return run

class Careless(contestants.Ulysses):
    is_ours = True
    def setup(self, case, inputs):
        run = super().setup(case, inputs)
        forward = run.forward
        run.forward = lambda: forward() * 1.01
        return run

class Failing(contestants.Ulysses):
    def setup(self, case, inputs):
        if dist.get_rank() == 1:
            raise ValueError("on purpose")
        return super().setup(case, inputs)

strangers = [Wrong("cpu_flash"), Careless("cpu_flash"), Failing("cpu_flash")]
for stranger in strangers:
    stranger.name = f"stranger/{{type(stranger).__name__}}"
attention.main(more=strangers)
"""
OURS, PACKED = "cp_mesh/ring/zigzag/cpu_flash/functional", "cp_mesh/ring/zigzag/reference/functional"
OPTIONS = f"""--device cpu --local-len 16 --gate-len 16 --heads 4/2 --mask causal full documents varlen_full --repeats 2
    --seconds-per-case 0.01 --contestants default {PACKED}"""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Of one run of the default contestants and the strangers."""
    directory = tmp_path_factory.mktemp("benchmark")
    script, table = directory / "with_strangers.py", directory / "results" / "attention.csv"
    script.write_text(WITH_STRANGERS)
    done = run_script(script, [*shlex.split(OPTIONS), "--csv", table], num_ranks=2)
    assert done.returncode == 0, done.printed
    with table.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.nightly("benchmarks")
def test_rows_tell_what_was_measured(rows: list[dict[str, str]]) -> None:
    assert tuple(rows[0]) == report.COLUMNS
    causal = {row["contestant"]: row for row in rows if row["mask"] == "causal"}
    others = [
        {row["contestant"] for row in rows if row["mask"] == mask} for mask in ("full", "documents", "varlen_full")
    ]
    assert len(rows) == len(causal) + sum(map(len, others)), "a row for each contestant and mask"
    for name in ("floor/best", "floor/cpu_flash", "single_gpu/cpu_flash", OURS, "ulysses/cpu_flash"):
        row = causal[name]
        assert row["status"].startswith("ok"), row
        assert float(row["fwd_ms"]) > 0 and float(row["bwd_ms"]) > 0 and float(row["fwdbwd_ms"]) > 0
        assert (row["seq_len"], row["world_size"], row["heads_q"], row["heads_kv"]) == ("32", "2", "4", "2")
    ours, floor, best = causal[OURS], causal["floor/cpu_flash"], causal["floor/best"]
    assert int(ours["repeats"]) == 2
    assert float(ours["fwd_ms_min"]) <= float(ours["fwd_ms"]) <= float(ours["fwd_ms_max"])
    share = float(floor["fwd_ms"]) / float(ours["fwd_ms"])
    assert float(ours["ratio_own_floor_fwd"]) == pytest.approx(share, rel=0.02, abs=1e-3)
    assert best["fwd_ms"] == floor["fwd_ms"] and best["bwd_ms"] == floor["bwd_ms"]
    assert float(ours["host_us_fwd"]) > 0 and float(ours["host_us_bwd"]) > 0
    # 4·H·S²·D/cp, half of it under the mask; backward 2.5 times that
    flops = 4 * 4 * 32**2 * 16 / 2 / 2
    assert float(ours["tflops_bwd"]) == pytest.approx(2.5 * flops / float(ours["bwd_ms"]) / 1e9, rel=0.02)
    full = next(row for row in rows if (row["contestant"], row["mask"]) == (OURS, "full"))
    assert float(full["tflops_bwd"]) * float(full["bwd_ms"]) == pytest.approx(5 * flops / 1e9, rel=0.02)
    packed = next(row for row in rows if (row["contestant"], row["mask"]) == (PACKED, "documents"))
    lengths = field.document_lengths(32)
    assert packed["status"] == "ok" and sum(lengths) == 32 and max(lengths) == 8
    flops = 4 * 4 * 16 * sum(n * (n + 1) // 2 for n in lengths) / 2
    assert float(packed["tflops_fwd"]) * float(packed["fwd_ms"]) == pytest.approx(flops / 1e9, rel=0.02)
    both_ways = next(row for row in rows if (row["contestant"], row["mask"]) == ("ulysses/cpu_flash", "varlen_full"))
    flops = 4 * 4 * 16 * sum(n * n for n in field.magi_lengths(32)) / 2
    assert both_ways["status"] == "ok"
    assert float(both_ways["tflops_fwd"]) * float(both_ways["fwd_ms"]) == pytest.approx(flops / 1e9, rel=0.02)


@pytest.mark.nightly("benchmarks")
def test_gate_lets_nobody_wrong_be_timed(rows: list[dict[str, str]]) -> None:
    for row in rows:
        if row["contestant"].startswith("stranger/"):
            assert not row["fwd_ms"] and not row["fwdbwd_ms"], row
    status = {row["contestant"]: row for row in rows if row["mask"] == "full"}
    wrong, careless = status["stranger/Wrong"], status["stranger/Careless"]
    assert wrong["status"].startswith("failed the gate: dv 1.0e-01 > 2.0e-02")
    assert float(wrong["err_dv"]) == pytest.approx(0.1, rel=0.05) and float(wrong["err_dk"]) < 1e-2
    assert careless["status"].startswith("failed the gate: out 1.0e-02 >"), "a rival's allowance for our own"
    assert status["stranger/Failing"]["status"] == "error: ValueError: on purpose", "rank 1 alone raised"
    assert float(status[OURS]["err_dk"]) < 1e-2


@pytest.mark.nightly("benchmarks")
def test_those_who_cannot_run_say_why(rows: list[dict[str, str]]) -> None:
    for row in rows:
        assert row["status"], row
        if not row["fwd_ms"]:
            assert row["status"].startswith(("not run: ", "unsupported: ", "failed the gate: ", "error: ")), row


@pytest.mark.nightly("benchmarks")
def test_pictures_come_from_the_table(rows: list[dict[str, str]], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    table = tmp_path / "table.csv"
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, report.COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    pictures = plot.main([str(table), "--out", str(tmp_path)])
    names = [f"attention_{mask}_eager_2xcpu.svg" for mask in ("causal", "documents", "full")]
    assert [path.name for path in pictures] == names
    text = pictures[0].read_text()
    assert "</svg>" in text
    plot.main([str(table), "--out", str(tmp_path)])
    assert pictures[0].read_text() == text


def test_the_grid_of_magi_attention() -> None:
    """Its shapes, and lengths in the middle of its bins, at most a quarter of the sequence; the last one is cut."""
    grid = benchmark.parse_arguments(["--grid", "magi", "--device", "cuda", "--local-len", "16384"])
    assert (grid.heads, grid.head_dim, grid.dtype, grid.local_len) == (["64/8"], 128, "bfloat16", [16384])
    assert grid.mask == ["full", "causal", "varlen_full", "varlen_causal"]
    assert benchmark.parse_arguments(["--grid", "magi"]).local_len == [8192]
    lengths = field.magi_lengths(65536)
    assert sum(lengths) == 65536 and lengths == field.magi_lengths(65536) != field.magi_lengths(65536, 1)
    middles = {5, 30, 75, 150, 350, 762, 1536, 3072, 6144, 12288}
    assert {*lengths[:-1]} <= middles | {8192, 16384}
    many = field.magi_lengths(2**24)
    counts = [count for _, count in field.MAGI_LENGTHS]
    assert many.count(350) / len(many) == pytest.approx(counts[4] / sum(counts), rel=0.05)


@pytest.mark.parametrize("mask", ["varlen_full", "varlen_causal"])
def test_packed_documents_of_a_raw_kernel(mask: str) -> None:
    """All rows; and those of a rank that begins within a document, whose keys begin before, as llama3 calls it."""
    S, causal = 48, mask == "varlen_causal"
    case = field.Case(4, 2, 8, torch.float32, causal, S, 1, 0, torch.device("cpu"), mask)
    x = benchmark.random_inputs(case, S, seed=0)
    forward, backward = raw_kernels.RAW_KERNELS["cpu_flash"].packed
    whole = case.cuts[0]
    begin, begin_of_keys = int(whole[2]) - 3, int(whole[1])
    assert whole.numel() > 4 and begin_of_keys < begin
    part = torch.cat([whole[:1], whole[2:] - begin]), whole[1:] - begin_of_keys, S, S
    for row, key, cuts in ((0, 0, case.cuts), (begin, begin_of_keys, part)):
        dout = torch.zeros_like(x.dout)
        dout[:, row:] = x.dout[:, row:]
        out, dq, dk, dv = benchmark.dense_attention(field.Inputs(x.q, x.k, x.v, dout), case.mask, case.scale)
        q, k, v = x.q[:, row:], x.k[:, key:], x.v[:, key:]
        got, lse = forward(q, k, v, causal, case.scale, cuts)
        found = backward(x.dout[:, row:], q, k, v, got, lse, causal, case.scale, cuts=cuts)
        torch.testing.assert_close((got, *found), (out[:, row:], dq[:, row:], dk[:, key:], dv[:, key:]))


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
def test_floor_has_the_pairs_of_a_zigzag_rank(cp_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    L, pairs = 8, [0]

    def forward(q, k, v, causal, scale):
        pairs[0] += q.shape[1] * k.shape[1] // (2 if causal else 1)
        return torch.zeros_like(q), torch.zeros(1, q.shape[2], q.shape[1])

    monkeypatch.setitem(raw_kernels.RAW_KERNELS, "counted", raw_kernels.RawKernel("counted", forward, forward, True))
    x = torch.zeros(1, L, 1, 4)
    for causal in (True, False):
        for rank in range(cp_size):
            case = field.Case(1, 1, 4, torch.float32, causal, L, cp_size, rank, torch.device("cpu"))
            run = field.Floor("counted").setup(case, field.Inputs(x, x, x, x))
            pairs[0] = 0
            run.forward()
            assert pairs[0] == L * L * cp_size // (2 if causal else 1), (causal, rank)


def test_planning_counts_what_it_plans(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--seq-len", "4096", "--ranks", "4", "--document-ranks", "4", "--shortest", "20", "--longest", "200"]
    planning.main([*sizes, "--repeats", "1"])
    names, *rows = (line.split(",") for line in capsys.readouterr().out.splitlines())
    found = {(row[2], row[4]): dict(zip(names, row, strict=True)) for row in rows}
    assert float(found["causal", "zigzag"]["fetched_shards"]) == 3.0 and found["causal", "zigzag"]["calls"] == "4"
    assert found["full", "striped"]["calls"] == "3" and float(found["causal", "contiguous"]["fetched_shards"]) == 3.0
    packed = {name: row for (mask, name), row in found.items() if mask == "documents"}
    assert list(packed) == ["contiguous", "zigzag", "striped", "balanced"]
    assert int(packed["balanced"]["documents"]) > 20 and 0 < float(packed["balanced"]["fetched_shards"]) < 1
    assert float(packed["balanced"]["balance_ms"]) > 0 and float(packed["zigzag"]["balance_ms"]) == 0


def test_registration_times_every_way(tmp_path: Path) -> None:
    """In a process of its own: it registers ops and begins a process group."""
    path = tmp_path / "registration.csv"
    done = run_script(BENCHMARKS / "registration.py", ["--repeats", "1", "--calls", "1", "--csv", path])
    assert done.returncode == 0, done.printed
    with path.open() as file:
        rows = [(row["way"], row["pass"], float(row["us"]) > 0) for row in csv.DictReader(file)]
    ways = "own", "register_autograd", "custom_op", "function", "DTensors", "DTensor's own"
    passes = "no_grad", "forward", "both"
    assert rows == [(way, which, True) for which in passes for way in ways]


def test_layers_are_timed(tmp_path: Path) -> None:
    path = tmp_path / "layers.csv"
    given = [
        "--device",
        "cpu",
        "--kernel",
        "reference",
        "--rows",
        "16",
        "--layers",
        "2",
        "--steps",
        "1",
        "--head-dim",
        "8",
    ]
    done = run_script(BENCHMARKS / "layers.py", [*given, "--csv", path], num_ranks=2)
    assert done.returncode == 0, done.printed
    with path.open() as file:
        rows = [(row["mask"], row["way"], float(row["all_us"]) > 0) for row in csv.DictReader(file)]
    assert rows == [(mask, way, True) for mask in ("dense", "packed") for way in ("cp_mesh", "computed")]


@pytest.mark.nightly("benchmarks")
def test_the_import_is_timed() -> None:
    done = run_script(BENCHMARKS / "importing.py", ["--repeats", "1"])
    assert done.returncode == 0, done.printed
    assert all(word in done.printed for word in ("cp_mesh itself", "torch.distributed.tensor", "longest chain"))


def test_the_guard_is_timed_beside_none(tmp_path: Path) -> None:
    path = tmp_path / "guard.csv"
    done = run_script(BENCHMARKS / "guard.py", ["--repeats", "1", "--calls", "2", "--csv", path], num_ranks=2)
    assert done.returncode == 0, done.printed
    with path.open() as file:
        rows = [(row["what"], row["guard"], float(row["us"]) > 0) for row in csv.DictReader(file)]
    assert rows == [
        (what, guard, True) for what in ("attention", "step", "look-ups") for guard in ("on", "off", "without")
    ]


def test_the_probe_is_timed_beside_a_step(tmp_path: Path) -> None:
    path = tmp_path / "probe.csv"
    sizes = ["--shape", "example", "--layers", "1", "--seq-len", "64", "--repeats", "1", "--device", "cpu"]
    done = run_script(BENCHMARKS / "probe.py", [*sizes, "--csv", path], num_ranks=2)
    assert done.returncode == 0, done.printed
    with path.open() as file:
        (row,) = csv.DictReader(file)
    assert all(float(row[name]) > 0 for name in ("probe_s", "step_s", "later_probe_s"))


@pytest.mark.parametrize("causal", [True, False])
def test_bottom_right_tiles_equal_the_end_of_a_square(causal: bool) -> None:
    """llama3 shards queries only; a kernel that aligns top-left is given two tiles."""
    torch.manual_seed(0)
    S, rows, case = 24, slice(16, 24), field.Case(4, 2, 8, torch.float32, causal, 24, 1, 0, torch.device("cpu"))
    x = benchmark.random_inputs(case, S, seed=0)
    dout = torch.zeros_like(x.dout)
    dout[:, rows] = x.dout[:, rows]
    out, *gradients = benchmark.dense_attention(field.Inputs(x.q, x.k, x.v, dout), case.mask, case.scale)
    kernel = raw_kernels.bottom_right(raw_kernels.RAW_KERNELS["cpu_flash"])
    q = x.q[:, rows]
    got, lse = kernel.forward(q, x.k, x.v, causal, case.scale)
    into = tuple(torch.empty_like(y) for y in (q, x.k, x.v))
    kernel.backward(x.dout[:, rows], q, x.k, x.v, got, lse, causal, case.scale, into)
    torch.testing.assert_close(got, out[:, rows].float())
    for gradient, expected in zip(into, (gradients[0][:, rows], *gradients[1:]), strict=True):
        torch.testing.assert_close(gradient, expected.float())


@pytest.mark.parametrize("causal", [True, False])
def test_reference_of_the_gate(causal: bool) -> None:
    """Against autograd over SDPA."""
    case = field.Case(4, 2, 8, torch.float64, causal, 12, 1, 0, torch.device("cpu"))
    x = benchmark.random_inputs(case, 12, seed=0)
    q, k, v = (y.transpose(1, 2).requires_grad_() for y in (x.q, x.k, x.v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    expected = [out, *torch.autograd.grad(out, (q, k, v), x.dout.transpose(1, 2))]
    for got, y in zip(benchmark.dense_attention(x, case.mask, case.scale), expected, strict=True):
        torch.testing.assert_close(got, y.detach().transpose(1, 2))


def rescaled(kernel: Kernel, name: str) -> Kernel:
    """One whose forward computes something else."""

    def begin_forward(q: torch.Tensor, v_head_dim: int, scores: Any) -> Any:
        return kernel.begin_forward(q, v_head_dim, replace(scores, scale=2 * scores.scale))

    return replace(kernel, name=name, begin_forward=begin_forward)


def judged(rank: int, wrong: bool) -> tuple[str | None, float]:
    """What the gate says of a floor, and its largest error: a kernel on one device, with which ours is compared."""
    ranks = SimpleNamespace(alone=mesh((1,), ("cp",)), attempt=lambda call: (call(), None))
    case = field.Case(4, 2, 8, torch.float32, True, 16, 1, 0, torch.device("cpu"))
    floor = SimpleNamespace(unsupported=lambda case: None, kernel="reference", is_ours=False, distributed=False)
    kernel = rescaled(KERNELS["reference"], "reference") if wrong else KERNELS["reference"]
    forget_plans()
    with mock.patch.dict(KERNELS, {"reference": kernel}):
        verdict = benchmark.Gate(ranks, case).try_out(floor)
    forget_plans()
    return verdict.problem, max(verdict.errors)


def test_the_gate_bounds_what_one_device_computes(pool: Any) -> None:
    ((problem, error),) = pool(1).run(judged, False)
    assert problem is None and error < 1e-6
    ((problem, error),) = pool(1).run(judged, True)
    assert problem is not None and problem.startswith("failed the gate: out ") and error > 0.1


def tile_rows(path: Path, options: str) -> dict[tuple[str, str, str, str], dict[str, str]]:
    """Rows of a run on the CPU by tile, length, kernel and determinism."""
    command = f"--device cpu --heads 4/2 --head-dim 16 --repeats 3 --csv {path} {options}"
    tiles.main(shlex.split(command))
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == tiles.COLUMNS
    return {(row["tile"], row["rows"], row["kernel"], row["deterministic"]): row for row in rows}


@pytest.mark.nightly("benchmarks")
def test_tiles_are_timed_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two more kernels, that the tiles of documents come in both kinds."""
    general = replace(KERNELS["reference"], name="general")
    covers = tuple(cover for cover in general.capability.covers if cover != "segments")
    positional = replace(general, name="positional", capability=replace(general.capability, covers=covers))
    for kernel in (general, positional):
        monkeypatch.setitem(KERNELS, kernel.name, kernel)
    names = ("cpu_flash", "general", "positional")
    rows = tile_rows(tmp_path / "new" / "tiles.csv", f"--local-len 32 64 --window-len 128 --kernels {' '.join(names)}")
    lengths = {name: ("128",) if name == "window" else ("32", "64") for name in tiles.TILES}
    assert set(rows) == {(t, n, k, d) for t in tiles.TILES for n in lengths[t] for k in names for d in "01"}
    for (tile, length, kernel, deterministic), row in rows.items():
        if kernel == "cpu_flash" and tile in ("documents", "window"):
            assert row["status"].startswith("unsupported: ") and not row["fwd_ms"], row
            continue
        assert row["status"] == "ok" and int(row["repeats"]) == 3, row
        assert bool(row["delta_ms"]) == KERNELS[kernel].uses_delta
        others = [rows[tile, length, name, "0"] for name in names if name != kernel]
        full = rows["full", "64" if tile == "window" else length, kernel, deterministic]
        expected = {}
        for name, factor in (("fwd", 4), ("bwd", 10)):
            ms = float(row[f"{name}_ms"])
            assert 0 < float(row[f"{name}_ms_min"]) <= ms <= float(row[f"{name}_ms_max"])
            expected[f"tflops_{name}"] = factor * 4 * 16 * int(row["pairs"]) / ms / 1e9
            best = min(float(x[f"{name}_ms"]) for x in others if x["fwd_ms"])
            expected[f"ratio_best_{name}"] = best / ms
            assert float(rows[tile, length, row[f"best_{name}"], "0"][f"{name}_ms"]) == best
            if tile != "full":
                expected[f"ratio_area_{name}"] = float(row[f"tflops_{name}"]) / float(full[f"tflops_{name}"])
        if deterministic == "1":
            expected["ratio_default_bwd"] = float(rows[tile, length, kernel, "0"]["bwd_ms"]) / float(row["bwd_ms"])
        got = {name: float(x) for name, x in row.items() if name.startswith(("tflops", "ratio")) and x}
        assert got == pytest.approx(expected, rel=0.01, abs=1e-4), row


def test_tiles_that_are_wrong_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flash = KERNELS["cpu_flash"]
    sometimes = replace(flash, name="sometimes", reproducible=rescaled(flash, "sometimes"))
    for kernel in (rescaled(flash, "wrong"), sometimes):
        monkeypatch.setitem(KERNELS, kernel.name, kernel)
    options = "--local-len 32 --tiles causal strict --kernels cpu_flash wrong sometimes reference triton"
    rows = tile_rows(tmp_path / "tiles.csv", options)
    for (_, _, kernel, deterministic), row in rows.items():
        if kernel == "wrong" or (kernel, deterministic) == ("sometimes", "1"):
            assert row["status"].startswith("failed the gate: out ") and "dv" in row["status"], row
        elif kernel in ("cpu_flash", "sometimes"):
            assert row["status"] == "ok" and float(row["bwd_ms"]) > 0, row
            continue
        else:
            assert row["status"].startswith({"reference": "not run: ", "triton": "unsupported: "}[kernel]), row
        assert not row["fwd_ms"] and not row["bwd_ms"] and not row["ratio_best_fwd"], row


def test_no_tile_is_begun_after_the_time_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiles.main(shlex.split(f"--device cpu --local-len 32 --time-limit 0 --csv {tmp_path / 'tiles.csv'}"))
    assert "time limit: full 32 32/8" in capsys.readouterr().out and not (tmp_path / "tiles.csv").exists()


@pytest.mark.parametrize("name", tiles.TILES)
def test_tiles_have_the_pairs_they_say(name: str) -> None:
    """The reference kernel, on which the gate builds, against a dense softmax."""
    L = 64
    i, j = torch.arange(L)[:, None], torch.arange(L)
    document = planning.document_ids(field.document_lengths(L))[0]
    allowed = {
        "full": torch.ones(L, L, dtype=torch.bool),
        "causal": j <= i,
        "strict": j < i,
        "half": torch.ones(L, L // 2, dtype=torch.bool),
        "documents": (j <= i) & (document[:, None] == document),
        "window": (j <= i) & (i - j < 16),
    }[name]
    tile = tiles.make_tile(name, L)
    assert tile.num_pairs == int(allowed.sum()) and (tile.rows, tile.keys) == allowed.shape
    case = field.Case(4, 2, 8, torch.float64, False, L, 1, 0, torch.device("cpu"))
    x = benchmark.random_inputs(case, L, seed=0)
    out, dq, dk, dv = tiles.Passes("reference", False, tile, case.scale, x).results()
    q, k, v = (y.transpose(1, 2).clone().requires_grad_() for y in (x.q, x.k[:, : tile.keys], x.v[:, : tile.keys]))
    scores = q @ k.repeat_interleave(2, dim=1).mT * case.scale
    weights = scores.masked_fill(~allowed, -1e30).softmax(-1) * allowed.any(1, keepdim=True)
    expected = weights @ v.repeat_interleave(2, dim=1)
    gradients = torch.autograd.grad(expected, (q, k, v), x.dout.transpose(1, 2))
    for got, y in zip((out, dq, dk, dv), (expected, *gradients), strict=True):
        torch.testing.assert_close(got, y.detach())


# One rank of many on the CPU, where a group has no symmetric memory; and a contestant that counts the first keys twice.
PLAYED = f"""
import sys
sys.path[:0] = [{str(BENCHMARKS)!r}, {str(ROOT / "tests")!r}]
import inside, played
inside.room("exchange").unavailable = lambda *group: None
class Twice(played.Played):
    def setup(self, case, inputs):
        k = inputs.k.clone()
        k[:, :2] *= 1.1
        return super().setup(case, played.Inputs(inputs.q, k, inputs.v, inputs.dout))
if "--wrong" in sys.argv:
    sys.argv.remove("--wrong")
    played.Played = Twice
played.main()
"""


@pytest.mark.nightly("benchmarks")
@pytest.mark.parametrize(
    ("options", "status"),
    [("--rank 0 --heads 4/2", "ok"), ("--rank 5 --heads 4/4 --head-chunks 2", "ok"), ("--rank 5 --wrong", "failed")],
)
def test_a_rank_is_played(options: str, status: str, tmp_path: Path) -> None:
    """Its results are those of the attention that it says it computes, and another's are found."""
    script, table = tmp_path / "play.py", tmp_path / "played.csv"
    script.write_text(PLAYED)
    command = f"--device cpu --kernel cpu_flash --local-len 16 --gate-len 16 --head-dim 16 {options} --repeats 2"
    more = [] if "--heads" in options else ["--heads", "4/2"]
    done = run_script(script, [*shlex.split(command), *more, "--seconds-per-case", "0.01", "--csv", table])
    assert done.returncode == 0, done.printed
    with table.open(newline="") as file:
        of = {row["contestant"]: row for row in csv.DictReader(file) if row["mode"] == "eager"}
    (row,) = (row for name, row in of.items() if name.startswith("played/"))
    assert row["status"].startswith(status) and row["seq_len"] == "128", row
    assert bool(row["fwdbwd_ms"]) == (status == "ok") and of["floor/cpu_flash"]["fwdbwd_ms"]


TIMED = """
from dataclasses import replace
rates = {"reference": inside.H200.kernels["fa4"]}
played.MACHINES["cpu"] = replace(inside.H200, name="cpu", compute_capability=(0, 0), kernels=rates)
played.main()
"""


@pytest.mark.nightly("benchmarks")
@pytest.mark.parametrize("wrong", [False, True])
def test_every_method_is_played(wrong: bool, tmp_path: Path) -> None:
    """Each by its own gate, with the time that wires would add; "auto" is what `explain` says that it takes."""
    script, table = tmp_path / "play.py", tmp_path / "played.csv"
    script.write_text(PLAYED.replace("played.main()", TIMED))
    command = "--device cpu --kernel reference --no-floor --no-queued --local-len 16 --gate-len 16 --head-dim 16"
    command += " --rank 5 --heads 16/8 --layouts zigzag balanced --methods ring all_gather ulysses hybrid2 hybrid4 auto"
    command += " --mask causal documents --repeats 1 --min-repeats 1 --seconds-per-case 0.01"
    more = ["--mask", "causal", "--wrong"] if wrong else []
    done = run_script(script, [*shlex.split(command), "--csv", table, *more])
    assert done.returncode == 0, done.printed
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == (6 if wrong else 12)
    if wrong:
        assert all(row["status"].startswith("failed the gate") for row in rows), rows
        return
    sizes: dict[str, Any] = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 16, "dtype": torch.bfloat16}
    choice = explain(128, 8, **sizes).choice
    assert choice is not None
    for row in rows:
        _, method, layout, _ = row["contestant"].split("/")
        assert row["status"] == "ok" and (layout == "balanced") == (row["mask"] == "documents"), row
        assert 0 < float(row["wire_ms"]) < float(row["predicted_ms"]), row
        if row["mask"] == "causal":
            assert row["taken"] == (choice.method if method == "auto" else method), row


def batch(mask: str, seed: int, seq_len: int = 96) -> batches.Batch:
    args = batches.parse_arguments(["--device", "cpu", "--seq-len", "96", "--median", "10", "--window", "6"])
    ranks = SimpleNamespace(size=2, rank=0, device=torch.device("cpu"))
    return batches.make_batch(args, ranks, "4/2", mask, seed, seq_len)


@pytest.mark.parametrize("mask", ["documents", "window", "causal"])
def test_batches_differ(mask: str) -> None:
    made = [batch(mask, seed) for seed in range(8)]
    assert len({x.lengths for x in made}) > 5 and made[0].lengths == batch(mask, 0).lengths
    for x in made:
        seen = x.mask.allowed(torch.arange(x.seq_len), torch.arange(x.seq_len))
        assert x.num_pairs == int(seen.sum()) and sum(x.lengths) == x.seq_len == 2 * x.local_len
        assert x.mask is x.mask and x.mask is not batch(mask, 0).mask, "a batch that is new has a mask to plan for"
        assert (mask == "causal" and 48 <= x.seq_len <= 96 and x.seq_len % 4 == 0) or x.seq_len == 96
    short = batch(mask, 0, seq_len=48)  # as the gate has it
    assert short.seq_len <= 48 and (mask != "window" or short.window == (2, 0))


def test_a_summary_of_steps() -> None:
    """Nothing counts before step 5 but the first steps' seconds; a batch with more work is no stall."""
    seconds = [9.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 8.0, 2.0, 6.0, 2.0]
    again = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 4.0, 1.0, 1.0, 1.0]
    counts = [[2] * 5 + [4] * 6, [1] * 8 + [3] * 3, [0] * 9 + [2] * 2]
    ahead = torch.tensor([[2.0, 3.0], [1.0, 3.0]])
    steps = torch.tensor([seconds, again, *counts], dtype=torch.float64)
    found = batches.summarize(steps, [50] * 5 + [11] * 6, ahead, 100)
    expected = {
        "first_s": 9, "first5_s": 13, "median_s": 2, "worst_s": 8, "worst_over_median": 4, "above_median": 2,
        "worst_stall": 3, "stalls": 1, "tokens_per_s": 3, "tokens_per_s_again": round(66 / 9), "rate_ratio": 9 / 22,
        "ahead_tokens_per_s": 20, "ahead_ratio": 0.8, "triton": 4, "fa4": 3, "late": 2,
    }  # fmt: skip
    assert {name: float(value) for name, value in found.items()} == pytest.approx(expected, abs=1e-4)


def test_variants_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    kernel = triton.runtime.jit.JITFunction(test_variants_are_counted)  # under the interpreter jit makes others
    kernel.device_caches[0] = ({"a variant": None, "another": None}, {}, None, None, None)
    before = batches.triton_variants(), batches.fa4_variants()
    for name in ("cp_mesh.kernels.one", "cp_mesh.kernels.two", "elsewhere"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(imported=kernel))
    functions = [lambda: None for _ in range(3)]
    functions[0].compile_cache = SimpleNamespace(cache={"key": None})  # type: ignore[attr-defined]
    functions[1].compile_cache = {"key": None, "other": None}  # type: ignore[attr-defined]
    interface = SimpleNamespace(_forward=functions[0], _backward=functions[1], _other=functions[2])
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    assert batches.triton_variants() == before[0] + 2, "a kernel is counted once, wherever it is imported"
    assert before[1] == {} and batches.fa4_variants() == {"forward": 1, "backward": 2}


def test_the_gate_judges_one_device_by_the_rows_it_judges() -> None:
    """A played rank's own rows: others have no queries, and smaller errors."""
    gate = benchmark.Gate.__new__(benchmark.Gate)
    gate._exact, gate._judged = [torch.ones(1, 3, 1, 1)], torch.tensor([1, 2])
    wrong = torch.tensor([9.0, 1.0, 3.0]).view(1, 3, 1, 1)
    assert gate._squares_of_one_device([wrong]) == [[4.0, 2.0]]


# As `PLAYED`, for this benchmark.
BATCHES = PLAYED.replace("import inside, played", "import inside, played, batches").replace(
    "played.Played = Twice\nplayed.main()", "batches.Played = Twice\nbatches.main()"
)


@pytest.mark.nightly("benchmarks")
@pytest.mark.parametrize(
    ("num_ranks", "options", "status"),
    [
        (2, "--layouts balanced zigzag", "ok"),
        (None, "--played all/3 --mask window causal --layouts balanced", "ok"),
        (2, "--layouts zigzag --time-limit 0", "ok"),
        (None, "--played 1/3 --layouts contiguous --wrong", "failed the gate"),
    ],
)
def test_steps_of_batches(num_ranks: int | None, options: str, status: str, tmp_path: Path) -> None:
    script, table, steps = (tmp_path / name for name in ("play.py", "batches.csv", "steps.csv"))
    script.write_text(BATCHES)
    script = BENCHMARKS / "batches.py" if num_ranks else script
    sizes = (
        "--device cpu --heads 4/2 --head-dim 16 --seq-len 96 --median 10 --window 6 --layers 1 --batches 7 --blocks 1"
    )
    command = f"{sizes} {options} --gate-len 16 --csv {table} --steps-csv {steps}"
    done = run_script(script, shlex.split(command), num_ranks)
    assert table.exists(), done.printed
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == batches.COLUMNS and (done.returncode == 0) == (status == "ok"), done.printed
    assert f"| {rows[0]['layout']} | 4/2 | {rows[0]['mask']} | " in done.printed
    assert all(row["status"].startswith(status) and bool(row["median_s"]) == (status == "ok") for row in rows), rows
    if status != "ok":
        assert not steps.exists()
        return
    with steps.open(newline="") as file:
        taken = list(csv.DictReader(file))
    assert tuple(taken[0]) == batches.STEP_COLUMNS
    num_steps = 6 if "--time-limit" in options else 7
    for row in rows:
        of_row = [x for x in taken if (x["layout"], x["mask"]) == (row["layout"], row["mask"])]
        assert int(row["batches"]) == num_steps
        assert [int(x["step"]) for x in of_row] == list(range(num_steps)) and len({x["pairs"] for x in of_row}) > 2
        last = [(float(x["seconds"]), float(x["again_s"]), int(x["tokens"])) for x in of_row[5:]]
        rate = sum(x[2] for x in last) / sum(x[0] for x in last)
        assert float(row["tokens_per_s"]) == pytest.approx(rate, rel=0.01)
        assert float(row["worst_s"]) == pytest.approx(max(x[0] for x in last), rel=0.01)
        assert float(row["first_s"]) == pytest.approx(float(of_row[0]["seconds"]), abs=1e-3)
        assert float(row["ahead_tokens_per_s"]) > 0 and float(row["ahead_ratio"]) > 0
        pairs = sum(int(x["pairs"]) for x in of_row[5:])  # 3.5 forwards of 4·H·D each, on 2 ranks, or 3 that are played
        flops = 3.5 * 4 * 4 * 16 * pairs / (2 if num_ranks else 3)
        assert float(row["tflops"]) == pytest.approx(flops / sum(x[0] for x in last) / 1e12, rel=0.01)
        assert float(row["ahead_tflops"]) > 0


def test_layouts_take_turns_on_batches_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch twice, nobody's mask seen before; what is compiled late is counted of each layout in its own steps."""
    args = batches.parse_arguments(shlex.split("--device cpu --heads 4/2 --head-dim 8 --seq-len 16 --batches 8"))
    ranks = SimpleNamespace(size=2, rank=0, device=torch.device("cpu"), largest=torch.tensor)
    triton, fa4 = iter([1, 3, *[3] * 8, *[4] * 4, 5, 5]), iter([0] * 8 + [2] * 8)
    monkeypatch.setattr(batches, "triton_variants", lambda: next(triton))
    monkeypatch.setattr(batches, "fa4_variants", lambda: {"forward": next(fa4)})
    taken: list[tuple[str, batches.Batch]] = []
    monkeypatch.setattr(batches, "step", lambda ranks, who, batch, *_: taken.append((who.name, batch)))
    monkeypatch.setattr(batches, "seconds_of", lambda ranks, steps: [each() for each in steps] and 1.0)
    contestants: Any = [SimpleNamespace(name=name) for name in ("one", "other")]
    found = batches.race(ranks, args, "4/2", "documents", contestants)  # type: ignore[arg-type]
    assert found["one"].tolist()[batches.TRITON :] == [
        [1, 3, 3, 3, 3, 4, 4, 5],
        [0, 0, 0, 0, 2, 2, 2, 2],
        [0, 0, 0, 0, 0, 1, 1, 2],
    ]
    assert found["other"].tolist()[batches.LATE] == [0] * 5 + [1, 1, 2]
    assert [name for name, _ in taken] == ["one", "one", "other", "other"] * 8
    assert taken[::2] == taken[1::2] and len({id(batch) for _, batch in taken}) == 16
    assert all(a.lengths == b.lengths for (_, a), (_, b) in zip(taken[::4], taken[2::4], strict=True))
    block = batches.BLOCK
    assert [*batches.seeds_ahead(args)] == [range(8, 8 + block), range(8 + block, 8 + 2 * block)]
    taken.clear()
    assert batches.race_ahead(ranks, args, "4/2", "documents", contestants[:1])["one"].tolist() == [[1, 1]] * 2  # type: ignore[arg-type]
    assert taken[:block] == taken[block : 2 * block] and taken[2 * block : 3 * block] == taken[3 * block :]
    assert len({id(x) for _, x in taken}) == 2 * block
