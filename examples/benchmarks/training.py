"""Time training steps of the same Llama with cp_mesh, with PyTorch's `context_parallel` and with Ulysses.

    torchrun --nproc-per-node 4 examples/benchmarks/training.py --seq-len 8192 131072 --layers 8 --csv training.csv
    torchrun --nproc-per-node 4 examples/benchmarks/training.py --compile       # blocks compiled
    torchrun --nproc-per-node 4 examples/benchmarks/training.py --loss torch    # one loss function for all
    torchrun --nproc-per-node 8 examples/benchmarks/training.py --tp 2          # linears over tp, cp 4 x tp 2
    torchrun --nproc-per-node 2 examples/benchmarks/training.py --packed        # what cp costs

The layers are those of Llama-3-8B; the vocabulary is 32,768 of its 128,256 tokens, since with few layers and the whole
vocabulary the output matrix would dominate. Weights, FSDP2, optimizer, recomputation and the head-tail placement of
tokens are the same objects or the same code for all variants (Ulysses holds contiguous tokens). Variants differ in
context-parallel attention and in the loss function. Before anything is timed, losses and gradients on one batch must
agree. Then whole steps take turns: forward, backward, gradient clipping, AdamW. A rival that raises is left out; its
status has the reason. Garbage is collected only between rounds. ringmaster and DeepSpeed's Ulysses are in attention.py
alone: they register attention of Transformers' models, and a step would differ by that attention only.

With `--tp` there are two variants of linears over tp, and both use cp_mesh's attention: "cp_mesh" has cp_mesh's
linears, embedding and vocabulary-parallel loss; "torch_linears" has PyTorch's styles, which gather whole logits. Each
has its own weights, equal at the start; the memory of each includes both.

With `--packed` steps have packed documents, new in each step, of lognormal lengths (median 512). "cp_mesh" shards them
over cp, layout "auto"; "dp" has the same code over one rank: each takes whole documents, as data parallelism does. Both
have the same tokens and documents, and planning is in their times. A length gives one row, with columns of `COST`:
`ratio` is `cp_ms` over `dp_ms`, medians of the slowest rank.

By default each variant has the loss function of its users: `cp_mesh.cross_entropy`, which holds 4 bytes per bf16 logit,
or `F.cross_entropy` of float32 logits, which holds 12. With few layers and long sequences the second
sets the peak of a step. `--loss torch` gives it to all variants, which then differ only in attention.

Columns. `blocks`: "eager", or the backend that compiles them. `step_ms_*`: of the slowest rank. `mfu` and
`mfu_trainer`: `model_flops` over the vendor's dense bf16 peak. `peak_gib`: the largest peak of PyTorch's allocator on
any rank, plus cp_mesh's symmetric memory, which that allocator does not count; without NCCL's buffers.
`grad_difference`: `Trainer.gradient_difference` from the first variant.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

ROOT = Path(__file__).resolve().parents[2]
# a checkout that is not installed, the other benchmarks, and the trainer's files
sys.path[:0] = [str(ROOT), str(Path(__file__).parent), str(ROOT / "examples")]

from attention import Ranks, describe  # noqa: E402
from contestants import Case, document_lengths, heads_to_sequence, sequence_to_heads  # noqa: E402
from llama import CoreAttention, Llama, LlamaConfig  # noqa: E402
from metrics import flops_per_token, peak_flops  # noqa: E402
from parallel_llama import apply_fsdp, apply_overlapped, apply_tensor_parallel  # noqa: E402
from raw_kernels import RAW_KERNELS, present_kernels, swap  # noqa: E402
from report import git_commit, options  # noqa: E402
from tables import steps_table  # noqa: E402

import cp_mesh  # noqa: E402
from cp_mesh.comm.exchange import choose_transport, symmetric_memory_bytes  # noqa: E402

COLUMNS = (
    *("date", "commit", "gpu", "world", "tp", "torch", "variant", "settings", "blocks", "layers", "seq_len", "vocab"),
    *("precision", "recompute", "loss_function", "steps", "step_ms_median", "step_ms_min", "step_ms_max"),
    *("tokens_per_s_per_gpu", "mfu", "mfu_trainer", "peak_gib", "loss", "grad_norm", "grad_difference", "status"),
)
SHAPE = ("layers", "dim", "heads", "kv_heads", "ffn", "vocab")
COST = (
    *("date", "commit", "gpu", "world", "torch", "settings", "blocks", *SHAPE, "precision", "recompute", "steps"),
    *("tokens_per_gpu", "cp_ms", "dp_ms", "ratio", "cp_peak_gib", "dp_peak_gib", "grad_difference", "status"),
)
VARIANTS = ("cp_mesh", "ulysses", "torch_allgather")
OF_TP = ("cp_mesh", "torch_linears")
OF_PACKED = ("cp_mesh", "dp")
OURS = {*OF_TP, *OF_PACKED}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = options(__doc__)
    add = parser.add_argument
    add("--seq-len", type=int, nargs="+", default=[131072], help="tokens of a step; with --packed, of each GPU")
    add("--packed", action="store_true", help="documents, new in each step: what cp costs over data parallelism")
    add("--one-gpu", action="store_true", help="all ranks on the first GPU: times say nothing of speed")
    add("--compile", nargs="?", const="inductor", metavar="BACKEND", help="compile each block")
    add("--layers", type=int, default=4)
    add("--dim", type=int, default=4096)
    add("--heads", type=int, default=32)
    add("--kv-heads", type=int, default=8)
    add("--ffn", type=int, default=14336)
    add("--vocab", type=int, default=32768)
    add("--precision", choices=("bf16", "fp32"), default="bf16")
    add("--recompute", choices=("selective", "full", "none"), default="selective", help="selective: all but attention")
    add("--loss", choices=("own", "torch"), default="own", help="own: see above; torch: F.cross_entropy for all")
    add("--variants", nargs="+", choices=(*VARIANTS, *OF_TP[1:]), help="default: all")
    add("--tp", type=int, default=1, help="ranks of tp; the others are cp")
    add("--kernel", default="auto", help="kernel of cp_mesh")
    add("--transport", default="auto", help="transport of cp_mesh")
    add("--warmup", type=int, default=2, help="rounds before the measured ones")
    add("--steps", type=int, default=5, help="measured rounds")
    add("--seconds", type=float, default=60.0, help="start no further measured round after this time; one always runs")
    args = parser.parse_args(arguments)
    able = OF_PACKED if args.packed else VARIANTS if args.tp == 1 else OF_TP
    args.variants = args.variants or list(able)
    if strangers := sorted({*args.variants} - {*able}):
        parser.error(f"--variants with --tp {args.tp}: expected {', '.join(able)}, got {', '.join(strangers)}")
    if args.packed and (args.tp > 1 or len(args.variants) < 2):
        parser.error("--packed compares cp_mesh and dp, without --tp")
    return args


def llama_config(args: argparse.Namespace) -> LlamaConfig:
    return LlamaConfig(args.vocab, args.dim, args.layers, args.heads, args.kv_heads, ffn_dim=args.ffn)


def model_flops(config: LlamaConfig, seq_len: int) -> tuple[float, float]:
    """FLOPs of one step by two conventions; activations that checkpointing computes again count in neither.

    Returns:
        With causal attention's backward as 2.5 times its forward, as attention kernels are rated: of its five products
        one computes the scores again. And as twice its forward, as `examples/train_llama.py` reports.
    """
    trainers = flops_per_token(config, seq_len) * seq_len
    return trainers + config.num_layers * config.num_heads * config.head_dim * seq_len**2, trainers


def make_batch(args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Random tokens and labels [1, S], equal on all ranks."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(args.vocab, (1, args.seq_len + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_function(variant: str, args: argparse.Namespace) -> str:
    """What a variant computes its loss with."""
    return "cp_mesh.cross_entropy" if variant in OURS and args.loss == "own" else "F.cross_entropy"


ShareOfLoss = Callable[[Tensor, Tensor], Tensor]
"""Of logits [1, L, V] and labels [1, L] of this rank: its share of the mean loss of all tokens but padding."""


def share_by_torch(logits: Tensor, labels: Tensor, num_tokens: int) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum") / num_tokens


class StockCore(nn.Module):
    """The attention of a model whose trainer uses PyTorch's `context_parallel`."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


