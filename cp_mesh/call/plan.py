"""Plan: one call's options, validated against its tensors and resolved to a layout, mask, schedule and kernel.

`make_plan` is run on every rank before the first collective. What depends on local tensors alone is refused here;
`cp_mesh.attention` refuses what only it sees (types, DTensors' placements). What these checks read is equal on all
ranks if the ranks' arguments are, so all ranks raise alike. Two things only ranks together can find out: arguments that
differ between ranks, and a wrong number of local rows where shards are unequal. Check mode compares both.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

from cp_mesh._torch import FakeTensor
from cp_mesh.call.choose import Choice, Problem, choose, layout_and_documents
from cp_mesh.call.double_ring import ranks_per_host
from cp_mesh.call.method import Plan, covers_of
from cp_mesh.call.methods import choose_method
from cp_mesh.call.spec import Operand, Options, Tensors, check_choice, check_scores, check_tensors, make_scores
from cp_mesh.comm.exchange import TRANSPORTS, choose_transport
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.geometry.host_tensors import Content
from cp_mesh.geometry.layouts import check_layout, parse_layout
from cp_mesh.geometry.mask import NONE, parse_mask
from cp_mesh.geometry.schedule import Schedule
from cp_mesh.geometry.survey import parse_sources
from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.kernels.contract import Request, shortfalls
from cp_mesh.kernels.merge import Kernel
from cp_mesh.kernels.scores import POSITIONAL
from cp_mesh.kernels.table import KERNELS, choose_kernel
from cp_mesh.predict.machines import Known, machine_of, may_divide
from cp_mesh.predict.time import Machine


def make_plan(
    q: Tensor | Operand,
    k: Tensor | Operand,
    v: Tensor | Operand,
    tensors: Tensors,
    seq_len: int,
    group: dist.ProcessGroup,
    options: Options,
    captured: Sequence[Tensor] = (),
) -> Plan:
    """Validate a call on local tensors and resolve it.

    Args:
        q: [B, H, S_local, D]; k: [B, K, S_local, D]; v: [B, K, S_local, Dv].
        tensors: documents, key_padding and blocks [B or 1, seq_len] or [seq_len], the `Layout.tensor` of the layout,
            and the scores' as in `check_scores`.
        seq_len: length of the whole sequence, in tokens.
        group: the cp group.
        options: the call's static options.
        captured: as in `Call`.

    Raises:
        ArgumentError, UnsupportedError: see the messages, and above for which are raised on every rank.
    """
    of_mask = {"documents": tensors.documents, "key_padding": tensors.key_padding, "blocks": tensors.blocks}
    for name, x in of_mask.items():
        if x is not None and x.is_meta:
            refuse(f"Mask.{name}", "a tensor with content", "one on meta", "keep it on the CPU")
    read = *of_mask.values(), tensors.layout_index
    *contents, index = (None if x is None else Content.of(x) for x in read)
    options = options.with_scale(q.shape[3])
    resolve: Callable[..., Plan] = _resolve_once
    scores = None
    has_functions = bool(options.score_mod or options.mask_mod)
    if has_functions or any(x is not None for x in tensors):
        check_tensors(q, k, v)
        check_scores(q, tensors, seq_len)
        if has_functions or any(x is not None for x in tensors[len(read) :]):
            scores = make_scores(options, tensors, accumulation_dtype(q.dtype), captured, seq_len)
        if any(x is not None for x in read) or (scores is not None and scores.needs_positions):
            resolve = _resolve_few  # they hold memory of the device
    shapes = Operand.of(q), Operand.of(k), Operand.of(v)
    features = None if scores is None else scores.features
    if options.method == "double_ring" and not options.inner_ring_size:
        options = options._replace(inner_ring_size=ranks_per_host(dist.get_process_group_ranks(group)))
    given = *shapes, tuple(contents), index, features, seq_len, group.size(), group.rank()
    plan = resolve(*given, options)
    if options.method == "auto" and group.size() > 1 and not (q.device.type == "meta" or isinstance(q, FakeTensor)):
        choice = _choice(plan, *shapes, group, plan.scores.features if features is None else features)
        if choice.method != plan.method.name:
            plan = resolve(*given, choice.options(options))
    if scores is not None:
        plan = replace(plan, scores=scores)
    if plan.copies_in_capture:
        refuse(
            "CUDA graph capture",
            "a mask and scores that are said without tensors",
            "documents, key padding, blocks, a Permuted layout, or scores that read positions",
            "these are copied to the device, which a capture cannot do: leave attention out of the graph",
            UnsupportedError,
        )
    return plan


def _choice(
    plan: Plan, q: Operand, k: Operand, v: Operand, group: dist.ProcessGroup, features: frozenset[str]
) -> Choice:
    """The method that "auto" takes for a call, which ``plan`` has as the ring; kept with the plan."""
    options, known = plan.options, machine_of(group, q.device)
    machine = None if known is None else known.machine
    transport = choose_transport(options.transport, group, q.device) if machine is not None else "functional"

    def make() -> tuple[Known | None, Choice]:
        of_batch = layout_and_documents(plan.layout, plan.mask)
        sizes = plan.seq_len, plan.schedule.cp_size
        by_transport = transport, within_hosts(transport, options.transport, q.device.type, sizes[1], machine)
        there = frozenset() if known is None else known.inner_sizes
        of_group = machine, there if plan.mask.documents is not None else None
        problem = Problem(
            q, k, v, options, features, *sizes, *of_batch, plan.kernel.name, *by_transport, *of_group, kernel_of
        )
        choice = choose(problem)
        if known is not None and choice.degree and not may_divide(group, known, choice.degree):
            choice = choose(replace(problem, inner_sizes=there))
        return known, choice  # what is known too: the key is its id

    found: tuple[Known | None, Choice] = plan.prepare(("choice", id(known), transport), 0, make)
    return found[1]


def within_hosts(transport: str, asked: str, device: str, cp_size: int, machine: Machine | None) -> str:
    """The transport among ranks of one host, where that among all of them is known; symmetric memory is assumed."""
    several = machine is not None and machine.gpus_per_host < cp_size
    return "symmetric_memory" if several and asked == "auto" and device == "cuda" else transport


def kernel_of(problem: Problem, make: Callable[[bool], Schedule]) -> tuple[Schedule, Kernel]:
    """See `Problem.resolve`."""
    request = partial(request_of, problem.q, problem.v, problem.options, problem.features)
    return choose_schedule(problem.options.kernel, make, request, problem.features)


def _resolve(
    q: Operand,
    k: Operand,
    v: Operand,
    of_mask: tuple[Content | None, Content | None, Content | None],
    index: Content | None,
    of_tensors: frozenset[str] | None,
    seq_len: int,
    cp_size: int,
    cp_rank: int,
    options: Options,
) -> Plan:
    """The plan; its scores are those without tensors. ``of_tensors`` are the features of those that it will have."""
    scores = make_scores(options, Tensors(), accumulation_dtype(q.dtype))
    features = scores.features if of_tensors is None else of_tensors
    method = choose_method(options.method)
    check_choice("transport", options.transport, TRANSPORTS, "functional")
    check_tensors(q, k, v)
    documents, key_padding, blocks = (None if x is None else x.tensor for x in of_mask)
    layout = parse_layout(options.layout, None if index is None else index.tensor)
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
        if max(expected, seq_len - layout.multiple(cp_size)) < q.shape[2] <= seq_len:  # padding left out
            hint = "these look like whole tokens: shard them, sequence.shard({...}), or let a ShardedModel do it"
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
            hint = "give the same whole-sequence tensor on every cp rank; it is never sharded"
            refuse(
                f"Mask.{name}",
                f"shape [{q.shape[0]}, {seq_len}] of the whole sequence in original order",
                tuple(tensor.shape),
                f"{hint}; cu_seqlens end at {seq_len}" if name == "documents" and tensor.ndim == 1 else hint,
            )
    if not q.shape[0]:  # tensors of no batch rows tell nothing
        mask = parse_mask(options.mask, None, None, None)

    degree = method.choose_degree(options, q, k, cp_size)
    sources = parse_sources(options.sources, cp_size)
    make = partial(method.make_schedule, layout, mask, seq_len, cp_size, cp_rank, degree=degree, sources=sources)
    request = partial(request_of, q, v, options, features)
    schedule, kernel = choose_schedule(options.kernel, make, request, features)
    warn_if_slow(kernel, options.kernel, request(schedule))
    settings = method.settle(options, q, k, v, schedule, kernel, features, degree)
    kernel = kernel.reproducible if options.deterministic and kernel.reproducible else kernel
    return Plan(options, layout, mask, seq_len, schedule, kernel, scores, q.device, method, settings)


_resolve_once = lru_cache(maxsize=256, typed=True)(_resolve)


_resolve_few = lru_cache(maxsize=16, typed=True)(_resolve)


def warn_if_slow(kernel: Kernel, asked: str, request: Request) -> None:
    """Warn where "auto" finds nothing but the reference kernel on a GPU."""
    if kernel.name != "reference" or asked != "auto" or request.device != "cuda":
        return
    fast = [name for name, other in KERNELS.items() if other.capability.devices == ("cuda",)]
    lacks = "; ".join(f"{name}: {', '.join(shortfalls(KERNELS[name].capability, request))}" for name in fast)
    warnings.warn(
        f"cp_mesh: no fast kernel can serve this call ({lacks}); the reference kernel runs, exact but slow. "
        "kernel='reference' asks for it without this warning",
        stacklevel=3,
    )


def choose_schedule(
    name: str, make: Callable[[bool], Schedule], request: Callable[[Schedule], Request], features: Collection[str]
) -> tuple[Schedule, Kernel]:
    """The schedule and its kernel: with tiles by documents where a fast kernel takes them, else where none takes pairs.

    Args:
        name: of the kernel, or "auto".
        make: the schedule, with ``True`` by documents, where they are known.
        request: what a schedule needs of its kernel.
        features: of the scores; those that read positions need tiles which tell theirs.
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
    q: Operand, v: Operand, options: Options, features: frozenset[str], schedule: Schedule,
    compute_capability: tuple[int, int] | None = None,
) -> Request:  # fmt: skip
    """What a call needs of its kernel; ``compute_capability`` is that of q's device if it is not given."""
    return Request(
        device=q.device.type,
        compute_capability=compute_capability or compute_capability_of(q.device),
        dtype=q.dtype,
        covers=covers_of(schedule, features),
        head_dim=q.shape[3],
        v_head_dim=v.shape[3],
        differentiable_lse=options.differentiable_lse,
        deterministic=options.deterministic,
        min_keys=schedule.min_keys,
        features=features,
    )


def compute_capability_of(device: torch.device) -> tuple[int, int]:
    """(0, 0) where the numbers do not mean NVIDIA's: no stock CUDA kernel is chosen there."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and not torch.version.hip else (0, 0)
