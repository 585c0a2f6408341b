"""The runs for four and eight GPUs: commands that their scripts take, in time, whose rows the tables read."""

from __future__ import annotations

import csv
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu
import pytest
import torch
from ranks import mesh
from scripts import run_script

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples" / "benchmarks"), str(ROOT / "examples")]

import attention  # noqa: E402
import batches  # noqa: E402
import contestants as field  # noqa: E402
import linears  # noqa: E402
import long_llama  # noqa: E402
import many_gpus  # noqa: E402
import played  # noqa: E402
import predicted  # noqa: E402
import tables  # noqa: E402
import training  # noqa: E402
import verify_llama  # noqa: E402

SCRIPTS = (attention, batches, linears, long_llama, played, training)
PARSERS: dict[str, Any] = {x.__name__: x.parse_arguments for x in SCRIPTS}
RUNS = many_gpus.RUNS


def options(words: Sequence[str]) -> list[str]:
    """Of a command, what its script is given."""
    return [*words[next(i for i, word in enumerate(words) if word.endswith(".py")) + 1 :]]


@pytest.mark.parametrize("gpus", [4, 8])
@pytest.mark.parametrize("name", RUNS)
def test_scripts_take_their_options(name: str, gpus: int) -> None:
    run = RUNS[name]
    for device in ("cuda", "cpu"):
        if device == "cpu" and run.tiny is None:
            continue
        words = many_gpus.command(name, gpus, device, Path("out"), "0123456")
        assert ("torch.distributed.run" in words) == (run.ranks != 0) and (run.ranks == 0 or str(gpus) in words)
        if run.script == "-m cp_mesh":
            what, *factory = shlex.split(run.options)
            path, _, function = factory[0].partition(":") if factory else ("", "", "")
            assert what == "verify" and path.endswith("verify_llama.py") and hasattr(verify_llama, function)
            continue
        assert (ROOT / run.script).is_file()
        if run.script == many_gpus.GATES:
            assert words[-words[::-1].index("--only") :] == shlex.split(run.options.partition("--only ")[2])
            assert set(words[words.index("--only") + 1 :]) <= set(gpu.commands(4))
            continue
        if name == "calibrate":
            continue
        args = PARSERS[Path(run.script).stem](options(words))
        kind = "h200" if device == "cuda" else "cpu"
        assert args.csv == Path(f"out/{name}_{gpus}x{kind}.csv") and (args.device == "cpu" or device == "cuda")
        assert args.commit == "0123456"
        if hasattr(args, "contestants") and args.contestants and Path(run.script).stem == "attention":
            ranks: Any = SimpleNamespace(device_type=device, size=lambda: gpus)
            everyone = field.all_contestants(ranks, ["fa4" if device == "cuda" else "cpu_flash"], args.head_chunks)
            assert attention.choose(args, everyone, []), "it ends at a pattern that matches nobody"
        if Path(run.script).stem in ("long_llama", "training"):
            lengths = [*args.seq_len, *([args.gate] if "gate" in args else [])]
            assert all(length % (2 * gpus) == 0 for length in lengths), "zigzag refuses other lengths"


def test_calls_fit_into_their_time() -> None:
    usable = many_gpus.parse_arguments([]).seconds - many_gpus.GRACE
    for call in sorted({run.call for run in RUNS.values()}):
        assert sum(run.seconds for run in RUNS.values() if run.call == call) <= usable, call
    for run in RUNS.values():  # a gate's own limits say which of its checks took too long
        if run.script == many_gpus.GATES:
            named = shlex.split(run.options.partition("--only ")[2])
            assert run.seconds > sum(gpu.commands(4)[name][2] for name in named)


def test_what_tables_read_is_what_is_written() -> None:
    assert set(tables.MANY) == {name for name, run in RUNS.items() if run.csv}