class UlyssesCore(nn.Module):
    """An all-to-all of heads around a kernel that sees the whole sequence."""

    kernel = ""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        return torch.ops.cp_mesh_benchmark.ulysses(q, k, v, self.kernel)[0]


def _case(q: Tensor, k: Tensor) -> Case:
    """[1, H, L, D] tensors as `contestants` knows them."""
    heads, rows, head_dim = q.shape[1:]
    world = dist.get_world_size(), dist.get_rank()
    return Case(heads, k.shape[1], head_dim, q.dtype, True, rows, *world, q.device)


def _ulysses(q: Tensor, k: Tensor, v: Tensor, kernel: str) -> tuple[Tensor, Tensor, Tensor]:
    """out [1, H, L, D], what the kernel gave of it [1, S, H / cp, D], and lse."""
    case = _case(q, k)
    out, lse = RAW_KERNELS[kernel].forward(*heads_to_sequence([*map(swap, (q, k, v))], case), True, case.scale)
    return swap(sequence_to_heads([out], case)[0].contiguous()), out.contiguous(), lse.contiguous()


def _ulysses_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kernel: str
) -> tuple[Tensor, Tensor, Tensor]:
    case = _case(q, k)
    gathered = heads_to_sequence([*map(swap, (dout, q, k, v))], case)
    gradients = RAW_KERNELS[kernel].backward(*gathered, out, lse, True, case.scale)
    dq, dk, dv = (swap(x.contiguous()) for x in sequence_to_heads(list(gradients), case))
    return dq, dk, dv


