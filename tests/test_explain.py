"""What `explain` says: its figures are those of schedules and formulas, every option counts, the text is short."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from dense import dense_mask
from inside import inner, make_schedule, path_of

from cp_mesh import ArgumentError, Contiguous, Mask, Striped, UnsupportedError, ZigZag, balance, explain
from cp_mesh.geometry import Permuted

MASKED, stages_of_pairs = inner("picture", "MASKED", "stages_of_pairs")
owners = inner("variants", "owners")

ON_GPU: dict[str, Any] = {
    "device": "cuda",
    "dtype": torch.bfloat16,
    "num_heads": 32,
    "num_kv_heads": 8,
    "kernel": "fa4",
    "method": "ring",
}
ROOT = Path(__file__).parents[1]
DOCUMENTS = torch.arange(96) // 20


def lines_of(found: object, first: str) -> list[str]:
    """Words of the lines that begin so."""
    return [line for line in str(found).splitlines() if line.startswith(first)]


# ---- figures


def test_owners_work_and_traffic() -> None:
    found = explain(96, 3, layout=Contiguous(), mask=Mask(window=(4, 0)), columns=6)
    assert "owner 001122" in str(found) and "kernel auto = reference" in str(found)
    assert [x.received for x in found.found.ranks] == [(0,), (4,), (4,)]  # the halo; rank 0 needs nobody
    table = [line.split() for line in str(found).splitlines() if line[:1] in "012"]
    assert table == [["0", "32", "0.96", "1", "-"], *([x, "32", "1.02", "2", "4", "from", y] for x, y in ("10", "21"))]


def test_work_is_a_share_of_the_mean() -> None:
    causal = explain(96, 3, layout=Contiguous()).found.work
    assert causal.tolist() == sorted(causal) and causal[2] > 1.5 > 1.0 > causal[0] and causal.sum() == pytest.approx(3)


@pytest.mark.parametrize("layout", (Striped(), Permuted(torch.randperm(96)), balance(Mask(documents=DOCUMENTS), 96, 2)))
@pytest.mark.parametrize("name", ("documents", "blocks", "an id that comes back", "ids in turns"))
def test_work_counts_pairs_of_documents(layout: Any, name: str) -> None:
    """Also where a kernel is given tiles as one, whose areas are more."""
    ids = torch.arange(95, -1, -1) % 2 if name == "ids in turns" else DOCUMENTS % 3
    given = {"documents": ids} if " " in name else {name: DOCUMENTS}
    found = explain(96, 2, layout=layout, mask=Mask(**given), scores=["alibi_slopes"], device="cuda")
    allowed = dense_mask(96, **{key: ids[None] for key, ids in given.items()})[0]
    counts = [allowed[layout.positions(96, 2, rank)].sum().item() for rank in range(2)]
    assert found.found.work.tolist() == pytest.approx([2 * count / sum(counts) for count in counts])


@pytest.mark.parametrize(
    ("ids", "held"),
    (
        ([[0] * 20 + [1] * 12 + [2] * 32], ["2 whole", "1 whole"]),
        ([[0] * 30 + [1] * 4 + [2] * 30], ["1 whole, #1 cut", "1 whole, #1 cut"]),
        ([[0] * 8 + [1] * 8 + [0] * 20 + [-1] * 28], ["1 whole, #0 cut", "#0 cut"]),  # document 0 comes back
        ([[-1] * 32 + [0] * 32, [3] * 40 + [2] * 24], ["#1:0 cut", "2 whole, #1:0 cut"]),
        ([[0] * 31 + [-1] * 2 + [0] * 31, [0] * 33 + [0] * 31, [0] * 64], ["3 cut", "3 cut"]),
        ([[-1] * 32 + [0] * 32], ["-", "1 whole"]),
    ),
)
def test_documents_of_a_rank(ids: list[list[int]], held: list[str]) -> None:
    """Which lie on it whole, and which in part; and the time of a layer: tokens, and pairs of all batch rows."""
    found = explain(64, 2, layout=Contiguous(), mask=Mask(documents=torch.tensor(ids)))
    lines = [line for line in str(found).splitlines() if line[:2] in ("0 ", "1 ")]
    assert [re.sub(r"  +", "|", line).split("|")[4] for line in lines] == held
    allowed = dense_mask(64, documents=torch.tensor(ids)).sum((0, 2))
    times = [15_000 * 32 * len(ids) + int(pairs.sum()) for pairs in allowed.split(32)]
    assert found.found.layer.tolist() == pytest.approx([2 * time / sum(times) for time in times])


def test_extra_memory() -> None:
    grouped = explain(131072, 8, **ON_GPU).found
    peaks = [x.memory.peak / 2**30 for x in grouped.ranks if x.memory]
    assert len(peaks) == 8 and f"{max(peaks):.3g}" == "1.94"  # as docs/performance.md says
    assert grouped.ranks[0].memory and grouped.ranks[0].memory.symmetric == 2**29
    for wanted, chunks in ((None, 4), (8, 8)):
        found = explain(131072, 8, **ON_GPU | {"num_kv_heads": None, "head_chunks": wanted})
        assert f"{chunks} head chunks" in str(found) and found.found.chunks == chunks


@pytest.mark.full
def test_bytes_count_every_batch_row() -> None:
    """Two rows of a batch, each with documents of its own."""
    documents = torch.stack([torch.arange(4096) // 1000, torch.arange(4096) // 300])
    mask = Mask(documents=documents)
    found = explain(4096, 4, layout=Contiguous(), mask=mask, batch=2, **ON_GPU)
    schedules = [make_schedule(Contiguous(), mask, 4096, 4, rank, True) for rank in range(4)]
    calls = [sum(map(len, (x.local_tiles, *(stage.tiles for stage in x.route.stages)))) for x in schedules]
    assert [x.calls for x in found.found.ranks] == calls and "segments" in schedules[0].covers
    rows = [x.near for x in found.found.ranks]
    first = next(line for line in str(found).splitlines() if line.startswith("1  "))
    assert first.split()[-4:-2] == [str(2 * 4 * rows[1]), "KiB"]  # 4 KiB a row and batch row
    assert found.found.moved == 2 * sum(rows) / 4 * 2 * 128 * 8 * 6


def test_gradients_travel_as_the_method_decides() -> None:
    """In fp32 where two calls of a stage give gradients of one row; Ulysses sends out where no delta is read."""
    mask = Mask(window=(2500, 0))
    twice = explain(4096, 4, mask=mask, **ON_GPU)
    assert make_schedule(ZigZag(), mask, 4096, 4, 0).overlapping
    rows = sum(x.near for x in twice.found.ranks) / 4
    assert twice.found.moved == rows * 2 * 128 * 8 * (2 * 2 + 4)
    # 2 kv heads are sent twice each, and travel again with q; of 8, what arrived is kept
    for kv_heads, moved in ((2, 128 * (5 * 8 + 6 * 4) + 3 * 8), (8, 128 * (4 * 8 + 4 * 8))):  # lse twice, and delta
        sizes = {"num_heads": 8, "num_kv_heads": kv_heads, "dtype": torch.float64}
        exact = explain(4096, 4, method="ulysses", kernel="reference", **sizes)
        assert exact.found.moved == 1024 * 3 / 4 * moved * 8


def test_bytes_by_link() -> None:
    """4 ranks on 2 hosts: rank 0 of contiguous fetches nothing, rank 3 one shard of its host and two of the other."""
    found = explain(4 * 4096, 4, layout=Contiguous(), gpus_per_host=2, **ON_GPU)
    assert [(x.near, x.far) for x in found.found.ranks] == [(0, 0), (4096, 0), (0, 2 * 4096), (4096, 2 * 4096)]
    assert lines_of(found, "3 ")[0].split()[-6:-2] == ["16", "MiB", "32", "MiB"]  # of 4 KiB a row: 8 heads, K and V
    assert "functional over 2 hosts" in str(found)
    alone = explain(4 * 4096, 4, layout=Contiguous(), **ON_GPU)
    assert "network" not in str(alone)
    ring = 6 * 4096 / 4 * 2 * 128 * 8 * 6  # key rows a rank, twice, and their gradients, in bf16
    assert found.found.moved == alone.found.moved == ring
    ulysses = next(x for x in found.others if x.method == "ulysses")
    assert ulysses.moved == 4096 * 3 / 4 * (4 * 32 + 4 * 8) * 128 * 2


LATENT = ON_GPU | {"num_kv_heads": None, "head_dim": 192, "v_head_dim": 128, "latent_dim": 576, "kernel": "triton"}


def test_latent_rows_beside_expanded_keys() -> None:
    """Of V3: 576 numbers a token in place of 320 of each head; gradients in fp32 for 576 numbers, in bf16 for 320."""
    found = explain(4 * 4096, 4, layout=Contiguous(), **LATENT)
    rows = 6 * 4096 / 4
    assert found.found.moved == rows * 32 * 320 * 6 and found.found.latent.moved == rows * 576 * 8
    table = lines_of(found, "contiguous ring (this)")[0].split()
    assert table[-8:-6] == ["360", "MiB"] and table[-4:-2] == ["27", "MiB"]
    said = (
        f"latent_attention would move {27 / 360:.2g} of the bytes; expanding takes {100 * 576 * 5 / 16385:.2g} % of the"
    )
    assert said in str(found)
    one_by_one = explain(4 * 4096, 4, layout=Contiguous(), **LATENT | {"head_chunks": 32})
    assert one_by_one.found.latent.memory < found.found.latent.memory
    assert one_by_one.found.latent.moved == found.found.latent.moved
    plain = explain(4 * 4096, 4, layout=Contiguous(), **LATENT | {"latent_dim": None})
    assert "latent" not in str(plain) and plain.found.latent is None


def test_expansion_is_a_share_of_the_pairs_of_every_batch_row() -> None:
    """Each rank expands the rows that it sees: of a causal mask all before its last."""
    two = Mask(documents=torch.zeros(2, 4096, dtype=torch.int64))
    for mask, method, expanded in ((Mask(), "ring", 5), (two, "all_gather", 5), (Mask(), "ulysses", 2)):
        found = explain(4096, 4, layout=Contiguous(), mask=mask, **LATENT | {"method": method}).found
        assert found.latent.expansion == pytest.approx(576 * expanded / 4097)


# ---- choices


def test_kernel_and_what_was_passed_over() -> None:
    on_gpu = {"device": "cuda", "dtype": torch.bfloat16}
    assert "kernel auto = cudnn" in str(explain(96, 3, scores=["sinks"], **on_gpu))
    capped = str(explain(96, 3, scores={"softcap": 30.0}, **on_gpu))
    assert "kernel auto = triton; kernels rejected for what they lack:\n" in capped
    assert "cudnn" in capped and "scores with softcap" in capped
    lacking = capped.partition("kernels rejected for what they lack:\n")[2].partition("\nowner")[0].splitlines()
    assert len(lacking) > 1 and all(re.fullmatch(r"  [a-z_\d, ]+: \S.*", line) for line in lacking)  # a reason a line
    assert "kernel auto = reference" in str(explain(96, 3, scores=["softcap", "sinks"]))
    named = explain(96, 3, mask=Mask(documents=DOCUMENTS), kernel="fa4", **on_gpu)
    assert "kernel fa4\n" in str(named) and named.found.kernel.name == "fa4"


def test_methods_differ_in_stages() -> None:
    found = {method: explain(8192, 8, num_heads=4, method=method).found for method in ("auto", "ring", "all_gather")}
    assert found["auto"].steps == found["ring"].steps == ((1,), (2, 3), (4, 5, 6, 7))
    assert found["all_gather"].steps == (tuple(range(1, 8)),) and found["all_gather"].moved == found["ring"].moved
    assert found["all_gather"].memory > found["ring"].memory


def test_ulysses_computes_heads_of_all_rows() -> None:
    """Every rank is alike: its heads in one call, no rows by stages; kv heads are sent where they are read."""
    found = explain(4 * 4096, 4, **ON_GPU | {"method": "ulysses"})
    (rank,) = found.found.ranks
    assert (rank.rows, rank.work, rank.calls, rank.received) == (4096, 1.0, 1, ())
    assert "method ulysses" in str(found) and "all ranks are alike" in str(found)
    assert not any(x.method == "ulysses" for x in found.others) and found.others[0].method == "ring"
    few = explain(4 * 4096, 4, **ON_GPU | {"method": "ulysses", "num_kv_heads": 2})
    assert few.found.moved == 4096 * 3 / 4 * (
        128 * ((6 * 32 + 4 * 4) * 2 + 2 * 4 * 4) + 32 * 4 * 2
    )  # as of 4, gradients in fp32
    chunked = explain(4 * 4096, 4, head_chunks=2, **ON_GPU | {"method": "ulysses"})
    assert chunked.found.chunks == 2 and chunked.found.ranks[0].calls == 2
    assert explain(4 * 4096, 4, method="ulysses").found.ranks[0].rows == 4096  # also of heads that are not told


def test_hybrid_computes_heads_of_the_rows_of_neighbours() -> None:
    """8 ranks in groups of 2: a ring of 4, with half of the heads and two shards of rows each."""
    found = explain(8 * 4096, 8, ulysses_degree=2, gpus_per_host=4, **ON_GPU | {"method": "hybrid"})
    ring = explain(8 * 4096, 4, gpus_per_host=2, **ON_GPU | {"num_heads": 16, "num_kv_heads": 4}).found
    assert [x.rank for x in found.found.ranks] == [0, 2, 4, 6] and {x.rows for x in found.found.ranks} == {4096}
    assert [x.received for x in found.found.ranks] == [x.received for x in ring.ranks]
    assert [(x.near, x.far, x.calls) for x in found.found.ranks] == [(x.near, x.far, x.calls) for x in ring.ranks]
    assert found.found.work == pytest.approx(np.repeat(ring.work, 2))
    swapped = 4096 / 2 * 128 * (4 * 32 + 4 * 8) * 2  # q, k, v, out; dout, dq, dk, dv: half of each
    assert found.found.moved == ring.moved + swapped and found.found.row_bytes == ring.row_bytes
    assert "method hybrid of 2, functional over 2 hosts" in str(found)
    assert "groups of 2 ranks exchange heads for rows" in str(found) and "left out" not in str(found)
    by_itself = explain(8 * 4096, 8, **ON_GPU | {"method": "hybrid"})
    assert by_itself.found.degree == 8 and "method hybrid of 8" in str(by_itself)


def test_alternatives() -> None:
    """Other layouts and methods, balanced where there are documents; Ulysses where heads divide."""

    def names(found: Any) -> list[str]:
        return [f"{x.layout.spec()} {x.method}" for x in found.others]

    plain = ["zigzag all_gather", "contiguous ring", "contiguous all_gather", "striped ring", "striped all_gather"]
    assert names(explain(96, 3)) == plain == names(explain(96, 3, **ON_GPU))  # 32 heads on 3 ranks
    assert names(explain(96, 4, **ON_GPU)) == [*plain, "zigzag ulysses", "zigzag hybrid"]
    hosts = explain(96, 4, gpus_per_host=2, **ON_GPU)
    assert names(hosts) == [*plain, "zigzag ulysses", "zigzag hybrid"] and "zigzag hybrid of 2" in str(hosts)
    hybrid = explain(96, 4, gpus_per_host=2, **ON_GPU | {"method": "hybrid", "ulysses_degree": 2})
    assert names(hybrid)[:2] == ["zigzag ring", "zigzag all_gather"] and "zigzag hybrid" not in names(hybrid)
    packed = explain(96, 3, mask=Mask(documents=DOCUMENTS))
    assert names(packed) == [*plain, "balanced ring", "balanced all_gather"]
    balanced = balance(Mask(documents=DOCUMENTS), 96, 3)
    assert sum(name.startswith("balanced") for name in names(explain(96, 3, layout=balanced, mask=packed.mask))) == 1
    many = Mask(documents=torch.arange(65536) // 8)
    assert not any("striped" in name for name in names(explain(65536, 16, mask=many)))


def said(*sizes: int, **options: Any) -> str:
    """The text as one line."""
    return " ".join(str(explain(*sizes, **options)).split())


def test_advice() -> None:
    unbalanced = said(131072, 8, layout=Contiguous(), **ON_GPU)
    assert "zigzag ring would be faster: its slowest rank has 1.00 times the mean work." in unbalanced
    found = said(131072, 8, **ON_GPU)
    but = "but its slowest rank has 1.87 times the mean work"
    assert f"contiguous ring would move 0.67 of the bytes, {but}." in found and "would be faster" not in found
    window = said(131072, 8, mask=Mask(window=(63, 0)))
    assert "contiguous ring would move 0.50 of the bytes, and its slowest rank has the same work." in window
    lens = torch.tensor([2048] * 4 + [512] * 16)  # of which attention is a small part of a layer
    packed = Mask(documents=torch.repeat_interleave(torch.arange(20), lens))
    assert explain(16384, 2, layout=Contiguous(), mask=packed).found.work.max() > 1.5
    assert "None of these would be faster." in said(16384, 2, layout=Contiguous(), mask=packed)
    assert "is not installed here: kernel=" not in found
    with mock.patch(f"{path_of('variants')}.shortfalls", lambda capability, request: ["package of it (pip)"]):
        assert "fa4 is not installed here: kernel='fa4'" in said(131072, 8, **ON_GPU | {"kernel": "auto"})


def test_one_rank_and_a_mask_that_lets_nobody_see() -> None:
    """No rows travel, so there is nothing to choose a transport for."""
    alone = explain(4096, 1, **ON_GPU | {"transport": "symmetric_memory"})
    assert "1 rank, method ring, functional" in str(alone)
    nobody = explain(4096, 4, mask=Mask(length=0), **ON_GPU)
    assert not nobody.found.work.any() and nobody.found.moved == 0


# ---- options


OPTIONS: dict[str, dict[str, Any]] = {
    "layout": {"layout": Striped()},
    "mask": {"mask": Mask(causal=False)},
    "scores": {"scores": ["softcap"], "kernel": "auto"},
    "device": {"device": "cpu", "dtype": torch.float32, "kernel": "auto"},
    "compute_capability": {"compute_capability": (8, 0), "kernel": "auto"},
    "dtype": {"dtype": torch.float32, "kernel": "auto"},
    "head_dim": {"head_dim": 64},
    "v_head_dim": {"v_head_dim": 64, "kernel": "triton"},
    "batch": {"batch": 2},
    "num_heads": {"num_heads": 16},
    "num_kv_heads": {"num_kv_heads": 4},
    "head_chunks": {"head_chunks": 2},
    "kernel": {"kernel": "cudnn"},
    "method": {"method": "all_gather"},
    "ulysses_degree": {"method": "hybrid", "ulysses_degree": 2},
    "transport": {"transport": "functional"},
    "gpus_per_host": {"gpus_per_host": 2},
    "columns": {"columns": 32},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_counts(name: str) -> None:
    without = {option: x for option, x in OPTIONS[name].items() if option in ("method", "kernel") and option != name}
    assert str(explain(16384, 4, **ON_GPU | OPTIONS[name])) != str(explain(16384, 4, **ON_GPU | without))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    (
        ({"transport": "nccl"}, ArgumentError, "transport='functional' works"),
        ({"transport": "symmetric_memory"}, UnsupportedError, "of one host, got device='cpu'.*'functional' works"),
        (ON_GPU | {"transport": "symmetric_memory", "gpus_per_host": 2}, UnsupportedError, "got 2 hosts"),
        ({"kernel": "flash"}, ArgumentError, "one of auto, fa4.*got 'flash'; kernel='auto' works"),
        ({"kernel": "fa4"}, UnsupportedError, "kernel='fa4' lacks device cpu.*kernel='auto' works"),
        ({"method": "tree"}, ArgumentError, "method='ring' works"),
        ({"method": "hybrid"}, ArgumentError, "method='hybrid': expected num_heads"),
        ({"ulysses_degree": 2}, ArgumentError, "expected None, except with method='hybrid', got 2"),
        (
            {"num_heads": 6, "method": "hybrid", "ulysses_degree": 4},
            ArgumentError,
            "query heads, got 4; ulysses_degree",
        ),
        ({"latent_dim": 576}, ArgumentError, "expected num_heads, and as many kv heads, got None and 1; num_heads=128"),
        ({"num_heads": 8, "num_kv_heads": 4, "latent_dim": 576}, ArgumentError, "as many kv heads, got 8 and 4"),
        (
            {"num_heads": 8, "latent_dim": 0},
            ArgumentError,
            "latent_dim: expected an int of 1 .*576 is that of DeepSeek",
        ),
        ({"num_heads": 6, "num_kv_heads": 4}, ArgumentError, "a multiple of the 4 kv heads, got 6; num_kv_heads="),
        ({"num_heads": 8, "head_chunks": 3}, ArgumentError, "a divisor of the 8 kv heads, got 3; head_chunks=2 works"),
        ({"mask": Mask(documents=DOCUMENTS)}, ArgumentError, "Mask.documents: expected 64 tokens, got 96"),
        ({"mask": Mask(blocks=DOCUMENTS)}, ArgumentError, "Mask.blocks: expected 64 tokens, got 96"),
        ({"scores": ["cap"]}, ArgumentError, "names of softcap, sinks.*got 'cap'"),
        (ON_GPU | {"scores": ["bias"]}, UnsupportedError, "kernel='fa4' lacks .*scores with bias.*kernel='auto' works"),
        ({"device": "gpu"}, ArgumentError, "device: expected one of cpu, cuda, got 'gpu'"),
        ({"head_dim": 0}, ArgumentError, "head_dim: expected an int of 1 to 1048576, got 0; head_dim=128"),
    ),
)
def test_refusals(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        explain(64, 4, **options)


def test_no_ranks_and_no_tokens_are_refused() -> None:
    for sizes in ((0, 2), (16, 0), ("128K", 2), (16, 2**70)):
        with pytest.raises(ArgumentError, match=r"explain\(16, 2\) works"):
            explain(*sizes)


# ---- text


@pytest.mark.parametrize("cp_size", (1, 8, 36, 200))
@pytest.mark.parametrize("method", ("ring", "all_gather", "hybrid"))
@pytest.mark.quick("hybrid-36", "ring-200")
def test_text_fits(cp_size: int, method: str) -> None:
    packed = ON_GPU | {"mask": Mask(documents=torch.arange(cp_size * 1024) // 700), "gpus_per_host": 4}
    for options in (ON_GPU, ON_GPU | {"mask": Mask(window=(1023, 0)), "kernel": "auto"}, {"num_heads": 8}, packed):
        text = str(explain(cp_size * 1024, cp_size, layout=Contiguous(), **options | {"method": method}))
        assert max(map(len, text.splitlines())) <= 100, text
        assert len(text.splitlines()) <= 36, text


@pytest.mark.full
def test_of_many_ranks_the_worst_are_looked_at() -> None:
    found = explain(64 * 256, 64, layout=Contiguous(), **ON_GPU)
    ranks = [x.rank for x in found.found.ranks]
    assert ranks[:3] == [0, 1, 2] and ranks[-1] == 63 and len(ranks) < 10  # contiguous: the last has most of all
    left_out = f"{64 - len(ranks)} ranks are left out; memory is the largest"
    assert len(found.found.work) == 64 and left_out in str(found)
    turned = Permuted(torch.arange(64 * 256).view(64, 256).roll(41, 0).flatten())  # now rank 40 has
    assert 40 in [x.rank for x in explain(64 * 256, 64, layout=turned).found.ranks]
    # rank 40 has one long document, 11 fetches most, and 24, the first of a host, most from another
    begins = {16 * i for i in range(64 * 16)} - {256 * 40 + 16 * i for i in range(1, 16)}
    begins -= set(range(9 * 256 + 16, 12 * 256, 16)) | set(range(23 * 256 + 16, 25 * 256, 16))
    ids = torch.tensor([i in begins for i in range(64 * 256)]).cumsum(0)
    fetching = explain(64 * 256, 64, layout=Contiguous(), mask=Mask(documents=ids), **ON_GPU).found
    assert fetching.work.argmax() == 11 and {11, 24} < {x.rank for x in fetching.ranks}
    begins |= set(range(9 * 256 + 16, 12 * 256, 16)) | set(range(23 * 256 + 16, 25 * 256, 16))
    ids = torch.tensor([i in begins for i in range(64 * 256)]).cumsum(0)
    working = explain(64 * 256, 64, layout=Contiguous(), mask=Mask(documents=ids), **ON_GPU).found
    assert working.work.argmax() == 40 and 40 in [x.rank for x in working.ranks] and working.moved == 0
    twelve = explain(12 * 256, 12, layout=Contiguous())
    assert len(twelve.found.ranks) == 12 and "3 ranks are left out" in str(twelve)
    assert lines_of(explain(64 * 256, 64, layout=Contiguous()), "owner")[0].split()[1:3] == ["0", "3"]


def test_stages_that_do_not_fit_are_summed() -> None:
    found = explain(64 * 256, 64, layout=Contiguous(), **ON_GPU)
    last = re.sub(r"from [\d,]+", "", lines_of(found, "63")[0]).split()
    assert "stages 4-17" in str(found) and last[4:8] == ["256", "512", "1024", str(56 * 256)]


@pytest.mark.full
def test_many_ranks_take_seconds() -> None:
    """16M tokens on 1024 ranks; 5 to 9 seconds on the two cores where it was written."""
    for mask in (Mask(), Mask(window=(4095, 0)), Mask(documents=torch.arange(1 << 24) // 40000)):
        begin = time.perf_counter()
        found = explain(1 << 24, 1024, mask=mask, **ON_GPU)
        assert time.perf_counter() - begin < 60 and len(found.found.work) == 1024


# ---- picture


def sources(rank: int, step: int, method: str) -> list[int]:
    """Of 4 ranks, those whose keys a rank visits in a step: in groups of 2 by the hybrid."""
    if method == "hybrid":
        first = (rank // 2 - step) % 2 * 2
        return [first, first + 1]
    return [(rank - step) % 4]


@pytest.mark.parametrize(
    "mask",
    (
        Mask(window=(9, 4), causal=False),
        Mask(documents=DOCUMENTS, key_padding=torch.arange(96) < 90),
    ),
)
@pytest.mark.parametrize("layout", (ZigZag(), Permuted(torch.randperm(96))))
@pytest.mark.parametrize("method", ("ring", "all_gather", "hybrid"))
@pytest.mark.quick("ring-layout0", "hybrid-layout1")
def test_picture_has_the_stage_of_each_pair(layout: Any, mask: Mask, method: str) -> None:
    options = {"hybrid": {"ulysses_degree": 2}}.get(method, {})
    found = explain(96, 4, layout=layout, mask=mask, method=method, num_heads=2, **options).found
    position = np.arange(96)
    owner = owners(layout, 96, 4, position)
    drawn = stages_of_pairs(found, mask, owner, position)
    expected = np.full((96, 96), MASKED)
    for rank in range(4):
        rows = layout.positions(96, 4, rank).numpy()
        assert (owner[rows] == rank).all()
        expected[np.ix_(rows, rows)] = 0
        if method == "hybrid":
            expected[np.ix_(rows, layout.positions(96, 4, rank ^ 1).numpy())] = 0
        for number, steps in enumerate(found.steps, 1):
            for step in steps:
                for source in sources(rank, step, method):
                    expected[np.ix_(rows, layout.positions(96, 4, source).numpy())] = number
    allowed = mask.allowed(*[torch.arange(96)] * 2)[0].numpy()
    assert (drawn == np.where(allowed, expected, MASKED)).all() and (drawn > 0).any()


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = explain(100_000, 8, mask=Mask(window=(20_000, 0)))
    paths = [tmp_path / name for name in ("coarse.png", "fine.png")]
    for path, points in zip(paths, (16, 512), strict=True):
        found.plot(path, points)
        assert path.read_bytes().startswith(b"\x89PNG")
    assert paths[0].read_bytes() != paths[1].read_bytes()


def test_plot_without_matplotlib(tmp_path: Path) -> None:
    with mock.patch.dict(sys.modules, {"matplotlib.figure": None}):
        with pytest.raises(UnsupportedError, match=r"plot: expected matplotlib.*pip install matplotlib"):
            explain(16, 2).plot(tmp_path / "a.png")


@pytest.mark.parametrize("name", ["picture.bad", "picture", "picture.pgf"])
def test_a_picture_of_another_format_is_refused(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = explain(64, 2)
    with pytest.raises(ArgumentError, match=rf"whose name ends in one of .*\.png.*got .*{name}; .png works"):
        found.plot(tmp_path / name)
    assert not [*tmp_path.iterdir()]


# ---- documents


def test_the_docstring_shows_what_it_prints() -> None:
    shown = str(explain(16, 2, columns=16))
    assert [line.strip() for line in shown.splitlines()] == [
        line.strip() for line in (explain.__doc__ or "").partition(">>> print")[2].splitlines()[1:-1]
    ]
