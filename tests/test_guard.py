"""Training set-ups that are wrong raise or warn on every rank, by default; the same set-up done right is silent."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from inside import inner, room
from model import Model as Decoder
from model import overlapped_plan
from ranks import mesh
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import cp_mesh
from cp_mesh import ContextParallel, Contiguous, Mask, ShardedModel, ShardedSequence, Striped

loss = room("loss")
_decide, _decide_over_tp = inner("gradients", "_decide", "_decide_over_tp")
_norm = inner("gradients", "_norm")
Calls, state_of = inner("agreement", "Calls"), inner("group_state", "state_of")

B, H, D, V = 2, 2, 8, 11
C = H * D


class Core(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=attn_mask is None)


class Model(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding, self.core, self.head = nn.Embedding(V, C), Core(), nn.Linear(C, V)

    def forward(self, tokens: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens).unflatten(-1, (H, D)).transpose(1, 2)
        return self.head(self.core(x, x, x, attn_mask).transpose(1, 2).flatten(-2))


def tokens_of(length: int, seed: int = 0) -> Tensor:
    return torch.randint(V, (B, length), generator=torch.Generator().manual_seed(seed))


def parallel(sequence: ShardedSequence, **options: Any) -> nn.Module:
    plan = {"": ShardedModel(sequence, positions=None, **options), "core": ContextParallel(sequence)}
    return cp_mesh.parallelize(Model(), sequence.mesh, plan)


def raised(pool: Any, world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """What each rank raised; all must, and soon."""
    errors = pool(world_size).run_expecting_error(fn, *args, timeout=20.0)
    assert all(errors), errors
    return errors


# Ranks that disagree. Each test has a length of its own: only the first forward of a shape is compared.


def other_batches(rank: int, how: str, compiled: bool, length: int) -> None:
    model = parallel(ShardedSequence(mesh((2,), ("cp",))))
    if compiled:
        model = torch.compile(model, backend="eager", fullgraph=True)
    torch.manual_seed(0)
    tokens = tokens_of(length, seed=rank if how == "content" else 0)
    model(torch.cat([tokens, tokens], 1) if how == "length" and rank else tokens)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("how", ["content", "length"])
@pytest.mark.quick(without="True")
def test_batches_that_differ_between_ranks(pool: Any, how: str, compiled: bool) -> None:
    length = 40 + 16 * compiled + 32 * (how == "length")
    for error in raised(pool, 2, other_batches, how, compiled, length):
        assert error.type == "RankMismatchError" and "the same tokens on every cp rank" in error.message
        assert "give every rank of a cp group the same batch" in error.message
    pool(2).run(other_batches, "not", compiled, length)


def other_plans(rank: int, root: bool, **options: Any) -> None:
    sequence, model = ShardedSequence(mesh((2,), ("cp",))), Model()
    plan: dict[str, Any] = {"core": ContextParallel(sequence), "head": cp_mesh.TiledMLP(tiles=2, **options)}
    cp_mesh.parallelize(model, sequence.mesh, plan | ({"": ShardedModel(sequence, positions=None)} if root else {}))
    model(tokens_of(32) if root else sequence.shard({"tokens": tokens_of(32)})["tokens"])


def plans_that_differ(rank: int, root: bool) -> None:
    other_plans(rank, root, dim=(-1, -2)[rank])


@pytest.mark.parametrize("root", [True, False])
def test_plans_that_differ_between_ranks(pool: Any, root: bool) -> None:
    for error in raised(pool, 2, plans_that_differ, root):
        assert "same style at 'head' on every cp rank" in error.message and "cp rank 1: TiledMLP(" in error.message
    pool(2).run(other_plans, root)


def other_shapes(rank: int, what: str, compiled: bool) -> None:
    """After a step of 20 and one of 28 tokens, one rank has a batch of a shape that both have had, or a new one."""
    model = parallel(ShardedSequence(mesh((2,), ("cp",))))
    if compiled:
        model = torch.compile(model, backend="eager", fullgraph=True)
    batches = {"known": tokens_of(28), "new": tokens_of(36), "rows": tokens_of(20)[:1], "same": tokens_of(20)}
    for tokens in (tokens_of(20), tokens_of(28), batches[what] if rank else tokens_of(20)):
        model(tokens)


SHAPES = [
    ("known", "(2, 28)", False),
    ("new", "(2, 36)", False),
    ("rows", "(1, 20)", False),
    ("known", "(2, 28)", True),
]


@pytest.mark.parametrize(("what", "shape", "compiled"), SHAPES)
@pytest.mark.quick(without="True")
def test_shapes_that_begin_to_differ(pool: Any, what: str, shape: str, compiled: bool) -> None:
    for error in pool(2).run_expecting_error(other_shapes, what, compiled):
        assert error.type == "RankMismatchError" and "the same tokens on every cp rank" in error.message
        assert "cp rank 0: torch.int64 (2, 20)" in error.message and shape in error.message, error.message
    pool(2).run(other_shapes, "same", compiled)


def words_left(rank: int) -> int:
    """Keys that 20 steps leave in the store."""
    model, counts = parallel(ShardedSequence(mesh((2,), ("cp",)))), []
    store = dist.distributed_c10d._world.pg_map[dist.group.WORLD][1]
    for _ in range(2):
        for _ in range(10):
            model(tokens_of(20))
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    return counts[1] - counts[0]


def test_the_store_does_not_grow_with_steps(pool: Any) -> None:
    assert pool(2).run(words_left) == [0, 0]


def refused_on_one_rank(rank: int, length: int) -> None:
    model = parallel(ShardedSequence(mesh((2,), ("cp",))))
    model(tokens_of(length), torch.ones(length // 2, length // 2).bool() if rank == 0 else None)


def test_what_one_rank_refuses_the_others_hear(pool: Any) -> None:
    """As of models that make a mask from the positions of their shard: it is a plain causal one on some ranks only."""
    errors = raised(pool, 2, refused_on_one_rank, 36)
    assert [error.type for error in errors] == ["UnsupportedError", "RankMismatchError"]
    assert all("a tensor attn_mask cannot be read" in error.message for error in errors)


def unlike_terms(rank: int) -> None:
    axis, q = mesh((2,), ("cp",)), torch.randn(B, H, 5, D, requires_grad=True)
    bias = torch.zeros(1, H, 5, 10, requires_grad=rank == 0)
    cp_mesh.attention(q, q, q, mesh=axis, bias=bias, method="ulysses", seq_len=10, layout=cp_mesh.Contiguous())


def test_terms_that_only_some_ranks_train(pool: Any) -> None:
    for error in raised(pool, 2, unlike_terms):
        assert error.type == "RankMismatchError" and "the same gradients wanted of" in error.message


# Labels of other rows than those of the logits.


def next_tokens(tokens: Tensor) -> Tensor:
    return torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], -100)], 1)


def labels_of(how: str, tokens: Tensor, sequence: ShardedSequence) -> Tensor:
    whole, (rank, size) = next_tokens(tokens), (sequence.cp_rank, sequence.cp_size)
    if how == "chunk":
        return whole.chunk(size, dim=1)[rank]
    if how == "shifted after":
        local = sequence.shard({"x": tokens})["x"]
        return torch.cat([local[:, 1:], torch.full_like(local[:, :1], -100)], 1)
    if how == "not shifted":
        return sequence.shard({"labels": tokens})["labels"]
    other = Striped() if how == "another layout" else sequence.layout
    return ShardedSequence(sequence.mesh, other).shard({"labels": whole})["labels"]


WRONG_LABELS = {
    "chunk": ("the labels of contiguous rows, beside tokens in zigzag", "not by chunk"),
    "shifted after": ("the next tokens within this rank's shard", "shift the whole labels and then shard them"),
    "not shifted": ("the tokens themselves", "shift the whole labels by one"),
    "another layout": ("the labels of striped rows, beside tokens in zigzag", "sequence.shard("),
}


def loss_of_labels(rank: int, how: str, root: bool, length: int, compiled: bool = False) -> None:
    """With a root that takes whole batches, or with tokens that `shard` cut."""
    axis = mesh((3,), ("cp",))
    sequence, tokens = ShardedSequence(axis), tokens_of(length)
    if root:
        model = parallel(sequence)
        if compiled:
            model.compile(backend="aot_eager", fullgraph=True)
        logits = model(tokens)
    else:
        model = cp_mesh.parallelize(Model(), axis, {"core": ContextParallel(sequence)})
        if compiled:
            model.compile(backend="aot_eager", fullgraph=True)
        logits = model(sequence.shard({"tokens": tokens})["tokens"])
    cp_mesh.cross_entropy(logits, labels_of(how, tokens, sequence), axis).backward()


@pytest.mark.parametrize("root", [True, False], ids=["root", "no root"])
def test_labels_of_other_rows(pool: Any, root: bool) -> None:
    for i, (how, says) in enumerate(WRONG_LABELS.items()):
        for error in raised(pool, 3, loss_of_labels, how, root, 60 + 6 * i + 60 * root):
            assert error.type == "ArgumentError" and "labels: expected the next tokens of this rank's" in error.message
            assert all(part in error.message for part in says), error.message
    pool(3).run(loss_of_labels, "right", root, 24 + 12 * root)


def models_in_turn(rank: int, how: str, root: bool, length: int) -> None:
    loss_of_labels(rank, "right", root, length)
    loss_of_labels(rank, how, root, length)


@pytest.mark.parametrize("root", [True, False], ids=["root", "no root"])
def test_the_first_step_of_another_model_is_looked_at_too(pool: Any, root: bool) -> None:
    for error in raised(pool, 3, models_in_turn, "chunk", root, 240 + 6 * root):
        assert all(part in error.message for part in WRONG_LABELS["chunk"]), error.message
    pool(3).run(models_in_turn, "right", root, 240 + 6 * root)


@pytest.mark.parametrize("root", [True, False], ids=["root", "no root"])
@pytest.mark.full
def test_labels_of_other_rows_of_a_compiled_model(pool: Any, root: bool) -> None:
    for error in raised(pool, 3, loss_of_labels, "chunk", root, 216 + 6 * root, True):
        assert all(part in error.message for part in WRONG_LABELS["chunk"]), error.message
    pool(3).run(loss_of_labels, "right", root, 228 + 6 * root, True)


def evaluated_before(rank: int, how: str, length: int) -> None:
    axis = mesh((3,), ("cp",))
    sequence = ShardedSequence(axis)
    model = cp_mesh.parallelize(Model(), axis, {"core": ContextParallel(sequence)})
    for seed, labelled in ((0, "right"), (1, how)):
        tokens = tokens_of(length, seed)
        with torch.set_grad_enabled(seed == 1):
            logits = model(sequence.shard({"tokens": tokens})["tokens"])
            cp_mesh.cross_entropy(logits, labels_of(labelled, tokens, sequence), axis)


def test_labels_of_other_rows_after_an_evaluation(pool: Any) -> None:
    for error in raised(pool, 3, evaluated_before, "chunk", 282):
        assert all(part in error.message for part in WRONG_LABELS["chunk"]), error.message
    pool(3).run(evaluated_before, "right", 288)


def shorter_labels(rank: int, flat: bool, length: int) -> None:
    axis = mesh((3,), ("cp",))
    sequence, tokens = ShardedSequence(axis), tokens_of(length)
    model = cp_mesh.parallelize(Model(), axis, {"core": ContextParallel(sequence)})
    local = sequence.shard({"tokens": tokens})["tokens"]
    logits, labels = model(local)[:, :-1], local[:, 1:]
    if flat:
        logits, labels = logits.flatten(0, 1), labels.flatten()
    cp_mesh.cross_entropy(logits, labels, axis)


@pytest.mark.parametrize("flat", [False, True])
def test_labels_that_lack_a_row(pool: Any, flat: bool) -> None:
    for error in raised(pool, 3, shorter_labels, flat, 12 + 6 * flat):
        assert "labels: expected" in error.message and "shift the whole labels and then shard" in error.message


def last_row_apart(rank: int, counts: str, length: int) -> None:
    """A loss in two parts, of all rows but the last and of the last; ``counts``: of which labels, or no count."""
    axis = mesh((3,), ("cp",))
    sequence, tokens = ShardedSequence(axis), tokens_of(length)
    model = cp_mesh.parallelize(Model(), axis, {"core": ContextParallel(sequence)})
    batch = sequence.shard({"tokens": tokens, "labels": next_tokens(tokens)})
    logits, labels = model(batch["tokens"]), batch["labels"]
    count = cp_mesh.training.valid_tokens({"whole": labels, "short": labels[:, 1:], "none": labels}[counts], axis)
    parts = zip(logits.tensor_split([-1], dim=1), labels.tensor_split([-1], dim=1), strict=True)
    sum(cp_mesh.cross_entropy(*part, axis, count=None if counts == "none" else count) for part in parts).backward()


def test_a_part_of_a_loss_that_lacks_a_row(pool: Any) -> None:
    pool(3).run(last_row_apart, "whole", 294)
    for counts in ("none",):
        for error in raised(pool, 3, last_row_apart, counts, 300):
            assert "labels: expected" in error.message and "99 rows of 100" in error.message, error.message


def labels_outside(rank: int) -> None:
    """As `shard` pads them, in the shard of one rank, under another ignore_index."""
    axis = mesh((3,), ("cp",))
    labels = torch.full((B, 7), -100 if rank == 1 else 3)
    cp_mesh.cross_entropy(torch.randn(B, 7, V), labels, axis, ignore_index=-1)


def test_labels_outside_of_the_vocabulary_of_one_rank(pool: Any) -> None:
    errors = raised(pool, 3, labels_outside)
    assert "or ignore_index=-1, got -100; pass ignore_index=-100, or pad" in errors[1].message
    for rank in (0, 2):
        assert errors[rank].type == "ArgumentError" and "on 1 other ranks" in errors[rank].message
        assert "or ignore_index=-1, got -100" in errors[rank].message


def one_wrong(rank: int, what: str, options: dict[str, Any]) -> None:
    """In a first loss and in later ones; with a count, rank 1 alone raises in those, at once."""
    axis = mesh((3,), ("cp",))
    state_of(axis.get_group(), Calls).here.clear()
    logits, labels = torch.randn(B, 7, V + 1), torch.ones(B, 7, dtype=torch.int64)
    wrong: Any = {
        "short": (logits, labels[:, 1:]),
        "None": (logits, None),
        "tuple": ((logits,), labels),
        "float": (logits, labels.double()),
    }[what]
    with pytest.raises(cp_mesh.ArgumentError) as error:
        cp_mesh.cross_entropy(*(wrong if rank == 1 else (logits, labels)), axis, **options)
    if not options:
        cp_mesh.cross_entropy(logits, labels, axis)
    if rank == 1 or not options:
        with pytest.raises(cp_mesh.ArgumentError, match=r"cross_entropy: (labels|logits): expected"):
            cp_mesh.cross_entropy(*(wrong if rank == 1 else (logits, labels)), axis, **options)
    raise error.value


@pytest.mark.parametrize(
    ("what", "options", "said"),
    [
        ("short", {}, "cross_entropy: labels: expected shape (2, 7), got (2, 6)"),
        ("short", {"count": 5}, "cross_entropy: labels: expected shape (2, 7), got (2, 6)"),
        ("None", {}, "cross_entropy: labels: expected a local tensor, int64, got NoneType"),
        ("tuple", {}, "cross_entropy: logits: expected a tensor, got tuple"),
        ("float", {"count": 5}, "cross_entropy: labels: expected a local tensor, int64, got torch.float64"),
    ],
    ids=str,
)
def test_a_loss_that_one_rank_refuses(pool: Any, what: str, options: dict[str, Any], said: str) -> None:
    errors = raised(pool, 3, one_wrong, what, options)
    assert errors[1].message.startswith(said)
    for rank in (0, 2):
        assert f"on 1 other ranks of the mesh: {said}" in errors[rank].message


def count_of_none(rank: int) -> None:
    cp_mesh.training.valid_tokens(None if rank == 1 else torch.ones(2, 3, dtype=torch.int64), mesh((3,), ("cp",)))  # type: ignore[arg-type]


def test_a_count_that_one_rank_refuses(pool: Any) -> None:
    assert all("valid_tokens: labels: expected" in error.message for error in raised(pool, 3, count_of_none))


def a_look_that_fails(rank: int) -> None:
    axis = mesh((3,), ("cp",))
    with mock.patch.object(loss, "check_labels", side_effect=RuntimeError("odd")) if rank == 1 else nullcontext():
        cp_mesh.cross_entropy(torch.randn(B, 7, V), torch.ones(B, 7, dtype=torch.int64), axis)


def test_whatever_a_look_at_labels_raises_is_heard(pool: Any) -> None:
    types, messages = zip(*((error.type, error.message) for error in raised(pool, 3, a_look_that_fails)), strict=True)
    assert types == ("ArgumentError", "RuntimeError", "ArgumentError")
    assert messages[1] == "odd" and all(
        "on 1 other ranks" in messages[r] and "Error: odd" in messages[r] for r in (0, 2)
    )


def no_rows_on_a_replica(rank: int) -> list[tuple[float, list[Tensor]]]:
    """This rank's share and gradients in a first step over both replicas, the second without rows, and over its own."""
    whole = mesh((2, 2), ("dp", "cp"))
    sequence, tokens = ShardedSequence(whole["cp"]), tokens_of(12)[: 1 - whole.get_local_rank("dp")]
    labels, found = sequence.shard({"labels": next_tokens(tokens)})["labels"], []
    for axes in (whole._flatten("dp_cp"), whole["cp"]):
        model = parallel(sequence)
        share = cp_mesh.cross_entropy(model(tokens), labels, axes)
        share.backward()
        found.append((share.item(), [x.grad for x in model.parameters()]))
    return found


