"""Train a Llama on text with any mix of data, context, tensor and pipeline parallelism.

    torchrun --nproc-per-node 4 examples/train_llama.py --cp 2 --tp 2
    python examples/train_llama.py --plain     # the same run on one device, without importing cp_mesh

A very long sequence, by options that save memory (docs/long.md):

    torchrun --nproc-per-node 2 examples/train_llama.py --cp 2 --model llama-3-8b --seq-len 262144 --batch-size 1 \
        --random-tokens --steps 3 --precision bf16 --recompute selective --offload-checkpoints --tiled-loss \
        --mlp-rows 8192

Batches and initial weights do not depend on the mesh, so losses and gradients do not either. A killed run continues
from the last checkpoint if the command has --save and --resume with the same folder:

    torchrun --nproc-per-node 4 --max-restarts 3 \
        examples/train_llama.py --save-every 50 --save DIR --resume DIR

Columns of metrics.csv: `peak_gib` is the peak of PyTorch's allocator on any rank so far, with cp_mesh's symmetric
memory; `host_gib` is pinned host memory of a rank, and AdamW's states if they are there; `mfu` is the share of the
peak in bf16.
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from data import IGNORE, VOCAB_SIZE, Corpus, joined, random_tokens, read_text, split, tokenize
from llama import CoreAttention, Llama, LlamaConfig, Stage
from metrics import Table, flops_per_token, peak_flops
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint
from tqdm import trange

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--plain", action="store_true", help="one device, no mesh, no cp_mesh")
    add("--dp", type=int, help="data parallel ranks; default: all ranks / (pp x cp x tp)")
    add("--cp", type=int, default=1, help="context parallel ranks")
    add("--tp", type=int, default=1, help="tensor parallel ranks")
    add("--pp", type=int, default=1, help="pipeline stages, with the 1F1B schedule")
    add("--microbatches", type=int, metavar="N", help="with --pp: microbatches per batch; default: one per row")
    add("--sequence-parallel", action="store_true", help="with --tp: also shard the sequence over tp for the norms")
    add("--overlapped", action="store_true", help="with --tp: use the linears of cp_mesh")
    layouts = "auto", "contiguous", "striped", "zigzag"
    add("--layout", choices=layouts, help="default: zigzag; with --documents auto, in one stage with whole norms")
    add("--joined", action="store_true", help="join the rows of a batch: a document takes the cp ranks that it needs")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--model", help="sizes of llama-3-8b, llama-3-70b, or a config.json, its folder or its text; else by options:")
    add("--dim", type=int, default=256)
    add("--layers", type=int, help="default: 4, or those of --model")
    add("--heads", type=int, default=8)
    add("--kv-heads", type=int, default=4)
    add("--vocab", type=int, default=VOCAB_SIZE, help=f"at least {VOCAB_SIZE}")
    add("--text", metavar="FILE", help="text file; default: the manual of Python inside CPython")
    add("--random-tokens", action="store_true", help="instead of text: to measure time and memory")
    add("--seq-len", type=int, default=512)
    add("--batch-size", type=int, default=8, help="rows per batch, of all ranks together")
    add("--documents", action="store_true", help="each paragraph is a document that attends only to itself")
    add("--restart-positions", action="store_true", help="with --documents: positions restart in each document")
    add("--steps", type=int, default=200)
    add("--lr", type=float, default=1e-3)
    add("--warmup", type=int, default=20, help="steps of linear warm-up; then cosine decay to a tenth")
    add("--clip", type=float, default=1.0, help="largest gradient norm")
    add("--seed", type=int, default=0)
    add("--precision", choices=("fp32", "bf16"), default="fp32")
    add("--recompute", choices=("none", "selective", "full"), default="none", help="selective: not attention")
    add("--tiled-loss", action="store_true", help="never hold the logits of all rows")
    add("--mlp-rows", type=int, metavar="N", help="compute MLPs N rows at a time")
    add("--offload-checkpoints", action="store_true", help="with --recompute: keep what blocks keep in host memory")
    add("--offload-optimizer", action="store_true", help="keep weights, gradients and AdamW's states there (FSDP2)")
    add("--optimizer-dtype", choices=("fp32", "bf16"), default="fp32", help="of weights, gradients and AdamW's states")
    add("--head-chunks", type=int, metavar="N", help="compute attention in N parts of the heads")
    add("--window", type=int, metavar="N", help="a query sees the last N tokens, itself included")
    add("--compile", nargs="?", const="inductor", metavar="BACKEND", help="compile each block")
    add("--save", type=Path, metavar="DIR", help="write DIR/step_N")
    add("--save-every", type=int, metavar="N", help="steps between checkpoints; default: only one at the end")
    resume = "a step_N, or a folder of them (takes the last), from any mesh or --plain; may be empty if equal to --save"
    add("--resume", type=Path, metavar="DIR", help=resume)
    add("--eval-every", type=int, metavar="N", help="steps between evaluations on held-out text")
    add("--eval-batches", type=int, default=4)
    add("--out", type=Path, default=Path("runs/llama"), help="folder of metrics.csv and loss.png")
    add("--dump", type=Path, metavar="FILE", help="file for the first step's whole gradients and all losses")
    args = parser.parse_args(arguments)
    if args.restart_positions and not args.documents:
        parser.error("--restart-positions needs --documents")
    one_stage = "save", "resume", "dump", "sequence_parallel", "joined", "tiled_loss", "window", "head_chunks"
    if args.pp > 1 and any(getattr(args, name) for name in one_stage):
        parser.error(f"--pp does not work with {', '.join(one_stage)}")
    if args.plain and (args.dp or 1) * args.cp * args.tp * args.pp > 1:
        parser.error("--plain runs on one rank")
    if args.overlapped and (args.tp == 1 or args.pp > 1):
        parser.error("--overlapped needs --tp, and no --pp")
    of_cp_mesh = "tiled_loss", "mlp_rows", "offload_checkpoints", "offload_optimizer", "window", "head_chunks"
    if args.plain and (any(getattr(args, name) for name in of_cp_mesh) or args.recompute == "selective"):
        parser.error(f"--plain works without {', '.join(of_cp_mesh)}, and with --recompute full alone")
    if args.offload_checkpoints and (args.recompute == "none" or args.compile):
        parser.error("--offload-checkpoints needs --recompute, and no --compile")
    if args.tiled_loss and args.tp > 1:
        parser.error("--tiled-loss runs without --tp: with --overlapped the loss is in chunks, too")
    return args


@dataclass
class Setup:
    """All that differs between `plain_setup` and `mesh_setup`."""

    device: torch.device
    model: Llama | Stage
    rows: slice  # of the global batch, for this rank
    # Loss of these rows, on the CPU: this rank's part of the mean over all tokens. Pipelines have run its backward.
    share_of_loss: Callable[[dict[str, Tensor]], Tensor]
    total: Callable[[Tensor], Tensor]  # sum of these parts over all ranks
    clip: Callable[..., Tensor] = clip_grad_norm_  # clips gradients to a norm; returns the norm before
    # Peak GiB on a GPU, and in host memory, of the rank that takes most.
    memory: Callable[[torch.optim.Optimizer], list[float]] | None = None
    world_size: int = 1
    is_first: bool = True


def new_model(args: argparse.Namespace, device: torch.device, **core: type[nn.Module]) -> Llama:
    config = LlamaConfig(args.vocab, args.dim, 4, args.heads, args.kv_heads)
    if args.model:
        config = LlamaConfig.read(args.model)
    if args.layers:
        config = replace(config, num_layers=args.layers)
    with device:
        model = Llama(config, **core)
    model.init_weights(args.seed)
    return model.to(DTYPES[args.optimizer_dtype])


def compile_blocks(model: Llama | Stage, args: argparse.Namespace) -> None:
    """Compile in place, so that parameters keep their names."""
    # ContextParallel enters and leaves a function mode inside each block: recomputation need not repeat this.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    for block in model.layers.children() if args.compile else ():
        block.compile(backend=args.compile, fullgraph=True)


def plain_setup(args: argparse.Namespace) -> Setup:
    """Set up one device with PyTorch only: every mesh has to reproduce this run."""
    device = torch.device(args.device)
    model = new_model(args, device)
    for block in model.layers if args.recompute == "full" else ():
        block.checkpoint = partial(checkpoint, use_reentrant=False)
    compile_blocks(model, args)

    if args.precision == "bf16":
        model.forward = torch.autocast(device.type, torch.bfloat16)(model.forward)

    def share_of_loss(batch: dict[str, Tensor]) -> Tensor:
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        labels = batch.pop("labels")
        return F.cross_entropy(model(**batch).flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE)

    return Setup(device, model, slice(None), share_of_loss, total=lambda share: share)


def mesh_setup(args: argparse.Namespace) -> Setup:
    """Set up a pp x dp x cp x tp mesh of all ranks."""
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", **alone)
    world_size = dist.get_world_size()
    dp = args.dp or world_size // (args.pp * args.cp * args.tp)
    if args.pp * dp * args.cp * args.tp != world_size or args.batch_size % dp:
        raise ValueError(
            f"pp x dp x cp x tp = {args.pp} x {dp} x {args.cp} x {args.tp} must be the {world_size} ranks, "
            f"and dp must divide --batch-size {args.batch_size}"
        )
    mesh = init_device_mesh(args.device, (args.pp, dp, args.cp, args.tp), mesh_dim_names=("pp", "dp", "cp", "tp"))
    return setup_on(mesh, args, device)


def setup_on(mesh: DeviceMesh, args: argparse.Namespace, device: torch.device) -> Setup:
    """Apply all plans: tensor parallelism first, then context parallelism, then FSDP."""
    import parallel_llama as parallel

    import cp_mesh

    data = mesh["dp", "cp"]._flatten("dp_cp")  # the ranks that hold different tokens
    rows = args.batch_size // mesh["dp"].size()
    length = args.seq_len * (rows if args.joined else 1)
    by_batch = args.documents and args.pp == 1 and not args.sequence_parallel
    layout = parallel.LAYOUTS[args.layout or ("auto" if by_batch else "zigzag")]
    sequence = cp_mesh.ShardedSequence(mesh["cp"], layout, length=length)

    if args.sequence_parallel and len(sequence.positions()) % args.tp:
        raise ValueError(f"--sequence-parallel: {len(sequence.positions())} tokens a cp rank, not a multiple of --tp")

    model = new_model(args, device, core=CoreAttention)
    if args.tp > 1:
        apply = parallel.apply_overlapped if args.overlapped else parallel.apply_tensor_parallel
        apply(model, mesh["tp"], args.sequence_parallel)
    elements = length // args.cp * model.config.dim
    saving = parallel.saving_plan(args.recompute, args.offload_checkpoints, args.mlp_rows, elements)
    if args.pp > 1:
        model = parallel.stage_of(model, mesh["pp"])
        parallel.apply_context_parallel_to_stage(model, mesh["cp"], sequence, saving)
    else:
        options = {"head_chunks": args.head_chunks, "saving": saving, "probe": not args.tiled_loss}
        parallel.apply_context_parallel(model, mesh["cp"], sequence, **options)
    compile_blocks(model, args)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    parallel.apply_fsdp(model, data, args.precision, **{"offload_policy": offload} if args.offload_optimizer else {})
    window = None if args.window is None else (args.window - 1, 0)

    def share_of_loss(batch: dict[str, Tensor]) -> Tensor:
        batch = joined(batch) if args.joined else batch
        mask = cp_mesh.Mask(documents=batch.pop("documents", None), window=window)
        labels = sequence.for_batch(length, mask).shard({"labels": batch.pop("labels").to(device)})["labels"]
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        if args.tiled_loss:  # in the forward: under FSDP2 it has the head's weight whole
            share = partial(cp_mesh.cross_entropy, labels=labels, mesh=data, ignore_index=IGNORE)
            return model(**batch, documents=mask, loss=lambda x, weight: share(x, weight=weight))
        return cp_mesh.cross_entropy(model(**batch, documents=mask), labels, data, ignore_index=IGNORE)

    if args.pp > 1:
        share_of_loss = parallel.pipeline(model, mesh["pp"], sequence, data, device, args.microbatches or rows)

    def total(share: Tensor) -> Tensor:
        for axis in (data, mesh["pp"]):
            dist.all_reduce(share, group=axis.get_group())
        return share

    def memory(optimizer: torch.optim.Optimizer) -> list[float]:
        most = torch.tensor(parallel.memory(optimizer), dtype=torch.float64, device=device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return (most / 2**30).tolist()

    rank = mesh.get_local_rank("dp")
    return Setup(
        device,
        model,
        slice(rank * rows, (rank + 1) * rows),
        share_of_loss,
        total,
        partial(cp_mesh.clip_grad_norm, over=mesh["pp"]) if args.pp > 1 else cp_mesh.clip_grad_norm,
        memory if device.type == "cuda" else None,
        dist.get_world_size(),
        is_first=dist.get_rank() == 0,
    )


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor of a DTensor, by a collective."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def learning_rate(args: argparse.Namespace, step: int) -> float:
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    progress = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * (0.55 + 0.45 * math.cos(math.pi * progress))


# These options and the step determine the order of the data. Nothing else is random after the first step, so no state
# of a random generator is saved.
DATA = ("text", "random_tokens", "seq_len", "batch_size", "documents", "restart_positions", "seed")


def state_of(args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """The contents of a checkpoint."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    data = {name: getattr(args, name) for name in DATA}
    return {"model": model_state, "optimizer": optimizer_state, "step": step, "data": data}