def _ulysses_like(q: Tensor, k: Tensor, v: Tensor, kernel: str) -> tuple[Tensor, Tensor, Tensor]:
    heads, rows, head_dim = q.shape[1:]
    heads, seq_len = heads // dist.get_world_size(), rows * dist.get_world_size()
    whole, lse = q.new_empty(1, seq_len, heads, head_dim), q.new_empty(1, heads, seq_len, dtype=torch.float32)
    return _like(q), whole, lse


def _like(x: Tensor) -> Tensor:
    """A result of [1, H, L, D] as it lies in memory: row by row."""
    return swap(swap(x).new_empty(swap(x).shape))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *qkv, ctx.kernel = inputs
    ctx.save_for_backward(*qkv, *output[1:])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return *torch.ops.cp_mesh_benchmark.ulysses_backward(dout, *ctx.saved_tensors, ctx.kernel), None


# An op, as cp_mesh's is: a graph of torch.compile does not break at it, and selective recomputation can save it. What
# it saves are its results; q, k and v travel again beside dout, which spares their memory.
_library = torch.library.Library("cp_mesh_benchmark", "DEF")
_library.define("ulysses(Tensor q, Tensor k, Tensor v, str kernel) -> (Tensor, Tensor, Tensor)")
_library.define(
    "ulysses_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, str kernel)"
    " -> (Tensor, Tensor, Tensor)"
)
_library.impl("ulysses", torch.compiler.disable(_ulysses), "CompositeExplicitAutograd")
_library.impl("ulysses_backward", torch.compiler.disable(_ulysses_backward), "CompositeExplicitAutograd")
torch.library.register_fake("cp_mesh_benchmark::ulysses", _ulysses_like, lib=_library)
torch.library.register_fake(
    "cp_mesh_benchmark::ulysses_backward", lambda dout, q, k, v, *_: (_like(q), _like(k), _like(v)), lib=_library
)
torch.library.register_autograd("cp_mesh_benchmark::ulysses", _gradients, setup_context=_keep, lib=_library)


class SwitchedCore(nn.Module):
    """An attention core a variant, without weights; `chosen` names the one that is called.

    What is chosen is a string that differs by variant: compiled blocks ask for which one they were compiled.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cp_mesh, self.dp, self.ulysses = CoreAttention(), CoreAttention(), UlyssesCore()
        self.torch_allgather = StockCore()
        self.chosen = "cp_mesh"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        return getattr(self, self.chosen)(q, k, v, documents)


class WholeBatches(nn.Module):
    """The root that cp_mesh's plan shards inputs for; other variants call `model` with shards of their own."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: cp_mesh.Mask | None = None) -> Tensor:
        return self.model(tokens, positions, documents)


