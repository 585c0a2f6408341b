"""Random uses of everything public that computes, as data that goes to ranks, and strategies that draw them.

A `Call` is one of `attention`, `Latent` of `latent_attention`, `Decoding` a cache that tokens are appended to or one
call of `decode`, a `Batch` goes from whole tensors through `ShardedSequence` and attention back to whole tensors,
`Indexed` picks keys and attends to them, `Mixing` calls a recurrent layer, and a `Step` trains a small decoder. `run`
is called on every rank, and says what is not as with one process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import gap, make_scores, mask_of, pairs_of
from checks import TOLERANCE, WAYS, Case, dense_scores, forget_kept, parity_on_ranks, serves
from dense import dense_attention, make_qkv
from hypothesis import strategies as st
from inside import METHODS, Index, inner, room
from model import DenseCore, Model, V
from ranks import mesh
from test_indexed import dense, numbers, picked, sharded
from test_latent_attention import expanded
from test_parity import dtensors
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cp_mesh
from cp_mesh import Checkpointed, ContextParallel, Layout, Mask, ShardedModel, ShardedSequence, TiledMLP, mixers
from cp_mesh.geometry import Balanced, Joint, Permuted, ZigZagDocuments
from cp_mesh.geometry.layouts import LAYOUTS, Run
from cp_mesh.inference import ShardedCache, decode
from cp_mesh.latent import latent_attention
from cp_mesh.training import document_sums

EXCLUDED, Cuts = inner("mask", "EXCLUDED"), inner("cuts", "Cuts")


class Draws:
    """Draws in few words. Hypothesis makes simpler what fails: the first choice, the smallest number, no."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def of(self, *choices: Any) -> Any:
        return self.draw(st.sampled_from(choices))

    def number(self, least: int, most: int) -> int:
        return self.draw(st.integers(least, most))

    def chance(self, percent: int) -> bool:
        return self.number(0, 99) >= 100 - percent

    def edges(self, S: int, most: int) -> list[int]:
        """From 0 to S, with so many between them at most."""
        return [0, *sorted(self.number(0, S) for _ in range(self.number(0, most))), S]


# --- layouts


@dataclass(frozen=True)
class Dealt(Layout):
    """A user's own: blocks of tokens that ranks take in turn; ``listed`` as an index in falling order."""

    block: int
    listed: int = 0

    def runs(self, seq_len: int, cp_size: int, cp_rank: int) -> tuple[Run | Index, ...]:
        begins = range(cp_rank * self.block, seq_len, cp_size * self.block)
        runs = tuple(Run(begin, 1, min(self.block, seq_len - begin)) for begin in begins)
        listed = self.listed and runs
        return (Index(torch.cat([run.positions() for run in runs]).flip(0)),) if listed else runs

    def spec(self) -> str:
        return f"dealt:{self.block},{self.listed}"

    def multiple(self, cp_size: int) -> int:
        return cp_size * self.block


PLAIN = ("contiguous", "zigzag", "striped")
OF_A_LENGTH = ("permuted", "documents", "joint")
"""Layouts of one length: their sequences are not padded."""


def layout_of(layout: str | list[int] | Layout) -> Layout:
    return Case(layout, {}, 0).make_layout()


def draw_layout(d: Draws, kind: str, S: int, cp: int, mask: dict[str, Any] | None = None) -> Any:
    """A layout, or the name of one; those that depend on documents follow the mask's where they can."""
    if kind == "permuted":
        return list(d.draw(st.permutations(range(S))))
    if kind == "balanced":
        return cp_mesh.balance(mask_of({name: x for name, x in (mask or {}).items() if name != "key_padding"}), S, cp)
    if kind == "runs":
        return draw_runs(d, S, d.of(20, 4, 2))
    if kind == "documents":
        cu_seqlens = (mask or {}).get("cu_seqlens")
        return ZigZagDocuments(d.edges(S, 5) if cu_seqlens is None else [0, *cu_seqlens.tolist(), S])
    if kind == "joint":  # one to three streams in layouts of their own
        lens = [end - begin for begin, end in pairwise(d.edges(S, 2))]
        kinds = [d.of(*PLAIN, "own", "permuted", "documents", *["runs"] * (n > 0)) for n in lens]
        return Joint(*((n, layout_of(draw_layout(d, x, n, cp))) for n, x in zip(lens, kinds, strict=True)))
    return Dealt(d.number(1, 5), d.of(0, 1)) if kind == "own" else kind


def draw_runs(d: Draws, S: int, longest: int) -> Balanced:
    """Runs of at most so many positions, in any order."""
    edges = [0]
    while edges[-1] < S:
        edges.append(min(S, edges[-1] + d.number(1, longest)))
    runs = d.draw(st.permutations([(begin, end - begin) for begin, end in pairwise(edges)]))
    return Balanced(torch.tensor(runs, dtype=torch.int64).view(-1, 2))


# --- masks and scores

SIGNED = (torch.int64, torch.int32, torch.int16, torch.int8)


