"""Learned biases as PyTorch's tests of flex_attention have them, and some that it refuses, on two ranks, in float64.

`tests/torch_biases.py` runs PyTorch's own, on a GPU.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import gap
from checks import report
from flex_uses import integers, numbers
from ranks import mesh
from test_flex_kernel import on_the_cpu
from torch import Tensor
from torch.nn.attention import flex_attention as of_torch
from torch_biases import pointed_at_ours

from cp_mesh import Mask, ZigZag, flex_attention

B, H, S, D = 2, 4, 37, 6
OFFSET, WHICH = integers(S, S), torch.tensor(2)
BIASES: dict[str, tuple[list[tuple[int, ...]], Callable[..., Callable[..., Tensor]]]] = {
    "relative": ([(2 * S,)], lambda t: lambda s, b, h, i, j: s + t[(i - j).abs()]),
    "absolute": ([(S, S)], lambda t: lambda s, b, h, i, j: s + t[i, j]),
    "turned": ([(S, S)], lambda t: lambda s, b, h, i, j: s + t[j, i]),
    "of a head": ([(H, S, S)], lambda t: lambda s, b, h, i, j: s + t[h, i, j]),
    "of a batch row and head": ([(B, H, S, S)], lambda t: lambda s, b, h, i, j: s + t[b, h, i, j]),
    "a factor": ([(S,)], lambda t: lambda s, b, h, i, j: s * t[i]),
    "near ones": ([(17,)], lambda t: lambda s, b, h, i, j: s + t[torch.clamp(i - j + 8, 0, 16)]),
    "of keys": ([(S,)], lambda t: lambda s, b, h, i, j: s + t[j]),
    "one dim by a tensor": ([(B, H, 4, S)], lambda t: lambda s, b, h, i, j: s + t[b, h, WHICH, i]),
    "dims of one": ([(1, H, 1, S)], lambda t: lambda s, b, h, i, j: s + t[0, h, 0, j]),
    "through an offset": ([(S,)], lambda t: lambda s, b, h, i, j: s + t[OFFSET[i]]),
    "symmetric": ([(S,)], lambda t: lambda s, b, h, i, j: s + t[i] + t[j]),
    "a gate of heads": ([(H,)], lambda t: lambda s, b, h, i, j: s * torch.sigmoid(t[h])),
    "two": ([(S,), (S,)], lambda t, u: lambda s, b, h, i, j: s + t[i] + u[j]),
    "several": (
        [(S,), (S,), (H, 2 * S), ()], lambda t, u, w, x: lambda s, b, h, i, j: s * t[i] + u[j] * x + w[h, i - j] * t[j]
    ),
}  # fmt: skip


def drawn(name: str) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """q, k, v; what is learned; dout."""
    *qkv, dout = (numbers(B, H, S, D) * (i + 1) for i in range(4))
    return qkv, [numbers(*shape).requires_grad_() for shape in BIASES[name][0]], dout


def whole(name: str) -> list[Tensor]:
    """out, and gradients: the function of all pairs at once, by broadcasting."""
    (q, k, v), learned, dout = drawn(name)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    b, h, i, j = (torch.arange(n).view([-1 if d == dim else 1 for d in range(4)]) for dim, n in enumerate((B, H, S, S)))
    scores = BIASES[name][1](*learned)(q @ k.mT * D**-0.5, b, h, i, j)
    out = scores.softmax(-1) @ v
    return [out, *torch.autograd.grad(out, [*leaves, *learned], dout)]


def biases(rank: int, kernel: str) -> list[str]:
    problems, at = [], ZigZag().positions(S, 2, rank)
    options: dict[str, Any] = {"mesh": mesh((2,), ("cp",)), "seq_len": S, "mask": Mask(causal=False), "kernel": kernel}
    for name, (_, make) in BIASES.items():
        qkv, learned, dout = drawn(name)
        leaves = [x[:, :, at].requires_grad_() for x in qkv]
        want, *grads = whole(name)
        want = [x[:, :, at] for x in (want, *grads[:3])] + grads[3:]
        for alone in (False, True):
            inputs = learned if alone else [*leaves, *learned]
            local = [x.detach() for x in leaves] if alone else leaves
            with on_the_cpu():
                out = flex_attention(*local, make(*learned), **options)
                found = [*torch.autograd.grad(out, inputs, dout[:, :, at])]
            for share in found[-len(learned) :]:
                dist.all_reduce(share)
            off = [gap(x, y) for x, y in zip((out, *found), [want[0], *want[-len(inputs) :]], strict=True)]
            if not max(off) <= 1e-12:
                problems.append(f"rank {rank}: {name}{', alone' * alone}: {[f'{x:.1e}' for x in off]}")
    return problems


@pytest.mark.parametrize("kernel", ["flex", "reference"])
@pytest.mark.quick("reference")
def test_learned_biases(pool: Any, kernel: str) -> None:
    report(pool(2).run(biases, kernel))


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


def pointed(rank: int) -> tuple[int, list[str]]:
    tests = unittest.defaultTestLoader.loadTestsFromTestCase(pointed_at_ours(OfTorch, mesh((1,), ("cp",))))
    with on_the_cpu(), mock.patch.object(of_torch, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True):
        result = tests.run(unittest.TestResult())
    assert not result.errors, result.errors
    return result.testsRun, [test.id().rpartition(".")[2] for test, _ in result.failures]


def test_what_points_tests_of_pytorch_at_ours(pool: Any) -> None:
    """The compiled function is ours, and nothing else changes: a test that fails still does."""
    assert pool(1).run(pointed) == [(2, ["test_wrong"])]
