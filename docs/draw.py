"""Draw the pictures of layouts and masks: `python docs/draw.py` writes docs/pictures/*.svg.

Everything in them is read from the library: who holds which token from `Layout.positions`, who sees whom from
`Mask.allowed`. `tests/test_docs.py` draws them again and compares.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a checkout that is not installed

from cp_mesh import Contiguous, Layout, Mask, Striped, ZigZag, balance  # noqa: E402
from cp_mesh.geometry import Joint, Permuted, ZigZagDocuments  # noqa: E402
from cp_mesh.tools.explain import picture  # noqa: E402

FOLDER = ROOT / "docs" / "pictures"
COLORS, HIDDEN = (*picture.COLORS.values(),), picture.HIDDEN
SEEN, INK, PAPER = "#4C72B0", "#222222", "#FFFFFF"
SEQ_LEN, CP_SIZE = 16, 4
DOCUMENTS = torch.tensor([0] * 9 + [1] * 3 + [2] * 4)

LAYOUTS: dict[str, tuple[Layout, Mask]] = {
    "contiguous": (Contiguous(), Mask()),
    "zigzag": (ZigZag(), Mask()),
    "striped": (Striped(), Mask()),
    "permuted": (Permuted([0, 5, 10, 15, 4, 9, 14, 3, 8, 13, 2, 7, 12, 1, 6, 11]), Mask()),
    "balanced": (balance(Mask(documents=DOCUMENTS), SEQ_LEN, CP_SIZE), Mask(documents=DOCUMENTS)),
    "zigzag_documents": (ZigZagDocuments([0, 9, 12, 16]), Mask(documents=DOCUMENTS)),
    "joint": (Joint(4, 12), Mask(causal=False)),
}
"""Each layout and the mask that its picture shows."""

MASKS: dict[str, tuple[str, Mask]] = {
    "causal": ("Mask()", Mask()),
    "full": ("Mask(causal=False)", Mask(causal=False)),
    "window": ("Mask(window=(3, 0))", Mask(window=(3, 0))),
    "documents": ("Mask(documents=ids)", Mask(documents=torch.tensor([0] * 5 + [1] * 3 + [2] * 4))),
    "prefix": ("Mask(prefix=4)", Mask(prefix=4)),
    "blocks": ("Mask(blocks=ids)", Mask(blocks=torch.tensor([-1] * 2 + [0] * 4 + [-1] * 2 + [1] * 3 + [-1]))),
    "key_padding": ("Mask(key_padding=keep)", Mask(key_padding=torch.arange(12) < 9)),
}
"""Each mask, and how one writes it."""


def rectangle(x: float, y: float, width: float, height: float, fill: str, stroke: str = PAPER) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{stroke}"/>'


def words(x: float, y: float, text: str, size: int = 13, anchor: str = "start") -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{INK}">{text}</text>'


def svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    """A whole file; the paper is drawn, so that it can be read on a dark page."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}"'
        f' height="{height:g}" font-family="sans-serif" role="img"><title>{title}</title>'
    )
    return "\n".join([head, rectangle(0, 0, width, height, PAPER), *parts, "</svg>"]) + "\n"


def owners(layout: Layout) -> list[int]:
    """The rank that holds each position."""
    owner = torch.empty(SEQ_LEN, dtype=torch.int64)
    for rank in range(CP_SIZE):
        owner[layout.positions(SEQ_LEN, CP_SIZE, rank)] = rank
    return owner.tolist()


def strip(x: float, y: float, cell: float, layout: Layout) -> list[str]:
    """The sequence in its own order, every token in the colour of the rank that holds it."""
    parts = []
    for position, rank in enumerate(owners(layout)):
        parts.append(rectangle(x + cell * position, y, cell, cell, COLORS[rank]))
        parts.append(words(x + cell * (position + 0.5), y + cell / 2 + 5, str(position), anchor="middle"))
    return parts


def legend(x: float, y: float) -> list[str]:
    parts = []
    for rank in range(CP_SIZE):
        parts += [rectangle(x + 90 * rank, y, 16, 16, COLORS[rank]), words(x + 90 * rank + 22, y + 13, f"rank {rank}")]
    return parts


def matrix(x: float, y: float, cell: float, order: Tensor, mask: Mask, fills: Sequence[str]) -> list[str]:
    """Who sees whom: queries down, keys across, both in this order; ``fills`` by position of the query."""
    allowed = mask.allowed(order, order)[0].tolist()
    positions = order.tolist()
    return [
        rectangle(x + cell * column, y + cell * row, cell, cell, fills[positions[row]] if sees else HIDDEN)
        for row, line in enumerate(allowed)
        for column, sees in enumerate(line)
    ]


def draw_owners() -> str:
    """The first picture that a reader sees: three layouts, one line each."""
    parts = legend(110, 14)
    for line, name in enumerate(("contiguous", "zigzag", "striped")):
        y = 46 + 44 * line
        parts += [words(12, y + 20, name), *strip(110, y, 30, LAYOUTS[name][0])]
    parts.append(words(110, 194, "One sequence of 16 tokens. A rank attends with the tokens it holds.", 12))
    return svg(602, 208, "which rank holds which token", parts)


def draw_layout(layout: Layout, mask: Mask) -> str:
    """Owners of tokens, and the allowed pairs that each rank computes, in both orders."""
    cell, top = 15.0, 96.0
    side = cell * SEQ_LEN
    fills = [COLORS[rank] for rank in owners(layout)]
    order = layout.permutation(SEQ_LEN, CP_SIZE)
    parts = [*legend(12, 10), *strip(12, 36, 30, layout)]
    parts += [words(12, top - 4, "pairs in the order of the sequence"), words(side + 52, top - 4, "in layout order")]
    parts += matrix(12, top + 4, cell, torch.arange(SEQ_LEN), mask, fills)
    parts += matrix(side + 52, top + 4, cell, order, mask, fills)
    edge = 0
    for rank in range(1, CP_SIZE):  # where one rank's rows end, and its keys
        edge += layout.shard_len(SEQ_LEN, CP_SIZE, rank - 1)
        parts.append(rectangle(side + 52, top + 4 + cell * edge - 0.5, side, 1, INK, INK))
        parts.append(rectangle(side + 52 + cell * edge - 0.5, top + 4, 1, side, INK, INK))
    counts = [
        int(mask.allowed(layout.positions(SEQ_LEN, CP_SIZE, rank), torch.arange(SEQ_LEN)).sum())
        for rank in range(CP_SIZE)
    ]
    shares = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
    parts.append(words(12, top + side + 26, f"pairs to compute: {shares}"))
    return svg(2 * side + 64, top + side + 40, f"{layout.spec()} layout", parts)


def draw_mask(label: str, mask: Mask) -> str:
    side = 12 * 12
    fills = [SEEN] * 12
    parts = [words(8 + side / 2, 18, label, anchor="middle"), *matrix(8, 28, 12, torch.arange(12), mask, fills)]
    return svg(side + 16, side + 36, label, parts)


def pictures() -> dict[str, str]:
    """All of them, by file name."""
    drawn = {"owners.svg": draw_owners()}
    drawn |= {f"layout_{name}.svg": draw_layout(layout, mask) for name, (layout, mask) in LAYOUTS.items()}
    return drawn | {f"mask_{name}.svg": draw_mask(label, mask) for name, (label, mask) in MASKS.items()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in pictures().items():
        (FOLDER / name).write_text(text)
        print(FOLDER / name)
