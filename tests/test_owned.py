"""Tensors that masks and layouts own: in inference, in copies, in other processes, and when they are freed."""

from __future__ import annotations

import copy
import gc
import pickle
import time
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from inside import inner, make_schedule
from ranks import on_ranks
from torch import Tensor

from cp_mesh import Mask, ShardedSequence, ZigZag, attention, balance, mixers
from cp_mesh.geometry import Balanced, Permuted
from cp_mesh.training import document_sums

make_spec = inner("spec", "make_spec")
Content, is_owned, read_once = inner("host_tensors", "Content", "is_owned", "read_once")

IDS = torch.arange(24) // 7


def rows(mask: Mask) -> list[Any]:
    return [make_schedule(ZigZag(), mask, 24, 2, rank, True).fetch for rank in range(2)]


def test_specs_that_are_kept_hold_no_mask() -> None:
    mask = Mask(documents=IDS)
    first, again, windowed = (make_spec(mask=x) for x in (mask, Mask(documents=IDS), Mask(window=(3, 0))))
    assert first is again and windowed.mask == Mask(window=(3, 0)).spec() != first.mask
    kept = weakref.ref(mask)
    del mask
    gc.collect()
    assert kept() is None


def test_in_inference() -> None:
    with torch.inference_mode():
        mask = Mask(documents=torch.arange(24) // 7)
        layout = balance(mask, 24, 2)
        assert rows(mask) == rows(Mask(documents=IDS)) and hash(layout) == hash(balance(Mask(documents=IDS), 24, 2))
        assert hash(Permuted(torch.arange(24))) == hash(Permuted(range(24)))
    assert rows(mask) == rows(Mask(documents=IDS))
    assert not mask.documents.is_inference()


def of_inference() -> list[str]:
    """Shapes of tensors of inference mode that something holds. A list of the tensors would hold them, too."""
    gc.collect()
    return [f"{x.dtype} {[*x.shape]}" for x in gc.get_objects() if isinstance(x, Tensor) and x.is_inference()]


@on_ranks(2, timeout=120.0)
def test_nothing_is_kept_of_inference(rank: int, axis: Any) -> None:
    """Calls in inference mode, and the same with gradients. Reports tensors of the first that something still holds."""
    made = torch.Generator().manual_seed(0)
    sequence = ShardedSequence(axis, length=24)
    x = torch.randn(2, 2, 12, 4, dtype=torch.float64, generator=made, requires_grad=True)
    rows, heads, decays = x.transpose(1, 2), x[:, 0], -x[..., 0].transpose(1, 2).square()
    mask = Mask(documents=IDS)
    attends = partial(attention, x, x, x, mesh=axis)
    calls = {str(of): partial(attends, mask=of) for of in (Mask(), mask, Mask(blocks=IDS))}
    calls |= {method: partial(attends, method=method) for method in ("all_gather", "ulysses")}
    calls |= {
        "document_sums": lambda: document_sums(heads[..., 0], sequence=sequence, mask=mask),
        "roll": lambda: mixers.roll(heads, 1, sequence=sequence, mask=mask),
        "causal_conv1d": lambda: mixers.causal_conv1d(heads, heads[0, :4].T, sequence=sequence, mask=mask),
    }
    for method in ("states", "heads"):
        mix = partial(mixers.gated_delta_rule, rows, rows, rows, decays, decays.exp(), method=method, sequence=sequence)
        calls[f"gated_delta_rule {method}"] = lambda mix=mix: mix(mask=mask, output_final_state=True)[0]
    problems = []
    for name, call in calls.items():
        with torch.inference_mode():
            call()
            sequence.shard(torch.zeros(2, 24))
        ends = time.monotonic() + 5
        while (kept := of_inference()) and time.monotonic() < ends:  # gloo's threads free buffers late
            time.sleep(0.02)
        problems += [f"{name}: {x} is kept" for x in kept]
        call().square().sum().backward(retain_graph=True)
    assert problems == []


@pytest.mark.parametrize("how", ("pickle", "deepcopy"))
def test_copies_own_their_tensors(how: str) -> None:
    mask, layout = Mask(documents=IDS, key_padding=IDS > 0), Balanced([[8, 16], [0, 8]])
    rows(mask)
    copied, other = (pickle.loads(pickle.dumps(x)) if how == "pickle" else copy.deepcopy(x) for x in (mask, layout))
    assert is_owned(copied.documents) and is_owned(copied.key_padding) and is_owned(other.tensor)
    assert copied.documents.data_ptr() != mask.documents.data_ptr()
    assert torch.equal(copied.documents, mask.documents) and copied.spec() == mask.spec() and other == layout
    copied.documents.fill_(0)  # which no user should; what was read of the first is not the copy's
    assert len(copied.runs()[0].edges) == 2 and len(mask.runs()[0].edges) == 5


def test_what_is_read_is_read_once() -> None:
    asked: list[int] = []

    def read(tensor: Tensor) -> int:
        asked.append(1)
        return int(tensor.sum())

    mask = Mask(documents=IDS)
    assert [read_once(mask.documents, read) for _ in range(3)] == [int(IDS.sum())] * 3 and len(asked) == 1
    mask.documents.add_(1)
    assert read_once(mask.documents, read) == int(IDS.sum()) + 24 and len(asked) == 2
    assert [read_once(IDS, read) for _ in range(2)] == [int(IDS.sum())] * 2 and len(asked) == 4  # nobody's


def test_documents_are_freed_without_the_garbage_collector() -> None:
    """Trainers turn it off: what is noted on a tensor must not keep the tensor."""
    gc.disable()
    try:
        mask = Mask(documents=IDS)
        mask.runs(), Content.of(mask.documents)
        freed = weakref.ref(mask.documents)
        del mask
        assert freed() is None
    finally:
        gc.enable()


def test_allowed_takes_positions_of_another_device() -> None:
    mask = Mask(documents=IDS, key_padding=IDS > 0)
    at = torch.arange(24, device="meta")
    assert mask.allowed(at, at).device.type == "meta"


def test_pieces_of_the_last_batches_are_kept() -> None:
    """They hold index tensors of each device: at a million tokens, 16 MiB and more a batch."""
    find = inner("pieces", "pieces_in")
    made = [weakref.ref(find(ZigZag(), Mask(documents=IDS // n), 24, 24, 2, 0, 1)) for n in (1, 2, 3)]
    gc.collect()
    assert [ref() is None for ref in made] == [True, False, False]