class Variant(Protocol):
    name: str
    core: str  # in `SwitchedCore`
    settings: str
    refusal: str | None  # why it does not take part

    @staticmethod
    def context_fn() -> Any:
        """Selective recomputation: of everything but this variant's attention."""

    def loss_and_backward(self, tokens: Tensor, labels: Tensor, share_of_loss: ShareOfLoss) -> Tensor:
        """Whole [1, S] tokens and labels to this rank's share of the loss; gradients are added to the weights."""


class CPMeshVariant:
    """cp_mesh as `examples/train_llama.py` uses it. "dp": of a batch each rank of ``data`` has a part of its own."""

    refusal = None

    def __init__(self, name: str, model: Llama, data: DeviceMesh, args: argparse.Namespace, ranks: Ranks) -> None:
        self.name, self.root, self.data = name, WholeBatches(model), data
        self.core, mesh, length = "cp_mesh", data, args.seq_len
        if name == "dp":
            self.core, mesh, length = "dp", ranks.alone, args.seq_len // data.size()
        self.sequence = cp_mesh.ShardedSequence(mesh, "auto" if args.packed else cp_mesh.ZigZag(), length=length)
        mask = {"mask": lambda q, k, v, documents: documents} if args.packed else {}
        style = cp_mesh.ContextParallel(self.sequence, kernel=args.kernel, transport=args.transport, **mask)
        # not watched if compiled: the rivals' attention in the same blocks is not in the plan
        root_style = cp_mesh.ShardedModel(self.sequence, watch=not args.compile)
        cp_mesh.parallelize(self.root, mesh, {"": root_style, f"model.layers.*.attention.core.{self.core}": style})
        transport = choose_transport(args.transport, mesh.get_group(), ranks.device)
        self.settings = f"kernel={self._kernel(args, ranks.device)} transport={transport}"

    def _kernel(self, args: argparse.Namespace, device: torch.device) -> str:
        """What "auto" stands for in this run."""
        call = cp_mesh.explain(
            args.seq_len, self.data.size(), num_heads=args.heads // args.tp, num_kv_heads=args.kv_heads // args.tp,
            head_dim=args.dim // args.heads, dtype=torch.bfloat16 if args.precision == "bf16" else torch.float32,
            device=device.type, kernel=args.kernel,
        )  # fmt: skip
        return call.found.kernel.name

    def _own(self, x: Tensor) -> Tensor:
        return x.chunk(self.data.size(), 1)[self.data.get_local_rank()] if self.name == "dp" else x

    @staticmethod
    def context_fn() -> Any:
        return cp_mesh.training.checkpoint_context_fn()

    def loss_and_backward(
        self, tokens: Tensor, labels: Tensor, share_of_loss: ShareOfLoss, ids: Tensor | None = None
    ) -> Tensor:
        """``ids``: of packed documents, [1, S] on the CPU; the mask is made here, and with it the layout."""
        sequence, given = self.sequence, {}
        if ids is not None:
            tokens, labels, ids = (self._own(x) for x in (tokens, labels, ids))
            given = {"documents": cp_mesh.Mask(documents=ids)}
            sequence = sequence.for_batch(ids.shape[1], given["documents"])
        labels = sequence.shard({"labels": labels})["labels"]
        loss = share_of_loss(self.root(tokens, **given), labels)  # a name would hold the logits in backward
        loss.backward()
        return loss.detach()


