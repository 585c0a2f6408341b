"""Tiles of large tensors, computed a few heads at a time: the results of all heads at once; tried with small limits."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from dense import make_qkv
from inside import (
    KERNELS,
    BackwardTile,
    KernelTile,
    Pairs,
    Scores,
    inner,
    make_delta,
    name_of_captured,
    room,
    trace,
)
from torch import Tensor

from cp_mesh import Mask, UnsupportedError

few_heads = room("few_heads")
reference = room("kernels.reference")
ScoreGradients = inner("scores", "ScoreGradients")

B, S, D = 2, 6, 4
CASES = [(name, (S, 3)) for name in ("softcap", "slopes", "bias", "bias of all heads", "dropout", "function")]
CASES += [("plain", shape) for shape in ((S, 3), (4, 3), (9, 3), (S, 7))]  # numbers of keys, and head dims of v
HEADS = [(6, 3), (8, 2), (4, 1), (3, 3)]


def scores_of(name: str, H: int, keys: int) -> Scores:
    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)

    of_heads = drawn(H)
    score_mod, captured = trace("score_mod", lambda score, b, h, i, j: score * of_heads[h] + b, drawn(B, H, S, D))
    return {
        "plain": Scores(0.3),
        "softcap": Scores(0.3, softcap=2.0),
        "slopes": Scores(0.3, alibi_slopes=drawn(H), wanted=frozenset({"alibi_slopes"})),
        "bias": Scores(0.3, bias=drawn(B, H, S, keys), wanted=frozenset({"bias"})),
        "bias of all heads": Scores(0.3, bias=drawn(1, 1, S, keys), wanted=frozenset({"bias"})),
        "dropout": Scores(0.3, dropout_p=0.4, dropout_seed=torch.tensor([11, 3])),
        "function": Scores(0.3, score_mod=score_mod, captured=captured, wanted=frozenset({name_of_captured(0)})),
    }[name]


def by_heads(forward: Any, backward: Any) -> tuple[Any, Any]:
    """The tile functions of a kernel that takes these, for tiles of all rows."""
    kernel = replace(reference.REFERENCE, forward=forward, backward=backward, int64_offsets=False)

    def tile_of(q: Tensor, k: Tensor, cover: Any) -> KernelTile:
        return KernelTile((0, q.shape[2]), (0, k.shape[2]), cover)

    def forward_too(q: Tensor, k: Tensor, v: Tensor, cover: Any, scores: Scores) -> Any:
        return kernel.bind_forward(tile_of(q, k, cover), q, k, v, scores)(q, k, v, scores)

    def backward_too(t: BackwardTile) -> Any:
        dout, q, k, v, out, lse, delta, cover, scores, dk, dv = t
        run = kernel.bind_backward(tile_of(q, k, cover), dout, q, k, v, out, lse, scores, dk, dv)
        return run(dout, q, k, v, out, lse, delta, scores, dk, dv)

    return forward_too, backward_too


def both_passes(
    forward: Any, backward: Any, heads: tuple[int, int], shape: tuple[int, int], scores: Scores
) -> list[Tensor]:
    """out, lse, dq, dk, dv and gradients of scores; of q and dout in [B, S, H, D] order."""
    num_k, v_dim = shape
    q, *_, dout = make_qkv(B, *heads, S, D, v_dim, seed=1)
    _, k, v, _ = make_qkv(B, *heads, num_k, D, v_dim, seed=2)
    q, dout = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, dout))
    cover = Pairs(Mask(), torch.arange(S) + max(0, num_k - S), torch.arange(num_k))
    out, lse = forward(q, k, v, cover, scores)
    tile = BackwardTile(dout, q, k, v, out, lse, make_delta(dout, out), cover, scores, k.clone(), v.clone())
    *grads, of_scores = backward(tile)
    assert out.transpose(1, 2).is_contiguous() or forward is reference._forward  # in q's order
    return [out, lse, *grads, *(of_scores or {}).values()]


@pytest.mark.parametrize(("name", "shape"), CASES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("most", [1, 2, 3, 5, 100])
def test_results_are_those_of_all_heads(heads: tuple[int, int], name: str, shape: tuple[int, int], most: int) -> None:
    """``most``: query heads whose elements a part may have. Below those of a kv head its query heads are parted too."""
    seen, of_head, scores = [], B * max(S, shape[0]) * max(D, shape[1]), scores_of(name, heads[0], shape[0])

    def counted(function: Any) -> Any:
        def called(*given: Any) -> Any:
            q, k, v, *_ = given if len(given) > 1 else given[0][1:]
            assert all(x.is_contiguous() for x in (q, k, v)) and q.shape[1] * of_head < few_heads.FAR
            if len(given) == 1:
                of_q = (getattr(given[0], x) for x in ("dout", "out", "lse", "delta"))
                assert all(x.shape[1] == q.shape[1] and x.data_ptr() % 16 == 0 for x in of_q)
            seen.append((q.shape[1], k.shape[1]))
            return function(*given)

        return called

    given = reference._forward, reference._backward
    whole = both_passes(*given, heads, shape, scores)
    most, group = min(most, heads[0] - 1), heads[0] // heads[1]
    with mock.patch.multiple(few_heads, FAR=of_head * (most + 1), PART=of_head * most):
        parts = both_passes(*by_heads(*map(counted, given)), heads, shape, scores)
    assert len(parts) == len(whole) and [x.dtype for x in parts] == [x.dtype for x in whole]
    for a, b in zip(parts, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert sum(q for q, _ in seen) == 2 * heads[0] and all(k == -(-q // group) for q, k in seen)
    fits = [n for n in range(1, most + 1) if group % n == 0]  # parts of a kv head are equal
    assert max(q for q, _ in seen) == (fits[-1] if most < group else most // group * group)


def test_a_tensor_that_spans_much_is_large() -> None:
    """Each of dout, out, q, k and v counts with what lies between its elements, since kernels take offsets from
    strides; in kernels that count in 32 bits."""
    asked: list[int] = []

    def forward(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        asked.append(q.shape[1])
        return q, q[..., 0]

    def backward(t: BackwardTile) -> tuple[Tensor, ...]:
        asked.append(t.q.shape[1])
        return t.q, t.k, t.v

    x, wide, names = torch.zeros(1, 2, 5, 8), torch.zeros(1, 3, 50, 8)[:, :2, ::10], ("dout", "q", "k", "v", "out")
    passes, others = by_heads(forward, backward), {"lse": x[..., 0], "delta": None, "cover": None}
    with mock.patch.multiple(few_heads, FAR=2 * 5 * 8 + 1, PART=1):
        for name in (None, *names):
            given = dict.fromkeys(names, x) | ({name: wide} if name else {})
            passes[1](BackwardTile(**given, **others, scores=Scores(1.0)))
            if name not in ("dout", "out"):
                passes[0](given["q"], given["k"], given["v"], None, Scores(1.0))
            assert asked == ([1, 1] if name else [2]) * (1 + (name not in ("dout", "out"))), name
            asked.clear()
    assert (few_heads.FAR, few_heads.PART) == (2**31, 2**29)  # of 32 bits with a sign; a size that was timed
    assert {name for name, kernel in KERNELS.items() if not kernel.int64_offsets} == {"fa4", "cudnn", "flex"}


@pytest.mark.parametrize("shape", [(S, D), (1, D), (2 * S, D // 2), (S // 2, 2 * D)])
def test_a_head_that_is_too_large_is_refused(shape: tuple[int, int]) -> None:
    q, *_ = make_qkv(B, 2, 2, S if shape[0] != 2 * S else 1, D if shape[1] == D else D // 2, D, seed=1)
    _, k, v, _ = make_qkv(B, 2, 2, shape[0], q.shape[3], shape[1], seed=1)
    forward, _ = by_heads(reference._forward, reference._backward)
    largest = B * max(q.shape[2], shape[0]) * max(q.shape[3], shape[1])
    with mock.patch.multiple(few_heads, FAR=largest, PART=1), pytest.raises(UnsupportedError, match="in a head"):
        forward(q, k, v, None, Scores(1.0))


def test_partial_gradients_of_one_kv_head_add_up_in_float32() -> None:
    """The kernel rounds dk and dv of some query heads to bfloat16; their sum is rounded once more."""
    parts = [torch.tensor(x, dtype=torch.bfloat16).expand(1, 1, 1, 1) for x in (1.0, 2.0**-9, 2.0**-9, 2.0**-9)]

    def backward(t: BackwardTile) -> tuple[Tensor, ...]:
        return t.q, *[parts.pop(0)] * 2

    x, k = torch.zeros(1, 4, 1, 1, dtype=torch.bfloat16), torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16)
    tile = BackwardTile(x, x, k, k, x, x[..., 0].float(), None, None, Scores(1.0))
    with mock.patch.multiple(few_heads, FAR=2, PART=1):
        _, dk, _, _ = by_heads(None, backward)[1](tile)
    assert dk.dtype == torch.bfloat16 and dk.item() == 1 + 2.0**-7
