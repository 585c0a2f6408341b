"""Fixtures: pools of ranks, poisoned allocations; skips what needs GPUs where there are none."""

from __future__ import annotations

import functools
import gc
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from forms import PARTS
from gpu import part_of
from hopper import Hopper
from hypothesis import settings
from interpreted import INTERPRETED, Interpreted, speed_up_interpreter
from poison import poisoned
from ranks import Pools


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the full form; see run.py")
    parser.addoption("--nightly", metavar="PART", help="only this part of what neither form runs; see run.py")
    for name in ("--integrations", "--integrations-4", "--integrations-titan-0.3", "--integrations-axolotl"):
        parser.addoption(name, action="store_true", help="in an environment with other packages; see run.py")
    parser.addoption("--torch", metavar="VERSION", help="in an environment with this release of PyTorch; see run.py")
    parser.addoption("--part", metavar="1/3", help="one third of the tests")
    parser.addoption("--write-pins", action="store_true", help="write the records of test_pins.py anew")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs one CUDA device")
    config.addinivalue_line("markers", "multigpu(count): needs two CUDA devices, or count")
    config.addinivalue_line("markers", "full: run with --full only, or by its node id")
    config.addinivalue_line(
        "markers",
        "quick(*texts, without): the quick form runs what has one of these texts in its id, and not `without`",
    )
    config.addinivalue_line("markers", "nightly(part): run with --nightly=PART only, or by its node id")
    config.addinivalue_line("markers", "more(part): run in every form, with all of its cases with --nightly=PART only")
    config.addinivalue_line("markers", "unpoisoned: memory from torch.empty is left as it comes, here and on the ranks")
    if INTERPRETED and find_spec("triton"):
        speed_up_interpreter()
    nightly = bool(config.getoption("--nightly"))  # it draws anew, the other forms the same examples in every run
    examples = 5000 if nightly else 1000 if config.getoption("--full") else 100
    settings.register_profile("form", max_examples=examples, deadline=None, derandomize=not nightly, print_blob=True)
    settings.load_profile("form")


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported stays: else each collection looks at all of it


@pytest.hookimpl(trylast=True)  # what -k leaves out is not counted
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if is_worker(config):  # the longest tests first, so that none of several processes is left with one alone
        items.sort(key=lambda item: (not is_interpreted(item), item.get_closest_marker("full") is None))
    else:  # such runs go on beside this process, which waits for them last
        items.sort(key=is_interpreted)
    if all("::" in arg for arg in config.args):  # node ids ask for what they name
        return
    found = [(item, is_of_the_form(item)) for item in items]
    asked = ("keyword", "markexpr", "lf", "deselect")
    if not (any(getattr(config.option, name, None) for name in asked) or any("::" in arg for arg in config.args)):
        check_texts(items)
    chosen = part_of([item for item, runs in found if runs], config.getoption("--part"))
    left = {id(item) for item in chosen}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in left])
    items[:] = chosen


def is_of_the_form(item: pytest.Item) -> bool:
    """Whether the quick form runs it, the full one, or this part of the nightly one; and if it has its devices here."""
    if devices_needed(item) > devices():
        return False
    part, full = item.config.getoption("--nightly"), item.config.getoption("--full")
    nightly, more = item.get_closest_marker("nightly"), item.get_closest_marker("more")
    parts = [marker.args[0] for marker in (nightly or more,) if marker]
    assert set(parts) <= set(PARTS), f"{item.nodeid}: {parts}"
    if part or nightly:
        return part in parts
    return full or not (item.get_closest_marker("full") or is_left_out(item))


def check_texts(items: list[pytest.Item]) -> None:
    """Each text of `quick` is in a case that the quick form may run: other names would be left out for ever."""
    cases = defaultdict[tuple[str, str], list[str]](list)
    for item in items:
        if quick := item.get_closest_marker("quick"):
            elsewhere = any(item.get_closest_marker(mark) for mark in ("full", "nightly", "gpu", "multigpu"))
            for text in quick.args or quick.kwargs.values():
                cases[item.nodeid.partition("[")[0], text] += [] if elsewhere else [case_of(item)]
    lost = [
        f"{test}: {text!r} is in none of {names}"
        for (test, text), names in cases.items()
        if not any(text in name for name in names)
    ]
    if lost:
        raise pytest.UsageError("pytest.mark.quick: " + "\n".join(lost))


def case_of(item: pytest.Item) -> str:
    """Its name without that of the function."""
    return item.name.partition("[")[2].removesuffix("]")


def is_left_out(item: pytest.Item) -> bool:
    """Whether the quick form runs other cases of this test."""
    if (quick := item.get_closest_marker("quick")) is None:
        return False
    assert bool(quick.args) != bool(quick.kwargs), f"{item.nodeid}: texts, or what is left out"
    case = case_of(item)
    return quick.kwargs["without"] in case if quick.kwargs else all(text not in case for text in quick.args)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not config.getoption("--full") and not config.getoption("--nightly"):
        terminalreporter.write_line("quick form: more in the full form, --full")
    if devices() < 2:
        terminalreporter.write_line(f"{devices()} CUDA devices: what needs more is left out")


def is_worker(config: pytest.Config) -> bool:
    """Whether this is one of several processes of pytest-xdist, not the one that began them."""
    return hasattr(config, "workerinput")


@pytest.fixture
def full(request: pytest.FixtureRequest) -> bool:
    """Whether all cases of this test run: in the nightly form, and in the full one where it is not marked `more`."""
    in_full = request.config.getoption("--full") and not request.node.get_closest_marker("more")
    return in_full or bool(request.config.getoption("--nightly"))


@functools.cache  # else PyTorch asks the driver each time
def devices() -> int:
    return torch.cuda.device_count()


def devices_needed(item: pytest.Item) -> int:
    if marker := item.get_closest_marker("multigpu"):
        return marker.args[0] if marker.args else 2
    return 1 if item.get_closest_marker("gpu") else 0


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = devices_needed(item)
    if needed and (have := devices()) < needed:
        pytest.skip(f"needs {needed} CUDA devices, have {have}")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pools]:
    """``pool(world_size, backend="gloo").run(fn, *args)``; see ranks.py."""
    with Pools() as pools:
        yield pools


@pytest.fixture(scope="session")
def interpreted(request: pytest.FixtureRequest) -> Iterator[Interpreted]:
    """``interpreted(file)``; see interpreted.py."""
    runs = Interpreted()
    if not is_worker(request.config):
        runs.start({item.path for item in request.session.items if is_interpreted(item)})
    yield runs
    runs.close()


def is_interpreted(item: pytest.Item) -> bool:
    return "interpreted" in getattr(item, "fixturenames", ())


@pytest.fixture(scope="session", autouse=True)
def _interpreting(request: pytest.FixtureRequest) -> None:
    """Begins the interpreted runs before the first test, beside which one process has a core to spare."""
    if (
        not INTERPRETED
        and not is_worker(request.config)
        and any(is_interpreted(item) for item in request.session.items)
    ):
        request.getfixturevalue("interpreted")


@pytest.fixture
def hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Hopper:
    """``hopper(launch, *modules)``; see hopper.py."""
    return Hopper(tmp_path, monkeypatch, capsys)


@pytest.fixture(autouse=True)
def _poisoned(request: pytest.FixtureRequest) -> Iterator[None]:
    with poisoned(request.node.get_closest_marker("unpoisoned") is None):
        yield
