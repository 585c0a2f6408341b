"""layout="auto": a batch with packed documents takes its balanced layout, and all that belongs to the batch follows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from inside import inner
from model import Core, DenseCore, Model, V
from ranks import mesh, num_collectives, on_ranks, refused
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import cp_mesh
from cp_mesh import (
    ArgumentError,
    ContextParallel,
    Mask,
    RankMismatchError,
    ShardedModel,
    ShardedSequence,
    ZigZag,
    cross_entropy,
    mixers,
    parallelize,
    token_log_probs,
)
from cp_mesh.geometry import Balanced
from cp_mesh.training import document_sums

compare_batch = inner("agreement", "compare_batch")
Index, LAYOUTS = inner("geometry.layout", "Index"), inner("geometry.layouts", "LAYOUTS")
B, STEPS = 2, 4
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def batch(step: int, length: int) -> dict[str, Any]:
    """Tokens, next tokens and a mask; other documents in every step and row, and in step 2 none."""
    numbers = torch.Generator().manual_seed(step)
    tokens = torch.randint(1, V, (B, length), generator=numbers)
    documents = (torch.rand(B, length, generator=numbers) < 5 / length).cumsum(1)
    documents[1, length - 2 :] = Mask.EXCLUDED
    last = F.pad(documents.diff(dim=1) != 0, (0, 1), value=True)
    labels = tokens.roll(-1, 1).masked_fill(last | (documents < 0), -100)
    mask = Mask() if step == 2 else Mask(documents=documents)
    return {"tokens": tokens, "labels": labels, "documents": mask}


def plan(sequence: ShardedSequence, **options: Any) -> dict[str, Any]:
    return {
        "": ShardedModel(sequence, **options),
        "layers.*.core": ContextParallel(sequence, mask=lambda q, k, v, documents: documents),
    }


def of_one(length: int) -> list[dict[str, Any]]:
    model, found = Model(DenseCore), []
    for step in range(STEPS):
        given = batch(step, length)
        model.zero_grad()
        logits = model(given["tokens"], torch.arange(length), given["documents"].documents)
        loss = F.cross_entropy(logits.flatten(0, 1), given["labels"].flatten())
        loss.backward()
        found.append({"logits": logits.detach(), "loss": loss.detach(), "grads": [x.grad for x in model.parameters()]})
    return found


def steps(rank: int, length: int, way: str) -> list[dict[str, Any]]:
    axis, found = mesh((dist.get_world_size(),), ("cp",)), []
    sequence = ShardedSequence(axis, layout="auto", length=None if way == "any length" else length)
    model = parallelize(Model(), axis, plan(sequence))
    if way == "recomputed":
        for layer in model.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    if way == "compiled blocks":
        for layer in model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
    if way == "fsdp":
        for module in (*model.layers, model):
            fully_shard(module, mesh=axis)
        cp_mesh.sum_gradients(model)
    for step in range(STEPS):
        given = batch(step, length)
        of_batch = sequence.for_batch(length, given["documents"])
        assert type(of_batch.layout) is (ZigZag if step == 2 else Balanced)
        model.zero_grad()
        logits = model(given["tokens"], documents=given["documents"])
        labels = of_batch.shard({"labels": given["labels"]})["labels"]
        loss = cross_entropy(logits, labels, axis)
        loss.backward()
        grads = [x.grad for x in model.parameters()]
        if way == "fsdp":
            grads = [x.full_tensor() for x in grads]
        else:
            for x in grads:
                dist.all_reduce(x)
        loss = loss.detach()
        dist.all_reduce(loss)
        found.append({"logits": of_batch.unshard(logits.detach()), "loss": loss, "grads": grads})
    return found


@pytest.mark.parametrize("way", ["plain", "any length", "recomputed", "compiled blocks", "fsdp"])
@pytest.mark.parametrize("cp", [2, 3])
def test_steps_are_those_of_one_rank(pool: Any, cp: int, way: str) -> None:
    length = 24 if way == "any length" else 46
    want = of_one(length)
    for found in pool(cp).run(steps, length, way, timeout=180.0):
        for got, of_step in zip(found, want, strict=True):
            torch.testing.assert_close(got, of_step, **CLOSE)


def windows(rank: int) -> list[Tensor]:
    """Layers with masks of their own, which keep the layout of the batch; and a whole output."""
    axis = mesh((dist.get_world_size(),), ("cp",))
    sequence = ShardedSequence(axis, layout="auto", length=46)
    styles = plan(sequence, gather_output=True)
    for i in range(2):

        def narrow(q: Tensor, k: Tensor, v: Tensor, documents: Mask, window: int = 9 * (1 - i)) -> Mask:
            return replace(documents, window=(window, 0) if window else None)

        styles[f"layers.{i}.core"] = ContextParallel(sequence, mask=narrow)
    del styles["layers.*.core"]
    model = parallelize(Model(), axis, styles)
    given = batch(0, 46)
    return model(given["tokens"], documents=given["documents"]).detach()


def test_layers_with_windows(pool: Any) -> None:
    class Narrow(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Mask) -> Tensor:
            seen = documents.allowed(*[torch.arange(46)] * 2)[:, None]
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).nan_to_num()

    model, given = Model(Narrow), batch(0, 46)
    model.layers[0].core.register_forward_pre_hook(lambda _, x: (*x[:3], replace(x[3], window=(9, 0))))
    want = model(given["tokens"], torch.arange(46), given["documents"]).detach()
    seen = given["documents"].documents >= 0
    for got in pool(3).run(windows):
        torch.testing.assert_close(got[seen], want[seen], **CLOSE)


@dataclass
class Wrapped:
    """The root does not look for masks inside of objects."""

    mask: Mask


def explicit(rank: int) -> None:
    """Layouts that are chosen stay, for packed batches too."""
    axis, given = mesh((2,), ("cp",)), batch(0, 24)
    for layout in (ZigZag(), cp_mesh.Striped()):
        sequence = ShardedSequence(axis, layout)
        assert sequence.for_batch(24, given["documents"]).layout == layout
        logits = parallelize(Model(), axis, plan(sequence))(given["tokens"], documents=given["documents"])
        want = Model(DenseCore)(given["tokens"], torch.arange(24), given["documents"].documents)
        torch.testing.assert_close(sequence.unshard(logits), want, **CLOSE)
    for junk in ("zigzag", ZigZag, 1):
        with pytest.raises(ArgumentError, match="Mask: expected a Layout, got"):
            Mask(layout=junk)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match=r'ShardedSequence\.layout: expected a Layout or "auto", got'):
            ShardedSequence(axis, junk)  # type: ignore[arg-type]
    sequence = ShardedSequence(axis, layout="auto")
    style = ContextParallel(sequence, mask=lambda q, k, v, documents: documents.mask)
    model = parallelize(Model(), axis, {"": ShardedModel(sequence), "layers.*.core": style})
    want = Model(DenseCore)(given["tokens"], torch.arange(24), given["documents"].documents)
    logits = model(given["tokens"], documents=Wrapped(given["documents"]))
    torch.testing.assert_close(sequence.for_batch(24).unshard(logits), want, **CLOSE)
    balanced = sequence.balanced(given["documents"])  # a mask that a user gives a layout
    logits = model(given["tokens"], positions=None, documents=Wrapped(given["documents"]))
    for mask in (balanced.mask(given["documents"]), given["documents"]):
        logits = parallelize(Model(), axis, plan(sequence))(given["tokens"], documents=mask)
        torch.testing.assert_close(balanced.unshard(logits), want, **CLOSE)


def test_layouts_that_are_chosen_stay(pool: Any) -> None:
    pool(2).run(explicit)


def rootless(rank: int) -> None:
    """Without a root the mask brings the layout in which its user sharded the batch."""
    axis, given = mesh((2,), ("cp",)), batch(0, 24)
    sequence = ShardedSequence(axis, layout="auto")
    model = parallelize(Model(), axis, {"layers.*.core": plan(sequence)["layers.*.core"]})
    want = Model(DenseCore)(given["tokens"], torch.arange(24), given["documents"].documents)
    of_batch = sequence.for_batch(24, given["documents"])
    tokens, positions = of_batch.shard({"tokens": given["tokens"]})["tokens"], of_batch.positions()
    logits = model(tokens, positions, of_batch.mask(given["documents"]))
    torch.testing.assert_close(of_batch.unshard(logits), want, **CLOSE)
    uses = [
        lambda: sequence.shard({"labels": given["labels"]}),
        lambda: sequence.positions(24),
        lambda: sequence.unshard(logits),
        lambda: model(tokens, positions, given["documents"]),
    ]
    for use in uses:
        with refused(r'layout="auto": expected the layout of a batch, got none yet; sequence\.for_batch'):
            use()
    batches, chained = [batch(step, 24)["documents"] for step in (1, 2, 0)], sequence
    for mask in batches:  # each batch decides anew
        chained = chained.for_batch(24, mask)
        assert chained == sequence.for_batch(24, mask)


def test_without_a_root(pool: Any) -> None:
    pool(2).run(rootless)


class Pair(Model):
    def forward(self, tokens: Tensor, positions: Tensor, documents: Mask) -> Any:
        logits = super().forward(tokens, positions, documents)
        return logits, logits.detach().mean()


def wrong_sequences(rank: int) -> int:
    """Labels and outputs by the sequence, not by that of the batch: refused by name, before a collective."""
    axis = mesh((2,), ("cp",))
    sequence = ShardedSequence(axis, layout="auto")
    model, said = parallelize(Pair(), axis, plan(sequence)), "the layout of the model's output, balanced, got "
    plain, other = sequence.for_batch(24), sequence.for_batch(24, batch(3, 24)["documents"])
    for step in (0, 1):  # not the first alone
        given = batch(step, 24)
        of_batch = sequence.for_batch(24, given["documents"])
        logits, _ = model(given["tokens"], documents=given["documents"])
        # no next tokens
        wrong, unlike = (x.shard({"labels": given["labels"].roll(step, 0)})["labels"] for x in (plain, other))
        with pytest.raises(ArgumentError, match=f"labels: expected {said}zigzag.*for_batch"):
            cross_entropy(logits, wrong, axis)
        with pytest.raises(ArgumentError, match=f"labels: expected {said}zigzag.*for_batch"):
            cross_entropy(logits.flatten(0, 1), wrong.flatten(), axis)
        with refused(f"labels: expected {said}zigzag.*for_batch"):
            token_log_probs(logits, wrong)
        with pytest.raises(ArgumentError, match=f"labels: expected {said}balanced.*for_batch"):
            cross_entropy(logits * 1, unlike, axis)
        with refused(f"unshard: expected {said}zigzag.*for_batch"):
            plain.unshard(logits)
        with refused(f"gather: expected {said}balanced.*for_batch"):
            other.gather(logits.argmax(-1))
        labels = of_batch.shard({"labels": given["labels"]})["labels"]
        cross_entropy(logits, labels, axis).backward()
    return num_collectives()


def test_labels_and_outputs_of_another_layout_are_refused(pool: Any) -> None:
    pool(2).run(wrong_sequences)


def unlike(rank: int, later: bool) -> tuple[str, int]:
    """One rank has other documents; in a later batch the contents of tokens are not compared."""
    axis = mesh((2,), ("cp",))
    model = parallelize(Model(), axis, plan(ShardedSequence(axis, layout="auto")))
    for step in (0, 1, 2, 3, 0) if later else ():
        given = batch(step, 24)
        model(given["tokens"], documents=given["documents"])
    documents = torch.arange(24) // (8 if rank else 6)
    before = num_collectives()
    with pytest.raises(RankMismatchError) as raised:
        model(batch(1, 24)["tokens"], documents=Mask(documents=documents.expand(B, 24)))
    return str(raised.value), num_collectives() - before


@pytest.mark.parametrize("later", [False, True])
def test_ranks_with_other_layouts_are_refused(pool: Any, later: bool) -> None:
    for said, collectives in pool(2).run(unlike, later):
        assert "the same layout on every cp rank, got cp rank 0: balanced" in said and collectives == 0


class Whole(Model):
    """Its root is compiled, with positions of the whole sequence."""


def compiled_root(rank: int) -> tuple[int, str]:
    axis = mesh((2,), ("cp",))
    sequence = ShardedSequence(axis, layout="auto")
    model = parallelize(Whole(), axis, plan(sequence))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    given, said = batch(0, 24), ""
    try:
        compiled(given["tokens"], documents=given["documents"])
    except Exception as error:  # Dynamo wraps it
        said = str(error)
    counter.frame_count = 0
    for step in (0, 1, 2, 3, 4, 5):
        given = batch(step, 24)
        if step == 2:
            given["documents"] = Mask(documents=torch.zeros(B, 24, dtype=torch.int64))  # of one document
        of_batch = sequence.for_batch(24, given["documents"])
        logits = compiled(given["tokens"], documents=of_batch.mask(given["documents"]))
        want = Model(DenseCore)(given["tokens"], torch.arange(24), given["documents"].documents)
        torch.testing.assert_close(of_batch.unshard(logits.detach()), want, **CLOSE)
    return counter.frame_count, said


def test_a_root_that_is_compiled(pool: Any) -> None:
    for count, said in pool(2).run(compiled_root, timeout=180.0):
        assert count <= 3 and 'layout="auto" in compiled code: expected a mask that has its layout' in said


class Direct(nn.Module):
    """Its attention is a call of the user's own, in the layout of the sequence or of the mask."""

    def __init__(self, sequence: ShardedSequence) -> None:
        super().__init__()
        self.sequence, self.of_mask = sequence, False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Mask) -> Tensor:
        layout = documents.layout if self.of_mask else ZigZag()
        mask = documents if self.of_mask else Mask()
        return cp_mesh.attention(q, k, v, mesh=self.sequence.mesh, seq_len=24, layout=layout, mask=mask)


