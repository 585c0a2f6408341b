"""What the caller writes to its tensors between a forward and its backward: it changes nothing, or it raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import gap
from dense import make_qkv
from ranks import mesh, on_ranks
from torch import Tensor

from cp_mesh import Mask, ZigZag, attention, balance
from cp_mesh.geometry import Balanced, Permuted, ZigZagDocuments

B, H, K, S, D = 1, 2, 1, 16, 4
FIRST, NEXT = np.repeat(np.arange(4), 4), np.repeat(np.arange(2), 8)  # documents of a batch and of the next one
KEEP, KEEP_NEXT = np.arange(S) % 5 != 2, np.arange(S) % 3 != 1
ORDER, ORDER_NEXT = np.arange(S)[::-1].copy(), np.roll(np.arange(S), 5)
RUNS, RUNS_NEXT = np.array([[8, 8], [0, 8]]), np.array([[0, 4], [12, 4], [4, 8]])

MADE_OF: dict[str, tuple[np.ndarray, np.ndarray, Callable[[Tensor], dict[str, Any]]]] = {
    "documents": (FIRST, NEXT, lambda x: {"mask": Mask(documents=x)}),
    "documents, balanced": (FIRST, NEXT, lambda x: {"mask": Mask(documents=x), "layout": balanced()}),
    "cu_seqlens": (np.array([0, 4, 9, S]), np.array([0, 8, 8, S]), lambda x: {"mask": Mask.from_cu_seqlens(x)}),
    "key_padding": (KEEP, KEEP_NEXT, lambda x: {"mask": Mask(key_padding=x)}),
    "blocks": (FIRST, NEXT, lambda x: {"mask": Mask(blocks=x)}),
    "index of a layout": (ORDER, ORDER_NEXT, lambda x: {"layout": Permuted(x)}),
    "runs of a layout": (RUNS, RUNS_NEXT, lambda x: {"layout": Balanced(x)}),
    "documents of a layout": (np.array([0, 4, S]), np.array([0, 8, S]), lambda x: {"layout": ZigZagDocuments(x)}),
}


def balanced() -> Balanced:
    return balance(Mask(documents=torch.from_numpy(FIRST.copy())), S, 2)


def step(rank: int, name: str, how: str) -> list[Tensor]:
    """Out and gradients of a step whose tensor is overwritten after the forward."""
    content, later, make = MADE_OF[name]
    buffer = content.copy()
    tensor = torch.from_numpy(buffer)
    options = make(tensor)
    rows = options.get("layout", ZigZag()).positions(S, 2, rank)
    q, k, v, dout = (x[:, :, rows] for x in make_qkv(B, H, K, S, D))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, mesh=mesh((2,), ("cp",)), **options)
    if how == "by NumPy":
        buffer.flat[: later.size] = later.flat[: buffer.size]
    elif how == "by torch":
        tensor.flatten()[: later.size] = torch.from_numpy(later).flatten()[: tensor.numel()]
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("name", MADE_OF)
@on_ranks(2)
def test_the_backward_is_that_of_the_forwards_mask(rank: int, name: str) -> None:
    plain, *others = (step(rank, name, how) for how in ("not at all", "by NumPy", "by torch"))
    for other in others:
        assert max(map(gap, plain, other)) <= 1e-12


@pytest.mark.parametrize("name", ["documents", "key_padding", "blocks"])
def test_a_mask_owns_its_tensors(name: str) -> None:
    content, later, _ = MADE_OF[name]
    buffer = content.copy()
    mask = Mask(**{name: torch.from_numpy(buffer)})
    buffer[:] = later
    assert np.array_equal(getattr(mask, name), content)
    moved = mask.to(torch.device("cpu"))  # which copies nothing that is there
    assert getattr(moved, name).data_ptr() == getattr(mask, name).data_ptr()


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes", "bias", "dropout_seed"])
@on_ranks(2)
def test_scores_written_in_place_are_refused(rank: int, axis: Any, name: str) -> None:
    """As of every op's inputs."""
    rows = ZigZag().positions(S, 2, rank)
    q, k, v, dout = (x[:, :, rows] for x in make_qkv(B, H, K, S, D))
    made = {"sinks": torch.zeros(H), "alibi_slopes": torch.ones(H)}
    made |= {"bias": torch.zeros(1, 1, 1, S), "dropout_seed": torch.tensor([3])}
    x = made[name].double() if name != "dropout_seed" else made[name]
    options = {name: x} | ({"dropout_p": 0.5} if name == "dropout_seed" else {})
    leaves = [y.clone().requires_grad_() for y in (q, k, v)]
    out = attention(*leaves, mesh=axis, **options)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, leaves, dout)
