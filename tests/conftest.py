"""Fixtures: pools of ranks, poisoned allocations; skips what needs GPUs where there are none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from durations import Durations
from hopper import Hopper
from interpreted import Interpreted
from poison import poisoned
from ranks import Pool

MAX_LIVE_RANKS = 12


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--durations-csv", type=Path, metavar="FILE", help="append what each test file took to FILE")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs one CUDA device")
    config.addinivalue_line("markers", "multigpu(count): needs two CUDA devices, or count")
    config.addinivalue_line("markers", "slow: takes more than about ten seconds")
    config.addinivalue_line("markers", "unpoisoned: memory from torch.empty is left as it comes, here and on the ranks")
    if path := config.getoption("--durations-csv"):
        config.pluginmanager.register(Durations(path, "full"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = 1 if item.get_closest_marker("gpu") else 0
    if marker := item.get_closest_marker("multigpu"):
        needed = marker.args[0] if marker.args else 2
    if needed and (have := torch.cuda.device_count()) < needed:
        pytest.skip(f"needs {needed} CUDA devices, have {have}")


class Pools:
    """Gives the pool of a size and backend; beyond MAX_LIVE_RANKS the least recently used ones are ended."""

    def __init__(self) -> None:
        self.pools: dict[tuple[int, str], Pool] = {}

    def __call__(self, world_size: int, backend: str = "gloo") -> Pool:
        pool = self.pools.pop((world_size, backend), None) or Pool(world_size, backend)
        live = world_size
        for other in reversed(self.pools.values()):
            live += len(other.processes)
            if live > MAX_LIVE_RANKS:
                other.close()
        self.pools[world_size, backend] = pool
        return pool

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pools]:
    """``pool(world_size, backend="gloo").run(fn, *args)``; see ranks.py."""
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def interpreted(request: pytest.FixtureRequest) -> Iterator[Interpreted]:
    """``interpreted(file)``; see interpreted.py."""
    asking = {item.path for item in request.session.items if "interpreted" in getattr(item, "fixturenames", ())}
    runs = Interpreted(asking)
    yield runs
    runs.close()


@pytest.fixture
def hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Hopper:
    """``hopper(launch, *modules)``; see hopper.py."""
    return Hopper(tmp_path, monkeypatch, capsys)


@pytest.fixture(autouse=True)
def _poisoned(request: pytest.FixtureRequest) -> Iterator[None]:
    with poisoned(request.node.get_closest_marker("unpoisoned") is None):
        yield
