"""Balancing: a layout whose ranks hold equally many tokens and equally much of a mask's work.

Every position weighs the keys that it sees. Documents are dealt to one rank after another, densest against lightest:

1.  A rank takes whole documents from the light end as long as its other tokens, taken from the densest document, keep
    its work at or above its share. Of the next light one it takes all, nothing, or as much as meets the share.
2.  The rest is taken from the two ends of the densest document, as zigzag does within a sequence: later positions weigh
    more, so the number taken from its head sets the work, and is chosen to meet the share. If it has too few tokens it
    is taken whole, and the next densest document goes on.

Its rows are then sorted by position, and neighbours joined. So most documents stay on one rank, and one that is cut
gives a rank one or two runs, the first rank's outermost: a stage is a call or two, as in zigzag. Planning is a pass
over the documents for each rank.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

import torch
from torch import Tensor

from cp_mesh.errors import ArgumentError, UnsupportedError, describe
from cp_mesh.layouts import Balanced, chunk_bounds
from cp_mesh.masks import Mask

Part = tuple[int, int]  # begin, end of positions


def balance(mask: Mask, seq_len: int, cp_size: int) -> Balanced:
    """A layout in which every rank computes an equal share of a mask, made anew for every batch of documents.

    Args:
        mask: its documents, if any, are on the CPU. Rows of a batch share a layout: their work is added up. An id that
            comes back counts as another document.
        seq_len: tokens in the whole sequence.
        cp_size: number of ranks for which it is balanced; the layout is valid for others too.

    Returns:
        A layout with shards of `torch.chunk` sizes: equal where ``cp_size`` divides ``seq_len``.

    Raises:
        ArgumentError: if the documents are not ``seq_len`` tokens.
        UnsupportedError: if the mask has documents on a device, or key padding.

    >>> documents = torch.tensor([0] * 8 + [1] * 2 + [2] * 2 + [3] * 4)
    >>> layout = balance(Mask(documents=documents), 16, 2)
    >>> [layout.positions(16, 2, rank).tolist() for rank in range(2)]
    [[0, 1, 2, 3, 4, 7, 8, 9], [5, 6, 10, 11, 12, 13, 14, 15]]
    """
    if mask.key_padding is not None or (mask.documents is not None and not mask.host_documents):
        what = "key_padding" if mask.key_padding is not None else mask.documents.device  # type: ignore[union-attr]
        raise UnsupportedError(
            describe("balance", "a mask of positions and documents on the CPU", what, "documents.cpu(), no padding")
        )
    if mask.documents is not None and mask.documents.shape[-1] != seq_len:
        hint = "pass their seq_len"
        raise ArgumentError(describe("balance: mask.documents", f"{seq_len} tokens", mask.documents.shape[-1], hint))
    bounds, weights = _documents(mask, seq_len), keys_seen(mask, seq_len)
    work = [0, *weights.cumsum(0).tolist()]
    parts = _light_to_dense([(begin, end) for begin, end in pairwise(bounds) if end > begin], work)
    order: list[Part] = []
    for rank in range(cp_size):
        begin, end = chunk_bounds(seq_len, cp_size, rank)
        left = sum(end - begin for begin, end in parts)
        share = sum(work[end] - work[begin] for begin, end in parts) * (end - begin) / left if left else 0.0
        taken, parts = _take(parts, end - begin, share, work)
        order += _joined(taken)
    return Balanced(
        torch.tensor([(begin, end - begin) for begin, end in order], dtype=torch.int64, device="cpu").view(-1, 2)
    )


def _take(parts: list[Part], tokens: int, share: float, work: list[int]) -> tuple[list[Part], list[Part]]:
    """Parts of ``tokens`` positions in all whose work is near ``share``, and what is left; ``parts`` light to dense."""
    taken: list[Part] = []
    parts = list(parts)
    while tokens and parts:
        dense = parts.pop()
        density = _density(dense, work)
        whole, rest, excess = 0, tokens, tokens * density - share  # if all were of that density
        for part in parts:
            saved = density * _len(part) - _work(part, work)
            if _len(part) > rest or saved > excess:
                break
            whole, rest, excess = whole + 1, rest - _len(part), excess - saved
        # the next light one, as much of it as meets the share
        cut = 0
        if whole < len(parts) and excess > 0:
            saved = density - _density(parts[whole], work)
            cut = min(rest, _len(parts[whole]), round(excess / saved) if saved > 0 else rest)
        if rest - cut > _len(dense):
            taken.append(dense)
            tokens, share = tokens - _len(dense), share - _work(dense, work)
            continue
        options = []
        for size in {0, cut, _len(parts[whole]) if cut else 0}:
            if not 0 <= rest - size <= _len(dense):
                continue
            light, others, is_cut = parts[:whole], parts[whole:], False
            if size:
                some, left = _peel(others[0], size, size * _density(others[0], work), work)
                light, others, is_cut = [*light, *some], [*left, *others[1:]], bool(left)
            wanted = share - sum(_work(part, work) for part in light)
            ends, middle = _peel(dense, rest - size, wanted, work)
            error = abs(sum(_work(part, work) for part in ends) - wanted)
            options.append((max(error, SLACK * share), is_cut, [*light, *ends], [*others, *middle]))
        _, _, chosen, left = min(options, key=lambda option: option[:2])
        return [*taken, *chosen], _light_to_dense(left, work)
    return taken, parts


def _len(part: Part) -> int:
    return part[1] - part[0]


def _work(part: Part, work: list[int]) -> int:
    return work[part[1]] - work[part[0]]


def _density(part: Part, work: list[int]) -> float:
    return _work(part, work) / _len(part)


def _peel(part: Part, tokens: int, wanted: float, work: list[int]) -> tuple[list[Part], list[Part]]:
    """Take ``tokens`` from the head and the tail of a part, so that their work is near ``wanted``: (taken, left)."""
    begin, end = part

    def of_head(head: int) -> int:
        return work[begin + head] - work[begin] + work[end] - work[end - (tokens - head)]

    if of_head(0) >= of_head(tokens):  # the more from the head the less work
        head = bisect_left(range(tokens + 1), -wanted, key=lambda head: -of_head(head))
    else:
        head = bisect_left(range(tokens + 1), wanted, key=of_head)
    nearest = min((max(0, head - 1), min(head, tokens)), key=lambda head: abs(of_head(head) - wanted))
    for whole in (tokens, 0):  # one run is better than two where the work is all but that
        if abs(of_head(whole) - wanted) <= abs(of_head(nearest) - wanted) + SLACK * wanted:
            nearest = whole
            break
    cut, back = begin + nearest, end - (tokens - nearest)
    return _nonempty((begin, cut), (back, end)), _nonempty((cut, back))


def _nonempty(*parts: Part) -> list[Part]:
    return [part for part in parts if part[1] > part[0]]


SLACK = 0.002
"""Imbalance, as a part of a rank's work, that is accepted where it saves a run."""


