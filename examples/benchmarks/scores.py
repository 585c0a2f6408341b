"""Time score features: the Triton kernel with each feature, another checkout of it, and compiled flex_attention.

A tile is the work of one rank in one step: ``causal`` on one device, and the tile of the second of two ranks with the
first one's keys, in the zigzag and in the striped layout. Features: softcap, ALiBi, a learned table of relative
distances (``table``: up to 128 tokens, ``wide``: all distances), a dense bias for each head, the same with its
gradient, dropout. One GPU.

Contestants are processes that keep their compiled kernels and take turns, repeat by repeat. A time is that of one call:
the median over repeats of several calls in sequence. Before it is timed, each contestant computes a short causal
sequence; its error against float64 may be twice that of plain products in bfloat16.

    python examples/benchmarks/scores.py --old ../before --out results
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
FEATURES = ("plain", "softcap", "alibi", "table", "wide", "bias", "learned bias", "dropout")
TILES = ("causal", "zigzag", "striped")
SOFTCAP, DROPOUT, RADIUS, GATE_LEN = 30.0, 0.1, 128, 1030
FILL_MS, MAX_CALLS, BUSY_CYCLES = 10.0, 20, 3_000_000
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SCALE = HEAD_DIM**-0.5
COLUMNS = (
    *("date", "commit", "gpu", "torch", "cuda", "packages", "tile", "feature", "contestant", "rows", "keys"),
    *("fwd_ms", "fwd_ms_min", "fwd_ms_max", "bwd_ms", "bwd_ms_min", "bwd_ms_max"),
    *("tflops_fwd", "tflops_both", "of_plain_fwd", "of_plain_both", "error", "status"),
)


def draw(*shape: int, seed: int, device: str) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device)


def score_tensors(feature: str, rows: int, seq_len: int, device: str) -> dict[str, Tensor]:
    """Those of the feature; a bias has ``rows`` rows."""
    if feature == "alibi":
        return {"alibi_slopes": 2.0 ** -(torch.arange(1, HEADS + 1, device=device) * 8 / HEADS)}
    if feature in ("table", "wide"):
        radius = RADIUS if feature == "table" else seq_len - 1
        return {"relative_bias": draw(HEADS, 2 * radius + 1, seed=7, device=device)}
    if feature.endswith("bias"):
        bias = torch.empty(1, HEADS, rows, seq_len, dtype=torch.bfloat16, device=device)
        return {"bias": bias.normal_(generator=torch.Generator(device).manual_seed(8))}
    return {"dropout_seed": torch.tensor([5, 6], device=device)} if feature == "dropout" else {}


def learned(feature: str) -> frozenset[str]:
    names = {"table": "relative_bias", "wide": "relative_bias", "learned bias": "bias"}
    return frozenset({names[feature]} if feature in names else ())


def inputs(rows: int, keys: int, device: str) -> list[Tensor]:
    shapes = ((HEADS, rows), (KV_HEADS, keys), (KV_HEADS, keys), (HEADS, rows))
    return [draw(1, n, s, HEAD_DIM, seed=i, device=device).bfloat16() for i, (n, s) in enumerate(shapes)]


class LastOf:
    """What planning reads of a process group."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._size - 1