def test_a_replica_without_rows_in_the_first_step(pool: Any) -> None:
    for rank, ((share, grads), (own_share, own_grads)) in enumerate(pool(4).run(no_rows_on_a_replica)):
        assert share == own_share and (share > 0) == (rank < 2), rank
        assert all(map(torch.equal, grads, own_grads)) and any(map(torch.any, grads)) == (rank < 2), rank


def sharded_twice(rank: int, root: bool, length: int) -> None:
    sequence = ShardedSequence(mesh((3,), ("cp",)))
    model = parallel(sequence)
    tokens = sequence.shard({"tokens": tokens_of(length)})["tokens"]
    if root:
        model(tokens)
    else:
        sequence.shard({"tokens": tokens})


@pytest.mark.parametrize("root", [True, False])
def test_what_is_sharded_twice(pool: Any, root: bool) -> None:
    for error in raised(pool, 3, sharded_twice, root, 36):
        assert "a tensor of the whole sequence, got rows that shard has returned; shard once" in error.message


def tokens_by_rank(rank: int, length: int) -> None:
    sequence = ShardedSequence(mesh((3,), ("cp",)))
    model = cp_mesh.parallelize(Model(), sequence.mesh, {"core": ContextParallel(sequence)})
    model(sequence.shard({"tokens": tokens_of(length, seed=int(rank == 1))})["tokens"])


