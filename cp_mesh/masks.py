"""Mask: who may attend to whom, said on positions.

Two faces. `Mask.allowed` is the specification: a boolean for every (query position, key position). `Mask.tile`
classifies a block of rows against a block of keys for the schedule: between two runs of equal stride s, a causal or
windowed mask bounds the distance ``q_pos - k_pos = (a - b) + s·(i - j)``, so in local indices it is exactly a band
``lo <= i - j <= hi``, which stock kernels take directly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Literal

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_scalar

from cp_mesh.errors import ArgumentError
from cp_mesh.layouts import Piece, Run


@dataclass(frozen=True)
class Band:
    """Pairs of local indices with ``lo <= i - j <= hi``; None is unbounded. ``Band(0, None)`` is causal."""

    lo: int | None = None
    hi: int | None = None

    def allowed(self, q_rows: Tensor, k_rows: Tensor) -> Tensor:
        """bool [len(q_rows), len(k_rows)] from int64 local indices."""
        distance = q_rows[:, None] - k_rows[None, :]
        keep = torch.ones_like(distance, dtype=torch.bool)
        if self.lo is not None:
            keep &= distance >= self.lo
        if self.hi is not None:
            keep &= distance <= self.hi
        return keep

    def count(self, num_q: int, num_k: int) -> int:
        """Number of allowed pairs in a ``num_q`` by ``num_k`` tile."""
        lo = -num_k if self.lo is None else self.lo
        above = 0 if self.hi is None else _pairs_from(self.hi + 1, num_q, num_k)
        return max(0, _pairs_from(lo, num_q, num_k) - above)


def _pairs_from(bound: int, num_q: int, num_k: int) -> int:
    """Number of (i, j) with ``i - j >= bound``: the sum over keys j of clip(num_q - bound - j, 0, num_q)."""

    def triangle(n: int) -> int:
        return n * (n + 1) // 2 if n > 0 else 0

    def ramp(n: int) -> int:  # sum over j in range(num_k) of max(0, n - j)
        return triangle(n) - triangle(n - num_k)

    return ramp(num_q - bound) - ramp(-bound)


FULL = Band()
CAUSAL = Band(0, None)
EMPTY: Literal["empty"] = "empty"
PARTIAL: Literal["partial"] = "partial"  # only Mask.allowed tells which pairs
Cover = Band | Literal["empty", "partial"]


@dataclass(frozen=True, eq=False)
class Mask:
    """A conjunction of conditions on (query position p, key position t).

    A mask copies its tensors when it is made: what is later written to the caller's changes nothing, so that a data
    loader may fill its buffer with the next batch while the backward of this one runs. Make a mask for each batch.

    Args:
        causal: t <= p, relaxed by ``prefix``.
        window: ``(left, right)`` inclusive distances in tokens, None unlimited: ``p - t <= left``, ``t - p <= right``.
        documents: integer ids [B, S] or [S] of the *whole* sequence in original order, the same on every cp rank:
            id[p] == id[t]. Ids compare by equality only. On the CPU they let the schedule skip what is masked,
            and fast kernels take them as sequences, unless an id comes back after another.
        key_padding: bool [B, S] or [S] of the whole sequence, True = keep; applies to keys only.
        prefix: keys at positions below it are visible to all queries, whatever ``causal`` says (window still applies).
        length: keys at positions >= length are padding that no query sees. None: there is no padding.

    Raises:
        ArgumentError: on negative bounds, wrong shapes or dtypes, or a prefix without causal.

    >>> import torch; r = torch.arange(3)
    >>> Mask(causal=True).allowed(r, r)[0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """

    causal: bool = True
    window: tuple[int | None, int | None] | None = None
    documents: Tensor | None = None
    key_padding: Tensor | None = None
    prefix: int = 0
    length: int | None = None

    def __post_init__(self) -> None:
        window = self.window
        if not isinstance(self.causal, bool):
            raise ArgumentError(
                f"Mask: expected True or False for causal, got {self.causal!r}; Mask(causal=False) sees all"
            )
        if window is not None and (not isinstance(window, tuple) or len(window) != 2):
            raise ArgumentError(
                f"Mask: expected a tuple window=(left, right), got {window!r}; (1023, 0) is a causal window of 1024"
                " tokens, None an unlimited side"
            )
        for name, value in (("prefix", self.prefix), ("length", self.length), *(("window", x) for x in window or ())):
            absent = value is None and name != "prefix"
            if not absent and (isinstance(value, bool) or not isinstance(value, int | torch.SymInt)):
                raise ArgumentError(f"Mask: expected an int for {name}, in tokens, got {value!r}; round it first")
        if window is not None and any(bound is not None and bound < 0 for bound in window):
            raise ArgumentError(
                f"Mask: expected window bounds >= 0 (inclusive distances in tokens), got {window}; "
                "use None for an unlimited side"
            )
        if self.prefix < 0 or (self.length is not None and self.length < 0):
            raise ArgumentError(f"Mask: expected prefix >= 0 and length >= 0, got {self.prefix} and {self.length}")
        if self.prefix and not self.causal:
            raise ArgumentError("Mask: prefix relaxes causal, got prefix with causal=False; leave prefix at 0")
        documents, key_padding = self.documents, self.key_padding
        for name, tensor in (("documents", documents), ("key_padding", key_padding)):
            if tensor is not None and not isinstance(tensor, Tensor):
                raise ArgumentError(
                    f"Mask: expected a tensor for {name}, got {type(tensor).__name__}; use torch.tensor"
                )
        if documents is not None and (documents.ndim not in (1, 2) or documents.dtype not in _ID_DTYPES):
            raise ArgumentError(
                f"Mask: expected integer documents [B, S] or [S], got {documents.dtype} {tuple(documents.shape)}; "
                "for cumulative lengths use Mask.from_cu_seqlens"
            )
        if key_padding is not None and (key_padding.ndim not in (1, 2) or key_padding.dtype != torch.bool):
            raise ArgumentError(
                f"Mask: expected bool key_padding [B, S] or [S] (True = keep), got {key_padding.dtype} "
                f"{tuple(key_padding.shape)}; an additive mask is `mask == 0`"
            )
        # NumPy, or another process, writes to memory that it shares with a tensor unseen by autograd.
        for name, tensor in (("documents", documents), ("key_padding", key_padding)):
            if tensor is not None and not hasattr(tensor, _OWNED):  # some mask's already, as in dataclasses.replace
                own = tensor.detach().clone()
                if not torch.compiler.is_compiling():
                    setattr(own, _OWNED, True)
                object.__setattr__(self, name, own)

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: Tensor,
        *,
        causal: bool = True,
        window: tuple[int | None, int | None] | None = None,
    ) -> Mask:
        """Documents from cumulative lengths [num_docs + 1], starting at 0 and ending at the sequence's length.

        Reads the last entry on the host: build the mask once per batch, from a CPU tensor.

        Args:
            cu_seqlens: integers [num_docs + 1], non-decreasing; a repeated entry is an empty document.
            causal, window: as in `Mask`.

        Returns:
            A mask with ``documents`` [S] on the device of ``cu_seqlens``.

        Raises:
            ArgumentError: if ``cu_seqlens`` is not of that form.
        """
        if not isinstance(cu_seqlens, Tensor):
            got = type(cu_seqlens).__name__
            raise ArgumentError(f"Mask.from_cu_seqlens: expected a tensor [num_docs + 1], got {got}; use torch.tensor")
        if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2 or cu_seqlens.dtype not in _ID_DTYPES:
            raise ArgumentError(
                f"Mask.from_cu_seqlens: expected an integer tensor [num_docs + 1], got {cu_seqlens.dtype} "
                f"{tuple(cu_seqlens.shape)}"
            )
        if int(cu_seqlens[0]) != 0 or bool((cu_seqlens.diff() < 0).any()):
            raise ArgumentError(
                "Mask.from_cu_seqlens: expected a non-decreasing tensor starting at 0, got "
                f"{cu_seqlens.tolist()[:4]}...; cumulative lengths start with 0"
            )
        rows = torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device)
        ids = torch.bucketize(rows, cu_seqlens[1:].to(torch.int64), right=True)
        return cls(causal=causal, window=window, documents=ids)

    @property
    def elementwise(self) -> bool:
        """Whether some condition is read from a tensor, so that no tile is a pure band."""
        return self.documents is not None or self.key_padding is not None

    @property
    def host_documents(self) -> bool:
        """Whether tiles can be skipped by documents: ids that are read on the host."""
        return self.documents is not None and self.documents.device.type == "cpu"

    def to(self, device: torch.device) -> Mask:
        """The same mask with its tensors on ``device``."""
        if not self.elementwise:
            return self
        moved = (None if x is None else x.to(device) for x in (self.documents, self.key_padding))
        return _holding(self, *moved)

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """The specification.

        Args:
            q_pos: int64 [Lq] positions of the queries.
            k_pos: int64 [Lk] positions of the keys, on the same device (as the mask's tensors).

        Returns:
            bool [B, Lq, Lk]; B is 1 where nothing depends on the batch.
        """
        distance = q_pos[:, None] - k_pos[None, :]
        keep = torch.ones_like(distance, dtype=torch.bool)
        if self.causal:
            keep &= (distance >= 0) | (k_pos < self.prefix)[None, :]
        if self.window is not None:
            left, right = self.window
            if left is not None:
                keep &= distance <= left
            if right is not None:
                keep &= distance >= -right
        if self.length is not None:
            keep &= (k_pos < self.length)[None, :]
        keep = keep[None]
        if self.documents is not None:
            ids = torch.atleast_2d(self.documents)
            keep = keep & (ids[:, q_pos, None] == ids[:, None, k_pos])
        if self.key_padding is not None:
            keep = keep & torch.atleast_2d(self.key_padding)[:, None, k_pos]
        return keep

    def cuts(self) -> list[int]:
        """Key positions at which the distance condition changes: between two cuts every tile of runs is a band."""
        return sorted({cut for cut in (self.prefix, self.length) if cut})

    def tile(self, q: Piece, k: Piece) -> Cover:
        """Classify the block of rows ``q`` against keys ``k``; neither may be empty.

        `PARTIAL` sends the kernel to `allowed`; `EMPTY` and a `Band` are exact.
        """
        (q_low, q_high), (k_low, k_high) = q.bounds(), k.bounds()
        if self.length is not None and k_low >= self.length:
            return EMPTY
        # distance d = p - t must lie in [d_min, d_max]; None is unbounded
        d_min: int | None = None
        d_max: int | None = None
        if self.window is not None:
            d_max = self.window[0]
            d_min = None if self.window[1] is None else -self.window[1]
        if self.causal and k_high >= self.prefix:
            if k_low < self.prefix and q_low < k_high:  # some keys relaxed, some not: cuts() avoids this for runs
                return self._document_cover(q, k, PARTIAL)
            d_min = 0 if d_min is None else max(0, d_min)
        if (d_min is not None and q_high - k_low < d_min) or (d_max is not None and q_low - k_high > d_max):
            return EMPTY
        if self.length is not None and k_high >= self.length:
            return self._document_cover(q, k, PARTIAL)
        free = (d_min is None or q_low - k_high >= d_min) and (d_max is None or q_high - k_low <= d_max)
        if free:
            return self._document_cover(q, k, FULL)
        if not (isinstance(q, Run) and isinstance(k, Run)):
            return self._document_cover(q, k, PARTIAL)
        stride = k.stride if q.length == 1 else q.stride  # a run of one row has any stride
        if k.length > 1 and k.stride != stride:
            return self._document_cover(q, k, PARTIAL)
        offset = q.start - k.start
        lo = None if d_min is None or q_low - k_high >= d_min else -((offset - d_min) // stride)  # ceil
        hi = None if d_max is None or q_high - k_low <= d_max else (d_max - offset) // stride  # floor
        band = Band(lo, hi)
        return self._document_cover(q, k, band) if band.count(q.length, k.length) else EMPTY

    def near(self, q: Sequence[Piece], k: Sequence[Piece]) -> Iterable[tuple[int, int]]:
        """Candidate pairs (j, i) of pieces k[j] and q[i], by key piece; provably empty ones are left out.

        With hundreds of pieces most pairs are empty, and asking `tile` of each would take seconds.
        """
        if len(q) * len(k) < 256:
            return product(range(len(k)), range(len(q)))
        (q_low, q_high), (k_low, k_high) = (torch.tensor([piece.bounds() for piece in side]).T for side in (q, k))
        apart = torch.zeros(len(k), len(q), dtype=torch.bool)
        if self.causal:
            apart |= (k_low[:, None] > q_high) & (k_low >= self.prefix)[:, None]
        left, right = self.window or (None, None)
        if left is not None:
            apart |= q_low - k_high[:, None] > left
        if right is not None:
            apart |= k_low[:, None] - q_high > right
        if self.host_documents:
            (q_low, q_high), (k_low, k_high) = (
                torch.tensor([self._id_ranges(piece) for piece in side]).unbind(2) for side in (q, k)
            )
            apart |= ((q_low > k_high[:, None]) | (q_high < k_low[:, None])).all(2)
        return [(j, i) for j, i in (~apart).nonzero().tolist()]

    def _document_cover(self, q: Piece, k: Piece, cover: Cover) -> Cover:
        """Weaken a cover found from distances by the conditions that live in tensors."""
        if self.host_documents:
            # Ranges of ids are enough to skip tiles of sorted documents, and safe for any ids.
            q_ranges, k_ranges = self._id_ranges(q), self._id_ranges(k)
            if all(q[1] < k[0] or k[1] < q[0] for q, k in zip(q_ranges, k_ranges, strict=True)):
                return EMPTY
        return PARTIAL if self.elementwise else cover

    @cached_property
    def _known_id_ranges(self) -> dict[Piece, list[tuple[int, int]]]:
        return {}

    def _id_ranges(self, piece: Piece) -> list[tuple[int, int]]:
        """Smallest and largest document id of a piece, for every batch row; read once by a mask, so once a plan."""
        if piece not in self._known_id_ranges:
            assert self.documents is not None
            low, high = torch.aminmax(torch.atleast_2d(self.documents)[:, piece.positions()], dim=1)
            self._known_id_ranges[piece] = list(zip(low.tolist(), high.tolist(), strict=True))
        return self._known_id_ranges[piece]

    def spec(self) -> str:
        """The scalar options as a short string; `parse_mask` rebuilds the mask from it and the tensors."""
        left, right = self.window or (None, None)
        return ",".join(
            "" if value is None else str(int(guard_scalar(value)))
            for value in (self.causal, left, right, self.prefix, self.length)
        )


_OWNED = "_cp_mesh_owned"  # set on tensors that a mask copied
_ID_DTYPES = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


def parse_mask(spec: str, documents: Tensor | None, key_padding: Tensor | None) -> Mask:
    """Rebuild a mask from its `Mask.spec` and its tensors."""
    causal, left, right, prefix, length = (int(field) if field else None for field in spec.split(","))
    window = None if left is None and right is None else (left, right)
    return _holding(Mask(bool(causal), window, prefix=prefix or 0, length=length), documents, key_padding)


def _holding(mask: Mask, documents: Tensor | None, key_padding: Tensor | None) -> Mask:
    """The mask with these tensors, of which it makes no copy: they are some mask's already."""
    held = replace(mask, documents=None, key_padding=None)
    object.__setattr__(held, "documents", documents)
    object.__setattr__(held, "key_padding", key_padding)
    return held
