"""`attention`: the function. It validates and calls; the work is in the op."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.fx.experimental.symbolic_shapes import guard_scalar

from cp_mesh._torch import FakeTensor
from cp_mesh.call.captures import place_captured
from cp_mesh.call.dtensor import (
    CPAxis,
    check_chunks,
    check_placements,
    check_score_placements,
    find_cp_axis,
    first_index,
    group_that_waits,
    local_scores,
    wrap_results,
)
from cp_mesh.call.formats import FORMATS, Format
from cp_mesh.call.op import call_attention
from cp_mesh.call.plan import make_plan
from cp_mesh.call.spec import Call, Options, Tensors, autocast, check_tensors, seed_tensor
from cp_mesh.comm.agreement import announce_refusal, announce_trace
from cp_mesh.errors import as_int, refuse, written
from cp_mesh.geometry.layouts import LAYOUTS, Layout, ZigZag, parse_layout
from cp_mesh.geometry.mask import Mask
from cp_mesh.kernels.scores import ADDED
from cp_mesh.sequence.rows import Rows, check_marks

_ANY_MASK = Mask()
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
_WITH_DEGREE = ("hybrid", "double_ring")
_COUNTS = ("seq_dim", "seq_len", "ulysses_degree", "inner_ring_size", "head_chunks")
_FACTORS = ("scale", "softcap", "dropout_p")
_PLAIN = {int, float, type(None)}
_numbers_of = operator.attrgetter(*_COUNTS, *_FACTORS, "dropout_seed")


class Asked(NamedTuple):
    """The keywords of `attention`, and what a style says beside them.

    Attributes:
        of_root: the sequence must be that of the `ShardedModel` in whose forward the call is.
        score_mod, mask_mod: handles of `cp_mesh.kernels.functions`, or "".
        captured: what these functions read, in the order of `Call.captured`.
        first_head, first_batch: what heads and batch rows of a local query count from, in these functions.
        sources: of a group's name, layout and length, which sources mask_mod shows to whom, if that is known.
    """

    mesh: DeviceMesh | dist.ProcessGroup | None = None
    seq_dim: int | None = None
    seq_len: int | None = None
    layout: Layout = ZigZag()
    mask: Mask = Mask(causal=True)
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    relative_bias: Tensor | None = None
    bias: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: int | Tensor | None = None
    method: str = "auto"
    kernel: str = "auto"
    transport: str = "auto"
    ulysses_degree: int | None = None
    inner_ring_size: int | None = None
    head_chunks: int | None = None
    deterministic: bool | None = None
    return_lse: bool = False
    of_root: bool = False
    score_mod: str = ""
    mask_mod: str = ""
    captured: tuple[Tensor, ...] = ()
    first_head: int = 0
    first_batch: int = 0
    sources: Callable[[str, Layout, int], str] | None = None


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    seq_dim: int | None = None,
    seq_len: int | None = None,
    layout: Layout = ZigZag(),  # noqa: B008 - frozen
    mask: Mask = Mask(causal=True),  # noqa: B008 - frozen
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    method: str = "auto",
    kernel: str = "auto",
    transport: str = "auto",
    ulysses_degree: int | None = None,
    inner_ring_size: int | None = None,
    head_chunks: int | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over a sequence sharded on the cp axis of a mesh.

    Local tensors in, local tensors out; DTensors in, DTensors out with the placements of ``query``. The global tensor
    of a DTensor is the sequence *in layout order*, so ``Shard(seq_dim)`` on cp is an ordinary contiguous shard.
    Grouped-query attention is fewer kv heads, in torch's head order. Inputs are never written.

    A score is softcap(scale · q·k), less slopes, plus tables and bias, and then masked. Tensors of the scores are equal
    on every cp rank, but for the rows of a bias; their gradients are this rank's share, whose sum over ranks is the
    gradient. Beside DTensors they are local tensors, of what this rank holds, or DTensors on the same mesh, sharded
    where query's heads are (a bias: as query's batch, heads and rows are) and else replicated; their gradients are then
    partial. Numbers may be NumPy's, or tensors of one on the CPU that need no gradient.

    Args:
        query: [B, H, S, D], [B, S, H, D] or packed [T, H, D]; S (T) is this rank's rows for local tensors. float64,
            float32, bfloat16 or float16; sums are float32 (float64 for float64).
        key: like ``query`` with K heads, H a multiple of K; fewer than H are taken without SDPA's ``enable_gqa``.
        value: like ``key``; its head dim may differ where the kernel allows.
        mesh: the 1-D mesh of the cp axis, or its ProcessGroup; or a 2-D mesh whose two axes, of names that begin with
            "cp", are the cp axis together, ``mesh["cp_ring", "cp_ulysses"]``: the hybrid exchanges heads over the
            second, and the double ring takes it for the ranks of a host. Required for local tensors; for DTensors it
            tells which axis of their mesh is cp, or which two, if ``seq_dim`` is not given and no axis is named "cp".
        seq_dim: the sequence dim: 2 = [B, H, S, D], 1 = [B, S, H, D], 0 = [T, H, D]. None: 2, as in SDPA. Neither
            shapes nor placements tell heads from rows, so pass it for the other formats.
        seq_len: tokens in the whole sequence. None: local length x cp_size (DTensors: their global length). Shards of
            unequal length need it: a rank cannot infer it.
        layout: which positions each rank holds.
        mask: who may attend to whom, on positions. Its tensors hold the whole sequence, equal on every cp rank.
        scale: factor on q·k; None: 1 / sqrt(D).
        softcap: bound of the scores: cap · tanh(scale · q·k / cap). None: there is none.
        sinks: [H], logits that join the denominator of each head's softmax and bring no value; H is that of this rank's
            query, for local tensors. lse leaves them out.
        alibi_slopes: [H], ALiBi slopes: subtracts slope · |p - t| from a score.
        relative_bias: a table [H, 2R + 1], what a score gains at the distance p - t: table[h, clip(p - t, -R, R) + R].
        bias: [1 or B, 1 or H, 1 or S, seq_len] in every format, what a score gains: this rank's rows against all keys,
            in *original* order of keys.
        dropout_p: the probability with which a weight is dropped after the softmax, below 1; lse sees none of it.
        dropout_seed: an int, or int64 of one number or two (seed, offset), needed for dropout: equal on all cp ranks,
            and another in every layer and step. What is dropped depends on it, on positions, and on the indices of head
            and batch row, which are global for DTensors and local else: the same for every layout and cp size.
        method: how keys come to queries. "ring": by stages, one under way while another is computed. "all_gather":
            all at once behind the local blocks, for the fewest kernel calls. "ulysses": each rank computes some heads
            of the whole sequence; the ranks must divide the query heads. "hybrid": Ulysses among ``ulysses_degree``
            neighbours on the cp axis, and a ring between the groups of these. "double_ring": a ring in which rows that
            several ranks of a host need cross to it once. "auto" takes the ring, all-gather or Ulysses by a rule
            from what was measured (`call/choose.py`); `explain` tells which and why. On fewer than 8 ranks, on CPUs
            and several hosts, and with scores that is the ring.
        kernel: "auto", "fa4", "fa3", "cudnn", "fa2", "fa2_package", "efficient", "triton", "cpu_flash" or "reference".
            "auto" takes the first that can serve the call; all ranks must have the same packages installed.
        transport: "auto", "functional" or "symmetric_memory" (GPUs of one NVLink host; "auto" takes it there). Of the
            double ring within each host; between hosts it is functional.
        ulysses_degree: of the hybrid, a divisor of the ranks and of the query heads. None: the size of the second axis
            of a 2-D mesh; else the largest that divides the ranks and the kv heads, or if that is 1, the query heads.
        inner_ring_size: of the double ring, the cp ranks of each host, which follow one another. None: the size of the
            second axis of a 2-D mesh; else as LOCAL_WORLD_SIZE says, which torchrun sets.
        head_chunks: compute the kv heads, with their query heads, in this many parts one after the other: buffers of
            rows under way are those of one part, for a little less speed. None: as few as keep what a rank fetches of
            K and V within 512 MiB a part (`tools/explain/predict/memory.py` has the formula); of Ulysses one part.
        deterministic: True asks for a bitwise reproducible backward. None: `torch.use_deterministic_algorithms`.
        return_lse: also return the log-sum-exp of the scaled scores, natural log, float32 (float64), [B, H, S] or
            [H, T]; -inf for a query with no key, whose output is 0.

    Returns:
        out in the format and dtype of ``query`` (with value's head dim); contiguous for DTensors, else dense with its
        dims in memory in query's order: a transposed view for a transposed view. With ``return_lse`` (out, lse); lse is
        contiguous.

    Raises:
        ArgumentError: a ValueError: arguments that are wrong or disagree.
        UnsupportedError: a NotImplementedError: combinations that cp_mesh refuses.
        RankMismatchError: if ranks disagree, in the first call of each shape and options, and in check mode.
        What depends on arguments that are equal on all ranks is raised on every rank before the first collective. What
        depends on this rank's own shard, its number of rows where shards are unequal, is raised on that rank alone;
        in first calls, and in check mode (`cp_mesh.check_mode`), on all.

    Example:
        >>> out = attention(q, k, v, mesh=mesh["cp"], layout=ZigZag())  # q [B, H, S/cp, D]  # doctest: +SKIP
        >>> out.shape  # doctest: +SKIP
        torch.Size([1, 8, 512, 64])

    Source: ring attention, Liu et al. 2023, arXiv:2310.01889; all-gather, Llama 3, arXiv:2407.21783;
    Ulysses, Jacobs et al. 2023, arXiv:2309.14509; the hybrid, Fang and Zhao 2024, arXiv:2405.07719;
    the double ring, Gu et al. 2024, arXiv:2406.18485.
    """
    return attend(
        query, key, value,
        Asked(
            mesh, seq_dim, seq_len, layout, mask, scale, softcap, sinks, alibi_slopes, relative_bias, bias, dropout_p,
            dropout_seed, method, kernel, transport, ulysses_degree, inner_ring_size, head_chunks, deterministic,
            return_lse,
        ),
    )  # fmt: skip