def test_tokens_that_differ_without_a_root(pool: Any) -> None:
    for error in raised(pool, 3, tokens_by_rank, 306):
        assert error.type == "RankMismatchError" and "expected the same tokens on every cp rank" in error.message


def right_labels(rank: int, how: str, length: int) -> list[str]:
    """A first loss that is right, over tokens that `shard` cut; what is warned of."""
    axis = mesh((3,), ("cp",))
    sequence, whole = ShardedSequence(axis), tokens_of(length)
    model = cp_mesh.parallelize(Model(), axis, {"core": ContextParallel(sequence)})
    batch = sequence.shard({"tokens": whole, "labels": next_tokens(whole)})
    tokens, labels = batch["tokens"], batch["labels"]
    hidden = torch.arange(tokens.shape[1]) % 3 > 0
    if how == "masked tokens":
        tokens, labels = tokens.where(hidden, 0), tokens.where(~hidden, -100)
    logits = model(tokens)
    if how == "of rows that count":
        count = labels[0] != -100  # one less where the last token is
        logits, labels = logits[0, count], labels[0, count]
    elif how == "gathered as a sum":
        logits, labels = sequence.unshard(logits), next_tokens(whole)
    return warned(lambda: cp_mesh.cross_entropy(logits, labels, axis).backward())