class TorchVariant:
    """PyTorch's `context_parallel` around forward and backward, with tokens, labels and positions as its buffers."""

    name = core = "torch_allgather"

    def __init__(self, model: Llama, mesh: DeviceMesh, args: argparse.Namespace, ranks: Ranks) -> None:
        self.model, self.mesh = model, mesh
        self.backend = SDPBackend.CUDNN_ATTENTION if ranks.device.type == "cuda" else None
        self.refusal: str | None = None  # one that raises is found by `compare`
        self.settings = f"kernel={'cudnn' if self.backend else 'cpu'} rotate=allgather"

    @contextmanager
    def _active(self, buffers: list[Tensor], dims: list[int]) -> Iterator[None]:
        # Private as a module, but the only home of set_rotate_method in all versions since 2.4.
        from torch.distributed.tensor.experimental._attention import context_parallel, set_rotate_method

        set_rotate_method("allgather")
        context = context_parallel(self.mesh, buffers=buffers, buffer_seq_dims=dims, no_restore_buffers=set(buffers))
        with context, sdpa_kernel(self.backend) if self.backend else nullcontext():
            yield

    @staticmethod
    def context_fn() -> Any:
        ops = torch.ops.aten
        saved = [
            ops._scaled_dot_product_cudnn_attention.default,
            ops._scaled_dot_product_flash_attention.default,
            ops._scaled_dot_product_efficient_attention.default,
            ops._scaled_dot_product_flash_attention_for_cpu.default,
        ]
        return create_selective_checkpoint_contexts(saved)

    def loss_and_backward(self, tokens: Tensor, labels: Tensor, share_of_loss: ShareOfLoss) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        tokens, labels = tokens.clone(), labels.clone()  # the context shrinks its buffers in place
        with self._active([tokens, labels, positions], [1, 1, 0]):
            loss = share_of_loss(self.model(tokens, positions), labels)
            loss.backward()
        return loss.detach()


class UlyssesVariant:
    """Each rank holds a chunk of the tokens, and while it attends a part of the heads."""

    name = core = "ulysses"

    def __init__(self, model: Llama, mesh: DeviceMesh, args: argparse.Namespace, ranks: Ranks) -> None:
        self.model, self.mesh = model, mesh
        kernel = present_kernels(ranks.device)[0]
        for block in self.model.layers:
            block.attention.core.ulysses.kernel = kernel
        self.settings, self.refusal = f"kernel={kernel}", None
        if args.kv_heads % mesh.size() or args.seq_len % mesh.size():
            self.refusal = f"{args.kv_heads} kv heads and {args.seq_len} tokens over {mesh.size()} ranks"

    @staticmethod
    def context_fn() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.cp_mesh_benchmark.ulysses.default])

    def loss_and_backward(self, tokens: Tensor, labels: Tensor, share_of_loss: ShareOfLoss) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        tokens, labels, positions = (
            x.chunk(self.mesh.size(), -1)[self.mesh.get_local_rank()] for x in (tokens, labels, positions)
        )
        loss = share_of_loss(self.model(tokens, positions), labels)
        loss.backward()
        return loss.detach()


@dataclass
class Figures:
    """What was found out about a variant; times in ms, of the slowest rank."""

    status: str = "ok"
    loss: float | None = None
    grad_norm: float | None = None
    grad_difference: float | None = None
    step_ms: list[float] = field(default_factory=list)
    peak_bytes: float = 0.0