def direct(rank: int) -> int:
    """Calls that were right for a plain batch, and so are known, are refused in a packed one."""
    axis = mesh((2,), ("cp",))
    sequence = ShardedSequence(axis, layout="auto")
    model, plain, packed = Model(partial(Direct, sequence)), batch(2, 24), batch(0, 24)
    model.layers[1].core = Core()
    parallelize(model, axis, {"": ShardedModel(sequence), "layers.1.core": plan(sequence)["layers.*.core"]})
    for _ in range(2):
        model(plain["tokens"], documents=plain["documents"])
    before = num_collectives()
    with pytest.raises(
        ArgumentError, match=r"layout: expected balanced, of the root's batch, got zigzag; pass layout="
    ):
        model(packed["tokens"], documents=packed["documents"])
    found = num_collectives() - before
    model.layers[0].core.of_mask = True
    logits = model(packed["tokens"], documents=packed["documents"])
    want = Model(DenseCore)(packed["tokens"], torch.arange(24), packed["documents"].documents)
    torch.testing.assert_close(sequence.for_batch(24, packed["documents"]).unshard(logits), want, **CLOSE)
    return found


def test_attention_of_the_users_own(pool: Any) -> None:
    assert pool(2).run(direct) == [0, 0]


@dataclass(frozen=True)
class Mine(cp_mesh.Layout):
    """A layout of a user's own, with a tensor; as a dataclass does, it compares the tensors."""

    order: Tensor

    def runs(self, seq_len: int, cp_size: int, cp_rank: int) -> tuple[Any, ...]:
        n = seq_len // cp_size
        return (Index(self.order[n * cp_rank : n * (cp_rank + 1)].sort().values),)

    def spec(self) -> str:
        return "mine"

    @property
    def tensor(self) -> Tensor:
        return self.order


