"""Tables that the gates share: every layout, every kind of mask, and how results are compared.

A new layout is added to `LAYOUTS` and a new condition of the mask to `MASKS`; all gates then cover it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from dense import dense_mask
from torch import Tensor

from cp_mesh import Contiguous, Layout, Mask, Striped, ZigZag, balance
from cp_mesh.geometry import Joint, Permuted, ZigZagDocuments

LAYOUTS: dict[str, Callable[[int], Layout]] = {
    "contiguous": lambda S: Contiguous(),
    "zigzag": lambda S: ZigZag(),
    "striped": lambda S: Striped(),
    "shuffled": lambda S: Permuted(torch.randperm(S, generator=torch.Generator().manual_seed(S))),
    "balanced": lambda S: balance(Mask(documents=_ids(2, S)), S, 3),
    "zigzag documents": lambda S: ZigZagDocuments(edges_of(_ids(1, S)[0])),
    "joint": lambda S: _joint(S // 5, S // 3, S - S // 5 - S // 3),
    "reversed": lambda S: Permuted(range(S - 1, -1, -1)),
}


def _ids(B: int, S: int, ordered: bool = True) -> Tensor:
    """Document ids [B, S], unlike in every batch row: runs of equal ids, or ids that recur here and there."""
    ids = torch.randint(0, 4, (B, S), generator=torch.Generator().manual_seed(S))
    return ids.sort(dim=1).values if ordered else ids


def edges_of(ids: Tensor) -> Tensor:
    """Cumulative lengths [num_docs + 1] of documents with these ids [S]."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(ids).cumsum(0)])


