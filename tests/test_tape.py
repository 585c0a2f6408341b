"""Passes that persist: what is recorded of one call is what the next calls need, and nothing of the recorded call's."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from checks import GQA, MHA, MQA, Case, forget_plans, gap, parity, report
from inside import KERNELS, inner, room
from ranks import mesh
from torch import Tensor

import cp_mesh

tape = room("tape")
call, Tape, Memory = inner("tape", "call", "Tape", "Memory")
soon = partial(mock.patch.object, tape, "BEFORE", 1)  # in place of the calls that are computed first


def repeat(*given: Any) -> Any:
    with soon():
        return tape.repeat(*given)


CASES = [
    Case("zigzag", "causal", 13),
    Case("contiguous", "full", 12, GQA, 1),
    Case("striped", "causal", 13, MQA, 0),
    Case("zigzag", "window", 13, GQA, 1),
    Case("contiguous", "two-sided window", 13, GQA, 1),
    Case("zigzag", "causal and length", 13),
    Case("zigzag", "prefix", 13, MHA),
    Case("zigzag", "causal", 13, GQA, 2, "cpu_flash"),
    Case("zigzag", "causal", 13, GQA, 1, "cpu_flash", dtype=torch.float32),
    Case("zigzag", "causal", 13, GQA, scale=0.7, head_chunks=3),
    Case("zigzag", "window", 13, GQA, scores="sinks", head_chunks=3),
    Case("striped", "causal", 13, MHA, scores="softcap and sinks"),
    Case("contiguous", "window", 13, GQA, 1, scores="every score"),
    Case("zigzag", "causal", 12, MHA, scores="every score", method="ulysses"),
    Case("zigzag", "causal", 12, MHA, method="ulysses"),
    Case("striped", "window", 12, MHA, 1, "reference", method="ulysses"),
    Case("zigzag", "causal", 13, GQA, method="all_gather"),
]
"""On three ranks; the cpu_flash ones have no gradient of lse."""
SEEDS = 5  # one call that is computed, two that are recorded, two that are played


def played(rank: int, cases: Sequence[Case]) -> list[str]:
    """Parity with fp64 of five calls with other numbers in each; of the last two nothing but tapes may run."""
    axis, problems = mesh((dist.get_world_size(),), ("cp",)), []
    for case in cases:
        for seed in range(SEEDS):
            computed: list[Any] = []

            def spy(tapes: Any, what: Any, compute: Any, inputs: Any, computed: list[Any] = computed) -> Any:
                def counted(*given: Any) -> Any:
                    computed.append(what)
                    return compute(*given)

                return repeat(tapes, what, counted, inputs)

            partial: list[tuple[str, Tensor, Tensor, float]] = []
            with mock.patch.object(room("method"), "repeat", spy):
                problems += [f"{x}, call {seed}" for x in parity(case, axis, partial, seed)]
            for name, part, whole, allowed in partial:
                dist.all_reduce(part, group=axis.get_group())
                if not (off := gap(part, whole)) <= allowed:
                    problems.append(f"{name} of call {seed}, summed over ranks, is off by {off:.1e}")
            if bool(computed) != (seed < 3):
                problems.append(f"{case}: call {seed} computed {computed}")
    return [f"rank {rank}: {x}" for x in problems]


@pytest.mark.parametrize("part", range(3))
def test_played_passes_are_exact(pool, part):
    report(pool(3).run(played, CASES[part::3]))


def test_calls_that_differ_have_tapes_of_their_own(pool):
    """In strides, in what wants a gradient, in the method, in the tensors of scores; one after the other, again."""
    cases = [
        Case("zigzag", "causal", 12, (4, 2), 1, memory=memory, method=method, lse_gradient=through)
        for memory in ("contiguous", "strided")
        for method in ("ring", "ulysses")
        for through in (True, False)
    ]
    report(pool(2).run(alternating, cases))


def alternating(rank: int, cases: Sequence[Case]) -> list[str]:
    axis, problems = mesh((2,), ("cp",)), []
    with soon():
        for seed in range(SEEDS):
            for case in cases:
                problems += parity(case, axis, [], seed)
    return [f"rank {rank}: {x}" for x in problems]


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_parts_of_a_batch(pool, method):
    """Slices of one tensor, whose results are concatenated: gradients are slices too."""
    report(pool(2).run(parts, method))


def parts(rank: int, method: str) -> list[str]:
    axis, problems, patched = mesh((2,), ("cp",)), [], soon()
    patched.start()
    for step in range(2):
        torch.manual_seed(10 * step + rank)
        inputs = [torch.randn(6, 4, 8, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        dout = torch.randn(6, 4, 8, 4, dtype=torch.float64)
        whole = cp_mesh.attention(*inputs, mesh=axis, method=method, kernel="reference")
        want = [whole, *torch.autograd.grad(whole, inputs, dout)]
        each = zip(*(x.chunk(6) for x in inputs), strict=True)
        out = torch.cat([cp_mesh.attention(*x, mesh=axis, method=method, kernel="reference") for x in each])
        got = [out, *torch.autograd.grad(out, inputs, dout)]
        off = max(map(gap, got, want))
        problems += [f"rank {rank}, step {step}: off by {off:.1e}"] * (off > 1e-12)
    patched.stop()
    return problems


def test_kernels_that_do_not_say_so_are_not_recorded(pool):
    assert pool(2).run(untaped) == [0, 0]


def untaped(rank: int) -> int:
    plan = room("call.plan")
    kernels = {name: replace(kernel, taped=False) for name, kernel in KERNELS.items()}
    axis, before = mesh((2,), ("cp",)), plan.choose_kernel
    made: list[Any] = []
    forget_plans()
    with (
        soon(),
        mock.patch.object(plan, "choose_kernel", lambda *given: kernels[before(*given).name]),
        mock.patch.object(tape._Recorder, "lines", lambda *given: made.append(given)),
    ):
        for _ in range(3):
            q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
            cp_mesh.attention(q, k, v, mesh=axis, kernel="reference")
    forget_plans()
    return len(made)


def test_plans_of_a_batch_are_not_recorded(pool):
    """To record them takes longer than the layers of a model gain."""
    assert pool(2).run(recorded) == [[2, 0]] * 2


def recorded(rank: int) -> list[int]:
    axis, found = mesh((2,), ("cp",)), []
    for mask in (cp_mesh.Mask(), cp_mesh.Mask(documents=torch.arange(16) // 5)):
        with soon(), mock.patch.object(tape._Lines, "tape", autospec=True, side_effect=tape._Lines.tape) as made:
            for _ in range(4):
                q, k, v = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))
                cp_mesh.attention(q, k, v, mesh=axis, mask=mask, kernel="reference").sum().backward()
        found.append(made.call_count)
    return found


def tripled(x: Tensor, y: Tensor) -> Any:
    """A pass of one rank: views, memory that is written, results in a dict."""
    first, second = x.transpose(0, 1).split([1, 2])
    total = torch.empty_like(second)
    total.copy_(second * 2)
    total += first.expand_as(total) if y is None else y.sum()
    return total, {"sum": x.sum(0), "same": second.contiguous()}


def fresh(*like: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else torch.randn_like(x) for x in like]


def same(a: Any, b: Any) -> bool:
    (x, named), (y, others) = a, b
    return torch.equal(x, y) and all(torch.equal(named[name], others[name]) for name in named)


@pytest.mark.parametrize("second", [None, torch.zeros(4)])
def test_what_is_played_is_what_was_computed(second):
    tapes: dict[Any, Any] = {}
    for i in range(5):
        inputs = fresh(torch.zeros(2, 3), second)
        assert same(repeat(tapes, ("pass",), tripled, inputs), tripled(*inputs))
        assert [isinstance(x, Tape) for x in tapes.values()] == [i > 1]


def test_strides_dtypes_and_places_in_memory_have_their_own():
    tapes: dict[Any, Any] = {}
    whole = torch.zeros(9, 3)
    likes = (whole[:2], torch.zeros(3, 2).T, whole[:2].double(), whole.flatten()[1:7].view(2, 3))
    for _ in range(4):
        for like in likes:
            x = like.copy_(torch.randn(2, 3))
            assert same(repeat(tapes, (), tripled, [x, None]), tripled(x, None))
    assert len(tapes) == len(likes) and all(isinstance(x, Tape) for x in tapes.values())


def test_one_tensor_given_twice_is_not_recorded():
    """The tape could not tell which of the two it reads, and the next call's may be two."""
    tapes: dict[Any, Any] = {}
    x = torch.randn(3)
    for _ in range(9):
        repeat(tapes, (), lambda a, b: a - 2 * b, [x, x])
    assert not tapes
    for _ in range(4):
        a, b = torch.randn(3), torch.randn(3)
        assert torch.equal(repeat(tapes, (), lambda a, b: a - 2 * b, [a, b]), a - 2 * b)


