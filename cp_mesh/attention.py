"""`attention`: the function. It validates, picks and calls; the work is in the op."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.fx.experimental.symbolic_shapes import guard_scalar

from cp_mesh.agreement import announce_refusal, checking
from cp_mesh.errors import ArgumentError, UnsupportedError, describe
from cp_mesh.kernels.combine import dense_strides
from cp_mesh.layouts import LAYOUTS, Layout, ZigZag, chunk_bounds, parse_layout
from cp_mesh.masks import Mask
from cp_mesh.ops import GRADED, attention_op, score_placements, to_bhsd
from cp_mesh.plan import Options, Tensors, check_tensors, make_plan

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
FORMATS = {0: "[T, H, D]", 1: "[B, S, H, D]", 2: "[B, H, S, D]"}
"""By the sequence dim."""


class _CPAxis(NamedTuple):
    """The cp axis of one call; ``mesh_dim`` is its place in the DTensors' mesh, None for local tensors."""

    group: dist.ProcessGroup
    size: int
    mesh_dim: int | None

    @property
    def group_name(self) -> str:
        return self.group.group_name


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mesh: DeviceMesh | None = None,
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
    head_chunks: int | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    _of_root: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over a sequence sharded on the cp axis of a mesh.

    Local tensors in, local tensors out; DTensors in, DTensors out with the placements of ``query``. The global tensor
    of a DTensor is the sequence *in layout order*, so ``Shard(seq_dim)`` on cp is an ordinary contiguous shard.
    Grouped-query attention is fewer kv heads, in torch's head order. Inputs are never written.

    A score is softcap(scale · q·k), less slopes, plus tables and bias, and then masked. Tensors of the scores are equal
    on every cp rank, but for the rows of a bias; their gradients are this rank's share, whose sum over ranks is the
    gradient. Beside DTensors they are local tensors, of what this rank holds, or DTensors on the same mesh, sharded
    where query's heads are (a bias: as query's batch, heads and rows are) and else replicated; their gradients are then
    partial.

    Args:
        query: [B, H, S, D], [B, S, H, D] or packed [T, H, D]; S (T) is this rank's rows for local tensors. float64,
            float32, bfloat16 or float16; sums are float32 (float64 for float64).
        key: like ``query`` with K heads, H a multiple of K.
        value: like ``key``; its head dim may differ where the kernel allows.
        mesh: the 1-D mesh of the cp axis. Required for local tensors; for DTensors it tells which axis of their mesh
            is cp if ``seq_dim`` is not given and no axis is named "cp".
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
        method: "auto" or "ring".
        kernel: "auto", "fa4", "fa3", "cudnn", "fa2", "fa2_package", "efficient", "triton", "cpu_flash" or "reference".
            "auto" takes the first that can serve the call; all ranks must have the same packages installed.
        transport: "auto", "functional" or "symmetric_memory" (GPUs of one NVLink host; "auto" takes it there).
        head_chunks: compute the kv heads, with their query heads, in this many parts one after the other: buffers of
            rows under way are those of one part, for a little less speed. None: as few as keep what a rank fetches of
            K and V within 512 MiB a part (`cp_mesh/memory.py` has the formula of the memory).
        deterministic: True asks for a bitwise reproducible backward. None: `torch.use_deterministic_algorithms`.
        return_lse: also return the log-sum-exp of the scaled scores, natural log, float32 (float64), [B, H, S] or
            [H, T]; -inf for a query with no key, whose output is 0.
        _of_root: not for users; `ContextParallel` says that the sequence is that of the `ShardedModel` around it.

    Returns:
        out in the format and dtype of ``query`` (with value's head dim); contiguous for DTensors, else dense with its
        dims in memory in query's order: a transposed view for a transposed view. With ``return_lse`` (out, lse); lse is
        contiguous.

    Raises:
        ArgumentError: a ValueError: arguments that are wrong or disagree.
        UnsupportedError: a NotImplementedError: combinations that cp_mesh refuses.
        RankMismatchError: in check mode, if ranks disagree.
        What depends on arguments that are equal on all ranks is raised on every rank before the first collective. What
        depends on this rank's own shard, its number of rows where shards are unequal, is raised on that rank alone;
        in check mode (`cp_mesh.check_mode`) on all.

    Example:
        >>> out = attention(q, k, v, mesh=mesh["cp"], layout=ZigZag())  # q [B, H, S/cp, D]  # doctest: +SKIP
        >>> out.shape  # doctest: +SKIP
        torch.Size([1, 8, 512, 64])

    Source: ring attention, Liu et al. 2023, arXiv:2310.01889.
    """
    compiling = torch.compiler.is_compiling()
    group, given_seq_dim = None, seq_dim
    try:
        for name, x in (("query", query), ("key", key), ("value", value)):
            if not isinstance(x, Tensor):
                raise ArgumentError(describe(name, "a tensor", type(x).__name__, "use torch.as_tensor"))
        axis, seq_dim = _find_cp_axis(query, key, value, mesh, seq_dim)
        group = axis.group
        _check_types(layout, mask, seq_len)
        _check_options(scale, softcap, head_chunks, deterministic, return_lse)
        _check_names(method=method, kernel=kernel, transport=transport)
        _check_dropout(dropout_p, dropout_seed)
        tensors = Tensors(mask.documents, mask.key_padding, layout.tensor, sinks, alibi_slopes, relative_bias, bias)
        if dropout_p:
            tensors = tensors._replace(dropout_seed=seed_tensor(dropout_seed, query.device))
        query, key, value = _autocast(query, key, value)
        _check_format(query, key, value, seq_dim, compiling)
        if isinstance(query, DTensor):
            check_placements(query, key, value, axis.mesh_dim, seq_dim)
            _check_chunks(query.shape[seq_dim], axis.size, layout)
            global_len = query.shape[seq_dim]
            if seq_len not in (None, global_len):
                raise ArgumentError(describe("seq_len", f"{global_len}, the DTensors' length", seq_len, "leave it out"))
            seq_len = global_len
        elif seq_len is None:
            seq_len = query.shape[seq_dim] * axis.size
        given = {name: x for name, x in zip(Tensors._fields, tensors, strict=True) if x is not None}
        check_score_placements(given, query, seq_dim)
        options = Options(
            layout=layout.spec(),
            mask=mask.spec(),
            scale=1 / math.sqrt(query.shape[-1]) if scale is None else _as_float(scale),
            softcap=0.0 if softcap is None else _as_float(softcap),
            dropout_p=_as_float(dropout_p),
            first_head=_first(query, 2 if seq_dim == 1 else 1) if dropout_p else 0,
            first_batch=_first(query, 0) if dropout_p and seq_dim != 0 else 0,
            method=method,
            kernel=kernel,
            transport=transport,
            head_chunks=head_chunks or 0,
            deterministic=torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
            differentiable_lse=return_lse
            and torch.is_grad_enabled()
            and _any_requires_grad(query, key, value, alibi_slopes, relative_bias, bias),
            as_inputs=not isinstance(query, DTensor),
            of_root=_of_root,
        )
        # The op checks the same in every call, compiled or not, before the first collective. But DTensor's rules come
        # before it, and its fake instead of it where a tensor has no content.
        if not compiling and any(
            isinstance(x, (DTensor, FakeTensor)) or x.is_meta for x in (query, key, value, *given.values())
        ):
            q, k, v = (to_bhsd(_to_local(x.detach()), seq_dim) for x in (query, key, value))
            local = Tensors(*map(_to_local_or_none, tensors))
            if any(isinstance(x, FakeTensor) for x in (mask.documents, mask.key_padding)):  # no content to plan by
                local = local._replace(documents=None, key_padding=None)
            make_plan(q, k, v, local, seq_len, axis.group, options)
    except Exception as error:
        if not compiling and checking():
            group = group or _group_that_waits(query, mesh, given_seq_dim)
            if group is not None:
                announce_refusal(group, error)
        raise

    arguments = (seq_len, seq_dim, axis.group_name, options.spec())
    # Dispatch refuses plain tensors beside DTensors, and gathers a dim shorter than its axis.
    plain = isinstance(query, DTensor) and not all(isinstance(x, DTensor) for x in given.values())
    if isinstance(query, DTensor) and (plain or seq_len < axis.size):
        out, lse = _call_on_locals((query, key, value), tensors, query, seq_dim, arguments)
    else:
        out, lse = attention_op(query, key, value, *tensors, *arguments)
    return (out, lse) if return_lse else out


def _call_on_locals(
    qkv: tuple[Tensor, ...],
    tensors: Tensors,
    query: DTensor,
    seq_dim: int,
    arguments: tuple[Any, ...],
) -> tuple[Tensor, Tensor]:
    """Unwrap, call the op on locals, and wrap its results as the op's sharding rule would place them."""
    mesh, placements = query.device_mesh, query.placements
    named = dict(zip(Tensors._fields, tensors, strict=True))
    out, lse = attention_op(
        *(x.to_local(grad_placements=placements) for x in qkv if isinstance(x, DTensor)),
        *local_scores(named, query, seq_dim).values(),
        *arguments,
    )
    lse_dims = {0: 1, 1: 0} if seq_dim == 0 else {0: 0, seq_dim: 2, 3 - seq_dim: 1}
    lse_placements = [Shard(lse_dims[p.dim]) if isinstance(p, Shard) else p for p in placements]
    out_shape = (*query.shape[:-1], qkv[2].shape[-1])
    lse_shape = [0] * lse.ndim
    for dim, lse_dim in lse_dims.items():
        lse_shape[lse_dim] = query.shape[dim]
    return wrap(out, mesh, placements, out_shape), wrap(lse, mesh, lse_placements, lse_shape)


def wrap(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], like: DTensor | None = None
) -> DTensor:
    """With the global shape said: shards may be unequal, and then a rank cannot infer it.

    Contiguous, or with its dims in memory in the order of ``like``'s spec, which is equal on all ranks: a shard may lie
    in another order, and one of few rows does not tell any.
    """
    stride = dense_strides(shape, torch.empty(shape, device="meta") if like is None else like)
    order = sorted(range(len(shape)), key=lambda dim: stride[dim], reverse=True)
    local = local.permute(order).contiguous().permute([order.index(dim) for dim in range(len(shape))])
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def _find_cp_axis(
    query: Tensor, key: Tensor, value: Tensor, mesh: DeviceMesh | None, seq_dim: int | None
) -> tuple[_CPAxis, int]:
    """The cp axis and the sequence dim, from the placements of DTensors or from the arguments."""
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise ArgumentError(
            describe("mesh", "the 1-D DeviceMesh of the cp axis", type(mesh).__name__, 'pass mesh["cp"]')
        )
    if mesh is not None and mesh.ndim != 1:
        raise UnsupportedError(
            describe("mesh", "the 1-D DeviceMesh of the cp axis", f"{mesh.ndim} axes", 'pass one axis, mesh["cp"]')
        )
    if seq_dim is not None and (type(seq_dim) is not int or seq_dim not in FORMATS):
        raise ArgumentError(
            describe("seq_dim", "2 [B, H, S, D], 1 [B, S, H, D] or 0 [T, H, D]", seq_dim, "seq_dim=2 is SDPA's format")
        )
    distributed = [isinstance(x, DTensor) for x in (query, key, value)]
    if any(distributed) and not all(distributed):
        raise ArgumentError(
            describe(
                "q, k, v",
                "all DTensors or all local tensors",
                ", ".join(type(x).__name__ for x in (query, key, value)),
                "wrap the others with DTensor.from_local, or unwrap with to_local()",
            )
        )
    if not isinstance(query, DTensor):
        if mesh is None:
            raise ArgumentError(
                describe(
                    "mesh",
                    "the 1-D DeviceMesh of the cp axis",
                    None,
                    'local tensors do not tell their mesh: after init_process_group, pass mesh=mesh["cp"]',
                )
            )
        if mesh.get_coordinate() is None:
            raise ArgumentError(
                describe("mesh", "a mesh that holds this rank", mesh, "call attention on the ranks of the mesh only")
            )
        return _CPAxis(mesh.get_group(), mesh.size(), None), 2 if seq_dim is None else seq_dim

    whole, names = query.device_mesh, query.device_mesh.mesh_dim_names or ()
    if mesh is not None:
        wanted = mesh.get_group().group_name
        axes = [i for i in range(whole.ndim) if whole.get_group(i).group_name == wanted]
        if len(axes) > 1:  # axes of one rank may share one group: their names tell them apart
            axes = [i for i in axes if names and mesh.mesh_dim_names == (names[i],)] or axes
        if not axes:
            raise ArgumentError(describe("mesh", f"an axis of the DTensors' mesh {whole}", mesh, "leave mesh out"))
    elif seq_dim is not None:
        axes = [i for i, p in enumerate(query.placements) if p == Shard(seq_dim)]
        if not axes:
            raise ArgumentError(
                describe(
                    "query's placements",
                    f"Shard({seq_dim}) on the cp axis",
                    query.placements,
                    "an unsharded sequence needs no context parallelism: shard it, or call SDPA",
                )
            )
        if len(axes) > 1:
            raise UnsupportedError(
                describe("query's placements", "the sequence sharded on one axis", query.placements, "flatten the axes")
            )
    elif "cp" in names:
        axes = [names.index("cp")]
    elif whole.ndim == 1 and not names:
        axes = [0]
    else:
        raise ArgumentError(
            describe(
                "cp axis",
                'an axis named "cp", or mesh= or seq_dim=',
                f"axes {names or whole.ndim}",
                'pass mesh=mesh["your cp axis"]',
            )
        )
    if seq_dim is None:
        seq_dim, placement = 2, query.placements[axes[0]]
        if placement != Shard(seq_dim):
            hint = "an unsharded sequence needs no context parallelism: shard it, or call SDPA"
            if placement in (Shard(0), Shard(1)):  # another format, or heads or batch on the wrong axis
                form = FORMATS[placement.dim]
                hint = (
                    f"pass seq_dim={placement.dim} if it is {form}; the cp axis shards the sequence, not heads or batch"
                )
            expected = f"Shard({seq_dim}), the sequence of {FORMATS[seq_dim]}"
            raise ArgumentError(describe("query's placement on the cp axis", expected, placement, hint))
    return _CPAxis(whole.get_group(axes[0]), whole.size(axes[0]), axes[0]), seq_dim


