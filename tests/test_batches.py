"""What trainers need for each batch: its mask and sequence, tokens that count, sums of routers, seeds of dropout."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dense import dense_attention, dense_dropout, dense_mask, make_qkv
from ranks import mesh, num_collectives
from torch import Tensor, nn

from cp_mesh import (
    ArgumentError,
    Contiguous,
    Mask,
    ShardedSequence,
    Striped,
    ZigZag,
    attention,
    batch_mask,
    cross_entropy,
    document_positions,
)
from cp_mesh.geometry import Balanced
from cp_mesh.training import valid_tokens

tensor, CLOSE = torch.tensor, {"rtol": 1e-10, "atol": 1e-10}

# batch_mask


PADDING = tensor([[1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1]])
FORMS: dict[str, tuple[dict[str, Any], Any]] = {
    "nothing": ({}, None),
    "positions of one document": ({"position_ids": tensor([[0, 1, 2], [0, 1, 2]])}, None),
    "positions that begin late": ({"position_ids": tensor([5, 6, 7])}, None),
    "positions that begin anew": ({"position_ids": tensor([[0, 1, 0, 1, 2, 0]])}, [[0, 0, 1, 1, 1, 2]]),
    "positions that jump": ({"position_ids": tensor([0, 1, 7, 8])}, [0, 0, 1, 1]),
    "nothing is padding": ({"attention_mask": torch.ones(2, 4, dtype=torch.int32)}, None),
    "padding": ({"attention_mask": PADDING.bool()}, [[0, 0, 0, 0, 0, -1], [-1, -1, 0, 0, 0, 0]]),
    "holes": ({"attention_mask": tensor([1, 0, 1])}, [0, -1, 0]),
    # positions of padding are not looked at: Transformers counts them from the first token, or sets 1
    "padding and positions": (
        {"attention_mask": PADDING, "position_ids": tensor([[0, 1, 2, 0, 1, 1], [1, 1, 0, 1, 2, 3]])},
        [[0, 0, 0, 1, 1, -1], [-1, -1, 2, 2, 2, 2]],
    ),
    "positions that rows share": (
        {"attention_mask": PADDING, "position_ids": torch.arange(6)[None]},
        [[0, 0, 0, 0, 0, -1], [-1, -1, 0, 0, 0, 0]],
    ),
    "cumulative lengths": ({"cu_seq_lens": tensor([0, 2, 2, 5], dtype=torch.int32)}, [0, 0, 2, 2, 2]),
    "cumulative lengths and positions": (
        {"cu_seq_lens": tensor([0, 2, 5]), "position_ids": tensor([[0, 1, 0, 1, 2]])}, [0, 0, 1, 1, 1],
    ),
    "documents of a long sequence": (
        {"cu_seq_lens": tensor([0, 2, 5]), "position_ids": tensor([[0, 1, 2, 3, 4]])}, [0, 0, 1, 1, 1],
    ),
    "documents padded one by one": (
        {"cu_seq_lens": tensor([0, 3, 4, 8]), "cu_seq_lens_padded": tensor([0, 4, 8, 12])},
        [0, 0, 0, -1, 1, -1, -1, -1, 2, 2, 2, 2],
    ),
    "ids": ({"documents": tensor([[7, 7, -3, 4]])}, [[7, 7, -3, 4]]),
    "ids of bytes, and padding": (
        {"documents": tensor([[255, 255, 1]], dtype=torch.uint8), "attention_mask": tensor([[1, 0, 1]])},
        [[255, -1, 1]],
    ),
    "ids from 1 on": ({"documents": tensor([[1, 1, 2, 2, 0, 0]]) - 1}, [[0, 0, 1, 1, -1, -1]]),
    "no token": ({"position_ids": torch.zeros(2, 0, dtype=torch.int64)}, None),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_a_batch(name: str) -> None:
    given, documents = FORMS[name]
    copies = {key: x.clone() for key, x in given.items()}
    with torch.device("meta"):  # as torch.set_default_device: what is made is of no device but its own
        mask = batch_mask(**given, window=(3, 0))
    assert (mask.causal, mask.window, mask.key_padding, mask.prefix) == (True, (3, 0), None, 0)
    assert (None if mask.documents is None else mask.documents.tolist()) == documents
    assert all(torch.equal(x, copies[key]) for key, x in given.items())


def test_what_else_a_mask_says() -> None:
    assert not batch_mask(causal=False).causal and batch_mask(prefix=4).prefix == 4
    blocks = batch_mask(blocks=tensor([[0, 0, -1, -1]]), position_ids=tensor([[0, 1, 2, 0]])).blocks
    assert blocks is not None and blocks.tolist() == [[0, 0, -1, -1]]


CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "two sources": (
        {"documents": tensor([0, 1]), "cu_seq_lens": tensor([0, 1, 2])}, "expected documents or cu_seq_lens, got both"),
    "positions within a document": (
        {"documents": tensor([[0, 0, 0]]), "position_ids": tensor([[0, 0, 1]])}, "rise by 1 within a document"),
    "positions within a length": (
        {"cu_seq_lens": tensor([0, 3]), "position_ids": tensor([[0, 1, 0]])}, "rise by 1 within a document"),
    "ids in the place of padding": ({"attention_mask": tensor([[1, 1, 2, 0]])}, r"documents=attention_mask - 1"),
    "pairs": ({"attention_mask": torch.ones(1, 1, 4, 4)}, r"bias=\) of 0 and -inf with Mask\(causal=False\)"),
    "an additive mask": (
        {"attention_mask": torch.zeros(2, 4)}, r"integers \[B, S\] or \[S\], got torch.float32 \[2, 4\]; cast"),
    "positions of several dims": (
        {"position_ids": torch.zeros(3, 2, 4).long()}, r"got torch.int64 \[3, 2, 4\]; .*mRoPE"),
    "another length": (
        {"attention_mask": torch.ones(2, 4).int(), "position_ids": torch.arange(5)}, "before it is sharded"),
    "another batch": (
        {"attention_mask": torch.ones(2, 4).int(), "documents": torch.zeros(3, 4).int()}, "tensors of one batch"),
    "lengths of more": (
        {"cu_seq_lens": tensor([0, 3]), "attention_mask": torch.ones(1, 4).int()}, r"\[3\] documents of cu_seq_lens"),
    "a list": ({"documents": [0, 1]}, "a tensor, got list"),
    "blocks of a shard": (
        {"blocks": torch.zeros(2, 2).int(), "attention_mask": torch.ones(2, 4).int()}, "tensors of one batch"),
    "padding alone": ({"cu_seq_lens_padded": tensor([0, 4])}, "cu_seq_lens beside cu_seq_lens_padded"),
    "no room": ({"cu_seq_lens": tensor([0, 3, 5]), "cu_seq_lens_padded": tensor([0, 2, 6])}, "room for the documents"),
    "other documents": (
        {"cu_seq_lens": tensor([0, 3]), "cu_seq_lens_padded": tensor([0, 4, 8])}, "room for the documents"),
    "lengths that fall": ({"cu_seq_lens": tensor([0, 3, 1]), "cu_seq_lens_padded": tensor([0, 4, 8])}, "non-decreas"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions_are_refused(name: str) -> None:
    given, said = CONTRADICTIONS[name]
    with pytest.raises(ArgumentError, match=said):
        batch_mask(**given)


def padded_batch(rank: int) -> list[Tensor]:
    """A batch whose rows are padded left and right, from what a collator says of it to rows of the whole."""
    q, k, v, _ = make_qkv(2, 4, 2, 6, 8)
    found = []
    for layout in (Contiguous(), ZigZag(), Striped(), None):
        sequence = ShardedSequence(mesh((3,), ("cp",)), layout or ZigZag())
        mask = batch_mask(attention_mask=PADDING)
        of_batch = sequence.for_batch(6, mask)
        of_batch = of_batch.balanced(mask) if layout is None else of_batch
        assert (type(of_batch.layout) is Balanced) == (layout is None)
        out = attention(
            *(of_batch.shard(x, dim=2) for x in (q, k, v)), mesh=of_batch.mesh, seq_len=of_batch.seq_len,
            layout=of_batch.layout, mask=of_batch.mask(mask),
        )  # fmt: skip
        found.append(of_batch.unshard(out, dim=2))
    return found


def test_a_padded_batch(pool: Any) -> None:
    q, k, v, _ = make_qkv(2, 4, 2, 6, 8)
    kept = PADDING.bool()
    want, _ = dense_attention(q, k, v, dense_mask(6, key_padding=kept) & kept[:, :, None])
    assert want[0, :, 5].eq(0).all() and want[1, :, :2].eq(0).all()
    for found in pool(3).run(padded_batch):
        for out in found:
            torch.testing.assert_close(out, want, **CLOSE)


def test_positions_of_documents() -> None:
    ids = tensor([[4, 4, 4, 0, 0, -1, -1], [1, 2, 3, 3, 3, 3, 3]])
    assert document_positions(ids).tolist() == [[0, 1, 2, 0, 1, 0, 1], [0, 0, 0, 1, 2, 3, 4]]


# for_batch


def sequences_of_batches(rank: int) -> None:
    axis = mesh((3,), ("cp",))
    sequence = ShardedSequence(axis, Striped(), ulysses_degree=1)
    before = num_collectives()
    for length in (1, 9, 23):
        batch = sequence.for_batch(length)
        assert batch == ShardedSequence(axis, Striped(), length=length, ulysses_degree=1)
        assert hash(batch) == hash(sequence.for_batch(length)) and batch.seq_len == -(-length // 3) * 3
        assert batch.for_batch(7).length == 7
    assert sequence.length is None and num_collectives() == before
    documents = torch.arange(23) // 9
    mask = batch_mask(documents=documents)
    assert sequence.for_batch(23, mask) == sequence.for_batch(23)
    auto, balanced = ShardedSequence(axis, "auto").for_batch(23, mask), sequence.for_batch(23).balanced(mask)
    assert auto == replace(balanced, ulysses_degree=None) and balanced.seq_len == 24
    for one in (None, torch.zeros(23, dtype=torch.int64), torch.tensor([0] * 20 + [-1] * 3), torch.arange(23) // 23):
        assert ShardedSequence(axis, "auto").for_batch(23, Mask(documents=one)) == ShardedSequence(
            axis, ZigZag(), length=23
        )
    for length in (0, 4.0, True):
        with pytest.raises(ArgumentError, match="length: expected"):
            sequence.for_batch(length)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="expected 22"):
        ShardedSequence(axis, "auto").for_batch(22, mask)


def test_sequences_of_batches(pool: Any) -> None:
    pool(3).run(sequences_of_batches)


def plans_of_lengths(rank: int) -> list[tuple[str, int, int | None]]:
    """Sizes of the caches of a process that met many lengths, and what bounds them."""
    import gc
    from functools import _lru_cache_wrapper

    def caches() -> list[Any]:
        gc.unfreeze()  # else what was imported before the ranks began is not told
        # their type, as isinstance asks proxies of what is gone
        return [x for x in gc.get_objects() if type(x) is _lru_cache_wrapper and x.__module__[:8] == "cp_mesh."]

    for each in caches():
        each.cache_clear()  # of what other tests left
    sequence = ShardedSequence(mesh((2,), ("cp",)))
    for length in range(1, 300):
        batch = sequence.for_batch(length)
        x = batch.shard(torch.zeros(1, 1, length, 2), dim=2)
        attention(x, x, x, mesh=batch.mesh, seq_len=batch.seq_len, layout=batch.layout)
    assert len(caches()) > 5
    return [(x.__qualname__, x.cache_info().currsize, x.cache_info().maxsize) for x in caches()]


@pytest.mark.full
def test_plans_of_many_lengths_are_few(pool: Any) -> None:
    for name, size, bound in pool(2).run(plans_of_lengths)[0]:
        assert size <= 256 and (bound is not None or size < 32), name


# valid_tokens, and losses in parts


V = 11


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(make_qkv(1, 1, 1, V, 6)[0][0, 0])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def micro_batches() -> list[tuple[Tensor, Tensor]]:
    """Hidden states [2, S, 6] and labels [2, S] of two data-parallel rows, of unlike lengths and tokens that count."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for S, kept in ((24, 0.9), (12, 0.2), (18, 0.0)):
        labels = torch.randint(V, (2, S), generator=generator)
        labels[torch.rand(2, S, generator=generator) >= kept] = -100
        found.append((torch.randn(2, S, 6, generator=generator, dtype=torch.float64), labels))
    return found


