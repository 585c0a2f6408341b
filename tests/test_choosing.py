"""What method="auto" takes: by a rule over numbers that are the same on every rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from checks import forget_plans
from inside import AttentionSpec, Operand, Tensors, inner, path_of, room
from ranks import mesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from cp_mesh import Mask, RankMismatchError, Striped, ZigZag, attention, explain

plan = room("call.plan")
choose, ranks_by_host = inner("choose", "choose", "ranks_by_host")
GPU, IDS = torch.device("cuda", 0), torch.zeros(8192, dtype=torch.int64)


# ---- the rule


def chosen(heads: str, rows: int, cp_size: int = 8, **options: Any) -> str:
    """Of causal calls in bf16 on one host; ``options`` are of the call, or of `choose`."""
    num_heads, kv_heads = map(int, heads.split("/"))
    given = {name: options.pop(name, x) for name, x in {"tensors": Tensors(), "scored": False, "num_hosts": 1}.items()}
    device, dtype, batch = options.pop("device", GPU), options.pop("dtype", torch.bfloat16), options.pop("batch", 1)
    q, k = (Operand(torch.Size((batch, n, rows + 7, 128)), dtype, device) for n in (num_heads, kv_heads))
    asked = AttentionSpec(**{"layout": "zigzag", "mask": Mask().spec(), "scale": 1.0} | options)
    return str(choose(q, k, seq_len=rows * cp_size, cp_size=cp_size, options=asked, **given).method)


def test_the_rule() -> None:
    """At what was measured, of 2 ranks and of 8, and on both sides of its bounds."""
    for rows in (1024, 4096, 16384, 65536):
        for heads in ("32/8", "64/8", "32/32"):
            assert {chosen(heads, rows, cp_size) for cp_size in (1, 2, 4, 7)} == {"ring"}
    assert [chosen("32/8", rows) for rows in (1024, 2048, 2049, 4096, 16384)] == [*["all_gather"] * 2, *["ring"] * 3]
    assert [chosen("32/32", rows) for rows in (1024, 4096, 8192, 8193, 16384)] == [*["ulysses"] * 3, *["ring"] * 2]
    assert chosen("32/32", 4096, 16) == chosen("32/32", 4096, 32) == "ulysses"


ALONE: dict[str, tuple[dict[str, Any], str, str]] = {
    "ranks that do not divide heads": ({"cp_size": 12}, "all_gather", "ring"),
    "head chunks": ({"head_chunks": 2}, "all_gather", "ring"),
    "a window": ({"mask": Mask(window=(1023, 0)).spec()}, "ring", "ring"),
    "no causal mask": ({"mask": Mask(causal=False).spec()}, "all_gather", "ring"),
    "documents": ({"tensors": Tensors(documents=IDS)}, "all_gather", "ring"),
    "padding": ({"tensors": Tensors(key_padding=IDS)}, "all_gather", "ring"),
    "stripes": ({"layout": "striped"}, "all_gather", "ring"),
    "batch rows": ({"batch": 4}, "ulysses", "ring"),
    "more batch rows": ({"batch": 16}, "ring", "ring"),
    "a CPU": ({"device": torch.device("cpu")}, "ring", "ring"),
    "meta tensors": ({"device": torch.device("meta")}, "ring", "ring"),
    "float32": ({"dtype": torch.float32}, "ring", "ring"),
    "two hosts": ({"num_hosts": 2}, "ring", "ring"),
    "hosts that nobody tells": ({"num_hosts": 0}, "ring", "ring"),
    "NCCL": ({"transport": "functional"}, "ring", "ring"),
    "scores": ({"scored": True}, "ring", "ring"),
}
"""What changes the method of 32/32 heads: of 1K rows and of 4K."""


@pytest.mark.parametrize("words", ALONE)
def test_what_changes_the_method(words: str) -> None:
    options, few, some = ALONE[words]
    assert (chosen("32/32", 1024), chosen("32/32", 4096)) == ("ulysses", "ulysses")
    assert (chosen("32/32", 1024, **options), chosen("32/32", 4096, **options)) == (few, some)


def test_names_of_kernels_and_of_transports_that_work_change_nothing() -> None:
    for options in ({"kernel": "triton"}, {"transport": "symmetric_memory"}, {"layout": "contiguous"}):
        assert chosen("32/32", 1024, **options) == "ulysses"


@pytest.mark.parametrize(
    ("told", "ranks", "hosts"),
    (("8", range(8), [8]), ("4", range(8), [4, 4]), ("4", (3, 4), [1, 1]), ("2", (0, 2, 4, 6), [1] * 4),
     ("8", range(8, 16), [8]), ("3", range(4), [3, 1]), ("", range(8), []), ("0", range(8), []), ("two", range(8), [])),
)  # fmt: skip
def test_hosts_are_counted(told: str, ranks: Any, hosts: list[int]) -> None:
    of_ranks = mock.patch.object(torch.distributed, "get_process_group_ranks", lambda group: group)
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=told), of_ranks:
        assert ranks_by_host(ranks) == hosts


def test_a_trace_can_ask() -> None:
    """In one graph, of which other lengths take another one where they cross a bound, and there alone."""
    graphs: list[Any] = []

    def method(q: torch.Tensor) -> torch.Tensor:
        operand, rows = Operand(q.shape, torch.bfloat16, GPU), q.shape[2]
        asked = AttentionSpec("zigzag", Mask().spec(), 1.0)
        taken = choose(operand, operand, (), False, 8 * rows, 8, 1, asked).method
        return q + ("ring", "all_gather", "ulysses").index(taken)

    compiled = torch.compile(
        method, fullgraph=True, dynamic=True, backend=lambda graph, _: graphs.append(graph) or graph.forward
    )
    for rows, want, count in ((100, 2, 1), (4096, 2, 1), (9000, 0, 2), (10000, 0, 2), (200, 2, 2)):
        assert float(compiled(torch.zeros(1, 32, rows, 1)).max()) == want and len(graphs) == count, rows


def test_explain_says_the_same() -> None:
    """And why."""
    on_gpu = {"device": "cuda", "dtype": torch.bfloat16, "kernel": "fa4"}
    heads = {"num_heads": 32, "num_kv_heads": 32}
    for rows, options, method, words in (
        (1024, heads, "ulysses", "as many kv heads as query heads"),
        (1024, heads | {"layout": Striped()}, "all_gather", "up to 2048 rows"),
        (1024, {"num_heads": 32, "num_kv_heads": 8}, "all_gather", "up to 2048 rows"),
        (1024, {}, "all_gather", "up to 2048 rows a rank; num_heads= may change it"),
        (1024, heads | {"scores": ["sinks"]}, "ring", "without score terms"),
        (4096, {"num_heads": 32, "num_kv_heads": 8}, "ring", "more than 2048 rows"),
        (1024, heads | {"mask": Mask(window=(1023, 0))}, "ring", "with a window"),
        (1024, heads | {"mask": Mask(documents=torch.arange(8192) // 1000)}, "all_gather", "up to 2048 rows"),
        (1024, heads | {"scores": ["softcap"], "kernel": "triton"}, "ring", "without score terms"),
        (1024, heads | {"gpus_per_host": 4}, "ring", "on one host"),
        (1024, heads | {"transport": "functional"}, "ring", "over symmetric memory"),
        (1024, heads | {"dtype": torch.float32, "kernel": "triton"}, "ring", "in half precision"),
    ):
        found = explain(8 * rows, 8, **on_gpu | options)
        assert found.choice is not None and words in found.choice.why, found.choice
        assert found.choice.method == found.found.method == method
        assert f"method auto = {method}: " in str(found)
    assert explain(8192, 8, method="ring").choice is None and explain(8192, 1).choice.method == "ring"


# ---- calls on ranks


def checkpointed(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda attend: lambda *args: checkpoint(attend, *args, **options)


SAVED = partial(create_selective_checkpoint_contexts, [torch.ops.cp_mesh.attention.default])
WITHIN: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "": lambda attend: attend,
    "compiled": partial(torch.compile, backend="aot_eager", fullgraph=True),
    "checkpointed": checkpointed(use_reentrant=False),
    "checkpointed, reentrant": checkpointed(use_reentrant=True),
    "checkpointed, but for attention": checkpointed(use_reentrant=False, context_fn=SAVED),
}


def as_on_gpus(q: Any, *given: Any) -> Any:
    return choose(q._replace(device=GPU, dtype=torch.bfloat16), *given)


def call(
    rank: int, options: dict[str, Any], heads: str, on_gpu: bool = True, within: str = ""
) -> tuple[str, list[torch.Tensor]]:
    """The method that a call took, and its results.

    ``within`` is what it is called in, one of `WITHIN`; ``on_gpu`` as if it were on one host of GPUs, of which 4 are
    as 8.
    """
    forget_plans()
    made: list[Any] = []
    real = plan.make_plan

    def make_plan(*given: Any) -> Any:
        made.append(real(*given))
        return made[-1]

    torch.manual_seed(0)
    size = torch.distributed.get_world_size()
    own, (num, num_kv) = ZigZag().positions(24, size, rank), map(int, heads.split("/"))
    whole = [torch.randn(1, n, 24, 8, dtype=torch.float64) for n in (num, num_kv, num_kv)]
    with (
        mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(size)),
        mock.patch(f"{path_of('choose')}.LEAST_RANKS", 4),
        mock.patch(f"{path_of('call.plan')}.choose", as_on_gpus if on_gpu else choose),
        mock.patch(f"{path_of('passes')}.make_plan", make_plan),
    ):
        attend = WITHIN[within](partial(attention, mesh=mesh((size,), ("cp",)), **options))
        q, k, v = (x[:, :, own].clone().requires_grad_() for x in whole)
        out = attend(q, k, v)
        out.square().sum().backward()
    (method,) = {x.method.name for x in made}  # of the forward, computed again too, and the backward
    assert len(made) >= (2 if within else 1)  # an eager backward keeps the plan of its forward
    return method, [out.detach(), *(x.grad for x in (q, k, v))]


@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize(("heads", "method"), (("4/4", "ulysses"), ("4/2", "all_gather")))
@pytest.mark.quick(without="compiled")
def test_every_rank_and_pass_takes_the_same(pool: Any, heads: str, method: str, within: str) -> None:
    """Results are those of the ring."""
    found = pool(4).run(call, {}, heads, True, within)
    plain = pool(4).run(call, {"method": "ring"}, heads)
    for (name, tensors), (_, want) in zip(found, plain, strict=True):
        assert name == method
        for x, y in zip(tensors, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_what_is_not_chosen_for(pool: Any) -> None:
    """CPUs, fewer ranks, scores of tensors and of numbers; and a method that is named."""
    assert [name for name, _ in pool(4).run(call, {}, "4/4", False)] == ["ring"] * 4
    assert [name for name, _ in pool(2).run(call, {}, "4/4")] == ["ring"] * 2
    for options in ({"softcap": 2.0}, {"alibi_slopes": torch.ones(4, dtype=torch.float64)},
                    {"sinks": torch.ones(4, dtype=torch.float64)}, {"method": "ring"}):  # fmt: skip
        assert [name for name, _ in pool(4).run(call, options, "4/4")] == ["ring"] * 4


def with_unequal_hosts(rank: int) -> None:
    """As on a host of two ranks and one of four, whose ranks count one host."""
    q = torch.randn(1, 4, 6, 8)
    with (
        mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2" if rank < 2 else "4"),
        mock.patch(f"{path_of('choose')}.LEAST_RANKS", 4),
        mock.patch(f"{path_of('call.plan')}.choose", as_on_gpus),
    ):
        attention(q, q, q, mesh=torch.distributed.new_group())


def test_ranks_that_count_other_hosts_are_refused(pool: Any) -> None:
    """Before anything travels: the first call of a kind compares what each chose."""
    for each in pool(4).run_expecting_error(with_unequal_hosts, timeout=20.0):
        assert each is not None and each.type == RankMismatchError.__name__ and "method" in str(each), each
