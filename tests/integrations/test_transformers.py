"""Models of Transformers on ranks, against one rank: logits, loss and every gradient, in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

import oracle
from families import FAMILIES, VOCABULARY, build
from ranks import mesh
from torch import Tensor

from cp_mesh import Striped, ZigZag
from cp_mesh.integrations.transformers import parallelize, sequence_of

BOUND = 1e-6
LAYOUTS: dict[str, Any] = {"zigzag": ZigZag(), "striped": Striped(), "balanced": "balanced"}
B, S = 2, 45
"""Not a multiple of what any layout wants, so every batch is padded."""


def batch(case: str) -> dict[str, Tensor]:
    """A whole batch."""
    numbers = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (B, S), generator=numbers)
    labels = ids.roll(1, 0)  # other tokens: BERT's are not those that it sees
    labels[:, 5:9] = -100
    found = {"input_ids": ids, "labels": labels}
    if case == "packed":  # other documents in every row
        rows = [(7, 23, S - 30), (19, S - 20, 1)]
        found["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    if case in ("padded", "left padded"):
        found["attention_mask"] = torch.ones(B, S, dtype=torch.long)
        for row, kept in enumerate((40, 31)):
            hidden = slice(kept, None) if case == "padded" else slice(0, S - kept)
            found["attention_mask"][row, hidden] = 0
            labels[row, hidden] = -100
    return found


def documents_of(given: dict[str, Tensor]) -> Tensor | None:
    ids = given.get("position_ids")
    return None if ids is None else (ids == 0).cumsum(-1)


def apart(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12)).item()


def summed(x: Tensor) -> Tensor:
    x = x.detach().clone()
    dist.all_reduce(x)
    return x


def compare(rank: int, family: str, case: str, layout: Any, changes: Any = None, **options: Any) -> dict[str, float]:
    """How far a parallel model is from the oracle: of logits, loss and the worst gradient."""
    given = batch(case)
    reference = build(family, oracle.NAME)
    logits, loss = oracle.whole_loss(reference, documents_of(given), **given)
    cp = mesh((dist.get_world_size(),), ("cp",))
    model = parallelize(build(family, "eager"), cp, layout=layout, **options)
    if changes is not None:
        changes(model)
    output = model(**given)
    output.loss.backward()
    kept = given.get("attention_mask", torch.ones(B, S)).bool()
    found = sequence_of(model).unshard(output.logits)
    grads = {name: summed(torch.zeros_like(x) if x.grad is None else x.grad) for name, x in model.named_parameters()}
    wanted = {name: x.grad for name, x in reference.named_parameters() if x.grad is not None}
    assert len(wanted) > 5 and set(wanted) <= set(grads)
    largest = max(x.abs().max().item() for x in wanted.values())
    worst = max(
        ((grads[name] - x).abs().max() / x.abs().max().clamp(min=1e-3 * largest)).item() for name, x in wanted.items()
    )
    return {"logits": apart(found[kept], logits[kept]), "loss": apart(summed(output.loss), loss), "gradient": worst}


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("case", ["plain", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(pool: Any, family: str, case: str, num_ranks: int) -> None:
    for name, layout in LAYOUTS.items():
        if name != "balanced" or case == "packed":
            for found in pool(num_ranks).run(compare, family, case, layout):
                assert max(found.values()) < BOUND, (name, found)
