"""The bytes that a recurrent layer sends, by either method: what "auto" goes by."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch

from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.mixers.pieces import Ints, Pieces


class Sizes(NamedTuple):
    """What a layer's tensors have, with the names of `gated_delta_rule`; ``decays``: numbers of g for each head."""

    B: int
    H: int
    HV: int
    K: int
    V: int
    decays: int
    delta: bool
    dtype: torch.dtype


class Sent(NamedTuple):
    """Bytes that each rank sends to others in a forward and in a backward: int64 [cp_size]."""

    forward: Ints
    backward: Ints

    @property
    def most(self) -> int:
        """Of both passes, on the rank that sends most."""
        return int((self.forward + self.backward).max())


def sent_by_states(pieces: Pieces, sizes: Sizes) -> Sent:
    """A gather, whose shards are padded to the largest, and its reduce-scatter."""
    _, _, HV, K, V, decays, delta, dtype = sizes
    of_a = (K * K if delta else max(1, decays)) * bool((pieces.sends & pieces.receives).any())
    numbers = HV * (of_a + K * V)
    size, most = len(pieces.shard_lens), np.bincount(pieces.rank[pieces.sends]).max(initial=0)
    each = np.full(size, (size - 1) * int(most) * numbers * accumulation_dtype(dtype).itemsize)
    return Sent(each, each)


def sent_by_heads(pieces: Pieces, sizes: Sizes) -> Sent:
    """All-to-alls of what a rule reads, and of what it returns."""
    B, H, HV, K, V, decays, delta, dtype = sizes
    wide = accumulation_dtype(dtype).itemsize
    given = B * ((2 * H * K + HV * V + HV * delta) * dtype.itemsize + HV * decays * wide)
    found, lens, size = B * HV * V * dtype.itemsize, np.array(pieces.shard_lens), len(pieces.shard_lens)
    own, others = lens * (size - 1), pieces.seq_len - lens  # rows of all other heads, rows of these heads
    return Sent((own * given + others * found) // size, (others * given + own * found) // size)


def choose_method(pieces: Pieces, sizes: Sizes) -> Literal["states", "heads"]:
    """What sends less."""
    if sizes.H % len(pieces.shard_lens):
        return "states"
    return "heads" if sent_by_heads(pieces, sizes).most < sent_by_states(pieces, sizes).most else "states"