SEEN: list[Any] = []


def see(*tensors: Tensor) -> None:
    SEEN.extend(map(weakref.ref, tensors))


def look(_: Tensor) -> None:
    SEEN.append([ref() is not None for ref in SEEN])


def dying(x: Tensor) -> Tensor:
    made, kept = x + 1, x + 2
    call(see, made, kept)
    y = made * 2
    del made
    call(look, y)
    return y + kept


def test_tensors_die_where_they_died():
    """Memory that a copy on another stream reads is held as long as the recorded call held it, and no longer."""
    tapes: dict[Any, Any] = {}
    for _ in range(5):
        SEEN.clear()
        repeat(tapes, (), dying, [torch.randn(3)])
        assert SEEN[2] == [False, True] and SEEN[0]() is None and SEEN[1]() is None
    assert [type(x) for x in tapes.values()] == [Tape]


def test_tensors_may_begin_elsewhere_in_their_memory():
    """Slices of one tensor are alike but for that: the parts of a batch, of a concatenation, of a pool."""
    tapes, whole = dict[Any, Any](), torch.randn(8, 8)
    for row in range(8):
        x = whole[row]
        assert torch.equal(repeat(tapes, (), shifted, [x]), shifted(x))
    assert [type(x) for x in tapes.values()] == [Tape]


