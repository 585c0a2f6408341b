"""`attention`: the function. It validates, picks and calls; the work is in the op."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.fx.experimental.symbolic_shapes import guard_scalar

from cp_mesh.agreement import announce_refusal, checking
from cp_mesh.errors import ArgumentError, UnsupportedError, describe
from cp_mesh.layouts import LAYOUTS, Layout, ZigZag, chunk_bounds, parse_layout
from cp_mesh.masks import Mask
from cp_mesh.ops import attention_op, to_bhsd
from cp_mesh.plan import Options, check_tensors, make_plan


@dataclass(frozen=True)
class _CPAxis:
    """The cp axis of one call; ``index`` is its place in the DTensors' mesh, None for local tensors."""

    group: dist.ProcessGroup
    size: int
    index: int | None

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
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    method: str = "auto",
    kernel: str = "auto",
    transport: str = "auto",
    head_chunks: int | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over a sequence sharded on the cp axis of a mesh.

    Local tensors in, local tensors out; DTensors in, DTensors out with the placements of ``query``. The global tensor
    of a DTensor is the sequence *in layout order*, so ``Shard(seq_dim)`` on cp is an ordinary contiguous shard.
    Grouped-query attention is fewer kv heads, in torch's head order. Inputs are never written.

    Args:
        query: [B, H, S, D], [B, S, H, D] or packed [T, H, D]; S (T) is this rank's rows for local tensors. float64,
            float32, bfloat16 or float16; sums are float32 (float64 for float64).
        key: like ``query`` with K heads, H a multiple of K.
        value: like ``key``; its head dim may differ where the kernel allows.
        mesh: the 1-D mesh of the cp axis. Required for local tensors; for DTensors it tells which axis of their mesh
            is cp if ``seq_dim`` is not given and no axis is named "cp".
        seq_dim: the sequence dim: 2 = [B, H, S, D] (default for local tensors), 1 = [B, S, H, D], 0 = [T, H, D]. Local
            tensors do not tell, so pass it for the other formats. Read from the placement on the cp axis for DTensors.
        seq_len: tokens in the whole sequence. None: local length x cp_size (DTensors: their global length). Shards of
            unequal length need it: a rank cannot infer it.
        layout: which positions each rank holds.
        mask: who may attend to whom, on positions. Its tensors hold the whole sequence, equal on every cp rank.
        scale: factor on q·k; None: 1 / sqrt(D).
        softcap, sinks, alibi_slopes, bias, dropout_p: not available yet; anything but the default is refused.
        method: "auto" or "ring".
        kernel: "auto", "fa4", "fa3", "cudnn", "fa2", "fa2_package", "efficient", "cpu_flash" or "reference". "auto"
            takes the first that can serve the call; all ranks must have the same packages installed.
        transport: "auto", "functional" or "symmetric_memory" (GPUs of one NVLink host; "auto" takes it there).
        head_chunks: compute the kv heads, with their query heads, in this many parts one after the other: buffers of
            rows under way are those of one part, for a little less speed. None: as few as keep what a rank fetches of
            K and V within 512 MiB a part (`cp_mesh/memory.py` has the formula of the memory).
        deterministic: True asks for a bitwise reproducible backward. None: `torch.use_deterministic_algorithms`.
        return_lse: also return the log-sum-exp of the scaled scores, natural log, float32 (float64), [B, H, S] or
            [H, T]; -inf for a query with no key, whose output is 0.

    Returns:
        out in the format and dtype of ``query`` (with value's head dim), contiguous; with ``return_lse`` (out, lse).

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
    try:
        axis, seq_dim = _find_cp_axis(query, key, value, mesh, seq_dim)
        _check_types(layout, mask, seq_len, scale)
        _check_chunks_wanted(head_chunks)
        tensors = (mask.documents, mask.key_padding, layout.tensor if isinstance(layout, Layout) else None)
        _refuse_unavailable(softcap, sinks, alibi_slopes, bias, dropout_p)
        query, key, value = _autocast(query, key, value)
        _check_format(query, key, value, seq_dim)
        if isinstance(query, DTensor):
            check_placements(query, key, value, axis.index, seq_dim)
            _check_chunks(query.shape[seq_dim], axis.size, layout)
            global_len = query.shape[seq_dim]
            if seq_len not in (None, global_len):
                raise ArgumentError(describe("seq_len", f"{global_len}, the DTensors' length", seq_len, "leave it out"))
            seq_len = global_len
        elif seq_len is None:
            seq_len = query.shape[seq_dim] * axis.size
        options = Options(
            layout=layout.spec(),
            mask=mask.spec(),
            scale=1 / math.sqrt(query.shape[-1]) if scale is None else float(guard_scalar(scale)),
            method=method,
            kernel=kernel,
            transport=transport,
            head_chunks=head_chunks or 0,
            deterministic=torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
            differentiable_lse=return_lse and torch.is_grad_enabled() and _any_requires_grad(query, key, value),
        )
        if not compiling:  # this Python is traced once only; in compiled code the op makes the same checks, every call
            q, k, v = (to_bhsd(_to_local(x.detach()), seq_dim) for x in (query, key, value))
            make_plan(q, k, v, *tensors, seq_len, axis.group, options)
    except Exception as error:
        group = None if compiling or not checking() else _group_that_waits(query, mesh)
        if group is not None:
            announce_refusal(group, error)
        raise

    arguments = (*tensors, seq_len, seq_dim, axis.group_name, options.spec())
    # Dispatch refuses plain tensors (of masks and layouts) beside DTensors, and gathers a dim shorter than its axis.
    if isinstance(query, DTensor) and (any(x is not None for x in tensors) or seq_len < axis.size):
        out, lse = _call_on_locals((query, key, value), query, seq_dim, arguments)
    else:
        out, lse = attention_op(query, key, value, *arguments)
    return (out, lse) if return_lse else out


def _call_on_locals(
    tensors: tuple[Tensor, ...], query: DTensor, seq_dim: int, arguments: tuple[Any, ...]
) -> tuple[Tensor, Tensor]:
    """Unwrap, call the op on locals, and wrap its results as the op's sharding rule would place them."""
    mesh, placements = query.device_mesh, query.placements
    out, lse = attention_op(
        *(x.to_local(grad_placements=placements) for x in tensors if isinstance(x, DTensor)), *arguments
    )
    lse_dims = {0: 1, 1: 0} if seq_dim == 0 else {0: 0, seq_dim: 2, 3 - seq_dim: 1}
    lse_placements = [Shard(lse_dims[p.dim]) if isinstance(p, Shard) else p for p in placements]
    out_shape = (*query.shape[:-1], tensors[2].shape[-1])
    lse_shape = [0] * lse.ndim
    for dim, lse_dim in lse_dims.items():
        lse_shape[lse_dim] = query.shape[dim]
    return wrap(out, mesh, placements, out_shape), wrap(lse, mesh, lse_placements, lse_shape)


def wrap(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """With the global shape said: shards may be unequal, and then a rank cannot infer it."""
    stride = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride))


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
    if seq_dim not in (None, 0, 1, 2):
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
    placement = query.placements[axes[0]]
    if seq_dim is None:
        if not isinstance(placement, Shard) or placement.dim not in (0, 1, 2):
            raise ArgumentError(
                describe(
                    "query's placement on the cp axis",
                    "Shard(seq_dim)",
                    placement,
                    "an unsharded sequence needs no context parallelism: shard it, or call SDPA",
                )
            )
        seq_dim = placement.dim
    return _CPAxis(whole.get_group(axes[0]), whole.size(axes[0]), axes[0]), seq_dim


