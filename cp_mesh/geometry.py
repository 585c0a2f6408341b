"""Geometry: the blocks of a layout and a mask, for one rank when it is asked for, and what all ranks must know alike.

A rank computes the blocks of its own queries, serves the keys that others' blocks name, and needs to know a little of
everybody, its facts: how many rows travel between every two ranks, which kinds of tile occur. There are two kinds of
geometry: by whole runs of the layout, and by packed documents.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

from cp_mesh.blocks import Array, pieces_of
from cp_mesh.by_documents import ByDocuments
from cp_mesh.by_runs import ByRuns
from cp_mesh.facts import Facts
from cp_mesh.layouts import Layout
from cp_mesh.masks import Mask, parse_mask
from cp_mesh.owned import Content


class Geometry(Protocol):
    """Tables of blocks are by batch row: one if all rows share it."""

    shard_lens: tuple[int, ...]
    facts: Facts

    def of_receiver(self, rank: int) -> tuple[Array, ...]:
        """Blocks of a rank's queries, full ones joined along its rows."""

    def of_source(self, rank: int) -> Array:
        """Blocks that name a rank's keys, of all batch rows and other ranks; of use for their keys alone."""


def geometry(layout: Layout, mask: Mask, seq_len: int, cp_size: int, documents: bool) -> Geometry:
    """The geometry, kept for later calls of the same arguments.

    Args:
        layout: positions of every rank.
        mask: its tensors, if any, hold all ``seq_len`` tokens.
        seq_len, cp_size: length of the whole sequence in tokens, and number of ranks.
        documents: blocks by documents, where these are runs of positions and their bands are few.
    """
    tensors = (mask.documents, mask.key_padding, mask.blocks)
    contents = tuple(None if x is None else Content.of(x) for x in tensors)
    by_documents = documents and contents[0] is not None and contents[1:] == (None, None)
    return _geometry(layout, mask.spec(), contents, seq_len, cp_size, by_documents)


@lru_cache(maxsize=32)
def _geometry(
    layout: Layout,
    mask_spec: str,
    contents: tuple[Content | None, Content | None, Content | None],
    seq_len: int,
    cp_size: int,
    by_documents: bool,
) -> Geometry:
    mask = parse_mask(mask_spec, *(None if x is None else x.tensor for x in contents))
    pieces = pieces_of(layout, seq_len, cp_size)
    if by_documents and pieces.regular.all():
        of_documents = ByDocuments.made(pieces, mask, seq_len, cp_size)
        if of_documents is not None:
            return of_documents
    return ByRuns(layout, pieces, mask, seq_len, cp_size)
