"""Draw the owner of each token, and the stage that computes each query-key pair, with matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.geometry.block_table import Array
from cp_mesh.geometry.mask import Mask
from cp_mesh.tools.explain.variants import Variant, owners, sampled

MASKED = -1
COLORS = {"blue": "#56B4E9", "orange": "#E69F00", "green": "#009E73", "pink": "#CC79A7"}
"""Colors of up to 4 ranks, here and in the pictures of docs/; distinct for colour-blind readers. More ranks have
colors between them."""
HIDDEN = "#EEEEEE"
"""Color of pairs that the mask hides."""


def draw(path: str | Path, variant: Variant, mask: Mask, seq_len: int, cp_size: int, points: int) -> None:
    """Draw both panels; see `cp_mesh.tools.explain.explain.Explanation.plot`."""
    check_picture(path)
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7.5, 8), layout="constrained")
    FigureCanvasAgg(figure)
    strip, square = figure.subplots(2, 1, height_ratios=(1, 12))
    position = sampled(seq_len, points)
    owner = owners(variant.layout, seq_len, cp_size, position)
    stage = stages_of_pairs(variant, mask, owner, position)
    edges = 0, seq_len
    shades = [*COLORS][:cp_size]
    ranks = LinearSegmentedColormap.from_list(
        "ranks", [COLORS[name] for name in shades] * (1 + (cp_size == 1)), cp_size
    )
    limits: dict[str, Any] = {"vmin": -0.5, "vmax": cp_size - 0.5, "extent": (*edges, 0, 1)}
    strip.imshow(owner[None], aspect="auto", cmap=ranks, interpolation="nearest", **limits)
    owners_of = f"rank 0 ({shades[0]})" + f" to {cp_size - 1} ({shades[-1]})" * (cp_size > 1)
    strip.set(yticks=(), title=f"owner of each token: {owners_of}, {variant.layout.spec()}")
    shown = np.ma.masked_equal(stage, MASKED)
    num = len(variant.steps) + 1
    colors = colormaps["viridis_r"].resampled(num).with_extremes(bad=HIDDEN)
    image = square.imshow(
        shown, cmap=colors, vmin=-0.5, vmax=num - 0.5, interpolation="nearest", extent=(*edges, *edges[::-1])
    )
    names = "first batch row, " if mask.elementwise else ""
    title = f"stage that computes each pair, {names}{variant.method}: 0 is local"
    square.set(xlabel="key position", ylabel="query position", title=title)
    figure.colorbar(image, ax=square, label="stage", ticks=MaxNLocator(integer=True))
    figure.savefig(path)


def check_picture(path: str | Path) -> None:
    """Refuse a path that `draw` cannot write, and a missing matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        hint = "pip install matplotlib; the text works without it"
        refuse("plot", "matplotlib", str(error), hint, UnsupportedError)
    endings = [f".{name}" for name in Figure().canvas.get_supported_filetypes() if name != "pgf"]  # pgf needs LaTeX
    if Path(path).suffix.lower() not in endings:
        refuse("plot", f"a file whose name ends in one of {', '.join(endings)}", path, ".png works")


def stages_of_pairs(variant: Variant, mask: Mask, owner: Array, position: Array) -> Array:
    """The stage that computes each pair of these positions, 0 for local tiles: int64 [query, key].

    ``owner`` is the rank of each position. Pairs that the mask hides in its first batch row are `MASKED`.
    """
    size, owner = len(variant.work) // variant.inner, owner // variant.inner
    stage_of_step = np.zeros(size, dtype=np.int64)
    for number, steps in enumerate(variant.steps):
        stage_of_step[list(steps)] = number + 1
    stage = stage_of_step[(owner[:, None] - owner) % size]
    tokens = torch.from_numpy(position)
    stage[~mask.allowed(tokens, tokens)[0].numpy()] = MASKED
    return stage