def in_parts(rank: int, num_chunks: int) -> tuple[list[int], Tensor, Tensor]:
    """Losses of micro-batches that share one mean, each in chunks of rows of which the logits are not held together."""
    axes = mesh((2, 2), ("dp", "cp"))
    data, row, sequence = axes["dp", "cp"]._flatten("dp_cp"), axes.get_local_rank("dp"), ShardedSequence(axes["cp"])
    whole = [{"x": x[row : row + 1], "labels": y[row : row + 1]} for x, y in micro_batches()]
    parts = [sequence.for_batch(x["x"].shape[1]).shard(x) for x in whole]
    counts = [valid_tokens(part["labels"], mesh_) for part in parts for mesh_ in (data, axes)]
    assert all(x.dtype == torch.int64 and x.shape == () for x in counts)
    count, head, total = sum(counts[::2]), Head(), torch.zeros((), dtype=torch.float64)
    for part in parts:
        for x, y in zip(part["x"].chunk(num_chunks, 1), part["labels"].chunk(num_chunks, 1), strict=True):
            loss = cross_entropy(head(x), y, data, count=count)
            loss.backward()
            total += loss.detach()
    for x in (total, head.weight.grad):
        dist.all_reduce(x)
    return [int(x) for x in counts], total, head.weight.grad


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_losses_in_parts_share_a_mean(pool: Any, num_chunks: int) -> None:
    head, batches = Head(), micro_batches()
    logits, labels = (torch.cat([x.flatten(0, 1) for x in each]) for each in zip(*batches, strict=True))
    loss = F.cross_entropy(head(logits), labels)
    loss.backward()
    want = [int((y >= 0).sum()) for _, y in batches]
    assert 0 in want
    for counts, total, grad in pool(4).run(in_parts, num_chunks):
        assert counts[::2] == counts[1::2] == want
        torch.testing.assert_close((total, grad), (loss.detach(), head.weight.grad), **CLOSE)