class Ours:
    """The Triton kernel of the checkout that is imported, on a tile."""

    def __init__(self, feature: str, tile: str, rows: int, device: str) -> None:
        import cp_mesh
        from cp_mesh.call.plan import make_plan
        from cp_mesh.call.spec import AttentionSpec, Tensors
        from cp_mesh.geometry.mask import Mask

        tree = os.environ["PYTHONPATH"].split(os.pathsep)[0]
        assert Path(cp_mesh.__file__).is_relative_to(tree), f"{cp_mesh.__file__} is not of {tree}"
        size = 1 if tile == "causal" else 2
        tensors = score_tensors(feature, rows, size * rows, device)
        softcap, dropout = SOFTCAP * (feature == "softcap"), DROPOUT * (feature == "dropout")
        layout = "contiguous" if tile == "causal" else tile
        kernel = "triton" if device == "cuda" else "reference"
        options = AttentionSpec(layout, Mask().spec(), SCALE, softcap, dropout, kernel=kernel)
        q, k, *_ = inputs(rows, rows, device)
        plan = make_plan(q, k, k, Tensors(**tensors), size * rows, LastOf(size), options)
        first = plan.layout.positions(size * rows, size, 0)
        if tile == "causal":
            self._tiles, k_pos = plan.tiles(None), first
        else:
            stage = plan.schedule.route.stages[0]
            self._tiles = plan.tiles(stage)
            k_pos = torch.cat([first[begin:end] for _, ranges in stage.fetch for begin, end in ranges])
        q_pos = plan.layout.positions(size * rows, size, size - 1)
        self.pairs = int(torch.searchsorted(k_pos.sort()[0], q_pos, right=True).sum())
        self.rows, self.keys = rows, len(k_pos)
        self._kernel, self._scores = plan.kernel, replace(plan.scores, wanted=learned(feature))
        self.q, self.k, self.v, self.dout = inputs(rows, self.keys, device)
        self._out, self._lse = self.forward()

    def forward(self) -> tuple[Tensor, Tensor]:
        running = self._kernel.begin_forward(self.q, HEAD_DIM, self._scores)
        running.step(self.k, self.v, self._tiles)
        return running.finish()

    def backward(self) -> tuple[Any, ...]:
        from cp_mesh.kernels.combine import make_delta

        delta = make_delta(self.dout, self._out)
        running = self._kernel.begin_backward(self.dout, self.q, None, self._lse, delta, self._scores)
        written = [torch.empty_like(x) for x in (self.k, self.v)]
        running.step(self.k, self.v, self._tiles, tuple(written))
        of_scores = running.score_gradients() if self._scores.wanted else None
        return running.finish(torch.empty_like(self.q)), *written, of_scores

    def error(self) -> float:
        """The largest RMS error of a result, over what it may be."""
        from cp_mesh.geometry.mask import Mask
        from cp_mesh.tools.verify.dense import dense_attention

        args = (Mask(), replace(self._scores), self._scores.wanted)
        exact = dense_attention(*(x.double() for x in (self.q, self.k, self.v, self.dout)), *args)
        plain = dense_attention(self.q, self.k, self.v, self.dout, *args)
        dq, dk, dv, of_scores = self.backward()
        got = {"out": self._out, "dq": dq, "dk": dk, "dv": dv}
        want, other = vars(exact) | exact.of_scores, vars(plain) | plain.of_scores
        got |= of_scores or {}

        def rms(x: Tensor) -> float:
            return x.double().square().mean().sqrt().item()

        errors = [rms(x - want[n]) / (2 * rms(other[n] - want[n]) + 1e-6 * rms(want[n])) for n, x in got.items()]
        return max(errors) if all(math.isfinite(error) for error in errors) else math.inf


class Flex:
    """torch.compile of flex_attention; causal tiles only."""

    def __init__(self, feature: str, tile: str, rows: int, device: str) -> None:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        torch._dynamo.config.recompile_limit = 64  # else some features would silently run uncompiled
        if tile != "causal" or feature == "dropout":
            raise NotImplementedError("flex_attention has none")
        self.rows = self.keys = rows
        self.pairs = rows * (rows + 1) // 2
        self._x = inputs(rows, rows, device)
        tensors = [
            x.requires_grad_(bool(learned(feature))) for x in score_tensors(feature, rows, rows, device).values()
        ]
        for x in self._x[:3]:
            x.requires_grad_()
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, rows, rows, device=device)
        (x,) = tensors or [None]
        radius = 0 if x is None else x.shape[-1] // 2
        change: dict[str, Callable[..., Tensor]] = {
            "softcap": lambda s, b, h, i, j: SOFTCAP * torch.tanh(s / SOFTCAP),
            "alibi": lambda s, b, h, i, j: s - x[h] * (i - j),
            "table": lambda s, b, h, i, j: s + x[h, torch.clamp(i - j, -radius, radius) + radius],
            "bias": lambda s, b, h, i, j: s + x[0, h, i, j],
        }
        change["wide"], change["learned bias"] = change["table"], change["bias"]
        call, score_mod = torch.compile(flex_attention, dynamic=False), change.get(feature)
        self._call = lambda: call(*self._x[:3], score_mod, mask, SCALE, enable_gqa=True)
        self._of = [*self._x[:3], *(x for x in tensors if x.requires_grad)]
        self._out = self._call()

    def forward(self) -> Any:
        return self._call()

    def backward(self) -> Any:
        return torch.autograd.grad(self._out, self._of, self._x[3], retain_graph=True)

    def error(self) -> float:
        return 0.0


