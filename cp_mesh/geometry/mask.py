"""Mask: which query positions may attend to which key positions.

`Mask.allowed` is the specification: a boolean for every (query position, key position). All other code uses that a key
is seen by an interval of query positions, if the documents are equal. `Mask.key_intervals` computes it for each key,
`Mask.reaches` for ranges of keys from the mask's integers alone, as bounds of the distance ``p - t``. Between two runs
of equal stride s that distance is ``(a - b) + s·(i - j)``, so in local indices the pairs are exactly a band, which
stock kernels take directly (`cp_mesh.geometry.block_table`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_scalar

from cp_mesh.errors import ArgumentError, UnsupportedError, as_int, refuse, warn
from cp_mesh.geometry.host_tensors import is_owned, lasting, owned, read_once
from cp_mesh.geometry.layout import Layout


@dataclass(frozen=True)
class Band:
    """Pairs of local indices with ``-left <= j - i - (num_k - num_q) <= right``; None is unbounded.

    This is the ``window_size`` of FlashAttention: the last query is aligned with the last key. ``Band(None, 0)`` is
    causal.
    """

    left: int | None = None
    right: int | None = None

    def allowed(self, q_rows: Tensor, k_rows: Tensor) -> Tensor:
        """Return bool [len(q_rows), len(k_rows)]; ``q_rows`` are int64 indices of the keys aligned with the queries."""
        distance = q_rows[:, None] - k_rows[None, :]
        keep = torch.ones_like(distance, dtype=torch.bool)
        if self.left is not None:
            keep &= distance <= self.left
        if self.right is not None:
            keep &= distance >= -self.right
        return keep


FULL = Band()
CAUSAL = Band(None, 0)
PARTIAL: Literal["partial"] = "partial"  # only Mask.allowed tells which pairs
Cover = Band | Literal["partial"]
EXCLUDED = -1
"""A document id (any negative one is) of tokens that see nothing and are not seen."""
NONE = 1 << 30
"""An integer that means no bound; positions are below it."""
NEVER = 2**31 - 1
"""Above every position: the first query of a key that no query sees."""


class Reach(NamedTuple):
    """Keys at positions ``begin <= t < end`` are seen by queries p with ``nearest <= p - t <= farthest``."""

    begin: int
    end: int
    nearest: int
    farthest: int


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of one sequence as runs of positions.

    Attributes:
        edges: int64 [num_runs + 1], where each run begins, and the end of the sequence.
        labels: int64 [num_runs], the number of the first run that has the same id: runs of one id are one document. -1
            for excluded runs.
        come_back: whether some document has two runs.
    """

    edges: NDArray[np.int64]
    labels: NDArray[np.int64]

    @property
    def come_back(self) -> bool:
        return bool(((self.labels >= 0) & (self.labels != np.arange(len(self.labels)))).any())

    @classmethod
    def of(cls, ids: NDArray[Any]) -> Documents:
        """Make them from the id of each position, [S]."""
        begins = np.append(0, np.flatnonzero(ids[1:] != ids[:-1]) + 1)[: len(ids)]
        _, first, which = np.unique(ids[begins], return_index=True, return_inverse=True)
        return cls(np.append(begins, len(ids)), np.where(ids[begins] < 0, -1, first[which]))