def save(directory: Path, state: dict[str, Any], is_first: bool) -> None:
    """Write directory/step_N, which any mesh and a plain run can read. It gets this name when it is complete."""
    complete = directory / f"step_{state['step']}"
    partial = directory / f"partial_{complete.name}"
    if is_first:
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed run
    dcp.save(state, checkpoint_id=partial)  # no rank writes before rank 0 has removed the old folder
    if is_first:
        shutil.rmtree(complete, ignore_errors=True)
        partial.rename(complete)


def load(args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Read a step_N, or the last one in the directory; return N, which sets the position in the data."""
    steps = sorted(args.resume.glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    found = steps[-1] if steps else args.resume
    if not (found / ".metadata").exists():
        if args.resume == args.save:
            return 0  # the first start of a command with --save and --resume
        raise ValueError(f"--resume: expected a step_N, or a folder of them, got {args.resume}")
    state = state_of(args, model, optimizer, 0)
    wanted = dict(state["data"])
    dcp.load(state, checkpoint_id=found)
    if state["data"] != wanted:
        raise ValueError(f"--resume: expected the data of the checkpoint, {state['data']}, got {wanted}")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return state["step"]


def train(args: argparse.Namespace, setup: Setup) -> None:
    model, device = setup.model, setup.device
    if args.random_tokens:
        number = args.batch_size * args.seq_len + 1
        training_text = held_out_text = random_tokens(number, model.config.vocab_size, args.seed)
    else:
        training_text, held_out_text = split(tokenize(read_text(args.text)))
    corpus = partial(
        Corpus,
        seq_len=args.seq_len,
        batch_size=args.batch_size,
        documents=args.documents,
        restart_positions=args.restart_positions,
        seed=args.seed,
    )
    training, held_out = corpus(training_text), corpus(held_out_text) if args.eval_every else None
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    first_step = load(args, model, optimizer) if args.resume else 0

    @torch.no_grad()
    def evaluate() -> float:
        shares = [setup.share_of_loss(held_out.batch(i, setup.rows)) for i in range(args.eval_batches)]
        return setup.total(torch.stack(shares).mean()).item()

    table = Table(args.out / "metrics.csv", first_step) if setup.is_first else None
    tokens_per_step = args.batch_size * args.seq_len
    peak = peak_flops(device) if args.precision == "bf16" else None
    work = flops_per_token(model.config, args.seq_len)
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    steps = trange(first_step, args.steps, mininterval=1, disable=not setup.is_first)
    gc.disable()  # all ranks wait for one that collects garbage: collect on all at once, between steps
    for step in steps:
        if step % 50 == 0:
            gc.collect()
        start = time.perf_counter()
        rate = learning_rate(args, step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = setup.share_of_loss(training.batch(step, setup.rows))
        if loss.requires_grad:
            loss.backward()
        if args.dump and step == first_step:
            for name, parameter in model.named_parameters():
                gradients[name] = whole(parameter.grad).to("cpu", copy=True)
        norm = setup.clip(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(setup.total(loss.detach()).item())  # waits for the device, so the time below is of the whole step
        tokens_per_s = tokens_per_step / (time.perf_counter() - start)

        is_last = step + 1 == args.steps
        eval_loss = evaluate() if args.eval_every and (is_last or (step + 1) % args.eval_every == 0) else None
        if args.save and (is_last or (args.save_every and (step + 1) % args.save_every == 0)):
            save(args.save, state_of(args, model, optimizer, step + 1), setup.is_first)
        gib = setup.memory(optimizer) if setup.memory else (None, None)
        if table:
            mfu = tokens_per_s * work / (peak * setup.world_size) if peak else None
            table.append(step, losses[-1], eval_loss, norm.item(), rate, tokens_per_s, mfu, *gib)
            steps.set_postfix_str(f"loss {losses[-1]:.4f}, {tokens_per_s:,.0f} tokens/s", refresh=False)

    if table:
        table.plot(args.out / "loss.png")
        if args.dump:
            torch.save({"gradients": gradients, "losses": losses}, args.dump)


def main() -> None:
    args = parse_arguments()
    if args.dump:  # PyTorch warns about a collective for each gradient; it happens only once, here
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    train(args, plain_setup(args) if args.plain else mesh_setup(args))
    if args.plain:
        assert "cp_mesh" not in sys.modules, "the plain run is the baseline: it must not import cp_mesh"
    else:
        dist.barrier()  # Python must not exit while a gloo thread still releases tensors of the last collective
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