def _group_that_waits(query: Tensor, mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """The cp group, as far as it can be told from arguments of which some were refused."""
    if isinstance(mesh, DeviceMesh) and mesh.ndim == 1:
        return mesh.get_group()
    if isinstance(query, DTensor):
        names = query.device_mesh.mesh_dim_names or ()
        if "cp" in names or query.device_mesh.ndim == 1:
            return query.device_mesh.get_group(names.index("cp") if "cp" in names else 0)
    return None


def _check_types(layout: object, mask: object, seq_len: object, scale: object) -> None:
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
    if scale is not None and (isinstance(scale, Tensor) or not 0 < scale < math.inf):  # type: ignore[operator]
        hint = "multiply q by a learned or negative scale instead"
        raise ArgumentError(describe("scale", "a positive number", scale, hint))


def _check_chunks_wanted(head_chunks: int | None) -> None:
    if head_chunks is not None and (type(head_chunks) is not int or head_chunks < 1):
        raise ArgumentError(describe("head_chunks", "a positive int or None", repr(head_chunks), "None is automatic"))


def _refuse_unavailable(
    softcap: float | None, sinks: Tensor | None, alibi_slopes: Tensor | None, bias: Tensor | None, dropout_p: float
) -> None:
    for name, given, default in (
        ("softcap", softcap is not None, None),
        ("sinks", sinks is not None, None),
        ("alibi_slopes", alibi_slopes is not None, None),
        ("bias", bias is not None, None),
        ("dropout_p", dropout_p != 0.0, 0.0),
    ):
        if given:
            raise UnsupportedError(f"attention: {name} is not available yet; {name}={default} works")


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What autocast would make of q, k, v; done here so that checks see the dtypes that the kernel will."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def _check_format(query: Tensor, key: Tensor, value: Tensor, seq_dim: int) -> None:
    ndim = 3 if seq_dim == 0 else 4
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != ndim:
            form = {0: "[T, H, D]", 1: "[B, S, H, D]", 2: "[B, H, S, D]"}[seq_dim]
            raise ArgumentError(
                describe(name, f"{form} for seq_dim={seq_dim}", tuple(x.shape), "seq_dim tells the format")
            )
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
        elif placement == Shard(head_dim):
            for name, heads in (("query", query.shape[head_dim]), ("kv", key.shape[head_dim])):
                if heads % mesh.size(i):
                    raise ArgumentError(
                        describe(
                            f"{name} heads",
                            f"a multiple of axis {names[i]!r}'s size {mesh.size(i)}",
                            heads,
                            f"use a size that divides both {query.shape[head_dim]} and {key.shape[head_dim]}",
                        )
                    )
        elif placement == Shard(0) and seq_dim != 0:
            if query.shape[0] % mesh.size(i):
                raise ArgumentError(
                    describe("batch", f"a multiple of {mesh.size(i)}", query.shape[0], "pad or regroup the batch")
                )
        else:
            hint = "redistribute it first" if isinstance(placement, Partial) else "shard heads or batch instead"
            raise UnsupportedError(describe(here, "Shard of heads or batch, or Replicate", placement, hint))


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


def _any_requires_grad(*tensors: Tensor) -> bool:
    return any(x.requires_grad for x in tensors)
