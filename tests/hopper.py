"""Triton kernels compiled for Hopper where there is none: what launches compile, and the assembler's report."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest


class HopperDriver:
    """What Triton asks of a driver before it compiles."""

    arch = 90

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


@dataclass
class Compiled:
    """By the name of a kernel its compilations, one a launch; and what ptxas printed of all of them."""

    kernels: dict[str, list[Any]]
    log: str

    @property
    def spills(self) -> list[int]:
        """Bytes of spill stores, by compilation."""
        spills = [int(stored) for stored in re.findall(r"(\d+) bytes spill stores", self.log)]
        assert len(spills) >= len({kernel.hash for kernels in self.kernels.values() for kernel in kernels})
        return spills


class Hopper:
    """``hopper(launch, *modules)`` compiles the kernels that ``launch()`` would run, of all in these modules."""

    def __init__(self, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        triton = pytest.importorskip("triton")
        try:
            assert triton.knobs.nvidia.ptxas.path
        except RuntimeError:
            pytest.skip("needs ptxas")
        self._monkeypatch, self._capsys = monkeypatch, capsys
        monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
        monkeypatch.setenv("TRITON_DUMP_PTXAS_LOG", "1")
        self.driver = HopperDriver()
        monkeypatch.setattr(triton.runtime.driver, "_active", self.driver)

    def __call__(self, launch: Callable[[], Any], *modules: ModuleType) -> Compiled:
        compiled: dict[str, list[Any]] = defaultdict(list)
        with self._monkeypatch.context() as patch:
            for module in modules:
                for name in [name for name in vars(module) if name.endswith("_kernel")]:
                    self._record(patch, module, name, compiled[name])
            launch()
        return Compiled({name: kernels for name, kernels in compiled.items() if kernels}, self._capsys.readouterr().out)

    def _record(self, patch: pytest.MonkeyPatch, module: ModuleType, name: str, compiled: list[Any]) -> None:
        kernel = getattr(module, name)
        # neither what was compiled before, nor left for a GPU of another kind
        patch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))

        def record(*arguments: Any, **options: Any) -> None:
            compiled.append(kernel.warmup(*arguments, grid=(1,), **options))

        patch.setattr(module, name, mock.MagicMock(__getitem__=lambda self, grid: record))
