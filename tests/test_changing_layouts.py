"""Layouts that change with the batch: what the styles' functions return is what data, model and loss go by."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dense import dense_attention, dense_mask
from inside import Sizes, extra_memory, inner, make_schedule, parse_layout
from ranks import device, mesh, on_ranks, refused
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import cp_mesh
from cp_mesh import (
    ArgumentError,
    ContextParallel,
    Contiguous,
    Layout,
    Mask,
    RankMismatchError,
    ShardedModel,
    ShardedSequence,
    Striped,
    UnsupportedError,
    ZigZag,
    parallelize,
)
from cp_mesh.geometry import Balanced

enclosing = inner("schedule", "enclosing")

B, H, D = 2, 2, 4


class Core(nn.Module):
    """Its argument names are those of the docs, which are also those of the library's own functions."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, layout: Layout, module: int = 0) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Model(nn.Module):
    """[B, S] tokens to [B, S, H * D]."""

    def __init__(self) -> None:
        super().__init__()
        self.core = Core()

    def forward(self, tokens: Tensor, positions: Tensor, mask: Mask, layout: Layout, style: int = 0) -> Tensor:
        q, k, v = features(tokens, positions)
        return self.core(q, k, v, mask=mask, layout=layout, module=1).transpose(1, 2).flatten(2)


def features(tokens: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    """q, k, v [B, H, S, D], of which q and k depend on positions [S] or [B, S]."""
    columns = torch.arange(1, H * D + 1, device=tokens.device).view(H, 1, D)
    x = torch.sin((tokens[:, None, :, None] * columns).double())
    turn = torch.cos(0.1 * positions.double())
    turn = turn[:, None, :, None] if positions.ndim == 2 else turn[:, None]
    return x * turn, (x + 1) * turn, x


def batch(S: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens, and documents unlike in every row."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.rand(B, S, generator=generator) < 4 / S
    return torch.randint(1, 9, (B, S), generator=generator), starts.cumsum(1)


def plan(sequence: ShardedSequence, **options: Any) -> dict[str, Any]:
    """As docs/packed.md has it."""
    return {
        "": ShardedModel(sequence, layout=lambda layout, **others: layout, **options),
        "core": ContextParallel(
            sequence, mask=lambda q, k, v, mask, layout, **_: mask, layout=lambda q, k, v, mask, layout, **_: layout
        ),
    }


@functools.cache
def of_one_rank(S: int, seed: int, with_documents: bool = True, own_positions: bool = False) -> Tensor:
    tokens, documents = batch(S, seed)
    positions = torch.arange(S) % 5 if own_positions else torch.arange(S)
    out, _ = dense_attention(
        *features(tokens, positions), dense_mask(S, documents=documents if with_documents else None)
    )
    return out.transpose(1, 2).flatten(2)


def near(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.cpu(), want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("own_positions", [False, True])
@pytest.mark.parametrize("S", [24, 22])
@on_ranks(3)
def test_whole_model(axis: Any, S: int, own_positions: bool) -> None:
    """Three batches, from one model."""
    sequence = ShardedSequence(axis, length=S)
    model = parallelize(Model(), axis, plan(sequence, gather_output=True))
    given = {"positions": torch.arange(S).expand(B, S) % 5} if own_positions else {}
    for seed in range(3):
        tokens, documents = batch(S, seed)
        mask = Mask(documents=documents)
        got = model(tokens, mask=mask, layout=sequence.balanced(mask).layout, style=1, **given)
        near(got, of_one_rank(S, seed, own_positions=own_positions))


class Scaled(Model):
    """With a parameter, which FSDP2 needs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, H * D).double())

    def forward(self, tokens: Tensor, positions: Tensor, mask: Mask, layout: Layout, style: int = 0) -> Tensor:
        return super().forward(tokens, positions, mask, layout) * self.scale


def under_fsdp(rank: int) -> None:
    """Documents stay on the host: FSDP2 moves the tensors among a root's arguments to the device."""
    axis, seen = mesh((2,), ("cp",)), []
    sequence = ShardedSequence(axis)
    styles = plan(sequence, gather_output=True)

    def mask_of_call(q: Tensor, k: Tensor, v: Tensor, mask: Mask, **_: Any) -> Mask:
        seen.append(mask.documents.device.type)
        return mask

    styles["core"].mask = mask_of_call
    model = fully_shard(parallelize(Scaled().to(device()), axis, styles), mesh=axis)
    cp_mesh.sum_gradients(model)
    tokens, documents = batch(24, 0)
    mask = Mask(documents=documents)
    got = model(tokens, mask=mask, layout=sequence.balanced(mask).layout)
    near(got, of_one_rank(24, 0) * torch.linspace(0.5, 1.5, H * D).double())
    assert seen == ["cpu"]


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.multigpu)])
def test_fsdp_leaves_masks_on_the_host(pool: Any, backend: str) -> None:
    pool(2, backend).run(under_fsdp)


