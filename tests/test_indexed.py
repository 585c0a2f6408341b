"""Sparse attention by an indexer over a sharded sequence, against one process that has all tokens, in float64."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from cases import mask_of, pairs_of
from hopper import Hopper
from inside import room
from interpreted import INTERPRETED, Interpreted, is_that_run
from ranks import num_collectives, on_ranks, refused
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cp_mesh import (
    Contiguous,
    Layout,
    Mask,
    RankMismatchError,
    ShardedModel,
    ShardedSequence,
    Striped,
    ZigZag,
    parallelize,
)
from cp_mesh.geometry import Permuted
from cp_mesh.latent import indexed_attention, select_keys

SIZES = H, NOPE, ROPE, RANK, VALUE, INDEX_H, INDEX_D = 3, 5, 2, 6, 4, 2, 4
S, TOP_K = 29, 5
LAYOUTS = {"contiguous": Contiguous(), "zigzag": ZigZag(), "striped": Striped()}
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "packed": {"documents": torch.tensor([0] * 7 + [1] * 3 + [-1] * 2 + [2] * 17)},
    "window": {"window": (6, 0)},
    "all": {"causal": False},
    "padded": {"key_padding": torch.arange(S) >= 4},
    "prefix": {"prefix": 9},
    "blocks": {"blocks": torch.tensor([-1] * 5 + [3] * 6 + [-1] * 18)},
}

for_a_gpu = pytest.mark.filterwarnings() if INTERPRETED else pytest.mark.gpu


def numbers(batch: int = 2, S: int = S, sizes: tuple[int, ...] = SIZES) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(0)
    H, NOPE, ROPE, RANK, VALUE, INDEX_H, INDEX_D = sizes

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=made)

    x = {"q": normal(batch, S, H, NOPE + ROPE), "latent": normal(batch, S, RANK), "rope": normal(batch, S, ROPE)}
    x |= {"up": normal(H * (NOPE + VALUE), RANK), "dout": normal(batch, S, H, VALUE)}
    x |= {"sinks": normal(H), "index_q": normal(batch, S, INDEX_H, INDEX_D)}
    return x | {"index_k": normal(batch, S, INDEX_D), "weights": normal(batch, S, INDEX_H)}


def inputs() -> dict[str, Tensor]:
    """Half of the index keys are equal in pairs, the others nearly; all scores of some queries are 0."""
    x = numbers()
    x["index_k"][:, 1::4] = x["index_k"][:, :-1:4][:, : len(range(1, S, 4))]
    x["index_k"][:, 3::4] = x["index_k"][:, 2:-1:4][:, : len(range(3, S, 4))] + 1e-4
    x["index_q"][:, 3::5] = 0
    return x


def picked(x: dict[str, Tensor], mask: dict[str, Any], top_k: int = TOP_K) -> Tensor:
    """Which pairs are picked, bool [B, S, S]."""
    products = torch.einsum("bshd,btd->bsht", x["index_q"], x["index_k"]).relu()
    batch, S = products.shape[:2]
    allowed = pairs_of(mask, S).expand(batch, S, S)
    scores = (products * x["weights"][..., None]).sum(2).masked_fill(~allowed, -torch.inf)
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    return torch.zeros_like(allowed).scatter(-1, best, True) & allowed


TRAINED = ("q", "latent", "rope", "up", "sinks")
PARAMETERS = TRAINED[3:]


def dense(x: dict[str, Tensor], pairs: Tensor) -> list[Tensor]:
    """Output and gradients, by expanded keys and values."""
    q, latent, rope, up, sinks = given = [x[name].clone().requires_grad_() for name in TRAINED]
    H, D, VALUE = *q.shape[2:], x["dout"].shape[-1]
    k, v = torch.einsum("btr,hfr->bhtf", latent, up.view(H, -1, latent.shape[-1])).tensor_split([-VALUE], -1)
    k = torch.cat((k, rope[:, None].expand(-1, H, -1, -1)), -1)
    scores = torch.einsum("bshd,bhtd->bhst", q, k) * D**-0.5
    scores = torch.cat(
        (scores.masked_fill(~pairs[:, None], -torch.inf), sinks.view(-1, 1, 1).expand_as(scores[..., :1])), -1
    )
    p = scores.softmax(-1)[..., :-1]
    out = torch.einsum("bhst,bhtd->bshd", p, v)
    return [out.detach(), *torch.autograd.grad(out, given, x["dout"])]


def attend(x: dict[str, Tensor], indices: Tensor, sequence: ShardedSequence, **options: Any) -> Tensor:
    heads_first = x["q"].transpose(1, 2), x["latent"][:, None], x["rope"][:, None]
    return indexed_attention(
        *heads_first, x["up"], indices, sequence=sequence, sinks=x.get("sinks"), **options
    ).transpose(1, 2)


def select(x: dict[str, Tensor], sequence: ShardedSequence, top_k: int = TOP_K, **options: Any) -> Tensor:
    return select_keys(x["index_q"], x["index_k"], x["weights"], top_k, sequence=sequence, **options)


def local(x: dict[str, Tensor], sequence: ShardedSequence) -> dict[str, Tensor]:
    """Rows of this rank, to be trained."""
    rows = sequence.shard({name: y for name, y in x.items() if name not in PARAMETERS})
    rows |= {name: x[name].clone() for name in PARAMETERS if name in x}
    return {name: y.requires_grad_(name in TRAINED) for name, y in rows.items()}


def gathered(sequence: ShardedSequence, out: Tensor, grads: tuple[Tensor, ...]) -> list[Tensor]:
    rows = [sequence.unshard(y) for y in (out.detach(), *grads[:3])]
    return rows + [sequence.all_reduce(y) for y in grads[3:]]


def sharded(
    x: dict[str, Tensor], mask: Mask, sequence: ShardedSequence, top_k: int = TOP_K
) -> tuple[list[Tensor], Tensor]:
    """The same over a sharded sequence, gathered, and this rank's indices."""
    x = local(x, sequence)
    indices = select(x, sequence, top_k, mask=mask)
    out = attend(x, indices, sequence)
    grads = torch.autograd.grad(out, [x[name] for name in TRAINED if name in x], x["dout"])
    return gathered(sequence, out, grads), indices