def _group_that_waits(query: Tensor, mesh: DeviceMesh | None, seq_dim: int | None) -> dist.ProcessGroup | None:
    """The cp group, as far as it can be told from arguments of which some were refused."""
    if isinstance(mesh, DeviceMesh) and mesh.ndim == 1:
        return mesh.get_group()
    if not isinstance(query, DTensor):
        return None
    whole, names = query.device_mesh, query.device_mesh.mesh_dim_names or ()
    sequence = Shard(2 if seq_dim is None else seq_dim)
    axes = [i for i, placement in enumerate(query.placements) if placement == sequence]
    if seq_dim is None and "cp" in names:
        axes = [names.index("cp")]
    return whole.get_group(axes[0]) if len(axes) == 1 else None


def _check_types(layout: object, mask: object, seq_len: object) -> None:
    if not isinstance(layout, Layout):
        raise ArgumentError(
            describe("layout", "a Layout", repr(layout), "ZigZag(), Striped(), Contiguous(), Permuted(...)")
        )
    if LAYOUTS.get(layout.spec().partition(":")[0]) is not type(layout):
        hint = "the op rebuilds layouts by name: list your class in cp_mesh.layouts.LAYOUTS"
        raise ArgumentError(describe("layout", f"one of {', '.join(LAYOUTS)}", type(layout).__name__, hint))
    if not torch.compiler.is_compiling() and layout.tensor is None and parse_layout(layout.spec()) != layout:
        hint = 'put its integer fields into spec(), "name:1,2", and make it a frozen dataclass'
        raise ArgumentError(describe("layout", f"{layout} from its spec", parse_layout(layout.spec()), hint))
    if type(mask) is not Mask:
        hint = "say it on positions, Mask(causal=, window=, documents=, key_padding=, prefix=)"
        raise ArgumentError(describe("mask", "a Mask", type(mask).__name__, hint))
    if seq_len is not None and (isinstance(seq_len, bool) or not isinstance(seq_len, int | torch.SymInt)):
        raise ArgumentError(describe("seq_len", "an int, tokens in the whole sequence", repr(seq_len), "or None"))


