"""The contestants of the benchmark: cp_mesh, its rivals, the floor that no ring can beat, and one GPU alone.

A contestant reports whether it can run a case and which positions its ranks hold, and sets up a `Run`: callables for
the forward and the backward on tensors in its own format. Shapes: B = 1 batch, S the whole sequence, L = S / cp rows
per rank, H query heads, K kv heads, D head dim; inputs are [1, L, H or K, D].
"""

from __future__ import annotations

import math
import random
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest.mock import patch

import flash_attn_2
import torch
import torch.distributed as dist
import torch.nn.functional as F
from raw_kernels import RAW_KERNELS, Cuts, RawKernel, swap
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cp_mesh import Contiguous, Mask, ShardedSequence, Striped, ZigZag, attention
from cp_mesh.call.plan import METHODS
from cp_mesh.comm.exchange import TRANSPORTS, symmetric_memory_bytes
from cp_mesh.geometry.layouts import Layout
from cp_mesh.kernels.table import KERNELS


@dataclass(frozen=True)
class Case:
    """One shape on one rank of a group."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    causal: bool
    local_len: int
    cp_size: int
    cp_rank: int
    device: torch.device
    pattern: str = ""
    """Beside causal: "window1024", or packed documents, a name of `DOCUMENTS`; "" for neither."""

    @property
    def seq_len(self) -> int:
        return self.local_len * self.cp_size

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def forward_flops(self) -> float:
        """Of one rank: 4·H·D for each of S² pairs over cp, half of them under a causal mask; with a pattern, for each
        pair that the mask allows. The backward counts 2.5 times that."""
        if self.pattern:
            return 4 * self.heads * self.head_dim * self.num_pairs / self.cp_size
        return 4 * self.heads * self.seq_len**2 * self.head_dim / self.cp_size / (2 if self.causal else 1)

    @property
    def mask_name(self) -> str:
        return self.pattern or ("causal" if self.causal else "full")

    @property
    def mask(self) -> Mask:
        return mask_of(self.mask_name, self.seq_len)

    @property
    def num_pairs(self) -> int:
        """That a mask with a pattern allows."""
        if self.pattern in DOCUMENTS:
            return sum(n * (n + 1) // 2 if self.causal else n * n for n in DOCUMENTS[self.pattern](self.seq_len))
        assert self.mask.window is not None and self.mask.window[0] is not None
        num, hidden = self.seq_len, max(0, self.seq_len - self.mask.window[0] - 1)
        return num * (num + 1) // 2 - hidden * (hidden + 1) // 2

    @property
    def cuts(self) -> Cuts | None:
        """Of its packed documents."""
        if self.pattern not in DOCUMENTS:
            return None
        lengths = DOCUMENTS[self.pattern](self.seq_len)
        bounds = torch.tensor((0, *lengths)).cumsum(0).to(self.device, torch.int32)
        return bounds, bounds, max(lengths), max(lengths)

    @property
    def output_bytes(self) -> int:
        """out, lse, dq, dk and dv of one rank: what any implementation returns."""
        rows = 2 * self.heads + 2 * self.kv_heads
        return self.local_len * (rows * self.head_dim * self.dtype.itemsize + self.heads * 4)


@lru_cache
def document_lengths(
    seq_len: int, seed: int = 0, median: float = 512, longest: int | None = None, sigma: float = 1.5
) -> tuple[int, ...]:
    """Lognormal lengths, at most ``longest`` or a quarter of the sequence, until it is full."""
    generator, longest = torch.Generator().manual_seed(seed), longest or seq_len // 4
    lengths: list[int] = []
    while (left := seq_len - sum(lengths)) > 0:
        drawn = int(median * math.exp(sigma * float(torch.randn((), generator=generator))))
        lengths.append(max(1, min(drawn, longest, left)))
    return tuple(lengths)


MAGI_LENGTHS = (
    (10, 30254), (50, 391188), (100, 699596), (200, 1377757), (500, 3794735), (1024, 3316785), (2048, 2106566),
    (4096, 988525), (8192, 410002), (16384, 173574), (32768, 115007), (65536, 18428), (131072, 22513), (196608, 18284),
)  # fmt: skip
"""Documents by the longest of their bin, of MagiAttention's benchmark: exps/dist_attn, doc_length_distribution.csv, at
2c641357."""


@lru_cache
def magi_lengths(seq_len: int, seed: int = 0) -> tuple[int, ...]:
    """As packed there: the middle of each bin, in pieces of at most a quarter of the sequence, shuffled."""
    counts, shortest, longest = Counter[int](), 0, seq_len // 4
    for last, count in MAGI_LENGTHS:
        whole, rest = divmod((shortest + last) // 2, longest)
        counts[longest] += whole * count
        counts[rest] += count
        shortest = last + 1
    del counts[0]
    numbers, lengths = random.Random(seed), list[int]()
    while (left := seq_len - sum(lengths)) > 0:
        lengths += [min(left, *numbers.choices(list(counts), list(counts.values())))]
    return tuple(lengths)


DOCUMENTS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "documents": document_lengths, "varlen_full": magi_lengths, "varlen_causal": magi_lengths,
}  # fmt: skip
"""Lengths of packed documents by the name of their mask; "varlen_full" alone is not causal."""


@lru_cache
def mask_of(name: str, seq_len: int) -> Mask:
    if name in DOCUMENTS:
        bounds = torch.tensor((0, *DOCUMENTS[name](seq_len))).cumsum(0)
        return Mask.from_cu_seqlens(bounds, causal=name != "varlen_full")
    return Mask(causal=name != "full", window=(1023, 0) if name == "window1024" else None)


@dataclass(frozen=True, eq=False)
class Inputs:
    """q and dout [1, L, H, D], k and v [1, L, K, D]; contiguous, shared by all contestants, never written."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


