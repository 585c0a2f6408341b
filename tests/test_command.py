"""`python -m cp_mesh`: options are those of functions; output fits 100 columns, ends with a verdict, has a status."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from inside import Finding, ModelReport, inner, room
from scripts import run_script

import cp_mesh
from cp_mesh import Mask, Striped, explain

command = room("__main__")
NAMES, Report = inner("verification.verify", "NAMES", "Report")

SCRIPT = Path(cp_mesh.__file__).parent / "__main__.py"
VERDICT = r"(RIGHT|WRONG|REFUSED|RUNS|MEASURED)[: (]"
FACTORIES = """
import torch
labels = torch.zeros(2, 8, dtype=torch.int64)

def good(): return {"make_model": torch.nn.Module, "plan": None, "batch": {"tokens": labels, "labels": labels}}
def misspelt(): return good() | {"bacth": {}}
def raises(): return {}["corpus"]
def leaves(): raise SystemExit(0)
def leaves_later(): return good() | {"make_model": leaves}
"""


def run(*words: str) -> None:
    with mock.patch.object(sys, "argv", ["cp_mesh", *words]):
        command.main()


def widest(text: str) -> int:
    return max(map(len, text.splitlines()))


EXPLAINED = {
    "documents on two hosts": "--cp-size 16 --num-heads 32 --num-kv-heads 8 --gpus-per-host 8 --columns 94 "
    "--documents 3000 5000 --layout balanced",
    "zigzag per document": "--cp-size 4 --documents 3000 5000 --layout zigzag_documents --columns 94",
    "many ranks": "--cp-size 512 --num-heads 512 --method ulysses --columns 94",
    "scores": "--cp 4 --device cpu --scores alibi_slopes bias --window 64 --prefix 3",
}


@pytest.mark.parametrize("words", EXPLAINED.values(), ids=EXPLAINED)
@pytest.mark.quick(without="many ranks")
def test_an_explanation_fits_and_ends_with_what_runs(words: str, capsys: Any) -> None:
    run("explain", "--seq-len", "65536", *words.split())
    printed = capsys.readouterr()
    assert widest(printed.out) <= 100 and not printed.err
    assert printed.out.splitlines()[-1].startswith("RUNS: ") and len(re.findall(VERDICT, printed.out)) == 1
    assert ("of extra memory" in printed.out.splitlines()[-1]) == ("--num-heads" in words)


OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "--num-heads 32 --num-kv-heads 8": {"num_heads": 32, "num_kv_heads": 8},
    "--num-heads 32 --head-dim 64 --batch 3": {"num_heads": 32, "head_dim": 64, "batch": 3},
    "--num-heads 4 --head-dim 192 --v-head-dim 128 --latent-dim 576": {
        "num_heads": 4, "head_dim": 192, "v_head_dim": 128, "latent_dim": 576
    },
    "--layout striped": {"layout": Striped()},
    "--full": {"mask": Mask(causal=False)},
    "--window 4K": {"mask": Mask(causal=True, window=(4095, 0))},
    "--window 4_096 --full": {"mask": Mask(causal=False, window=(4095, None))},
    "--prefix 512": {"mask": Mask(causal=True, prefix=512)},
    "--documents 1000 200": {"mask": "made in the test"},
    "--scores softcap sinks": {"scores": ["softcap", "sinks"]},
    "--device cpu": {"device": "cpu"},
    "--dtype float32": {"dtype": torch.float32},
    "--kernel fa4": {"kernel": "fa4"},
    "--num-heads 4 --num-kv-heads 2 --method hybrid --ulysses-degree 4": {
        "num_heads": 4, "num_kv_heads": 2, "method": "hybrid", "ulysses_degree": 4
    },
    "--transport functional --columns 20": {"transport": "functional", "columns": 20},
    "--num-heads 4 --head-chunks 2 --gpus-per-host 2": {"num_heads": 4, "head_chunks": 2, "gpus_per_host": 2},
}  # fmt: skip


@pytest.mark.parametrize("words", OPTIONS)
@pytest.mark.quick("1")
def test_the_command_says_what_the_function_says(words: str, capsys: Any) -> None:
    options = OPTIONS[words]
    if "--documents" in words:
        ends = torch.tensor([1000, 200]).repeat(14).cumsum(0)
        options = {"mask": Mask(causal=True, documents=torch.bucketize(torch.arange(16384), ends, right=True))}
    run("explain", "--seq-len", "16384", "--cp-size", "4", *words.split())
    found, plain = (explain(16384, 4, **{"device": "cuda", "dtype": torch.bfloat16} | x) for x in (options, {}))
    printed = capsys.readouterr().out
    assert printed == f"{found}\n{found.verdict}\n" and (not words) == (str(found) == str(plain))


def test_a_picture(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "picture.svg"
    run("explain", "--seq-len", "4K", "--cp-size", "2", *f"--layout balanced --documents 300 --plot {path}".split())
    assert "balanced layout, 4096 tokens" in capsys.readouterr().out and "<svg" in path.read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "--seq-len N [N ...] sequence length; default: 256 per rank"),
        ("explain", "--seq-len N tokens in the whole sequence"),
        ("explain --model x", "--gpu-memory X GiB that PyTorch may take on a GPU"),
        ("verify", "factory module:function or file.py:function"),
    ],
)
def test_help_fits_and_explains_options(words: str, says: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as left:
        run(*words.split(), "--help")
    printed = capsys.readouterr().out
    assert left.value.code == 0 and 80 < widest(printed) <= 100 and says in " ".join(printed.split())


EXPLAIN = "explain --seq-len 64 --cp-size"
REFUSED = {
    "atention": "expected explain, verify, or only options, got 'atention'",
    "--seq-len 64": "no launcher: start it with torchrun",
    "--dtype float8": "expected bfloat16, float16, float32, float64, got 'float8'",
    "explain --seq-len 64": "required: --cp",
    f"{EXPLAIN} 2 --num-heads x": "--num-heads: expected a whole number (131072, 128K, 1e6), got 'x'",
    "explain --seq-len 1.5 --cp-size 2": "--seq-len: expected a whole number (131072, 128K, 1e6), got '1.5'",
    "explain --seq-len -1 --cp-size 2": "explain: seq_len: expected",
    "explain --seq-len -1 --cp-size 2 --documents 3": "explain: seq_len: expected",
    "explain --seq-len 1e12 --cp-size 2": "explain: seq_len: expected",
    f"{EXPLAIN} 2 --documents 3 0": "--documents: expected lengths of at least 1, got [3, 0]",
    f"{EXPLAIN} 2 --layout zigzag_documents": "--layout zigzag_documents: expected --documents",
    f"{EXPLAIN} 2 --plot x.bad": "png works",
    f"{EXPLAIN} 2 --scores cap": "names of softcap",
    f"{EXPLAIN} 2 --method hybrid": "expected num_heads, which ranks exchange, got None; num_heads=32, num_kv_heads=8",
    f"{EXPLAIN} 4 --num-heads 6 --method hybrid --ulysses-degree 3": "of the 6 query heads, got 3; ulysses_degree=2 w",
    f"{EXPLAIN} 2 --device cpu --transport symmetric_memory": "expected CUDA devices of one host, got device='cpu'",
    "verify x.py:y --device cpu": "factory x.py:y: factory: expected a file, got ",
    "verify y --device cpu": "factory y: factory: expected module:function or file.py:function, got y; for example",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_run_says_so_in_a_few_lines(line: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as left:
        run(*line.split())
    said = capsys.readouterr().err
    assert left.value.code == 2 and widest(said) <= 100
    assert REFUSED[line] in " ".join(said.split()) and said.rstrip().endswith("--help"), said


@pytest.mark.parametrize(
    ("text", "value"), [("16_384", 16384), ("16k", 16384), ("1M", 1 << 20), ("1e4", 10000), ("1.5E3", 1500)]
)
def test_numbers_are_as_people_type_them(text: str, value: int) -> None:
    assert inner("command_line", "number")(text) == value


def test_the_first_rank_speaks(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as left:
        run("--dtype", "float8")
    assert left.value.code == 2 and not capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(capsys: Any) -> None:
    with pytest.raises(SystemExit) as left:
        run("verify", "a:b", "--device", "cuda")
    assert left.value.code == 2 and "got none; --device cpu works" in " ".join(capsys.readouterr().err.split())


def test_attention_on_two_ranks(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--seq-len", "32", "--kernel", "cpu_flash", "triton", "--dtype", "float64", "--csv"]
    done = run_script(SCRIPT, [*arguments, str(tmp_path / "a.csv")], num_ranks=2)
    lines = done.printed.splitlines()
    assert done.returncode == 2 and widest(done.printed) <= 100, done.printed
    assert [line.rpartition(" ")[2] for line in lines].count("exact") == 6
    assert [line.rpartition(" ")[2] for line in lines].count("refused") == 6
    assert done.printed.count("kernel='triton' lacks device cpu") == 1
    assert lines[-1].startswith("REFUSED: 6, the first is float64 contiguous causal (")
    header, *rows = (tmp_path / "a.csv").read_text().splitlines()
    assert header.startswith("hardware,torch,dtype,seq_len,layout,mask,kernel,out_rms_error,") and len(rows) == 6


def test_a_row_has_every_figure_and_what_is_wrong() -> None:
    errors = {name: 10.0**-i for i, name in enumerate(NAMES, 5)}
    ratios = {name: 0.25 for name in NAMES}
    line = command._line_of(("contiguous", "causal"), Report("cpu_flash", errors, ratios, {}))
    assert line.split()[3:8] == ["1.0e-05", "1.0e-06", "1.0e-07", "1.0e-08", "1.0e-09"]
    assert line.split()[-3:] == ["25", "%", "exact"] and len(line) <= 100
    bad = Report("cudnn", errors, ratios | {"dq": float("nan")}, {"out": 0.5, "dk": 3.2})
    first, second = command._line_of(("zigzag", "full"), bad).splitlines()
    assert first.endswith("WRONG") and "nan %" in first and "dk (320 %)" in second and "out" not in second


@pytest.mark.parametrize(
    ("name", "status", "says"),
    [
        ("misspelt", 1, "verify_model() got an unexpected keyword argument 'bacth'"),
        ("raises", 1, "KeyError: 'corpus'"),
        ("nowhere", 1, "has no attribute 'nowhere'"),
        ("leaves", 1, "expected a verdict, got exit status 0"),
        ("leaves_later", 1, "expected a verdict, got exit status 0"),
        ("good", 1, "WRONG: "),
    ],
)
@pytest.mark.quick("leaves")
def test_factories(name: str, status: int, says: str, tmp_path: Path) -> None:
    (tmp_path / "my_trainer.py").write_text(FACTORIES)
    done = run_script(SCRIPT, ["verify", f"{tmp_path / 'my_trainer.py'}:{name}", "--device", "cpu"])
    assert done.returncode == status and says in " ".join(done.printed.split()), done.printed


def test_a_report_is_printed_before_it_is_written(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    report = ModelReport([])
    for name, result in (("_init", None), ("_leave", None), ("function_of", dict), ("verify_model", report)):
        monkeypatch.setattr(command, name, lambda *_, result=result, **__: result)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    with pytest.raises(OSError):
        run("verify", "trainer:function", "--device", "cpu", "--json", str(tmp_path))
    assert capsys.readouterr().out.splitlines()[-1] == report.verdict


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("", {"dtype": torch.float16}),
        ("--dtype own", {"dtype": None}),
        ("--dtype float32 --probes", {"dtype": torch.float32, "reference": False}),
    ],
)
def test_options_of_verify(words: str, given: dict[str, Any], tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """They reach the function, before what the factory returns; and the report is written."""
    said, path = dict[str, Any](), tmp_path / "report.json"
    monkeypatch.setattr(command, "_init", lambda *_, **__: None)
    monkeypatch.setattr(command, "_leave", lambda status: said.update(status=status))
    monkeypatch.setattr(command, "function_of", lambda _: lambda: {"dtype": torch.float16})
    monkeypatch.setattr(command, "verify_model", lambda **got: said.update(got) or ModelReport([Finding("a", True)]))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    run("verify", "trainer:function", "--device", "cpu", "--json", str(path), *words.split())
    assert said == {"progress": True, "status": 0} | given and '"passed": true' in path.read_text()
    assert capsys.readouterr().out.splitlines()[-1].startswith("RIGHT ")
