"""The rule of layout="auto": a batch with packed documents takes the layout of `cp_mesh.balance`, any other zigzag."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from cp_mesh._torch import constant_in_traces
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.geometry.host_tensors import read_once
from cp_mesh.geometry.layout import Piece
from cp_mesh.geometry.layouts import Layout, ZigZag
from cp_mesh.geometry.mask import Mask


@dataclass(frozen=True)
class Open(Layout):
    """What layout="auto" is until a batch decides: it has no rows, so nothing is sharded by it in silence."""

    def runs(self, seq_len: int, cp_size: int, cp_rank: int) -> tuple[Piece, ...]:
        self.refuse()

    def refuse(self) -> NoReturn:
        """Say that no batch has decided yet."""
        hint = "sequence.for_batch(length, mask) decides it; modules of a plan take it from the batch's mask"
        refuse('layout="auto"', "the layout of a batch", "none yet", hint)

    def multiple(self, cp_size: int) -> int:
        return ZigZag().multiple(cp_size)

    def spec(self) -> str:
        return "auto"


OPEN, PLAIN = Open(), ZigZag()
"""The layout before a batch decides, and that of batches without several documents in a row."""


def is_by_batch(layout: Layout) -> bool:
    """Whether layout="auto" made it, or will make it."""
    return layout is PLAIN or isinstance(layout, Open) or getattr(layout, "by_batch", False)


def layout_of(mask: Mask, documents: Tensor, place: Hashable, balanced: Callable[[Mask], Layout]) -> Layout:
    """Return the layout of the batch that a mask with documents describes.

    It is kept with the mask's documents. So masks that `dataclasses.replace` makes from each other have one layout, and
    all layers, labels and outputs of a batch find it.

    Args:
        mask, documents: of the whole batch, without padding.
        place: of the sequence: its length without padding, whether it is padded, and the number of ranks.
        balanced: makes the layout of a packed batch.

    Raises:
        UnsupportedError: in compiled code, which cannot read documents.
    """
    if torch.compiler.is_compiling():
        _refuse_traced()
    kept = read_once(documents, _layouts)
    if place not in kept:
        packed = any(np.unique(row.labels[row.labels >= 0]).size > 1 for row in mask.runs())
        kept[place] = PLAIN
        if packed:
            kept[place] = balanced(replace(mask, key_padding=None))
            vars(kept[place])["by_batch"] = True  # copies keep it
    return kept[place]


def _layouts(documents: Tensor) -> dict[Hashable, Layout]:
    return {}


@constant_in_traces  # so that Dynamo raises the error, and does not fall back to eager code
def _refuse_traced() -> None:
    hint = "pass sequence.for_batch(length, mask).mask(mask), made before the call; or compile the blocks of the root"
    refuse('layout="auto" in compiled code', "a mask that has its layout", "documents alone", hint, UnsupportedError)
