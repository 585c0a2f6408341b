"""PyTorch's own tests of learned biases, with `cp_mesh.flex_attention` in place of its compiled function.

    python tests/torch_biases.py PYTORCH/test/inductor/test_flex_attention.py [--own] [-k NAME]

The file comes from PyTorch's source, of the installed version or of another whose test runs with it; its
`TestLearnableBiases` runs on a GPU, with kernel="flex" on a mesh of one rank, and compares with PyTorch's uncompiled
function in the same dtype and in float64, as there. A bias that is read at two places, which PyTorch refuses, is
computed and compared too. ``--own`` runs them with PyTorch's compiled function, as they are.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import flex_attention as of_torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

from inside import room

from cp_mesh import Mask, flex_attention

flex_programs = room("programs")

REFUSED = "multiple indexing operations"


def pointed_at_ours(tests: type, mesh: DeviceMesh) -> type:
    """A class of tests in which torch.compile of flex_attention is ours."""
    compile_ = torch.compile

    def ours(query: Any, key: Any, value: Any, **options: Any) -> Any:
        return flex_attention(query, key, value, mesh=mesh, mask=Mask(causal=False), kernel="flex", **options)

    def compiled(call: Any, *args: Any, **options: Any) -> Any:
        return ours if call is of_torch.flex_attention else compile_(call, *args, **options)

    class Pointed(tests):  # type: ignore[misc]
        def run(self, result: Any = None) -> Any:
            alone = mock.patch.object(
                flex_programs, "one_rank_compiles", contextlib.nullcontext
            )  # not a rank of a host
            with mock.patch.object(torch, "compile", compiled), alone:
                return super().run(result)

        def assertRaisesRegex(self, error: Any, words: Any, *args: Any, **options: Any) -> Any:
            if REFUSED in str(words):
                return contextlib.nullcontext()
            return super().assertRaisesRegex(error, words, *args, **options)

    return Pointed


def main(file: str, *options: str) -> None:
    spec = importlib.util.spec_from_file_location("test_flex_attention", file)
    assert spec is not None and spec.loader is not None, f"{file} is no Python file"
    tests = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tests)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        tests.Pointed = pointed_at_ours(tests.TestLearnableBiases, init_device_mesh("cuda", (1,)))  # type: ignore[attr-defined]
        names = "TestLearnableBiases" if "--own" in options else "Pointed"
        unittest.main(tests, argv=[file, names, *(x for x in options if x != "--own")])


if __name__ == "__main__":
    main(*sys.argv[1:])