@on_ranks(2)
def test_the_functions_see_whole_arguments(axis: Any) -> None:
    """A layout that is a function of the whole tokens; the output is gathered by that of the whole tokens too."""
    sequence = ShardedSequence(axis)
    layout = lambda tokens, **_: ZigZag() if tokens.shape[1] > 12 else Contiguous()  # noqa: E731
    styles = plan(sequence) | {"": ShardedModel(sequence, gather_output=True, layout=layout)}
    got = parallelize(Model(), axis, styles)(batch(16, 0)[0], mask=Mask(), layout=ZigZag())
    near(got, of_one_rank(16, 0, with_documents=False))


@on_ranks(2)
def test_a_core_in_another_layout_than_its_root_is_refused(axis: Any) -> None:
    sequence = ShardedSequence(axis)
    styles = plan(sequence)
    styles["core"].layout = lambda *_, **__: Striped()
    model, (tokens, _) = parallelize(Model(), axis, styles), batch(16, 0)
    assert model(tokens, mask=Mask(), layout=Striped()).shape == (B, 8, H * D)
    with refused(r"layout: expected one for the whole model, got striped .* zigzag at the"):
        model(tokens, mask=Mask(), layout=ZigZag())


@on_ranks(1)
def test_what_is_no_layout_is_refused(axis: Any) -> None:
    sequence = ShardedSequence(axis)
    whole = plan(sequence)
    for name, plain in (("", ShardedModel(sequence)), ("core", ContextParallel(sequence))):
        got = f"a layout at '{'core' if name == '' else ''}' and none at '{name}'"
        with refused(f"layout=: expected in all styles .* {got}"):
            parallelize(Model(), axis, whole | {name: plain})
    parallelize(Model(), axis, {"core": whole["core"]})  # whoever has no root shards the data by hand
    for style in (ContextParallel, ShardedModel):
        with refused(rf"{style.__name__}.layout: expected a function .*ShardedSequence\(\.\.\., l"):
            style(sequence, layout=ZigZag())
    tokens, documents = batch(16, 0)
    for name in ("", "core"):
        styles = plan(sequence)
        styles[name].layout = lambda *args, **kwargs: "zigzag"
        with refused(r"layout: expected a function that returns a Layout, got str"):
            parallelize(Model(), axis, styles)(tokens, mask=Mask(), layout=ZigZag())
    with refused("balanced: expected documents, or a sequence with a length"):
        sequence.balanced(Mask())
    with refused("balance", UnsupportedError):
        sequence.balanced(Mask(key_padding=torch.ones(16, dtype=torch.bool), documents=documents))


def test_runs_that_compiled_code_did_not_read_are_checked() -> None:
    with pytest.raises(ArgumentError, match="Balanced: expected runs"):
        parse_layout("balanced", torch.tensor([[0, 4], [5, 3]]))


@on_ranks(2)
def test_in_check_mode_all_ranks_hear_of_a_function_that_fails(rank: int, axis: Any) -> None:
    def layout(**_: Any) -> Layout:
        if rank == 0:
            raise KeyError("on purpose")
        return ZigZag()

    sequence = ShardedSequence(axis)
    model = parallelize(Model(), axis, plan(sequence) | {"": ShardedModel(sequence, layout=layout)})
    with cp_mesh.check_mode(), pytest.raises((KeyError, RankMismatchError)[rank], match="on purpose"):
        model(batch(16, 0)[0], mask=Mask(), layout=ZigZag())


def test_memory_of_joined_tiles() -> None:
    mask = Mask(documents=torch.arange(64) // 3)
    layout = Balanced([[32, 16], [0, 16], [16, 16], [48, 16]])
    schedule, sizes = make_schedule(layout, mask, 64, 2, 0), Sizes(1, 4, 2, 8, 8, 2, 2)
    one = extra_memory(schedule, sizes, 1, "functional", one_tile=True)
    (tile,) = enclosing(schedule.local_tiles)
    assert len(schedule.local_tiles) > 1
    (stage,) = schedule.route.stages
    rows = [q[1] - q[0] for q in (tile.q, *(tile.q for tile in enclosing(stage.tiles)))]
    travels = stage.num_fetched + sum(end - begin for _, ranges in stage.serve for begin, end in ranges)
    key, out = 2 * (8 + 8) * 2, 4 * (8 * 2 + 4)  # bytes of a row; results, of 32 rows, are made last
    moments = travels * key + rows[0] * out, stage.num_fetched * key + sum(rows) * out
    assert one.forward == max(sum(rows) * out, *(moment - 32 * out for moment in moments))
    more = tile.q[1] - tile.q[0] - 16, tile.k[1] - tile.k[0] - 16  # rows and keys than the largest of several
    sums = more[0] * 4 * 8 * 4 + more[1] * 2 * (8 + 8) * 4  # the kernel's, fp32
    assert one.backward == extra_memory(schedule, sizes, 1, "functional").backward + sums