@on_ranks(2)
def test_a_users_layout_with_a_tensor_under_a_root(axis: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYOUTS, "mine", Mine)
    given, sequence = batch(0, 24), ShardedSequence(axis, Mine(torch.arange(24).view(12, 2).T.flatten()))
    logits = parallelize(Model(), axis, plan(sequence))(given["tokens"], documents=given["documents"])
    want = Model(DenseCore)(given["tokens"], torch.arange(24), given["documents"].documents)
    torch.testing.assert_close(sequence.unshard(logits), want, **CLOSE)


@on_ranks(2)
def test_mixers_and_sums_take_the_layout_of_the_mask(axis: Any) -> None:
    """Of a sequence that has none yet; one that has another is refused."""
    ids, x = torch.tensor([0] * 3 + [1] * 9 + [2] * 4), torch.arange(16.0)[None]
    sequence = ShardedSequence(axis, "auto")
    of_batch = sequence.for_batch(16, Mask(documents=ids))
    mask, rows = of_batch.mask(Mask(documents=ids)), of_batch.shard({"x": x})["x"]
    next_ones = torch.where(F.pad(ids.diff() == 0, (0, 1)), x.roll(-1, 1), -1)
    for own in (sequence, of_batch):
        assert document_sums(rows, sequence=own, mask=mask).tolist() == [3, 63, 54]
        found = mixers.roll(rows, -1, sequence=own, mask=mask, fill_value=-1)
        assert torch.equal(found, of_batch.shard({"x": next_ones})["x"])
    for use in (document_sums, partial(mixers.roll, shifts=-1)):
        with refused('layout="auto": expected the layout of a batch'):
            use(rows, sequence=sequence, mask=Mask(documents=ids))
        with refused("layout: expected balanced, of the mask's batch, got zigzag"):
            use(rows, sequence=ShardedSequence(axis), mask=mask)


class Beside(Model):
    def forward(self, tokens: Tensor, positions: Tensor, images: Mask, documents: Mask) -> Tensor:
        assert images.layout is None
        return super().forward(tokens, positions, documents)


@on_ranks(2)
def test_a_mask_of_another_sequence_decides_nothing(axis: Any) -> None:
    given, sequence = batch(0, 24), ShardedSequence(axis, "auto")
    images = Mask(documents=torch.arange(10) // 3)
    logits = parallelize(Beside(), axis, plan(sequence))(given["tokens"], images=images, documents=given["documents"])
    want = Model(DenseCore)(given["tokens"], torch.arange(24), given["documents"].documents)
    torch.testing.assert_close(sequence.for_batch(24, given["documents"]).unshard(logits), want, **CLOSE)
