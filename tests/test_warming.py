"""`cp_mesh.tools.warm_up`: what it runs, what it refuses, and on GPUs that nothing is compiled after it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from inside import room
from ranks import mesh, on_ranks

from cp_mesh import ArgumentError, Mask, Striped, ZigZag, attention, balance
from cp_mesh.tools import warm_up

SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "v_head_dim": 16, "batch": 2, "dtype": torch.float32}


def calls_made(axis: Any, **given: Any) -> list[dict[str, Any]]:
    """What attention was called with, and whether its backward ran."""
    made = []

    def recorded(q: Any, k: Any, v: Any, **keywords: Any) -> Any:
        call = keywords | {"shapes": [tuple(x.shape) for x in (q, k, v)], "backward": False}
        made.append(call)
        q.register_hook(lambda grad: call.update(backward=True))
        return attention(q, k, v, **keywords)

    with mock.patch.object(room("warming"), "attention", recorded):
        warm_up(axis, seq_len=126, **SIZES | given)
    return made


@on_ranks(2)
def test_both_passes_run_with_the_sizes_and_options(axis: Any) -> None:
    options = {"layout": Striped(), "softcap": 3.0, "mask": Mask(window=(5, 0)), "method": "ulysses"}
    (call,) = calls_made(axis, **options)
    assert call["shapes"] == [(2, 4, 63, 8), (2, 2, 63, 8), (2, 2, 63, 16)] and call["backward"]
    assert {name: call[name] for name in options} == options


@pytest.mark.parametrize("layout", [ZigZag(), "balanced"], ids=str)
@on_ranks(2)
def test_documents_are_of_several_mixes(axis: Any, layout: Any) -> None:
    made = calls_made(axis, layout=layout, documents=True)
    numbers = [len(call["mask"].documents.unique()) for call in made]
    assert numbers[0] == 1 and numbers[1] == 2 and min(numbers[2:]) > 2 and len(set(numbers)) >= 3
    assert all(call["backward"] and (call["layout"] == ZigZag()) == (layout != "balanced") for call in made)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"layout": "zigzag"}, "a layout or 'balanced'"),
        ({"mask": Mask(documents=torch.zeros(126, dtype=torch.int64))}, "pass documents=True"),
        ({"mask": Mask(blocks=torch.zeros(126, dtype=torch.int64))}, "key padding or blocks"),
    ],
    ids=str,
)
def test_what_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        warm_up(mock.Mock(), seq_len=126, **SIZES | given)


def train(rank: int) -> list[str]:
    """What is compiled in 30 batches of packed documents, after a warm-up for them."""
    import triton

    flash_attn_4_package = room("flash_attn_4_package")

    axis, seq_len = mesh((2,), ("cp",)), 8192
    warm_up(axis, seq_len=seq_len, num_heads=8, num_kv_heads=2, head_dim=64, layout="balanced", documents=True)
    compiled: list[str] = []
    kinds = set(flash_attn_4_package._compiled)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_cache_hook = lambda **what: compiled.append(what["repr"])
        for seed in range(30):
            generator = torch.Generator().manual_seed(seed)
            ids = (torch.rand(seq_len, generator=generator) < 0.01 * 2.0 ** -(seed % 6)).cumsum(0)
            mask = Mask(documents=ids)
            q, k, v = (
                torch.randn(1, seq_len // 2, heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                for heads in (8, 2, 2)
            )
            out = attention(*(x.transpose(1, 2) for x in (q, k, v)), mesh=axis, mask=mask,
                            layout=balance(mask, seq_len, 2))  # fmt: skip
            out.sum().backward()
    dist.barrier()
    return compiled + [str(kind) for kind in set(flash_attn_4_package._compiled) - kinds]


@pytest.mark.multigpu(2)
def test_nothing_is_compiled_after_it(pool: Any) -> None:
    assert pool(2, "nccl").run(train, timeout=300.0) == [[], []]
