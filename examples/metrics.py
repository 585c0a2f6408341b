"""Metrics of a run: FLOPs per token, share of the peak FLOP/s, a table of steps and a picture of the loss."""

from __future__ import annotations

import csv
from pathlib import Path

import torch
from llama import LlamaConfig

# Dense bf16 peak in FLOP/s, by a part of the device's name; the first match counts.
PEAK_BF16 = {"B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12}
COLUMNS = ("step", "loss", "eval_loss", "grad_norm", "lr", "tokens_per_s", "mfu", "peak_gib", "host_gib")


def flops_per_token(config: LlamaConfig, seq_len: int) -> float:
    """Floating-point operations to train on one token, without recomputation.

    A multiply-add counts as 2, the backward as twice the forward, and causal attention as half of full attention.
    """
    heads = config.num_heads * config.head_dim
    attention = config.dim * (2 * heads + 2 * config.num_kv_heads * config.head_dim)
    weights = config.num_layers * (attention + 3 * config.dim * config.hidden_dim) + config.dim * config.vocab_size
    return 6 * weights + 6 * config.num_layers * heads * seq_len


def peak_flops(device: torch.device) -> float | None:
    """The bf16 peak of one device in FLOP/s; None if it is unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_BF16.items() if part in name), None)


class Table:
    """A CSV with one row per step; a resumed run continues the file from its first step on."""

    def __init__(self, path: Path, first_step: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.rows = [row for row in self.read(path) if int(row["step"]) < first_step] if path.exists() else []
        partial = path.with_suffix(".partial")
        self.file = partial.open("w", newline="")
        self.writer = csv.DictWriter(self.file, COLUMNS)
        self.writer.writeheader()
        self.writer.writerows(self.rows)
        self.file.flush()
        partial.replace(path)  # a run that is killed before this line keeps the old file

    @staticmethod
    def read(path: Path) -> list[dict[str, str]]:
        with path.open(newline="") as file:
            return list(csv.DictReader(file))

    def append(self, *values: float | None) -> None:
        """Write one row, with values in the order of COLUMNS."""
        text = dict(zip(COLUMNS, ("" if value is None else f"{value:.8g}" for value in values), strict=True))
        self.rows.append(text)
        self.writer.writerow(text)
        self.file.flush()

    def plot(self, path: Path) -> bool:
        """Draw the losses over the steps; False without matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            return False
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for column, style in (("loss", "-"), ("eval_loss", "o")):
            points = [(int(row["step"]), float(row[column])) for row in self.rows if row.get(column)]
            if points:
                axes.plot(*zip(*points, strict=True), style, label=column.replace("_", " "))
        axes.set(xlabel="step", ylabel="nats per byte", title="Llama on text")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(path, dpi=120)
        return True
