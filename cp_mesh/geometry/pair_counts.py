"""How many pairs of query and key a mask allows, from its integers and the edges of its documents and blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from cp_mesh.geometry.block_table import Array
from cp_mesh.geometry.mask import Documents, Mask


class Part(NamedTuple):
    """Adjacent positions from ``begin`` on, within one document of every batch row.

    Attributes:
        pairs: of their queries with keys, in all batch rows.
        rise: how many more keys a query sees than the one before, about.
    """

    pairs: float
    begin: int
    num: int
    rise: float


def parts_between(edges: Array, mask: Mask, seq_len: int) -> list[Part]:
    """Return the parts between positions, which may be in any order and repeated."""
    edges = np.unique(edges)
    begin, end = edges[:-1], edges[1:]
    middle = (begin + end) // 2
    points = np.unique(np.concatenate([edges, middle]))
    before = np.append(0, pairs_between(points, mask, seq_len).cumsum())
    at_begin, at_middle, at_end = (before[np.searchsorted(points, x)] for x in (begin, middle, end))
    gain = (at_end - at_middle) / (end - middle) - (at_middle - at_begin) / np.maximum(middle - begin, 1)
    rise = np.where(middle > begin, 2 * gain / (end - begin), 0)
    return [*map(Part, (at_end - at_begin).tolist(), begin.tolist(), (end - begin).tolist(), rise.tolist())]


def documents_of(mask: Mask, seq_len: int) -> tuple[Documents, ...]:
    """Return the documents of each batch row; one entry if all batch rows share them."""
    return (Documents.of(np.zeros(seq_len)),) if mask.documents is None else mask.runs()


def pairs_between(points: Array, mask: Mask, seq_len: int) -> Array:
    """Return the number of pairs whose query lies between two points, summed over batch rows: int64 [n - 1].

    Args:
        points: n rising positions, the last of which is ``seq_len``.
        mask: without key padding.
        seq_len: tokens in the whole sequence.
    """
    rows, seen = documents_of(mask, seq_len), []
    if mask.blocks is not None:
        blocks = [Documents.of(ids) for ids in torch.atleast_2d(mask.blocks).numpy()]
        ahead = replace(mask, causal=False, prefix=0, blocks=None).reaches(seq_len)
    for i in range(max(len(rows), 0 if mask.blocks is None else len(blocks)) if rows else 0):
        documents = rows[i % len(rows)]
        seen += [(documents, reach) for reach in mask.reaches(seq_len)]
        if mask.blocks is not None:  # later keys of the query's block and document
            block = blocks[i % len(blocks)]
            edges = np.union1d(block.edges, documents.edges)
            labels = (x.labels[np.searchsorted(x.edges, edges[:-1], side="right") - 1] for x in (block, documents))
            both = Documents(edges, np.minimum(*labels))
            seen += [(both, reach._replace(begin=min(mask.prefix, reach.end), farthest=-1)) for reach in ahead]
    cuts = np.unique(np.concatenate([points, *(documents.edges for documents, _ in seen)]))
    begin, num_q, total = cuts[:-1], np.diff(cuts), np.zeros(max(0, len(cuts) - 1), dtype=np.int64)
    for documents, reach in seen:
        which = np.searchsorted(documents.edges, begin, side="right") - 1
        key = np.maximum(documents.edges[which], reach.begin)
        num_k = np.maximum(np.minimum(documents.edges[which + 1], reach.end) - key, 0)
        bounds = (least + key - begin for least in (reach.nearest, reach.farthest + 1))
        near, far = (pairs_from(np.clip(least, -num_k, num_q), num_q, num_k) for least in bounds)
        total += np.where(documents.labels[which] < 0, 0, near - far)
    return np.add.reduceat(total, np.searchsorted(cuts, points[:-1]))


def pairs_from(bound: Any, num_q: Any, num_k: Any) -> Any:
    """Return the number of (i, j) with ``i - j >= bound``: the sum over keys j of clip(num_q - bound - j, 0, num_q).

    Of integers, or of arrays, entry by entry.
    """

    def triangle(n: Any) -> Any:
        return n * (n + 1) // 2 * (n > 0)

    def ramp(n: Any) -> Any:  # sum over j in range(num_k) of max(0, n - j)
        return triangle(n) - triangle(n - num_k)

    return ramp(num_q - bound) - ramp(-bound)
