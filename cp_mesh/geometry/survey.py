"""Survey: the blocks of a layout and a mask, for one rank when it is asked for, and what all ranks must know alike.

A rank computes the blocks of its own queries, serves the keys that others' blocks name, and needs to know a little of
everybody, its facts: how many rows travel between every two ranks, which kinds of tile occur. There are two kinds of
geometry: by whole runs of the layout, and by packed documents.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cp_mesh.geometry.block_table import RECEIVER, SOURCE, Array, pieces_of
from cp_mesh.geometry.global_plan import Facts
from cp_mesh.geometry.host_tensors import Content
from cp_mesh.geometry.layouts import Layout
from cp_mesh.geometry.mask import Mask, parse_mask
from cp_mesh.geometry.survey_documents import ByDocuments
from cp_mesh.geometry.survey_runs import ByRuns

Seen = NDArray[np.bool_]


class Geometry(Protocol):
    """Tables of blocks are by batch row: one if all rows share it."""

    shard_lens: tuple[int, ...]
    facts: Facts

    def of_receiver(self, rank: int) -> tuple[Array, ...]:
        """Blocks of a rank's queries, full ones joined along its rows."""

    def of_source(self, rank: int) -> Array:
        """Blocks that name a rank's keys, of all batch rows and other ranks; of use for their keys alone."""


def geometry(
    layout: Layout, mask: Mask, seq_len: int, cp_size: int, documents: bool, sources: Seen | None = None
) -> Geometry:
    """The geometry, kept for later calls of the same arguments.

    Args:
        layout: positions of every rank.
        mask: its tensors, if any, hold all ``seq_len`` tokens.
        seq_len, cp_size: length of the whole sequence in tokens, and number of ranks.
        documents: blocks by documents, where these are runs of positions and their bands are few.
        sources: bool [receiver, source], which of them may be seen beside what the mask says; None: all.
    """
    tensors = (mask.documents, mask.key_padding, mask.blocks)
    contents = tuple(None if x is None else Content.of(x) for x in tensors)
    by_documents = documents and contents[0] is not None and contents[1:] == (None, None)
    found = _geometry(layout, mask.spec(), contents, seq_len, cp_size, by_documents)
    return found if sources is None else _OfSources(found, sources)


class _OfSources:
    """A geometry without the blocks of sources that are not seen. Of its facts those remain that are bounds."""

    def __init__(self, found: Geometry, sources: Seen) -> None:
        self._found, self._sources, self.shard_lens = found, sources, found.shard_lens
        needed = np.where(sources, found.facts.needed, 0)
        self.facts = found.facts._replace(needed=needed)

    def of_receiver(self, rank: int) -> tuple[Array, ...]:
        return tuple(table[self._sources[rank, table[:, SOURCE]]] for table in self._found.of_receiver(rank))

    def of_source(self, rank: int) -> Array:
        table = self._found.of_source(rank)
        return table[self._sources[table[:, RECEIVER], rank]]


def say_sources(sources: Seen) -> str:
    """bool [receiver, source] as a string, of which `parse_sources` makes it again."""
    return np.packbits(sources).tobytes().hex()


def parse_sources(spec: str, cp_size: int) -> Seen | None:
    """None of the empty string."""
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(spec), dtype=np.uint8), count=cp_size**2 if spec else 0)
    return bits.reshape(cp_size, cp_size).astype(np.bool_) if spec else None


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