def other_counts(rank: int) -> tuple[int, int]:
    group = mesh((2,), ("cp",)).get_group()
    labels = tensor([[0, 1, rank], [-100, -1, -100]])[: 1 + rank]
    with pytest.raises(ArgumentError, match="labels: expected a local tensor, int64, got DTensor"):
        from torch.distributed.tensor import distribute_tensor

        valid_tokens(distribute_tensor(labels[:1], mesh((2,), ("cp",))), group)
    return int(valid_tokens(labels, group)), int(valid_tokens(labels, group, ignore_index=-1))


def test_other_labels_that_count(pool: Any) -> None:
    """Ranks may hold other numbers of labels; a group stands for its mesh."""
    assert pool(2).run(other_counts) == [(7, 8)] * 2


# all_reduce: the load-balancing loss of a router


E, TOP = 5, 2


class Router(nn.Module):
    """Experts of tokens; the loss is that of Switch Transformers, as Transformers' Mixtral and Qwen3-MoE have it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(make_qkv(1, 1, 1, E, 6)[0][0, 0])
        self.experts = nn.Parameter(make_qkv(1, E, E, 6, 6, seed=1)[0][0])

    def forward(self, x: Tensor, kept: Tensor, total: Any) -> tuple[Tensor, Tensor]:
        """Rows [B, S, 6], and the balancing loss of rows that are kept [B, S]; ``total`` sums over all rows."""
        weights = (x @ self.gate.T).softmax(-1)
        top, chosen = weights.topk(TOP)
        out = torch.einsum("bsc,ecd,bse->bsd", x, self.experts, torch.zeros_like(weights).scatter(-1, chosen, top))
        hits = F.one_hot(chosen, E).sum(2).to(x.dtype)
        num = total(kept.sum().to(x.dtype))
        fraction, mean = (total((y * kept[..., None]).sum((0, 1))) / num for y in (hits, weights))
        return out, E * (fraction * mean).sum()


def routed(rank: int, layout: Any, length: int) -> dict[str, Tensor]:
    sequence = ShardedSequence(mesh((3,), ("cp",)), layout, length=length)
    whole = make_qkv(2, 1, 1, length, 6)[0][:, 0]
    # ones of real tokens, padded with 0; a padding token of the batch, too
    local = sequence.shard({"x": whole, "attention_mask": routed_rows(length)})
    router, x = Router(), local["x"].requires_grad_()
    out, balancing = router(x, local["attention_mask"], sequence.all_reduce)
    share = (out * local["attention_mask"][..., None]).sum() + 0.1 * balancing / sequence.cp_size
    share.backward()
    loss = share.detach().clone()
    for y in (loss, *(y.grad for y in router.parameters())):
        dist.all_reduce(y)
    return {"loss": loss, "balancing": balancing.detach(), "x": sequence.unshard(x.grad)} | {
        name: y.grad for name, y in router.named_parameters()
    }


def routed_rows(length: int) -> Tensor:
    kept = torch.ones(2, length, dtype=torch.int64)
    kept[1, -4:] = 0
    return kept


@pytest.mark.parametrize(("layout", "length"), [(ZigZag(), 24), (Striped(), 22), (Contiguous(), 20)], ids=str)
def test_a_balancing_loss_is_that_of_one_rank(pool: Any, layout: Any, length: int) -> None:
    router, x, kept = Router(), make_qkv(2, 1, 1, length, 6)[0][:, 0].requires_grad_(), routed_rows(length)
    out, balancing = router(x, kept, lambda y: y)
    loss = (out * kept[..., None]).sum() + 0.1 * balancing
    loss.backward()
    want = {"loss": loss.detach(), "balancing": balancing.detach(), "x": x.grad}
    want |= {name: y.grad for name, y in router.named_parameters()}
    # the term matters: else no gradient of it would be missed
    alone = torch.autograd.grad(Router()(x, kept, lambda y: y)[0].sum(), x)[0]
    assert (want["x"] - alone)[kept == 1].abs().max() > 1e-3
    for got in pool(3).run(routed, layout, length):
        torch.testing.assert_close(got, want, **CLOSE)


def summed(rank: int, way: str) -> tuple[Tensor, Tensor, Tensor]:
    """A sum whose gradient differs on every rank, of a tensor in any memory."""
    sequence = ShardedSequence(mesh((2,), ("cp",)))
    x = (torch.arange(6.0).view(2, 3).T * (rank + 1)).requires_grad_()
    total = torch.compile(sequence.all_reduce, backend="aot_eager") if way == "compiled" else sequence.all_reduce
    y = total(x)
    y.backward(torch.full_like(y, 10.0**rank))
    return x.detach(), y.detach(), x.grad


@pytest.mark.parametrize("way", ["eager", pytest.param("compiled", marks=pytest.mark.full)])
def test_a_sum_and_its_gradient(pool: Any, way: str) -> None:
    for x, y, grad in (answers := pool(2).run(summed, way)):
        assert torch.equal(y, sum(answer[0] for answer in answers)) and x.shape == (3, 2)
        assert torch.equal(grad, torch.full((3, 2), 11.0))


# seeds of dropout


def seeds(rank: int) -> tuple[int, dict[Any, int]]:
    axes = mesh((2, 2), ("dp", "cp"))
    sequence, before, replica = ShardedSequence(axes["cp"]), num_collectives(), axes.get_local_rank("dp")
    found = {x: sequence.dropout_seed(*x, replica=replica) for x in ((0,), (1,), (2,), (0, 1), (1, 1))}
    assert num_collectives() == before
    assert all(x.dtype == torch.int64 and x.shape == (1,) and 0 <= x < 2**62 for x in found.values())
    assert (
        torch.equal(sequence.for_batch(9).dropout_seed(1, replica=replica), found[1,])
        and sequence.dropout_seed(3, device="meta").is_meta
        and {int(sequence.dropout_seed(x)) for x in (3, np.int64(3), tensor(3))} == {int(sequence.dropout_seed(3))}
    )
    with pytest.raises(ArgumentError, match="dropout_seed: step: expected an int"):
        sequence.dropout_seed(3.0)
    return replica, {key: int(x) for key, x in found.items()}


def test_seeds(pool: Any) -> None:
    """One for all ranks of a replica; others for other replicas, steps and runs."""
    answers = pool(4).run(seeds)
    assert [row for row, _ in answers] == [0, 0, 1, 1]
    assert answers[0] == answers[1] and answers[2] == answers[3]
    assert len({x for _, found in answers for x in found.values()}) == 10


def dropped(rank: int) -> tuple[int, Tensor]:
    sequence = ShardedSequence(mesh((2,), ("cp",)), Striped()).for_batch(12)
    q, k, v, _ = make_qkv(1, 2, 2, 12, 4)
    seed = sequence.dropout_seed(7, 5)
    total = partial(attention, mesh=sequence.mesh, layout=sequence.layout, seq_len=12, dropout_p=0.4)
    return int(seed), sequence.unshard(total(*(sequence.shard(x, dim=2) for x in (q, k, v)), dropout_seed=seed), dim=2)


def test_dropout_of_a_seed(pool: Any) -> None:
    q, k, v, _ = make_qkv(1, 2, 2, 12, 4)
    (seed, out), (again, _) = pool(2).run(dropped)
    assert seed == again
    want, _ = dense_attention(q, k, v, dense_mask(12), kept=dense_dropout(1, 2, 12, 0.4, seed))
    torch.testing.assert_close(out, want, **CLOSE)
