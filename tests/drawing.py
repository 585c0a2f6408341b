"""Random uses of everything public that computes: what is drawn, on which ranks it runs, and what is wrong with it.

There are four kinds: a `Trial` is a call of `attention`, a `Filling` a cache that tokens are appended to or one call
of `decode`, a `Batch` goes from whole tensors through `ShardedSequence`, attention and loss back to whole tensors, a
`Mixing` calls a recurrent layer. Each is data: its `line` is Python that makes it again. `run` is called on every rank
and compares with the tests' own oracle; `reason` says why the documents allow a refusal, or None where a refusal is a
bug.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from itertools import pairwise
from random import Random
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import gap, make_scores, mask_of, pairs_of
from checks import TOLERANCE, WAYS, Case, dense_scores, largest_degree, parity_on_ranks, serves
from dense import dense_attention, make_qkv
from inside import KERNELS, METHODS, TRITON, Blocks, Config, Index, Kernel, inner, triton_kernel
from interpreted import INTERPRETED, speed_up_interpreter
from ranks import mesh
from test_parity import dtensors
from torch import Tensor

from cp_mesh import Contiguous, Layout, ShardedSequence, Striped, ZigZag, attention, balance, cross_entropy, mixers
from cp_mesh.geometry import Balanced, Joint, Permuted, ZigZagDocuments
from cp_mesh.geometry.layouts import LAYOUTS, Run, chunk_bounds
from cp_mesh.inference import ShardedCache, decode

EXCLUDED = inner("mask", "EXCLUDED")

# --- layouts of a user's own


@dataclass(frozen=True)
class Backwards(Layout):
    """The last chunk first: that of docs/extending.md."""

    def runs(self, seq_len: int, cp_size: int, cp_rank: int) -> tuple[Run, ...]:
        begin, end = chunk_bounds(seq_len, cp_size, cp_size - 1 - cp_rank)
        return (Run(begin, 1, end - begin),) if end > begin else ()

    def spec(self) -> str:
        return "backwards"


@dataclass(frozen=True)
class Dealt(Layout):
    """Blocks of tokens that are dealt to one rank after another; ``listed`` as an index in falling order."""

    block: int
    listed: int = 0

    def runs(self, seq_len: int, cp_size: int, cp_rank: int) -> tuple[Run | Index, ...]:
        begins = range(cp_rank * self.block, seq_len, cp_size * self.block)
        runs = tuple(Run(begin, 1, min(self.block, seq_len - begin)) for begin in begins)
        if not self.listed or not runs:
            return runs
        return (Index(torch.cat([run.positions() for run in runs]).flip(0)),)

    def spec(self) -> str:
        return f"dealt:{self.block},{self.listed}"

    def multiple(self, cp_size: int) -> int:
        return cp_size * self.block


OWN: dict[str, type[Layout]] = {"backwards": Backwards, "dealt": Dealt}


# --- a call


@dataclass(frozen=True)
class Trial:
    """A case on a mesh.

    Attributes:
        case: the call; the group of the axis "cp" computes it, or that of two axes of such names.
        shape, names: of the mesh. Groups of local tensors along other axes have data of their own.
        placed: None for local tensors; for DTensors what other axes shard, as `test_parity.dtensors` takes it.
        turn: how the DTensors of the call are told, as `test_parity.dtensors` takes it.
        recorded: on a group that delivers at the wait, see recording.py; local tensors only.
        told: as what the cp axis is passed, as `checks.parity_on_ranks` takes it; local tensors only.
    """

    case: Case
    shape: tuple[int, ...]
    names: tuple[str, ...] = ("cp",)
    placed: dict[str, str] | None = None
    turn: int = 0
    recorded: bool = False
    told: str = "axis"

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def cp(self) -> int:
        return math.prod(n for name, n in zip(self.names, self.shape, strict=True) if name[:2] == "cp")

    def run(self, rank: int) -> list[str]:
        kernels = {TRITON.name: triton_on_cpus()} if INTERPRETED else {}
        with mock.patch.dict(LAYOUTS, OWN), mock.patch.dict(KERNELS, kernels):
            if self.placed is None:
                return parity_on_ranks(rank, self.shape, self.names, [self.case], self.recorded, self.told)
            return dtensors(rank, self.shape, self.names, self.placed, [self.case], self.turn)

    @property
    def reason(self) -> str | None:
        case, options, scores, cp = self.case, self.case.options, self.case.scores, self.cp
        if spoilt := [name for name, value in SPOILT if name in options and repr(options[name]) == repr(value)]:
            return f"a wrong {spoilt[0]}"
        if "dropout_p" in scores and "dropout_seed" not in scores:
            return "dropout without a seed"
        if case.kernel not in ("auto", "reference", "cpu_flash", *([TRITON.name] if INTERPRETED else [])):
            return "a kernel of GPUs"
        if options.get("transport") == "symmetric_memory":
            return "symmetric memory on CPUs"
        if case.kernel == "cpu_flash" and not takes_flash(case):
            return "what cpu_flash has not"
        axes = dict(zip(self.names, self.shape, strict=True))
        placed = (self.placed or {}).items()
        parts = {part: math.prod(axes[name] for name, x in placed if x == part) for part in PARTS}
        if any(n % parts["heads"] for n in case.heads) or case.dims[0] % parts["batch"]:
            return "heads or batch that an axis does not divide"
        H, K = (n // parts["heads"] for n in case.heads)
        degree = options.get("ulysses_degree") or (self.shape[1] if self.told == "axes" else None)
        if case.method == "hybrid" and degree is None:
            degree = largest_degree(cp, (H, K))
        if not serves(case.method, cp, (H, K), case.head_chunks, degree):
            return "heads that ranks or chunks do not divide"
        if self.placed is not None and not in_chunks(case, cp):
            return "DTensors of other shards than torch.chunk's"
        return None

    def cut(self, S: int) -> Trial:
        """The same of a shorter sequence."""
        case = self.case
        mask = {name: x[..., :S] if isinstance(x, Tensor) else x for name, x in case.mask.items()}
        if "cu_seqlens" in mask:
            mask["cu_seqlens"] = case.mask["cu_seqlens"].clamp(max=S)
        scores = dict(case.scores)
        if "bias" in scores:
            B, H, rows, _ = scores["bias"]
            scores["bias"] = B, H, min(rows, S), S
        layout: Any = case.layout
        if isinstance(layout, list):
            layout = [i for i in layout if i < S]
        if isinstance(layout, ZigZagDocuments):
            layout = ZigZagDocuments(layout.tensor.clamp(max=S))
        if isinstance(layout, Joint):
            layout = Joint(S)
        if isinstance(layout, Balanced):
            runs = [[begin, min(num, S - begin)] for begin, num in layout.tensor.tolist() if begin < S]
            layout = Balanced(torch.tensor(runs, dtype=torch.int64).view(-1, 2))
        return replace(self, case=replace(case, mask=mask, scores=scores, layout=layout, S=S))


PARTS = ("batch", "heads")
SPOILT: tuple[tuple[str, Any], ...] = (
    ("scale", -1.0), ("softcap", 0.0), ("method", "rings"), ("kernel", "flash"), ("transport", "nvlink"),
    ("head_chunks", 0), ("ulysses_degree", 0), ("seq_dim", 3), ("deterministic", 1),
    ("dropout_p", 1.0), ("mask", None), ("layout", "zigzag"), ("seq_len", 1.5),
)  # fmt: skip
"""Arguments that are wrong by themselves."""


def takes_flash(case: Case) -> bool:
    """Whether kernel="cpu_flash" must serve a call: the table of docs/kernels.md."""
    parts = [of for _, of in case.layout.streams] if isinstance(case.layout, Joint) else [case.layout]
    runs = not any(isinstance(of, list | Permuted) or of == Dealt(getattr(of, "block", 1), 1) for of in parts)
    runs &= len(parts) == 1 or Striped() not in parts  # between unlike strides there are no bands
    masks, scores = set(case.mask) <= {"causal", "prefix", "length"}, set(case.scores) <= {"sinks"}
    return runs and masks and scores and case.dims[1] == case.dims[2] and not case.through_lse


def in_chunks(case: Case, cp: int) -> bool:
    layout = case.make_layout()
    bounds = [chunk_bounds(case.S, cp, rank) for rank in range(cp)]
    return all(layout.shard_len(case.S, cp, rank) == end - begin for rank, (begin, end) in enumerate(bounds))


def draw_trial(r: Random, size: int) -> Trial:
    """A call on so many ranks."""
    shape, names = r.choice(meshes(size)) if r.random() < 0.45 else ((size,), ("cp",))
    axes = dict(zip(names, shape, strict=True))
    two_axes = "cp" not in axes
    cp = math.prod(n for name, n in axes.items() if name[:2] == "cp")
    placed, parts = None, {"dp": "batch", "tp": "heads"}
    if r.random() < 0.3:
        placed = {name: part for name, part in parts.items() if name in axes and r.random() < 0.7}
    dp, tp = (axes[name] if name in (placed or {}) else 1 for name in ("dp", "tp"))
    seq_dim = r.choice((1, 2) if dp > 1 else (0, 1, 2))
    B = dp * r.randint(1, 3) if seq_dim else 1
    local_kv_heads = r.randint(1, 3)
    K = tp * local_kv_heads
    H, method = K * r.randint(1, 3), r.choice(("auto", *METHODS))
    strict = r.random() < 0.97  # else it may be refused
    if method == "ulysses" and strict:  # heads that ranks divide
        H = tp * math.lcm(local_kv_heads, cp) * r.randint(1, 2)
    degrees = draw_degrees(r, method, cp, H // tp, two_axes, strict)
    if two_axes and method == "hybrid" and strict:
        H = tp * math.lcm(local_kv_heads, shape[1]) * r.randint(1, 2)
    S = r.randint(0, cp + 1) if r.random() < 0.25 else r.randint(0, 60)
    kinds = ["contiguous", "zigzag", "striped", "permuted", *(["balanced", "runs"] if S else [])]
    uneven = ["own", "zigzag_documents", "joint"]
    kind = r.choice(kinds + uneven)
    if placed is not None and strict:  # shards of DTensors have torch.chunk sizes
        kind = r.choice(kinds) if kind in uneven else kind
        S -= S % (2 * cp if kind == "zigzag" else cp if kind == "striped" or two_axes else 1)
    mask, scores = draw_mask(r, B, S), draw_scores(r, B, H, S)
    layout = draw_layout(r, kind, mask, S, cp)
    D = r.choice((r.randint(1, 6), r.randint(1, 6), 16, 24))
    E = r.choice((D, r.randint(1, 6), 8))
    dtype = r.choice((torch.float32, torch.bfloat16, torch.float16)) if placed is None and r.random() < 0.12 else None
    names_of_inputs = ["q", "k", "v", *(name for name, x in scores.items() if isinstance(x, tuple))]
    frozen = tuple(n for n in names_of_inputs if r.random() < 0.5) if r.random() < 0.25 else ()
    memories = ("contiguous", "strided", "transposed", "sliced")
    memory: Any = r.choice((*memories, *(["expanded"] if seq_dim else [])))
    case = Case(
        layout=layout,
        mask=mask,
        S=S,
        heads=(H, K),
        seq_dim=seq_dim,
        memory=tuple(r.choice(memories) for _ in range(4)) if r.random() < 0.3 else memory,
        scale=r.choice((None, round(r.uniform(0.05, 2.0), 3))),
        sizes=(B, D, E),
        scores=scores,
        method=method,
        lse_gradient=r.choice((False, False, True, "alone")),
        options=draw_options(r, placed is None and lengths_are_equal(layout, S, cp)) | degrees,
        dtype=dtype or torch.float64,
        frozen=frozen,
        way=draw_way(r, placed is None, dtype is None),
    )
    chunks = [n for n in (None, None, 1, 2, 3) if not strict or Trial(replace(case, head_chunks=n), shape, names,
              placed, told="axes" if two_axes else "axis").reason is None]  # fmt: skip
    case = replace(case, head_chunks=r.choice(chunks or [None]))
    case = replace(case, kernel=draw_kernel(r, case))
    if r.random() < 0.04:
        name, value = r.choice(SPOILT)
        case = replace(case, options=case.options | {name: value})
    if placed is None:
        told = "axes" if two_axes else r.choice(("axis", "axis", "group"))
        recorded = case.way == "eager" and told == "axis" and r.random() < 0.3
        trial = Trial(case, shape, names, recorded=recorded, told=told)
        by_functions = trial.reason is None and takes_functions(case) and r.random() < 0.25
        return replace(trial, case=replace(case, way="functions"), recorded=False) if by_functions else trial
    return Trial(case, shape, names, placed, turn=r.randint(0, 5))


def meshes(size: int) -> list[tuple[tuple[int, ...], tuple[str, ...]]]:
    """Meshes of so many ranks with another axis beside cp, if there is one, or with two axes that are cp."""
    halves = [] if size % 2 else [((2, size // 2), ("dp", "cp")), ((size // 2, 2), ("cp", "tp"))]
    eighths = [((2, 2, 2), ("dp", "cp", "tp")), ((4, 2), ("tp", "cp"))] if size == 8 else []
    twice = ((size // 2, 2) if size % 2 == 0 else (1, size)), ("cp_ring", "cp_ulysses")
    return [*(halves or [((size, 1), ("cp", "tp"))]), *eighths, twice]


def draw_degrees(r: Random, method: str, cp: int, heads: int, two_axes: bool, strict: bool) -> dict[str, int]:
    """Sizes of inner groups; of a mesh of two axes it tells them."""
    if two_axes or method != "hybrid" or r.random() < 0.3:
        return {}
    fits = [n for n in range(1, cp + 1) if cp % n == 0 and heads % n == 0]
    return {"ulysses_degree": r.choice(fits if strict else range(1, 5))}


def draw_way(r: Random, is_local: bool, is_double: bool) -> str:
    if r.random() < 0.8:
        return "eager"
    ways = [name for name in WAYS if name != "eager"]
    way = r.choice(ways) if r.random() < 0.1 else r.choice(ways[:-1])  # compiled calls take seconds
    runs = (is_local or way != "compiled") and (is_double or way != "autocast")  # which casts others
    return way if runs else "eager"


def takes_functions(case: Case) -> bool:
    """Whether `flex_attention` can say the same."""
    said = set(case.scores) <= {"softcap", "alibi_slopes"} and "seq_len" not in case.options
    runs = case.kernel in ("auto", "reference") and case.dtype == torch.float64
    return said and runs and case.way == "eager" and case.S > 0


def draw_kernel(r: Random, case: Case) -> str:
    if r.random() < 0.02:
        return r.choice(("triton", "cudnn", "fa2", "cpu_flash"))
    return r.choice(("auto", "cpu_flash", "cpu_flash") if takes_flash(case) else ("auto", "reference"))


def draw_layout(r: Random, kind: str, mask: dict[str, Any], S: int, cp: int) -> str | list[int] | Layout:
    if kind == "permuted":
        return r.sample(range(S), S)
    if kind == "balanced":
        return balance(mask_of({name: x for name, x in mask.items() if name != "key_padding"}), S, cp)
    if kind == "runs":
        return draw_runs(r, S, r.choice((2, 4, 20)))
    if kind == "zigzag_documents":
        edges = sorted(r.randint(0, S) for _ in range(r.randint(0, 5)))
        return ZigZagDocuments([0, *(mask["cu_seqlens"].tolist() if "cu_seqlens" in mask else edges), S])
    if kind == "joint":
        return draw_joint(r, S, cp)
    if kind == "own":
        return r.choice((Backwards(), Dealt(r.randint(1, 5)), Dealt(r.randint(1, 5), 1)))
    return kind


def draw_joint(r: Random, S: int, cp: int) -> Joint:
    """One to three streams in layouts of their own."""
    streams = []
    edges = sorted(r.randint(0, S) for _ in range(r.randint(0, 2)))
    for begin, end in pairwise([0, *edges, S]):
        kinds = ("contiguous", "zigzag", "striped", "permuted", "own", "zigzag_documents", *(("runs",) * (end > begin)))
        layout = draw_layout(r, r.choice(kinds), {}, end - begin, cp)
        layout = (
            Permuted(layout) if isinstance(layout, list) else LAYOUTS[layout]() if isinstance(layout, str) else layout
        )
        streams.append((end - begin, layout))
    return Joint(*streams)


def draw_runs(r: Random, S: int, longest: int) -> Balanced:
    """Runs of at most so many positions, in any order."""
    edges = [0]
    while edges[-1] < S:
        edges.append(min(S, edges[-1] + r.randint(1, longest)))
    runs = [(begin, end - begin) for begin, end in pairwise(edges)]
    return Balanced(torch.tensor(r.sample(runs, len(runs)), dtype=torch.int64).view(-1, 2))


def draw_mask(r: Random, B: int, S: int) -> dict[str, Any]:
    """Options of a mask: any conjunction."""

    def bound() -> int | None:
        return r.choice((None, r.randint(0, 8), r.randint(0, S + 2)))

    options: dict[str, Any] = {"causal": r.random() < 0.6}
    if r.random() < 0.3:
        return options
    if r.random() < 0.35:
        options["window"] = bound(), bound()
    if S and r.random() < 0.1:
        edges = sorted(r.randint(0, S) for _ in range(r.randint(0, 6)))
        return options | {"cu_seqlens": torch.tensor([0, *edges, S], dtype=r.choice((torch.int64, torch.int32)))}
    if options["causal"] and r.random() < 0.3:
        options["prefix"] = r.randint(0, S + 2)
    if r.random() < 0.3:
        options["length"] = r.randint(0, S + 2)
    if r.random() < 0.5:
        dtype = r.choice((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))
        options["documents"] = draw_rows(r, B, dtype, lambda: draw_ids(r, S, 0 if dtype == torch.uint8 else -2))
    sees_ahead = options.get("window", (None, None))[1] != 0
    if options["causal"] and sees_ahead and r.random() < 0.3:
        dtype = r.choice((torch.int64, torch.int32, torch.int16, torch.int8))
        blocks = draw_rows(r, B, dtype, lambda: draw_blocks(r, S))
        if not in_parts(blocks, options.get("documents", torch.zeros(1, 1))):
            options["blocks"] = blocks
    if r.random() < 0.25:
        kept = r.choice((0.3, 0.8, 1.0))
        options["key_padding"] = draw_rows(r, B, torch.bool, lambda: [r.random() < kept for _ in range(S)])
    return options


def draw_rows(r: Random, B: int, dtype: torch.dtype, row: Callable[[], list[Any]]) -> Tensor:
    """A tensor [S], [1, S] or [B, S] of drawn rows; what is printed of an empty one makes it again if it is [S]."""
    first, num_rows = row(), r.choice((None, 1, B))
    if num_rows is None or not first:
        return torch.tensor(first, dtype=dtype)
    return torch.tensor([first, *(row() for _ in range(num_rows - 1))], dtype=dtype)


def draw_blocks(r: Random, S: int) -> list[int]:
    """Ids of S tokens: blocks one after another, between tokens of none."""
    longest, names, ids = r.choice((1, 4, max(1, S))), r.sample(range(100), 100), list[int]()
    while len(ids) < S:
        ids += [r.choice((-1, names.pop(), -3))] * r.randint(1, longest)
    return ids[:S]


def in_parts(blocks: Tensor, documents: Tensor) -> bool:
    """Whether a block comes back in its document, which is refused."""
    *rows, _ = torch.broadcast_tensors(*map(torch.atleast_2d, (blocks, documents)), torch.zeros(1))
    for ids, of_document in zip(*(x.tolist() for x in rows), strict=True):
        known = [pair if min(pair) >= 0 else None for pair in zip(ids, of_document, strict=True)]
        begins = [pair for before, pair in pairwise([None, *known]) if pair not in (None, before)]
        if len(set(begins)) < len(begins):
            return True
    return False


def draw_ids(r: Random, S: int, least: int) -> list[int]:
    """Ids of S tokens: documents one after another, few or many, some that come back, or ids in any order."""
    kind = r.choice(("few", "many", "returning", "scattered"))
    if kind == "scattered":
        return [least + r.randint(0, 3) for _ in range(S)]
    ids: list[int] = []
    names = r.sample(range(least, least + 100), 100)
    while len(ids) < S:
        name = least + r.randint(0, 2) if kind == "returning" else names.pop()
        if least < 0 and r.random() < 0.2:
            name = EXCLUDED
        ids += [name] * r.randint(1, 3 if kind == "many" else 30)
    return ids[:S]


def draw_scores(r: Random, B: int, H: int, S: int, by_rows: bool = True) -> dict[str, Any]:
    """Options of the scores, tensors by their shapes; ``by_rows``: those too that have a number for each pair."""
    if r.random() < 0.4:
        return {}
    drawn: dict[str, Any] = {}
    for name, value in (
        ("softcap", round(r.uniform(0.3, 3.0), 3)),
        ("sinks", (H,)),
        ("alibi_slopes", (H,)),
        *([("bias", (r.choice((1, B)), r.choice((1, H)), r.choice((1, S)), S))] if by_rows else []),
    ):
        if r.random() < 0.3:
            drawn[name] = value
    if by_rows and r.random() < 0.25:
        drawn["dropout_p"] = r.choice((0.1, 0.5, 0.9))
        seed, offset = r.randrange(2**63), r.randrange(2**32)
        drawn["dropout_seed"] = r.choice((seed, torch.tensor(seed), torch.tensor([seed]), torch.tensor([seed, offset])))
    return drawn


def draw_options(r: Random, lengths_are_equal: bool) -> dict[str, Any]:
    options: dict[str, Any] = {
        "transport": "symmetric_memory" if r.random() < 0.01 else r.choice(("auto", "functional")),
        "deterministic": r.choice((None, False, True)),
    }
    return options | ({"seq_len": None} if lengths_are_equal and r.random() < 0.3 else {})


def lengths_are_equal(layout: str | list[int] | Layout, S: int, cp: int) -> bool:
    made = Case(layout, {}, S).make_layout()
    return len({made.shard_len(S, cp, rank) for rank in range(cp)}) == 1


# --- few queries


@dataclass(frozen=True)
class Filling:
    """A cache that takes a prompt and then steps of tokens, whose queries attend to all that came; or `decode` itself.

    Attributes:
        size: number of ranks.
        layout: who holds which tokens of the prompt.
        prompt: tokens that are prefilled.
        steps: numbers of tokens that are appended together.
        mask, scores: as in `Case`, without tensors that have a number for each token.
        heads, sizes: as in `Case`.
        capacity: more tokens than come for which there is room; None: there is no bound.
        pad: whether the prompt is padded to equal shards.
        q_lens: not a cache: how many of the last tokens each rank asks for in one call of `decode`; None: a cache.
        more: of such a call, rows behind the keys that `num_keys` leaves out.
    """

    size: int
    layout: str | Layout
    prompt: int
    steps: tuple[int, ...] = (1,)
    mask: dict[str, Any] = field(default_factory=dict)
    scores: dict[str, Any] = field(default_factory=dict)
    heads: tuple[int, int] = (2, 1)
    sizes: tuple[int, int, int] = (1, 4, 4)
    kernel: str = "auto"
    scale: float | None = None
    capacity: int | None = None
    pad: bool = True
    q_lens: tuple[int, ...] | None = None
    more: int = 0

    @property
    def reason(self) -> str | None:
        return None

    def run(self, rank: int) -> list[str]:
        with mock.patch.dict(LAYOUTS, OWN):
            return self._decoded(rank) if self.q_lens else self._cached()

    def _whole(self) -> tuple[Tensor, ...]:
        B, D, E = self.sizes
        return make_qkv(B, *self.heads, self.prompt + sum(self.steps), D, E)[:3]

    def _want(self, num_rows: int, end: int) -> tuple[Tensor, Tensor]:
        """out and lse of the last rows of the first tokens."""
        B, H = self.sizes[0], self.heads[0]
        given = dense_scores(make_scores(self.scores, B, H, self.prompt), B, H, self.prompt)
        q, k, v = (x[:, :, :end] for x in self._whole())
        out, lse = dense_attention(q, k, v, pairs_of(self.mask, end), self.scale, **given)
        return out[:, :, end - num_rows :], lse[:, :, end - num_rows :]

    def _options(self) -> dict[str, Any]:
        given = make_scores(self.scores, self.sizes[0], self.heads[0], self.prompt)
        return given | {"mask": mask_of(self.mask), "kernel": self.kernel, "scale": self.scale, "return_lse": True}

    def _sequence(self) -> ShardedSequence:
        layout = Case(self.layout, {}, self.prompt).make_layout()
        return ShardedSequence(mesh((self.size,), ("cp",)), layout, self.prompt or None, self.pad)

    def _cached(self) -> list[str]:
        q, k, v = self._whole()
        sequence, end, problems = self._sequence(), self.prompt, []
        total = end + sum(self.steps)
        cache = ShardedCache(sequence, None if self.capacity is None else total + self.capacity)
        if end:
            cache.prefill(*(sequence.shard(x[:, :, :end], dim=2) for x in (k, v)))
        for i, num_new in enumerate(self.steps):
            begin, end = end, end + num_new
            cache.append(k[:, :, begin:end], v[:, :, begin:end])
            num_rows = num_new if i % 3 < 2 else 1  # all that came, or the last token alone
            got = cache.attend(q[:, :, end - num_rows : end], **self._options())
            problems += differences(("out", "lse"), got, self._want(num_rows, end), f" after {end} tokens")
        return problems

    def _decoded(self, rank: int) -> list[str]:
        assert self.q_lens is not None
        (q, k, v), S, num_rows = self._whole(), self.prompt + sum(self.steps), sum(self.q_lens)
        layout = Case(self.layout, {}, S).make_layout()
        rows = layout.positions(S, self.size, rank)
        alike, begin = len(self.q_lens) == 1, S - num_rows
        first = begin + (0 if alike else sum(self.q_lens[:rank]))
        mine = torch.arange(first, first + (num_rows if alike else self.q_lens[rank]))
        given: dict[str, Any] = {} if alike else {"q_lens": list(self.q_lens)}
        if self.more:
            given["num_keys"] = torch.tensor([len(rows)])
            rows = torch.cat([rows, torch.arange(self.more) % S])
        got = decode(
            q[:, :, mine], k[:, :, rows], v[:, :, rows], mesh=mesh((self.size,), ("cp",)), q_positions=mine,
            k_positions=rows, **given, **self._options(),
        )  # fmt: skip
        return differences(("out", "lse"), got, [x[:, :, mine - begin] for x in self._want(num_rows, S)])


def differences(names: Sequence[str], got: Sequence[Tensor], want: Sequence[Tensor], where: str = "") -> list[str]:
    found = zip(names, got, want, strict=True)
    return [f"{name}{where} is off by {gap(x, y):.1e}" for name, x, y in found if not gap(x, y) <= TOLERANCE]


BY_NUMBERS = ("causal", "window", "prefix", "length")
"""Options of masks without tensors: those of decoding."""


def draw_filling(r: Random, size: int) -> Filling:
    """A cache, or one call, on so many ranks."""
    H = (K := r.randint(1, 3)) * r.randint(1, 3)
    prompt = r.choice((0, 1, r.randint(2, 40)))
    B, D, E = r.randint(1, 3), r.randint(1, 8), r.randint(1, 8)
    by_call = r.random() < 0.4
    steps = (r.randint(1, 6),) if by_call else tuple(r.randint(1, 4) for _ in range(r.randint(1, 6)))
    S = prompt + sum(steps)
    mask = {name: x for name, x in draw_mask(r, 1, S).items() if name in BY_NUMBERS}
    pad = r.random() < 0.5
    kind = r.choice(("contiguous", "zigzag", "striped", "own", "zigzag_documents", "joint"))
    layout, pad = (
        draw_layout(r, kind, mask, S if by_call else prompt, size),
        pad and kind not in ("zigzag_documents", "joint"),
    )
    lens = (sum(steps),) if r.random() < 0.4 else tuple(r.randint(0, 3) for _ in range(size))
    lens = lens if 0 < sum(lens) <= S else (1,)
    return Filling(
        size, layout, prompt, steps, mask, draw_scores(r, B, H, S, by_rows=False), (H, K),
        (B, D, r.choice((D, E))), r.choice(("auto", "reference")), r.choice((None, 0.3)),
        None if r.random() < 0.4 else r.randint(0, 9), pad, lens if by_call else None, r.choice((0, 0, 1, 3)),
    )  # fmt: skip


# --- data, attention, loss


@dataclass(frozen=True)
class Batch:
    """Whole tensors through `ShardedSequence.shard`, attention, `unshard` or `gather`, and `cross_entropy`.

    Attributes:
        shape, names: of the mesh; rows of a batch differ along the axis "dp".
        layout: "balanced": for the mask, by `ShardedSequence.balanced`.
        S: tokens without padding.
        mask: as in `Case`, of the tokens without padding.
        heads, sizes: as in `Case`.
        pad: whether shards are padded to equal lengths.
        named: whether the length is told; it must be where it is no multiple.
        vocab: of the logits.
        valid: the share of labels that count.
        gathered: whether every rank has the loss of all, by `gather`; else `unshard`.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    layout: str | list[int] | Layout
    S: int
    mask: dict[str, Any] = field(default_factory=dict)
    heads: tuple[int, int] = (2, 1)
    sizes: tuple[int, int, int] = (1, 4, 4)
    pad: bool = True
    named: bool = True
    vocab: int = 5
    valid: float = 1.0
    gathered: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def reason(self) -> str | None:
        cp = self.shape[self.names.index("cp")]
        layout = Contiguous() if self.layout == "balanced" else Case(self.layout, {}, self.S).make_layout()
        if not self.named and self.S % layout.multiple(cp):
            return "a length that is no multiple and is not told"
        if self.layout == "balanced" and not self.named and not {"documents", "cu_seqlens"} & set(self.mask):
            return "balancing without a length"
        if isinstance(self.layout, list) and self.pad and self.S % cp:
            return "a permutation of a shorter sequence than the padded one"
        return None

    def run(self, rank: int) -> list[str]:
        with mock.patch.dict(LAYOUTS, OWN):
            return self._run()

    def _run(self) -> list[str]:
        grid, (B, D, E), S = mesh(self.shape, self.names), self.sizes, self.S
        axis, seed = grid["cp"], dict(zip(self.names, grid.get_coordinate(), strict=True)).get("dp", 0)
        mask = mask_of(self.mask)
        layout = Contiguous() if self.layout == "balanced" else Case(self.layout, {}, S).make_layout()
        sequence = ShardedSequence(axis, layout, S if self.named else None, self.pad)
        sequence = sequence.balanced(mask) if self.layout == "balanced" else sequence
        *inputs, dout = make_qkv(B, *self.heads, S, D, E, seed=seed)
        of_whole = [x.requires_grad_() for x in inputs]
        rows = [sequence.shard(x, dim=2) for x in of_whole]
        seq_len = sequence.seq_len or S
        out = attention(
            *rows, mesh=axis, seq_len=seq_len, layout=sequence.layout, mask=sequence.mask(mask), method="ring"
        )
        again = (sequence.gather if self.gathered else sequence.unshard)(out, dim=2)
        shares = 1.0 if self.gathered else torch.arange(1.0, axis.size() + 1)[axis.get_local_rank()].item()
        found = torch.autograd.grad((again * dout * shares).sum(), of_whole)
        grads = [x.contiguous() for x in found]  # those of padded tensors are views
        total = 1.0 if self.gathered else axis.size() * (axis.size() + 1) / 2
        for x in grads:
            dist.all_reduce(x, group=axis.get_group())
        dense = [x.detach().clone().requires_grad_() for x in inputs]
        want, _ = dense_attention(*dense, pairs_of(self.mask, S))
        want_grads = torch.autograd.grad((want * dout).sum() * total, dense)
        problems = differences(("unsharded out", "dq", "dk", "dv"), (again, *grads), (want, *want_grads))
        positions = torch.arange(S, dtype=torch.float64)
        problems += differences(
            ("positions",), (sequence.unshard(sequence.shard(positions, dim=0), dim=0),), (positions,)
        )
        held = sequence.positions(S)
        problems += [] if len(held) == out.shape[2] else [f"{len(held)} positions of {out.shape[2]} rows"]
        return problems + self._loss(grid, axis, sequence, seed)

    def _loss(self, grid: Any, axis: Any, sequence: ShardedSequence, seed: int) -> list[str]:
        generator = torch.Generator().manual_seed(99)  # of all dp ranks, as the mean is over all
        dp, B, S = self.size // axis.size(), self.sizes[0], self.S
        logits = torch.randn(dp, B, S, self.vocab, generator=generator, dtype=torch.float64) * 3
        labels = torch.randint(0, self.vocab, (dp, B, S), generator=generator)
        labels[torch.rand(dp, B, S, generator=generator) >= self.valid] = -100
        whole = logits.clone().requires_grad_()
        count = (labels != -100).sum().clamp(min=1)
        want = F.cross_entropy(whole.flatten(0, -2), labels.flatten(), reduction="sum") / count
        (want_grad,) = torch.autograd.grad(want, whole)
        own = logits[seed].clone().requires_grad_()
        share = cross_entropy(sequence.shard(own), sequence.shard({"labels": labels[seed]})["labels"], grid)
        grad = torch.autograd.grad(share, own)[0].contiguous()
        loss = share.detach().clone()
        dist.all_reduce(loss)
        dist.all_reduce(grad, group=axis.get_group())
        return differences(("loss", "dlogits"), (loss, grad), (want, want_grad[seed]))