def _check_options(
    scale: object, softcap: object, head_chunks: object, deterministic: object, return_lse: object
) -> None:
    if scale is not None and (not _is_number(scale) or not 0 < scale < math.inf):  # type: ignore[operator]
        hint = "multiply q by a learned or negative scale instead"
        raise ArgumentError(describe("scale", "a positive number", _shown(scale), hint))
    if softcap is not None and (not _is_number(softcap) or not 0 < softcap < math.inf):  # type: ignore[operator]
        hint = "None leaves scores unbounded"
        raise ArgumentError(describe("softcap", "a positive number or None", _shown(softcap), hint))
    if head_chunks is not None and (type(head_chunks) is not int or head_chunks < 1):
        raise ArgumentError(describe("head_chunks", "a positive int or None", repr(head_chunks), "None is automatic"))
    if deterministic is not None and not isinstance(deterministic, bool):
        hint = "None follows torch.use_deterministic_algorithms"
        raise ArgumentError(describe("deterministic", "True, False or None", repr(deterministic), hint))
    if not isinstance(return_lse, bool):
        raise ArgumentError(describe("return_lse", "True or False", _shown(return_lse), "it adds a second result"))


def _check_names(**names: object) -> None:
    """Of things that are chosen by name; which names there are is known where they are looked up."""
    for what, name in names.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ArgumentError(describe(what, "a name", repr(name), f"{what}='auto' works"))