def test_a_run_is_ended_or_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.txt"
    said = {code: many_gpus.finish([sys.executable, "-c", code], 20.0, log, {}) for code in ("print(7)", "1 / 0")}
    assert said == {"print(7)": "ok", "1 / 0": "FAILED, exit code 1"} and "\n7\n" in log.read_text()
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert many_gpus.finish(sleeps, 0.4, log, {}) == "FAILED, ended after 0 s"
    assert many_gpus.finish(["no such command"], 9.0, log, {}).startswith("FAILED, [Errno 2]")
    with pytest.raises(SystemExit) as ended:
        many_gpus.main(shlex.split(f"--device cpu --only memory batches --seconds 1 --out {tmp_path}"))
    assert ended.value.code == 1 and capsys.readouterr().out.count("left out: the time is spent") == 2


SLEEPS = "import os, sys, time; open(sys.argv[1] + os.environ['RANK'], 'w').write(str(os.getpid())); time.sleep(99)"


@pytest.mark.full
def test_ranks_are_ended_with_what_runs_them(tmp_path: Path) -> None:
    """torchrun, run by a script as `tests/gpu.py` is, which is run and ended as `many_gpus.py` does it."""
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", f"{tmp_path}/sleeps.py"]
    given = f"{[*torchrun, f'{tmp_path}/rank']}, 99.0, Path({f'{tmp_path}/log'!r}), {{}}"
    code = f"from many_gpus import *\nend_with_commands()\nfinish({given})"
    files, deadline = [tmp_path / f"rank{rank}" for rank in range(2)], time.monotonic() + 60
    runs = subprocess.Popen(
        [sys.executable, "-c", code], cwd=many_gpus.ROOT / many_gpus.BENCHMARKS, start_new_session=True
    )
    try:
        while not all(file.exists() and file.read_text() for file in files):
            assert time.monotonic() < deadline and runs.poll() is None
            time.sleep(0.1)
    finally:
        many_gpus.end(runs)
    for file in files:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


def asked_for(rank: int) -> list[Any]:
    case = field.Case(4, 4, 16, torch.bfloat16, True, 16, 4, rank, torch.device("cpu"))
    axis = mesh((4,), ("cp",))

    def plan(method: str, transport: str = "functional", **options: int) -> tuple[str, Any]:
        contestant = field.CPMesh(axis, method, "zigzag", "cpu_flash", transport, **options)
        return contestant.taken(case), contestant.plan(case)

    inner, hosts, chunked = plan("hybrid", degree=2), plan("double_ring", "auto", degree=2), plan("ring", head_chunks=2)
    degrees = inner[1].options.ulysses_degree, hosts[1].options.inner_ring_size
    return [inner[0], hosts[0], *degrees, chunked[1].settings.head_chunks, plan("auto")[0]]


def test_contestants_ask_for_what_their_names_say(pool: Any) -> None:
    assert pool(4).run(asked_for) == [["hybrid2", "double_ring2", 2, 2, 2, "ring"]] * 4
    case: Any = SimpleNamespace(heads=6, cp_size=4)
    for method, degree, fits in (("hybrid", 2, True), ("hybrid", 4, False), ("ulysses", 0, False), ("ring", 0, True)):
        axis: Any = SimpleNamespace(size=lambda: 4)
        found = field.CPMesh(axis, method, "zigzag", "cpu_flash", "functional", degree).unsupported(case)
        assert (found is None) == fits