def measure(call: Callable[[], object], num_calls: int, device: str) -> float:
    """ms of each of some calls that follow one another."""
    if device == "cpu":
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES * num_calls)  # else the device would wait for the host to launch short calls
    begin.record()
    for _ in range(num_calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / num_calls


def work(contestant: str, rows: int, device: str) -> None:
    """Answer each line of stdin, [feature, tile, repeats] in JSON, by one line; 0 repeats: check and compile."""
    make = Flex if contestant == "flex" else Ours
    answers, sys.stdout = sys.stdout, sys.stderr
    held: dict[tuple[str, str], Any] = {}
    for line in sys.stdin:
        feature, tile, repeats = json.loads(line)
        answer: dict[str, Any] = {"status": "ok"}
        try:
            if not repeats and tile == TILES[0]:
                answer["error"] = make(feature, "causal", min(GATE_LEN, rows) if make is Ours else rows, device).error()
            if (feature, tile) not in held:
                if make is Ours:  # one at a time, as a bias is large; what it has compiled stays
                    held.clear()
                held[feature, tile] = make(feature, tile, rows, device)
            entry = held[feature, tile]
            answer |= {"rows": entry.rows, "keys": entry.keys, "pairs": entry.pairs}
            for name, call in (("fwd", entry.forward), ("bwd", entry.backward)):
                fill = min(MAX_CALLS, math.ceil(FILL_MS / measure(call, 1, device)))
                answer[name] = [measure(call, fill, device) for _ in range(repeats)]
        except Exception as error:
            answer = {"status": f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"[:200]}
        if not repeats and make is Ours:
            held.clear()
            if device == "cuda":
                torch.cuda.empty_cache()
        print(json.dumps(answer), file=answers, flush=True)


class Contestant:
    """A process that answers as `work` does."""

    def __init__(self, name: str, tree: Path, args: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--worker", name, "--rows", str(args.rows), "--device", args.device]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tree), str(HERE)))}
        self.name, self.usable = name, dict[tuple[str, str], dict[str, Any]]()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, feature: str, tile: str, repeats: int) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([feature, tile, repeats]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"status": "the process ended"}

    def prepare(self, wanted: Sequence[tuple[str, str]]) -> None:
        for feature, tile in wanted:
            answer = self.ask(feature, tile, 0)
            if answer["status"] == "ok" and not answer.get("error", 0.0) <= 1:
                answer["status"] = "failed the gate"
            self.usable[feature, tile] = answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def results(contestants: Sequence[Contestant], feature: str, tile: str, repeats: int) -> Iterator[dict[str, Any]]:
    """A row for each; contestants take turns."""
    samples: dict[str, list[dict[str, Any]]] = {}
    for _ in range(repeats):
        for one in contestants:
            if one.usable[feature, tile]["status"] == "ok":
                samples.setdefault(one.name, []).append(one.ask(feature, tile, 1))
    for one in contestants:
        about = one.usable[feature, tile]
        row = {"tile": tile, "feature": feature, "contestant": one.name, "status": about["status"]}
        row |= {name: about[name] for name in ("rows", "keys", "error") if name in about}
        answers = samples.get(one.name, [])
        if failed := [x["status"] for x in answers if x["status"] != "ok"]:
            row["status"] = failed[0]
        elif answers:
            ms = {name: [x[name][0] for x in answers] for name in ("fwd", "bwd")}
            flops = 4 * HEADS * HEAD_DIM * about["pairs"] / 1e9
            forward, backward = (median(ms[name]) for name in ("fwd", "bwd"))
            row |= {"tflops_fwd": flops / forward, "tflops_both": 3.5 * flops / (forward + backward)}
            for name, x in ms.items():
                row |= {f"{name}_ms": median(x), f"{name}_ms_min": min(x), f"{name}_ms_max": max(x)}
        yield row


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, help="another checkout to measure beside this one")
    parser.add_argument("--out", type=Path, help="append rows to scores.csv in this folder")
    parser.add_argument("--rows", type=int, default=8192, help="rows of queries")
    parser.add_argument("--features", nargs="+", choices=FEATURES, default=FEATURES)
    parser.add_argument("--tiles", nargs="+", choices=TILES, default=TILES)
    parser.add_argument("--without", nargs="+", choices=("ours", "flex"), default=())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--time-limit", type=float, default=math.inf, help="start nothing more after this many seconds")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", help="recorded in the rows (default: ask git)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        work(args.worker, args.rows, args.device)
        return
    sys.path[:0] = [str(HERE.parents[1]), str(HERE)]
    from report import machine

    began, about = time.perf_counter(), machine(torch.device(args.device), 1, args.commit)
    trees = {"ours": HERE.parents[1], "flex": HERE.parents[1]} | ({"old": args.old.resolve()} if args.old else {})
    contestants = [Contestant(name, tree, args) for name, tree in trees.items() if name not in args.without]
    wanted = [(feature, tile) for tile in args.tiles for feature in args.features]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: one.prepare(wanted), contestants))
    print(f"compiled and checked in {time.perf_counter() - began:.0f} s")
    plain: dict[tuple[str, str], dict[str, Any]] = {}
    for feature, tile in wanted:
        if time.perf_counter() - began > args.time_limit:
            print(f"time limit: {feature} on {tile} and what follows is left out")
            break
        rows = list(results(contestants, feature, tile, args.repeats))
        for row in rows:
            if feature == "plain":
                plain[row["contestant"], tile] = row
            base = plain.get((row["contestant"], tile), {})
            for name in ("fwd", "both"):
                if f"tflops_{name}" in row and f"tflops_{name}" in base:
                    row[f"of_plain_{name}"] = row[f"tflops_{name}"] / base[f"tflops_{name}"]
            figures = [f"{row[name]:9.3f}" if name in row else " " * 9 for name in COLUMNS[17:21]]
            print(f"{tile:8} {feature:13} {row['contestant']:5}" + "".join(figures) + f"  {row['status']}", flush=True)
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            with (args.out / "scores.csv").open("a", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
                if file.tell() == 0:
                    writer.writeheader()
                date = {"date": datetime.now(UTC).isoformat(timespec="seconds")}
                writer.writerows(about | date | row for row in rows)
    for one in contestants:
        one.close()
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