def attend(query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor | tuple[Tensor, Tensor]:
    """`attention`, with its keywords as a record."""
    group, compiling = None, torch.compiler.is_compiling()
    try:
        asked = as_numbers(asked)
        axis = find_cp_axis((query, key, value), asked.mesh, asked.seq_dim)
        group = axis.group
        if asked.method in _WITH_DEGREE:
            asked = with_degree(asked)
        query, key, value = autocast(query, key, value)
        call = _make_call(query, key, value, axis, asked)
    except Exception as error:
        if not compiling:
            group = group or group_that_waits(query, asked.mesh, asked.seq_dim)
            if group is not None:
                announce_refusal(group, error)
        elif group is not None:
            announce_trace(group.group_name)
        raise
    if isinstance(query, DTensor) and (call.seq_len < axis.size or asked.score_mod or asked.mask_mod):
        # DTensor gathers a dim that is shorter than its axis, and has no rule for lists of tensors. All others go by
        # dispatch, but for those of a core over tp alone, which have no cp axis: `ContextParallel` takes them apart.
        tensors = Tensors(**local_scores(call.tensors._asdict(), query, call.format))
        q, k, v = (x.to_local(grad_placements=query.placements) for x in (query, key, value))  # type: ignore[attr-defined]
        out, lse, *_ = call_attention(q, k, v, *call._replace(tensors=tensors).arguments())
        out, lse = wrap_results(out, lse, query, call.format)
    else:
        out, lse, *_ = call_attention(query, key, value, *call.arguments())
    return (out, lse) if asked.return_lse else out


def as_numbers(asked: Asked) -> Asked:
    """The same with Python's numbers for NumPy's, and for tensors of one on the CPU that need no gradient."""
    if not torch.compiler.is_compiling() and {*map(type, _numbers_of(asked))} <= _PLAIN:  # with no call for each
        return asked
    counts = {name: getattr(asked, name) for name in _COUNTS}
    factors = {name: getattr(asked, name) for name in _FACTORS}
    seed = asked.dropout_seed if isinstance(asked.dropout_seed, Tensor) else as_int(asked.dropout_seed)
    found = {name: as_int(x) for name, x in counts.items()} | {name: _number(x) for name, x in factors.items()}
    return asked._replace(**found, dropout_seed=seed)


def _number(x: Any) -> Any:
    """Of a tensor, where that loses no gradient and waits for no GPU; other things as they are."""
    if not isinstance(x, Tensor) or torch.compiler.is_compiling() or x.requires_grad or x.dtype == torch.bool:
        return x
    return x.item() if x.numel() == 1 and x.device.type == "cpu" else x


def with_degree(asked: Asked) -> Asked:
    """The same with the size of inner groups that a mesh of two axes says."""
    is_hybrid = asked.method == "hybrid"
    if asked.method not in _WITH_DEGREE or not isinstance(asked.mesh, DeviceMesh) or asked.mesh.ndim == 1:
        return asked
    name, given = ("ulysses_degree", asked.ulysses_degree) if is_hybrid else ("inner_ring_size", asked.inner_ring_size)
    inner = asked.mesh.size(1)
    if given is not None and (type(given) is not int or given != inner):
        refuse(name, f"{inner}, as the mesh's second axis has", _shown(given), "leave it out")
    return asked._replace(ulysses_degree=inner) if is_hybrid else asked._replace(inner_ring_size=inner)


def _make_call(query: Tensor, key: Tensor, value: Tensor, axis: CPAxis, asked: Asked) -> Call:
    """The record of a call; refuses options that are wrong by themselves, and tensors that do not fit one another."""
    form = FORMATS[axis.seq_dim]
    check_format(query, key, value, form)
    options = make_options(query, key, value, asked, form)
    seq_len, layout, mask = asked.seq_len, asked.layout, asked.mask
    tensors = Tensors(
        mask.documents, mask.key_padding, mask.blocks, layout.tensor,
        asked.sinks, asked.alibi_slopes, asked.relative_bias, asked.bias,
        seed_tensor(asked.dropout_seed, query.device) if asked.dropout_p else None,
    )  # fmt: skip
    length = query.shape[axis.seq_dim]
    if isinstance(query, DTensor):
        check_placements(query, key, value, axis.mesh_dims, form)
        check_chunks(length, [query.device_mesh.size(dim) for dim in axis.mesh_dims], layout)
        if seq_len not in (None, length):
            refuse("seq_len", f"{length}, the DTensors' length", seq_len, "leave it out")
        seq_len = length
    elif seq_len is None:
        seq_len = length * axis.size
    if tensors.are_there():
        given = {name: x for name, x in zip(Tensors._fields, tensors, strict=True) if x is not None}
        check_score_placements(given, query, form)
    captured: tuple[Tensor, ...] = ()
    if asked.captured:
        captured, cuts = place_captured(asked.captured, query, axis, seq_len)
        options = options._replace(captured_cuts=cuts)
    if asked.sources is not None:
        options = options._replace(sources=asked.sources(axis.group.group_name, layout, seq_len))
    call = Call(tensors, seq_len, axis.seq_dim, axis.group.group_name, options, captured)
    if not torch.compiler.is_compiling():
        rows = Rows(options.layout, seq_len, axis.group.group_name)
        check_marks({"query": query, "key": key, "value": value}, rows, axis.seq_dim, axis.group)
        _plan_fakes((query, key, value, *tensors), call, axis.group)
    return call


def make_options(query: Tensor, key: Tensor, value: Tensor, asked: Asked, form: Format) -> Options:
    """What the op is told; refuses what is wrong by itself. Layers that ask alike share it: checks take host time."""
    graded = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    if torch.is_grad_enabled() and not graded:
        beside = *(getattr(asked, name) for name in ADDED), *asked.captured
        graded = any(isinstance(x, Tensor) and x.requires_grad for x in beside)
    beside = not isinstance(query, DTensor), torch.are_deterministic_algorithms_enabled(), graded
    drops = asked.dropout_seed is not None or type(asked.dropout_p) not in (int, float) or asked.dropout_p != 0
    known = type(asked.mask) is Mask and isinstance(asked.layout, Layout)  # others are refused by name
    if known and not drops and not torch.compiler.is_compiling():
        named = asked._replace(
            mesh=None, mask=_ANY_MASK, sinks=None, alibi_slopes=None, relative_bias=None, bias=None, captured=(),
            sources=None,
        )  # fmt: skip
        with suppress(TypeError):  # of something without a hash, which is refused by name
            options = _resolve_once(asked.layout.spec(), asked.mask.spec(), *beside, *named)
            return _of_these_heads(options, query, form) if options.score_mod or options.mask_mod else options
    options = _resolve(*beside, *asked)
    counts = options.dropout_p or options.score_mod or options.mask_mod
    return _of_these_heads(options, query, form) if counts else options


def _of_these_heads(options: Options, query: Tensor, form: Format) -> Options:
    """The same with the first head and batch row of this rank, on which scores depend."""
    heads, rows = (first_index(query, form.dims.get(name)) for name in ("heads", "batch"))
    return options._replace(first_head=options.first_head + heads, first_batch=options.first_batch + rows)


def _resolve(is_local: bool, deterministic: bool, graded: bool, *keywords: Any) -> Options:
    asked = Asked(*keywords)
    check_asked(asked)
    return Options(
        layout=asked.layout.spec(),
        mask=asked.mask.spec(),
        scale=0.0 if asked.scale is None else _as_float(asked.scale),
        softcap=0.0 if asked.softcap is None else _as_float(asked.softcap),
        dropout_p=_as_float(asked.dropout_p),
        method=asked.method,
        kernel=asked.kernel,
        transport=asked.transport,
        ulysses_degree=asked.ulysses_degree or 0,
        inner_ring_size=asked.inner_ring_size or 0,
        head_chunks=asked.head_chunks or 0,
        deterministic=deterministic if asked.deterministic is None else asked.deterministic,
        differentiable_lse=asked.return_lse and graded,
        as_inputs=is_local,
        of_root=asked.of_root,
        # Of what compiled code calls all sizes are known in the trace, where "auto" has not chosen, and inner groups
        # of unlike ranks have none.
        keeps=graded and is_local and (asked.method == "ulysses" or not torch.compiler.is_compiling()),
        score_mod=asked.score_mod,
        mask_mod=asked.mask_mod,
        first_head=asked.first_head,
        first_batch=asked.first_batch,
    )


@lru_cache(maxsize=16, typed=True)
def _resolve_once(layout: str, mask: str, *others: Any) -> Options:
    """By what is written of layout and mask: masks are new in every batch, and would stay alive."""
    return _resolve(*others)._replace(layout=layout, mask=mask)


def _plan_fakes(every: Sequence[Tensor | None], call: Call, group: dist.ProcessGroup) -> None:
    """Refuse tensors without content as the op does when it plans: of these its fake runs, which refuses nothing."""
    if isinstance(every[0], DTensor):
        with torch.no_grad():
            every = [x.to_local() if isinstance(x, DTensor) else x for x in every]
    for x in every:
        if x is not None and (isinstance(x, FakeTensor) or x.is_meta):
            break
    else:
        return
    tensors = Tensors(*every[3:])
    if any(isinstance(x, FakeTensor) for x in tensors[:3]):  # no content to plan by
        tensors = tensors._replace(documents=None, key_padding=None, blocks=None)
    q, k, v = call.format.to_bhsd(*(x for x in every[:3] if x is not None))
    make_plan(q, k, v, tensors, call.seq_len, group, call.options, call.captured)


def _rules() -> tuple[tuple[str, Callable[[Any], bool], str, str], ...]:
    """What each keyword must be: its name, whether a value is right, and what a refusal expects and advises.

    Which names of kernels and the like there are is known where they are looked up. Not a constant: torch.compile would
    guard all of its parts.
    """
    return (
        ("layout", lambda x: isinstance(x, Layout), "a Layout", "ZigZag(), Striped(), Contiguous(), Permuted(...)"),
        ("mask", lambda x: type(x) is Mask, "a Mask",
         "say it on positions, Mask(causal=, window=, documents=, key_padding=, prefix=, blocks=); cp_mesh.batch_mask"
         " reads a mask of tokens [B, S], and any other is, exactly, bias= of 0 and -inf with Mask(causal=False)"),
        ("seq_len", lambda x: x is None or _is_int(x), "an int, tokens in the whole sequence", "or None"),
        ("scale", _is_positive, "a positive number or None",
         "multiply q by a learned or negative scale instead, and take that of a tensor on a GPU by item()"),
        ("softcap", _is_positive, "a positive number or None", "None leaves scores unbounded"),
        ("ulysses_degree", _is_count, "a positive int or None", "None is automatic"),
        ("inner_ring_size", _is_count, "a positive int or None", "None is automatic"),
        ("head_chunks", _is_count, "a positive int or None", "None is automatic"),
        ("deterministic", lambda x: x is None or isinstance(x, bool), "True, False or None",
         "None follows torch.use_deterministic_algorithms"),
        ("return_lse", lambda x: isinstance(x, bool), "True or False", "it adds a second result"),
        ("method", _is_name, "a name", "method='auto' works"),
        ("kernel", _is_name, "a name", "kernel='auto' works"),
        ("transport", _is_name, "a name", "transport='auto' works"),
        ("dropout_p", lambda x: _is_number(x) and 0 <= x < 1, "a probability in [0, 1)", "dropout_p=0.0 drops nothing"),
        ("dropout_seed", lambda x: x is None or isinstance(x, Tensor) or _is_int(x), "an int or an int64 tensor",
         "round it first"),
        ("dropout_seed", lambda x: not isinstance(x, int) or 0 <= x < 2**63, "0 <= seed < 2**63",
         "take it modulo 2**63"),
    )  # fmt: skip


def check_asked(asked: Asked) -> None:
    """Refuse what is wrong by itself."""
    asked = as_numbers(asked)
    for name, is_right, expected, hint in _rules():
        if not is_right(x := getattr(asked, name)):
            refuse(name, expected, _shown(x), hint)
    for name, method in (("ulysses_degree", "hybrid"), ("inner_ring_size", "double_ring")):
        if (x := getattr(asked, name)) is not None and asked.method != method:
            got, hint = f"{x} with method={asked.method!r}", f"method={method!r} takes it, or leave it out"
            refuse(name, f"None, but with method={method!r}", got, hint)
    layout, spec = asked.layout, asked.layout.spec()
    if LAYOUTS.get(spec.partition(":")[0]) is not type(layout):
        hint = "the op rebuilds layouts by name: list your class in cp_mesh.geometry.layouts.LAYOUTS"
        refuse("layout", f"one of {', '.join(LAYOUTS)}", type(layout).__name__, hint)
    if not torch.compiler.is_compiling() and layout.tensor is None and parse_layout(spec) != layout:
        hint = 'put its integer fields into spec(), "name:1,2", and make it a frozen dataclass'
        refuse("layout", f"{layout} from its spec", parse_layout(spec), hint)
    if asked.dropout_p and asked.dropout_seed is None:
        hint = "pass a number that is equal on all cp ranks and another in every layer and step"
        refuse("dropout_seed", "an int or an int64 tensor beside dropout_p", None, hint)


def check_format(query: Tensor, key: Tensor, value: Tensor, form: Format) -> None:
    """Refuse tensors without the dims of the format."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != len(form.dims) + 1:
            expected = f"{form.name} for seq_dim={form.dims['sequence']}"
            refuse(name, expected, tuple(x.shape), "seq_dim tells the format")
    if query.shape[-1] == 0:
        hint = "queries and keys need at least one feature"
        refuse("query", "a head dim of 1 or more", tuple(query.shape), hint)
    if torch.compiler.is_compiling() or isinstance(query, DTensor):  # of others the op sees them whole
        check_tensors(*form.to_bhsd(query, key, value))


def _as_float(x: Any) -> float:
    """Of Python's numbers, symbolic ones or NumPy's."""
    return float(guard_scalar(x if isinstance(x, _NUMBERS) else float(x)))


def _shown(x: object) -> str:
    """As a message says it: "1" is not 1, and a tensor is long."""
    if isinstance(x, Tensor):
        shown = type(x).__name__ if x.ndim or x.is_meta else f"{x.detach().as_subclass(Tensor)}"
        return f"{shown}{f' on {x.device.type}' * (not x.is_cpu)}{', which requires a gradient' * x.requires_grad}"
    return repr(x) if isinstance(x, str) else written(x)


def _is_number(x: object) -> bool:
    return type(x) in (float, int) or (
        isinstance(x, numbers.Real | torch.SymInt | torch.SymFloat) and not isinstance(x, bool)
    )


def _is_positive(x: object) -> bool:
    return x is None or (_is_number(x) and 0 < x < math.inf)  # type: ignore[operator]


def _is_count(x: object) -> bool:
    return x is None or (type(x) is int and x > 0)


def _is_name(x: object) -> bool:
    return isinstance(x, str)


def _is_int(x: object) -> bool:
    return isinstance(x, int | torch.SymInt) and not isinstance(x, bool)
