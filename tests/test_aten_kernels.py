"""Adapters of PyTorch's CUDA kernels, on the CPU, where stand-ins follow the convention of their operators.

Memory-efficient attention has no grouped-query attention: keys and values come to it repeated, and gradients of each
query head go back. Its lse is float32, padded to a multiple of 32 rows. test_kernels_gpu.py asks the operator itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from cases import gap
from checks import GQA, MHA, MQA
from dense import dense_attention, dense_mask, make_qkv
from inside import CAUSAL, FULL, KERNELS, BackwardTile, Scores, room
from test_flash_attn import Tile, ask
from test_kernels_gpu import play_ring
from torch import Tensor

from cp_mesh import Contiguous, Mask, Striped, ZigZag

aten = room("aten")

HEADS = {"MHA": MHA, "GQA": GQA, "MQA": MQA}
TOLERANCE = 64 * torch.finfo(torch.float32).eps  # the kernel takes float32 only; the stand-in rounds once


def pairs_of(num_q: int, num_k: int, is_causal: bool) -> Tensor:
    """bool [1, num_q, num_k]; causal from the upper left, as the operator has it."""
    allowed = torch.ones(1, num_q, num_k, dtype=torch.bool)
    return allowed.tril() if is_causal else allowed


def forward(query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    assert query.shape[:2] == key.shape[:2] == value.shape[:2], "as many heads of keys as of queries"
    assert attn_bias is None and compute_log_sumexp and dropout_p == 0.0
    out, lse = dense_attention(query, key, value, pairs_of(query.shape[2], key.shape[2], is_causal), scale)
    padded = torch.full((*query.shape[:2], -(-query.shape[2] // 32) * 32), math.nan, dtype=torch.float32)
    padded[:, :, : query.shape[2]] = lse
    return out.to(query.dtype), padded, None, None


def backward(
    grad_out, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset, dropout_p, grad_input_mask,
    is_causal=False, *, scale=None,
):  # fmt: skip
    """From the out and lse that it is given, which may be those of more keys than these."""
    assert query.shape[:2] == key.shape[:2] == value.shape[:2], "as many heads of keys as of queries"
    assert attn_bias is None and dropout_p == 0.0 and grad_input_mask == [True, True, True, False]
    num_q = query.shape[2]
    assert logsumexp.dtype == torch.float32 and logsumexp.shape == (*query.shape[:2], -(-num_q // 32) * 32)
    assert (logsumexp[:, :, num_q:] == math.inf).all(), "rows past the end have no weights"
    dout, q, k, v, out, lse = (x.double() for x in (grad_out, query, key, value, out, logsumexp[:, :, :num_q]))
    scores = (scale * q @ k.mT).masked_fill(~pairs_of(num_q, k.shape[2], is_causal), -math.inf)
    probs = torch.exp(scores - lse[..., None])
    dscores = scale * probs * (dout @ v.mT - (dout * out).sum(-1, keepdim=True))
    return *(x.to(query.dtype) for x in (dscores @ k, dscores.mT @ q, probs.mT @ dout)), None


@contextmanager
def stand_in() -> Iterator[None]:
    """The operators of memory-efficient attention, on the CPU."""
    with mock.patch.object(aten, "efficient", SimpleNamespace(forward=forward, backward=backward)):
        yield


@pytest.mark.parametrize("cover", (FULL, CAUSAL), ids=("full", "causal"))
@pytest.mark.parametrize("heads", HEADS)
def test_a_tile(heads, cover):
    """Of a multiple of 32 rows, and of others; its dk and dv are float32 sums over the heads of a group."""
    for num_q, num_k in ((32, 32), (7, 7), (33, 33)) if cover == CAUSAL else ((32, 5), (7, 40)):
        tile = Tile(cover, num_q, num_k, *HEADS[heads], 8, 8)
        with stand_in():
            got, want = ask(aten._efficient_forward, aten._efficient_backward, tile, torch.float32)
        for name, x in want.items():
            assert got[name].dtype == torch.float32 and gap(got[name], x) <= TOLERANCE * x.abs().max(), name


@pytest.mark.parametrize("heads", HEADS)
def test_a_ring(heads):
    """Heads keep their places through all passes of a ring."""
    q, k, v, dout = (x.float() for x in make_qkv(2, *HEADS[heads], 26, 8))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = dense_attention(*leaves, dense_mask(26))
    want = [out, lse, *torch.autograd.grad(out, leaves, dout.double())]
    for layout in (Contiguous(), ZigZag(), Striped()):
        with stand_in():
            got = play_ring(KERNELS["efficient"], layout, Mask(), 3, q, k, v, dout)
        for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
            assert gap(a, b) <= TOLERANCE * b.abs().max(), (layout, name)


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