class Trainer:
    """One set of weights and one optimizer, stepped by any variant."""

    def __init__(self, args: argparse.Namespace, ranks: Ranks, whole: DeviceMesh) -> None:
        """``whole``: a mesh of cp, or of dp x cp x tp with one rank of dp."""
        tp, device = whole["tp"] if whole.ndim > 1 else None, ranks.device
        self.args, self.ranks, self.mesh, self.device, self.tp = args, ranks, whole["cp"], device, tp
        with device:
            self.model = Llama(llama_config(args), SwitchedCore)
        self.model.init_weights(0)
        if tp is not None:
            apply = apply_overlapped if args.variants == ["cp_mesh"] else apply_tensor_parallel
            apply(self.model, tp, sequence_parallel=True)
        self.variants = [self._variant(name, args) for name in args.variants]
        self.checkpoints = {variant.name: self._checkpoint(variant) for variant in self.variants}
        if args.compile:
            # cp_mesh and context_parallel enter modes inside a block: no side effect that recomputation must repeat.
            torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
            for block in self.model.layers:
                block.compile(backend=args.compile, dynamic=False)
        # A group of its own, else FSDP's collectives would queue with those of PyTorch's context_parallel.
        if tp is None:
            data = DeviceMesh.from_group(dist.new_group(), device.type, mesh_dim_names=("data",))
        else:
            data = whole["dp", "cp"]._flatten("dp_cp")
        apply_fsdp(self.model, data, args.precision)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), 1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda"
        )
        self.tokens, self.labels = (x.to(device) for x in make_batch(args))

    def _variant(self, name: str, args: argparse.Namespace) -> Variant:
        given = self.model, self.mesh, args, self.ranks
        if name in OURS:
            return CPMeshVariant(name, *given)
        return UlyssesVariant(*given) if name == "ulysses" else TorchVariant(*given)

    def _checkpoint(self, variant: Variant) -> Callable[..., Tensor] | None:
        """Made once: compiled blocks ask whether it is the one that they were compiled for."""
        if self.args.recompute == "none":
            return None
        saves: dict[str, Any] = {"context_fn": variant.context_fn} if self.args.recompute == "selective" else {}
        return partial(checkpoint, use_reentrant=False, **saves)

    def loss_and_backward(self, variant: Variant, ids: Tensor | None) -> Tensor:
        """This rank's share of the loss, with gradients in place of those before."""
        self.optimizer.zero_grad()
        for block in self.model.layers:
            block.attention.core.chosen = variant.core
            block.checkpoint = self.checkpoints[variant.name]
        share = partial(share_by_torch, num_tokens=self.args.seq_len)
        if loss_function(variant.name, self.args) == "cp_mesh.cross_entropy":
            share = partial(cp_mesh.cross_entropy, mesh=self.mesh)
        packed = {} if ids is None else {"ids": ids}
        return variant.loss_and_backward(self.tokens, self.labels, share, **packed)

    def ids(self, step: int) -> Tensor | None:
        """Of a step's packed documents, [1, S], equal on all ranks; none crosses the bounds of data parallelism."""
        if not self.args.packed:
            return None
        size, rows = self.mesh.size(), self.args.seq_len // self.mesh.size()
        lengths = torch.tensor([n for i in range(size) for n in document_lengths(rows, step * size + i)])
        return torch.arange(len(lengths)).repeat_interleave(lengths)[None]

    def clip(self) -> Tensor:
        """Scale gradients to a norm of at most 1; their norm before, of the whole model."""
        if self.tp is not None:
            return cp_mesh.clip_grad_norm(list(self.model.parameters()), 1.0)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def timed_step(self, variant: Variant, step: int) -> float:
        """One step; milliseconds on the slowest rank."""
        ids = self.ids(step)
        self.ranks.line_up()
        begin = time.perf_counter()
        self.loss_and_backward(variant, ids)
        self.clip()
        self.optimizer.step()
        self.ranks.synchronize()
        return 1e3 * float(self.ranks.largest(time.perf_counter() - begin))

    def check(self, variant: Variant) -> tuple[float, float, dict[str, Tensor]]:
        """(loss, gradient norm, this rank's gradients) on the batch; the weights stay as they are."""
        loss = (
            float(self.ranks.total(self.loss_and_backward(variant, self.ids(0)))) / self.args.tp
        )  # of whose ranks each has it
        gradients = {}
        for name, parameter in self.model.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            gradients[name] = parameter.grad.to_local().clone()
        return loss, self.clip().item(), gradients

    def gradient_difference(self, gradients: dict[str, Tensor], others: dict[str, Tensor]) -> tuple[float, str]:
        """The largest relative difference, |g - g'| / |g| over a whole parameter, and the parameter it is found in.

        Losses of random tokens and untrained weights say little about attention; gradients of wq and wk do.
        """
        squares = [
            torch.stack([(others[name] - g).double().square().sum(), g.double().square().sum()])
            for name, g in gradients.items()
        ]
        difference, norm = self.ranks.total(torch.stack(squares)).sqrt().unbind(1)
        worst = (difference / norm).nan_to_num(float("inf"))
        return worst.max().item(), list(gradients)[int(worst.argmax())]


