"""Properties over layouts, masks, sizes and meshes that nobody listed: coverage in this process, parity on ranks.

The number of examples is that of the form, see conftest.py.
"""

from typing import Any

import torch
from cases import LAYOUTS, pairs_of
from checks import Case, coverage, parity_on_ranks, report
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_mesh.masks import Mask


def bound(S: int) -> st.SearchStrategy[int | None]:
    return st.none() | st.integers(0, S + 2)


@st.composite
def masks(draw: st.DrawFn, B: int, S: int) -> dict[str, Any]:
    """Options of a mask for B rows of S tokens: any conjunction."""
    options: dict[str, Any] = {"causal": draw(st.booleans())}
    if draw(st.booleans()):
        options["window"] = draw(bound(S)), draw(bound(S))
    if options["causal"]:
        options["prefix"] = draw(st.just(0) | st.integers(0, S + 2))
    options["length"] = draw(bound(S))
    for name, values in (("documents", st.integers(0, 3)), ("key_padding", st.booleans())):
        if draw(st.integers(0, 2)) == 0:
            rows = draw(st.sampled_from((1, B)))
            flat = draw(st.lists(values, min_size=rows * S, max_size=rows * S))
            dtype = torch.int64 if name == "documents" else torch.bool
            options[name] = torch.tensor(flat, dtype=dtype).view(rows, S)
    return options


def layouts(S: int) -> st.SearchStrategy[str | list[int]]:
    return st.sampled_from(sorted(LAYOUTS)) | st.permutations(range(S))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    S, seq_dim = draw(st.integers(0, 24)), draw(st.sampled_from((0, 1, 2)))
    B = draw(st.integers(1, 3)) if seq_dim else 1
    K = draw(st.integers(1, 3))
    memories = ("contiguous", "strided", "transposed", "sliced") + (("expanded",) if seq_dim else ())
    return Case(
        layout=draw(layouts(S)),
        mask=draw(masks(B, S)),
        S=S,
        heads=(K * draw(st.integers(1, 3)), K),
        seq_dim=seq_dim,
        memory=draw(st.sampled_from(memories)),
        scale=draw(st.none() | st.floats(0.05, 2.0)),
        sizes=(B, draw(st.integers(1, 6)), draw(st.integers(1, 6))),
    )


@given(st.data())
def test_every_pair_once(data):
    S, cp_size = data.draw(st.integers(0, 24), "S"), data.draw(st.integers(1, 9), "cp_size")
    options = data.draw(masks(2, S), "mask")
    layout = Case(data.draw(layouts(S), "layout"), options, S).make_layout()
    report([coverage(layout, Mask(**options), pairs_of(options, S), cp_size)])


MESHES = [
    ((2,), ("cp",)),
    ((3,), ("cp",)),
    ((4,), ("cp",)),
    ((2, 2), ("cp", "other")),
    ((2, 2), ("other", "cp")),
]


# Few examples of many cases: an example costs a call of the pool, and a case of a failing one is found by shrinking.
@settings(max_examples=settings().max_examples // 10)
@given(grid=st.sampled_from(MESHES), drawn=st.lists(cases(), min_size=1, max_size=4), recorded=st.booleans())
def test_parity(pool, grid, drawn, recorded):
    shape, names = grid
    report(pool(torch.Size(shape).numel()).run(parity_on_ranks, shape, names, drawn, recorded))