def _as_float(x: Any) -> float:
    """Of Python's numbers, symbolic ones or NumPy's."""
    return float(guard_scalar(x if isinstance(x, _NUMBERS) else float(x)))


def _shown(x: object) -> object:
    """As a message says it: "1" is not 1."""
    return repr(x) if isinstance(x, str) else x


def _is_number(x: object) -> bool:
    return type(x) in (float, int) or (
        isinstance(x, numbers.Real | torch.SymInt | torch.SymFloat) and not isinstance(x, bool)
    )


def local_scores(scores: Mapping[str, Any], query: DTensor, seq_dim: int) -> dict[str, Any]:
    """The same with local tensors for DTensors, whose gradients become DTensors again.

    Args:
        scores: options of the scores by name.
        query: the DTensor beside which they are placed rightly.
        seq_dim: its sequence dim.
    """
    return {
        name: x.to_local(grad_placements=_score_placements(name, x, query, seq_dim)[1]) if isinstance(x, DTensor) else x
        for name, x in scores.items()
    }


def check_score_placements(scores: Mapping[str, Any], query: Tensor, seq_dim: int) -> None:
    """Refuse what is no tensor, and DTensors whose placements do not match query's."""
    for name, x in scores.items():
        if name in GRADED and not isinstance(x, Tensor | None):
            raise ArgumentError(describe(name, "a tensor", type(x).__name__, "use torch.tensor"))
        if not isinstance(x, DTensor):
            continue
        expected = "a local tensor, as query is"
        if isinstance(query, DTensor):
            mesh, wanted = query.device_mesh, _score_placements(name, x, query, seq_dim)[0]
            sizes = [mesh.size(axis) for axis in range(mesh.ndim)]  # of 1: every placement is the whole there
            pairs = zip(x.placements, wanted, sizes, strict=False)
            if x.device_mesh == mesh and all(size == 1 or has == needs for has, needs, size in pairs):
                continue
            expected = f"{tuple(wanted)} on {mesh}"
        got, hint = f"{x.placements} on {x.device_mesh}", "redistribute it, or pass this rank's part, to_local()"
        raise ArgumentError(describe(f"{name}'s placements", expected, got, hint))


