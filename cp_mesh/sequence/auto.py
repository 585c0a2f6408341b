"""The rule of layout="auto": a batch with packed documents takes the layout of `cp_mesh.balance`, any other zigzag."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from cp_mesh._torch import constant_in_traces
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.geometry.host_tensors import read_once
from cp_mesh.geometry.layouts import Layout, ZigZag
from cp_mesh.geometry.mask import Mask

AUTO = ZigZag()
"""What "auto" becomes. It equals other zigzags; a mark, which copies keep, tells it from them."""
vars(AUTO)["of_batch"] = True


def is_auto(layout: Layout) -> bool:
    return getattr(layout, "of_batch", False)


def layout_of(mask: Mask, own: Layout, place: Hashable, balanced: Callable[[Mask], Layout]) -> Layout:
    """Return the layout of the batch that a mask describes.

    It is kept with the mask's documents. So masks that `dataclasses.replace` makes from each other have one layout, and
    all layers, labels and outputs of a batch find it.

    Args:
        mask: of the whole batch, without padding.
        own: the layout of the sequence.
        place: of the sequence: its length, and the number of ranks.
        balanced: makes the layout of a packed batch.

    Raises:
        UnsupportedError: in compiled code, which cannot read documents.
    """
    if mask.layout is not None or mask.documents is None or not is_auto(own):
        return mask.layout or own
    if torch.compiler.is_compiling():
        _refuse_traced()
    kept = read_once(mask.documents, _layouts)
    if place not in kept:
        packed = any(np.unique(row.labels[row.labels >= 0]).size > 1 for row in mask.runs())
        kept[place] = balanced(replace(mask, key_padding=None)) if packed else own
    return kept[place]


def _layouts(documents: Tensor) -> dict[Hashable, Layout]:
    return {}


@constant_in_traces  # so that Dynamo raises the error, and does not fall back to eager code
def _refuse_traced() -> None:
    hint = "pass sequence.for_batch(length, mask).mask(mask), made before the call; or compile the blocks of the root"
    refuse('layout="auto" in compiled code', "a mask that has its layout", "documents alone", hint, UnsupportedError)