def _light_to_dense(parts: list[Part], work: list[int]) -> list[Part]:
    return sorted(parts, key=lambda part: _density(part, work))


def _joined(parts: list[Part]) -> list[Part]:
    joined: list[Part] = []
    for begin, end in sorted(parts):
        if joined and joined[-1][1] == begin:
            begin = joined.pop()[0]
        joined.append((begin, end))
    return joined


def _documents(mask: Mask, seq_len: int) -> list[int]:
    """Positions where a document of some batch row begins, and the end."""
    starts = torch.zeros(seq_len, dtype=torch.bool, device="cpu")
    starts[:1] = True
    if mask.documents is not None:
        ids = torch.atleast_2d(mask.documents)
        starts[1:] |= (ids[:, 1:] != ids[:, :-1]).any(0)
    return [*starts.nonzero().flatten().tolist(), seq_len]


def keys_seen(mask: Mask, seq_len: int) -> Tensor:
    """Keys that each position sees, over all batch rows: int64 [seq_len].

    Args:
        mask: without key padding; its documents, if any, on the CPU.
        seq_len: tokens in the whole sequence.
    """
    position, total = torch.arange(seq_len, device="cpu"), torch.zeros(seq_len, dtype=torch.int64, device="cpu")
    left, right = mask.window or (None, None)
    rows = torch.atleast_2d(mask.documents) if mask.documents is not None else torch.zeros(1, seq_len, device="cpu")
    for ids in rows:
        new = torch.ones(seq_len, dtype=torch.bool, device="cpu")
        new[1:] = ids[1:] != ids[:-1]
        document = new.cumsum(0) - 1
        edges = torch.cat([new.nonzero().flatten(), torch.tensor([seq_len], device="cpu")])
        first, last = edges[document], edges[document + 1] - 1
        if mask.length is not None:
            last = last.clamp(max=mask.length - 1)
        if mask.causal:
            last = torch.minimum(last, position.clamp(min=mask.prefix - 1))
        if left is not None:
            first = torch.maximum(first, position - left)
        if right is not None:
            last = torch.minimum(last, position + right)
        total += (last - first + 1).clamp(min=0)
    return total
