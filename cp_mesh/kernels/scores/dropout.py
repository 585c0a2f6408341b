"""Which weights dropout keeps: a function of `Scores.dropout_seed`, and of the weight's batch row, head and positions.

The weight of batch row b, head h, query position p and key position t is dropped if the word of this pair is below
floor(dropout_p * 2**32). Words come from Philox-4x32-10 (Salmon et al. 2011, doi:10.1145/2063384.2063405) with key =
(low, high 32 bits of seed). A query has the first two words, x and y, of counter (p, 0, h, b + offset) modulo 2**32; a
key has the first word, z, of counter (t, 1, 0, 0). The pair's word is (u ^ u >> 15 ^ y) · 0x846CA68B modulo 2**32, with
u = (x ^ z) · 0x7FEB352D: one step of the hash lowbias32 (github.com/skeeto/hash-prospector).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cp_mesh.kernels.scores import Scores


def philox(key: Sequence[Tensor], counter: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Four 32-bit words from a key of two words and a counter of four, each the low bits of int64; they broadcast."""
    low = 0xFFFFFFFF
    k0, k1 = (x & low for x in key)
    c0, c1, c2, c3 = (x & low for x in counter)
    for _ in range(10):
        # the low 64 bits of a product are the same for int64 and uint64
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) & low ^ c1 ^ k0, b & low, (a >> 32) & low ^ c3 ^ k1, a & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c0, c1, c2, c3


def kept_weights(scores: Scores, num_batch: int, num_heads: int, q_pos: Tensor, k_pos: Tensor) -> Tensor:
    """Which weights dropout keeps, bool [B, H, rows, keys]."""
    assert scores.dropout_seed is not None
    low, zero = 0xFFFFFFFF, torch.zeros((), dtype=torch.int64, device=q_pos.device)
    seed, offset = scores.dropout_seed.unbind()
    heads = torch.arange(scores.first_head, scores.first_head + num_heads, device=q_pos.device)[:, None, None]
    batches = torch.arange(scores.first_batch, scores.first_batch + num_batch, device=q_pos.device)
    key = seed, seed >> 32
    x, y, *_ = philox(key, (q_pos[:, None], zero, heads, batches[:, None, None, None] + offset))
    z, *_ = philox(key, (k_pos, zero + 1, zero, zero))
    word = (x ^ z) * 0x7FEB352D & low
    word = (word ^ word >> 15 ^ y) * 0x846CA68B & low
    return word >= math.floor(scores.dropout_p * 2**32)
