"""`latent_attention`, the public function: it validates the arguments and calls the op."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cp_mesh.call.dtensor import find_cp_axis, group_that_waits
from cp_mesh.call.formats import FORMATS
from cp_mesh.call.function import attention, make_call, with_degree
from cp_mesh.call.operators import refuse_tangents
from cp_mesh.call.spec import autocast, check_dense
from cp_mesh.comm.agreement import refusing
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.geometry.layouts import Layout, ZigZag
from cp_mesh.geometry.mask import Mask
from cp_mesh.latent.ops import expanded_like, latent_attention_op

_KEYWORDS = frozenset(inspect.signature(attention).parameters)


def latent_attention(
    query: Tensor,
    latent: Tensor,
    rope: Tensor,
    up_projection: Tensor,
    *,
    mesh: DeviceMesh | dist.ProcessGroup,
    seq_dim: int = 2,
    layout: Layout = ZigZag(),  # noqa: B008 - frozen
    mask: Mask = Mask(causal=True),  # noqa: B008 - frozen
    return_lse: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention with keys and values that are expanded from one latent row a token (MLA), sharded on cp.

    The result is that of `cp_mesh.attention` with, for head h, the keys (Wk[h] · latent, rope) and the values
    Wv[h] · latent, where the rows of ``up_projection`` are Wk[0], Wv[0], Wk[1], ... What travels is ``latent`` and
    ``rope``, R + P numbers a token (576 in DeepSeek-V2 and V3) in place of H · (D + Dv) (40,960 in V3), and in the
    backward their gradients, in float32 (float64). Each rank expands the rows that it reads, a few heads at a time, and
    again in the backward. So in ring and all_gather every rank that sees a row expands it: that takes about
    2 · (R + P) · cp_size / S of the products of causal attention, 7 % for 128K tokens on 8 ranks, 28 % for 32K. Ulysses
    and the hybrid exchange heads of query and out as ever, and send the latent to each rank of an inner group, which
    expands it for its heads alone.

    The gradient of ``up_projection`` is partial, as that of any weight: the sum over cp ranks is the gradient.

    Args:
        query: [B, H, S, D], [B, S, H, D] or packed [T, H, D], this rank's rows; the last P features are rotary.
        latent: like ``query`` with one head and R features, [B, 1, S, R].
        rope: like ``latent`` with P features: the rotary part of the keys, which all heads share.
        up_projection: [H · (D - P + Dv), R], the weight of a linear such as kv_b_proj of DeepSeek-V3.
        mesh: the cp axis, as in `cp_mesh.attention`.
        seq_dim, layout, mask, return_lse: as there.
        **options: other keywords of `cp_mesh.attention`. ``head_chunks`` are parts of the heads that are expanded one
            after the other; None: in each kernel call the fewest with at most 256 MiB of keys and values.

    Returns:
        out [B, H, S, Dv] in the format and dtype of ``query``; with ``return_lse`` also lse, as in `cp_mesh.attention`.

    Raises:
        ArgumentError, UnsupportedError, RankMismatchError: as in `cp_mesh.attention`; DTensors are refused.

    Example:
        >>> out = latent_attention(q, latent, k_rope, kv_b_proj.weight, mesh=mesh["cp"])  # doctest: +SKIP

    Source: DeepSeek-V2, arXiv:2405.04434; c is ``latent``, k^R ``rope``, (W^UK, W^UV) ``up_projection``.
    """
    with refusing(lambda: group_that_waits(query, mesh, seq_dim)):
        if unknown := {*options} - _KEYWORDS:
            raise TypeError(f"latent_attention() got an unexpected keyword argument {min(unknown)!r}")
        check_dense(query=query, latent=latent, rope=rope, up_projection=up_projection)
        axis = find_cp_axis((query, latent, rope), mesh, seq_dim)
        query, latent, rope, up = given = autocast(query, latent, rope, up_projection)
        _check(query, latent, rope, up, axis.seq_dim)
        if not torch.compiler.is_compiling():
            refuse_tangents("latent_attention", given)
        key, value = expanded_like(FORMATS[axis.seq_dim], query, rope, up)
        graded = latent.requires_grad or rope.requires_grad or up.requires_grad
        call = make_call(
            query, key, value, axis,
            layout=layout, mask=mask, return_lse=return_lse, graded=graded, **with_degree(mesh, options),
        )  # fmt: skip
    out, lse = latent_attention_op(*given, *call.arguments())
    return (out, lse) if return_lse else out


def _check(query: Tensor, latent: Tensor, rope: Tensor, up: Tensor, seq_dim: int) -> None:
    """Refuse tensors that do not fit one another."""
    form, every = FORMATS[seq_dim], {"query": query, "latent": latent, "rope": rope, "up_projection": up}
    for name, x in every.items():
        if isinstance(x, DTensor):
            hint = "pass local tensors, or expanded DTensors to cp_mesh.attention"
            refuse(f"latent_attention: {name}", "a local tensor", "a DTensor", hint, UnsupportedError)
        if x.dtype != query.dtype or x.device != query.device:
            got = f"{x.dtype} on {x.device}"
            refuse(f"latent_attention: {name}", f"{query.dtype} on {query.device}, as query", got, "convert it")
    if query.ndim != len(form.dims) + 1:
        refuse("query", f"{form.name} for seq_dim={seq_dim}", tuple(query.shape), "seq_dim selects the format")
    for name, x in (("latent", latent), ("rope", rope)):
        rows = [*query.shape[:-1]]
        rows[form.dims["heads"]] = 1
        if [*x.shape[:-1]] != rows or not x.shape[-1]:
            hint = "it has one head, as x.unsqueeze(1) of [B, S, features]"
            refuse(f"latent_attention: {name}", f"shape {[*rows, 'features']}", [*x.shape], hint)
    num_heads, nope, rank = query.shape[form.dims["heads"]], query.shape[-1] - rope.shape[-1], latent.shape[-1]
    if nope < 1:
        hint = "a head's features without positions come first"
        refuse("latent_attention: query", f"more than rope's {rope.shape[-1]} features", query.shape[-1], hint)
    of_head = up.shape[0] // num_heads if up.ndim == 2 and num_heads and up.shape[0] % num_heads == 0 else 0
    if of_head <= nope or up.shape[1] != rank:
        expected = f"[{num_heads} heads · ({nope} + head dim of values), {rank}]"
        refuse("latent_attention: up_projection", expected, [*up.shape], "the weight of a linear without a bias")
