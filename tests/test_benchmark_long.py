"""The benchmark of one very long sequence on two CPU ranks: its saving of memory changes nothing of the step."""

from __future__ import annotations

import csv
import shlex
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from scripts import run_script

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples" / "benchmarks"))

import long  # noqa: E402

TINY = shlex.split(
    "--device cpu --seq-len 152 --gate-len 100 --layers 1 2 --dim 32 --heads 4 --kv-heads 2 --ffn 48 --vocab 64 "
    "--loss-rows 13 --mlp-rows 17 --recompute selective full"
)


@pytest.mark.full
def test_the_step_is_that_of_a_plain_model(tmp_path: Path) -> None:
    done = run_script(ROOT / "examples" / "benchmarks" / "long.py", [*TINY, "--csv", tmp_path / "x.csv"], 2)
    assert done.returncode == 0, done.printed
    assert "SAME" in done.printed and "32 layers on 8 GPUs" in done.printed
    with (tmp_path / "x.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["recompute"], row["layers"]) for row in rows] == [
        (how, layers) for how in ("selective", "full") for layers in "12"
    ]
    assert rows[0]["loss"] == rows[2]["loss"] != rows[1]["loss"]


def test_a_step_that_differs_is_not_timed() -> None:
    args = long.parse_arguments(TINY)
    with mock.patch.object(long, "make") as make, mock.patch.object(long, "say"):
        make.return_value.step.side_effect = [(2.0, 1.0, 0.1), (2.0, 1.0, 0.1), (2.0, 1.01, 0.1)]
        assert not long.gate(args, None, torch.device("cpu"))  # type: ignore[arg-type]


def test_options_reach_the_styles() -> None:
    for options in ([], ["--no-offload"], ["--mlp-rows", "9"]):
        args = long.parse_arguments(options)
        for recompute in ("selective", "full"):
            block, mlp = long.styles(args, recompute).values()
            assert (block.offload, block.keep_attention) == ("--no-offload" not in options, recompute == "selective")
            assert mlp.tile_rows == (9 if "9" in options else 16384)


@pytest.mark.nightly("benchmarks")
def test_the_projection() -> None:
    """Of times and bytes that are known: a layer takes 3 s and 2 GiB of activations on two ranks, the rest 5 and 7."""
    args = long.parse_arguments([])
    whole = long.STATE_BYTES / 2**30
    ends, layer = whole * (2 * args.vocab * args.dim + args.dim), whole * long.layer_parameters(args)

    def row(layers: int) -> dict[str, str]:
        peak = 7 + 2 * layers + (ends + layers * layer) / 2
        return {"world": "2", "layers": str(layers), "seconds": str(5 + 3 * layers), "peak_gib": str(peak)}

    seconds, peak = long.project(row(1), row(2), args)
    assert seconds == pytest.approx((5 + 3 * 32) / 4)
    assert peak == pytest.approx(7 + 2 * 32 + (ends + 32 * layer) / 8)
    llama = long.LlamaConfig(args.vocab, args.dim, 1, args.heads, args.kv_heads, ffn_dim=args.ffn)
    with torch.device("meta"):
        block = long.Llama(llama, long.CoreAttention).layers[0]
    assert long.layer_parameters(args) == sum(x.numel() for x in block.parameters())