def test_labels_that_are_right(pool: Any) -> None:
    for length, how in enumerate(("of rows that count", "gathered as a sum")):
        assert pool(3).run(right_labels, how, 312 + 6 * length) == [[]] * 3, how
    for (said,) in pool(3).run(right_labels, "masked tokens", 324):
        assert "labels equal the tokens of their rows, which suits masked tokens; for next tokens, shift" in said


def labels_of_joined_batches(rank: int) -> list[str]:
    """Each rank holds a document, which ends with a label of its own: that of the text that was cut off there."""
    sequence, whole = ShardedSequence(mesh((3,), ("cp",)), Contiguous()), tokens_of(312)
    mask = Mask(documents=torch.arange(312) // 104)
    labels = next_tokens(whole)
    labels[:, 103::104] = (labels[:, 103::104] + 1) % V
    plan = {"": ShardedModel(sequence, positions=None), "core": ContextParallel(sequence, mask=mask)}
    model, own = cp_mesh.parallelize(Model(), sequence.mesh, plan), sequence.shard({"labels": labels})["labels"]
    return warned(lambda: cp_mesh.cross_entropy(model(whole), own, sequence.mesh))


def test_labels_of_joined_batches(pool: Any) -> None:
    assert pool(3).run(labels_of_joined_batches) == [[]] * 3


def labels_of_later_tokens(rank: int, shift: int) -> list[str]:
    """What is warned of in the striped layout, where the token three places on is the next row of the same rank."""
    sequence, whole = ShardedSequence(mesh((3,), ("cp",)), Striped()), tokens_of(312)
    labels = torch.cat([whole[:, shift:], torch.full_like(whole[:, :shift], -100)], 1)
    own, model = sequence.shard({"labels": labels})["labels"], parallel(sequence)
    return warned(lambda: cp_mesh.cross_entropy(model(whole), own, sequence.mesh))


def test_labels_of_later_tokens(pool: Any) -> None:
    assert pool(3).run(labels_of_later_tokens, 1) == [[]] * 3
    for shift in (2, 3):
        for said in pool(3).run(labels_of_later_tokens, shift):
            assert len(said) == 1 and f"labels are tokens {shift} places after their rows" in said[0], said


def batches_ahead(rank: int, other: int) -> None:
    """The batch of a loader that has cut the next one, of another length; then rows that nobody cut."""
    sequence = ShardedSequence(mesh((3,), ("cp",)))
    model = cp_mesh.parallelize(Model(), sequence.mesh, {"core": ContextParallel(sequence)})
    batches = [sequence.shard({"tokens": tokens_of(length)})["tokens"] for length in (330, 336)]
    model(batches[0] if other == 0 else batches[0][:, :-other])


def test_rows_that_were_not_cut(pool: Any) -> None:
    pool(3).run(batches_ahead, 0)
    for error in raised(pool, 3, batches_ahead, 2):
        assert "expected rows that were sharded before, 110 in zigzag, or 112 in zigzag, got 108" in error.message


def without_a_plan(rank: int, how: str) -> list[str]:
    """What a first step warns of, without any plan, or with one in another layout than that of the tokens."""
    axis = DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=("cp",))  # nobody had a plan over it
    sequence, model = ShardedSequence(axis, length=318), Model()
    if how != "no plan":
        other = ShardedSequence(axis, Contiguous(), length=318) if how == "another layout" else sequence
        cp_mesh.parallelize(model, axis, {"core": ContextParallel(other)})
    batch = sequence.shard({"tokens": tokens_of(318), "labels": next_tokens(tokens_of(318))})
    return warned(lambda: cp_mesh.cross_entropy(model(batch["tokens"]), batch["labels"], axis).backward())


def test_a_plan_that_is_not_of_the_tokens(pool: Any) -> None:
    says = {"no plan": "nothing mixed them", "another layout": "a layout in which tensors were sharded before, 106"}
    for how, text in says.items():
        for said in pool(3).run(without_a_plan, how):
            assert len(said) == 1 and text in said[0], said
    assert pool(3).run(without_a_plan, "right") == [[]] * 3


def two_forwards(rank: int, lengths: tuple[int, int]) -> None:
    """Before their losses, as of chosen and rejected answers."""
    axis = mesh((3,), ("cp",))
    sequence, every = ShardedSequence(axis), [tokens_of(length) for length in lengths]
    model = cp_mesh.parallelize(Model(), axis, {"core": ContextParallel(sequence)})
    logits = [model(sequence.shard({"tokens": tokens})["tokens"]) for tokens in every]
    labels = [labels_of("right", tokens, sequence) for tokens in every]
    sum(cp_mesh.cross_entropy(x, y, axis) for x, y in zip(logits, labels, strict=True)).backward()


@pytest.mark.parametrize("lengths", [(252, 264), (276, 270)])
def test_two_forwards_of_unlike_lengths_before_their_losses(pool: Any, lengths: tuple[int, int]) -> None:
    pool(3).run(two_forwards, lengths)


def loss_of_a_group(rank: int) -> list[float]:
    axis, logits = mesh((3,), ("cp",)), torch.randn(B, 5, V)
    labels = torch.full((B, 5), 3)
    with pytest.raises(cp_mesh.ArgumentError, match="mesh: expected a DeviceMesh or a ProcessGroup, got 3"):
        cp_mesh.cross_entropy(logits, labels, 3)
    return [
        cp_mesh.cross_entropy(logits, labels, axis).item(),
        cp_mesh.cross_entropy(logits, labels, axis.get_group()).item(),
    ]


def test_the_loss_takes_a_process_group(pool: Any) -> None:
    for by_mesh, by_group in pool(3).run(loss_of_a_group):
        assert by_mesh == by_group > 0


# What a module says of its attention, and its style does not.


class Config:
    def __init__(self, **fields: Any) -> None:
        self.__dict__ |= fields


def stating(**fields: Any) -> Model:
    model = Model()
    for name, value in fields.items():
        setattr(model.core, name, value)
    return model


