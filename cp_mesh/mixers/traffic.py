"""The bytes that each rank sends in a recurrent layer, forward and backward, by either method: "auto" goes by them."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch

from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.mixers.pieces import Ints, Pieces


class StateSizes(NamedTuple):
    """What a layer's tensors have, with the names of `gated_delta_rule`; ``decays``: numbers of g for each head."""

    B: int
    H: int
    HV: int
    K: int
    V: int
    decays: int
    delta: bool
    dtype: torch.dtype


def sent_by_states(pieces: Pieces, sizes: StateSizes) -> Ints:
    """A gather, whose shards are padded to the largest, and its reduce-scatter."""
    _, _, HV, K, V, decays, delta, dtype = sizes
    of_a = (K * K if delta else max(1, decays)) * bool((pieces.sends & pieces.receives).any())
    size, most = len(pieces.shard_lens), np.bincount(pieces.rank[pieces.sends]).max(initial=0)
    return np.full(size, 2 * (size - 1) * int(most) * HV * (of_a + K * V) * accumulation_dtype(dtype).itemsize)


def sent_by_heads(pieces: Pieces, sizes: StateSizes) -> Ints:
    """All-to-alls of what a rule reads, of what it returns, and of the gradients of both."""
    B, H, HV, K, V, decays, delta, dtype = sizes
    given = (2 * H * K + HV * V + HV * delta) * dtype.itemsize + HV * decays * accumulation_dtype(dtype).itemsize
    lens, size = np.array(pieces.shard_lens), len(pieces.shard_lens)
    rows = lens * (size - 1) + pieces.seq_len - lens  # own ones of all other heads, and those of others of these heads
    return rows * B * (given + HV * V * dtype.itemsize) // size


def choose_method(pieces: Pieces, sizes: StateSizes) -> Literal["states", "heads"]:
    """The one by which the rank that sends most sends less."""
    if sizes.H % len(pieces.shard_lens):
        return "states"
    return "heads" if sent_by_heads(pieces, sizes).max() < sent_by_states(pieces, sizes).max() else "states"
