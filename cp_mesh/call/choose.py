"""The method that "auto" takes for a call, by a rule over numbers that all ranks know before they plan.

The rule comes from measurements: calls on 2 H200s (docs/results/methods_2xh200.csv), and one GPU that ran the work of
one of 8 ranks (docs/results/played_methods_h200.csv), at 1K, 4K and 16K rows per rank. On 2 ranks the ring is fastest
or within a few per cent. On 8 ranks, ms of both passes, for calls in a row:

    heads, rows         mask         ring   all-gather   Ulysses   hybrid
    32/8, 1K            causal       3.01         2.73      3.02     3.80
    32/8, 1K            documents    3.02         2.26      2.12     3.13
    32/8, 4K            causal       7.23         7.56      7.24     7.49
    32/32, 1K           causal       2.62         2.57      2.24     2.68
    32/32, 4K           causal       8.32        10.30      7.70     8.20
    32/32, 16K          causal     104.55       108.87    104.54   105.84
    32/8, 1K            window       3.34         3.46      2.75     3.68
    32/32, 4K           window       2.30         2.29      3.35     4.27

With few rows host time dominates, and all-gather has the fewest stages. With as many kv heads as query heads, up to 4K
rows, keys arrive later than the ring needs them; Ulysses sends each row once. With a window few rows are sent: Ulysses
is ahead only where host time dominates, and in CUDA graphs the ring is. The hybrid was never the fastest. Thresholds
lie midway between measured sizes. docs/performance.md compares the rule with the fastest method.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch.distributed as dist

from cp_mesh.call.spec import AttentionSpec, Operand
from cp_mesh.geometry.mask import parse_mask

DEFAULT = "ring"
LEAST_RANKS = 8
FEW_ROWS, SOME_ROWS = 2048, 8192
"""The most rows of a rank, over all its batch rows, for which all-gather is taken, and for which Ulysses is."""


class Choice(NamedTuple):
    """The method that "auto" takes, and the reason."""

    method: str
    why: str


def choose(
    q: Operand,
    k: Operand,
    tensors: Sequence[object],
    scored: bool,
    seq_len: int,
    cp_size: int,
    num_hosts: int,
    options: AttentionSpec,
) -> Choice:
    """The method for a call; it must not depend on anything that differs between ranks.

    Args:
        q, k: [B, H, any, D] on a rank; their number of rows is not read, as shards may be unequal.
        tensors: those of the mask and the layout; only their presence matters.
        seq_len, options: of the call.
        scored: whether the call has score terms, a softcap or functions.
        cp_size: number of ranks.
        num_hosts: number of hosts of the ranks; 0 if unknown.
    """
    heads, kv_heads, rows = q.shape[1], k.shape[1], q.shape[0] * seq_len // cp_size
    if q.device.type != "cuda" or q.dtype.itemsize != 2:
        return Choice(DEFAULT, "others were measured on GPUs in half precision alone")
    if num_hosts != 1 or options.transport == "functional":
        return Choice(DEFAULT, "others were measured over symmetric memory on one host alone")
    if scored:
        return Choice(DEFAULT, "others were measured without score terms alone")
    if cp_size < LEAST_RANKS or rows > SOME_ROWS:
        return Choice(DEFAULT, f"others are faster from {LEAST_RANKS} ranks on, up to {SOME_ROWS} rows a rank")
    mask = parse_mask(options.mask, None, None, None)
    if mask.window is not None:
        return Choice(DEFAULT, "others are slower with a window, in CUDA graphs")
    plain = mask.causal and all(x is None for x in tensors) and options.layout in ("contiguous", "zigzag")
    if plain and heads == kv_heads and heads % cp_size == 0 and not options.head_chunks:
        return Choice("ulysses", f"as many kv heads as query heads, up to {SOME_ROWS} rows a rank")
    if rows <= FEW_ROWS:
        return Choice("all_gather", f"up to {FEW_ROWS} rows a rank")
    return Choice(DEFAULT, f"more than {FEW_ROWS} rows a rank")


def ranks_by_host(group: dist.ProcessGroup) -> list[int]:
    """The number of a group's ranks on each host, from torchrun's LOCAL_WORLD_SIZE; empty if that is not set.

    Assumes that ranks of a host are consecutive. If hosts have different LOCAL_WORLD_SIZEs, ranks may get different
    numbers; the first call of a kind compares the resulting choice between ranks.
    """
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not told.isdecimal() or int(told) < 1:
        return []
    ranks = dist.get_process_group_ranks(group)
    return [len([*of_host]) for _, of_host in groupby(rank // int(told) for rank in ranks)]