@dataclass(frozen=True, eq=False)
class Mask:
    """A conjunction of conditions on (query position p, key position t).

    A mask copies its tensors to the host when it is made. Later writes to the caller's tensors do not change it, so a
    data loader may fill its buffer with the next batch while the backward of this one runs. Copying a device tensor
    waits for the device, once. Make one mask per batch: its documents are read once, not in every layer.

    Args:
        causal: t <= p, relaxed by ``prefix`` and ``blocks``.
        window: ``(left, right)`` inclusive distances in tokens, None unlimited: ``p - t <= left``, ``t - p <= right``.
        documents: integer ids [B, S] or [S] of the *whole* sequence in original order, the same on every cp rank:
            id[p] == id[t]. Ids compare by equality only. The schedule skips masked tiles, and fast kernels compute
            documents as sequences, unless an id returns after another. A token with a negative id (`Mask.EXCLUDED`)
            is excluded: its query sees nothing, and no query sees its key. Excluded rows have output 0, lse -inf and
            gradients 0, and cost nothing.
        key_padding: bool [B, S] or [S] of the whole sequence, True = keep; applies to keys only.
        prefix: keys at positions below it are visible to all queries, even with ``causal`` (window still applies).
        length: keys at positions >= length are padding that no query sees. None: there is no padding.
        blocks: integer ids [B, S] or [S] of the whole sequence, like ``documents``: tokens with one id, such as those
            of an image, see each other, even with ``causal`` (window, documents and the rest still apply). A negative
            id is no block. Within a document the tokens of a block must be adjacent, or calls are refused.
        layout: the batch's layout, which styles with this mask take: `ShardedModel` and `ShardedSequence.mask` set it,
            `dataclasses.replace` keeps it. None: that of the styles' sequence. It hides no pair.

    Raises:
        ArgumentError: on negative bounds, wrong shapes or dtypes, or a prefix or blocks without causal.

    >>> import torch; r = torch.arange(3)
    >>> Mask(causal=True).allowed(r, r)[0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """

    EXCLUDED: ClassVar[int] = EXCLUDED

    causal: bool = True
    window: tuple[int | None, int | None] | None = None
    documents: Tensor | None = None
    key_padding: Tensor | None = None
    prefix: int = 0
    length: int | None = None
    blocks: Tensor | None = None
    layout: Layout | None = None

    def __post_init__(self) -> None:
        for name in ("window", *NUMBERS):
            given = getattr(self, name)
            object.__setattr__(self, name, tuple(map(as_int, given)) if isinstance(given, tuple) else as_int(given))
        window, numbers = self.window, {name: getattr(self, name) for name in NUMBERS}
        if not isinstance(self.causal, bool):
            refuse("Mask", "True or False for causal", repr(self.causal), "Mask(causal=False) sees all")
        if window is not None and (not isinstance(window, tuple) or len(window) != 2):
            hint = "(1023, 0) is a causal window of 1024 tokens, None an unlimited side"
            refuse("Mask", "a tuple window=(left, right)", repr(window), hint)
        for name, value in (*numbers.items(), *(("window", x) for x in window or ())):
            absent = value is None and NUMBERS.get(name) is None
            if not absent and (isinstance(value, bool) or not isinstance(value, int | torch.SymInt)):
                refuse("Mask", f"an int for {name}, in tokens", repr(value), "round it first")
        if window is not None and any(bound is not None and bound < 0 for bound in window):
            expected = "window bounds >= 0 (inclusive distances in tokens)"
            refuse("Mask", expected, f"{window}", "use None for an unlimited side")
        if any(x is not None and x < 0 for x in numbers.values()):
            expected, got = " and ".join(f"{name} >= 0" for name in numbers), " and ".join(map(str, numbers.values()))
            raise ArgumentError(f"Mask: expected {expected}, got {got}")
        if self.prefix and not self.causal:
            raise ArgumentError("Mask: prefix relaxes causal, got prefix with causal=False; leave prefix at 0")
        if self.blocks is not None and not self.causal:
            raise ArgumentError("Mask: blocks relax causal, got blocks with causal=False; leave blocks out")
        if self.blocks is not None and window is not None and window[1] == 0:
            hint = f"with blocks use window=({window[0]}, None) as a causal one"
            refuse("Mask", "a window that lets blocks see later keys", f"window={window}", hint)
        if not isinstance(self.layout, Layout | None):
            refuse("Mask", "a Layout", repr(self.layout), "ShardedModel and ShardedSequence.mask set it")
        for name, (dtypes, expected, hint) in TENSORS.items():
            if (x := getattr(self, name)) is None:
                continue
            if not isinstance(x, Tensor):
                refuse("Mask", f"a tensor for {name}", type(x).__name__, "use torch.tensor")
            if x.ndim not in (1, 2) or x.dtype not in dtypes:
                refuse("Mask", expected, f"{x.dtype} {tuple(x.shape)}", hint)
            if not is_owned(x):  # else another mask's, as in dataclasses.replace
                object.__setattr__(self, name, owned(x))
                if name == "documents" and not torch.compiler.is_compiling():
                    _warn_of_positions(self.documents)  # type: ignore[arg-type]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the state in a copy or in another process; the tensors become this mask's own."""
        tensors = {name: state[name] for name in TENSORS if state[name] is not None}
        vars(self).update(state | {name: owned(x) for name, x in tensors.items()})

    def __repr__(self) -> str:
        """The Python expression that makes it, with tensors as dtype and shape."""
        said = [f"causal={self.causal}"]
        for name in ("window", *TENSORS, *NUMBERS):
            value = getattr(self, name)
            if isinstance(value, Tensor):
                value = f"{str(value.dtype).removeprefix('torch.')}{[*value.shape]}"
            if value != NUMBERS.get(name):
                said.append(f"{name}={value}")
        return f"Mask({', '.join(said)})"

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: Tensor,
        *,
        causal: bool = True,
        window: tuple[int | None, int | None] | None = None,
    ) -> Mask:
        """Make documents from cumulative lengths [num_docs + 1], which start at 0 and end at the sequence's length.

        Reads the last entry on the host: build the mask once per batch, from a CPU tensor.

        Args:
            cu_seqlens: integers [num_docs + 1], non-decreasing; a repeated entry is an empty document.
            causal, window: as in `Mask`.

        Returns:
            A mask with ``documents`` [S].

        Raises:
            ArgumentError: if ``cu_seqlens`` does not have that form.
        """
        what, expected = "Mask.from_cu_seqlens", "a tensor [num_docs + 1]"
        if not isinstance(cu_seqlens, Tensor):
            refuse(what, expected, type(cu_seqlens).__name__, "use torch.tensor")
        if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2 or cu_seqlens.dtype not in _ID_DTYPES:
            got = f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
            raise ArgumentError(f"{what}: expected an integer tensor [num_docs + 1], got {got}")
        if int(cu_seqlens[0]) != 0 or bool((cu_seqlens.diff() < 0).any()):
            got = f"{cu_seqlens.tolist()[:4]}..."
            refuse(what, "a non-decreasing tensor starting at 0", got, "cumulative lengths start with 0")
        rows = torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device)
        ids = torch.bucketize(rows, cu_seqlens[1:].to(torch.int64), right=True)
        return cls(causal=causal, window=window, documents=ids)

    @property
    def elementwise(self) -> bool:
        """Whether some condition is read from a tensor, so that integers alone do not define a band."""
        return self.documents is not None or self.key_padding is not None or self.blocks is not None

    def to(self, device: torch.device) -> Mask:
        """Return the same mask with its tensors on ``device``."""
        if not self.elementwise:
            return self
        given = (getattr(self, name) for name in TENSORS)
        moved = _holding(
            replace(self, documents=None, key_padding=None, blocks=None),
            *(None if x is None else x.to(device) for x in given),
        )
        if self.blocks is not None:
            vars(moved)["starts"] = self.starts.to(device)
        return moved

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """Return which pairs are allowed: the specification of the mask.

        Args:
            q_pos: int64 [Lq] positions of the queries.
            k_pos: int64 [Lk] positions of the keys, on the same device.

        Returns:
            bool [B, Lq, Lk]; B is 1 where nothing depends on the batch.
        """
        distance = q_pos[:, None] - k_pos[None, :]
        keep = torch.ones_like(distance, dtype=torch.bool)
        if self.causal:
            keep &= (distance >= 0) | (k_pos < self.prefix)[None, :]
        keep = keep[None]
        if self.blocks is not None:
            ids = torch.atleast_2d(self.blocks).to(q_pos.device)
            keep = keep | (ids[:, q_pos, None] == ids[:, None, k_pos]) & (ids[:, None, k_pos] >= 0)
        if self.window is not None:
            left, right = self.window
            if left is not None:
                keep &= distance <= left
            if right is not None:
                keep &= distance >= -right
        if self.length is not None:
            keep &= (k_pos < self.length)[None, :]
        if self.documents is not None:
            ids = torch.atleast_2d(self.documents).to(q_pos.device)
            keep = keep & (ids[:, q_pos, None] == ids[:, None, k_pos]) & (ids[:, None, k_pos] >= 0)
        if self.key_padding is not None:
            keep = keep & torch.atleast_2d(self.key_padding).to(k_pos.device)[:, None, k_pos]
        return keep

    def reaches(self, seq_len: int) -> tuple[Reach, ...]:
        """Return the distances at which keys are seen, as set by the mask's integers alone.

        Blocks then add pairs, and documents and key padding remove pairs.

        Args:
            seq_len: tokens in the whole sequence.

        Returns:
            Reaches of adjacent ranges of keys from position 0 on; keys after the last range are hidden.
        """
        left = None if self.window is None else self.window[0]
        end = seq_len if self.length is None else min(self.length, seq_len)
        edges = sorted(min(edge, end) for edge in (0, self.prefix, end))
        return tuple(
            Reach(
                begin,
                after,
                nearest=0 if self.causal and begin >= self.prefix else -self._ahead,
                farthest=NONE if left is None else min(left, NONE),
            )
            for begin, after in pairwise(edges)
            if begin < after
        )

    def hides_earlier(self) -> bool:
        """Return whether the mask's integers may hide a key from a query at a later position."""
        reaches = self.reaches(NONE)
        return not reaches or reaches[-1].end < NONE or any(r.farthest < NONE or r.nearest > 0 for r in reaches)

    @property
    def _ahead(self) -> int:
        """How many tokens later than its query a key may be where causal is relaxed, `NONE` at most."""
        right = None if self.window is None else self.window[1]
        return NONE if right is None else min(right, NONE)

    def key_intervals(self, k_pos: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return which queries see each key: positions ``first <= p <= last``, if their `document_ids` are equal.

        Args:
            k_pos: int64 [Lk] positions of the keys, below `NEVER`, on the device of this mask's tensors.

        Returns:
            first and last, int32 [B or 1, Lk], `NEVER` and ``-NEVER`` for keys that no query sees; and document ids.
        """
        ids, end = self.document_ids(k_pos), 0
        first = last = k_pos[None]
        for reach in self.reaches(NEVER):
            near = reach.nearest if reach.nearest > -NONE else -NEVER
            far = reach.farthest if reach.farthest < NONE else NEVER
            before, end = (k_pos < reach.begin) if reach.begin else None, reach.end
            first = k_pos[None] + near if before is None else torch.where(before, first, k_pos + near)
            last = k_pos[None] + far if before is None else torch.where(before, last, k_pos + far)
        if self.blocks is not None:
            first = torch.minimum(first, self.starts[:, k_pos])
        kept = [k_pos < end] if end < NEVER else []
        kept += [] if ids is None else [ids >= 0]
        kept += [] if self.key_padding is None else [torch.atleast_2d(self.key_padding)[:, k_pos]]
        for x in kept:
            first, last = first.where(x, NEVER), last.where(x, -NEVER)
        first, last = torch.broadcast_tensors(first, last)
        return first.int(), last.clamp(max=NEVER).int(), ids

    def document_ids(self, positions: Tensor) -> Tensor | None:
        """Return the document id of each position, int32 or int64 [B or 1, L]; None without documents."""
        if self.documents is None:
            return None
        ids = torch.atleast_2d(self.documents)[:, positions]
        return ids if ids.dtype == torch.int64 else ids.int()

    def runs(self) -> tuple[Documents, ...]:
        """Return the documents of each batch row (one entry if all rows share them), cached after the first read.

        Raises:
            ArgumentError: if the ids have no content (meta tensors).
        """
        assert self.documents is not None
        return read_once(self.documents, _read_documents)

    @cached_property
    def starts(self) -> Tensor:
        """The first position whose query sees the key of each position by its block: int32 [B or 1, S].

        This is the begin of its block, or as near to it as a window allows; without a block the position itself.

        Raises:
            UnsupportedError: if a block returns after other tokens in its document.
        """
        assert self.blocks is not None
        blocks = torch.atleast_2d(self.blocks).to(torch.int64)
        documents = torch.zeros_like(blocks[:, :1]) if self.documents is None else torch.atleast_2d(self.documents)
        blocks, documents = torch.broadcast_tensors(blocks, documents.to(torch.int64))
        new = torch.ones_like(blocks, dtype=torch.bool)
        new[:, 1:] = (blocks.diff(dim=1) != 0) | (documents.diff(dim=1) != 0) | (blocks[:, 1:] < 0)
        first = new & (blocks >= 0) & (documents >= 0)
        begins = torch.stack([first.nonzero()[:, 0], blocks[first], documents[first]], 1)
        found, counts = begins.unique(dim=0, return_counts=True)
        if (counts > 1).any():
            _, block, document = found[counts > 1][0].tolist()
            got = f"block {block} comes back" + (f" in document {document}" if self.documents is not None else "")
            hint = "give each part its own id; if the parts must see each other, use a mask_mod with flex_attention"
            refuse("Mask.blocks", "adjacent tokens in each block", got, hint, UnsupportedError)
        positions = torch.arange(new.shape[1], dtype=torch.int32, device=new.device)
        with lasting():
            return positions.where(new, 0).cummax(1).values.maximum(positions - self._ahead)

    def spec(self) -> str:
        """Return the scalar options as a short string; `parse_mask` rebuilds the mask from it and the tensors."""
        left, right = self.window or (None, None)
        values = [self.causal, left, right]
        for name in NUMBERS:  # faster than a generator, which costs a call per entry
            values.append(getattr(self, name))
        return ",".join(["" if x is None else str(int(guard_scalar(x))) for x in values])


def _warn_of_positions(ids: Tensor) -> None:
    """Warn if document ids look like position ids: they would make one document of each position."""
    if ids.is_meta or type(ids) is not Tensor or ids.shape[-1] < 8 or not len(ids):
        return
    rows = torch.atleast_2d(ids)
    if not bool((rows[:, :3] == torch.arange(3, device=ids.device)).all()):
        return
    if bool(((rows.diff(dim=1) == 1) | (rows[:, 1:] == 0)).all()):
        warn(
            "Mask(documents=) has ids 0, 1, 2, ... for consecutive tokens, which look like position_ids: each "
            "token would see only tokens with its own position. Use batch_mask(position_ids=) to make documents"
        )


def _read_documents(ids: Tensor) -> tuple[Documents, ...]:
    return tuple(Documents.of(row) for row in torch.atleast_2d(ids).numpy())


_ID_DTYPES = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)
TENSORS: dict[str, tuple[tuple[torch.dtype, ...], str, str]] = {
    "documents": (_ID_DTYPES, "integer documents [B, S] or [S]", "for cumulative lengths use Mask.from_cu_seqlens"),
    "key_padding": ((torch.bool,), "bool key_padding [B, S] or [S] (True = keep)", "an additive mask is `mask == 0`"),
    "blocks": (_ID_DTYPES, "integer blocks [B, S] or [S]", "-1 is a token of no block"),
}
"""By name: dtypes, and what errors say."""
NUMBERS: dict[str, int | None] = {"prefix": 0, "length": None}
"""With default values. Append new ones at the end: saved programs hold shorter strings of `Mask.spec`."""


def parse_mask(spec: str, documents: Tensor | None, key_padding: Tensor | None, blocks: Tensor | None) -> Mask:
    """Rebuild a mask from its `Mask.spec` and its tensors."""
    causal, left, right, *given = (int(field) if field else None for field in spec.split(","))
    window = None if left is None and right is None else (left, right)
    if len(given) > len(NUMBERS):  # an unknown condition must not be dropped
        hint = "export or compile the model again"
        refuse("a saved program's mask", f"{len(NUMBERS)} numbers", len(given), hint, UnsupportedError)
    numbers: dict[str, Any] = dict(zip(NUMBERS, given, strict=False))
    return _holding(Mask(bool(causal), window, **numbers), documents, key_padding, blocks)


def _holding(mask: Mask, *tensors: Tensor | None) -> Mask:
    """Give a mask without tensors these tensors, which are not copied: another mask owns them already."""
    for name, x in zip(TENSORS, tensors, strict=True):
        object.__setattr__(mask, name, x)
    return mask
