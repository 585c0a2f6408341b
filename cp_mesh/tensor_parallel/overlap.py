"""Over what rows travel beside products: where it pays, and what moves them.

It is loaded by the first call of a linear, with the transports, which the ops can be registered without.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from cp_mesh.comm.exchange import choose_transport
from cp_mesh.comm.shards import FunctionalMoves, Moves, Shards
from cp_mesh.comm.symmetric_shards import SymmetricMoves

PRODUCT_RATE = 650e12
"""FLOP/s of long products in bf16 on an H200. Where others are slower, and in fp32, products take longer than is
reckoned here, and some go at once that would pay in parts."""
LINK_RATE = 280e9
PER_PRODUCT, PER_BARRIER = 8.8e-6, 5.1e-6
"""Seconds that a product takes longer in two parts, and of a barrier of two ranks: of an H200 too."""
HOST_WAITS = 1e-3
"""Seconds of products, by `PRODUCT_RATE`, below which the device would wait for the host: it is busy longer with parts.
On two H100s blocks of a Llama were faster at once with linears of up to 0.74 ms, those of 8B's feed-forward layer at 4K
rows, and in parts with 1.5 ms or more, as at 16K rows (docs/results/linears_2xh100.md)."""


def chosen_transport(
    shards: Shards, transport: str, x: Tensor, widths: tuple[int, int], num_products: int
) -> str | None:
    """Over what rows travel beside the products of a rank's rows, or None: one collective before or after all products.

    Of each rank's rows of x [..., rows, D], ``widths[0]`` features travel, and ``widths[1]`` are on the other side of
    their products, on the rank that has most. What can be hidden is the shorter of a rank's products and its rows' way;
    it costs further products for each other rank, two barriers, and time of the host, for which short products would
    wait. Symmetric memory that was asked for is taken also where this does not pay. Shards have to be equal.
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
def moving(chosen: str, shards: Shards, device: torch.device) -> Iterator[Moves]:
    moves: Moves = SymmetricMoves(shards, device) if chosen == "symmetric_memory" else FunctionalMoves(shards)
    try:
        yield moves
    finally:
        moves.close()