def _score_placements(name: str, x: Tensor, query: DTensor, seq_dim: int) -> tuple[list[Placement], list[Placement]]:
    """The placements that a tensor of the scores beside query must have, and those of its gradient."""
    dims = {seq_dim: "sequence", (2 if seq_dim == 1 else 1): "heads"} | ({0: "batch"} if seq_dim else {})
    parts = [dims[p.dim] if isinstance(p, Shard) else "whole" for p in query.placements]
    rows = [score_placements(name, x.shape, part) for part in parts]
    return [row[0] for row in rows], [row[1] for row in rows]


def _check_dropout(dropout_p: object, seed: object) -> None:
    if not _is_number(dropout_p) or not 0 <= dropout_p < 1:  # type: ignore[operator]
        hint = "dropout_p=0.0 drops nothing"
        raise ArgumentError(describe("dropout_p", "a probability in [0, 1)", _shown(dropout_p), hint))
    if dropout_p and seed is None:
        hint = "pass a number that is equal on all cp ranks and another in every layer and step"
        raise ArgumentError(describe("dropout_seed", "an int or an int64 tensor beside dropout_p", None, hint))
    if not isinstance(seed, int | torch.SymInt | Tensor | None) or isinstance(seed, bool):
        raise ArgumentError(describe("dropout_seed", "an int or an int64 tensor", repr(seed), "round it first"))
    if isinstance(seed, int) and not 0 <= seed < 2**63:
        raise ArgumentError(describe("dropout_seed", "0 <= seed < 2**63", seed, "take it modulo 2**63"))


