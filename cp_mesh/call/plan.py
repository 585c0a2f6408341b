"""Plan: one call's options, validated against its tensors and resolved to a layout, mask, schedule and kernel.

`make_plan` runs on every rank before the first collective. It checks local tensors; `cp_mesh.attention` checks what
only it sees (types, DTensors' placements). If the arguments are equal on all ranks, so is what these checks read, and
all ranks raise alike. Only a comparison between ranks finds arguments that differ, and a wrong number of local rows if
shards are unequal. First calls and check mode compare both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_mesh._names import Loaded
from cp_mesh.call.method import Method, Plan, covers_of, stream_of
from cp_mesh.call.spec import AttentionSpec, Call, Operand, check_choice, check_scores, check_tensors
from cp_mesh.comm.exchange import TRANSPORTS
from cp_mesh.comm.group_state import state_of
from cp_mesh.errors import UnsupportedError, refuse, warn
from cp_mesh.geometry.host_tensors import Content, lasting
from cp_mesh.geometry.layouts import check_layout, parse_layout
from cp_mesh.geometry.mask import NONE, TENSORS, parse_mask
from cp_mesh.geometry.schedule import Schedule
from cp_mesh.geometry.survey import parse_sources
from cp_mesh.kernels.contract import RECORDED, Request, shortfalls
from cp_mesh.kernels.merge import Kernel
from cp_mesh.kernels.scores import POSITIONAL
from cp_mesh.kernels.table import KERNELS, choose_kernel

METHODS = Loaded(
    ring="call.ring_loop:RING",
    all_gather="call.ring_loop:ALL_GATHER",
    ulysses="call.ulysses:ULYSSES",
    hybrid="call.ulysses:HYBRID",
)
MOST = 16  # kept plans that hold device memory
NUM_READ = len(TENSORS) + 1  # tensors whose content planning reads: the mask's and the layout's


def choose_method(name: str) -> Method:
    """The method with this name; for "auto" the ring, which supports every call."""
    check_choice("method", name, ("auto", *METHODS), "ring")
    return METHODS["ring" if name == "auto" else name]


def make_plan(
    q: Tensor | Operand,
    k: Tensor | Operand,
    v: Tensor | Operand,
    call: Call,
    group: dist.ProcessGroup,
    features: frozenset[str],
) -> Plan:
    """Validate a call on local tensors and resolve it.

    Args:
        q: [B, H, S_local, D]; k: [B, K, S_local, D]; v: [B, K, S_local, Dv].
        call: with documents, key_padding and blocks [B or 1, seq_len] or [seq_len], the `Layout.tensor` of the layout,
            and the tensors of the scores, see `check_scores`.
        group: the cp group.
        features: of the call's scores.

    Raises:
        ArgumentError, UnsupportedError: see the messages. The module docstring says which are raised on every rank.
    """
    plans, tensors = state_of(group, Plans), call.tensors
    contents: tuple[Content | None, ...] = (None,) * NUM_READ
    if {*map(type, tensors)} != {type(None)}:
        read = tensors[:NUM_READ]
        for name, x in zip(TENSORS, read, strict=False):
            if x is not None and x.is_meta:
                refuse(f"Mask.{name}", "a tensor with content", "one on meta", "keep it on the CPU")
        contents = tuple(None if x is None else Content.of(x) for x in read)
        check_tensors(q, k, v)
        check_scores(q, tensors, call.seq_len)
    resolve: Callable[..., Plan] = plans.reusable if contents == (None,) * NUM_READ else plans.of_batch
    if not features.isdisjoint(POSITIONAL):  # positions are on the device
        resolve = plans.of_batch
    operands = (Operand(x.shape, x.dtype, x.device) for x in (q, k, v))
    plan = resolve(contents, *operands, features, call.seq_len, group.size(), group.rank(), call.options.of_plan())
    if plan.reads_tensors:
        refuse_copies(plan)
    return plan


def refuse_copies(plan: Plan) -> None:
    """Refuse a plan with tensors that would be copied to the device during a CUDA graph capture."""
    if stream_of(plan.device) is None:
        refuse(
            "CUDA graph capture",
            "a mask and scores without tensors",
            "documents, key padding, blocks, a Permuted layout, or scores that read positions",
            "these are copied to the device, which a capture cannot do: leave attention out of the graph",
            UnsupportedError,
        )


@lasting()
def _resolve(
    contents: tuple[Content | None, ...],
    q: Operand,
    k: Operand,
    v: Operand,
    features: frozenset[str],
    seq_len: int,
    cp_size: int,
    cp_rank: int,
    options: AttentionSpec,
) -> Plan:
    method = choose_method(options.method)
    check_choice("transport", options.transport, TRANSPORTS, "functional")
    check_tensors(q, k, v)
    documents, key_padding, blocks, index = (None if x is None else x.tensor for x in contents)
    layout = parse_layout(options.layout, index)
    if seq_len >= NONE:
        refuse("seq_len", f"fewer than {NONE} tokens", seq_len, "split the sequence", UnsupportedError)
    check_layout(layout, seq_len, cp_size)
    mask = parse_mask(options.mask, documents, key_padding, blocks)
    expected = layout.shard_len(seq_len, cp_size, cp_rank)
    if q.shape[2] != expected:
        hint = (
            "shard with this layout, or pass the seq_len that was sharded (shards of unequal length need it; "
            f"equal ones would mean seq_len={q.shape[2] * cp_size})"
        )
        if max(expected, seq_len - layout.multiple(cp_size)) < q.shape[2] <= seq_len:  # maybe without padding
            hint = "these look like whole sequences: shard them, sequence.shard({...}), or let a ShardedModel do it"
        refuse(
            "local sequence length",
            f"{expected} rows (rank {cp_rank} of {cp_size}, {options.layout} layout, seq_len={seq_len})",
            f"{q.shape[2]} rows",
            hint,
        )
    for name, tensor in (("documents", documents), ("key_padding", key_padding), ("blocks", blocks)):
        if tensor is None:
            continue
        if tensor.shape[-1] != seq_len or (tensor.ndim == 2 and tensor.shape[0] not in (1, q.shape[0])):
            hint = "pass the same whole-sequence tensor on every cp rank; it is never sharded"
            refuse(
                f"Mask.{name}",
                f"shape [{q.shape[0]}, {seq_len}] of the whole sequence in original order",
                tuple(tensor.shape),
                f"{hint}; cu_seqlens end at {seq_len}" if name == "documents" and tensor.ndim == 1 else hint,
            )
    if not q.shape[0]:  # mask tensors without batch rows have no content
        mask = parse_mask(options.mask, None, None, None)

    degree = method.choose_degree(options, q, k, cp_size)
    sources = parse_sources(options.sources, cp_size)
    make = partial(method.make_schedule, layout, mask, seq_len, cp_size, cp_rank, degree=degree, sources=sources)
    request = partial(request_of, q, v, options, features)
    schedule, kernel = choose_schedule(options.kernel, make, request, features)
    warn_of_choice(kernel, options.kernel, request(schedule))
    settings = method.settings(options, q, k, v, schedule, kernel, features, degree)
    kernel = kernel.reproducible if options.deterministic and kernel.reproducible else kernel
    kind = q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.dtype
    return Plan(
        options, layout, mask, seq_len, schedule, kernel, features, q.device, method, settings, kind, v.shape[3]
    )


class Plans:
    """The plans of one group, by shapes, options and the contents of masks and layouts.

    Layers share them, whatever the numbers of their scores.

    Only a few plans that hold device memory are kept. They belong to one batch and are dropped at the first plan of
    another batch, once the batch's masks are gone (not at once: each layer may make the mask anew).
    """

    def __init__(self) -> None:
        self.reusable = lru_cache(256, typed=True)(_resolve)
        self._of_batch: dict[tuple[Any, ...], Plan] = {}

    def of_batch(self, contents: tuple[Content | None, ...], *others: Any) -> Plan:
        """The plan for these contents, which holds their copies on the device."""
        if (plan := self._of_batch.get((contents, *others))) is None:
            plans = self._of_batch
            kept = [x for x in plans if x[0] == contents or not any(y and y.is_gone for y in x[0])][1 - MOST :]
            self._of_batch = {x: plans[x] for x in kept}
            plan = self._of_batch[contents, *others] = _resolve(contents, *others)
        return plan


def warn_of_choice(kernel: Kernel, asked: str, request: Request) -> None:
    """Warn if "auto" finds only the reference kernel on a GPU, or the GPU is of a kind that was not tried."""
    if asked != "auto" or request.device != "cuda":
        return
    if kernel.name != "reference":
        if request.compute_capability not in RECORDED:
            warn(
                f"kernel={kernel.name!r} was not tried on a GPU of compute capability {request.compute_capability}. "
                "tests/gpu.py of cp_mesh's repository tests it there; naming the kernel ends this warning"
            )
        return
    fast = [name for name, other in KERNELS.items() if other.capability.devices == ("cuda",)]
    lacks = "; ".join(f"{name}: {', '.join(shortfalls(KERNELS[name].capability, request))}" for name in fast)
    warn(
        f"no fast kernel can serve this call ({lacks}); the reference kernel runs, exact but slow. "
        "kernel='reference' selects it without this warning"
    )


def choose_schedule(
    name: str, make: Callable[[bool], Schedule], request: Callable[[Schedule], Request], features: Collection[str]
) -> tuple[Schedule, Kernel]:
    """The schedule and its kernel. Tiles are by document if a fast kernel takes those, or no fast one takes pairs.

    Args:
        name: of the kernel, or "auto".
        make: makes the schedule; with ``True`` tiles are by document, if documents are known.
        request: what a schedule needs from its kernel.
        features: of the scores; some read positions, and their tiles must hold positions.
    """
    schedule = make(POSITIONAL.isdisjoint(features))
    if "segments" in schedule.covers:
        wanted = request(schedule)
        named = (x for x in KERNELS.values() if name in ("auto", x.name))
        able = next((x for x in named if not shortfalls(x.capability, wanted)), None)
        if able is not None and able.name != "reference":
            return schedule, able
        pairs = make(False)
        if able is None or choose_kernel(name, request(pairs)).name != "reference":
            schedule = pairs
    return schedule, choose_kernel(name, request(schedule))


def request_of(
    q: Operand, v: Operand, options: AttentionSpec, features: frozenset[str], schedule: Schedule,
    compute_capability: tuple[int, int] | None = None,
) -> Request:  # fmt: skip
    """What a call needs from its kernel; ``compute_capability`` defaults to that of q's device."""
    return Request(
        device=q.device.type,
        compute_capability=compute_capability or compute_capability_of(q.device),
        dtype=q.dtype,
        covers=covers_of(schedule, features),
        head_dim=q.shape[3],
        v_head_dim=v.shape[3],
        differentiable_lse=options.differentiable_lse,
        deterministic=options.deterministic,
        features=features,
    )


def compute_capability_of(device: torch.device) -> tuple[int, int]:
    """The compute capability of an NVIDIA GPU; (0, 0) for other devices, so that no CUDA kernel is chosen there."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and not torch.version.hip else (0, 0)
