"""Ulysses, Jacobs et al. 2023 (arXiv:2309.14509): each rank computes some heads of the rows of all ranks.

An all-to-all gives a rank the rows of the ranks beside it, its inner group, for its heads; another one brings out home
(`by_heads`). Among these rows it computes as one rank of a ring whose ranks are inner groups (`joined_layout`). Of
plain Ulysses the inner group is the whole cp group: the ring has one rank, and its kernels see the problem of one
device, the mask as it is, in one contiguous shard, whatever the layout. `hybrid.py` has smaller groups.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import torch

from cp_mesh.call.joined_layout import join
from cp_mesh.call.method import Method, Setup, as_one_tile
from cp_mesh.call.ring_loop import StageSettings, backward_by_stages, forward_by_stages
from cp_mesh.call.ring_loop import costs as costs_of_stages
from cp_mesh.call.ring_loop import memory as memory_of_stages
from cp_mesh.call.ring_loop import settle as settle_stages
from cp_mesh.call.spec import Operand, Options
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.geometry.layouts import Layout
from cp_mesh.geometry.mask import Mask
from cp_mesh.geometry.schedule import Schedule, make_schedule
from cp_mesh.geometry.survey import Seen
from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.kernels.merge import Kernel
from cp_mesh.predict.memory import ExtraMemory, ulysses_memory
from cp_mesh.predict.time import Machine, PassCost, ulysses_costs

FEW = 2
"""Pieces of a rank that are put to their places one by one, as of zigzag: each takes a launch for each rank."""


class UlyssesSettings(NamedTuple):
    """What is decided for a call.

    Attributes:
        head_chunks: parts of a rank's heads that are exchanged and computed one after the other.
        gradient_dtype: in which dk and dv travel between inner groups, as in `StageSettings`.
        home_dtype: in which dk and dv travel home: rounded where they are complete, else the accumulation dtype.
    """

    head_chunks: int
    gradient_dtype: torch.dtype
    home_dtype: torch.dtype


def choose_degree(options: Options, q: Operand, k: Operand, cp_size: int) -> int:
    """All ranks; see `Method.choose_degree`."""
    num_heads = q.shape[1]
    if num_heads % cp_size:
        near = max(n for n in range(1, cp_size) if num_heads % n == 0)
        expected = f"a multiple of the {cp_size} cp ranks"
        hint = f"method='ring' works{f', or {near} cp ranks' if near > 1 else ''}"
        refuse("method='ulysses': query heads", expected, num_heads, hint, UnsupportedError)
    return cp_size


def schedule_of_groups(
    layout: Layout, mask: Mask, seq_len: int, cp_size: int, cp_rank: int, segments: bool = False, degree: int = 0,
    sources: Seen | None = None,
) -> Schedule:  # fmt: skip
    """The schedule of a ring of inner groups, of all ranks if no ``degree`` is given; see `Method.make_schedule`."""
    degree = degree or cp_size
    joined, outer = join(layout, degree, cp_size), cp_size // degree
    of_groups = None if sources is None else np.any(sources.reshape(outer, degree, outer, degree), (1, 3))
    return make_schedule(joined, mask, seq_len, outer, cp_rank // degree, segments, sources=of_groups)


def settle(
    options: Options, q: Operand, k: Operand, v: Operand, schedule: Schedule, kernel: Kernel,
    features: Collection[str], degree: int,
) -> UlyssesSettings | StageSettings:  # fmt: skip
    """The settings of a call; see `Method.settle`."""
    if options.joined:
        return settle_stages(options, q, k, v, schedule, kernel, features, degree)
    wanted, (chunks, repeats) = options.head_chunks, split_heads(options, q.shape[1], k.shape[1], degree)
    of_kv = k.shape[1] * repeats // degree
    if wanted and chunks != wanted:
        near = max(n for n in range(1, wanted) if of_kv % n == 0)
        expected, hint = f"a divisor of the {of_kv} kv heads of a rank", f"head_chunks={near} works, or method='ring'"
        refuse(f"method={options.method!r}: head_chunks", expected, wanted, hint)
    k_h, v_h = (x._replace(shape=torch.Size((x.shape[0], of_kv, *x.shape[2:]))) for x in (k, v))
    staged = settle_stages(options, q, k_h, v_h, schedule, kernel, features, degree)
    return UlyssesSettings(*staged, q.dtype if repeats == 1 else accumulation_dtype(q.dtype))


def split_heads(options: Options, num_heads: int, num_kv_heads: int, degree: int) -> tuple[int, int]:
    """The chunks of a rank's heads, 1 where they do not divide these, and how often each kv head is sent."""
    per_kv_head, of_rank = num_heads // num_kv_heads, num_heads // degree
    group = math.gcd(per_kv_head, of_rank)  # consecutive query heads that read one kv head, on every rank alike
    chunks = options.head_chunks or 1
    return 1 if of_rank // group % chunks else chunks, per_kv_head // group


def costs(schedule: Schedule, setup: Setup, machine: Machine) -> tuple[PassCost, PassCost]:
    """See `Method.costs`."""
    if setup.degree == 1:
        return costs_of_stages(schedule, setup, machine)
    return ulysses_costs(
        schedule, setup.degree, setup.cp_size, setup.sizes, machine, setup.kernel.name, setup.head_chunks,
        pieces=setup.pieces if setup.pieces <= FEW else 0, collective=setup.inner_transport == "functional",
    )  # fmt: skip


def memory(schedule: Schedule, setup: Setup) -> ExtraMemory:
    """See `Method.memory`."""
    if setup.degree == 1:
        return memory_of_stages(schedule, setup)
    one_tile = as_one_tile(setup.kernel, schedule, setup.features)
    of_kernel = one_tile, setup.kernel.uses_delta, setup.kernel.rounds
    of_call = setup.degree, setup.sizes, setup.head_chunks, setup.inner_transport
    return ulysses_memory(schedule, *of_call, *of_kernel, outer=setup.transport)


ULYSSES = Method(
    "ulysses", choose_degree, schedule_of_groups, settle, forward_by_stages, backward_by_stages, costs, memory,
    swaps=True,
)  # fmt: skip
