"""Show what a layout, a mask and a cp size mean: who owns which tokens, who computes what, what travels.

Needs no ranks and no device. The figures come from the schedule that a call runs.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import torch

from cp_mesh.balancing import keys_seen
from cp_mesh.call import SCORE_OPTIONS, Operand, Options
from cp_mesh.errors import refuse
from cp_mesh.kernels import KERNELS
from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.kernels.contract import Capability
from cp_mesh.layouts import Layout, ZigZag
from cp_mesh.masks import Band, Mask
from cp_mesh.memory import Sizes, extra_memory
from cp_mesh.methods import choose_method
from cp_mesh.methods.contract import as_one_tile
from cp_mesh.methods.stages import choose_head_chunks, travels_rounded
from cp_mesh.plan import choose_schedule, request_of
from cp_mesh.schedule import Schedule, Tile, enclosing, num_rows
from cp_mesh.segments import Segments

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def explain(
    seq_len: int,
    cp_size: int,
    *,
    layout: Layout = ZigZag(),  # noqa: B008 - frozen
    mask: Mask = Mask(causal=True),  # noqa: B008 - frozen
    scores: Collection[str] = (),
    device: str = "cpu",
    compute_capability: tuple[int, int] | None = None,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 128,
    batch: int = 1,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_chunks: int | None = None,
    method: str = "auto",
    columns: int = 64,
) -> str:
    """A text picture of one configuration.

    Args:
        seq_len: tokens in the whole sequence.
        cp_size: number of ranks, at most 36 for the picture.
        layout, mask: as in `cp_mesh.attention`.
        scores: names of the options of the scores that the call uses, as in `cp_mesh.attention`.
        device: device type, "cpu" or "cuda", for which ``kernel="auto"`` is resolved.
        compute_capability: that of the CUDA device; None: (9, 0), Hopper, for "cuda".
        dtype: dtype of q, k and v.
        head_dim: head dim of q, k and v.
        batch, num_heads, num_kv_heads: sizes of q, k and v on one rank; with ``num_heads`` the extra memory is told
            (`cp_mesh/memory.py`). None kv heads: as many as query heads.
        head_chunks: as in `cp_mesh.attention`.
        method: as in `cp_mesh.attention`, of those that fetch keys: "auto", "ring" or "all_gather".
        columns: width of the ownership strip.

    Returns:
        Lines: the owner of every token (one sampled per column), the kernel, and for each rank its rows, its share of
        the work (1.00 is the mean), with ``num_heads`` the peak of what a forward and backward hold beyond inputs and
        results, and in each step its tiles and the key rows that it receives. The kernel is that of a machine with the
        packages of this one; memory is that over symmetric memory for "cuda", over functional collectives else.

    >>> print(explain(16, 2, layout=ZigZag(), columns=16))
    zigzag layout, 16 tokens on 2 ranks, kernel auto = cpu_flash
    owner 0000111111110000
    rank 0: 8 rows, work 1.00
      step 0 from rank 0: q[0:8] x k[0:8] causal
      step 1 from rank 1: q[4:8] x k[0:8] full; receives 8 key rows
    rank 1: 8 rows, work 1.00
      step 0 from rank 1: q[0:8] x k[0:8] causal
      step 1 from rank 0: q[0:8] x k[0:4] full; receives 4 key rows
    """
    if not 1 <= cp_size <= len(_DIGITS):
        refuse("cp_size", f"1 to {len(_DIGITS)}", cp_size, "explain a smaller one")
    for name, tensor in (("documents", mask.documents), ("key_padding", mask.key_padding)):
        if tensor is not None and tensor.shape[-1] != seq_len:
            refuse(f"Mask.{name}", f"{seq_len} tokens", tensor.shape[-1], "pass their seq_len")
    for name in scores:
        if name not in SCORE_OPTIONS:
            known = ", ".join(SCORE_OPTIONS)
            refuse("explain: scores", f"names of {known}", repr(name), "see attention")
    features = frozenset({"dropout_p": "dropout"}.get(name, name) for name in scores) - {"sinks", "dropout_seed"}

    def of_heads(num: int, rows: int = 1) -> Operand:
        return Operand(torch.Size((batch, num, rows, head_dim)), dtype, torch.device(device))

    capability = compute_capability or ((9, 0) if device == "cuda" else (0, 0))
    any_heads, options = of_heads(1), Options(layout.spec(), mask.spec(), 1.0)
    request = partial(request_of, any_heads, any_heads, options, features, compute_capability=capability)
    make_schedule = choose_method(method).make_schedule
    make = partial(make_schedule, layout, mask, seq_len, cp_size, 0)
    first, kernel = choose_schedule("auto", make, request, features)
    segments = "segments" in first.covers
    schedules = [make_schedule(layout, mask, seq_len, cp_size, rank, segments) for rank in range(cp_size)]
    owner = torch.empty(seq_len, dtype=torch.int64)
    for rank in range(cp_size):
        owner[layout.positions(seq_len, cp_size, rank)] = rank
    width = min(columns, seq_len)
    strip = "".join(_DIGITS[int(owner[column * seq_len // width])] for column in range(width))
    as_one = as_one_tile(kernel, first, features)
    pairs = [schedule.num_pairs for schedule in schedules]
    if mask.documents is not None and mask.key_padding is None:
        seen = keys_seen(mask, seq_len)
        pairs = [int(seen[layout.positions(seq_len, cp_size, rank)].sum()) for rank in range(cp_size)]
    mean = sum(pairs) / cp_size
    lines = [
        f"{layout.spec()} layout, {seq_len} tokens on {cp_size} ranks, kernel auto = {kernel.name}",
        f"owner {strip}",
    ]
    for schedule in schedules:
        memory = ""
        if num_heads is not None:
            rows = schedule.shard_lens[schedule.cp_rank]
            q, k = (of_heads(num, rows) for num in (num_heads, num_kv_heads or num_heads))
            rounded = travels_rounded(kernel, schedule, features)
            memory = _memory_words(q, k, schedule, rounded, as_one, head_chunks or 0)
        share = pairs[schedule.cp_rank] / mean if mean else 0.0
        lines += _rank_lines(schedule, share, memory, as_one)
    return "\n".join(lines)


def _memory_words(q: Operand, k: Operand, schedule: Schedule, rounded: bool, as_one: bool, head_chunks: int) -> str:
    chunks = choose_head_chunks(head_chunks, q, k, k, schedule)
    gradient_itemsize = (q.dtype if rounded else accumulation_dtype(q.dtype)).itemsize
    sizes = Sizes(
        q.shape[0], q.shape[1], k.shape[1], q.shape[3], k.shape[3], q.dtype.itemsize, gradient_itemsize
    )  # fmt: skip
    transport = "symmetric_memory" if q.device.type == "cuda" else "functional"
    memory = extra_memory(schedule, sizes, chunks, transport, as_one)
    parts = f" in {chunks} head chunks" if chunks > 1 else ""
    return f", extra memory {memory.peak / 2**30:.3g} GiB ({memory.symmetric / 2**30:.3g} symmetric){parts}"


def _rank_lines(schedule: Schedule, share: float, memory: str, as_one: bool) -> list[str]:
    lines = [f"rank {schedule.cp_rank}: {schedule.shard_lens[schedule.cp_rank]} rows, work {share:.2f}{memory}"]
    for step in range(schedule.cp_size):
        source = schedule.source(step)
        tiles = schedule.tiles[source]
        words = ", ".join(_tile_words(tile) for tile in (enclosing(tiles) if as_one else tiles)) or "nothing"
        received = f"; receives {num_rows(schedule.fetch[source])} key rows" if step else ""
        lines.append(f"  step {step} from rank {source}: {words}{received}")
    return lines


def _tile_words(tile: Tile) -> str:
    cover = tile.cover
    if isinstance(cover, Segments):
        words = f"{max(map(len, cover.blocks))} blocks of documents"
    elif not isinstance(cover, Band):
        words = "by mask"
    elif cover.lo is None and cover.hi is None:
        words = "full"
    elif cover == Band(0, None):
        words = "causal"
    else:
        words = f"band {'' if cover.lo is None else cover.lo}..{'' if cover.hi is None else cover.hi}"
    return f"q[{tile.q[0]}:{tile.q[1]}] x k[{tile.k[0]}:{tile.k[1]}] {words}"


def kernel_table() -> str:
    """The capability records of all kernels as a Markdown table, in the order in which "auto" tries them."""
    columns = (
        "kernel | devices | dtypes | tiles | scores | head dim | v head dim differs | gradient of lse | deterministic"
    )
    header = f"| {columns} |"
    lines = [header, "|---" * header.count(" | ") + "|---|"]
    for kernel in KERNELS.values():
        has = kernel.capability
        devices = ", ".join(has.devices)
        if has.compute_capability > (0, 0):
            only = [f"sm_{major}{minor}" for major, minor in has.only_on]
            devices += f" ({', '.join(only) or 'sm_{}{}+'.format(*has.compute_capability)})"
        dims = f"multiples of {has.head_dim_multiple}" if has.head_dim_multiple > 1 else "any"
        dims += f" to {has.max_head_dim}" if has.max_head_dim < 1 << 30 else ""
        cells = [
            kernel.name,
            devices,
            ", ".join(str(dtype).removeprefix("torch.") for dtype in has.dtypes),
            ", ".join(has.covers),
            ", ".join(sorted(has.features)) or "-",
            dims,
            *("yes" if flag else "no" for flag in (has.v_head_dim, has.differentiable_lse)),
            _deterministic(has),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _deterministic(has: Capability) -> str:
    if not has.deterministic or has.deterministic_covers is None:
        return "yes" if has.deterministic else "no"
    return ", ".join(cover for cover in has.covers if cover in has.deterministic_covers)