def seed_tensor(seed: Any, device: torch.device | str) -> Tensor:
    """int64; of a number, by a fill on the device, which waits for nothing."""
    return seed if isinstance(seed, Tensor) else torch.full((1,), seed, dtype=torch.int64, device=device)


def _first(x: Tensor, dim: int) -> int:
    """The global index of this rank's first one in a dim of a DTensor that shards evenly; 0 for a local tensor."""
    index, parts = 0, 1
    if isinstance(x, DTensor):
        for axis, placement in enumerate(x.placements):
            if placement == Shard(dim):
                index = index * x.device_mesh.size(axis) + x.device_mesh.get_local_rank(axis)
                parts *= x.device_mesh.size(axis)
    return index * (x.shape[dim] // parts)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What autocast would make of q, k, v; done here so that checks see the dtypes that the kernel will."""
    device_type = tensors[0].device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def _check_format(query: Tensor, key: Tensor, value: Tensor, seq_dim: int, compiling: bool) -> None:
    ndim = 3 if seq_dim == 0 else 4
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != ndim:
            expected = f"{FORMATS[seq_dim]} for seq_dim={seq_dim}"
            raise ArgumentError(describe(name, expected, tuple(x.shape), "seq_dim tells the format"))
    if query.shape[-1] == 0:
        got, hint = tuple(query.shape), "queries and keys need at least one feature"
        raise ArgumentError(describe("query", "a head dim of 1 or more", got, hint))
    if compiling or isinstance(query, DTensor):  # of others the op sees them whole
        check_tensors(*(to_bhsd(x, seq_dim) for x in (query, key, value)))


def check_placements(query: DTensor, key: Tensor, value: Tensor, cp_axis: int | None, seq_dim: int) -> None:
    """Refuse placements that would make the ring wrong, or make DTensor silently gather what the user sharded.

    Args:
        query, key, value: DTensors of one format.
        cp_axis: the axis of their mesh that shards the sequence, None if none of its axes does.
        seq_dim: the sequence dim.
    """
    mesh, placements = query.device_mesh, query.placements
    for name, x in (("key", key), ("value", value)):
        if not isinstance(x, DTensor) or x.device_mesh != mesh or x.placements != placements:
            raise ArgumentError(
                describe(
                    f"{name}'s placements",
                    f"those of query, {placements}",
                    f"{getattr(x, 'placements', 'a plain tensor')} on {getattr(x, 'device_mesh', 'no mesh')}",
                    "shard q, k and v alike; kv heads that tp cannot divide need a smaller tp, or repeated kv heads",
                )
            )
    head_dim, names = (2 if seq_dim == 1 else 1), mesh.mesh_dim_names or [str(i) for i in range(mesh.ndim)]
    for i, placement in enumerate(placements):
        here = f"placement on mesh axis {names[i]!r}"
        if i == cp_axis:
            if placement != Shard(seq_dim):
                raise ArgumentError(
                    describe(here, f"Shard({seq_dim}), the sequence", placement, "shard the sequence on the cp axis")
                )
        elif isinstance(placement, Replicate):
            continue
        elif placement == Shard(seq_dim):
            raise UnsupportedError(
                describe(here, "no second shard of the sequence", placement, "gather the sequence over this axis first")
            )
        elif placement != Shard(head_dim) and (placement != Shard(0) or seq_dim == 0):
            hint = "redistribute it first" if isinstance(placement, Partial) else "shard heads or batch instead"
            raise UnsupportedError(describe(here, "Shard of heads or batch, or Replicate", placement, hint))
    # Several axes may shard one dim: it is their product that has to divide it.
    sizes = {"query heads": query.shape[head_dim], "kv heads": key.shape[head_dim]}
    hint = f"shard heads over axes whose sizes together divide {sizes['query heads']} and {sizes['kv heads']}"
    _check_divides(mesh, names, placements, head_dim, sizes, hint)
    if seq_dim != 0:
        _check_divides(mesh, names, placements, 0, {"batch": query.shape[0]}, "pad or regroup the batch")


def _check_divides(
    mesh: DeviceMesh,
    names: Sequence[str],
    placements: Sequence[Placement],
    dim: int,
    sizes: Mapping[str, int],
    hint: str,
) -> None:
    """Refuse sizes of a dim that the axes sharding it do not divide together: its shards would be unequal."""
    axes = [i for i, placement in enumerate(placements) if placement == Shard(dim)]
    parts = 1
    for i in axes:  # not math.prod, which Dynamo does not trace in torch 2.11
        parts *= mesh.size(i)
    for what, size in sizes.items():
        if size % parts:
            of = f"axis {names[axes[0]]!r}" if len(axes) == 1 else f"axes {' x '.join(repr(names[i]) for i in axes)}"
            raise ArgumentError(describe(what, f"a multiple of {parts}, the size of {of}", size, hint))


def _check_chunks(length: int, size: int, layout: Layout) -> None:
    """DTensor's unequal shards have `torch.chunk` sizes; given others, `full_tensor()` would be silently wrong."""
    for rank in range(size):
        begin, end = chunk_bounds(length, size, rank)
        if layout.shard_len(length, size, rank) != end - begin:
            raise UnsupportedError(
                describe(
                    "DTensor length",
                    f"torch.chunk shards, which {layout.spec()} gives for multiples of {layout.multiple(size)}",
                    length,
                    "pad the sequence (ShardedSequence does), or pass local tensors with seq_len",
                )
            )


def _to_local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _to_local_or_none(x: Tensor | None) -> Tensor | None:
    return None if x is None else _to_local(x.detach())


def _any_requires_grad(*tensors: Tensor | None) -> bool:
    return any(x is not None and x.requires_grad for x in tensors)
