"""Train a Llama on text over any mix of data, context and tensor parallel ranks.

    torchrun --nproc-per-node 4 examples/train_llama.py --cp 2 --tp 2
    python examples/train_llama.py --plain     # the same run on one device; cp_mesh is never imported

Batches, initial weights and therefore losses and gradients do not depend on the mesh.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from data import IGNORE, VOCAB_SIZE, Corpus, read_text, split, tokenize
from llama import CoreAttention, Llama, LlamaConfig
from metrics import Table, flops_per_token, peak_flops
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint
from tqdm import trange


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--plain", action="store_true", help="one device, no mesh, no cp_mesh")
    add("--dp", type=int, help="data parallel ranks; default: what cp and tp leave")
    add("--cp", type=int, default=1, help="context parallel ranks")
    add("--tp", type=int, default=1, help="tensor parallel ranks")
    add("--sequence-parallel", action="store_true", help="with --tp: norms on sequence shards too")
    add("--layout", choices=("contiguous", "zigzag", "striped"), default="zigzag")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dim", type=int, default=256)
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=8)
    add("--kv-heads", type=int, default=4)
    add("--vocab", type=int, default=VOCAB_SIZE, help=f"at least {VOCAB_SIZE}")
    add("--text", metavar="FILE", help="default: the manual of Python inside CPython")
    add("--seq-len", type=int, default=512)
    add("--batch-size", type=int, default=8, help="rows of all ranks together")
    add("--documents", action="store_true", help="paragraphs do not see each other")
    add("--restart-positions", action="store_true", help="with --documents: positions start anew in each")
    add("--steps", type=int, default=200)
    add("--lr", type=float, default=1e-3)
    add("--warmup", type=int, default=20, help="steps of linear warm-up; then a cosine to a tenth")
    add("--clip", type=float, default=1.0, help="largest gradient norm")
    add("--seed", type=int, default=0)
    add("--precision", choices=("fp32", "bf16"), default="fp32")
    add("--checkpoint-activations", choices=("none", "full", "selective"), default="none")
    add("--compile", nargs="?", const="inductor", metavar="BACKEND", help="compile each block")
    add("--save", type=Path, metavar="DIR", help="write DIR/step_N")
    add("--save-every", type=int, metavar="N", help="default: at the end only")
    add("--resume", type=Path, metavar="DIR", help="a step_N, or the last one inside; any mesh, --plain too")
    add("--eval-every", type=int, metavar="N", help="loss on held-out text")
    add("--eval-batches", type=int, default=4)
    add("--out", type=Path, default=Path("runs/llama"), help="metrics.csv and loss.png")
    add("--dump", type=Path, metavar="FILE", help="the first step's whole gradients and every loss, for a comparison")
    args = parser.parse_args()
    if args.restart_positions and not args.documents:
        parser.error("--restart-positions needs --documents")
    if args.plain and (args.dp or 1) * args.cp * args.tp > 1:
        parser.error("--plain runs on one rank")
    if args.plain and args.checkpoint_activations == "selective":
        parser.error("--plain has no ring to save: use --checkpoint-activations full")
    return args


@dataclass
class Setup:
    """What the loop needs from `plain_setup` or `mesh_setup`, which differ in nothing else."""

    device: torch.device
    model: Llama
    rows: slice  # of the global batch, for this rank
    loss: Callable[[Tensor, Tensor], Tensor]  # (logits, labels) -> a share of the mean loss over all tokens
    total: Callable[[Tensor], Tensor]  # sum of the shares of all ranks
    world_size: int = 1
    is_first: bool = True


def new_model(args: argparse.Namespace, device: torch.device, **core: type[nn.Module]) -> Llama:
    model = Llama(LlamaConfig(args.vocab, args.dim, args.layers, args.heads, args.kv_heads), **core)
    model.init_weights(args.seed)
    return model.to(device)


def checkpoint_and_compile(model: Llama, args: argparse.Namespace, **context_fn: Callable) -> None:
    """Wrap the blocks in place, so that parameters keep their names."""
    for block in model.layers:
        if args.checkpoint_activations != "none":
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, **context_fn)
        if args.compile:
            block.compile(backend=args.compile, fullgraph=True)


def plain_setup(args: argparse.Namespace) -> Setup:
    """One device and PyTorch alone: what every mesh has to reproduce."""
    device = torch.device(args.device)
    model = new_model(args, device)
    checkpoint_and_compile(model, args)

    if args.precision == "bf16":
        model.forward = torch.autocast(device.type, torch.bfloat16)(model.forward)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE)

    return Setup(device, model, slice(None), loss, total=lambda share: share)


def mesh_setup(args: argparse.Namespace) -> Setup:
    """Ranks on a dp x cp x tp mesh: tensor parallelism first, then context parallelism, FSDP around both."""
    import parallel_llama as parallel

    import cp_mesh

    if "RANK" not in os.environ:  # not under torchrun
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    world_size = dist.get_world_size()
    dp = args.dp or world_size // (args.cp * args.tp)
    if dp * args.cp * args.tp != world_size or args.batch_size % dp:
        raise ValueError(
            f"dp x cp x tp = {dp} x {args.cp} x {args.tp} must be the {world_size} ranks, "
            f"and dp must divide --batch-size {args.batch_size}"
        )
    mesh = init_device_mesh(args.device, (dp, args.cp, args.tp), mesh_dim_names=("dp", "cp", "tp"))
    data = mesh["dp", "cp"]._flatten("dp_cp")  # the ranks that hold different tokens
    sequence = cp_mesh.ShardedSequence(mesh["cp"], parallel.LAYOUTS[args.layout], length=args.seq_len)

    model = new_model(args, device, core=CoreAttention)
    if args.tp > 1:
        parallel.apply_tensor_parallel(model, mesh["tp"], args.sequence_parallel)
    parallel.apply_context_parallel(model, mesh["cp"], sequence)
    selective = args.checkpoint_activations == "selective"
    checkpoint_and_compile(model, args, **{"context_fn": cp_mesh.checkpoint_context_fn} if selective else {})
    parallel.apply_fsdp(model, data, args.precision)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        shard = sequence.shard({"labels": labels})["labels"]
        return cp_mesh.cross_entropy(logits.float(), shard, data, ignore_index=IGNORE)

    def total(share: Tensor) -> Tensor:
        dist.all_reduce(share, group=data.get_group())
        return share

    rows = args.batch_size // dp
    rank = mesh.get_local_rank("dp")
    return Setup(
        device, model, slice(rank * rows, (rank + 1) * rows), loss, total, world_size, is_first=dist.get_rank() == 0
    )


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters by the mesh they lie on: norms without tp, matrices with it. No operation takes both at once."""
    groups: dict[object, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        groups[getattr(parameter, "device_mesh", None)].append(parameter)
    return list(groups.values())


def whole(tensor: Tensor) -> Tensor:
    """The value that all ranks' shards make up; a collective."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients to at most `max_norm`, and return the norm that they had: that of one device."""
    groups = by_mesh(model.parameters())
    norms = [whole(get_total_norm([parameter.grad for parameter in group])) for group in groups]
    norm = torch.stack(norms).norm()
    for group in groups:
        clip_grads_with_norm_(group, max_norm, norm)
    return norm


def learning_rate(args: argparse.Namespace, step: int) -> float:
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    progress = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * (0.55 + 0.45 * math.cos(math.pi * progress))


class Checkpoint:
    """Model, optimizer and step in DIR/step_N: written whole or sharded by any mesh, read by any other.

    The order of the data follows from the step.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.model, self.optimizer = model, optimizer
        # One entry per parameter, so that meshes with other parameter groups can read them.
        self.options = StateDictOptions(flatten_optimizer_state_dict=True)

    def save(self, directory: Path, step: int) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self.options)
        dcp.save({"model": model, "optimizer": optimizer, "step": step}, checkpoint_id=directory / f"step_{step}")

    def load(self, directory: Path) -> int:
        steps = sorted(directory.glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self.options)
        state = {"model": model, "optimizer": optimizer, "step": 0}
        dcp.load(state, checkpoint_id=steps[-1] if steps else directory)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=self.options,
        )
        return state["step"]


def train(args: argparse.Namespace, setup: Setup) -> None:
    model, device = setup.model, setup.device
    training, held_out = (
        Corpus(tokens, args.seq_len, args.batch_size, args.documents, args.restart_positions, args.seed)
        for tokens in split(tokenize(read_text(args.text)))
    )
    optimizer = torch.optim.AdamW(
        [{"params": group} for group in by_mesh(model.parameters())], args.lr, betas=(0.9, 0.95), weight_decay=0.1
    )
    checkpoints = Checkpoint(model, optimizer)
    first_step = checkpoints.load(args.resume) if args.resume else 0

    def share_of_loss(batch: dict[str, Tensor]) -> Tensor:
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        labels = batch.pop("labels")
        return setup.loss(model(**batch), labels)

    @torch.no_grad()
    def evaluate() -> float:
        shares = [share_of_loss(held_out.batch(i, setup.rows)) for i in range(args.eval_batches)]
        return setup.total(torch.stack(shares).mean()).item()

    table = Table(args.out / "metrics.csv", first_step) if setup.is_first else None
    tokens_per_step = args.batch_size * args.seq_len
    peak = peak_flops(device) if args.precision == "bf16" else None
    work = flops_per_token(model.config, args.seq_len)
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    steps = trange(first_step, args.steps, mininterval=1, disable=not setup.is_first)
    for step in steps:
        start = time.perf_counter()
        rate = learning_rate(args, step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = share_of_loss(training.batch(step, setup.rows))
        loss.backward()
        if args.dump and step == first_step:
            gradients = {name: whole(parameter.grad).to("cpu", copy=True) for name, parameter in model.named_parameters()}
        norm = clip_gradients(model, args.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(setup.total(loss.detach()).item())  # waits for the device, so the time below is all of the step
        tokens_per_s = tokens_per_step / (time.perf_counter() - start)

        is_last = step + 1 == args.steps
        eval_loss = evaluate() if args.eval_every and (is_last or (step + 1) % args.eval_every == 0) else None
        if args.save and (is_last or (args.save_every and (step + 1) % args.save_every == 0)):
            checkpoints.save(args.save, step + 1)
        if table:
            mfu = tokens_per_s * work / (peak * setup.world_size) if peak else None
            table.append(step, losses[-1], eval_loss, norm.item(), rate, tokens_per_s, mfu)
            steps.set_postfix_str(f"loss {losses[-1]:.4f}, {tokens_per_s:,.0f} tokens/s", refresh=False)

    if table:
        table.plot(args.out / "loss.png")
        if args.dump:
            torch.save({"gradients": gradients, "losses": losses}, args.dump)


def main() -> None:
    args = parse_arguments()
    train(args, plain_setup(args) if args.plain else mesh_setup(args))
    if args.plain:
        assert "cp_mesh" not in sys.modules, "the plain run is the baseline: it must not import what it checks"
    else:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