def draw_mask(d: Draws, B: int, S: int) -> dict[str, Any]:
    """Options of a mask: any conjunction."""
    options: dict[str, Any] = {"causal": d.chance(60)}
    if d.chance(30):
        return options
    if d.chance(35):
        options["window"] = tuple(d.of(None, d.number(0, 8), d.number(0, S + 2)) for _ in range(2))
    if S and d.chance(10):
        return options | {"cu_seqlens": torch.tensor(d.edges(S, 6), dtype=d.of(torch.int64, torch.int32))}
    if options["causal"] and d.chance(30):
        options["prefix"] = d.number(0, S + 2)
    if d.chance(30):
        options["length"] = d.number(0, S + 2)
    if d.chance(50):
        options["documents"] = draw_documents(d, B, S)
    if options["causal"] and options.get("window", (None, None))[1] != 0 and d.chance(30):
        blocks = draw_rows(d, B, d.of(*SIGNED), lambda: draw_ids(d, S, range(100), (-1, -3), d.of(1, 4, max(1, S)), 66))
        if not comes_back(blocks, options.get("documents", torch.zeros(1, 1))):
            options["blocks"] = blocks
    if d.chance(25):
        kept = d.of(100, 80, 30)
        options["key_padding"] = draw_rows(d, B, torch.bool, lambda: [d.chance(kept) for _ in range(S)])
    return options


def draw_documents(d: Draws, B: int, S: int, returning: bool = True) -> Tensor:
    """Ids: documents one after another, few or many, and some that come back, or ids in any order."""
    dtype = d.of(*SIGNED, torch.uint8)
    least = 0 if dtype == torch.uint8 else -2
    none = (EXCLUDED,) if least else ()

    def row() -> list[int]:
        kind = d.of("few", "many", *("returning", "scattered") * returning)
        if kind == "scattered":
            return [least + d.number(0, 3) for _ in range(S)]
        names = [least + i % (3 if kind == "returning" else 100) for i in range(100)]
        return draw_ids(d, S, names, none, 3 if kind == "many" else 30, 20)

    return draw_rows(d, B, dtype, row)


def draw_ids(d: Draws, S: int, names: Sequence[int], others: Sequence[int], longest: int, percent: int) -> list[int]:
    """Ids of S tokens: names one after another, and between them now and then one of the others."""
    ids, left = list[int](), iter(names)
    while len(ids) < S:
        ids += [d.of(*others) if others and d.chance(percent) else next(left)] * d.number(1, longest)
    return ids[:S]


def draw_rows(d: Draws, B: int, dtype: torch.dtype, row: Any) -> Tensor:
    """A tensor [S], [1, S] or [B, S] of drawn rows."""
    num_rows = d.of(None, 1, B)
    return torch.tensor(row() if num_rows is None else [row() for _ in range(num_rows)], dtype=dtype)


def comes_back(blocks: Tensor, documents: Tensor) -> bool:
    """Whether a block comes back in its document, which is refused."""
    rows = torch.broadcast_tensors(*(torch.atleast_2d(x).long() for x in (blocks, documents)))
    begins = [[tuple(pair) for pair, _ in groupby(row) if min(pair) >= 0] for row in torch.stack(rows, -1).tolist()]
    return any(len(set(row)) < len(row) for row in begins)


def draw_scores(d: Draws, B: int, H: int, S: int, by_rows: bool = True) -> dict[str, Any]:
    """Options of the scores, tensors by their shapes; ``by_rows``: those too that have a number for each pair."""
    choices = {"softcap": d.number(3, 30) / 10, "sinks": (H,), "alibi_slopes": (H,)}
    choices |= {"bias": (d.of(1, B), d.of(1, H), d.of(1, S), S)} if by_rows else {}
    drawn = {name: x for name, x in choices.items() if d.chance(20)}
    if by_rows and d.chance(15):
        numbers = [d.number(0, 2**63 - 1), d.number(0, 2**32 - 1)]
        seed = d.of(numbers[0], *(torch.tensor(x) for x in (numbers[0], numbers[:1], numbers)))
        drawn |= {"dropout_p": d.of(0.1, 0.5, 0.9), "dropout_seed": seed}
    return drawn


# --- a call


@dataclass(frozen=True)
class Call:
    """A case on a mesh; ``recorded``: on a group that delivers at the wait."""

    case: Case  # the group of the axis "cp" computes it, or that of two axes of such names
    shape: tuple[int, ...]  # of the mesh; groups of local tensors along other axes have data of their own
    names: tuple[str, ...] = ("cp",)
    placed: dict[str, str] | None = None  # of DTensors, what other axes shard; as `turn` for `test_parity.dtensors`
    turn: int = 0
    recorded: bool = False
    told: str = "axis"  # for `checks.parity_on_ranks`

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def run(self, rank: int) -> list[str]:
        if self.placed is None:
            return parity_on_ranks(rank, self.shape, self.names, [self.case], self.recorded, self.told)
        return dtensors(rank, self.shape, self.names, self.placed, [self.case], self.turn)