def _joint(first: int, second: int, third: int) -> Joint:
    """Streams in the layouts that are runs of stride 1, one of them told by a tensor."""
    return Joint(first, (second, ZigZag()), (third, ZigZagDocuments([0, third // 2, third])))


def _excluded(B: int, S: int) -> Tensor:
    """As `_ids`, with tokens of no document at the begin, between documents and at the end."""
    ids, at = _ids(B, S) * 2, torch.arange(S)
    ids += at > S // 2  # of a document that is parted, two
    ids[:, (at == S // 2) | (at < 2) | (at >= S - S // 5)] = -1
    return ids.where(ids != 4, -7)


def _keep(B: int, S: int) -> Tensor:
    """Key padding [B, S]; the first keys of row 0 are dropped, so that causal queries are left without keys."""
    keep = torch.rand(B, S, generator=torch.Generator().manual_seed(S)) > 0.3
    keep[0, :2] = False
    return keep


def _images(B: int, S: int) -> Tensor:
    """Ids of blocks [B, S], unlike in every batch row: images of 7 tokens between texts of 4, one of them in two."""
    at = torch.arange(S) + torch.arange(B)[:, None]
    ids = torch.where(at % 11 > 3, at // 11, -1)
    return ids.where((at // 11 != 1) | (at % 11 < 8), 90)


MASKS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "causal": lambda B, S: {},
    "full": lambda B, S: {"causal": False},
    "window": lambda B, S: {"window": (5, None)},
    "window of one token": lambda B, S: {"window": (0, 0)},
    "window wider than the sequence": lambda B, S: {"window": (S + 3, 0)},
    "two-sided window": lambda B, S: {"causal": False, "window": (3, 2)},
    "window ahead": lambda B, S: {"causal": False, "window": (None, 2)},
    "window behind": lambda B, S: {"causal": False, "window": (4, None)},
    "prefix": lambda B, S: {"prefix": 4},
    "prefix and window": lambda B, S: {"prefix": 4, "window": (6, 1)},
    "prefix longer than the sequence": lambda B, S: {"prefix": S + 2},
    "length": lambda B, S: {"causal": False, "length": max(0, S - 3)},
    "causal and length": lambda B, S: {"length": max(0, S - 3)},
    "length, prefix and window": lambda B, S: {"prefix": 3, "length": max(0, S - 2), "window": (4, None)},
    "no key at all": lambda B, S: {"length": 0},
    "documents": lambda B, S: {"documents": _ids(B, S)},
    "documents shared by the batch": lambda B, S: {"documents": _ids(1, S).int(), "causal": False},
    "excluded tokens": lambda B, S: {"documents": _excluded(B, S)},
    "scattered documents": lambda B, S: {"documents": _ids(B, S, ordered=False), "window": (7, None)},
    "key padding": lambda B, S: {"key_padding": _keep(B, S)},
    "key padding, both ways": lambda B, S: {"key_padding": _keep(B, S), "causal": False},
    "blocks": lambda B, S: {"blocks": _images(B, S)},
    "blocks, a window and documents": lambda B, S: {
        "blocks": _images(B, S).int(), "window": (5, None), "documents": torch.arange(S).expand(B, S) // 9,
    },
    "everything": lambda B, S: {
        "window": (6, 2), "prefix": 3, "length": max(0, S - 1), "documents": _ids(B, S), "key_padding": _keep(B, S),
        "blocks": _images(B, S),
    },
}  # fmt: skip


def _numbers(seed: int, S: int, *shape: int) -> Tensor:
    """Random, unlike in every head and length."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * S + seed), dtype=torch.float64)


SCORES: dict[str, Callable[[int, int, int], dict[str, Any]]] = {
    "plain": lambda B, H, S: {},
    "softcap": lambda B, H, S: {"softcap": 1.5},
    "sinks": lambda B, H, S: {"sinks": _numbers(H, S, H) - 1},
    # exp of these is 0 or infinite even in float64
    "sinks far above and below": lambda B, H, S: {"sinks": torch.tensor([800.0, -800.0, 0.0] * H).double()[:H]},
    "softcap and sinks": lambda B, H, S: {"softcap": 0.7, "sinks": _numbers(H, S, H)},
    "alibi": lambda B, H, S: {"alibi_slopes": _numbers(H, S, H).abs() / 4},
    "bias": lambda B, H, S: {"bias": _numbers(H, S, B, H, S, S)},
    "bias of all heads": lambda B, H, S: {"bias": _numbers(H, S, B, 1, S, S)},
    "bias of all rows": lambda B, H, S: {"bias": _numbers(H, S, 1, H, 1, S)},
    "softcap and alibi": lambda B, H, S: {"softcap": 0.7, "alibi_slopes": _numbers(H, S, H)},
    "dropout": lambda B, H, S: {"dropout_p": 0.3, "dropout_seed": 2**40 + 12345},
    "dropout, a seed and an offset": lambda B, H, S: {"dropout_p": 0.5, "dropout_seed": torch.tensor([7, 2**32 - 1])},
    "dropout, sinks and alibi": lambda B, H, S: {
        "dropout_p": 0.2,
        "dropout_seed": S,
        "sinks": _numbers(H, S, H),
        "alibi_slopes": _numbers(1, S, H) / 4,
    },
    "every score": lambda B, H, S: {
        "softcap": 0.7,
        "sinks": _numbers(H, S, H),
        "alibi_slopes": _numbers(1, S, H) / 4,
        "bias": _numbers(3, S, B, H, S, S),
    },
}
"""Options of the scores: of batch size, query heads and length; tensors are those of the whole sequence."""
BANDS = ("causal", "full")
"""Masks whose tiles are full or causal, whatever the layout of runs: those that every kernel takes."""


def make_scores(scores: str | dict[str, Any], B: int, H: int, S: int) -> dict[str, Any]:
    """Options of the scores by name, or given one by one: a tuple then stands for a random tensor of that shape."""
    if isinstance(scores, str):
        return SCORES[scores](B, H, S)
    given = enumerate(scores.items())
    return {name: _numbers(i, S, *x) if isinstance(x, tuple) else x for i, (name, x) in given}


def make_mask(name: str, B: int, S: int) -> Mask:
    return Mask(**MASKS[name](B, S))


@cache
def pairs(name: str, B: int, S: int) -> Tensor:
    """What the mask of that name must allow: bool [B or 1, S, S], from the oracle."""
    return dense_mask(S, **MASKS[name](B, S))


def mask_of(options: dict[str, Any]) -> Mask:
    """The mask of these options; of cumulative lengths "cu_seqlens" by `Mask.from_cu_seqlens`."""
    others = {name: x for name, x in options.items() if name != "cu_seqlens"}
    return Mask(**others) if others == options else Mask.from_cu_seqlens(options["cu_seqlens"], **others)


def pairs_of(options: dict[str, Any], S: int) -> Tensor:
    """What a mask of these options must allow; its tensors may differ in being shared by the batch."""
    if "cu_seqlens" in options:
        lens = options["cu_seqlens"].diff().tolist()
        options = {name: x for name, x in options.items() if name != "cu_seqlens"}
        options["documents"] = torch.tensor([i for i, length in enumerate(lens) for _ in range(length)])
    tensors = {name: torch.atleast_2d(x) for name, x in options.items() if isinstance(x, Tensor)}
    B = max((len(x) for x in tensors.values()), default=1)
    return dense_mask(S, **options | {name: x.expand(B, S) for name, x in tensors.items()})


def gap(got: Tensor, want: Tensor) -> float:
    """Largest absolute difference; infinite for another shape, a NaN, or infinities that differ."""
    if got.shape != want.shape:
        return math.inf
    got, want = got.detach().double(), want.detach().double()
    difference = (got - want).abs().masked_fill(got == want, 0.0).nan_to_num(nan=math.inf)
    return difference.max().item() if difference.numel() else 0.0
