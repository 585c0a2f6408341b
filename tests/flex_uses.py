"""Functions of scores and masks as users write them, each said twice: on scalars, and on whole tensors by broadcasting;
and the calls of `flex_attention` that tests make with them.

B batch, H query heads, S tokens; i is a column of positions of queries, j a row of positions of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from cp_mesh import Mask

Tensors = dict[str, Tensor]
ALL = Mask(causal=False)


def numbers(*shape: int) -> Tensor:
    """Random in [-1, 1], the same for the same shape."""
    seed = sum((i + 1) * size for i, size in enumerate(shape))
    return 2 * torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) - 1


def integers(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(high + sum(shape)))


@dataclass(frozen=True)
class Use:
    """One function.

    Attributes:
        tensors: (B, H, S) -> what it captures, by name.
        make: tensors -> the function of scalars, `score_mod` or `mask_mod`.
        dense: of a score (scores [B, H, S, S], tensors, i, j) -> scores; of a mask (tensors, i, j) -> bool, broadcasts.
    """

    tensors: Callable[[int, int, int], Tensors]
    make: Callable[[Tensors], Callable[..., Tensor]]
    dense: Callable[..., Tensor]


def nothing(B: int, H: int, S: int) -> Tensors:
    return {}


def documents(length: Callable[[int], int]) -> Use:
    return Use(
        lambda B, H, S: {"ids": torch.arange(S) // length(S)},
        lambda t: lambda b, h, q, kv: (t["ids"][q] == t["ids"][kv]) & (q >= kv),
        lambda t, i, j: (t["ids"][:, None] == t["ids"]) & (i >= j),
    )


def _chain(t: Tensors) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        inner = torch.sin(score) * t["gain"][h]
        return torch.tanh(inner + t["shift"][h, q_idx % 3])

    return score_mod


SCORES: dict[str, Use] = {
    "none": Use(nothing, lambda t: None, lambda x, t, i, j: x),
    "ALiBi": Use(
        lambda B, H, S: {"slopes": numbers(H)},
        lambda t: lambda score, b, h, q, kv: score - t["slopes"][h] * (q - kv).abs(),
        lambda x, t, i, j: x - t["slopes"][:, None, None] * (i - j).abs(),
    ),
    "relative table": Use(
        lambda B, H, S: {"table": numbers(H, 2 * S - 1)},
        lambda t: lambda score, b, h, q, kv: score + t["table"][h, q - kv + t["table"].shape[1] // 2],
        lambda x, t, i, j: x + t["table"][:, i - j + len(i) - 1],
    ),
    "read from the end": Use(
        lambda B, H, S: {"table": numbers(H, 2 * S - 1)},
        lambda t: lambda score, b, h, q, kv: score + t["table"][h, q - kv],
        lambda x, t, i, j: x + t["table"][:, i - j],
    ),
    "tanh chain": Use(
        lambda B, H, S: {"gain": numbers(H), "shift": numbers(H, 3)},
        _chain,
        lambda x, t, i, j: torch.tanh(x.sin() * t["gain"][:, None, None] + t["shift"][:, i[:, 0] % 3, None]),
    ),
    "scale of a head": Use(
        lambda B, H, S: {"scale": 1 + numbers(H) / 2},
        lambda t: lambda score, b, h, q, kv: score * t["scale"][h],
        lambda x, t, i, j: x * t["scale"][:, None, None],
    ),
    "one temperature": Use(
        lambda B, H, S: {"temperature": 1.5 + numbers()},
        lambda t: lambda score, b, h, q, kv: score / t["temperature"],
        lambda x, t, i, j: x / t["temperature"],
    ),
    "pair bias": Use(
        lambda B, H, S: {"bias": numbers(B, H, S, S)},
        lambda t: lambda score, b, h, q, kv: score + t["bias"][b, h, q, kv],
        lambda x, t, i, j: x + t["bias"],
    ),
    "bias of documents": Use(
        lambda B, H, S: {"bias": numbers(4, 4), "ids": integers(4, B, S)},
        lambda t: lambda score, b, h, q, kv: score + t["bias"][t["ids"][b, q], t["ids"][b, kv]],
        lambda x, t, i, j: x + t["bias"][t["ids"][:, :, None], t["ids"][:, None]][:, None],
    ),
    "through an integer map": Use(
        lambda B, H, S: {"bias": numbers(S), "offset": integers(S, S)},
        lambda t: lambda score, b, h, q, kv: score * (1 + t["bias"][t["offset"][q]]),
        lambda x, t, i, j: x * (1 + t["bias"][t["offset"]][:, None]),
    ),
    "one tensor twice": Use(
        lambda B, H, S: {"x": numbers(S)},
        lambda t: lambda score, b, h, q, kv: score + t["x"][q] * t["x"][kv],
        lambda x, t, i, j: x + t["x"][:, None] * t["x"],
    ),
    "two through each other": Use(
        lambda B, H, S: {"a": numbers(5), "b": numbers(S, 2), "which": integers(5, S)},
        lambda t: (
            lambda score, b, h, q, kv: (
                score * t["a"][t["which"][kv]] + t["b"][q, 0] * t["a"][t["which"][q]] * t["b"][kv, 1]
            )
        ),
        lambda x, t, i, j: x * t["a"][t["which"]] + t["b"][:, :1] * t["a"][t["which"]][:, None] * t["b"][:, 1],
    ),
    "gate": Use(
        lambda B, H, S: {"gate": numbers(B, S)},
        lambda t: lambda score, b, h, q, kv: score + logsigmoid(t["gate"][b, kv] - t["gate"][b, q]),
        lambda x, t, i, j: x + logsigmoid(t["gate"][:, None] - t["gate"][:, :, None])[:, None],
    ),
    "pair bias of low rank": Use(
        lambda B, H, S: {"of_q": numbers(H, S, 3), "of_k": numbers(H, S, 3)},
        lambda t: lambda score, b, h, q, kv: score + (t["of_q"][h, q] * t["of_k"][h, kv]).sum(),
        lambda x, t, i, j: x + t["of_q"] @ t["of_k"].mT,
    ),
    "no number where a causal mask hides": Use(
        nothing,
        lambda t: lambda score, b, h, q, kv: score * (q - kv).double().sqrt(),
        lambda x, t, i, j: x * (i - j).clamp(0).double().sqrt(),
    ),
    "hides": Use(
        lambda B, H, S: {"x": numbers(S)},
        lambda t: lambda score, b, h, q, kv: torch.where((q - kv) % 4 == 3, -float("inf"), score + t["x"][kv]),
        lambda x, t, i, j: (x + t["x"]).masked_fill((i - j) % 4 == 3, -torch.inf),
    ),
}


MASKS: dict[str, Use] = {
    "none": Use(nothing, lambda t: None, lambda t, i, j: (i == i) & (j == j)),
    "causal": Use(nothing, lambda t: lambda b, h, q, kv: q >= kv, lambda t, i, j: i >= j),
    "causal or of one image": Use(
        lambda B, H, S: {"image": integers(4, B, S).sort(1).values - 1},
        lambda t: lambda b, h, q, kv: (q >= kv) | ((t["image"][b, q] == t["image"][b, kv]) & (t["image"][b, q] >= 0)),
        lambda t, i, j: (
            (i >= j) | ((t["image"][:, :, None] == t["image"][:, None]) & (t["image"][:, :, None] >= 0))[:, None]
        ),
    ),
    "prefix": Use(
        lambda B, H, S: {"prefix": 2 + integers(4, B)},
        lambda t: lambda b, h, q, kv: (kv < t["prefix"][b]) | (q >= kv),
        lambda t, i, j: (j < t["prefix"][:, None, None, None]) | (i >= j),
    ),
    "dilated": Use(
        nothing,
        lambda t: lambda b, h, q, kv: (q >= kv) & ((q - kv) % 3 == 0),
        lambda t, i, j: (i >= j) & ((i - j) % 3 == 0),
    ),
    "neighborhood": Use(
        nothing,
        lambda t: lambda b, h, q, kv: ((q // 5 - kv // 5).abs() <= 1) & ((q % 5 - kv % 5).abs() <= 1),
        lambda t, i, j: ((i // 5 - j // 5).abs() <= 1) & ((i % 5 - j % 5).abs() <= 1),
    ),
    "documents": Use(
        lambda B, H, S: {"ids": integers(3, B, S)},
        lambda t: lambda b, h, q, kv: (t["ids"][b, q] == t["ids"][b, kv]) & (q >= kv),
        lambda t, i, j: (t["ids"][:, :, None] == t["ids"][:, None])[:, None] & (i >= j),
    ),
    "windows of heads": Use(
        lambda B, H, S: {"window": 1 + 2 * torch.arange(H)},
        lambda t: lambda b, h, q, kv: (q - kv).abs() < t["window"][h],
        lambda t, i, j: (i - j).abs() < t["window"][:, None, None],
    ),
    "some queries without keys": Use(
        lambda B, H, S: {"keep": integers(3, S) > 0},
        lambda t: lambda b, h, q, kv: t["keep"][q] & (kv != q),
        lambda t, i, j: t["keep"][:, None] & (i != j),
    ),
}


PARTS: dict[str, Use] = {
    "short documents": documents(lambda S: 3),
    "long documents": documents(lambda S: max(1, S // 2)),
    "documents of rows": Use(
        lambda B, H, S: {"ids": (torch.arange(S) + 2 * torch.arange(B)[:, None]) // max(1, S // 3)},
        lambda t: lambda b, h, q, kv: t["ids"][b, q] == t["ids"][b, kv],
        lambda t, i, j: (t["ids"][:, :, None] == t["ids"][:, None])[:, None],
    ),
    "the other half": Use(
        lambda B, H, S: {"half": torch.tensor(S // 2)},
        lambda t: lambda b, h, q, kv: (q < t["half"]) != (kv < t["half"]),
        lambda t, i, j: (i < t["half"]) != (j < t["half"]),
    ),
    "later ones": Use(
        lambda B, H, S: {"half": torch.tensor(S // 2)},
        lambda t: lambda b, h, q, kv: kv > q + t["half"],
        lambda t, i, j: j > i + t["half"],
    ),
    "nothing": Use(nothing, lambda t: lambda b, h, q, kv: (q < 0) & (kv < 0), lambda t, i, j: (i < 0) & (j < 0)),
}
"""Masks that hide the keys of whole ranks."""


@dataclass(frozen=True)
class Case:
    """A call of `flex_attention`, by names.

    ``of``: who makes its mask: "", "torch", or "sequence", by which less is fetched. ``beside``: its `mask`.
    """

    layout: str
    method: str = "ring"
    score: str = "none"
    mask: str = "none"
    S: int = 21
    of: str = ""
    seq_dim: int = 2
    beside: Mask = ALL
    sharded: bool = False  # q, k and v are DTensors
    options: dict[str, Any] = field(default_factory=dict)


def leaves_of(tensors: Tensors) -> Tensors:
    return {name: x.detach().clone().requires_grad_(x.is_floating_point()) for name, x in tensors.items()}


def graded(tensors: Tensors) -> Tensors:
    return {name: x for name, x in tensors.items() if x.requires_grad}


def expected(
    qkv: Sequence[Tensor],
    dout: Tensor,
    dlse: Tensor | None,
    score: str,
    mask: str,
    scale: Any = None,
    beside: Any = None,
) -> Tensors:
    """out, lse, dq, dk, dv of the whole sequence, and d with the name of each tensor that the score captures."""
    B, H, S = qkv[0].shape[:3]
    leaves, t = [x.detach().clone().requires_grad_() for x in qkv], leaves_of(SCORES[score].tensors(B, H, S))
    out, lse = dense(*leaves, score, mask, t, mask_of(mask).tensors(B, H, S), scale, beside)
    given = torch.zeros_like(lse) if dlse is None else dlse
    found = torch.autograd.grad((out, lse), [*leaves, *graded(t).values()], (dout, given), materialize_grads=True)
    names = ("out", "lse", "dq", "dk", "dv", *(f"d{name}" for name in graded(t)))
    return dict(zip(names, (out.detach(), lse.detach(), *found), strict=True))


def mask_of(name: str) -> Use:
    return MASKS[name] if name in MASKS else PARTS[name]


def dense(
    q: Tensor, k: Tensor, v: Tensor, score: str, mask: str, of_score: Tensors, of_mask: Tensors, scale: Any = None,
    beside: Mask | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out [B, H, S, E] and lse [B, H, S] of a whole sequence by broadcasting; differentiable.

    Products are of the dtype of q; scores are float64 for float64, else float32.
    """
    x = _scores(q, k, score, mask, of_score, of_mask, scale)
    if beside is not None:
        x = x.masked_fill(~beside.allowed(*[torch.arange(q.shape[2], device=q.device)] * 2)[:, None], -torch.inf)
    alone = (x == -torch.inf).all(-1)
    lse = torch.logsumexp(x.masked_fill(alone[..., None], 0.0), -1)
    weights = (x - lse[..., None]).exp().masked_fill(alone[..., None], 0.0)
    return weights.to(v.dtype) @ v.repeat_interleave(q.shape[1] // k.shape[1], 1), lse.masked_fill(alone, -torch.inf)


def as_kernels(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, score: str, mask: str, of_score: Tensors, of_mask: Tensors
) -> list[Tensor]:
    """out, lse, dq, dk, dv and gradients of floating point tensors of the score, by plain products of the dtype of q.

    As kernels do, and autograd does not: gradients of scores from lse and from the out that was rounded.
    """
    learned, (q, k) = [x for x in of_score.values() if x.is_floating_point()], (y.detach() for y in (q, k))
    with torch.no_grad():
        out, lse = dense(q, k, v, score, mask, of_score, of_mask)
    leaves = [x.requires_grad_() for x in (q, k, *learned)]
    x = _scores(q, k, score, mask, of_score, of_mask)
    repeated = v.repeat_interleave(q.shape[1] // k.shape[1], 1)
    weights = (x.detach() - lse[..., None]).exp().nan_to_num(0.0)  # of a row without keys
    delta = (dout.to(x.dtype) * out).sum(-1, keepdim=True)
    dx = weights * ((dout @ repeated.mT).to(x.dtype) - delta)
    dv = (weights.to(v.dtype).mT @ dout).unflatten(1, (k.shape[1], -1)).sum(2)
    dq, dk, *found = torch.autograd.grad(x, leaves, dx)
    return [out, lse, dq, dk, dv, *found]


def _scores(
    q: Tensor, k: Tensor, score: str, mask: str, of_score: Tensors, of_mask: Tensors, scale: Any = None
) -> Tensor:
    i, j = (torch.arange(q.shape[2], device=q.device).view(shape) for shape in ((-1, 1), (1, -1)))
    products = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    products = products.to(torch.promote_types(q.dtype, torch.float32))
    x = SCORES[score].dense(products * (q.shape[-1] ** -0.5 if scale is None else scale), of_score, i, j)
    return x.masked_fill(~mask_of(mask).dense(of_mask, i, j), -torch.inf)