@pytest.mark.nightly("benchmarks")
def test_methods_of_two_hosts_are_timed(tmp_path: Path) -> None:
    """The first command on four CPU ranks, with fewer contestants: the hybrid and the double ring on 2 x 2."""
    words = options(many_gpus.command("methods", 4, "cpu", tmp_path, "0123456"))
    names = ["floor/cpu_flash", *(f"cp_mesh/{x}/zigzag/cpu_flash/functional" for x in ("ring", "auto", "hybrid2"))]
    names += ["cp_mesh/double_ring2/zigzag/cpu_flash/auto", "ulysses/cpu_flash"]
    done = run_script(ROOT / RUNS["methods"].script, [*words, "--contestants", *names], num_ranks=4)
    assert done.returncode == 0, done.printed
    with (tmp_path / "methods_4xcpu.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    queued = {row["contestant"]: row["status"] for row in rows if row["mode"] == "queued"}
    expected = {name: "ok: takes ring" if "/auto/" in name else "ok" for name in names}
    assert queued.pop("floor/best") and queued == expected
    page = tables.attention_page(str(tmp_path / "methods_4xcpu.csv"))
    assert "| cp_mesh, double ring of 2, zigzag, cpu_flash |" in page and "| cp_mesh, auto, zigzag, cpu_flash" in page
    kinds, lines = predicted.rivals_table(rows)
    assert len(lines) == 2 and len(kinds) == len(lines[0]) and lines[0][4].startswith("auto takes ring, ")


def row(contestant: str, ms: float, mode: str = "queued", status: str = "ok") -> dict[str, str]:
    return {
        "contestant": contestant, "mask": "causal", "heads_q": "32", "heads_kv": "8", "local_len": "16384",
        "mode": mode, "fwdbwd_ms": str(ms), "ratio_own_floor_fwdbwd": "0.97", "status": status,
    }  # fmt: skip


def test_measured_beside_predicted(tmp_path: Path) -> None:
    model, path = predicted.both_ms("ring", "32/8", 16384, 8, "queued"), tmp_path / "played.csv"
    with path.open("w", newline="") as file:  # as `played.py` writes it, with its floor
        writer = csv.DictWriter(file, [*row("", 0.0), "wire_ms"])
        writer.writeheader()
        writer.writerows([row("floor/fa4", 1.0), row("played/ring/zigzag/fa4", 2 * model) | {"wire_ms": f"{model}"}])
    measured = [row("cp_mesh/ring/zigzag/fa4/symmetric_memory", model), row("floor/fa4", 1.0)]
    (line,) = predicted.beside_table(8, measured, path)[1]
    assert line[3:6] == ["ring", f"{model:.0f}", "0.97, aim 0.98"]
    assert line[6].endswith(" (1.00)") and line[7].endswith(" (3.00)"), "the time of wires is added"
    assert predicted.beside_table(4, measured)[1][0][7] == "", "no rank of 4 was played"
    auto = row("cp_mesh/auto/zigzag/fa4/symmetric_memory", 10.0, status="ok: takes ulysses")
    for rival, verdict in ((11.0, "ahead"), (9.0, "BEHIND")):
        rivals = [
            row("ulysses/fa4", rival),
            row("torch/allgather", 20.0),
            row("cp_mesh/ring/zigzag/fa4/functional", 1.0),
        ]
        ((*_, own_words, best, ratio_words, told),) = predicted.rivals_table([auto, *rivals])[1]
        assert (own_words, best) == ("auto takes ulysses, 10", f"ulysses/fa4, {rival:.3g}")
        assert (ratio_words, told) == (f"{rival / 10:.2f}", verdict)


def test_predicted_steps_and_floors() -> None:
    """Of as many GPUs as were measured a step is what was measured; floors are near those of 2 and 4 GPUs."""
    assert all(
        line[3] == f"{float(line[3]):.1f}" and line[4] == f"{float(line[3]):.0f}"
        for line in predicted.steps_table(2)[1][:-1]
    )
    near = []
    for name, cp_size in (("attention_2xh200.csv", 2), ("attention_4xh200.csv", 4)):
        for x in tables.read(name):
            if (x["contestant"], x["mask"], x["mode"]) == ("floor/fa4", "causal", "graph") and int(
                x["local_len"]
            ) > 1024:
                model = predicted.floor_ms(int(x["heads_q"]), int(x["local_len"]), cp_size)
                near.append(model / (float(x["fwd_ms"]) + float(x["bwd_ms"])))
    assert len(near) > 10 and min(near) > 0.94 and max(near) < 1.11, near