def check(sequence: ShardedSequence, names: tuple[str, ...] = tuple(MASKS)) -> None:
    x = inputs()
    for name in names:
        pairs = picked(x, MASKS[name])
        found, indices = sharded(x, mask_of(MASKS[name]), sequence)
        for row, position in enumerate(sequence.positions().tolist()):
            for b in range(len(pairs) if position < S else 0):
                expected = pairs[b, position].nonzero().flatten().tolist()
                assert indices[b, row].tolist() == expected + [-1] * (TOP_K - len(expected)), (name, position)
        for what, got, wanted in zip(("out", *TRAINED), found, dense(x, pairs), strict=True):
            assert (got - wanted).abs().max() < 1e-12, (name, what)


@pytest.mark.parametrize("cp_size", (1, 2, 3, 4))
@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks("cp_size")
def test_one_process(axis: DeviceMesh, cp_size: int, layout: str) -> None:
    check(ShardedSequence(axis, LAYOUTS[layout], length=S))


@on_ranks(3)
def test_unequal_shards(axis: DeviceMesh) -> None:
    check(ShardedSequence(axis, Contiguous(), length=S, pad=False))


@on_ranks(3)
def test_a_rank_without_rows(axis: DeviceMesh, rank: int) -> None:
    """Other ranks would wait for one that fails in its own part of a call."""
    sequence = ShardedSequence(axis, Contiguous(), length=2, pad=False)
    x = local({name: y if name in PARAMETERS else y[:, :2] for name, y in inputs().items()}, sequence)
    out = attend(x, select(x, sequence), sequence)
    out.sum().backward()
    assert out.shape[1] == (rank < 2) and x["latent"].grad is not None


@on_ranks(2)
def test_layout_of_a_batch(axis: DeviceMesh) -> None:
    check(ShardedSequence(axis, length=S).balanced(mask_of(MASKS["packed"])), ("packed",))


class Picks(nn.Module):
    """A root whose forward attends in the layout of its batch, or in another one."""

    def __init__(self, whole: ShardedSequence, other: bool) -> None:
        super().__init__()
        self.whole, self.other = whole, other

    def forward(self, rows: Tensor, documents: Tensor) -> Tensor:
        mask = Mask(documents=documents)
        x, batch = inputs(), self.whole.for_batch(len(documents), mask)
        if self.other:
            batch = ShardedSequence(self.whole.mesh, Contiguous(), length=S)
        return sharded(x, mask, batch)[0][0] + 0 * rows.sum()