def shifted(x: Tensor) -> Tensor:
    return x.as_strided((2, 2), (3, 1), x.storage_offset() + 1) + x.as_strided((2, 2), (2, 1)) + x[4:].view(2, 2)


def test_constants_are_those_of_the_plan():
    """A tensor that is neither given nor made is one: what it holds when the tape is played counts."""
    constant, tapes = torch.ones(3), dict[Any, Any]()
    for i in range(4):
        constant.fill_(i)
        x = torch.randn(3)
        assert torch.equal(repeat(tapes, (), lambda x: x + constant[:2].sum(), [x]), x + 2 * i)


def by_a_number(x: Tensor) -> Tensor:
    return x * x.sum().item()


def by_a_shape(x: Tensor) -> Tensor:
    return x[x > 0]


def by_numbers_that_no_mode_sees(x: Tensor) -> Tensor:
    return x + sum(x.tolist())


def by_a_new_tensor(x: Tensor) -> Tensor:
    return torch.tensor([1.0] * 16).add_(x)


def unseen(x: Tensor) -> Tensor:
    with torch._C._DisableTorchDispatch():
        return x * 2


class Holder(NamedTuple):
    x: Tensor


def held(x: Tensor) -> Tensor:
    return call(double_held, Holder(x))


def double_held(holder: Holder) -> Tensor:
    return holder.x * 2


def by_a_function_of_its_own(x: Tensor) -> Tensor:
    return call(lambda x: x * 2, x)


def by_itself(x: Tensor) -> Tensor:
    tape.give_up("of a test")
    return x + 1


OTHERS_EACH_TIME = [
    by_a_number, by_a_shape, by_numbers_that_no_mode_sees, by_a_new_tensor, unseen, held, by_a_function_of_its_own,
    by_itself,
]  # fmt: skip


@pytest.mark.parametrize("compute", OTHERS_EACH_TIME)
def test_what_no_tape_can_tell_is_computed_each_time(compute):
    tapes: dict[Any, Any] = {}
    for _ in range(8):
        x = torch.randn(16)
        assert torch.equal(repeat(tapes, (), compute, [x]), compute(x))
    assert not any(isinstance(x, Tape) for x in tapes.values())


def test_a_number_that_is_the_same_in_a_few_calls_is_none_of_the_tape():
    tapes: dict[Any, Any] = {}
    for largest in (1.0, 1.0, 1.0, 1.0, 3.0):
        x = torch.tensor([0.5, largest])
        assert torch.equal(repeat(tapes, (), lambda x: x * x.max().item(), [x]), x * largest)


def test_indices_of_numbers_are_recorded():
    tapes, order = dict[Any, Any](), torch.tensor([2, 0])
    for _ in range(4):
        x = torch.randn(3)
        assert torch.equal(repeat(tapes, (), lambda x: x[order], [x]), x[order])
    assert [type(x) for x in tapes.values()] == [Tape]


