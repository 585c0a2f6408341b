"""Test cp_mesh on this machine: `python3 examples/quickstart.py`, a few minutes on two CPU cores.

Creates `.venv`, trains a small Llama on text over four ranks (context parallel 2 x tensor parallel 2; on GPUs if there
are four), repeats the run on one rank without importing cp_mesh, and compares the losses of all steps and the first
gradients of all parameters. The exit status is 0 if they agree.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import environment

ROOT = environment.ROOT
TRAINER = str(ROOT / "examples" / "train_llama.py")
RUN = shlex.split("--dim 128 --layers 3 --seq-len 256 --batch-size 8 --steps 150 --lr 2e-3")
FOUR_RANKS = shlex.split("-m torch.distributed.run --standalone --nproc-per-node 4")
# Rounding differs by 1e-7 between orders of summation, and training lets differences grow.
LOSS_LIMIT, GRADIENT_LIMIT = 1e-4, 1e-5


def main() -> int:
    environment.enter()
    import torch

    device = "cuda" if torch.cuda.device_count() >= 4 else "cpu"
    out = ROOT / "runs" / "quickstart"
    parallel = train("four ranks, cp=2 x tp=2", [*FOUR_RANKS, TRAINER, "--cp=2", "--tp=2"], device, out / "parallel")
    plain = train("one rank, without cp_mesh", [TRAINER, "--plain"], device, out / "plain")

    losses = parallel["losses"], plain["losses"]
    loss_error = max(abs(a - b) for a, b in zip(*losses, strict=True))
    gradient_error = max(
        float((parallel["gradients"][name] - gradient).abs().max() / gradient.abs().max())
        for name, gradient in plain["gradients"].items()
    )
    same = loss_error <= LOSS_LIMIT and gradient_error <= GRADIENT_LIMIT
    fell = all(max(loss[-10:]) < 0.6 * loss[0] for loss in losses)
    figures = f"{len(losses[0])},{losses[0][0]:.4f},{losses[0][-1]:.4f},{loss_error:.3g},{gradient_error:.3g}"
    header = "steps,first_loss,last_loss,max_loss_difference,max_relative_gradient_difference"
    (out / "parity.csv").write_text(f"{header}\n{figures}\n")
    print(f"\ncurves: {out / 'parallel' / 'loss.png'}, {out / 'plain' / 'loss.png'}")
    four, one = (f"{loss[0]:.4f} -> {loss[-1]:.4f}" for loss in losses)
    verdict = ("SAME" if same else "DIFFERENT") + ("" if fell else ", NOT LEARNING")
    print(
        f"{verdict}: loss {four} on four ranks, {one} on one; "
        f"in {len(losses[0])} steps they differ by at most {loss_error:.1e} (limit {LOSS_LIMIT:.0e}), "
        f"the first gradients by {gradient_error:.1e} relative (limit {GRADIENT_LIMIT:.0e})"
    )
    return 0 if same and fell else 1


def train(title: str, command: list[str], device: str, out: Path) -> dict:
    """Run the trainer and return what it dumped: `losses` of all steps and the first step's `gradients` by name."""
    import torch

    dump = out / "dump.pt"
    dump.unlink(missing_ok=True)
    command = [sys.executable, *command, *RUN, "--device", device, "--out", str(out), "--dump", str(dump)]
    print(f"\n{title}:\n  {shlex.join(command)}", flush=True)
    # Ranks share the cores of one machine: one thread each.
    code = subprocess.call(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if code:
        sys.exit(f"{title}: the trainer failed with exit status {code}")
    return torch.load(dump)


if __name__ == "__main__":
    sys.exit(main())
