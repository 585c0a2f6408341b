"""`python -m cp_mesh`: what a newcomer reads fits 100 columns, ends with a verdict, and has an exit status."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from inside import Finding, ModelReport, inner, room
from scripts import run_script

import cp_mesh
from cp_mesh import ArgumentError

command, terminal = room("__main__"), room("terminal")
reporting = room("report")
arguments_of = inner("factory", "arguments_of")
Progress = inner("terminal", "Progress")
NAMES, Report = inner("verification.verify", "NAMES", "Report")

SCRIPT = Path(cp_mesh.__file__).parent / "__main__.py"
VERDICT = r"(RIGHT|WRONG|REFUSED|RUNS|MEASURED)[: (]"
FACTORIES = """
import torch

def good(): return {"make_model": torch.nn.Module, "plan": None, "batch": {}}
def not_a_dict(): return [1]
def misspelt(): return good() | {"bacth": {}}
def no_batch(): return {"make_model": torch.nn.Module, "plan": None}
def a_model(): return good() | {"make_model": torch.nn.Module()}
def a_tensor(): return good() | {"batch": torch.zeros(2, 8)}
def a_list(): return good() | {"plan": ["layers.0"]}
def a_size(): return good() | {"mesh": 8}
def takes(mesh): return good()
def raises(): return {}["corpus"]
def leaves(): raise SystemExit(0)
batch = dict.fromkeys(("tokens", "labels"), torch.zeros(2, 8, dtype=torch.int64))
def leaves_later(): return {"make_model": leaves, "plan": None, "batch": batch}
def unknown(): return good() | {"steps": 3}
number = 7
mapping = dict
"""


def run(*words: str) -> None:
    with mock.patch.object(sys, "argv", ["cp_mesh", *words]):
        command.main()


def widest(text: str) -> int:
    return max(map(len, text.splitlines()))


EXPLAINED = {
    "documents on two hosts": "--cp 16 --heads 32/8 --gpus-per-host 8 --columns 94 "
    "--documents 3000 5000 --layout balanced",
    "zigzag per document": "--cp 4 --documents 3000 5000 --layout zigzag_documents --columns 94",
    "many ranks": "--cp 512 --heads 512/512 --method ulysses --columns 94",
    "scores": "--cp 4 --device cpu --scores alibi_slopes bias --window 64 --prefix 3",
}


@pytest.mark.parametrize("words", EXPLAINED.values(), ids=EXPLAINED)
@pytest.mark.quick(without="many ranks")
def test_an_explanation_fits_and_ends_with_what_runs(words: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(terminal, "AFTER", 60.0)
    run("explain", "--seq-len", "65536", *words.split())
    printed = capsys.readouterr()
    assert widest(printed.out) <= 100 and not printed.err
    assert printed.out.splitlines()[-1].startswith("RUNS: ") and len(re.findall(VERDICT, printed.out)) == 1
    assert ("of extra memory" in printed.out.splitlines()[-1]) == ("--heads" in words)


@pytest.mark.parametrize("name", ["", "explain", "verify"])
def test_help_fits(name: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    with pytest.raises(SystemExit) as left:
        run(*[name][: len(name)], "--help")
    assert left.value.code == 0 and 80 < widest(capsys.readouterr().out) <= 100


REFUSED = {
    "an unknown command": (["atention"], "expected explain, verify, or only options, got 'atention'"),
    "no ranks": (["--seq-len", "64"], "no launcher: start it with torchrun"),
    "an unknown kernel": (["--kernel", "fa5"], "invalid choice: 'fa5' (choose from 'auto', 'fa4'"),
    "an unknown dtype": (["--dtype", "float8"], "invalid choice: 'float8'"),
    "heads": (
        ["explain", "--seq-len", "64", "--cp", "2", "--heads", "x"], "expected query heads/kv heads such as 32/8, got"
    ),
    "no argument": (["explain", "--seq-len", "64"], "required: --cp"),
    "a method": (
        ["explain", "--seq-len", "64", "--cp", "2", "--method", "hybrid"],
        "explain: method='hybrid': expected num_heads, which ranks exchange, got None; num_heads=32, num_kv_heads=8",
    ),
    "a degree": (
        ["explain", "--seq-len", "64", "--cp", "4", "--heads", "6", "--method", "hybrid", "--ulysses-degree", "3"],
        "method='hybrid': ulysses_degree: expected a divisor of the 4 cp ranks and of the 6 query heads, got 3; "
        "ulysses_degree=2 works, or method='ring'",
    ),
    "a degree of another method": (
        ["explain", "--seq-len", "64", "--cp", "4", "--method", "ring", "--ulysses-degree", "2"],
        "ulysses_degree: expected None, except with method='hybrid', got 2; method='hybrid' takes it",
    ),
    "chunks": (
        ["explain", "--seq-len", "64", "--cp", "4", "--heads", "4", "--method", "ulysses", "--head-chunks", "3"],
        "method='ulysses': head_chunks: expected a divisor of the 1 kv heads of a rank, got 3; head_chunks=1 works",
    ),
    "kv heads": (["explain", "--seq-len", "64", "--cp", "2", "--heads", "3/2"], "got 3; num_kv_heads=1 works"),
    "a transport": (
        ["explain", "--seq-len", "64", "--cp", "2", "--device", "cpu", "--transport", "symmetric_memory"],
        "transport='symmetric_memory': expected CUDA devices of one host, got device='cpu'; transport='functional' w",
    ),
    "no heads": (
        ["explain", "--seq-len", "64", "--cp", "2", "--heads", "4/0"], "expected query heads/kv heads such as 32/8"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_says_so_in_a_few_lines(name: str, capsys: Any, monkeypatch: Any) -> None:
    words, says = REFUSED[name]
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as left:
        run(*words)
    said = capsys.readouterr().err
    assert left.value.code == 2 and widest(said) <= 100 and len(said.splitlines()) <= 5, said
    assert says in " ".join(said.split()) and said.rstrip().endswith("--help")


EXPLAIN = "explain --seq-len 64 --cp 2"
AT_ONCE = {  # options and variables of a launch, whatever the command would do
    "explain --seq-len -1 --cp 2 --layout balanced": "argument --seq-len: expected at least 1, got -1",
    "explain --seq-len 1e12 --cp 2": "argument --seq-len: expected at most 134217728, got 1e12",
    "explain --seq-len 1.5 --cp 2": "--seq-len: expected a whole number (131072, 128K, 1e6), got '1.5'",
    "explain --seq-len 128M --cp 2 --documents 7 1": "--documents: expected at most 1048576 in the sequence, got 3355",
    "explain --seq-len 64 --cp 0": "argument --cp: expected at least 1, got 0",
    "explain --seq-len 64 --cp 1M": "argument --cp: expected at most 8192, got 1M",
    f"{EXPLAIN} --head-dim 0": "argument --head-dim: expected at least 1, got 0",
    f"{EXPLAIN} --batch 1e20": "argument --batch: expected at most 1048576, got 1e20",
    f"{EXPLAIN} --heads 4/2/1": "argument --heads: expected query heads/kv heads such as 32/8, got '4/2/1'",
    f"{EXPLAIN} --heads 4 --head-chunks 0": "argument --head-chunks: expected at least 1, got 0",
    f"{EXPLAIN} --ulysses-degree x": "argument --ulysses-degree: expected a whole number (131072, 128K, 1e6), got",
    f"{EXPLAIN} --gpus-per-host 0": "argument --gpus-per-host: expected at least 1, got 0",
    f"{EXPLAIN} --window 0": "argument --window: expected at least 1, got 0",
    f"{EXPLAIN} --prefix -1": "argument --prefix: expected at least 0, got -1",
    f"{EXPLAIN} --columns 95": "argument --columns: expected at most 94, got 95",
    f"{EXPLAIN} --documents 3 0": "argument --documents: expected at least 1, got 0",
    f"{EXPLAIN} --plot nowhere/x.png": "argument --plot: expected a file in an existing folder, got no folder nowhere",
    f"{EXPLAIN} --plot there": "argument --plot: expected a file in an existing folder, got the folder there",
    "verify a:b --json nowhere/x": "argument --json: expected a file in an existing folder, got no folder nowhere",
    "verify ../../x:y": "factory ../../x:y: expected module:function or file.py:function, got ../../x:y; for example",
    "verify x.py:y": "factory x.py:y: expected a module that can be imported, got no file ",
    "RANK=0 --csv nowhere/x": "argument --csv: expected a file in an existing folder, got no folder nowhere",
    "RANK=0 --seq-len 64 2M": "argument --seq-len: expected at most 1048576, got 2M",
    "RANK=0 --ulysses-degree 0": "argument --ulysses-degree: expected at least 1, got 0",
    f"RANK=x {EXPLAIN}": "RANK in the environment: expected 0 to 1048575, as torchrun sets it, got 'x'; unset RANK",
    "RANK=-1 verify a:b": "RANK in the environment: expected 0 to 1048575, as torchrun sets it, got '-1'; unset RANK",
    "RANK=0 verify a:b": "WORLD_SIZE in the environment: expected 1 to 1048576, as torchrun sets it, got ''",
    "RANK=0 WORLD_SIZE=0": "WORLD_SIZE in the environment: expected 1 to 1048576, as torchrun sets it, got '0'",
    "RANK=0 WORLD_SIZE=1 MASTER_PORT=http": "MASTER_PORT in the environment: expected 1 to 65535, as torchrun sets it,",
    "RANK=0 WORLD_SIZE=1 MASTER_PORT=1234": "MASTER_ADDR in the environment: expected the host of rank 0, as torchrun",
}


@pytest.mark.parametrize("line", AT_ONCE)
def test_what_is_wrong_is_said_before_any_work(line: str, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    for name in ("balance", "explain", "verify", "verify_model", "_init"):
        monkeypatch.setattr(command, name, lambda *_, name=name, **__: pytest.fail(f"{name} was called"))
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    words = line.split()
    while words and "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("="))
    with pytest.raises(SystemExit) as left:
        run(*words, "--device", "cpu")
    said = capsys.readouterr()
    assert left.value.code == 2 and not said.out and len(said.err.splitlines()) <= 4 and widest(said.err) <= 100
    assert AT_ONCE[line] in " ".join(said.err.split()), said.err
    assert [path.name for path in Path().iterdir()] == ["there"]


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "0"}, "expected a GPU for each of 4 ranks of a host, got 2"),
        ({"LOCAL_RANK": "2"}, "expected a GPU for each of 3 ranks of a host, got 2"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK in the environment: expected 0 to 1048576, as torchrun sets it, got 'x'"),
    ],
)
def test_more_ranks_than_gpus(told: dict[str, str], says: str, capsys: Any, monkeypatch: Any) -> None:
    launch = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(command, "_init", lambda *_, **__: pytest.fail("it was started"))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for name, word in (launch | told).items():
        monkeypatch.setenv(name, word)
    with pytest.raises(SystemExit) as left:
        run("--device", "cuda")
    assert left.value.code == 2 and says in " ".join(capsys.readouterr().err.split())


LENGTHS = {"16384": 16384, "16_384": 16384, "16K": 16384, "16k": 16384, "1M": 1 << 20, "1e4": 10000, "1.5E3": 1500}


@pytest.mark.parametrize("text", LENGTHS)
def test_lengths_are_as_people_type_them(text: str, capsys: Any) -> None:
    run("explain", "--seq-len", text, "--cp", "2", "--window", text)
    assert f"zigzag layout, {LENGTHS[text]} tokens on 2 ranks" in capsys.readouterr().out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a file that is full")
def test_a_report_is_printed_before_it_is_written(capsys: Any, monkeypatch: Any) -> None:
    report = ModelReport([Finding("rows", True)])
    for name, result in (("_init", None), ("arguments_of", {}), ("verify_model", report)):
        monkeypatch.setattr(command, name, lambda *_, result=result, **__: result)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as left:
        run("verify", "trainer:function", "--device", "cpu", "--json", "/dev/full")
    said = capsys.readouterr()
    assert left.value.code == 2 and said.out.splitlines()[-1] == report.verdict
    assert "a writable file, got /dev/full (No space left on device)" in " ".join(said.err.split())


def test_the_first_rank_speaks(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(terminal, "SPEAKING", 0.0)
    with pytest.raises(SystemExit) as left:
        run("--kernel", "fa5")
    assert left.value.code == 2 and not capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(capsys: Any) -> None:
    with pytest.raises(SystemExit) as left:
        run("verify", "a:b", "--device", "cuda")
    assert left.value.code == 2 and "got none; --device cpu works" in " ".join(capsys.readouterr().err.split())


def test_attention_on_two_ranks() -> None:
    arguments = ["--device", "cpu", "--seq-len", "32", "--kernel", "cpu_flash", "triton", "--dtype", "float64"]
    done = run_script(SCRIPT, arguments, num_ranks=2)
    lines = [line for line in done.printed.splitlines() if not re.match(r"\[ *\d+\.\d s\] ", line)]
    assert done.returncode == 2 and widest(done.printed) <= 100, done.printed
    assert [line.rpartition(" ")[2] for line in lines].count("exact") == 6
    assert [line.rpartition(" ")[2] for line in lines].count("refused") == 6
    assert done.printed.count("kernel='triton' lacks device cpu") == 1
    assert lines[-1].startswith("REFUSED: 6, the first is float64 contiguous causal (12 configurations on 2 ranks, ")


def test_a_row_has_every_figure_and_what_is_wrong() -> None:
    errors = {name: 10.0**-i for i, name in enumerate(NAMES, 5)}
    ratios = {name: 0.25 for name in NAMES}
    (line,) = command._lines_of(("contiguous", "causal"), Report("cpu_flash", errors, ratios, {}))
    assert line.split()[3:8] == ["1.0e-05", "1.0e-06", "1.0e-07", "1.0e-08", "1.0e-09"]
    assert line.endswith("    25 %  exact") and len(line) <= 100
    bad = Report("cudnn", errors, ratios | {"dq": float("nan")}, {"out": 0.5, "dk": 3.2})
    first, second = command._lines_of(("zigzag", "full"), bad)
    assert first.endswith("nan %  WRONG") and "dk (320 %)" in second and "out" not in second


FACTORY_ERRORS = {
    "without a colon": ("{file}", "expected module:function or file.py:function, got "),
    "a path": (
        "../../x:good", "expected module:function or file.py:function, got ../../x:good; for example my_trainer:"
    ),
    "a folder": ("{folder}:good", "expected module:function or file.py:function, got "),
    "two colons": ("my_trainer:Trainer:good", "expected module:function or file.py:function, got my_trainer:Trainer"),
    "another dot": ("{folder}/my.trainer.py:good", "expected a file name that is a module name, got my.trainer.py;"),
    "another module": ("{folder}/json.py:good", "json.py as module json, got "),
    "a built-in module": ("{folder}/sys.py:good", "sys.py as module sys, got a built-in module; rename the file"),
    "a class of C": (
        "{file}:mapping", "'make_model': expected a function without arguments that returns the plain mod"
    ),
    "no such file": ("{file}x.py:good", "expected a module that can be imported, got no file "),
    "no such module": (
        "my_trainer_that_is_not:good", "got No module named 'my_trainer_that_is_not'; start in its folder"
    ),
    "another import": (
        "{folder}/imports.py:good", "got ModuleNotFoundError: No module named 'nowhere_at_all'; see its"
    ),
    "an import that exits": (
        "{folder}/exits.py:good", "expected a module that can be imported, got SystemExit: 0; see its"
    ),
    "no such function": ("{file}:goof", "expected a function, got no such name in my_cp_factories; similar: good"),
    "no function that is near": (
        "{file}:verification",
        "got no such name in my_cp_factories; it defines good, not_a_dict, misspelt, no_batch, a_model, a_tensor,",
    ),
    "a module of imports": ("{folder}/borrowed.py:verification", "no such name in borrowed; it defines none"),
    "a number": ("{file}:number", "expected a function, got int; "),
    "arguments": (
        "{file}:takes", "expected a function that needs no arguments, got missing a required argument: 'mesh'"
    ),
    "it raises": ("{file}:raises", "expected a dict of verify_model's arguments, got KeyError: 'corpus'; see its"),
    "it exits": ("{file}:leaves", "expected a dict of verify_model's arguments, got SystemExit: 0; see its"),
    "a list": ("{file}:not_a_dict", "expected a dict of verify_model's arguments, got list; return {{'make_model'"),
    "a name": (
        "{file}:misspelt", "'bacth': expected the name of an argument of verify_model, got bacth; similar: batch"
    ),
    "a name that is not near": (
        "{file}:unknown", "'steps': expected the name of an argument of verify_model, got steps; its"
    ),
    "none": (
        "{file}:no_batch",
        "'batch': expected a dict of whole tensors by the names of the model's arguments, got only ['",
    ),
    "a model": (
        "{file}:a_model", "'make_model': expected a function without arguments that returns the plain model, got M"
    ),
    "a tensor": (
        "{file}:a_tensor", "'batch': expected a dict of whole tensors by the names of the model's arguments, got T"
    ),
    "a plan": ("{file}:a_list", "'plan': expected a plan, a function of the model, or None, got list; "),
    "a mesh": ("{file}:a_size", "'mesh': expected a DeviceMesh of all ranks, or None, got int; "),
}  # fmt: skip


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: Any) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("my_cp_factories", "imports", "borrowed", "exits"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "imports.py").write_text("import nowhere_at_all\n")
    (tmp_path / "exits.py").write_text("raise SystemExit(0)\n")
    (tmp_path / "borrowed.py").write_text("from torch import Tensor, zeros\nfrom math import sqrt\n")
    for name in ("my.trainer", "json", "sys"):
        (tmp_path / f"{name}.py").write_text(FACTORIES)
    (tmp_path / "my_cp_factories.py").write_text(FACTORIES)
    return tmp_path / "my_cp_factories.py"


@pytest.mark.parametrize("name", FACTORY_ERRORS)
def test_errors_of_a_factory_name_it_and_the_argument(name: str, factories: Path) -> None:
    text, says = FACTORY_ERRORS[name]
    text = text.format(file=factories, folder=factories.parent)
    with pytest.raises(ArgumentError) as raised:
        arguments_of(text)
    said = str(raised.value)
    assert said.startswith(f"factory {text}") and says.format() in said, said
    assert (raised.value.__cause__ is not None) == ("see its traceback" in said)


def test_a_factory_that_is_right(factories: Path) -> None:
    assert set(arguments_of(f"{factories}:good")) == {"make_model", "plan", "batch"}


@pytest.mark.parametrize(
    ("name", "line", "says"),
    [
        ("raises", 'return {}["corpus"]', "got KeyError: 'corpus'"),
        ("leaves_later", "", "expected a verdict, got SystemExit(0) of its own code"),
    ],
)
def test_a_factory_that_raises_is_told_by_the_command(name: str, line: str, says: str, factories: Path) -> None:
    done = run_script(SCRIPT, ["verify", f"{factories}:{name}", "--device", "cpu"])
    assert done.returncode == 2, done.printed
    assert line in done.printed and says in " ".join(done.printed.split())
    assert "cp_mesh/__main__.py" not in done.printed


@pytest.mark.parametrize("is_there", [True, False])
def test_colors_are_those_of_rich_on_a_terminal(is_there: bool, capsys: Any, monkeypatch: Any) -> None:
    made = []
    console = mock.Mock(Console=lambda **_: mock.Mock(print=lambda line, style: made.append((line, style))))
    monkeypatch.setattr(reporting.importlib.util, "find_spec", lambda name: name if is_there else None)
    monkeypatch.setattr(reporting.importlib, "import_module", lambda name: {"rich.console": console}[name])
    terminal.show("not a terminal", True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    for passed in (True, False, None):
        terminal.show("a line", passed)
    plain = capsys.readouterr().out.splitlines()
    assert plain == (["not a terminal", "a line"] if is_there else ["not a terminal", *["a line"] * 3])
    assert made == ([("a line", "green"), ("a line", "bold red")] if is_there else [])


def test_progress_is_told_after_a_second_and_not_before(capsys: Any, monkeypatch: Any) -> None:
    assert terminal.AFTER == 1.0
    monkeypatch.setattr(terminal, "AFTER", 0.05)
    for on in (True, False):
        progress = Progress(on)
        with progress("what is quick"):
            pass
        with progress("what takes long" + "!" * 200):
            progress("what takes its place")
            time.sleep(0.3)
        said = capsys.readouterr().err
        assert re.fullmatch(r"\[   0\.\d s\] what takes its place\n" if on else "", said), said
