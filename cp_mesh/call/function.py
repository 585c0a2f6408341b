"""`attention`, the public function: it validates the arguments and calls the op, which does the work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cp_mesh._torch import FakeTensor, local_tensor
from cp_mesh.call import known
from cp_mesh.call.dtensor import (
    CPAxis,
    check_dtensors,
    check_score_placements,
    find_cp_axis,
    first_index,
    group_that_waits,
    local_part,
    local_scores,
    wrap_results,
)
from cp_mesh.call.formats import FORMATS, Format
from cp_mesh.call.op import attention_op
from cp_mesh.call.plan import make_plan
from cp_mesh.call.spec import (
    Call,
    Tensors,
    autocast,
    check_tensors,
    make_spec,
    read_keywords,
    seed_tensor,
    shown,
)
from cp_mesh.comm.agreement import refusing
from cp_mesh.errors import as_int, refuse
from cp_mesh.geometry.layouts import Layout, ZigZag
from cp_mesh.geometry.mask import TENSORS, Mask
from cp_mesh.kernels.scores import ADDED, TERMS

_PLAIN = (Tensor, torch.nn.Parameter)


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
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    method: str = "auto",
    kernel: str = "auto",
    transport: str = "auto",
    ulysses_degree: int | None = None,
    head_chunks: int | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over a sequence sharded on the cp axis of a mesh.

    Local tensors in, local tensors out; DTensors in, DTensors out with the placements of ``query``. The global tensor
    of a DTensor holds the sequence *in layout order*, so ``Shard(seq_dim)`` on cp is an ordinary contiguous shard.
    For grouped-query attention pass fewer kv heads, in torch's head order. Inputs are never written.

    A score is softcap(scale · q·k) - ALiBi penalty + bias, and the mask comes last. The tensors of
    these terms and ``sinks`` are equal on every cp rank, except that each rank passes its own rows of ``bias``. Their
    gradients are partial: the sum over cp ranks is the gradient. With DTensor inputs, pass local tensors (the heads and
    rows of this rank) or DTensors on the same mesh, sharded by heads where query is (``bias``: by batch and rows too)
    and replicated elsewhere. Numbers may be NumPy scalars, or one-element CPU tensors that need no gradient.

    Args:
        query: [B, H, S, D], [B, S, H, D] or packed [T, H, D]; for local tensors S (T) counts this rank's rows. float64,
            float32, bfloat16 or float16; sums are float32 (float64 for float64).
        key: like ``query`` with K heads, H a multiple of K. SDPA's ``enable_gqa`` is not needed.
        value: like ``key``; its head dim may differ where the kernel allows.
        mesh: the 1-D mesh of the cp axis, or its ProcessGroup. Keep it in a variable: each ``mesh["cp"]`` makes a new
            one. Or a 2-D mesh of two axes that together are the cp axis and whose names begin with "cp",
            ``mesh["cp_ring", "cp_ulysses"]``: the hybrid exchanges heads over the second axis. Required for local
            tensors. DTensors need it to name the cp axis (or axes) of their mesh if ``seq_dim`` is not given and no
            axis is named "cp".
        seq_dim: the sequence dim: 2 = [B, H, S, D], 1 = [B, S, H, D], 0 = [T, H, D]. None: 2, as in SDPA. Pass it for
            the other formats, because neither shapes nor placements distinguish heads from rows.
        seq_len: tokens in the whole sequence. None: local length x cp_size (DTensors: their global length). Shards of
            unequal length need it: a rank cannot infer it.
        layout: which positions each rank holds; zigzag by default. Shard q, k and v in this layout.
        mask: which keys each query may see, by position; causal by default, unlike SDPA. Its tensors hold the whole
            sequence, equal on every cp rank.
        scale: factor on q·k; None: 1 / sqrt(D).
        softcap: bound of the scores: cap · tanh(scale · q·k / cap). None: no bound.
        sinks: [H], a logit per head that joins the denominator of the softmax and has no value; for local tensors H
            counts this rank's query heads. lse excludes them.
        alibi_slopes: [H], ALiBi slopes: subtracts slope · |p - t| from the score of query position p, key position t.
        bias: [1 or B, 1 or H, 1 or S, seq_len] in every format, added to the scores: this rank's rows against all keys,
            with keys in *original* order.
        dropout_p: the probability of dropping a weight after the softmax, below 1; lse is taken before dropout.
        dropout_seed: an int, or an int64 tensor of one or two numbers (seed, offset), required with dropout. Equal on
            all cp ranks; pass another one in every layer and step. The dropped weights depend on the seed, positions,
            and head and batch indices (global for DTensors, else local), so no layout or cp size changes them.
        method: how queries get the keys of other ranks. "ring": in stages; each is fetched while the one before is
            computed. "all_gather": in one stage, fetched while the local blocks are computed; fewest kernel calls.
            "ulysses": an all-to-all gives each rank some heads of the whole sequence; cp_size must divide the query
            heads. "hybrid": Ulysses within groups of ``ulysses_degree`` neighbouring cp ranks, a ring between groups.
            "auto" is "ring"; docs/performance.md says where others were faster.
        kernel: "auto", "fa4", "cudnn", "fa2", "triton", "cpu_flash" or "reference".
            "auto" takes the first that supports the call; all ranks must have the same packages installed.
        transport: "auto", "functional" (collectives) or "symmetric_memory" (needs GPUs of one NVLink host; "auto" takes
            it there).
        ulysses_degree: ranks per group of the hybrid, a divisor of cp_size and of the query heads. None: the size of
            the second axis of a 2-D mesh; else gcd(cp_size, kv heads), or if that is 1, gcd(cp_size, query heads).
        head_chunks: compute the kv heads, with their query heads, in this many parts one after the other. Communication
            buffers then hold one part, and speed drops a little. None: the fewest parts in which a rank fetches at most
            512 MiB of K and V (`tools/explain/predict/memory.py` has the formula); one part for Ulysses.
        deterministic: True asks for a bitwise reproducible backward. None: `torch.use_deterministic_algorithms`.
        return_lse: also return the log-sum-exp of the masked scores, natural log, float32 (float64), [B, H, S] or
            [H, T]; -inf for a query that sees no key, whose output is 0.

    Returns:
        out in the format and dtype of ``query`` (with value's head dim). It is contiguous for DTensors. For local
        tensors it is dense with the memory order of query's dims: a transposed view gives a transposed view. With
        ``return_lse`` (out, lse); lse is contiguous.

    Raises:
        ArgumentError: a ValueError: an argument is wrong, or disagrees with another one.
        UnsupportedError: a NotImplementedError: cp_mesh does not support the combination.
        RankMismatchError: ranks passed different arguments; checked at the first call of each shape and options, and
            at every call in check mode (`cp_mesh.check_mode`).
        Errors in arguments that are equal on all ranks are raised on every rank before the first collective. An error
        in one rank's shard (its number of rows, where shards are unequal) is raised on that rank alone, but on all
        ranks at a first call and in check mode.

    Example:
        >>> out = attention(q, k, v, mesh=mesh["cp"], layout=ZigZag())  # q [B, H, S/cp, D]  # doctest: +SKIP
        >>> out.shape  # doctest: +SKIP
        torch.Size([1, 8, 512, 64])

    Source: ring attention, Liu et al. 2023, arXiv:2310.01889; all-gather, Llama 3, arXiv:2407.21783;
    Ulysses, Jacobs et al. 2023, arXiv:2309.14509; the hybrid, Fang and Zhao 2024, arXiv:2405.07719.
    """
    return attend(
        query, key, value, mesh=mesh, seq_dim=seq_dim, seq_len=seq_len, layout=layout, mask=mask, scale=scale,
        softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes, bias=bias,
        dropout_p=dropout_p, dropout_seed=dropout_seed, method=method, kernel=kernel, transport=transport,
        ulysses_degree=ulysses_degree, head_chunks=head_chunks, deterministic=deterministic, return_lse=return_lse,
    )  # fmt: skip


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mesh: DeviceMesh | dist.ProcessGroup | None,
    seq_dim: int | None,
    mask: Mask,
    return_lse: bool = False,
    **others: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention`, which also takes the keywords that styles set.

    Args:
        others: keywords of `attention`, with layout, and those of `make_call`.
    """
    if torch.compiler.is_compiling():
        known_by = None
    else:
        known_by = known.key_of((query, key, value), mesh, mask, seq_dim, return_lse, others)
        if known_by is not None and (results := known.run_again(known_by, query, key, value, others)) is not None:
            return results if return_lse else results[0]
    with refusing(lambda: group_that_waits(query, mesh, seq_dim)):
        axis = find_cp_axis((query, key, value), mesh, seq_dim)
        query, key, value = autocast(query, key, value)
        call = make_call(query, key, value, axis, mask=mask, return_lse=return_lse, **with_degree(mesh, others))
    if isinstance(query, DTensor) and (call.seq_len < axis.size or call.options.score_mod or call.options.mask_mod):
        # DTensor gathers a dim shorter than its mesh axis, and has no rule for lists of tensors. Other DTensors go
        # through its dispatch. `ContextParallel` unwraps those of a core over tp alone, which have no cp axis.
        tensors = Tensors(**local_scores(call.tensors._asdict(), query, call.format))
        q, k, v = (local_part(x, query.placements) for x in (query, key, value))  # type: ignore[arg-type]
        out, lse, *_ = attention_op(q, k, v, *call._replace(tensors=tensors).arguments())
        out, lse = wrap_results(out, lse, query, call.format)
    elif known_by is None:
        out, lse, *_ = attention_op(query, key, value, *call.arguments())
    else:
        out, lse = known.run_first(known_by, call, (query, key, value), mesh, mask)
    return (out, lse) if return_lse else out


def with_degree(mesh: DeviceMesh | dist.ProcessGroup | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords, with the hybrid's degree filled in from the second axis of a 2-D mesh."""
    if given.get("method") != "hybrid" or not isinstance(mesh, DeviceMesh) or mesh.ndim == 1:
        return dict(given)
    inner, x = mesh.size(1), as_int(given.get("ulysses_degree"))
    if x is not None and (type(x) is not int or x != inner):
        refuse("ulysses_degree", f"{inner}, as the mesh's second axis has", shown(x), "leave it out")
    return {**given, "ulysses_degree": inner}


def make_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    axis: CPAxis,
    *,
    layout: Layout,
    mask: Mask,
    seq_len: int | None = None,
    dropout_seed: int | Tensor | None = None,
    captured: tuple[Tensor, ...] = (),
    sources: Callable[[str, Layout, int], str] | None = None,
    graded: bool = False,
    **others: Any,
) -> Call:
    """The record of a call; refuses wrong keywords, and tensors that do not fit one another.

    Args:
        graded: whether a gradient is needed of what key and value were made from.
        captured: the tensors that score_mod and mask_mod read, in the order of `Call.captured`.
        sources: (group name, layout, seq_len) -> which ranks' keys mask_mod shows to which ranks; None: unknown.
        others: the tensors of `TERMS`, and the keywords of `make_spec`.
    """
    form, compiling, is_local = FORMATS[axis.seq_dim], torch.compiler.is_compiling(), not isinstance(query, DTensor)
    check_format(query, key, value, form)
    if compiling and is_local:  # in eager mode planning checks them, and `check_dtensors` checks DTensors
        check_tensors(*form.to_bhsd(query, key, value))
    graded, terms = graded or query.requires_grad or key.requires_grad or value.requires_grad, []
    for name in TERMS:
        terms.append(x := others.pop(name, None))
        graded = graded or (name in ADDED and isinstance(x, Tensor) and x.requires_grad)
    for x in captured:
        graded = graded or x.requires_grad
    spec = make_spec(layout, mask, graded=graded and torch.is_grad_enabled(), as_inputs=is_local, **others)
    if dropout_seed is not None or type(seq_len) not in (int, type(None)):
        seq_len, dropout_seed = read_keywords({"seq_len": seq_len, "dropout_seed": dropout_seed}).values()
    if spec.dropout_p and dropout_seed is None:
        hint = "pass a number that is equal on all cp ranks and differs in every layer and step"
        refuse("dropout_seed", "an int or an int64 tensor with dropout_p", None, hint)
    if spec.dropout_p or spec.score_mod or spec.mask_mod:  # they depend on head and batch indices
        heads, rows = (first_index(query, form.dims.get(name)) for name in ("heads", "batch"))
        spec = spec._replace(first_head=spec.first_head + heads, first_batch=spec.first_batch + rows)
    tensors = Tensors.of(mask, layout, *terms, seed_tensor(dropout_seed, query.device) if spec.dropout_p else None)
    length = query.shape[axis.seq_dim]
    if isinstance(query, DTensor):
        check_dtensors(query, key, value, axis, layout)  # type: ignore[arg-type]
        if seq_len not in (None, length):
            refuse("seq_len", f"{length}, the DTensors' length", seq_len, "leave it out")
        seq_len = length
    elif seq_len is None:
        seq_len = length * axis.size
    given = compiling or {*map(type, tensors)} != {type(None)}  # tensors beside q, k and v
    if given:
        check_score_placements(tensors._asdict(), query, form)
    if sources is not None:
        spec = spec._replace(sources=sources(axis.group.group_name, layout, seq_len))
    call = Call(tensors, seq_len, axis.seq_dim, axis.group.group_name, spec, captured)
    if not compiling and (given or type(query if is_local else local_tensor(query)) not in _PLAIN):
        _plan_fakes((query, key, value, *tensors), call, axis.group)
    return call


def _plan_fakes(every: Sequence[Tensor | None], call: Call, group: dist.ProcessGroup) -> None:
    """Plan a call on tensors without content, for its refusals: the op runs only its fake, which refuses nothing."""
    every = [local_tensor(x) if isinstance(x, DTensor) else x for x in every]
    if not any(isinstance(x, FakeTensor) or (x is not None and x.is_meta) for x in every):
        return
    tensors = Tensors(*every[3:])
    if any(isinstance(x, FakeTensor) for x in every[3 : 3 + len(TENSORS)]):  # no content to plan by
        tensors = tensors._replace(**dict.fromkeys(TENSORS))
    q, k, v = call.format.to_bhsd(*(x for x in every[:3] if x is not None))
    call = call._replace(tensors=tensors)
    make_plan(q, k, v, call, group, call.scores(q).features)


def check_format(query: Tensor, key: Tensor, value: Tensor, form: Format) -> None:
    """Refuse tensors without the dims of the format."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != len(form.dims) + 1:
            expected = f"{form.name} for seq_dim={form.dims['sequence']}"
            refuse(name, expected, tuple(x.shape), "seq_dim selects the format")
    if query.shape[-1] == 0:
        hint = "queries and keys need at least one feature"
        refuse("query", "a head dim of 1 or more", tuple(query.shape), hint)