# Of the loss, the gradient norm and the worst parameter's gradients, relative to the first variant. fp32: sums in
# another order. bf16: attention rounds at other places (each tile, or their sum), 2^-9 a value, which leaves gradients
# of wk apart by 0.02 after 2 layers and 0.03 after 12, while a wrong layout or wrong positions make it 0.8 or more
# (CPU, 2 ranks, 2048 tokens); the loss, a mean over random tokens, moves by as little as 1e-4 then.
TOLERANCES = {"fp32": (1e-5, 1e-4, 1e-3), "bf16": (1e-3, 1e-2, 0.2)}


def entries(trainers: Sequence[Trainer]) -> list[tuple[Trainer, Variant]]:
    return [(trainer, variant) for trainer in trainers for variant in trainer.variants]


def compare(trainers: Sequence[Trainer], figures: dict[str, Figures]) -> None:
    """Fill in loss, gradient norm and difference; a variant that disagrees with the first one gets a bad status."""
    reference: tuple[float, float, dict[str, Tensor]] | None = None
    first = trainers[0].variants[0].name
    for trainer, variant in entries(trainers):
        found = figures[variant.name]
        if variant.refusal:
            found.status = f"refused: {variant.refusal}"
            trainer.ranks.print(f"{variant.name} [{variant.settings}] {found.status}")
            continue
        try:
            result = trainer.check(variant)
        except Exception as error:
            if variant.name in OURS:
                raise
            found.status = f"refused: {describe(error)}"
            trainer.ranks.print(f"{variant.name} [{variant.settings}] {found.status}")
            continue
        found.loss, found.grad_norm = result[:2]
        reference = reference or result
        found.grad_difference, where = trainer.gradient_difference(reference[2], result[2])
        distances = (
            abs(found.loss / reference[0] - 1),
            abs(found.grad_norm / reference[1] - 1),
            found.grad_difference,
        )
        allowed = TOLERANCES[trainer.args.precision]
        trainer.ranks.print(
            f"{variant.name} [{variant.settings}]: loss {found.loss:.6f}, gradient norm {found.grad_norm:.6f}; "
            f"apart by {distances[0]:.1e}, {distances[1]:.1e}, gradients by {distances[2]:.1e} in {where}"
        )
        if not all(distance <= limit for distance, limit in zip(distances, allowed, strict=True)):
            figures_apart = " ".join(f"{distance:.1e}" for distance in distances)
            found.status = f"differs from {first} by {figures_apart} in {where}"


def measure(trainers: Sequence[Trainer], figures: dict[str, Figures]) -> None:
    """Rounds of one step of every variant each."""
    args, ranks = trainers[0].args, trainers[0].ranks
    cuda = ranks.device.type == "cuda"
    able = [(trainer, variant) for trainer, variant in entries(trainers) if figures[variant.name].status == "ok"]
    begin = time.perf_counter()
    for i in range(args.warmup + args.steps):
        # The ranks' clocks differ; they must agree on the end.
        if i > args.warmup and float(ranks.largest(time.perf_counter() - begin)) > args.seconds:
            ranks.print(f"--seconds {args.seconds:g}: the end after {i - args.warmup} measured rounds")
            break
        gc.collect()
        for trainer, variant in able:
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            milliseconds = trainer.timed_step(variant, i + 1)
            if i < args.warmup:
                continue
            found = figures[variant.name]
            found.step_ms.append(milliseconds)
            if cuda:
                own = symmetric_memory_bytes() if variant.name in OF_TP else 0
                peak = float(ranks.largest(torch.cuda.max_memory_allocated() + own))
                found.peak_bytes = max(found.peak_bytes, peak)