SLIDING = {"config": Config(sliding_window=4, layer_types=["full_attention", "sliding_attention"]), "layer_idx": 1}
FULL = SLIDING | {"layer_idx": 0}
STATED = {
    "a window": ({"sliding_window": 4}, {}, "window of 4 keys, got a mask without a window", "window=(3, 0)"),
    "another window": ({"sliding_window": 4}, {"mask": Mask(window=(7, 0))}, "got window=(7, 0)", "window=(3, 0)"),
    "a window in its config": ({"config": Config(sliding_window=4)}, {}, "window of 4 keys", "window=(3, 0)"),
    "a window of its layer": (SLIDING, {}, "window of 4 keys", "window=(3, 0)"),
    "chunks": ({"attention_chunk_size": 4}, {}, "chunks of 4 keys", "documents=positions // 4"),
    "a softcap": ({"attn_logit_softcapping": 30.0}, {}, "the module's softcap of 30.0, got None", '{"softcap": 30.0}'),
    "sinks": ({"sinks": torch.zeros(H)}, {}, "the module's sinks in scores, got none", "core.sinks"),
}  # fmt: skip
SAID: dict[str, Any] = {
    "a window": ({"sliding_window": 4}, {"mask": Mask(window=(3, 0))}),
    "a window of another layer": (FULL, {}),
    "no window": ({"sliding_window": None, "config": Config(sliding_window=4)}, {}),
    "a window longer than the sequence": ({"sliding_window": 64}, {}),
    "an unused window": ({"config": Config(sliding_window=4, use_sliding_window=False)}, {}),
    "a softcap": ({"attn_logit_softcapping": 30.0}, {"scores": {"softcap": 30.0}}),
    "sinks": ({"sinks": torch.zeros(H)}, {"scores": {"sinks": torch.zeros(H)}}),
}


def stated(rank: int, fields: dict[str, Any], options: dict[str, Any], compiled: bool) -> None:
    axis = mesh((2,), ("cp",))
    sequence = ShardedSequence(axis)
    model = cp_mesh.parallelize(stating(**fields), axis, {"core": ContextParallel(sequence, **options)})
    if compiled:
        model = torch.compile(model, backend="eager", fullgraph=True)
    model(sequence.shard({"tokens": tokens_of(16)})["tokens"])


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("what", STATED)
def test_what_the_module_says_and_the_style_does_not(pool: Any, what: str, compiled: bool) -> None:
    fields, options, *says = STATED[what]
    for error in raised(pool, 2, stated, fields, options, compiled):
        message = error.message.replace("\\'", "'")  # as Dynamo quotes it
        assert "ContextParallel(Core): expected the module's" in message, message
        assert all(part in message for part in says), message


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("what", SAID)
def test_what_both_say(pool: Any, what: str, compiled: bool) -> None:
    pool(2).run(stated, *SAID[what], compiled)


class Masked(Core):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None) -> Tensor:
        return super().forward(q, k, v)


class MaskedModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.core = Masked()


def unread_mask(rank: int, reads: bool, compiled: bool) -> None:
    axis = mesh((2,), ("cp",))
    sequence = ShardedSequence(axis)
    options = {"mask": lambda q, k, v, mask: mask} if reads else {}
    model = cp_mesh.parallelize(MaskedModel(), axis, {"core": ContextParallel(sequence, **options)})
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    run(sequence.shard({"tokens": tokens_of(16)})["tokens"], Mask(window=(3, 0)))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_mask_that_no_style_reads(pool: Any, compiled: bool) -> None:
    for error in raised(pool, 2, unread_mask, False, compiled):
        assert "a style that reads the Mask" in error.message and "mask=lambda q, k, v, mask: mask" in error.message
    pool(2).run(unread_mask, True, compiled)


class OfEmbeddings(Model):
    def forward(self, x: Tensor, documents: Tensor) -> Tensor:  # type: ignore[override]
        x = x.unflatten(-1, (H, D)).transpose(1, 2)
        return self.head(self.core(x, x, x).transpose(1, 2).flatten(-2))


def whole_documents(rank: int) -> None:
    sequence = ShardedSequence(mesh((2,), ("cp",)))
    model = cp_mesh.parallelize(OfEmbeddings(), sequence.mesh, {"core": ContextParallel(sequence)})
    model(torch.randn(B, 8, C), documents=tokens_of(16).sort().values)


def test_documents_are_whole_on_every_rank(pool: Any) -> None:
    pool(2).run(whole_documents)


def misspelt(rank: int, options: dict[str, Any]) -> None:
    ContextParallel(ShardedSequence(mesh((2,), ("cp",))), **options)


@pytest.mark.parametrize("name", ["method", "kernel", "transport"])
def test_misspelt_names_are_refused_where_they_are_written(pool: Any, name: str) -> None:
    for error in raised(pool, 2, misspelt, {name: "rnig"}):
        assert f"{name}: expected one of auto" in error.message and "got 'rnig'" in error.message


def wrong_arity(rank: int) -> None:
    axis = mesh((2,), ("cp",))
    core = cp_mesh.parallelize(Core(), axis, {"": ContextParallel(ShardedSequence(axis), mask=lambda q: Mask())})
    core(*(torch.randn(1, H, 8, D) for _ in range(3)))


def test_a_mask_function_of_other_arguments(pool: Any) -> None:
    for error in raised(pool, 2, wrong_arity):
        assert error.type == "ArgumentError"
        assert "a function of the core's call arguments, (Tensor, Tensor, Tensor)" in error.message
        assert "got one of (q); take *args, **kwargs" in error.message


# Positions, and what else only the root can see.


class Positioned(Model):
    """With learned positions: given, or counted inside."""

    def __init__(self, rows: int = 64) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, C)

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1])
        x = (self.embedding(tokens) + self.table(position_ids)).unflatten(-1, (H, D)).transpose(1, 2)
        return self.head(self.core(x, x, x).transpose(1, 2).flatten(-2))


class Counting(Positioned):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens)


def positioned(rank: int, positions: str | None, given: int | str | None, compiled: bool) -> None:
    sequence = ShardedSequence(mesh((2,), ("cp",)))
    plan = {"": ShardedModel(sequence, positions=positions), "core": ContextParallel(sequence)}
    model = cp_mesh.parallelize(Positioned(), sequence.mesh, plan)
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    ids = sequence.positions(16) if given == "own" else given
    run(tokens_of(16), torch.arange(ids) if isinstance(ids, int) else ids)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_positions_of_a_root(pool: Any, compiled: bool) -> None:
    for error in raised(pool, 2, positioned, None, None, compiled):
        assert "a source of the forward's position_ids" in error.message.replace("\\'", "'")
        assert "positions='position_ids'" in error.message.replace("\\'", "'")
    for error in raised(pool, 2, positioned, "position_ids", 8, compiled):
        assert "expected as many as the inputs have tokens, got 8 of them; leave them out" in error.message
    for given in (None, 16):
        pool(2).run(positioned, "position_ids", given, compiled)
    if not compiled:
        for error in raised(pool, 2, positioned, None, 8, compiled):
            assert "expected the positions of this rank's 8 rows, got 0, 1, 2, ..." in error.message
    pool(2).run(positioned, None, "own", compiled)


