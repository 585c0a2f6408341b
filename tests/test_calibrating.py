"""`examples/benchmarks/calibrate.py`: its fit, and a run end to end on CPU ranks, whose table explain reads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from inside import H200, KERNELS, read_machine
from ranks import mesh

from cp_mesh import ArgumentError, explain

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "examples" / "benchmarks"))

import calibrate as calibrating  # noqa: E402
from calibrate import Calibration, Shapes, calibrate, fit, table  # noqa: E402

SCRIPT = ROOT / "examples" / "benchmarks" / "calibrate.py"
TINY = Shapes((16, 32, 64), 4, 2, 8, torch.float32, calls=1)


def test_fit_finds_what_the_times_are_made_of() -> None:
    columns = [[1e12 * n, 100.0 * n**0.5, 1.0] for n in (0.5, 1, 2, 4, 8)]
    real = np.array([1 / 600e12, 1e-9, 5e-6])
    assert fit(columns, (np.array(columns) @ real).tolist(), (1e-15, 1e-10, 1e-6)) == pytest.approx(real)


def test_fit_keeps_proportions_and_signs() -> None:
    """What always comes together is told by the proportions of the scale; nothing takes less than no time."""
    assert fit([[1, 1], [2, 2]], [6.0, 12.0], (1.0, 2.0)) == pytest.approx([2 * 0.6 * 1, 2 * 1.2 * 2])
    assert fit([[1, 1], [1, 2], [1, 3]], [3.0, 2.0, 1.5], (1.0, 1.0))[1] == 0.0


def test_one_device_measures_its_kernels() -> None:
    found = calibrate(TINY, torch.device("cpu"), ["cpu_flash"])
    assert found.measured == {"memory_rate", "per_launch"} and list(found.machine.kernels) == ["cpu_flash"]
    for rate in found.machine.kernels["cpu_flash"]:
        assert rate.rate > 0 and sum((rate.per_row, rate.per_cut_row, rate.per_call)) >= 0
    assert found.machine.link_rate == H200.link_rate and found.machine.name == "cpu" and not found.machine.on_gpu
    lines = table(found).splitlines()
    assert max(map(len, lines)) < 100 and any(re.match("link rate, GB/s +- +280", line) for line in lines)
    with pytest.raises(ArgumentError, match=r"kernels: expected some of .*cpu_flash.*got fa4"):
        calibrate(TINY, torch.device("cpu"), ["fa4"])


def test_times_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of which every call takes a second longer is fitted as such: the clock's seconds are what is fitted."""
    real = calibrating._Clock.seconds
    monkeypatch.setattr(calibrating._Clock, "seconds", lambda *given: 1.0 + real(*given))
    machine = calibrate(TINY, torch.device("cpu"), ["cpu_flash"]).machine
    forward, backward = machine.kernels["cpu_flash"]
    assert forward.per_call == pytest.approx(1.0, rel=0.2) == pytest.approx(backward.per_call, rel=0.2)
    assert machine.per_launch == pytest.approx(1.0, rel=0.2)


def test_a_clock_counts_seconds() -> None:
    clock = calibrating._Clock(torch.device("cpu"), None)
    for seconds in (clock.seconds, clock.host_seconds):
        assert 0.02 <= seconds(lambda: time.sleep(0.02), 2) < 0.5


def slow_second_rank(rank: int) -> list[float]:
    clock = calibrating._Clock(torch.device("cpu"), mesh((2,), ("cp",)).get_group())
    return [seconds(lambda: time.sleep(0.05 * rank), 1) for seconds in (clock.seconds, clock.host_seconds)]


def test_the_slowest_rank_counts(pool: Any) -> None:
    first, second = pool(2).run(slow_second_rank)
    assert first == second and all(0.05 <= seconds < 0.5 for seconds in first)


def test_columns_are_bytes_and_flops() -> None:
    """By hand: a copy reads and writes; a full tile of n queries takes 4 heads dim n² FLOPs, and 2.5 times as many."""
    clock = calibrating._Clock(torch.device("cpu"), None)
    fitted: list[list[list[float]]] = []

    def note(columns: list[list[float]], seconds: list[float], scale: list[float]) -> list[float]:
        fitted.append(columns)
        return list(scale)

    with (
        mock.patch.object(calibrating._Clock, "seconds", return_value=1.0),
        mock.patch.object(calibrating, "fit", note),
    ):
        copies, _ = calibrating._copies(clock, TINY)
        calibrating._rates(clock, TINY, KERNELS["cpu_flash"])
    assert copies == [[2 * rows * 4 * 8 * 4, 1.0] for rows in TINY.rows]
    for forwards, columns in zip((1.0, 2.5), fitted, strict=True):
        for number, rows in enumerate(TINY.rows):
            full, half, causal = columns[3 * number : 3 * number + 3]
            assert full == [forwards * 4 * 4 * 8 * rows**2, 4 * rows, 0, 0, 1]
            assert half == [full[0] / 2, *full[1:]]
            assert causal == [full[0] * (rows + 1) / (2 * rows), 4 * rows, 4 * rows, 0, 1]


def test_the_table_has_every_number() -> None:
    text = table(Calibration(H200, frozenset({*calibrating.FITTED, "host"})))
    assert "fa4 backward: per row, ns" in text and "host backward: per exchange, us" in text and " - " not in text[60:]
    for line in text.splitlines()[2:]:
        assert line.split()[-1] == line.split()[-2], line  # fitted and shipped
    other = table(Calibration(replace(H200, link_rate=1e9), frozenset(calibrating.FITTED)))
    assert re.search("link rate, GB/s +1 +280", other)


@pytest.mark.full
def test_the_command_on_two_ranks(tmp_path: Path) -> None:
    """It prints its table and writes a file of which explain says times."""
    out = tmp_path / "machine.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(SCRIPT)]
    command += ["--device", "cpu", "--dtype", "float32", "--heads", "4/2", "--head-dim", "8", "--calls", "1"]
    command += ["--rows", "16", "32", "64", "--kernel", "cpu_flash", "reference", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines[:-1])) < 100 and "cpu, functional" in lines[0] and str(out) in lines[-1]
    assert lines[-1].startswith("MEASURED: cpu, written to ")
    machine = read_machine(out)
    assert list(machine.kernels) == ["cpu_flash", "reference"] and machine.transport == "functional"
    assert machine.gpus_per_host == 2 and machine.host_forward != H200.host_forward
    assert "-" not in {line.split()[-2] for line in lines[2:-1]}  # all was measured
    found = explain(64, 2, machine=str(out), num_heads=4, num_kv_heads=2, head_dim=8)
    assert "predicted, cpu" in str(found) and all(x.seconds for x in (found.found, *found.others))
