"""Refusals of `refusals`: on every rank, in words that help, before the first collective; and what is none of them."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checks import forget_plans
from ranks import num_collectives
from refusals import CASES
from refusals.calls import ROWS, WORLD_SIZE, B, Core, D, H, S, attend, cp, local, make_meshes, run_core, sequence
from scripts import run_script
from torch import Tensor

import cp_mesh
from cp_mesh import Mask, ZigZag, attention

BASES = {"ArgumentError": "ValueError", "UnsupportedError": "NotImplementedError"}
BEFORE = {"labels of other logits": 1, "a layer outside of the plan, without a root": 1}
BEFORE |= dict.fromkeys(("two inputs", "an input that is written", "called twice", "not called"), 1)
"""Collectives before a refusal: the sum in which ranks wait that refuse nothing, a layer that is right, a gather."""
OF_PYTHON = re.compile(r"<\w|object at|(?<![.\w])tensor\(|stride=|Shard\(dim=|\bS\(|torch\.Size")
"""What users do not write."""

Outcome = tuple[tuple[str, ...], str, int] | None
"""Class names of an exception up to its bases, its text, and the collectives issued before it."""


def refuse(rank: int) -> tuple[int, dict[str, Outcome]]:
    make_meshes()
    before = num_collectives()
    attend()
    by_valid_call = num_collectives() - before
    outcomes: dict[str, Outcome] = {}
    for name, (_, _, call) in CASES.items():
        before = num_collectives()
        outcomes[name] = None
        try:
            call()
        except Exception as error:
            kinds = tuple(kind.__name__ for kind in type(error).__mro__)
            outcomes[name] = kinds, str(error), num_collectives() - before
        forget_plans()  # see test_a_refused_call_leaves_nothing_behind
    return by_valid_call, outcomes


@pytest.fixture(scope="module")
def outcomes(pool: Any) -> list[dict[str, Outcome]]:
    results = pool(WORLD_SIZE).run(refuse, timeout=120.0)
    # The count sees the ring of a call that is not refused; else a count of zero would say nothing.
    assert all(by_valid_call == 2 for by_valid_call, _ in results)  # stages of one and of two steps
    return [outcomes for _, outcomes in results]


@pytest.mark.parametrize("name", CASES)
def test_every_rank_refuses(name: str, outcomes: list[dict[str, Outcome]]) -> None:
    error, words, _ = CASES[name]
    for rank in range(WORLD_SIZE):
        outcome = outcomes[rank][name]
        assert outcome is not None, f"rank {rank} did not raise"
        kinds, message, num_collectives = outcome
        assert kinds[0] == error and BASES[error] in kinds, f"rank {rank}: {kinds[0]}: {message}"
        missing = [part for part in words.split("|") if part not in message]
        assert not missing, f"rank {rank} does not say {missing}: {message}"
        assert num_collectives == BEFORE.get(name, 0)
        assert not OF_PYTHON.search(message), message


# Options of other types and values than those of the tables. A call with them is refused in words of this library,
# or computes: what would be taken for something else is none of both.
JUNK: dict[str, Any] = {
    "None": None, "True": True, "0": 0, "1": 1, "-1": -1, "a fraction": 0.5, "nan": float("nan"), "inf": float("inf"),
    "a word": "x", "words": "a|b,c:d", "no word": "", "bytes": b"1", "a list": [1], "a dict": {}, "an object": object(),
    "a type": int, "a tensor": torch.ones(3), "a bool tensor": torch.ones(1, dtype=torch.bool),
    "a complex number": 1j, "a meta tensor": torch.ones(8, device="meta"), "a numpy number": np.float32(0.5),
    "a numpy integer": np.int64(1), "a tensor of 1": torch.tensor(1), "a tensor of a fraction": torch.tensor(0.5),
}  # fmt: skip
ONE, FRACTION = {"1", "a numpy integer", "a tensor of 1"}, {"a fraction", "a numpy number", "a tensor of a fraction"}
MEANINGFUL = {  # what may pass: by option, names of values
    "scale": {"None", *ONE, *FRACTION},
    "softcap": {"None", *ONE, *FRACTION},
    "dropout_p": {"0", *FRACTION},  # with a seed
    "dropout_seed": {"None", "0", *ONE},
    "ulysses_degree": {"None"},
    "head_chunks": {"None", *ONE},
    "deterministic": {"None", "True"},
    "seq_dim": {"None"},
    "seq_len": {"None"},
    "causal": {"True"},
    "prefix": {"0", *ONE},
    "length": {"None", "0", *ONE},
}
OPTIONAL_TENSORS = {"sinks", "alibi_slopes", "bias", "documents", "key_padding", "blocks"}


def junk(rank: int) -> list[str]:
    """Options and values that were neither refused in this library's words nor meant anything."""
    make_meshes()
    of_masks = [field.name for field in fields(Mask) if field.name != "layout"]
    public = [name for name in inspect.signature(attention).parameters if not name.startswith("_")]
    options = [*public, *of_masks]
    problems = []
    for option, (name, value) in product(options, JUNK.items()):
        seed = {"dropout_seed": 1} if option == "dropout_p" else {"dropout_p": 0.5} if option == "dropout_seed" else {}
        before = num_collectives()
        try:
            given = {"mask": Mask(**{option: value})} if option in of_masks else {option: value}
            attention(**local() | seed | given)
        except (cp_mesh.ArgumentError, cp_mesh.UnsupportedError) as error:
            if num_collectives() != before or not str(error):
                problems.append(f"{option}={name}: refused after a collective: {error}")
            continue
        except Exception as error:
            problems.append(f"{option}={name}: {type(error).__name__}: {error}")
            continue
        allowed = MEANINGFUL.get(option, set()) | ({"None"} if option in OPTIONAL_TENSORS else set())
        if option == "return_lse":
            allowed = {"True"}
        if name not in allowed and not (option == "window" and name == "None"):
            problems.append(f"{option}={name} computed something")
    return problems