def test_a_call_with_an_error_is_no_tape():
    def fails(x: Tensor) -> Tensor:
        raise ValueError("of a test")

    tapes: dict[Any, Any] = {}
    for compute in (fails, torch.clone, fails, torch.clone, fails, torch.clone, torch.clone):
        x = torch.randn(3)
        if compute is fails:
            with pytest.raises(ValueError, match="of a test"):
                repeat(tapes, (), compute, [x])
        else:
            assert torch.equal(repeat(tapes, (), compute, [x]), x)
    assert tape._recorder.get() is None


def test_memory_that_is_given_back_ends_its_tapes():
    memory, tapes = Memory(), dict[Any, Any]()
    buffers = [torch.zeros(3)]

    def compute(x: Tensor) -> Tensor:
        memory.hold()
        return buffers[0].copy_(x) + 1

    for _ in range(4):
        repeat(tapes, (), compute, [torch.randn(3)])
    old = buffers[0].clone()
    memory.give_back()
    held = weakref.ref(buffers[0])
    buffers[0] = torch.zeros(3)
    assert held() is None, "a tape that ended holds memory"
    x = torch.randn(3)
    assert torch.equal(repeat(tapes, (), compute, [x]), x + 1) and torch.equal(buffers[0], x)
    assert not torch.equal(old, x)


def test_an_error_amid_a_tape_lets_it_recover():
    recovered, fails = [], [False]

    def may_fail(x: Tensor) -> None:
        if fails[0]:
            raise ValueError("of a test")

    def compute(x: Tensor) -> Tensor:
        tape.on_error(lambda: recovered.append(True))
        call(may_fail, x)
        return x + 1

    tapes: dict[Any, Any] = {}
    for _ in range(4):
        repeat(tapes, (), compute, [torch.randn(3)])
    fails[0] = True
    with pytest.raises(ValueError, match="of a test"):
        repeat(tapes, (), compute, [torch.randn(3)])
    assert recovered == [True]


def test_many_unlike_calls_do_not_fill_memory():
    """And those that come later have tapes, as the first ones had."""
    tapes: dict[Any, Any] = {}
    for n in range(1, 300):
        repeat(tapes, (), torch.clone, [torch.randn(n)])
    for _ in range(4):
        repeat(tapes, (), torch.clone, [torch.randn(300)])
    assert len(tapes) <= tape.MOST_TAPES and [type(x) for x in tapes.values()].count(Tape) == 1


def test_equal_collectives_of_nothing_are_two(pool):
    """And a wait, which gives back what it was given, is a line."""
    assert pool(2).run(collectives) == [[2, [True], True]] * 2


def collectives(rank: int) -> list[Any]:
    group = mesh((2,), ("cp",)).get_group().group_name
    funcol, empty = torch.ops._c10d_functional, torch.zeros(0)

    def compute(x: Tensor) -> Tensor:
        for _ in range(2):
            funcol.wait_tensor(funcol.all_to_all_single(empty, [0, 0], [0, 0], group))
        return funcol.wait_tensor(funcol.all_reduce(x, "sum", group)) * 2

    tapes: dict[Any, Any] = {}
    with mock.patch.object(tape._Recorder, "lines", autospec=True, side_effect=tape._Recorder.lines) as made:
        for i in range(4):
            x = torch.full((3,), i + rank)
            right = torch.equal(repeat(tapes, (), compute, [x]), torch.full((3,), 4 * i + 2))
    (recorder, _), _ = made.call_args
    lines = "".join(recorder._lines)
    return [lines.count("[0, 0]") // 2, [type(x) is Tape for x in tapes.values()], right]


def test_what_is_too_long_is_not_recorded():
    tapes: dict[Any, Any] = {}
    with mock.patch.object(tape, "MOST_LINES", 3):
        for _ in range(9):
            x = torch.randn(3)
            assert torch.equal(repeat(tapes, (), lambda x: x + 1 + 2 + 3 + 4, [x]), x + 1 + 2 + 3 + 4)
    assert not any(isinstance(x, Tape) for x in tapes.values())


def test_a_few_calls_are_computed_first():
    """Batches of a length that never comes again pay for no recording."""
    tapes: dict[Any, Any] = {}
    for i in range(tape.BEFORE + 3):
        with mock.patch.object(tape, "_Recorder", side_effect=tape._Recorder) as recorder:
            tape.repeat(tapes, (), torch.clone, [torch.randn(3)])
        assert recorder.called == (tape.BEFORE <= i < tape.BEFORE + 2)