class Run(ABC):
    """One contestant on one case."""

    @abstractmethod
    def forward(self) -> Any:
        """Compute out; returns what the backward needs."""

    @abstractmethod
    def backward(self, state: Any) -> Any:
        """Compute dq, dk and dv."""

    def both(self) -> Any:
        return self.backward(self.forward())

    def layers(self, count: int) -> Any:
        """As a model of ``count`` attention layers: every forward, then the backwards, begun together."""
        states = [self.forward() for _ in range(count)]
        return [self.backward(state) for state in reversed(states)]

    def results(self, state: Any, gradients: Any) -> tuple[Tensor, ...]:
        """out, dq, dk, dv as [1, L, heads, D]."""
        return (state.detach(), *gradients)


class Contestant(ABC):
    """A way to compute attention.

    Attributes:
        name: path-like, unique.
        kernel: the kernel that it runs on, a name of `RAW_KERNELS`, or None if it is not one of these.
        is_ours: whether it has to pass the strict gate.
        capturable: whether a CUDA graph may be made of it; a failed capture of NCCL can take the process with it.
        distributed: whether it computes the attention of the whole sequence.
        notes: what a reader of its figures must know.
    """

    name: str
    kernel: str | None = None
    is_ours = False
    capturable = False
    distributed = True
    notes = ""

    def unsupported(self, case: Case) -> str | None:
        """Why it does not run this case, or None."""
        return f"has no {case.pattern} here" if case.pattern else None

    def layout(self, case: Case) -> Layout:
        """Which positions its ranks hold."""
        return Contiguous()

    def flops(self, case: Case) -> float:
        """Of the forward, on one rank."""
        return case.forward_flops

    def active(self, case: Case) -> AbstractContextManager[Any]:
        """Entered around its calls, outside the timed region."""
        return nullcontext()

    def symmetric_bytes(self) -> int:
        """Memory that it holds now and that the caching allocator does not count."""
        return 0

    @abstractmethod
    def setup(self, case: Case, inputs: Inputs) -> Run: ...