def warned(fn: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fn()
    ours = [warning for warning in caught if str(warning.message).startswith("cp_mesh:")]
    folders = {Path(warning.filename).parent for warning in ours}
    assert folders <= {Path(__file__).parent}  # the user's line, through modules, hooks and modes
    return [str(warning.message) for warning in ours]


def counted_inside(rank: int) -> list[list[str]]:
    sequence = ShardedSequence(mesh((2,), ("cp",)))
    plan = {"": ShardedModel(sequence, positions=None), "core": ContextParallel(sequence)}
    counting = cp_mesh.parallelize(Counting(), sequence.mesh, plan)
    right = parallel(sequence)
    return [warned(functools.partial(model, tokens_of(16))) for model in (counting, counting, right)]


def test_positions_counted_in_the_model(pool: Any) -> None:
    for first, second, right in pool(2).run(counted_inside):
        assert len(first) == 1 and "counts 8 positions from 0, as many as this rank holds rows" in first[0]
        assert second == right == []


class Rotated(Core):
    """A core with a table for positions from 0, which it cuts to the rows that it has, or to more."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("cos", torch.ones(64, D))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = q.shape[2]
        cos = {
            "slice": lambda: self.cos[:rows],
            "slice of a view": lambda: self.cos[None, 0:rows],
            "narrow": lambda: self.cos.narrow(0, 0, rows),
            "more": lambda: self.cos[: 2 * rows][:rows],
            "later": lambda: self.cos[rows : 2 * rows],
        }[self.how]()
        return super().forward(q * cos, k * cos, v)


def cut_tables(rank: int, hows: list[str]) -> list[list[str]]:
    sequence, found = ShardedSequence(mesh((2,), ("cp",))), []
    for how in hows:
        model = Positioned()
        model.core = Rotated(how)
        plan = {"": ShardedModel(sequence, positions="position_ids"), "core": ContextParallel(sequence)}
        cp_mesh.parallelize(model, sequence.mesh, plan)
        found.append(warned(functools.partial(model, tokens_of(16))))
    return found


def test_tables_that_a_core_cuts_to_the_rows_of_a_rank(pool: Any) -> None:
    hows = ["slice", "slice of a view", "narrow", "more", "later"]
    for *cut, more, later in pool(2).run(cut_tables, hows):
        assert all(len(said) == 1 and "cuts a table to 8 positions from 0" in said[0] for said in cut), cut
        assert more == later == []


def short_table(rank: int, rows: int) -> None:
    sequence = ShardedSequence(mesh((2,), ("cp",)), length=21)
    plan = {"": ShardedModel(sequence, positions="position_ids"), "core": ContextParallel(sequence)}
    cp_mesh.parallelize(Positioned(rows), sequence.mesh, plan)(tokens_of(21))


def test_a_table_of_positions_that_is_too_short_for_padding(pool: Any) -> None:
    errors = raised(pool, 2, short_table, 21)
    assert [error.type for error in errors] == ["ArgumentError", "RankMismatchError"]  # rank 0 holds the padding
    assert all("tables for 24 positions" in error.message and "pad=False" in error.message for error in errors)
    pool(2).run(short_table, 24)


class Padded(nn.Module):
    def forward(self, x: Tensor, targets: Tensor, label_weights: Tensor, y: Tensor | None = None) -> Any:
        return x, targets, label_weights


def padded_inputs(rank: int) -> None:
    sequence, ones = ShardedSequence(mesh((2,), ("cp",)), Contiguous(), length=5), torch.ones(1, 5, dtype=torch.int64)
    model, names = Padded(), ("x", "targets", "label_weights")
    cp_mesh.parallelize(model, sequence.mesh, {"": ShardedModel(sequence, inputs=names, positions=None)})
    found = [rows[0, 1:].tolist() for rows in model(ones, ones, ones.double())]
    assert found == ([[1, 0], [1, -100], [1.0, 0.0]] if rank else [[1, 1]] * 3)
    plan = {"": ShardedModel(sequence, inputs=(*names, "y"), positions=None)}
    with pytest.raises(cp_mesh.ArgumentError, match=r"shard\(y\): expected a pad_value for an integer.* or pad=False"):
        cp_mesh.parallelize(Padded(), sequence.mesh, plan)(ones, ones, ones.double(), ones)


def test_inputs_of_a_root_are_padded_by_their_whole_names(pool: Any) -> None:
    pool(2).run(padded_inputs)


class Unread(Model):
    def forward(self, tokens: Tensor, mask: Mask | None = None) -> Tensor:
        return super().forward(tokens)


def mask_of_a_root(rank: int, compiled: bool) -> None:
    sequence = ShardedSequence(mesh((2,), ("cp",)))
    plan = {"": ShardedModel(sequence, positions=None), "core": ContextParallel(sequence)}
    model = cp_mesh.parallelize(Unread(), sequence.mesh, plan)
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    run(tokens_of(16), Mask(window=(3, 0)))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_mask_that_no_core_reads(pool: Any, compiled: bool) -> None:
    for error in raised(pool, 2, mask_of_a_root, compiled):
        assert "ShardedModel: expected a core that reads mask" in error.message and "lambda ..., mask" in error.message


class WithLoss(Model):
    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own = own

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = super().forward(tokens)
        if self.own:
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return cp_mesh.cross_entropy(logits, labels, mesh((2,), ("cp",)))


def loss_inside(rank: int, own: bool) -> list[str]:
    sequence, tokens = ShardedSequence(mesh((2,), ("cp",))), tokens_of(20)
    root = ShardedModel(sequence, inputs=("tokens", "labels"), positions=None)
    model = cp_mesh.parallelize(WithLoss(own), sequence.mesh, {"": root, "core": ContextParallel(sequence)})
    return warned(lambda: model(tokens, next_tokens(tokens)))


def test_a_model_that_computes_the_loss_of_its_shard(pool: Any) -> None:
    for said in pool(2).run(loss_inside, True):
        assert len(said) == 1 and "this rank's rows of labels" in said[0] and "leave labels out of inputs" in said[0]
    assert pool(2).run(loss_inside, False) == [[], []]


# The scale of gradients: what loss, and how they are reduced.


def gathered(rank: int, how: str, compiled: bool) -> list[str]:
    """A loss of the whole output, over dp x cp = 2 x 2, or over cp = 4."""
    grid, alone = mesh((2, 2), ("dp", "cp")), mesh((4,), ("cp",))
    data, axis = (flattened(), grid["cp"]) if "dp" in how else (alone, alone)
    seeds = (0, 1) if "dp" in how else (0,)
    tokens = tokens_of(16, seed=grid.get_local_rank("dp") if "dp" in how else 0)
    model = parallel(ShardedSequence(axis), gather_output=True)
    if compiled:
        model.compile(backend="eager")
    fully_shard(model, mesh=data)
    cp_mesh.sum_gradients(model)
    optimizer, whole = torch.optim.SGD(model.parameters(), 0.1), next_tokens(tokens)

    def step() -> None:
        logits = model(tokens)
        if "wrong" in how:
            cp_mesh.cross_entropy(logits, whole, data)
        elif "dp" in how:
            cp_mesh.cross_entropy(logits, whole, grid["dp"]).backward()
        else:
            F.cross_entropy(logits.flatten(0, 1), whole.flatten()).backward()
        compare_with_one_rank(model, seeds, 16)
        optimizer.step()

    return warned(step)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("how", ["cp", "dp x cp"])
def test_a_loss_of_gathered_logits_has_the_right_scale(pool: Any, how: str, compiled: bool) -> None:
    assert pool(4).run(gathered, how, compiled) == [[]] * 4


def test_a_loss_that_counts_gathered_logits_once_a_rank(pool: Any) -> None:
    for error in raised(pool, 4, gathered, "wrong, dp x cp", False):
        assert "got 16 rows, of the whole sequence, on every cp rank" in error.message
        assert 'cross_entropy over mesh["dp"]' in error.message


def trained(rank: int, how: str) -> list[str]:
    """Warnings of two steps over dp x cp = 2 x 2; gradients are those of one rank where the set-up is right."""
    grid = mesh((2, 2), ("dp", "cp"))
    data, tokens = flattened(), tokens_of(12, seed=grid.get_local_rank("dp"))
    sequence, model = ShardedSequence(grid["cp"]), Model()
    root = {"": ShardedModel(sequence, positions=None)} if "no root" not in how else {}
    cp_mesh.parallelize(model, grid["cp"], root | {"core": ContextParallel(sequence)})
    run: nn.Module = model
    if "FSDP over dp" in how:
        fully_shard(model, mesh=grid["dp"])
    elif "FSDP" in how:
        fully_shard(model, mesh=grid["cp"] if "over cp" in how else data)
        if "averages" not in how:
            cp_mesh.sum_gradients(model)
    elif "DDP" in how:
        run = DistributedDataParallel(model, process_group=None if "over cp" not in how else grid["cp"].get_group())
        if "sums" in how:
            cp_mesh.sum_gradients(run)
    if "compiled" in how:
        model.compile(backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if "evaluated" in how:
        with torch.no_grad():
            cp_mesh.cross_entropy(run(tokens), sequence.shard({"labels": next_tokens(tokens)})["labels"], data)

    def step() -> None:
        whole = next_tokens(tokens)
        logits = run(tokens) if root else run(sequence.shard({"tokens": tokens})["tokens"])
        labels = sequence.shard({"labels": whole})["labels"]
        if "mean" in how:
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        else:
            loss = cp_mesh.cross_entropy(logits, labels, grid["cp"] if "loss of cp" in how else data)
        (4 * loss if "times 4" in how else 2 * loss if "times 2" in how else loss).backward()
        if "cp summed" in how:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad.to_local(), group=grid["cp"].get_group())
        if "by hand" in how:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        if how.startswith("right"):
            compare_with_one_rank(model)
        optimizer.step()
        optimizer.zero_grad()

    return warned(step) + [f"again: {said}" for said in warned(step)]


@functools.cache
def flattened() -> Any:
    return mesh((2, 2), ("dp", "cp"))._flatten("dp_cp")


def compare_with_one_rank(model: nn.Module, seeds: tuple[int, ...] = (0, 1), length: int = 12) -> None:
    plain, tokens = Model(), torch.cat([tokens_of(length, seed=seed) for seed in seeds])
    state = {name: getattr(x, "full_tensor", lambda x=x: x)() for name, x in model.state_dict().items()}
    plain.load_state_dict(state)
    F.cross_entropy(plain(tokens).flatten(0, 1), next_tokens(tokens).flatten()).backward()
    for (name, x), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        got = x.grad.full_tensor() if hasattr(x.grad, "full_tensor") else x.grad
        torch.testing.assert_close(got, want.grad, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


RIGHT_SCALE = (
    *("right: FSDP", "right: FSDP, no root", "right: FSDP, compiled", "right: DDP, times 4", "right: DDP, sums"),
    "right: FSDP over dp, no root, times 2, cp summed",
    *("right: by hand", "right: by hand, no root", "right: DDP, sums, compiled"),
)
WARNED_OF_SCALE = {
    "FSDP, mean": "a loss that is not cp_mesh.cross_entropy",
    "FSDP, mean, no root, compiled": "a loss that is not cp_mesh.cross_entropy",
    "FSDP, averages": "cp_mesh.sum_gradients(model) after fully_shard",
    "FSDP, averages, no root": "cp_mesh.sum_gradients(model) after fully_shard",
    "FSDP, averages, compiled": "cp_mesh.sum_gradients(model) after fully_shard",
    "DDP": "call cp_mesh.sum_gradients(ddp_model), or multiply the loss by 4",
    "DDP, evaluated": "call cp_mesh.sum_gradients(ddp_model), or multiply the loss by 4",
    "DDP, no root, compiled": "call cp_mesh.sum_gradients(ddp_model), or multiply the loss by 4",
}
REFUSED_SCALE = {
    "FSDP, loss of cp": "cross_entropy: expected a mean over the ranks that fully_shard reduces over, [0, 1, 2, 3]",
    "FSDP over dp, no root, times 2": "equal on all ranks before the optimizer steps, got different ones on the ranks",
    "FSDP over cp": "expected a sum over the ranks of cross_entropy, [0, 1, 2, 3], got fully_shard over ranks",
    "DDP, sums, loss of cp": "expected a mean over the ranks that DistributedDataParallel reduces over",
    "DDP over cp, sums": "got DistributedDataParallel over ranks",
    "none": "equal on all ranks before the optimizer steps, got different ones on the ranks",
    "none, compiled, no root": "equal on all ranks before the optimizer steps, got different ones on the ranks",
}


@pytest.mark.full
def test_gradients_of_the_right_scale_are_silent(pool: Any) -> None:
    for how in RIGHT_SCALE:
        assert pool(4).run(trained, how) == [[]] * 4, how


@pytest.mark.parametrize("how", WARNED_OF_SCALE)
@pytest.mark.quick(without="compiled")
def test_gradients_of_a_doubtful_scale_are_warned_of(pool: Any, how: str) -> None:
    for said in pool(4).run(trained, how):
        assert len(said) == 1 and WARNED_OF_SCALE[how] in said[0], said  # in the first step alone


@pytest.mark.parametrize("how", REFUSED_SCALE)
@pytest.mark.quick(without="compiled")
def test_gradients_of_a_wrong_scale_are_refused(pool: Any, how: str) -> None:
    for error in raised(pool, 4, trained, how):
        assert error.type == "ArgumentError" and REFUSED_SCALE[how] in error.message, error.message


class NoCopies(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        assert isinstance(found, float) or found.numel() == 1, f"{func} of {tuple(found.shape)}"
        return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_norm_of_a_gradient_takes_no_memory_of_its_size(dtype: torch.dtype) -> None:
    grad = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    with NoCopies():
        norm = _norm(grad)
    torch.testing.assert_close(norm, float(grad.double().norm()), rtol=1e-5, atol=0)


# Over tp.


def trained_over_tp(rank: int, how: str) -> list[str]:
    grid = mesh((2, 2), ("cp", "tp"))
    sequence, decoder = ShardedSequence(grid["cp"]), Decoder(dtype=torch.float32)
    plan = overlapped_plan("all_reduce" if "all-reduce" in how else "reduce_scatter")
    if "no norms" in how:
        plan = {name: style for name, style in plan.items() if "norm" not in name}
    cp_mesh.parallelize(decoder, grid["tp"], plan)
    root = ShardedModel(sequence, positions="positions")
    cp_mesh.parallelize(decoder, grid["cp"], {"": root, "layers.*.core": ContextParallel(sequence)})
    if "cut by hand" in how:
        for name, x in decoder.named_parameters():
            if "norm" in name:
                x.data += grid.get_local_rank("tp")
    if "FSDP" in how:
        fully_shard(decoder, mesh=grid["cp"])
        cp_mesh.sum_gradients(decoder)
    optimizer = torch.optim.SGD(decoder.parameters(), 0.1)
    tokens = tokens_of(16)
    labels = sequence.shard({"labels": next_tokens(tokens)})["labels"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cp_mesh.cross_entropy(decoder(tokens), labels, grid["cp"]).backward()
        for x in decoder.parameters() if "FSDP" not in how else ():
            dist.all_reduce(getattr(x.grad, "to_local", lambda x=x: x.grad)(), group=grid["cp"].get_group())
        try:
            optimizer.step()
        except cp_mesh.ArgumentError as error:
            return [f"refused: {error}"]
    return [text for x in caught if (text := str(x.message)).startswith("cp_mesh:")]


@pytest.mark.parametrize("how", ["FSDP", "by hand", "all-reduce, no norms, FSDP", "no norms, cut by hand"])
@pytest.mark.quick("by hand")
def test_equal_gradients_over_tp_are_silent(pool: Any, how: str) -> None:
    assert pool(4).run(trained_over_tp, how) == [[]] * 4


@pytest.mark.parametrize("how", ["no norms, FSDP", "no norms, by hand"])
def test_norms_on_rows_of_tp_without_a_style_are_told(pool: Any, how: str) -> None:
    for (said,) in pool(4).run(trained_over_tp, how):
        assert said.startswith("refused")
        assert "gradients of 5 of 5 parameters that tp does not shard, such as layers.0.norm.weight" in said
        assert "SequenceParallel()" in said


def _answers(**norms: Any) -> list[dict[str, dict[str, float]]]:
    """Of two ranks: names to pairs of (gradient, weight, sample)."""
    fields = [*enumerate(("gradients", "weights", "samples"))]
    return [
        {field: {name: ranks[rank][at] for name, ranks in norms.items()} for at, field in fields} for rank in (0, 1)
    ]


@pytest.mark.parametrize(
    ("norms", "said"),
    [
        ({"norm.weight": ((1, 2, 2), (2, 2, 2))}, "refused"),
        ({"norm.bias": ((1, 0, 0), (2, 0, 0))}, "warned"),  # a part of each rank's own may begin at zero
        ({"experts.w": ((1, 2, 2.1), (2, 2, 2.2))}, ""),  # norms of large weights are equal by chance
        ({"expert.weight": ((1, 2, 2), (2, 3, 3)), "expert.bias": ((1, 1, 1), (2, 1, 1))}, ""),
        ({"norm.weight": ((1, 2, 2), (1, 3, 3))}, ""),
    ],
)
def test_what_differs_over_tp(norms: Any, said: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            _decide_over_tp(list(norms), _answers(**norms))
            found = "warned" if caught else ""
        except cp_mesh.ArgumentError:
            found = "refused"
    assert found == said


@pytest.mark.parametrize(
    ("norms", "refused"),
    [
        ({"a": ((1, 2, 2), (1, 3, 3))}, True),
        ({"a": ((1, 2, 2.1), (1, 2, 2.2))}, True),
        ({"a": ((1, 2, 2), (1, 2, 2)), "lora_A": ((0, 2, 2), (0, 3, 3))}, False),  # lora_B begins at zero
        ({"a": ((1, 2, 2), (1, 2, 2))}, False),
    ],
)
def test_other_weights(norms: Any, refused: bool) -> None:
    with pytest.raises(cp_mesh.ArgumentError, match="one seed") if refused else nullcontext():
        _decide(list(norms), _answers(**norms))


# Without a root.


class TwoCores(Model):
    def __init__(self) -> None:
        super().__init__()
        self.other = Core()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).unflatten(-1, (H, D)).transpose(1, 2)
        return self.head((self.core(x, x, x) + self.other(x, x, x)).transpose(1, 2).flatten(-2))


def rootless(rank: int, how: str, compiled: bool) -> list[str]:
    sequence = ShardedSequence(mesh((2,), ("cp",)))
    whole = tokens_of(16)
    model: nn.Module = Positioned() if "positions" in how else TwoCores() if "two" in how else Model()
    plan = {"core": ContextParallel(sequence)}
    if how == "two cores, both planned":
        cp_mesh.parallelize(model, sequence.mesh, plan | {"other": ContextParallel(sequence)})
    else:
        cp_mesh.parallelize(model, sequence.mesh, plan, watch="allowed" not in how)
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    tokens = sequence.shard({"tokens": whole})["tokens"]
    given: dict[str, Any] = {}
    if how == "counted positions":
        given = {"position_ids": torch.arange(8)[None]}
    elif how == "positions of the rows":
        given = {"position_ids": sequence.positions(16)}
    says = warned(lambda: run(whole if how == "whole" else tokens, **given))
    return says + warned(lambda: run(tokens, **given))


@pytest.mark.parametrize(("how", "compiled"), [("two cores", False), ("two cores", True), ("whole", False),
                                               ("counted positions", False)])  # fmt: skip
def test_what_is_refused_without_a_root(pool: Any, how: str, compiled: bool) -> None:
    says = {
        "two cores": "every self-attention in a ContextParallel module",
        "whole": "expected this rank's rows of the tokens, got the same (2, 16) on every cp rank; shard them",
        "counted positions": "the positions of this rank's 8 rows, got 0, 1, 2, ...; pass sequence.positions(seq_len)",
    }
    for error in raised(pool, 2, rootless, how, compiled):
        assert says[how] in error.message, error.message


def test_what_is_warned_of_without_a_root(pool: Any) -> None:
    for said in pool(2).run(rootless, "no positions", False):
        assert "the model's forward takes position_ids, and the call leaves them out" in said[0] and len(said) == 1


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("how", ["right", "positions of the rows", "two cores, both planned", "two, allowed"])
def test_what_is_silent_without_a_root(pool: Any, how: str, compiled: bool) -> None:
    assert pool(2).run(rootless, how, compiled) == [[], []]
