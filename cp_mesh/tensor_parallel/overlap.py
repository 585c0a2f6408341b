"""Overlap of communication and matmuls in tensor-parallel linears: where it pays, and over which transport.

The first call of a linear loads this file and the transports. Registering the ops needs neither.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from cp_mesh.comm.exchange import choose_transport
from cp_mesh.comm.shards import Shards
from cp_mesh.tensor_parallel.moves import FunctionalMoves
from cp_mesh.tensor_parallel.symmetric_moves import SymmetricMoves

PRODUCT_RATE = 650e12
"""FLOP/s of long bf16 matmuls on an H200. On slower GPUs and in fp32 matmuls take longer than this predicts, so some
are not split although it would pay."""
LINK_RATE = 280e9
PER_PRODUCT, PER_BARRIER = 8.8e-6, 5.1e-6
"""Seconds that splitting a matmul in two costs, and of a barrier of two ranks, measured on H200s."""
HOST_WAITS = 1e-3
"""Seconds of matmuls, by `PRODUCT_RATE`, below which the device would wait for the host, which has more to do if they
are split. On two H100s blocks of a Llama were faster unsplit with linears of up to 0.74 ms (feed-forward layers of 8B
at 4K rows), and split with 1.5 ms or more, as at 16K rows (docs/results/linears_2xh100.csv)."""


def chosen_transport(
    shards: Shards, transport: str, x: Tensor, widths: tuple[int, int], num_products: int
) -> str | None:
    """The transport for rows that travel beside matmuls, or None for one collective before or after all matmuls.

    Each rank's rows of x [..., rows, D] travel with ``widths[0]`` features; ``widths[1]`` is the other feature dim of
    their matmuls, on the rank that has most. Overlap hides the shorter of a rank's matmul time and its transfer time.
    It costs further matmuls for each other rank, two barriers, and host time, for which short matmuls would wait. With
    transport="symmetric_memory" it is used even where it does not pay. It needs equal shards.
    """
    size = shards.group.size()
    if size == 1:
        return None
    chosen = choose_transport(transport, shards.group, x.device) if transport == "symmetric_memory" else None
    if shards.num_rows % size:
        return None
    own = x.shape[:-2].numel() * shards.num_rows // size * widths[0]
    products = 2 * own * widths[1] / PRODUCT_RATE
    hidden = min(products, (size - 1) * own * x.itemsize / LINK_RATE)
    costs = (size - 1) * num_products * PER_PRODUCT + 2 * PER_BARRIER
    if chosen is None and hidden > costs and size * products > HOST_WAITS:
        chosen = choose_transport(transport, shards.group, x.device)
    return chosen


@contextmanager
def moving(chosen: str, shards: Shards, device: torch.device) -> Iterator[FunctionalMoves | SymmetricMoves]:
    moves = SymmetricMoves(shards, device) if chosen == "symmetric_memory" else FunctionalMoves(shards)
    try:
        yield moves
    finally:
        moves.close()