def row(trainer: Trainer, variant: Variant, figures: Figures) -> dict[str, str]:
    args, world = trainer.args, trainer.mesh.size() * trainer.args.tp
    values: dict[str, Any] = {
        "date": date.today().isoformat(),
        "commit": args.commit or git_commit(),
        "gpu": torch.cuda.get_device_name() if trainer.device.type == "cuda" else "cpu",
        "world": world,
        "tp": args.tp,
        "torch": torch.__version__,
        "variant": variant.name,
        "settings": variant.settings,
        "blocks": args.compile or "eager",
        "layers": args.layers,
        "seq_len": args.seq_len,
        "vocab": args.vocab,
        "precision": args.precision,
        "recompute": args.recompute,
        "loss_function": loss_function(variant.name, args),
        "steps": len(figures.step_ms),
        "status": figures.status,
    }
    for name in ("loss", "grad_norm", "grad_difference"):
        value = getattr(figures, name)
        values[name] = "" if value is None else f"{value:.8g}"
    if figures.step_ms:
        median = statistics.median(figures.step_ms)
        values["step_ms_median"] = f"{median:.1f}"
        values["step_ms_min"], values["step_ms_max"] = (f"{f(figures.step_ms):.1f}" for f in (min, max))
        values["tokens_per_s_per_gpu"] = f"{args.seq_len / world / median * 1e3:.1f}"
        values["peak_gib"] = f"{figures.peak_bytes / 2**30:.2f}" if figures.peak_bytes else ""
        peak = peak_flops(trainer.device)
        if peak and args.precision == "bf16":
            for name, flops in zip(
                ("mfu", "mfu_trainer"), model_flops(trainer.model.config, args.seq_len), strict=True
            ):
                values[name] = f"{flops / (median / 1e3 * world * peak):.4f}"
    return {name: str(value) for name, value in values.items()}


def cost(args: argparse.Namespace, cp: dict[str, str], dp: dict[str, str]) -> dict[str, str]:
    """The row of `COST`, of the rows of both ways."""
    found = {name: cp[name] for name in COST if name in cp} | {name: str(getattr(args, name)) for name in SHAPE}
    found |= {"tokens_per_gpu": str(args.seq_len // int(cp["world"])), "grad_difference": dp["grad_difference"]}
    found |= {"status": dp["status"]}
    for name, of_way in (("cp", cp), ("dp", dp)):
        found |= {f"{name}_ms": of_way.get("step_ms_median", ""), f"{name}_peak_gib": of_way.get("peak_gib", "")}
    if found["cp_ms"]:
        found["ratio"] = f"{float(found['cp_ms']) / float(found['dp_ms']):.4f}"
    return {name: found.get(name, "") for name in COST}


def rows_of(args: argparse.Namespace, ranks: Ranks, mesh: DeviceMesh) -> tuple[list[dict[str, str]], bool]:
    """The rows of one length, and whether the variants agree."""
    together = [args.variants] if args.tp == 1 else [[name] for name in args.variants]
    trainers = [Trainer(argparse.Namespace(**vars(args) | {"variants": x}), ranks, mesh) for x in together]
    figures = {name: Figures() for name in args.variants}
    compare(trainers, figures)
    agree = all(found.status == "ok" or found.status.startswith("refused: ") for found in figures.values())
    if agree:
        measure(trainers, figures)
    else:
        ranks.print("the variants disagree: nothing was timed")
    rows = [row(trainer, variant, figures[variant.name]) for trainer, variant in entries(trainers)]
    rows = [cost(args, *rows)] if args.packed else rows
    for values in rows:
        ranks.print(", ".join(f"{name} {x}" for name, x in [*values.items()][5:] if x))
    return rows, agree


def main() -> None:
    args = parse_arguments()
    ranks = Ranks(args.device, args.one_gpu)
    cp, left = divmod(ranks.size, args.tp)
    if left:
        raise SystemExit(f"--tp {args.tp} does not divide {ranks.size} ranks")
    sizes, names = ((cp,), ("cp",)) if args.tp == 1 else ((1, cp, args.tp), ("dp", "cp", "tp"))
    mesh = init_device_mesh(args.device, sizes, mesh_dim_names=names)
    gc.disable()
    rows, agree = [], True
    for seq_len in args.seq_len:
        of_length = {"seq_len": seq_len * (cp if args.packed else 1)}
        found, agrees = rows_of(argparse.Namespace(**vars(args) | of_length), ranks, mesh)
        rows, agree = rows + found, agree and agrees
        ranks.append(args.csv, COST if args.packed else COLUMNS, found)
        torch._dynamo.reset()
        ranks.release(*(mesh.get_group(axis) for axis in names[-2:]))  # cp and tp, in one order on all ranks
    if not args.packed:
        ranks.print(steps_table(rows))
    ranks.end(not agree)


if __name__ == "__main__":
    main()
