"""The bytes that a recurrent layer sends, by either method: what "auto" goes by, and `explain`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch

from cp_mesh.errors import refuse
from cp_mesh.geometry.layouts import Layout, ZigZag
from cp_mesh.geometry.mask import Mask
from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.mixers.pieces import Ints, Pieces, pieces_in


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
    numbers = HV * ((K * K if delta else max(1, decays)) + K * V)
    return _gathered(pieces, np.bincount(pieces.rank[pieces.sends]), numbers * accumulation_dtype(dtype).itemsize)


def sent_by_heads(pieces: Pieces, sizes: Sizes) -> Sent:
    """All-to-alls of what a rule reads, and of what it returns."""
    B, H, HV, K, V, decays, delta, dtype = sizes
    wide = accumulation_dtype(dtype).itemsize
    given = B * ((2 * H * K + HV * V + HV * delta) * dtype.itemsize + HV * decays * wide)
    found, lens, size = B * HV * V * dtype.itemsize, np.array(pieces.shard_lens), len(pieces.shard_lens)
    own, others = lens * (size - 1), pieces.seq_len - lens  # rows of all other heads, rows of these heads
    return Sent((own * given + others * found) // size, (others * given + own * found) // size)


def sent_by_convolution(pieces: Pieces, width: int, row: int) -> Sent:
    """A gather of rows beside pieces, of so many bytes each."""
    return _gathered(pieces, np.array(pieces.halo_of(width - 1, 0).sent.lens), row)


def _gathered(pieces: Pieces, counts: Ints, num_bytes: int) -> Sent:
    size = len(pieces.shard_lens)
    each = np.full(size, (size - 1) * int(counts.max(initial=0)) * num_bytes)
    return Sent(each, each)


@dataclass(frozen=True, eq=False)
class Explanation:
    """The result of `explain`; ``str(explanation)`` is its text.

    Attributes:
        method: what "auto" takes.
        sent: by "states", by "heads" unless ranks do not divide them, and by "convolution".
        num_states: states that are sent: fragments of documents that go on elsewhere.
        text: the whole text.
    """

    method: str
    sent: dict[str, Sent]
    num_states: int
    text: str

    def __str__(self) -> str:
        return self.text


def explain(
    seq_len: int,
    cp_size: int,
    *,
    heads: int,
    k_dim: int,
    v_dim: int,
    v_heads: int | None = None,
    delta: bool = True,
    decay: Literal["head", "channel"] | None = "head",
    layout: Layout = ZigZag(),  # noqa: B008 - frozen
    mask: Mask | None = None,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    conv_channels: int = 0,
    conv_width: int = 4,
) -> Explanation:
    """Count the bytes that a recurrent layer sends by either method, without a process group or a GPU.

    Args:
        seq_len: tokens of the whole sequence.
        cp_size: number of ranks.
        heads, v_heads: H and HV of `gated_delta_rule`; of `ssd` groups and heads. ``v_heads=None``: as many.
        k_dim, v_dim: K and V; of `ssd` N and P.
        delta: whether it is a delta rule, with a beta.
        decay: of each head, of each channel (`kda`), or none. g is float32, or float64 as the others.
        layout, mask, batch: as in a call.
        dtype: of q, k, v and beta.
        conv_channels, conv_width: of a `causal_conv1d` in the same dtype; 0 channels: none.

    Returns:
        An object to print. Bytes are those that a rank sends to others if all inputs need gradients, without
        ``output_final_state``. No time is predicted.

    Raises:
        ArgumentError: for sizes that do not fit.
        UnsupportedError: as in a call.
    """
    v_heads = v_heads or heads
    if min(seq_len, cp_size, heads, k_dim, v_dim, batch) < 1 or v_heads % heads:
        got = f"{seq_len}, {cp_size}, {heads}, {k_dim}, {v_dim}, {batch} and {v_heads} heads of v"
        refuse("mixers.explain", "sizes of at least 1, v_heads a multiple of heads", got, "see its docs")
    mask = mask or Mask()
    length = seq_len if mask.length is None else min(seq_len, mask.length)
    pieces = pieces_in(layout, mask, seq_len, length, cp_size, 0, batch)
    decays = {None: 0, "head": 1, "channel": k_dim}[decay]
    sizes = Sizes(batch, heads, v_heads, k_dim, v_dim, decays, delta, dtype)
    sent, method = {"states": sent_by_states(pieces, sizes)}, choose_method(pieces, sizes)
    if heads % cp_size == 0:
        sent["heads"] = sent_by_heads(pieces, sizes)
    if conv_channels:
        sent["convolution"] = sent_by_convolution(pieces, conv_width, conv_channels * dtype.itemsize)
    num_states, num = int(pieces.sends.sum()), pieces.num_documents
    lines = [
        f"{layout.spec()} layout, {seq_len} tokens on {cp_size} ranks, {num} document{'s' * (num != 1)}",
        f"method auto = {method}; {num_states} states are sent, from {int(pieces.kept.sum())} fragments",
        f"{'bytes a rank sends, at most':<28}{'forward':>16}{'backward':>16}",
        *(f"{name:<28}{x.forward.max():>16,}{x.backward.max():>16,}" for name, x in sent.items()),
        "No time is predicted.",
    ]
    return Explanation(method, sent, num_states, "\n".join(lines))


def choose_method(pieces: Pieces, sizes: Sizes) -> Literal["states", "heads"]:
    """What sends less."""
    if sizes.H % len(pieces.shard_lens):
        return "states"
    return "heads" if sent_by_heads(pieces, sizes).most < sent_by_states(pieces, sizes).most else "states"
