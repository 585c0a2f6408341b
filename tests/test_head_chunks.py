"""Heads in chunks: the same numbers up to rounding, one pass a chunk, smaller buffers; and what is chosen by itself.

Not the same bits: a matrix product of fewer heads may sum in another order, and whether it does depends on the CPU.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from cases import LAYOUTS, gap
from checks import TOLERANCE, lies_as
from dense import make_qkv
from inside import inner, make_schedule, path_of, room
from ranks import on_ranks, refused
from recording import recording
from torch import Tensor

import cp_mesh
from cp_mesh import ArgumentError, Contiguous, Mask, ZigZag

plan = room("call.plan")
stages = room("ring_loop")
gradient_of_sinks = inner("sinks", "gradient_of_sinks")

B, H, K, S, D, E = 2, 8, 4, 26, 6, 4


def local_inputs(rank: int, name: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    rows = LAYOUTS[name](S).positions(S, 2, rank)
    return [x[:, :, rows].requires_grad_() for x in make_qkv(B, H, K, S, D, E, dtype=dtype)]


@pytest.mark.parametrize("name", LAYOUTS)
@on_ranks(2)
def test_results_are_those_of_all_heads_at_once(rank: int, axis: Any, name) -> None:
    """out, lse, dq, dk, dv, and the bytes of every message, by number of chunks."""
    chunks = [1, 2, 4, None]
    results = []
    for num_chunks in chunks:
        q, k, v, dout = local_inputs(rank, name)
        with recording(axis) as notes:
            out, lse = cp_mesh.attention(
                q, k, v, mesh=axis, layout=LAYOUTS[name](S), seq_len=S, head_chunks=num_chunks, return_lse=True
            )
            grads = torch.autograd.grad((out, lse), (q, k, v), (dout, lse.detach()))
        assert not notes.problems, notes.problems
        assert lse.is_contiguous()
        assert all(lies_as(x, like) for x, like in zip((out, *grads), (q, q, k, v), strict=True))
        results.append(([out.detach(), lse.detach(), *grads], [sent.bytes_received for sent in notes.sent]))
    whole, bytes_of_whole = results[0]
    for (got, received), num_chunks in zip(results, (1, 2, 4, 1), strict=True):
        assert max(map(gap, got, whole)) <= TOLERANCE
        assert len(received) == num_chunks * len(bytes_of_whole)  # the option is obeyed
        assert sum(received) == sum(bytes_of_whole) and max(received) * num_chunks == max(bytes_of_whole)


def test_chunks_keep_the_sequence_of_a_chunk_within_the_budget():
    q = torch.empty(1, 8, 64, 16, dtype=torch.bfloat16)
    k = torch.empty(1, 4, 64, 16, dtype=torch.bfloat16)
    schedule = make_schedule(Contiguous(), Mask(causal=True), 192, 3, 0)
    total = 128 * 4 * 32 * 2  # bytes of K and V of the 128 tokens that the last rank fetches; this one fetches none
    for budget, wanted in ((total, 1), (total - 1, 2), (total // 2, 2), (total // 2 - 1, 4), (1, 4)):
        with mock.patch.object(stages, "CHUNK_BYTES", budget):
            assert stages.choose_head_chunks(0, q, k, k, schedule) == wanted
    assert stages.choose_head_chunks(0, q, k, k, schedule) == 1
    assert stages.choose_head_chunks(2, q, k, k, schedule) == 2
    with mock.patch.object(stages, "CHUNK_BYTES", 1):  # nothing travels: nothing to divide
        assert stages.choose_head_chunks(0, q, k, k, make_schedule(Contiguous(), Mask(causal=True), 192, 1, 0)) == 1


NO_COUNT = "a positive int up to 1048576 or None, got"


@pytest.mark.parametrize(
    ("head_chunks", "words"),
    [(3, "a divisor of the 4 kv heads, got 3; head_chunks=2 works"), *((n, NO_COUNT) for n in (0, 2.0, True, 2**70))],
)
@on_ranks(2)
def test_what_cannot_be_divided_is_refused(rank: int, axis: Any, head_chunks: Any, words: str) -> None:
    q, k, v, _ = local_inputs(rank, "zigzag")
    with refused(f"head_chunks: expected {words}", ArgumentError):
        cp_mesh.attention(q, k, v, mesh=axis, layout=ZigZag(), mask=Mask(), seq_len=S, head_chunks=head_chunks)


@on_ranks(2)
def test_verify_proves_the_settings_that_it_is_given(axis: Any) -> None:
    """Kernel calls of `verify` by its own settings: chunks are taken, and settings that do not exist are refused."""
    real, seen = plan.make_plan, []

    def spied(*args, **kwargs):
        made = real(*args, **kwargs)
        seen.append((made.settings.head_chunks, made.method.name, made.options.transport, made.options.deterministic))
        return made

    with mock.patch(f"{path_of('passes')}.make_plan", spied):
        report = cp_mesh.tools.verify(
            axis, seq_len=31, head_chunks=2, method="all_gather", transport="functional", deterministic=True
        )
    assert report.passed
    sinks = torch.linspace(-1, 1, 4)
    for kernel in ("reference", "cpu_flash"):
        report = cp_mesh.tools.verify(axis, seq_len=31, kernel=kernel, scores={"sinks": sinks})
        assert report.passed and set(report.errors) == {"out", "lse", "dq", "dk", "dv", "dsinks"}
    report = cp_mesh.tools.verify(axis, dtype=torch.bfloat16, scores={"sinks": sinks, "softcap": 2.0}, head_chunks=2)
    assert report.passed and report.kernel == "reference" and "dsinks" in str(report)
    tensors = {"alibi_slopes": sinks, "bias": torch.linspace(-1, 1, 31 * 31).view(1, 1, 31, 31)}
    report = cp_mesh.tools.verify(axis, seq_len=31, scores=tensors | {"dropout_p": 0.2, "dropout_seed": 3})
    assert set(report.errors) == {"out", "lse", "dq", "dk", "dv", *(f"d{name}" for name in tensors)}
    with mock.patch(f"{path_of('ring_loop')}.gradient_of_sinks", lambda *x: 0.9 * gradient_of_sinks(*x)):
        with pytest.raises(cp_mesh.tools.VerificationError) as raised:
            cp_mesh.tools.verify(axis, seq_len=31, scores={"sinks": sinks})
    assert [name for name, ratio in raised.value.report.ratios.items() if ratio > 1] == ["dsinks"]
    with pytest.raises(ArgumentError, match="head_chunks: expected a divisor of the 2 kv heads, got 3"):
        cp_mesh.tools.verify(axis, seq_len=31, head_chunks=3)
    assert set(seen[:3]) == {(2, "all_gather", "functional", True)}
