"""ShardedSequence and the loss: what each rank gets, that nothing is lost, and the gradient of one rank."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dense import dense_attention, dense_mask, make_qkv
from ranks import mesh
from torch import Tensor

from cp_mesh import Contiguous, Layout, Mask, ShardedSequence, Striped, ZigZag, attention, cross_entropy
from cp_mesh.geometry import Permuted

WORLD_SIZE = 3
B = 2

LAYOUTS: dict[str, Any] = {
    "contiguous": lambda S: Contiguous(),
    "zigzag": lambda S: ZigZag(),
    "striped": lambda S: Striped(),
    "permuted": lambda S: Permuted(torch.randperm(S, generator=torch.Generator().manual_seed(S))),
}


def new_sequence(layout: Layout, **options: Any) -> ShardedSequence:
    return ShardedSequence(mesh((dist.get_world_size(),), ("cp",)), layout, **options)


class Pair(NamedTuple):
    tokens: Tensor
    name: str


def batch(S: int) -> dict[str, Any]:
    rows = torch.arange(B * S).view(B, S)
    return {
        "tokens": rows,
        "labels": rows + 1,
        "documents": rows // 5,
        "key_padding": rows % 4 > 0,
        "cu_seqlens": torch.tensor([0, 5, S]),
        "nested": [Pair(rows * 1.5, "name"), (rows[..., None].expand(B, S, 4).to(torch.bfloat16), None)],
        "steps": 3,
    }


def shard(rank: int, layout: Layout, S: int, **options: Any) -> tuple[dict, dict, Tensor]:
    sequence, given = new_sequence(layout, **options), batch(S)
    sharded = sequence.shard(given)
    for name, tensor in batch(S).items():  # the caller's tensors are as they were
        assert name in ("nested", "steps") or torch.equal(tensor, given[name])
    return sharded, {"seq_len": sequence.seq_len}, sequence.positions(S)


ROWS_OF_12 = {
    "contiguous": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]],
    "zigzag": [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]],
    "striped": [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]],
}


@pytest.mark.parametrize("name", ROWS_OF_12)
def test_shard_by_hand(pool: Any, name: str) -> None:
    whole = batch(12)
    for rows, (sharded, sizes, positions) in zip(
        ROWS_OF_12[name], pool(WORLD_SIZE).run(shard, LAYOUTS[name](12), 12), strict=True
    ):
        assert positions.tolist() == rows and positions.dtype == torch.int64
        assert sizes == {"seq_len": None} and sharded["steps"] == 3
        for leaf in ("tokens", "labels"):
            assert torch.equal(sharded[leaf], whole[leaf][:, rows])
        for leaf in ("documents", "key_padding", "cu_seqlens"):
            assert torch.equal(sharded[leaf], whole[leaf])
        pair, (hidden, nothing) = sharded["nested"]
        assert type(pair) is Pair and pair.name == "name" and nothing is None
        assert torch.equal(pair.tokens, whole["nested"][0].tokens[:, rows])
        assert torch.equal(hidden, whole["nested"][1][0][:, rows]) and hidden.dtype == torch.bfloat16


def test_padding_by_name(pool: Any) -> None:
    whole, pads = batch(10), 2  # to 12
    for rows, (sharded, sizes, positions) in zip(
        ROWS_OF_12["zigzag"], pool(WORLD_SIZE).run(shard_padded, 10), strict=True
    ):
        assert sizes == {"seq_len": 12} and positions.tolist() == rows
        for leaf, padding in (("tokens", 0), ("labels", -100)):
            assert torch.equal(sharded[leaf], F.pad(whole[leaf], (0, pads), value=padding)[:, rows])
        assert torch.equal(sharded["documents"], F.pad(whole["documents"], (0, pads), value=-1))
        assert torch.equal(sharded["key_padding"], F.pad(whole["key_padding"], (0, pads), value=False))
        assert sharded["cu_seqlens"].tolist() == [0, 5, 10, 12]
        assert torch.equal(sharded["nested"][0].tokens, F.pad(whole["nested"][0].tokens, (0, pads))[:, rows])


def shard_padded(rank: int, S: int) -> tuple[dict, dict, Tensor]:
    sequence, once = new_sequence(ZigZag(), length=S), shard(rank, ZigZag(), S, length=S)
    padded = F.pad(batch(S)["tokens"], (0, 2))  # a tensor that is padded already is taken as it is
    assert torch.equal(sequence.shard(padded), once[0]["tokens"])
    whole = {name: once[0][name] for name in ("documents", "key_padding", "cu_seqlens")}
    assert all(torch.equal(tensor, whole[name]) for name, tensor in sequence.shard(whole).items())
    return once


# (S, options): lengths that divide, that are padded, and that are cut unequally, one of them with empty shards
LENGTHS = [(12, {}), (12, {"length": 12}), (10, {"length": 10}), (10, {"length": 10, "pad": False}), (2, {"length": 2})]
LENGTHS += [(2, {"length": 2, "pad": False}), (13, {"length": 13, "pad": False})]


def round_trip(rank: int, name: str, S: int, options: dict[str, Any]) -> None:
    """shard, unshard and the gradient of unshard, for one layout; asserts on the rank."""
    size = dist.get_world_size()
    multiple = 2 * size if name == "zigzag" else size
    padded = -(-S // multiple) * multiple if options.get("pad", True) else S
    sequence = new_sequence(LAYOUTS[name](padded), **options)
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(B, S, 3, S, dtype=torch.float64, generator=generator)
    weights = torch.randn(size, B, S, 3, S, dtype=torch.float64, generator=generator)  # of each rank's loss
    for dim in (1, 3, -1):
        local = sequence.shard(whole, dim=dim).requires_grad_()
        again = sequence.unshard(local, dim=dim)
        assert type(again) is Tensor
        assert torch.equal(again, whole)
        (again * weights[rank]).sum().backward()
        expected = sequence.shard(weights.sum(0), dim=dim)  # padding has no gradient, as it is padded with 0
        torch.testing.assert_close(local.grad, expected)
    positions = sequence.positions(S)
    assert positions.tolist() == sequence.positions().tolist() if "length" in options else True
    if not options.get("pad", True):
        assert positions.numel() == local.shape[-1]
        assert torch.equal(sequence.shard(torch.arange(S), dim=0), positions)


def round_trips(rank: int, name: str) -> None:
    for S, options in LENGTHS:
        round_trip(rank, name, S, options)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", LAYOUTS)
def test_round_trip_and_its_gradient(pool: Any, name: str, world_size: int) -> None:
    pool(world_size).run(round_trips, name)


def documents(S: int) -> Tensor:
    """Ids that are unsorted, unlike in every row, and -1 (the padding's own) for some tokens."""
    return torch.tensor([[(i * i // 7 + b) % 3 - 1 for i in range(S)] for b in range(B)])


MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "documents": {"documents": documents},
    "full documents": {"causal": False, "documents": documents},
    "one row of documents": {"causal": False, "documents": lambda S: documents(S)[1]},
    "key padding": {"causal": False, "key_padding": lambda S: documents(S) != 0},
    "blocks": {"blocks": lambda S: torch.arange(S) // 6 % 2 * (torch.arange(S) // 6 + 1) - 1},
    "window": {"causal": False, "window": (3, 4)},
    "prefix": {"prefix": 4},
    "prefix of all": {"prefix": 1 << 20},
    "length": {"causal": False, "length": 7},
}


def pad_and_attend(rank: int, name: str, S: int) -> dict[str, tuple[Tensor, ...]]:
    """out and gradients of the whole sequence, for each mask, through shard, attention and unshard."""
    results = {}
    q, k, v, dout = make_qkv(B, 4, 2, S, 8)
    for mask_name, conditions in MASKS.items():
        conditions = {key: value(S) if callable(value) else value for key, value in conditions.items()}
        multiple = 2 * WORLD_SIZE if name == "zigzag" else WORLD_SIZE
        sequence = new_sequence(LAYOUTS[name](-(-S // multiple) * multiple), length=S)
        local = [sequence.shard(x, dim=2).requires_grad_() for x in (q, k, v)]
        mask = sequence.mask(Mask(**conditions))
        out = attention(*local, mesh=sequence.mesh, seq_len=sequence.seq_len, layout=sequence.layout, mask=mask)
        out.backward(sequence.shard(dout, dim=2))  # nothing comes back to the rows of padding
        with torch.no_grad():
            results[mask_name] = tuple(sequence.unshard(x, dim=2) for x in (out, *(x.grad for x in local)))
    return results


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.quick("zigzag")
def test_padding_is_invisible(pool: Any, name: str) -> None:
    S = 20
    ranks = pool(WORLD_SIZE).run(pad_and_attend, name, S)
    for mask_name, conditions in MASKS.items():
        conditions = {key: value(S) if callable(value) else value for key, value in conditions.items()}
        conditions |= {key: torch.atleast_2d(x) for key, x in conditions.items() if key in ("documents", "blocks")}
        q, k, v, dout = make_qkv(B, 4, 2, S, 8)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        out, _ = dense_attention(q, k, v, dense_mask(S, **conditions))
        expected = (out, *torch.autograd.grad(out, (q, k, v), dout))
        for rank in range(WORLD_SIZE):
            for got, want in zip(ranks[rank][mask_name], expected, strict=True):
                close = torch.allclose(got, want, rtol=1e-10, atol=1e-10)
                assert close, f"{mask_name} on rank {rank}: {(got - want).abs().max()}"


def mask_of_sequence(rank: int) -> None:
    mask = Mask(documents=torch.zeros(12, dtype=torch.int64))
    assert new_sequence(ZigZag()).mask(mask) is mask
    assert new_sequence(ZigZag(), length=12).mask(mask) is mask
    assert new_sequence(ZigZag(), length=11, pad=False).mask(mask) is mask
    padded = new_sequence(ZigZag(), length=11)
    assert padded.mask(Mask()).length is None  # causal queries see no padding: the kernels need not know of it
    assert padded.mask(Mask(causal=False)).length == 11
    assert padded.mask(Mask(causal=False, length=9)).length == 9
    assert padded.mask(Mask(prefix=5)).length is None
    assert padded.mask(Mask(prefix=12)).length == 11


def test_mask_of_sequence(pool: Any) -> None:
    pool(WORLD_SIZE).run(mask_of_sequence)


def attend_packed(rank: int, S: int, cu_seqlens: list[int]) -> Tensor:
    sequence = new_sequence(Striped(), length=S)
    q, k, v, _ = make_qkv(1, 4, 2, S, 8)
    packed = {"q": q[0].transpose(0, 1), "k": k[0].transpose(0, 1), "v": v[0].transpose(0, 1)}  # [T, H, D]
    local = sequence.shard(packed | {"cu_seqlens": torch.tensor(cu_seqlens, dtype=torch.int32)}, dim=0)
    mask = Mask.from_cu_seqlens(local.pop("cu_seqlens"))
    out = attention(
        *local.values(), mesh=sequence.mesh, seq_dim=0, seq_len=sequence.seq_len, layout=sequence.layout, mask=mask
    )
    return sequence.unshard(out, dim=0)


@pytest.mark.parametrize("S", [16, 18])  # padded to 18, and not
def test_cu_seqlens(pool: Any, S: int) -> None:
    cu_seqlens = [0, 5, 5, 11, S]  # the second document is empty
    ids = [[0] * 5 + [2] * 6 + [3] * (S - 11)]
    q, k, v, _ = make_qkv(1, 4, 2, S, 8)
    expected, _ = dense_attention(q, k, v, dense_mask(S, documents=ids))
    for out in pool(WORLD_SIZE).run(attend_packed, S, cu_seqlens):
        torch.testing.assert_close(out, expected[0].transpose(0, 1), rtol=1e-10, atol=1e-10)


V = 11


def labelled(case: str, S: int) -> tuple[Tensor, Tensor]:
    """fp64 logits [2, B, S, V] and labels [2, B, S] of two data-parallel rows, with ragged ignored tokens."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, B, S, V, generator=generator, dtype=torch.float64)
    labels = torch.randint(V, (2, B, S), generator=generator)
    if case == "ragged":
        labels[torch.rand(labels.shape, generator=generator) < 0.4] = -100
    if case == "a rank has none":
        labels[:, :, : S // 2] = -100
    if case == "all ignored":
        labels[:] = -100
    return logits, labels


def share_of_loss(rank: int, case: str, S: int, dp: int, layout: Layout, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """This rank's share of the loss, its gradient in the whole sequence, and its number of valid tokens."""
    cp = dist.get_world_size() // dp
    axes = mesh((dp, cp), ("dp", "cp"))
    sequence = ShardedSequence(axes["cp"], layout, length=S)
    row = axes.get_local_rank("dp")
    logits, labels = (x[row] for x in labelled(case, S))
    local = sequence.shard({"logits": logits.to(dtype), "labels": labels})
    local["logits"].requires_grad_()
    loss = cross_entropy(local["logits"], local["labels"], axes if dp > 1 else axes["cp"])
    loss.backward()
    assert loss.shape == () and loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    whole_grad = sequence.unshard(local["logits"].grad)
    return loss.detach(), whole_grad, (local["labels"] != -100).sum()


@pytest.mark.parametrize("case", ["all count", "ragged", "a rank has none", "all ignored"])
@pytest.mark.parametrize(("world_size", "dp"), [(1, 1), (3, 1), (4, 2)])
def test_cross_entropy(pool: Any, case: str, world_size: int, dp: int) -> None:
    S, cp = 22, world_size // dp
    shares = pool(world_size).run(share_of_loss, case, S, dp, Contiguous(), torch.float64)
    logits, labels = labelled(case, S)
    logits, labels = logits[:dp].requires_grad_(), labels[:dp]
    expected = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="sum") / max(1, (labels >= 0).sum())
    expected.backward()
    valid = [int(count) for _, _, count in shares]
    assert (0 in valid) == (case == "all ignored" or (case == "a rank has none" and cp > 1))
    torch.testing.assert_close(sum(loss for loss, _, _ in shares), expected.detach(), rtol=1e-12, atol=1e-12)
    for rank, (_, grad, _) in enumerate(shares):
        torch.testing.assert_close(grad, logits.grad[rank // cp], rtol=1e-12, atol=1e-12)


def test_cross_entropy_of_half_precision(pool: Any) -> None:
    S = 18
    shares = pool(WORLD_SIZE).run(share_of_loss, "ragged", S, 1, ZigZag(), torch.bfloat16)
    logits, labels = labelled("ragged", S)
    rounded = logits[0].to(torch.bfloat16).float()
    expected = F.cross_entropy(rounded.flatten(0, 1), labels[0].flatten())
    torch.testing.assert_close(sum(loss for loss, _, _ in shares), expected, rtol=1e-6, atol=1e-6)
    assert all(grad.dtype == torch.bfloat16 for _, grad, _ in shares)


def flat_loss(rank: int, ignored: int) -> Tensor:
    """Logits [N, V] and an ignore index of the caller's own."""
    logits = torch.arange(12.0).view(4, 3) + rank
    return cross_entropy(logits, torch.tensor([0, ignored, 2, 1]), mesh((3,), ("cp",)), ignore_index=ignored)


def test_cross_entropy_of_other_shapes(pool: Any) -> None:
    shares = pool(WORLD_SIZE).run(flat_loss, -1)
    logits = torch.cat([torch.arange(12.0).view(4, 3) + rank for rank in range(WORLD_SIZE)])
    labels = torch.tensor([0, -1, 2, 1]).repeat(WORLD_SIZE)
    torch.testing.assert_close(sum(shares), F.cross_entropy(logits, labels, ignore_index=-1))


def padded_bytes(rank: int) -> list[bool]:
    """Documents and blocks of uint8, of which every value may be an id: the padding is none of them."""
    sequence = ShardedSequence(mesh((2,), ("cp",)), length=21)
    ids = torch.tensor([255] * 9 + [3] * 12, dtype=torch.uint8)
    found = []
    mask, whole = sequence.mask(Mask(documents=ids, blocks=ids)), sequence.shard({"documents": ids, "blocks": ids})
    for padded in (mask.documents, mask.blocks, *whole.values()):
        found.append(torch.equal(padded[:21].int(), ids.int()) and not bool((padded[21:, None] == padded[:21]).any()))
    return found


def test_padding_is_no_document_of_bytes(pool: Any) -> None:
    assert pool(2).run(padded_bytes) == [[True] * 4] * 2