def draw_batch(r: Random, size: int) -> Batch:
    """A batch on so many ranks."""
    shape, names = ((2, size // 2), ("dp", "cp")) if size % 2 == 0 and r.random() < 0.3 else ((size,), ("cp",))
    cp, S, B = shape[-1], r.randint(1, 40), r.randint(1, 3)
    mask = draw_mask(r, B, S)
    of_one_length = ("permuted", "zigzag_documents", "joint")
    kind = r.choice(("contiguous", "zigzag", "striped", "own", "balanced", *of_one_length))
    pad = r.random() < 0.6 and kind not in of_one_length
    if kind == "balanced":
        mask.pop("key_padding", None)
    layout = kind if kind == "balanced" else draw_layout(r, kind, mask, S, cp)
    multiple = 1 if kind == "balanced" else Case(layout, {}, S).make_layout().multiple(cp)
    K = r.randint(1, 2)
    named = r.random() < 0.8 or S % max(multiple, cp) > 0 or kind in of_one_length[1:]
    return Batch(
        shape, names, layout, S, mask, (K * r.randint(1, 2), K), (B, r.randint(1, 6), r.randint(1, 6)), pad, named,
        r.choice((2, 5, 17)), r.choice((0.0, 0.5, 0.5, 1.0)), r.random() < 0.5,
    )  # fmt: skip


# --- recurrent layers


@dataclass(frozen=True)
class Mixing:
    """A call of a function of `cp_mesh.mixers`, with the names of `gated_delta_rule`.

    Attributes:
        size: number of ranks.
        layout, S: as in `Batch`.
        rule: the function.
        mask: as in `Case`; documents, padding and length count.
        heads, sizes: H and HV; B, K and V.
        decay: of each "head" or "channel", or "none", where the function lets choose.
        states: whether there are initial and final ones.
        width: of a convolution; how far `roll` moves rows.
    """

    size: int
    layout: str | list[int] | Layout
    S: int
    rule: str = "gla"
    mask: dict[str, Any] = field(default_factory=dict)
    heads: tuple[int, int] = (1, 1)
    sizes: tuple[int, int, int] = (1, 3, 4)
    decay: str = "head"
    method: str = "auto"
    kernel: str = "auto"
    scale: float | None = None
    states: bool = False
    pad: bool = True
    width: int = 3

    @property
    def ids(self) -> Tensor:
        """[B, S], -1 for tokens of no document."""
        ids = self.mask.get("documents", torch.zeros(1, self.S)).long().expand(self.sizes[0], self.S)
        kept = self.mask.get("key_padding", torch.ones(1, self.S, dtype=torch.bool)).expand(ids.shape)
        inside = torch.arange(self.S) < self.mask.get("length", self.S)
        return ids.where((ids >= 0) & kept & inside, torch.tensor(-1))

    @property
    def runs(self) -> list[tuple[int, slice]]:
        """Batch row and positions of each document."""
        found = []
        for b, ids in enumerate(self.ids.tolist()):
            edges = [0, *(t for t in range(1, self.S) if ids[t] != ids[t - 1]), self.S]
            found += [(b, slice(*edge)) for edge in pairwise(edges) if ids[edge[0]] >= 0]
        return found

    @property
    def reason(self) -> str | None:
        ids = self.ids
        if any((b, int(ids[b, at.start])) in {(c, int(ids[c, x.start])) for c, x in self.runs[:i]}
               for i, (b, at) in enumerate(self.runs)):  # fmt: skip
            return "documents that come back"
        if self.method == "heads" and self.heads[0] % self.size and self.rule in RULES:
            return "heads or batch that an axis does not divide"
        return None

    def run(self, rank: int) -> list[str]:
        with mock.patch.dict(LAYOUTS, OWN):
            return self._run()

    def _given(self) -> dict[str, Tensor]:
        made, (H, HV), (B, K, V) = torch.Generator().manual_seed(0), self.heads, self.sizes
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

    def _want(self, x: dict[str, Tensor], initial: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Each document by itself, token by token."""
        (H, HV), (B, K, V), states = self.heads, self.sizes, []
        out = torch.zeros(B, self.S, *((HV, V) if self.rule in RULES else (K,)), dtype=torch.float64)
        for n, (b, at) in enumerate(self.runs):
            if self.rule not in RULES:
                rows, w = x["x"][b, at], x.get("weight")
                taps = {-self.width: 1} if w is None else {j: w[:, -1 - j] for j in range(self.width)}
                moved = {j: F.pad(rows, (0, 0, j, -j)) for j in taps if abs(j) < len(rows)}
                mine = sum((taps[j] * y for j, y in moved.items()), torch.zeros_like(rows))
            else:
                state = torch.zeros(HV, K, V, dtype=torch.float64) if initial is None else initial[n]
                q, k = (x[name][b, at].repeat_interleave(HV // H, 1) for name in "qk")
                v, g, beta = x["v"][b, at], x["g"][b, at] if "g" in x else None, x.get("beta")
                if self.rule == "ssd":
                    dt = x["dt"][b, at]
                    v, g = v * dt[..., None], dt * x["A"]
                found = []
                for t in range(len(v)):
                    state = state if g is None else g[t].exp().view(HV, -1, 1) * state
                    u = v[t] if beta is None else beta[b, at][t, :, None] * (v[t] - (k[t, :, :, None] * state).sum(1))
                    state = state + k[t, :, :, None] * u[:, None]
                    found.append((q[t, :, :, None] * state).sum(1))
                scale = 1.0 if self.rule == "ssd" else K**-0.5 if self.scale is None else self.scale
                mine = torch.stack(found) * scale
                states.append(state)
            out = out.index_put((torch.tensor(b), torch.arange(at.start, at.stop)), mine)
        return out, torch.stack(states) if self.states and states else None

    def _run(self) -> list[str]:
        x, HV, (B, K, V), S = self._given(), self.heads[1], self.sizes, self.S
        made = torch.Generator().manual_seed(1)
        initial = torch.randn(len(self.runs), HV, K, V, dtype=torch.float64, generator=made).requires_grad_()
        initial = initial if self.states and self.rule in RULES else None
        layout = Case(self.layout, {}, S).make_layout()
        sequence = ShardedSequence(mesh((self.size,), ("cp",)), layout, S, self.pad)
        local = {name: y if name in ("A", "weight") else sequence.shard(y, pad_value=0) for name, y in x.items()}
        given: dict[str, Any] = {"sequence": sequence, "mask": mask_of(self.mask)}
        if self.rule in RULES:
            given |= {"initial_state": initial, "output_final_state": self.states}
            given |= {"method": self.method, "kernel": self.kernel} | (
                {"scale": self.scale} if self.rule != "ssd" else {}
            )
            if self.rule == "ssd":
                local = {{"q": "C", "k": "B", "v": "x"}.get(name, name): y for name, y in local.items()}
        elif self.rule == "roll":
            given["shifts"] = -self.width
        found = getattr(mixers, self.rule)(**local, **given)
        out, final = found if self.rule in RULES else (found, None)
        want, last = self._want(x, initial)
        kept = (self.ids >= 0).view(B, S, *[1] * (want.ndim - 2))
        dout, dlast = (
            torch.randn(y.shape, dtype=y.dtype, generator=made) for y in (want, want if last is None else last)
        )
        whole = sequence.unshard(out)
        problems = differences(("out",), (whole * kept,), (want * kept,))
        if self.rule in RULES and bool((whole * ~kept).any()):
            problems.append("rows of no document are not 0")
        loss, other = (out * sequence.shard(dout * kept, pad_value=0)).sum(), (want * dout * kept).sum()
        if final is not None and last is not None:
            problems += differences(("final state",), (final,), (last,))
            loss, other = loss + (final * dlast).sum() / self.size, other + (last * dlast).sum()
        inputs = [*x.values(), *([] if initial is None else [initial])]
        zeros = {"allow_unused": True, "materialize_grads": True}
        grads = [y.contiguous() for y in torch.autograd.grad(loss, inputs, **zeros)]
        for y in grads:
            dist.all_reduce(y)
        wanted = (
            torch.autograd.grad(other, inputs, **zeros) if other.requires_grad else [torch.zeros_like(y) for y in grads]
        )
        return problems + differences([f"d{name}" for name in (*x, "initial")][: len(inputs)], grads, wanted)


DELTA = ("gated_delta_rule", "kda", "delta_rule")
RULES = (*DELTA, "gla", "ssd")


def draw_mixing(r: Random, size: int) -> Mixing:
    """A recurrent layer, convolution or roll on so many ranks."""
    rule, S, B = (
        r.choice((*RULES, "causal_conv1d", "roll")),
        r.choice((1, r.randint(1, 9), r.randint(2, 48))),
        r.randint(1, 3),
    )
    of_one_length = ("permuted", "zigzag_documents", "joint")
    kind = r.choice(("contiguous", "zigzag", "striped", "own", "runs", *of_one_length))
    H = r.choice((1, 2, 3, size))
    shapes = (H, H * r.randint(1, 3)), (B, r.randint(1, 4), r.randint(1, 4))
    decay = {"kda": "channel", "gla": r.choice(("head", "channel", "none"))}.get(rule, "head")
    methods = ("auto", "states", *(("heads",) if H % size == 0 or r.random() < 0.1 else ()))
    made = Mixing(
        size, draw_layout(r, kind, {}, S, size), S, rule, {}, *shapes, decay, r.choice(methods),
        r.choice(("auto", "torch", "reference")), None if rule == "ssd" else r.choice((None, 0.7)), r.random() < 0.5,
        r.random() < 0.5 and kind not in (*of_one_length, "runs"), r.choice((1, 2, 4, 9)),
    )  # fmt: skip
    for _ in range(10):  # most masks do not bring a document back
        options = {name: x for name, x in draw_mask(r, B, S).items() if name not in ("cu_seqlens", "blocks")}
        masked = replace(made, mask=options)
        if masked.reason is None or r.random() < 0.1:
            return masked
    return made


# --- any of them

Use = Trial | Filling | Batch | Mixing


@cache
def triton_on_cpus() -> Kernel:
    """The Triton kernel where Triton's interpreter runs it, in small blocks."""
    speed_up_interpreter()
    kernel = triton_kernel(Config(Blocks(16, 32), Blocks(32, 16), Blocks(16, 16)))
    served = replace(kernel.capability, devices=("cpu",), compute_capability=(0, 0))
    return replace(kernel, capability=served)


def in_triton(use: Trial) -> Trial:
    """The same of the Triton kernel and few tokens; DTensors stay as they are."""
    if use.placed is not None or use.reason is not None or use.case.way == "compiled":
        return use
    case = use.cut(min(use.case.S, 20)).case
    options = {name: x for name, x in case.options.items() if name != "seq_len"}
    case = replace(case, kernel=TRITON.name, dtype=torch.float32, options=options, way="eager")
    return replace(use, case=case)


def draw(seed: str, size: int) -> Use:
    """What a seed stands for, on so many ranks; in Triton's interpreter calls of its kernel."""
    r = Random(seed)
    if INTERPRETED:
        return in_triton(draw_trial(r, size))
    if Random(f"{seed} mixes").random() < 0.1:
        return draw_mixing(r, size)
    return r.choices((draw_trial, draw_filling, draw_batch), (8, 1, 1))[0](r, size)


def line(x: Any) -> str:
    """One line of Python that makes it again, without what is as by default."""
    if isinstance(x, Trial | Filling | Batch | Mixing | Case):
        given = ((field, getattr(x, field.name)) for field in fields(x))
        told = [f"{field.name}={line(value)}" for field, value in given if not is_default(field, value)]
        return f"{type(x).__name__}({', '.join(told)})"
    if isinstance(x, dict):
        return "{" + ", ".join(f"{name!r}: {line(value)}" for name, value in x.items()) + "}"
    if isinstance(x, Balanced | Permuted | ZigZagDocuments):
        return f"{type(x).__name__}({line(x.tensor)})"
    if isinstance(x, Joint):
        return f"Joint({', '.join(f'({length}, {line(of)})' for length, of in x.streams)})"
    if isinstance(x, Tensor):  # not its repr, which is shortened, or rounded, as torch is told
        return f"tensor({x.tolist()}, size={tuple(x.shape)}, dtype={x.dtype})"
    return repr(x)


def is_default(field: Any, value: Any) -> bool:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return default is not MISSING and line(value) == line(default)


def read(text: str) -> Use:
    """The inverse of `line`."""
    names = {x.__name__: x for x in (Trial, Filling, Batch, Mixing, Case, Backwards, Dealt, Balanced, Permuted)}
    names |= {x.__name__: x for x in (Contiguous, Joint, Striped, ZigZag, ZigZagDocuments)}
    return eval(text, names | {"tensor": _tensor, "torch": torch})


def _tensor(values: Any, size: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Of what is printed of a tensor, an empty one's size included."""
    made = torch.tensor(values, dtype=dtype)
    return made if size is None else made.view(size)