def meshes(size: int) -> list[tuple[tuple[int, ...], tuple[str, ...]]]:
    """Meshes of so many ranks with another axis beside cp, if there is one, or with two axes that are cp."""
    twos = [((2, size // 2), ("dp", "cp")), ((size // 2, 2), ("cp", "tp")), ((size // 2, 2), ("cp_ring", "cp_ulysses"))]
    ones = [((size, 1), ("cp", "tp")), ((1, size), ("cp_ring", "cp_ulysses"))]
    return (ones if size % 2 else twos) + [((2, 2, 2), ("dp", "cp", "tp")), ((4, 2), ("tp", "cp"))] * (size == 8)


@st.composite
def calls(draw: Any, size: int) -> Call:
    d = Draws(draw)
    shape, names = d.of(*meshes(size)) if d.chance(45) else ((size,), ("cp",))
    axes = dict(zip(names, shape, strict=True))
    two_axes, cp = "cp" not in axes, math.prod(n for name, n in axes.items() if name[:2] == "cp")
    placed = None
    if d.chance(30):
        placed = {name: part for name, part in (("dp", "batch"), ("tp", "heads")) if name in axes and d.chance(70)}
    dp, tp = (axes[name] if name in (placed or {}) else 1 for name in ("dp", "tp"))
    # Heads that the method divides.
    method, K = d.of("auto", *METHODS), d.number(1, 3)
    divisors = [n for n in range(1, cp + 1) if cp % n == 0]
    inner_ranks = {"ulysses": cp, "hybrid": shape[1] if two_axes else d.of(*divisors)}.get(method, 1)
    H = math.lcm(K, inner_ranks) * d.number(1, 3 if inner_ranks == 1 else 2)
    degrees = [None, *divisors] if method == "hybrid" and not two_axes else [None]
    outer = shape[1] if two_axes else None
    choices = [(n, m) for n in degrees for m in (None, None, 1, 2, 3) if serves(method, cp, (H, K), m, n or outer)]
    degree, head_chunks = d.of(*choices)
    seq_dim = d.of(2, 1) if dp > 1 else d.of(2, 1, 0)
    B = dp * d.number(1, 3) if seq_dim else 1
    S = d.number(0, cp + 1) if d.chance(25) else d.number(0, 60)
    kind = d.of(*PLAIN, "permuted", *("balanced", "runs") * (S > 0), *("own", "documents", "joint") * (placed is None))
    if placed is not None:  # shards of DTensors have the sizes of torch.chunk
        S -= S % (2 * cp if kind == "zigzag" else cp if kind == "striped" or two_axes else 1)
    kind = kind if S or kind not in ("balanced", "runs") else "contiguous"
    mask, scores = draw_mask(d, B, S), draw_scores(d, B, H * tp, S)
    layout = draw_layout(d, kind, S, cp, mask)
    D = d.of(d.number(1, 6), 16, 24)
    dtype = d.of(torch.float32, torch.bfloat16, torch.float16) if placed is None and d.chance(12) else torch.float64
    of_inputs = ("q", "k", "v", *(name for name, x in scores.items() if isinstance(x, tuple)))
    memories = ("contiguous", "strided", "transposed", "sliced")
    case = Case(
        layout, mask, S, (H * tp, K * tp), seq_dim,
        memory=d.of(*memories, *(["expanded"] if seq_dim else []), tuple(d.of(*memories) for _ in range(4))),
        scale=d.of(None, d.number(1, 40) / 20),
        sizes=(B, D, d.of(D, D, d.number(1, 6), 8)),
        scores=scores, method=method, head_chunks=head_chunks,
        lse_gradient=d.of(False, False, True, "alone"),
        options={"transport": d.of("auto", "functional"), "deterministic": d.of(None, False, True)},
        dtype=dtype,
        frozen=tuple(name for name in of_inputs if d.chance(50)) if d.chance(25) else (),
    )  # fmt: skip
    lens = {case.make_layout().shard_len(S, cp, rank) for rank in range(cp)}
    extra = {"ulysses_degree": degree} if degree else {}
    extra |= {"seq_len": None} if placed is None and len(lens) == 1 and d.chance(30) else {}
    kernel = d.of("auto", *(["cpu_flash"] * 2 if in_flash(case) else ["reference"]))
    case = replace(case, options=case.options | extra, kernel=kernel)
    by_functions = takes_functions(case) and placed is None and d.chance(25)
    ways = [way for way in WAYS if (way != "compiled" or placed is None) and (way != "autocast" or dtype.itemsize == 8)]
    way = "functions" if by_functions else d.of(*ways) if d.chance(20) else "eager"
    way = "eager" if way == "compiled" and d.chance(70) else way  # compiled calls take seconds
    case = replace(case, way=way)
    if placed is not None:
        return Call(case, shape, names, placed, d.number(0, 5))
    told = "axes" if two_axes else d.of("axis", "group")
    return Call(case, shape, names, recorded=way == "eager" and told == "axis" and d.chance(30), told=told)


def in_flash(case: Case) -> bool:
    """Whether kernel="cpu_flash" must serve a call: the table of docs/kernels.md."""
    parts = [of for _, of in case.layout.streams] if isinstance(case.layout, Joint) else [case.layout]
    runs = not any(isinstance(of, list | Permuted) or of == Dealt(getattr(of, "block", 1), 1) for of in parts)
    runs &= len(parts) == 1 or LAYOUTS["striped"]() not in parts  # between unlike strides there are no bands
    masks, scores = set(case.mask) <= {"causal", "prefix", "length"}, set(case.scores) <= {"sinks"}
    return runs and masks and scores and case.dims[1] == case.dims[2] and not case.through_lse


def takes_functions(case: Case) -> bool:
    """Whether `flex_attention` can say the same."""
    said = set(case.scores) <= {"softcap", "alibi_slopes"} and "seq_len" not in case.options
    return said and case.kernel != "cpu_flash" and case.dtype == torch.float64 and case.S > 0


# --- few queries


@dataclass(frozen=True)
class Decoding:
    """A cache that takes a prompt, and then tokens whose queries attend to all that came; or `decode` itself."""

    size: int
    layout: str | Layout  # of the prompt
    prompt: int
    steps: tuple[int, ...] = (1,)  # numbers of tokens that are appended together
    mask: dict[str, Any] = field(default_factory=dict)
    scores: dict[str, Any] = field(default_factory=dict)
    heads: tuple[int, int] = (2, 1)
    sizes: tuple[int, int, int] = (1, 4, 4)
    kernel: str = "auto"
    scale: float | None = None
    capacity: int | None = None  # more tokens than come for which there is room; None: there is no bound
    pad: bool = True
    q_lens: tuple[int, ...] | None = None  # of `decode`: how many of the last tokens each rank asks for
    more: int = 0  # of `decode`: rows behind the keys that `num_keys` leaves out

    def _whole(self) -> tuple[Tensor, ...]:
        B, D, E = self.sizes
        return make_qkv(B, *self.heads, self.prompt + sum(self.steps), D, E)[:3]

    def _want(self, num_rows: int, end: int) -> list[Tensor]:
        """out and lse of the last rows of the first tokens."""
        B, H = self.sizes[0], self.heads[0]
        given = dense_scores(make_scores(self.scores, B, H, self.prompt), B, H, self.prompt)
        q, k, v = (x[:, :, :end] for x in self._whole())
        found = dense_attention(q, k, v, pairs_of(self.mask, end), self.scale, **given)
        return [x[:, :, end - num_rows :] for x in found]

    def run(self, rank: int) -> list[str]:
        given = make_scores(self.scores, self.sizes[0], self.heads[0], self.prompt)
        given |= {"mask": mask_of(self.mask), "kernel": self.kernel, "scale": self.scale, "return_lse": True}
        return self._decoded(rank, given) if self.q_lens else self._cached(given)

    def _cached(self, given: dict[str, Any]) -> list[str]:
        (q, k, v), end, problems = self._whole(), self.prompt, []
        sequence = ShardedSequence(mesh((self.size,), ("cp",)), layout_of(self.layout), end or None, self.pad)
        cache = ShardedCache(sequence, None if self.capacity is None else q.shape[2] + self.capacity)
        if end:
            cache.prefill(*(sequence.shard(x[:, :, :end], dim=2) for x in (k, v)))
        for i, num_new in enumerate(self.steps):
            begin, end = end, end + num_new
            cache.append(k[:, :, begin:end], v[:, :, begin:end])
            num_rows = num_new if i % 3 < 2 else 1  # all that came, or the last token alone
            got = cache.attend(q[:, :, end - num_rows : end], **given)
            problems += differences(("out", "lse"), got, self._want(num_rows, end), f" after {end} tokens")
        return problems

    def _decoded(self, rank: int, given: dict[str, Any]) -> list[str]:
        assert self.q_lens is not None
        (q, k, v), S, num_rows = self._whole(), self.prompt + sum(self.steps), sum(self.q_lens)
        rows = layout_of(self.layout).positions(S, self.size, rank)
        alike, begin = len(self.q_lens) == 1, S - num_rows
        first = begin + (0 if alike else sum(self.q_lens[:rank]))
        mine = torch.arange(first, first + (num_rows if alike else self.q_lens[rank]))
        given |= {} if alike else {"q_lens": list(self.q_lens)}
        if self.more:
            given["num_keys"] = torch.tensor([len(rows)])
            rows = torch.cat([rows, torch.arange(self.more) % S])
        at = {"mesh": mesh((self.size,), ("cp",)), "q_positions": mine, "k_positions": rows}
        got = decode(q[:, :, mine], k[:, :, rows], v[:, :, rows], **at, **given)
        return differences(("out", "lse"), got, [x[:, :, mine - begin] for x in self._want(num_rows, S)])


def differences(names: Sequence[str], got: Sequence[Tensor], want: Sequence[Tensor], where: str = "") -> list[str]:
    found = zip(names, got, want, strict=True)
    return [f"{name}{where} is off by {gap(x, y):.1e}" for name, x, y in found if not gap(x, y) <= TOLERANCE]


@st.composite
def decodings(draw: Any, size: int) -> Decoding:
    d = Draws(draw)
    H = (K := d.number(1, 3)) * d.number(1, 3)
    prompt, D, by_call = d.of(0, 1, d.number(2, 40)), d.number(1, 8), d.chance(40)
    steps = (d.number(1, 6),) if by_call else tuple(d.number(1, 4) for _ in range(d.number(1, 6)))
    S = prompt + sum(steps)
    mask = {name: x for name, x in draw_mask(d, 1, S).items() if name in ("causal", "window", "prefix", "length")}
    kind = d.of(*PLAIN, "own", "documents", "joint")
    lens = (sum(steps),) if d.chance(40) else tuple(d.number(0, 3) for _ in range(size))
    return Decoding(
        size, draw_layout(d, kind, S if by_call else prompt, size), prompt, steps, mask,
        draw_scores(d, 1, H, S, by_rows=False), (H, K), (d.number(1, 3), D, d.of(D, d.number(1, 8))),
        d.of("auto", "reference"), d.of(None, 0.3), d.of(None, d.number(0, 9)),
        kind not in OF_A_LENGTH and d.chance(50),
        (lens if 0 < sum(lens) <= S else (1,)) if by_call else None, d.of(0, 1, 3),
    )  # fmt: skip


# --- whole tensors and back


@dataclass(frozen=True)
class Batch:
    """Whole tensors through `ShardedSequence.shard`, attention, and `unshard` or `gather`."""

    size: int
    layout: str | list[int] | Layout  # "balanced": for the mask, by `ShardedSequence.balanced`; "auto": by `for_batch`
    S: int  # tokens without padding
    mask: dict[str, Any] = field(default_factory=dict)
    heads: tuple[int, int] = (2, 1)
    sizes: tuple[int, int, int] = (1, 4, 4)
    pad: bool = True
    named: bool = True  # whether the length is told
    gathered: bool = False

    def run(self, rank: int) -> list[str]:
        axis, (B, D, E), S, mask = mesh((self.size,), ("cp",)), self.sizes, self.S, mask_of(self.mask)
        sequence = sequence_of(self.size, self.layout, S if self.named else None, self.pad, mask)
        *inputs, dout = make_qkv(B, *self.heads, S, D, E)
        of_whole = [x.requires_grad_() for x in inputs]
        rows = [sequence.shard(x, dim=2) for x in of_whole]
        options = {"seq_len": sequence.seq_len or S, "layout": sequence.layout, "mask": sequence.mask(mask)}
        out = cp_mesh.attention(*rows, mesh=axis, method="ring", **options)
        again = (sequence.gather if self.gathered else sequence.unshard)(out, dim=2)
        share, total = (1, 1) if self.gathered else (rank + 1, self.size * (self.size + 1) / 2)
        grads = summed(torch.autograd.grad((again * dout * share).sum(), of_whole))
        dense = [x.detach().clone().requires_grad_() for x in inputs]
        want, _ = dense_attention(*dense, pairs_of(self.mask, S))
        wanted = torch.autograd.grad((want * dout).sum() * total, dense)
        positions = torch.arange(S, dtype=torch.float64)
        names = ("unsharded out", "dq", "dk", "dv", "positions")
        got = again, *grads, sequence.unshard(sequence.shard(positions, dim=0), dim=0)
        problems = differences(names, got, (want, *wanted, positions))
        return problems + ["positions of other rows"] * (len(sequence.positions(S)) != out.shape[2])


def sequence_of(size: int, layout: Any, S: int | None, pad: bool = True, mask: Mask | None = None) -> ShardedSequence:
    by_name = isinstance(layout, str) and layout in ("auto", "balanced")
    of = {"auto": "auto", "balanced": cp_mesh.Contiguous()}[layout] if by_name else layout_of(layout)
    sequence = ShardedSequence(mesh((size,), ("cp",)), of, S, pad)
    return sequence if not by_name else sequence.balanced(mask) if layout == "balanced" else sequence.for_batch(S, mask)


def summed(grads: Sequence[Tensor]) -> list[Tensor]:
    """Over all ranks."""
    own = [x.contiguous() for x in grads]  # those of padded tensors are views
    for x in own:
        dist.all_reduce(x)
    return own


@st.composite
def batches(draw: Any, size: int) -> Batch:
    d = Draws(draw)
    S, B, K = d.number(1, 40), d.number(1, 3), d.number(1, 2)
    mask, kind = draw_mask(d, B, S), d.of(*PLAIN, "own", "balanced", "auto", *OF_A_LENGTH)
    by_batch = kind in ("balanced", "auto")
    if by_batch:
        mask.pop("key_padding", None)
    layout = kind if by_batch else draw_layout(d, kind, S, size, mask)
    multiple = 1 if by_batch else layout_of(layout).multiple(size)
    named = by_batch or kind in OF_A_LENGTH or S % max(multiple, size) > 0 or d.chance(80)
    pad = kind not in OF_A_LENGTH and d.chance(60)
    sizes = B, d.number(1, 6), d.number(1, 6)
    return Batch(size, layout, S, mask, (K * d.number(1, 2), K), sizes, pad, named, d.chance(50))


# --- recurrent layers

DELTA = ("gated_delta_rule", "kda", "delta_rule")
RULES = (*DELTA, "gla", "ssd")


def runs_of(ids: Tensor) -> list[tuple[int, slice]]:
    """Batch row and positions of each document, of ids [B, S]."""
    found = []
    for b, row in enumerate(ids.tolist()):
        edges = [0, *(t for t in range(1, len(row)) if row[t] != row[t - 1]), len(row)]
        found += [(b, slice(*edge)) for edge in pairwise(edges) if row[edge[0]] >= 0]
    return found


@dataclass(frozen=True)
class Mixing:
    """A call of a function of `cp_mesh.mixers`, with the names of `gated_delta_rule`."""

    size: int
    layout: str | list[int] | Layout
    S: int
    rule: str = "gla"
    mask: dict[str, Any] = field(default_factory=dict)
    heads: tuple[int, int] = (1, 1)
    sizes: tuple[int, int, int] = (1, 3, 4)  # B, K and V
    decay: str = "head"  # or "channel" or "none", where the function lets choose
    method: str = "auto"
    kernel: str = "auto"
    scale: float | None = None
    states: bool = False  # initial and final ones
    pad: bool = True
    width: int = 3  # of a convolution; how far `roll` moves rows
    recomputed: bool = False

    @property
    def ids(self) -> Tensor:
        """[B, S], -1 for tokens of no document."""
        ids = self.mask.get("documents", torch.zeros(1, self.S)).long().expand(self.sizes[0], self.S)
        kept = self.mask.get("key_padding", torch.ones(1, self.S, dtype=torch.bool)).expand(ids.shape)
        inside = torch.arange(self.S) < self.mask.get("length", self.S)
        return ids.where((ids >= 0) & kept & inside, torch.tensor(-1))

    def _given(self, made: torch.Generator) -> dict[str, Tensor]:
        (H, HV), (B, K, V) = self.heads, self.sizes
        names = {"q": (H, K), "k": (H, K), "v": (HV, V), "g": (HV, K)[: 1 + (self.decay == "channel")], "beta": (HV,)}
        x = {n: torch.randn(B, self.S, *of, dtype=torch.float64, generator=made) for n, of in names.items()}
        x |= {"k": F.normalize(x["k"], dim=-1), "g": -x["g"].abs(), "beta": x["beta"].sigmoid()}
        if self.rule == "ssd":
            x |= {"dt": -x.pop("g"), "A": -torch.rand(HV, dtype=torch.float64, generator=made)}
        if self.rule not in DELTA:
            x.pop("beta")
        if self.rule == "delta_rule" or self.decay == "none":
            x.pop("g", None)
        if self.rule not in RULES:
            weights = torch.randn(K, self.width, dtype=torch.float64, generator=made)
            x = {"x": x["q"][:, :, 0]} | ({"weight": weights} if self.rule == "causal_conv1d" else {})
        return {name: y.contiguous().requires_grad_() for name, y in x.items()}

    def _moved(self, rows: Tensor, weight: Tensor | None) -> Tensor:
        """A convolution, or a roll, of one document."""
        taps = {-self.width: 1} if weight is None else {j: weight[:, -1 - j] for j in range(self.width)}
        return sum((tap * F.pad(rows, (0, 0, j, -j)) for j, tap in taps.items() if abs(j) < len(rows)), 0.0 * rows)

    def _recurred(self, x: dict[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        """One document, token by token."""
        H, HV = self.heads
        q, k, v = (*(x[name].repeat_interleave(HV // H, 1) for name in "qk"), x["v"])
        v, g = (v * x["dt"][..., None], x["dt"] * x["A"]) if self.rule == "ssd" else (v, x.get("g"))
        found = []
        for t in range(len(v)):
            state = state if g is None else g[t].exp().view(HV, -1, 1) * state
            u = v[t] if "beta" not in x else x["beta"][t, :, None] * (v[t] - (k[t, :, :, None] * state).sum(1))
            state = state + k[t, :, :, None] * u[:, None]
            found.append((q[t, :, :, None] * state).sum(1))
        scale = 1.0 if self.rule == "ssd" else self.sizes[1] ** -0.5 if self.scale is None else self.scale
        return torch.stack(found) * scale, state

    def _want(self, x: dict[str, Tensor], initial: Tensor) -> tuple[Tensor, Tensor]:
        """Each document by itself, and its last state."""
        (B, K, V), HV = self.sizes, self.heads[1]
        out = torch.zeros(B, self.S, *((HV, V) if self.rule in RULES else (K,)), dtype=torch.float64)
        last = [initial[:0]]
        for n, (b, at) in enumerate(runs_of(self.ids)):
            own = {name: y if name in ("A", "weight") else y[b, at] for name, y in x.items()}
            if self.rule in RULES:
                mine, state = self._recurred(own, initial[n])
                last.append(state[None])
            else:
                mine = self._moved(own["x"], own.get("weight"))
            out = out.index_put((torch.tensor(b), torch.arange(at.start, at.stop)), mine)
        return out, torch.cat(last)

    def run(self, rank: int) -> list[str]:
        made, (B, K, V), S, recurs = torch.Generator().manual_seed(0), self.sizes, self.S, self.rule in RULES
        x, mask, states = self._given(made), mask_of(self.mask), self.states and recurs
        shape = len(runs_of(self.ids)), self.heads[1], K, V
        initial = torch.randn(shape, dtype=torch.float64, generator=made) * states
        initial.requires_grad_()
        sequence = sequence_of(self.size, self.layout, S, self.pad, mask)
        local = {name: y if name in ("A", "weight") else sequence.shard(y, pad_value=0) for name, y in x.items()}
        given: dict[str, Any] = {"sequence": sequence, "mask": mask}
        if recurs:
            given |= {"initial_state": initial if states else None, "output_final_state": states}
            given |= {"method": self.method, "kernel": self.kernel}
        if self.rule == "ssd":
            local = {{"q": "C", "k": "B", "v": "x"}.get(name, name): y for name, y in local.items()}
        elif recurs:
            given["scale"] = self.scale
        elif self.rule == "roll":
            given["shifts"] = -self.width
        function = getattr(mixers, self.rule)
        function = partial(checkpoint, function, use_reentrant=False) if self.recomputed else function
        found = function(**local, **given)
        out, final = found if recurs else (found, None)
        want, last = self._want(x, initial)
        kept = (self.ids >= 0).view(B, S, *[1] * (want.ndim - 2))
        dout, dlast = (torch.randn(y.shape, dtype=y.dtype, generator=made) for y in (want, last))
        whole = sequence.unshard(out)
        problems = differences(("out",), (whole * kept,), (want * kept,))
        problems += ["rows of no document are not 0"] * (recurs and bool((whole * ~kept).any()))
        loss, wanted = (out * sequence.shard(dout * kept, pad_value=0)).sum(), (want * dout * kept).sum()
        if states and shape[0]:
            problems += differences(("final state",), (final,), (last,))
            loss, wanted = loss + (final * dlast).sum() / self.size, wanted + (last * dlast).sum()
        inputs = [*x.values(), *([initial] if states else [])]
        zeros = {"allow_unused": True, "materialize_grads": True}
        grads = summed(torch.autograd.grad(loss, inputs, **zeros))
        of_whole = torch.autograd.grad(wanted + sum(y.sum() * 0 for y in inputs), inputs)
        return problems + differences([f"d{name}" for name in (*x, "initial")][: len(inputs)], grads, of_whole)


@st.composite
def mixings(draw: Any, size: int) -> Mixing:
    d = Draws(draw)
    rule, B, S = d.of(*RULES, "causal_conv1d", "roll"), d.number(1, 3), d.of(d.number(1, 9), d.number(2, 48))
    kind = d.of(*PLAIN, "own", "runs", "auto", *OF_A_LENGTH)
    H, mask = d.of(1, 2, 3, size), {}
    if d.chance(60):
        mask["documents"] = draw_documents(d, B, S, returning=False)
    if d.chance(25):
        mask["length"] = d.number(0, S + 2)
    if d.chance(25) and kind != "auto":  # at both ends, so that no document comes back

        def row() -> list[bool]:
            begin, end = sorted((d.number(0, S), d.number(0, S)))
            return [begin <= t < end for t in range(S)]

        mask["key_padding"] = draw_rows(d, B, torch.bool, row)
    decay = {"kda": "channel", "gla": d.of("head", "channel", "none")}.get(rule, "head")
    return Mixing(
        size, kind if kind == "auto" else draw_layout(d, kind, S, size), S, rule, mask, (H, H * d.number(1, 3)),
        (B, d.number(1, 4), d.number(1, 4)), decay, d.of("auto", "states", *(("heads",) * (H % size == 0))),
        d.of("auto", "torch", "reference"), None if rule == "ssd" else d.of(None, 0.7), d.chance(50),
        kind not in (*OF_A_LENGTH, "runs") and d.chance(50), d.of(1, 2, 4, 9), d.chance(25),
    )  # fmt: skip


# --- keys of a latent, and those that an indexer picks


@dataclass(frozen=True)
class LatentCase(Case):
    """A call of `latent_attention`: k is the latent, v the rotary part, and the projection is among the scores."""

    features: tuple[int, int] = (4, 1)

    def make_scores(self) -> dict[str, Any]:
        (_, D, E), (R, P), made = self.dims, self.features, torch.Generator().manual_seed(0)
        up = torch.randn(self.heads[0] * (D - P + E), R, dtype=torch.float64, generator=made)
        return super().make_scores() | {"up_projection": up}

    def oracle(self, seed: int) -> dict[str, Tensor]:
        (B, D, E), (R, P), H, S = self.dims, self.features, self.heads[0], self.S
        made = torch.Generator().manual_seed(seed)
        shapes = {"q": (H, S, D), "k": (1, S, R), "v": (1, S, P), "dout": (H, S, E), "dlse": (H, S)}
        x = {name: torch.randn(B, *shape, dtype=torch.float64, generator=made) for name, shape in shapes.items()}
        scores = dense_scores(self.make_scores(), B, H, S)
        of_scores = {name: y for name, y in scores.items() if isinstance(y, Tensor) and name != "kept"}
        leaves = {name: y.requires_grad_() for name, y in ({name: x[name] for name in "qkv"} | of_scores).items()}
        keys = expanded(x["k"], x["v"], scores.pop("up_projection"), H, D - P)
        out, lse = dense_attention(x["q"], *keys, pairs_of(self.mask, S), self.scale, **scores)
        which = slice(self.through_lse == "alone", 1 + bool(self.through_lse))
        results = (out, lse)[which], [*leaves.values()], (x["dout"], x["dlse"])[which]
        grads = torch.autograd.grad(*results, materialize_grads=True)
        x |= {"out": out, "lse": lse} | {f"d{name}": y for name, y in zip(leaves, grads, strict=True)}
        return {name: y.detach() for name, y in x.items()}


class Latent(Call):
    def run(self, rank: int) -> list[str]:
        def latents(q: Tensor, latent: Tensor, rope: Tensor, *, up_projection: Tensor, **options: Any) -> Any:
            return latent_attention(q, latent, rope, up_projection, **options)

        with mock.patch.object(cp_mesh, "attention", latents):
            return super().run(rank)


@st.composite
def latents(draw: Any, size: int) -> Latent:
    d, use = Draws(draw), draw(calls(size).filter(lambda use: use.placed is None))
    case, H, P = use.case, use.case.heads[0], d.number(1, 4)
    cp = math.prod(n for name, n in zip(use.names, use.shape, strict=True) if name[:2] == "cp")
    degree = use.shape[1] if use.told == "axes" else case.options.get("ulysses_degree")
    fits = serves(case.method, cp, (H, H), case.head_chunks, degree)
    changed: dict[str, Any] = {"heads": (H, H), "dtype": torch.float64, "features": (d.number(1, 8), P)}
    changed |= {"sizes": (case.dims[0], case.dims[1] + P, case.dims[2] + P)}
    changed |= {"memory": "strided" if case.memory == "expanded" else case.memory}
    changed |= {"head_chunks": case.head_chunks if fits else None, "way": case.way if case.way in WAYS else "eager"}
    return Latent(LatentCase(**vars(case) | changed), use.shape, use.names, None, 0, use.recorded, use.told)


@dataclass(frozen=True)
class Indexed:
    """`select_keys` and `indexed_attention`. Index scores are whole numbers, many of them equal."""

    size: int
    of: Batch  # its layout, length, mask and padding
    top_k: int
    sizes: tuple[int, ...] = (2, 1, 1, 2, 2, 1, 1)
    sinks: bool = False
    tile: int = 1 << 20

    def run(self, rank: int) -> list[str]:
        of, S, mask = self.of, self.of.S, mask_of(self.of.mask)
        x = numbers(of.sizes[0], S, self.sizes)
        x |= {name: x[name].mul(2).round() for name in ("index_q", "index_k", "weights")}
        pairs = picked(x, of.mask, self.top_k)
        want = dense(x if self.sinks else x | {"sinks": torch.full_like(x["sinks"], -1e9)}, pairs)
        if not self.sinks:
            del x["sinks"], want[-1]
        sequence = sequence_of(self.size, of.layout, S if of.named else None, of.pad, mask)
        sizes = {"PAIRS": self.tile, "PRODUCTS": self.tile, "BLOCK": 1 + self.tile // 20}
        of_rows = mock.patch.object(room("latent.indexed"), "NUMBERS", self.tile)
        with mock.patch.multiple(room("selection"), **sizes), of_rows:
            got, indices = sharded(x, mask, sequence, self.top_k)
        ordered, rows = torch.where(pairs, torch.arange(S), S).sort(-1).values, sequence.positions(S)
        ordered = F.pad(ordered, (0, self.top_k), value=S)[:, rows[rows < S], : self.top_k]
        problems = differences(("out", "dq", "dlatent", "drope", "dup", "dsinks")[: len(got)], got, want)
        return problems + ["other keys"] * (not torch.equal(indices[:, rows < S], ordered.where(ordered < S, -1).int()))


@st.composite
def indexings(draw: Any, size: int) -> Indexed:
    d, of = Draws(draw), draw(batches(size))
    sizes = tuple(d.number(1, most) for most in (3, 4, 3, 5, 4, 3, 3))
    top_k, tile = d.of(d.number(1, 8), d.number(1, of.S + 9)), d.of(1 << 20, d.number(1, 400))
    return Indexed(size, of, top_k, sizes, d.chance(50), tile)


# --- a step of training


@dataclass(frozen=True)
class Step:
    """Loss and gradients of a small decoder."""

    size: int
    layout: str = "zigzag"
    S: int = 12
    documents: Tensor | None = None
    tiles: int = 0  # of each MLP; 0: none
    checkpoint: str | dict[str, bool] | None = None  # of each block: "full", "selective", or options of `Checkpointed`
    loss: str = "logits"  # or "hidden", of which `cross_entropy` is given; "documents": sums of log-probabilities
    terms: dict[str, float] = field(default_factory=dict)  # of `cross_entropy`
    valid: int = 100  # per cent of labels

    def run(self, rank: int) -> list[str]:
        made, by_sums = torch.Generator().manual_seed(self.S), self.loss == "documents"
        tokens, labels = torch.randint(V, (2, 2, self.S), generator=made)
        labels[torch.randint(100, labels.shape, generator=made) >= self.valid] = -100
        mask, plain, model = Mask(documents=self.documents), Model(DenseCore), Model()
        ids = torch.zeros_like(tokens) if self.documents is None else self.documents.long().expand(2, -1)
        weights = torch.randn(len(runs_of(ids)), dtype=torch.float64, generator=made)
        # One process, which imports nothing of cp_mesh.
        logits = plain(tokens, torch.arange(self.S), ids)
        if by_sums:
            sums = [-F.cross_entropy(logits[at], labels[at], reduction="sum") for at in runs_of(ids)]
            want = sum((x * y for x, y in zip(sums, weights, strict=True)), 0.0 * logits.sum())
        else:
            kept, smooth = labels != -100, self.terms.get("label_smoothing", 0.0)
            want = F.cross_entropy(logits[kept], labels[kept], label_smoothing=smooth, reduction="sum")
            want = want + self.terms.get("z_loss", 0.0) * logits[kept].logsumexp(-1).square().sum()
            want = want / kept.sum().clamp(min=1)
        want.backward()
        # All ranks.
        axis = mesh((self.size,), ("cp",))
        sequence = ShardedSequence(axis, self.layout if self.layout == "auto" else layout_of(self.layout), self.S)
        parameters, head = dict(model.named_parameters()), model.head
        core = ContextParallel(sequence, mask=lambda q, k, v, documents: documents)
        styles: dict[str, Any] = {"": ShardedModel(sequence), "layers.*.core": core}
        styles |= {"layers.*.ff": TiledMLP(tiles=self.tiles)} if self.tiles else {}
        styles |= {"layers.*": Checkpointed(**self.checkpoint)} if isinstance(self.checkpoint, dict) else {}
        if self.loss != "logits":
            model.head = nn.Identity()
        cp_mesh.parallelize(model, axis, styles)
        for layer in model.layers if isinstance(self.checkpoint, str) else ():
            of = {"context_fn": cp_mesh.training.checkpoint_context_fn} if self.checkpoint == "selective" else {}
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, **of)
        of_batch = sequence.for_batch(self.S, mask)
        x, own = model(tokens, documents=mask), of_batch.shard({"labels": labels})["labels"]
        given = {} if self.loss == "logits" else {"weight": head.weight}
        if by_sums:
            sums = document_sums(cp_mesh.token_log_probs(x, own, **given), sequence=of_batch, mask=mask)
            loss = (sums * weights).sum() / self.size
        else:
            loss = cp_mesh.cross_entropy(x, own, axis, **given, **self.terms)
        loss.backward()
        got = summed([loss.detach(), *(torch.zeros_like(y) if y.grad is None else y.grad for y in parameters.values())])
        return differences(["loss", *parameters], got, [want.detach(), *(y.grad for y in plain.parameters())])


@st.composite
def steps(draw: Any, size: int) -> Step:
    d = Draws(draw)
    S, loss = d.number(1, 30), d.of("logits", "hidden", "documents")
    kept = {name: d.chance(50) for name in ("offload", "keep_attention")}
    terms = {name: 0.2 for name in ("label_smoothing", "z_loss") if loss != "documents" and d.chance(30)}
    documents = draw_documents(d, 2, S, returning=False) if d.chance(60) else None
    if documents is not None and documents.dtype == torch.uint8:
        documents = documents.int()  # the check of labels raises on bytes
    return Step(
        size, d.of("auto", *PLAIN), S, documents, d.of(0, 1, 3), d.of(None, "full", "selective", kept), loss, terms,
        d.of(100, 50, 0),
    )  # fmt: skip


# --- any of them

Use = Call | Decoding | Batch | Mixing | Indexed | Step


@st.composite
def uses(draw: Any, *sizes: int) -> Use:
    """Of one of these numbers of ranks."""
    size = draw(st.sampled_from(sizes))
    return draw(draw(st.sampled_from([calls] * 6 + [decodings, batches, mixings, latents, indexings, steps]))(size))


def run(rank: int, use: Use) -> list[str]:
    forget_kept(Cuts)  # a use is a program of its own: its rows belong to no model of one before it
    with mock.patch.dict(LAYOUTS, dealt=Dealt):
        return use.run(rank)