@pytest.mark.parametrize("other", (False, True))
@on_ranks(2)
def test_layouts_of_batches_in_a_root(axis: DeviceMesh, other: bool) -> None:
    """A second batch has another layout; a layout of other rows is refused."""
    whole = ShardedSequence(axis, "auto", length=S)

    def layout(rows: Tensor, documents: Tensor) -> Layout:
        return whole.for_batch(len(documents), Mask(documents=documents)).layout

    style = ShardedModel(whole, inputs=("rows",), positions=None, layout=layout, probe=False)
    model, x = parallelize(Picks(whole, other), axis, {"": style}), inputs()
    for first in (7, 5, 12):
        documents = torch.tensor([0] * first + [1] * 3 + [2] * (S - 3 - first))
        with refused("layout: expected balanced, of the root's batch") if other else nullcontext():
            found = model(torch.zeros(2, S, 1), documents)
            assert (found - dense(x, picked(x, {"documents": documents}))[0]).abs().max() < 1e-12


@pytest.mark.parametrize("tile", (1, 40, 200))
@on_ranks(2)
def test_tiles(axis: DeviceMesh, tile: int) -> None:
    sizes = {"PAIRS": tile, "PRODUCTS": tile, "BLOCK": 1 + tile // 20}
    with mock.patch.multiple(room("selection"), **sizes), mock.patch.object(room("latent.indexed"), "NUMBERS", tile):
        check(ShardedSequence(axis, length=S))


def test_tiles_cover_rows_and_are_small() -> None:
    with mock.patch.multiple(room("selection"), PAIRS=400, BLOCK=4):
        for rows in (torch.arange(200), torch.arange(0, 200, 3), torch.arange(150, 170)):
            tiles = list(room("selection")._tiles(Mask(), rows, 200, 1))
            assert [x for begin, end, *_ in tiles for x in range(begin, end)] == list(range(len(rows)))
            assert all((end - begin) * (hi - lo) <= 400 or end - begin <= 4 for begin, end, lo, hi in tiles)
            assert all(lo == 0 and hi == rows[end - 1] + 1 for _, end, lo, hi in tiles)


@on_ranks(2)
def test_a_key_named_twice_counts_twice(axis: DeviceMesh) -> None:
    sequence = ShardedSequence(axis, Contiguous())
    latent = torch.arange(4.0).view(1, 2, 2) + 8 * axis.get_local_rank()
    x = {"q": torch.zeros(1, 2, 1, 3), "latent": latent, "rope": torch.ones(1, 2, 1), "up": torch.eye(2).repeat(2, 1)}
    out = attend(x, torch.tensor([[[0, 0, 3], [-1, 4, 99]]]), sequence)  # there are 4 keys
    rows = sequence.unshard(latent)[0]
    assert torch.allclose(out[0, 0, 0], (2 * rows[0] + rows[3]) / 3) and not out[0, 1].any()


PLANTED = {
    "ties by the higher position": (
        room("selection"),
        "best",
        lambda old: lambda x, k, first: _flipped(old, x, k, first),
    ),
    "mask after the choice": (room("selection"), "index_scores", lambda old: lambda *x: old(*x).clamp(min=0.0)),
    "no documents": (ShardedSequence, "mask", lambda old: lambda self, mask: old(self, replace(mask, documents=None))),
    "gradients of other ranks' queries": (room("sharded_sequence"), "scatter_sum", lambda old: _own_share),
    "latent in another order": (
        room("sharded_sequence"),
        "gather",
        lambda old: lambda x, dim, lens, _, *r: old(x, dim, lens, None, *r),
    ),
    "rounded keys": (
        room("selection"),
        "index_scores",
        lambda old: lambda q, k, w, s: old(q, k.bfloat16().to(q.dtype), w, s),
    ),
}


def _flipped(old: Any, scores: Tensor, top_k: int, first: int) -> Tensor:
    n = scores.shape[-1]
    found = old(scores.flip(-1), top_k, 0)
    return torch.where(found < 0, -1, n - 1 - found + first).sort(-1, descending=False).values.roll(0)


def _own_share(x: Tensor, dim: int, lens: Any, inverse: Tensor, rank: int, *_: Any) -> Tensor:
    own = inverse.argsort()[sum(lens[:rank]) : sum(lens[: rank + 1])]
    return x.index_select(dim, own)


@pytest.mark.parametrize("bug", PLANTED)
@on_ranks(2)
def test_planted_bugs_are_found(axis: DeviceMesh, bug: str) -> None:
    where, name, make = PLANTED[bug]
    sequence = ShardedSequence(axis, length=S)
    with mock.patch.object(where, name, make(getattr(where, name))), pytest.raises(AssertionError):
        check(sequence, ("causal", "packed"))


@on_ranks(2)
def test_nan_spreads(axis: DeviceMesh) -> None:
    """A key that is nan is picked, as by `torch.topk`, and hides no other key."""
    x, sequence = inputs(), ShardedSequence(axis, Contiguous(), length=S)
    for name in ("index_k", "latent"):
        x[name][0, 9] = torch.nan
    out = sequence.unshard(attend(rows := local(x, sequence), select(rows, sequence), sequence)).detach()
    assert out[0, 9:].isnan().all() and out[0, :9].isfinite().all() and out[1].isfinite().all()


@on_ranks(2)
def test_traffic(axis: DeviceMesh) -> None:
    """Index keys once; latent and rope once in each pass. Nothing else moves after a first call."""
    sequence = ShardedSequence(axis, length=S)
    x = local(inputs(), sequence)
    begin = num_collectives()
    indices = select(x, sequence)
    assert num_collectives() == begin + 1
    out = attend(x, indices, sequence)
    assert num_collectives() == begin + 2
    out.backward(x["dout"])
    assert num_collectives() == begin + 3


@on_ranks(2)
def test_half_precision(axis: DeviceMesh) -> None:
    """Errors are at most 1.5 times those of one process."""
    sequence, x = ShardedSequence(axis, length=S), inputs()
    exact = dense(x, picked(x, {}))
    indices = select(local(x, sequence), sequence)
    half = {name: y.bfloat16() for name, y in x.items()}
    one = dense(half, picked(x, {}))
    rows = local(half, sequence)
    out = attend(rows, indices, sequence)
    grads = torch.autograd.grad(out, [rows[name] for name in TRAINED], rows["dout"])
    found = gathered(sequence, out, grads)
    for name, got, ours, wanted in zip(("out", *TRAINED), found, one, exact, strict=True):
        assert (got - wanted).norm() <= 1.5 * (ours - wanted).norm(), name


@on_ranks(2)
def test_autocast(axis: DeviceMesh) -> None:
    """Keys are picked in the dtype of the inputs, and attention is that of rounded inputs, in both passes."""
    x, sequence = {name: y.float() for name, y in inputs().items()}, ShardedSequence(axis, length=S)
    indices, half = select(local(x, sequence), sequence), {name: y.bfloat16() for name, y in x.items()}
    half["sinks"] = x["sinks"]
    found = []
    for given, enabled in ((x, True), (half, False)):
        rows = local(given, sequence)
        with torch.autocast("cpu", torch.bfloat16, enabled):
            assert torch.equal(select(local(x, sequence), sequence), indices)
            out = attend(rows, indices, sequence)
            out.backward(rows["dout"].bfloat16())
        found.append([out, *(rows[name].grad for name in TRAINED)])
    for got, wanted in zip(*found, strict=True):
        assert out.dtype == torch.bfloat16 and torch.equal(got.bfloat16(), wanted.bfloat16())


OF_SELECT: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "top_k": (lambda x: {"top_k": 0}, "top_k: expected an int"),
    "heads": (lambda x: {"weights": x["weights"][..., :1]}, r"weights: expected \[B, S, H\] with H = 2, as of q"),
    "rows": (lambda x: {"index_k": x["index_k"][:, :3]}, r"k: expected \[B, S, D\] with S = "),
    "dtype": (lambda x: {"index_k": x["index_k"].float()}, "k: expected torch.float64, as q"),
    "dims": (lambda x: {"index_q": x["index_q"][:, 0]}, r"q: expected \[B, S, H, D\]"),
}
OF_ATTENTION: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "up": (lambda x: {"up": x["up"][:-1]}, r"up_projection: expected 3 heads · \(5 \+ head dim of values\) rows"),
    "features": (lambda x: {"up": x["up"][:, 1:]}, r"up_projection: expected \[F, R\] with R = 6, as of latent"),
    "indices": (lambda x: {"indices": x["weights"]}, "indices: expected int32 or int64, got torch.float64"),
    "dtypes": (lambda x: {"rope": x["rope"].float()}, "rope: expected torch.float64, as query"),
    "latent": (lambda x: {"latent": x["latent"][:, 1:]}, r"latent: expected \[B, 1, S, R\] with S = "),
}


