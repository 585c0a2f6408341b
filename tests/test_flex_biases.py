"""What runs PyTorch's tests of learned biases on our function; `tests/torch_biases.py` does so, on a GPU."""

from __future__ import annotations

import unittest
from typing import Any
from unittest import mock

import torch
from cases import gap
from flex_uses import numbers
from ranks import on_ranks
from test_flex_kernel import on_the_cpu
from torch.nn.attention import flex_attention as of_torch
from torch_biases import pointed_at_ours

B, H, D = 2, 4, 6


class OfTorch(unittest.TestCase):
    """As PyTorch's."""

    __test__ = False  # of pytest

    def test_bias(self) -> None:
        q, bias = numbers(B, H, 8, D), numbers(8, 8)
        call, score_mod = torch.compile(of_torch.flex_attention), lambda s, b, h, i, j: s + bias[i, j]
        self.assertLessEqual(
            gap(call(q, q, q, score_mod=score_mod), of_torch.flex_attention(q, q, q, score_mod)), 1e-12
        )
        self.assertIsNot(torch.compile(gap, backend="eager"), call)
        with self.assertRaisesRegex(RuntimeError, "Using multiple indexing operations on the same tensor"):
            pass
        with self.assertRaises(AssertionError), self.assertRaisesRegex(RuntimeError, "another"):
            pass

    def test_wrong(self) -> None:
        call = torch.compile(of_torch.flex_attention)
        self.assertEqual(call.__module__, of_torch.__name__)


@on_ranks(1)
def test_what_points_tests_of_pytorch_at_ours(axis: Any) -> None:
    """The compiled function is ours, and nothing else changes: a test that fails still does."""
    tests = unittest.defaultTestLoader.loadTestsFromTestCase(pointed_at_ours(OfTorch, axis))
    with on_the_cpu(), mock.patch.object(of_torch, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True):
        result = tests.run(unittest.TestResult())
    assert not result.errors, result.errors
    assert result.testsRun == 2 and [test.id().rpartition(".")[2] for test, _ in result.failures] == ["test_wrong"]
