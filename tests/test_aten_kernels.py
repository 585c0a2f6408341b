"""Adapters of PyTorch's CUDA kernels, on the CPU, where stand-ins follow the convention of their operators."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import torch
from inside import FULL, BackwardTile, Scores, room

aten = room("aten")


def test_a_key_alone_goes_to_flash_attention():
    """cuDNN takes tiles of two keys and more."""
    asked = []

    def passes(name):
        def one(*given, **_):
            asked.append((name, given[1].shape[2] if len(given) < 10 else given[2].shape[2]))
            return (given[0], given[0].new_zeros(given[0].shape[:3])) if len(given) < 10 else given[1:4]

        return SimpleNamespace(forward=one, backward=one)

    x = torch.zeros(1, 1, 3, 8)
    for keys, name in ((1, "flash"), (2, "cudnn")):
        k, lse = x[:, :, :keys], x[..., 0]
        with mock.patch.multiple(aten, flash=passes("flash"), cudnn=passes("cudnn")):
            aten._cudnn_forward(x, k, k, FULL, Scores(1.0))
            aten._cudnn_backward(BackwardTile(x, x, k, k, x, lse, None, FULL, Scores(1.0)))
        assert asked == [(name, keys)] * 2
        asked.clear()