@pytest.mark.parametrize("what", (*OF_SELECT, *OF_ATTENTION))
@on_ranks(2)
def test_refused(axis: DeviceMesh, what: str) -> None:
    change, match = (OF_SELECT | OF_ATTENTION)[what]
    sequence = ShardedSequence(axis, length=S)
    x: Any = local(inputs(), sequence)
    x |= change(x)
    with refused(match):
        if what in OF_SELECT:
            select(x, sequence, x.get("top_k", TOP_K))
        else:
            attend(x, x.get("indices", torch.zeros(2, x["q"].shape[1], 3).int()), sequence)


@pytest.mark.parametrize("shape", ((2 * S,), (S // 2,), (3, 2 * (S // 2))))
@pytest.mark.parametrize("name", ("documents", "key_padding"))
@on_ranks(2)
def test_masks_of_other_batches_are_refused(axis: DeviceMesh, name: str, shape: tuple[int, ...]) -> None:
    """Beyond the sequence their entries would not be read."""
    sequence, x = ShardedSequence(axis, Contiguous()), inputs()
    x = local({key: y if key in PARAMETERS else y[:, : S // 2 * 2] for key, y in x.items()}, sequence)
    given = torch.ones(shape, dtype=torch.bool if name == "key_padding" else torch.int64)
    with refused(f"Mask.{name}: expected shape"):
        select(x, sequence, mask=Mask(**{name: given}))  # type: ignore[arg-type]


@on_ranks(2)
def test_a_mask_of_another_layout_is_refused(axis: DeviceMesh) -> None:
    x = local(inputs(), sequence := ShardedSequence(axis, length=S))
    mask = replace(Mask(), layout=Permuted(torch.arange(32).flip(0)))
    with refused("select_keys: sequence: expected permuted"):
        select(x, sequence, mask=mask)


@on_ranks(2)
def test_dtensors_are_refused(axis: DeviceMesh) -> None:
    x = local(inputs(), sequence := ShardedSequence(axis, length=S))
    x["up"] = DTensor.from_local(x["up"].detach(), axis)
    with refused("up_projection: expected a local tensor, got DTensor"):
        attend(x, torch.zeros(2, x["q"].shape[1], 3).int(), sequence)


@pytest.mark.parametrize("what", ("top_k", "mask", "scale"))
@on_ranks(2)
def test_ranks_must_agree(axis: DeviceMesh, what: str, rank: int) -> None:
    x = local(inputs(), sequence := ShardedSequence(axis, length=S))
    with pytest.raises(RankMismatchError, match=what):  # no call before had these values
        if what == "scale":
            attend(x, torch.zeros(2, x["q"].shape[1], 3).int(), sequence, scale=3.0 + rank)
        elif what == "mask":
            select(x, sequence, mask=Mask(window=(3 + rank, 0)))
        else:
            select(x, sequence, 3 + rank)


@pytest.mark.nightly("interpreted")
@is_that_run
def test_interpreted(interpreted: Interpreted) -> None:
    assert interpreted(__file__) == 4


@for_a_gpu
@pytest.mark.parametrize("heads", (64, 3))
@pytest.mark.parametrize("dim", (128, 24))
def test_scores_by_triton(heads: int, dim: int) -> None:
    on = "cpu" if INTERPRETED else "cuda"
    q, k, weights = (
        torch.randn(2, 5, heads, dim, device=on),
        torch.randn(2, 131, dim, device=on),
        torch.randn(2, 5, heads, device=on),
    )
    half = [x.half() for x in (q, k, weights)]
    found = room("scores_triton").index_scores_triton(*half, 0.3)
    expected = room("selection").index_scores(*(x.double() for x in half), 0.3)
    assert (found - expected).abs().max() < 2e-3 * expected.abs().max()


@pytest.mark.skipif(INTERPRETED, reason="compiled")
@pytest.mark.parametrize("dim", (64, 128))
def test_scores_compile_for_hopper(dim: int, hopper: Hopper) -> None:
    """Products run on tensor cores, and no number is spilled."""
    q, k, weights = torch.empty(1, 5, 64, dim).bfloat16(), torch.empty(1, 131, dim).bfloat16(), torch.empty(1, 5, 64)
    compiled = hopper(lambda: room("scores_triton").index_scores_triton(q, k, weights, 0.3), room("scores_triton"))
    assert "wgmma" in compiled.kernels["scores_kernel"][0].asm["ptx"]
    assert max(compiled.spills) == 0, compiled.log
