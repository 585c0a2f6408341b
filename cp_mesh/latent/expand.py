"""A kernel on latent rows: a tile expands keys and values of the rows that it reads, some heads at a time.

A row of the latent c [R] and of the shared rotary keys p [P] gives each head h its key (Wk[h] c, p) [D] and its value
Wv[h] c [Dv]. Both are one product: (c, p) times a matrix [F, R + P] of the head with F = D + Dv, whose rows of p are
those of the identity. So keys and values lie side by side as the product wrote them, and no key is copied beside p. In
the backward their gradients are written side by side, [rows, heads · F]. One product with the same matrices gives the
gradient of (c, p), summed over heads, and one the gradient of the matrices. Keys and values are expanded again there.

For a method the latent is the key and p the value of a single kv head.

Source: multi-head latent attention, DeepSeek-V2, arXiv:2405.04434, equations 9 to 19.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.kernels.contract import KernelTile
from cp_mesh.kernels.merge import BoundBackward, BoundForward, Kernel, dense_rows
from cp_mesh.kernels.scores import ScoreGradients, Scores

EXPANDED_BYTES = 256 << 20  # of keys and values that a tile expands at a time


def matrices(up: Tensor, num_heads: int, head_dim: int, rope_dim: int) -> Tensor:
    """[H, F, R + P] from the up-projection [H · (D - P + Dv), R], whose rows are a head's keys, then its values."""
    rows, rank = up.shape
    nope, up = head_dim - rope_dim, up.view(num_heads, rows // num_heads, rank)
    whole = up.new_zeros(num_heads, rows // num_heads + rope_dim, rank + rope_dim)
    whole[:, :nope, :rank] = up[:, :nope]
    whole[:, nope:head_dim, rank:] = torch.eye(rope_dim, dtype=up.dtype, device=up.device)
    whole[:, head_dim:, :rank] = up[:, nope:]
    return whole


def of_matrices(grad: Tensor, head_dim: int, rope_dim: int) -> Tensor:
    """The gradient of the up-projection from that of its `matrices`."""
    grad = grad[..., : grad.shape[2] - rope_dim]
    return torch.cat([grad[:, : head_dim - rope_dim], grad[:, head_dim:]], dim=1).flatten(0, 1)


@dataclass(frozen=True, eq=False, kw_only=True)
class LatentScores(Scores):
    """The scores of a call, and what expands its keys; both are narrowed to heads alike.

    Attributes:
        up: [H, F, R + P], the `matrices`.
        of_up: [H, F, R + P] in the accumulation dtype, to which the tiles of a backward add the gradient of ``up``; or
            None.
        chunks: parts of the heads that a tile expands one after the other; 0: the fewest with at most `EXPANDED_BYTES`.
    """

    up: Tensor
    of_up: Tensor | None = None
    chunks: int = 0

    def heads(self, begin: int, end: int) -> LatentScores:
        of_up = None if self.of_up is None else self.of_up[begin:end]
        found = super().heads(begin, end)
        assert isinstance(found, LatentScores)
        return replace(found, up=self.up[begin:end], of_up=of_up)

    def parts(self, rows: Tensor) -> Iterator[tuple[slice, LatentScores]]:
        """Ranges of heads that are expanded together, for the rows [n, R + P] of a tile."""
        num, features = len(self.up), self.up.shape[1]
        at_once = heads_at_once(num, len(rows) * features * rows.itemsize, self.chunks)
        for begin in range(0, num, at_once):
            yield slice(begin, begin + at_once), self.heads(begin, begin + at_once)


def heads_at_once(num: int, of_head: int, chunks: int) -> int:
    """Of ``num`` heads with keys and values of ``of_head`` bytes in a tile, those that it expands together."""
    fewest = chunks or -(-num * of_head // EXPANDED_BYTES) or 1
    return num // next(n for n in range(min(fewest, num), num + 1) if num % n == 0)


def latent_kernel(kernel: Kernel) -> Kernel:
    """The kernel on keys [B, 1, n, R] and values [B, 1, n, P], the latent and the rotary keys; needs `LatentScores`."""
    bind = partial(_bind_forward, kernel), partial(_bind_backward, kernel)
    return replace(kernel, bind=bind, int64_offsets=True, rounds=False, reproducible=None)


def _rows_of(tile: KernelTile, latent: Tensor, rope: Tensor) -> Tensor:
    """The rows of a tile, [B · n, R + P]."""
    keys = slice(*tile.k)
    return torch.cat((latent[:, 0, keys], rope[:, 0, keys]), dim=-1).flatten(0, 1)


def _expand(rows: Tensor, up: Tensor, sizes: tuple[int, int], head_dim: int) -> list[Tensor]:
    """k [B, h, n, D] and v [B, h, n, Dv] of the heads of ``up`` [h, F, R + P], in memory [B, n, h, F]."""
    return dense_rows(*_split(rows @ up.flatten(0, 1).t(), up, sizes, head_dim))


def _split(x: Tensor, up: Tensor, sizes: tuple[int, int], head_dim: int) -> tuple[Tensor, Tensor]:
    """Views [B, h, n, D] and [B, h, n, Dv] of [B · n, h · F]; ``sizes`` are B and n."""
    x = x.view(*sizes, *up.shape[:2]).transpose(1, 2)
    return x[..., :head_dim], x[..., head_dim:]


def _bind_forward(kernel: Kernel, tile: KernelTile, q: Tensor, latent: Tensor, rope: Tensor, _: Scores) -> BoundForward:
    of_q, sizes, head_dim = slice(*tile.q), (q.shape[0], tile.k[1] - tile.k[0]), q.shape[3]
    inner, bound = KernelTile((0, tile.q[1] - tile.q[0]), (0, sizes[1]), tile.cover), list[BoundForward]()

    def run(q: Tensor, latent: Tensor, rope: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        def of_part(q: Tensor, part: LatentScores) -> tuple[Tensor, Tensor]:  # frees what it expanded
            k, v = _expand(rows, part.up, sizes, head_dim)
            if not bound:  # all parts have the same shapes and strides
                bound.append(kernel.bind_forward(inner, q, k, v, part))
            return bound[0](q, k, v, part)

        rows, q, scores = _rows_of(tile, latent, rope), q[:, :, of_q], scores.rows(*tile.q)
        assert isinstance(scores, LatentScores)
        outs, lses = zip(*(of_part(q[:, heads], part) for heads, part in scores.parts(rows)), strict=True)
        return (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs, 1), torch.cat(lses, 1))

    return run


def _bind_backward(
    kernel: Kernel, tile: KernelTile, dout: Tensor, q: Tensor, latent: Tensor, rope: Tensor, *_: Any
) -> BoundBackward:
    of_q, sizes, head_dim = slice(*tile.q), (q.shape[0], tile.k[1] - tile.k[0]), q.shape[3]
    inner, bound = KernelTile((0, tile.q[1] - tile.q[0]), (0, sizes[1]), tile.cover), list[BoundBackward]()

    def run(
        dout: Tensor, q: Tensor, latent: Tensor, rope: Tensor, out: Tensor | None, lse: Tensor, delta: Tensor | None,
        scores: Scores, *_: Any,
    ) -> Any:  # fmt: skip
        def of_part(heads: slice, part: LatentScores) -> Tensor:  # as in the forward
            own = [None if x is None else x[:, heads, of_q] for x in (dout, q, out, lse, delta)]
            k, v = _expand(rows, part.up, sizes, head_dim)
            grads = rows.new_empty(len(rows), part.up.shape[:2].numel())
            into = _split(grads, part.up, sizes, head_dim)
            given = own[0], own[1], k, v, own[2], own[3]
            if not bound:
                bound.append(kernel.bind_backward(inner, *given, part, *into))  # type: ignore[arg-type]
            dq, *of_keys = bound[0](*given, own[4], part, *into)
            for x, written in zip(of_keys, into, strict=False):
                if x is not written:
                    written.copy_(x)
            of_rows.add_(grads @ part.up.flatten(0, 1))
            if part.of_up is not None:
                part.of_up.add_((grads.t() @ rows).view_as(part.up))
            for of_terms in of_keys[2:] if scores.wanted else ():
                of_scores.part(heads=(heads.start, heads.stop)).add_(of_terms)
            return dq

        rows, scores, dtype = _rows_of(tile, latent, rope), scores.rows(*tile.q), accumulation_dtype(q.dtype)
        assert isinstance(scores, LatentScores)
        of_rows, of_scores = torch.zeros_like(rows, dtype=dtype), ScoreGradients.zeros(scores, dtype)
        dqs = [of_part(*of_heads) for of_heads in scores.parts(rows)]
        dq = dqs[0] if len(dqs) == 1 else torch.cat(dqs, 1)
        of_keys = of_rows.view(sizes[0], 1, sizes[1], rows.shape[1]).split((latent.shape[3], rope.shape[3]), -1)
        return dq, *of_keys, *((of_scores,) if scores.wanted else ())

    return run