def test_nothing_is_taken_for_something_else(pool: Any) -> None:
    for problems in pool(WORLD_SIZE).run(junk, timeout=120.0):
        assert not problems, "\n".join(problems)


def other_numbers(rank: int) -> None:
    """Results of numbers of Python, NumPy and tensors are the same."""
    make_meshes()
    arguments = local()
    for method in ({"head_chunks": 2}, {"method": "hybrid", "ulysses_degree": 2}):
        plain: dict[str, Any] = {"seq_dim": 2, "seq_len": S, "scale": 0.5, "softcap": 3.0} | method
        want = attention(**arguments, **plain, mask=Mask(window=(7, 0), prefix=3, length=20))
        for kind in (np.asarray, torch.tensor):
            given = {name: x if isinstance(x, str) else kind(x)[()] for name, x in plain.items()}
            mask = Mask(window=(kind(7)[()], kind(0)[()]), prefix=kind(3)[()], length=kind(20)[()])
            assert torch.equal(attention(**arguments, **given, mask=mask), want)
    for kind in (np.int64, torch.tensor):
        whole = sequence(length=kind(21))
        assert whole == sequence(length=21) and whole.seq_len == 24 and whole.for_batch(kind(5)).length == 5
        assert cp_mesh.geometry.Joint(kind(4), (kind(12), ZigZag())) == cp_mesh.geometry.Joint(4, (12, ZigZag()))
        assert type(cp_mesh.inference.ShardedCache(whole, kind(9)).capacity) is int
        run_core(Core(scale=kind(1)), ulysses_degree=kind(2), method="hybrid")
    q, k, v = (local()[name] for name in ("query", "key", "value"))
    want = cp_mesh.inference.decode(q, k, v, mesh=cp(), q_lens=[ROWS] * WORLD_SIZE)
    assert torch.equal(cp_mesh.inference.decode(q, k, v, mesh=cp(), q_lens=[np.int64(ROWS)] * WORLD_SIZE), want)
    assert cp_mesh.tools.verify(cp(), seq_len=np.int64(64), scores={"scale": torch.tensor(0.5)}).passed


def test_numbers_of_other_kinds_are_taken_as_they_are(pool: Any) -> None:
    pool(WORLD_SIZE).run(other_numbers)


def refused_then_right(rank: int) -> Tensor:
    forget_plans()
    arguments = local()
    try:
        with pytest.raises((ValueError, RuntimeError)):
            attention(**arguments, seq_len=float(S))
        return attention(**arguments, seq_len=S)
    finally:
        forget_plans()


def test_a_refused_call_leaves_nothing_behind(pool: Any) -> None:
    assert pool(WORLD_SIZE).run(refused_then_right)[0].shape == (B, H, ROWS, D)


NO_PROCESS_GROUP = """
import torch, cp_mesh
q = torch.randn(1, 2, 8, 4)
for call in (lambda: cp_mesh.attention(q, q, q), lambda: cp_mesh.ShardedSequence(None)):
    try:
        call()
    except cp_mesh.ArgumentError as error:
        print(error)
"""


def test_no_process_group(tmp_path: Path) -> None:
    script = tmp_path / "no_process_group.py"
    script.write_text(NO_PROCESS_GROUP)
    said = run_script(script, []).printed.splitlines()
    assert len(said) == 2
    assert 'after init_process_group, pass mesh=mesh["cp"]' in said[0]
    assert said[1].startswith("ShardedSequence.mesh: expected a 1-D DeviceMesh, or a 2-D one")