class AutogradRun(Run):
    """A differentiable function of q, k and v; ``turn`` takes a result to [1, L, heads, D]."""

    def __init__(
        self, function: Callable[..., Tensor], inputs: list[Tensor], turn: Callable[[Tensor], Tensor] = lambda x: x
    ) -> None:
        *tensors, self._dout = (x.detach() for x in inputs)
        self._tensors = tuple(x.requires_grad_() for x in tensors)
        self._function, self._turn = function, turn

    def forward(self) -> Tensor:
        return self._function(*self._tensors)

    def backward(self, state: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(state, self._tensors, self._dout)

    def layers(self, count: int) -> tuple[Tensor, ...]:
        # one call of autograd, as in training; inputs of their own, so that no gradients are added up
        inputs = [tuple(x.detach().requires_grad_() for x in self._tensors) for _ in range(count)]
        outs = [self._function(*tensors) for tensors in inputs]
        return torch.autograd.grad(outs, [x for tensors in inputs for x in tensors], [self._dout] * count)

    def results(self, state: Tensor, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(self._turn(x.detach()) for x in (state, *gradients))


class TilesRun(Run):
    """Kernel calls on tiles, results dropped; the backward is given out and lse of the first tile."""

    def __init__(self, kernel: RawKernel, case: Case, x: Inputs, tiles: list[tuple[int, int, bool]]) -> None:
        self._kernel, self._scale = kernel, case.scale
        out, lse = kernel.forward(x.q, x.k, x.v, tiles[0][2], case.scale)
        self._forward, self._backward = [], []
        for q_begin, k_end, causal in tiles:
            q, k, v = x.q[:, q_begin:], x.k[:, :k_end], x.v[:, :k_end]
            lse_rows = lse if q_begin == 0 else lse[:, :, q_begin:].contiguous()
            self._forward.append((q, k, v, causal))
            self._backward.append((x.dout[:, q_begin:], q, k, v, out[:, q_begin:], lse_rows, causal))

    def forward(self) -> Any:
        for tile in self._forward:
            results = self._kernel.forward(*tile, self._scale)
        return results

    def backward(self, state: Any) -> Any:
        for tile in self._backward:
            gradients = self._kernel.backward(*tile, self._scale)
        return gradients


class Floor(Contestant):
    """The tiles of one zigzag rank, back to back: no communication, no merge. A ring on this kernel cannot be faster.

    Causal: one causal L x L tile; L x L/2 for each source that lies before, L/2 x L for each one after. Full: cp tiles
    of L x L.
    """

    capturable, distributed = True, False

    def __init__(self, kernel: str) -> None:
        self.name, self.kernel = f"floor/{kernel}", kernel

    def setup(self, case: Case, inputs: Inputs) -> Run:
        L, before = case.local_len, case.cp_rank
        tiles = [(0, L, case.causal)]
        if case.causal:
            tiles += [(0, L // 2, False)] * before + [(L // 2, L, False)] * (case.cp_size - 1 - before)
        else:
            tiles += [(0, L, False)] * (case.cp_size - 1)
        return TilesRun(RAW_KERNELS[self.kernel], case, inputs, tiles)


LAYOUTS = {layout.spec(): layout for layout in (ZigZag(), Striped(), Contiguous())}


@lru_cache
def balanced(mask: Mask, mesh: DeviceMesh, seq_len: int) -> Layout:
    """As a trainer asks for it. Masks compare by identity, and cases keep theirs."""
    return ShardedSequence(mesh, length=seq_len).balanced(mask).layout


class CPMesh(Contestant):
    """cp_mesh's own function, eager, on [1, L, heads, D] tensors.

    "hybrid2" has inner groups of 2 ranks.
    """

    is_ours = True

    def __init__(
        self, mesh: DeviceMesh, method: str, layout: str, kernel: str, transport: str, degree: int = 0
    ) -> None:
        self.name = f"cp_mesh/{method}{degree or ''}/{layout}/{kernel}/{transport}"
        self.kernel, self._layout, self._mesh, self._transport = kernel, LAYOUTS.get(layout), mesh, transport
        self._method, self._degree = method, degree
        self._options: dict[str, Any] = {"method": method, "kernel": kernel, "transport": transport}
        self._options |= {"ulysses_degree": degree} if degree else {}
        self.capturable = transport == "symmetric_memory" or mesh.size() == 1

    def unsupported(self, case: Case) -> str | None:
        degree = {"ulysses": case.cp_size, "hybrid": self._degree}.get(self._method) or 1
        return f"{case.heads} query heads over {degree} ranks" if case.heads % degree else None

    def layout(self, case: Case) -> Layout:
        return self._layout or balanced(case.mask, self._mesh, case.seq_len)

    def symmetric_bytes(self) -> int:
        return symmetric_memory_bytes() if self._transport != "functional" else 0

    def setup(self, case: Case, inputs: Inputs) -> Run:
        layout = self.layout(case)

        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, mesh=self._mesh, seq_dim=1, layout=layout, mask=case.mask, **self._options)

        return AutogradRun(function, [inputs.q, inputs.k, inputs.v, inputs.dout])


class TorchCP(Contestant):
    """PyTorch's `context_parallel` over SDPA on cuDNN, with its own load balancing under a causal mask."""

    def __init__(self, mesh: DeviceMesh, rotation: str) -> None:
        self.name, self._mesh, self._rotation = f"torch/{rotation}", mesh, rotation
        self.kernel = "cudnn" if mesh.device_type == "cuda" else None

    def layout(self, case: Case) -> Layout:
        return ZigZag() if case.causal else Contiguous()

    @contextmanager
    def active(self, case: Case) -> Iterator[None]:
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import _cp_options, set_rotate_method
        from torch.nn.attention import SDPBackend, sdpa_kernel

        balanced = _cp_options.enable_load_balance
        _cp_options.enable_load_balance = case.causal  # it refuses to balance a full mask
        set_rotate_method(self._rotation)
        # It wants a buffer to shard; q, k and v are shards already.
        buffer = torch.empty(2 * case.cp_size, device=case.device)
        context = context_parallel(self._mesh, buffers=[buffer], buffer_seq_dims=[0], no_restore_buffers={buffer})
        kernel = sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if case.device.type == "cuda" else nullcontext()
        try:
            with context, kernel:
                yield
        finally:
            _cp_options.enable_load_balance = balanced

    def setup(self, case: Case, inputs: Inputs) -> Run:
        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            grouped = {"enable_gqa": True} if case.heads != case.kv_heads else {}
            # by attribute: the context replaces it
            return F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, **grouped)

        tensors = [swap(x).contiguous() for x in (inputs.q, inputs.k, inputs.v, inputs.dout)]
        return AutogradRun(function, tensors, swap)


class Ulysses(Contestant):
    """A plain one: an all-to-all of heads (q, k and v in one), attention over the whole sequence, and back."""

    def __init__(self, kernel: str) -> None:
        self.name, self.kernel = f"ulysses/{kernel}", kernel

    def unsupported(self, case: Case) -> str | None:
        if case.kv_heads % case.cp_size:
            return f"{case.kv_heads} kv heads over {case.cp_size} ranks"
        return no_packing(self.kernel, case)

    def setup(self, case: Case, inputs: Inputs) -> Run:
        kernel = flash_attn_2.of_documents(RAW_KERNELS[self.kernel], case.cuts)

        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _UlyssesFunction.apply(q, k, v, kernel, case)

        return AutogradRun(function, [inputs.q, inputs.k, inputs.v, inputs.dout])


def no_packing(kernel: str, case: Case) -> str | None:
    """Why a rival on this kernel does not run the case's pattern, or None."""
    if case.pattern in DOCUMENTS and RAW_KERNELS[kernel].packed is None:
        return f"{kernel} has no packed documents here"
    return f"has no {case.pattern} here" if case.pattern and case.pattern not in DOCUMENTS else None


class _UlyssesFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: RawKernel, case: Case) -> Tensor:
        q, k, v = heads_to_sequence([q, k, v], case)
        out, lse = kernel.forward(q, k, v, case.causal, case.scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.kernel, ctx.case = kernel, case
        return sequence_to_heads([out], case)[0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        (dout,) = heads_to_sequence([dout], ctx.case)
        gradients = ctx.kernel.backward(dout, q, k, v, out, lse, ctx.case.causal, ctx.case.scale)
        return (*sequence_to_heads(list(gradients), ctx.case), None, None)


def heads_to_sequence(tensors: list[Tensor], case: Case) -> list[Tensor]:
    """[1, L, heads, D] each -> [1, S, heads / cp, D] views of one buffer."""
    size, L, D = case.cp_size, case.local_len, case.head_dim
    sent = torch.cat([x.reshape(L, size, -1, D).transpose(0, 1) for x in tensors], dim=2).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    counts = [x.shape[2] // size for x in tensors]
    return list(received.view(1, case.seq_len, -1, D).split(counts, dim=2))


def sequence_to_heads(tensors: list[Tensor], case: Case) -> list[Tensor]:
    """[1, S, heads / cp, D] each -> [1, L, heads, D]."""
    size, L, D = case.cp_size, case.local_len, case.head_dim
    sent = torch.cat(tensors, dim=2).view(size, L, -1, D).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    parts = received.split([x.shape[2] for x in tensors], dim=2)
    return [x.transpose(0, 1).reshape(1, L, -1, D) for x in parts]


class RingFlashAttention(Contestant):
    """An algorithm of the package ring-flash-attn, unchanged, on the kernel that we give it."""

    def __init__(self, algorithm: str, kernel: str) -> None:
        self.name, self.kernel, self._algorithm = f"ring_flash_attn/{algorithm}/{kernel}", kernel, algorithm
        raw = RAW_KERNELS[kernel]
        self.notes = "" if raw.writes_into else "gradients copied to the caller's buffers"
        if algorithm == "llama3" and not raw.bottom_right:
            self.notes = "causal rectangles in two tiles and a merge"

    def unsupported(self, case: Case) -> str | None:
        if find_spec("ring_flash_attn") is None:
            return "ring-flash-attn is not installed"
        if not case.causal and self._algorithm != "llama3":
            return "causal only"
        return no_packing(self.kernel, case) if self._algorithm == "llama3" else super().unsupported(case)

    def layout(self, case: Case) -> Layout:
        return {"zigzag": ZigZag(), "stripe": Striped()}.get(self._algorithm, Contiguous())

    def active(self, case: Case) -> AbstractContextManager[Any]:
        return flash_attn_2.on(RAW_KERNELS[self.kernel])

    def setup(self, case: Case, inputs: Inputs) -> Run:
        package = _ring_flash_attn()
        tensors = [inputs.q, inputs.k, inputs.v, inputs.dout]
        if self._algorithm != "llama3":
            prefix = {"zigzag": "zigzag_ring", "stripe": "stripe"}[self._algorithm]
            whole = getattr(package, f"{prefix}_flash_attn_func")
            return AutogradRun(lambda q, k, v: whole(q, k, v, causal=case.causal), tensors)

        one_document = torch.tensor([0, case.seq_len], dtype=torch.int32, device=case.device)
        *lengths, rows = package.llama3_flash_attn_prepare_cu_seqlens(
            case.cuts[0] if case.cuts else one_document, case.causal, case.cp_rank, case.cp_size
        )
        # 4 kv heads at a time: the setting of its own benchmark
        settings = {"heads_k_stride": min(4, case.kv_heads), "local_k_slice": rows, "causal": case.causal}

        def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return package.llama3_flash_attn_varlen_func(q, k, v, *lengths, **settings)

        return AutogradRun(packed, [x[0] for x in tensors], lambda x: x[None])


@lru_cache
def _ring_flash_attn() -> ModuleType:
    """The installed package, bound to `flash_attn_2` instead of to flash-attn."""
    adapters = ModuleType("ring_flash_attn.adapters")  # they need transformers, and are not called here
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None
    stand_ins = {"flash_attn.flash_attn_interface": flash_attn_2, "ring_flash_attn.adapters": adapters}
    if find_spec("flash_attn") is None:
        stand_ins["flash_attn"] = ModuleType("flash_attn")
    before = {name: sys.modules.get(name) for name in stand_ins}
    sys.modules.update(stand_ins)
    try:
        return import_module("ring_flash_attn")
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


class AroundKernel(Contestant):
    """A package's Ulysses, unchanged, around the kernel that we give it: a function of the whole sequence."""

    package = ""

    def __init__(self, mesh: DeviceMesh, algorithm: str, kernel: str) -> None:
        self.name, self.kernel, self._mesh = f"{self.package}/{algorithm}/{kernel}", kernel, mesh
        self._algorithm = algorithm

    def unsupported(self, case: Case) -> str | None:
        if missing := [name for name in (self.package, "transformers") if find_spec(name) is None]:
            return f"{' and '.join(missing)} not installed"
        return no_packing(self.kernel, case)

    def attend(self, case: Case) -> Callable[..., tuple[Tensor, None]]:
        """As Transformers calls attention: a module and q, k and v [1, heads, S, D] to out [1, S, heads, D]."""
        kernel = flash_attn_2.of_documents(RAW_KERNELS[self.kernel], case.cuts)

        def function(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: None, **_: Any) -> tuple[Tensor, None]:
            return flash_attn_2.Attend.apply(swap(q), swap(k), swap(v), kernel, case.causal, case.scale)[0], None

        return function


class DeepSpeed(AroundKernel):
    """Its `DistributedAttention`, and as "alst" `UlyssesSPAttentionHF`, which accelerate and TRL take."""

    package = "deepspeed"

    def setup(self, case: Case, inputs: Inputs) -> Run:
        import deepspeed
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
        from deepspeed.sequence.layer import DistributedAttention

        with patch("deepspeed.comm.torch.build_shm_op", lambda: None):  # of CPUs, compiled by every rank
            deepspeed.init_distributed(auto_mpi_discovery=False, dist_init_required=False)
        attend, group = self.attend(case), self._mesh.get_group()
        tensors = [inputs.q, inputs.k, inputs.v, inputs.dout]
        if self._algorithm == "attention":

            def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return attend(None, swap(q), swap(k), swap(v), None)[0]

            distributed = DistributedAttention(whole, group, scatter_idx=2, gather_idx=1)
            return AutogradRun(lambda q, k, v: distributed(q, k, v, 0), tensors)

        heads = {"attn_head_count": case.heads, "attn_head_size": case.head_dim, "kv_head_count": case.kv_heads}
        lengths = {"local_seq_length": case.local_len, "global_seq_length": case.seq_len}
        alst = UlyssesSPAttentionHF(attend, batch_size=1, num_hidden_layers=1, process_group=group, **heads, **lengths)
        module = torch.nn.Module()
        positions = case.cp_rank * case.local_len + torch.arange(case.local_len, device=case.device)[None]

        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out, _ = alst(module, swap(q), swap(k), swap(v), None, position_ids=positions)
            return out.view(q.shape)

        return AutogradRun(function, tensors)


RINGMASTER = {
    "ulysses": {"backend": "ulysses"},
    "gather": {"backend": "ring"},
    "zigzag": {"backend": "ring", "load_balance": "head_tail"},
    "distflash": {"backend": "ring", "load_balance": "distflash"},
}


class Ringmaster(AroundKernel):
    """axolotl's: "ulysses", which it chooses itself, and its rings on the kernel, in place of one from a hub.

    "gather" is its default ring: contiguous, not balanced. "zigzag" and "distflash" are the balanced ones.
    """

    package = "ringmaster"

    def unsupported(self, case: Case) -> str | None:
        if self._algorithm in ("zigzag", "distflash") and not (case.causal and case.device.type == "cuda"):
            return "causal masks on GPUs only"
        if self._algorithm == "zigzag" and case.pattern:
            return "has documents by products of rows x rows in float32 only"
        return super().unsupported(case)

    def layout(self, case: Case) -> Layout:
        return ZigZag() if self._algorithm == "zigzag" else Contiguous()

    @contextmanager
    def active(self, case: Case) -> Iterator[None]:
        flash = flash_attn_2.flash_attn_func, flash_attn_2.flash_attn_varlen_func
        with (
            patch("transformers.modeling_flash_attention_utils._lazy_imports", lambda *_: flash),
            flash_attn_2.on(RAW_KERNELS[self.kernel]),
        ):
            yield

    def setup(self, case: Case, inputs: Inputs) -> Run:
        import ringmaster
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

        AttentionInterface.register("flash_attn_2", self.attend(case))
        config = ringmaster.RingmasterConfig(size=case.cp_size, **RINGMASTER[self._algorithm])
        runtime = ringmaster.setup(
            config, num_kv_heads=case.kv_heads, device_mesh=self._mesh, device_type=case.device.type,
            inner_attn="flash_attn_2" if self._algorithm == "ulysses" else "flash_attention_2",
        )  # fmt: skip
        runtime.varlen = case.cuts and (case.cuts[0], case.cuts[2])
        attend, module = ALL_ATTENTION_FUNCTIONS[runtime.attn_implementation], torch.nn.Module()

        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            ringmaster.set_runtime(runtime)
            return attend(module, swap(q), swap(k), swap(v), None, scaling=case.scale, is_causal=case.causal)[0]

        return AutogradRun(function, [inputs.q, inputs.k, inputs.v, inputs.dout])


def all_contestants(mesh: DeviceMesh, kernels: list[str]) -> list[Contestant]:
    """Everyone, for kernels that are present."""
    field: list[Contestant] = [Floor(kernel) for kernel in kernels]
    own_kernels = [*kernels, "triton" if mesh.device_type == "cuda" else "reference"]
    methods = [(method, 0) for method in METHODS]
    methods += [("hybrid", degree) for degree in range(2, mesh.size()) if mesh.size() % degree == 0]
    field += [
        CPMesh(mesh, method, layout, kernel, transport, degree)
        for method, degree in methods
        for layout in (*LAYOUTS, "balanced")
        for kernel in own_kernels
        if kernel in KERNELS
        for transport in TRANSPORTS
        if transport != "auto"
    ]
    field += [TorchCP(mesh, rotation) for rotation in ("allgather", "alltoall")]
    for kernel in kernels:
        field += [RingFlashAttention(algorithm, kernel) for algorithm in ("zigzag", "stripe", "llama3")]
        field.append(Ulysses(kernel))
        field += [DeepSpeed(mesh, algorithm, kernel) for algorithm in ("attention", "alst")]
        field += [Ringmaster(mesh, algorithm, kernel) for algorithm in RINGMASTER]
    return field


def default_patterns(kernels: list[str], present: list[str], transport: str) -> list[str]:
    """Names worth the time of the GPUs: yardsticks, zigzag on the transport that "auto" takes, and all rivals.

    Args:
        kernels: run these.
        present: those whose floor is measured; FlashAttention-2 only if there is no other.
    """
    fast = [kernel for kernel in present if kernel != "fa2" or len(present) == 1]
    patterns = [f"floor/{kernel}" for kernel in fast]
    for kernel in kernels:
        # of two ranks the hybrid is Ulysses
        patterns += [f"cp_mesh/{name}/zigzag/{kernel}/{transport}" for name in ("ring", "all_gather", "ulysses")]
        patterns += [f"cp_mesh/ulysses/contiguous/{kernel}/{transport}"]
        patterns += [f"{name}/{kernel}" for name in ("ring_flash_attn/*", "ulysses", "deepspeed/*", "ringmaster/*")]
    return [*patterns, "torch/*"]
