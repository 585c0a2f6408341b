"""The two passes of the ops on this rank: plan the call, compare it between ranks, and run the method.

`op.py` registers the ops. Their first call loads this file, and with it plans, methods and kernels.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_mesh.call.formats import FORMATS
from cp_mesh.call.method import Backward, Plan
from cp_mesh.call.plan import make_plan
from cp_mesh.call.spec import EXECUTION, FACTORS, GRADED, Call, Operand, nothing_kept
from cp_mesh.comm.agreement import GRADED_INPUT, ORDER, PASS, compare, end_by, order_of, refusing
from cp_mesh.comm.fingerprints import fingerprint
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.geometry.mask import parse_mask
from cp_mesh.kernels import functions
from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.kernels.scores import FUNCTIONS, OF_ROWS, TERMS, Scores, name_of_captured
from cp_mesh.sequence.cuts import check_mark, field_of_tokens
from cp_mesh.sequence.losses import note_callers
from cp_mesh.sequence.sharded_sequence import ROOT


def length_of_call(arguments: Sequence[Any]) -> tuple[str, int | None]:
    """The group of a call of `attention_op`, and its seq_len if that must equal the root's (`of_root`), else None."""
    *_, seq_len, _, group_name, spec = arguments
    return group_name, seq_len if '"of_root": true' in spec else None  # Dynamo traces this, but not json.loads


def check_length(seq_len: int, expected: int) -> None:
    """Refuse a core whose sequence is not the root's. ``seq_len`` is that of the call, local rows times ranks."""
    if seq_len != expected:
        hint = (
            "does the core attend to a part of its rows, or call SDPA on [B, S, H, D], where it takes [B, H, S, D]? A "
            "core of another sequence needs a ShardedSequence with its length="
        )
        got = f"{seq_len} by the rows of the SDPA call"
        refuse("ContextParallel", f"attention over the root's {expected} tokens", got, hint)


def _what_must_agree(plan: Plan, q: Tensor, k: Tensor, v: Tensor, call: Call) -> dict[str, str]:
    """Everything that must be equal on all cp ranks."""
    options, given = call.options, call.tensors._asdict()
    graded = [name for name in GRADED if (x := given[name]) is not None and x.requires_grad]
    found = [(name, functions.find(getattr(options, name))) for name in FUNCTIONS]
    # each rank has its own rows of these terms, so only their other dims must agree
    alike = {
        name: tuple(size for size, dim in zip(x.shape, TERMS[name].dims, strict=True) if dim != "rows")
        for name in OF_ROWS
        if (x := given.pop(name)) is not None
    }
    return {
        **_in_words(call, q, k, v),
        **{name.replace("layout_", "layout "): fingerprint(x) for name, x in given.items()},
        **{name: str(alike.get(name)) for name in OF_ROWS},
        "bias of one row": str(_one_row(plan, call)),
        **{name: function.said for name, function in found if function is not None},
        **{f"captured tensor {i} of score_mod and mask_mod": fingerprint(x) for i, x in enumerate(call.captured)},
        "sources of block_mask": sha256(options.sources.encode()).hexdigest()[:12] if options.sources else "all",
        "gradients wanted of": ", ".join(graded) or "none",  # Ulysses sends the gradient of a bias
        # not known in compiled code, of DTensors and under no_grad
        GRADED_INPUT: "True" if options.keeps else "False" if torch.is_grad_enabled() else "",
        "kernel": plan.kernel.name,
        "method": plan.method.name,
    }


def _in_words(call: Call, q: Tensor, k: Tensor, v: Tensor) -> dict[str, str]:
    """The fields of a call that both passes compare, except its tensors."""
    options = call.options.with_scale(q.shape[3])
    return {
        "layout": options.layout,
        "mask": str(parse_mask(options.mask, None, None, None)),
        "seq_len": str(call.seq_len),
        "batch, heads and head dims": str([(x.shape[0], x.shape[1], x.shape[3]) for x in (q, k, v)]),
        "dtype": str(q.dtype),
        "options": " ".join(f"{name}={getattr(options, name)}" for name in (*FACTORS, *EXECUTION)),
    }


def kind_of(plan: Plan, call: Call) -> tuple[Any, ...]:
    """The key of calls of which only the first is compared between ranks; equal on all ranks."""
    options = call.options
    if options.sources:  # they differ from batch to batch
        options = options._replace(sources="some")
    given = *call.tensors, *call.captured
    graded = tuple(x is not None and (x.requires_grad, x.ndim) for x in given)
    return options, call.seq_len, plan.kind, graded, _one_row(plan, call)


def _one_row(plan: Plan, call: Call) -> bool:
    """Whether the bias has one row for all queries, which Ulysses does not send; False if some rank has one query."""
    if (bias := call.tensors.bias) is None or bias.shape[2] != 1:
        return False
    size = call.group.size()
    return min(plan.layout.shard_len(plan.seq_len, size, rank) for rank in range(size)) > 1


def begin(
    query: Tensor, key: Tensor, value: Tensor, call: Call, group: dist.ProcessGroup, **said: str
) -> tuple[Plan, Scores, tuple[Any, ...]]:
    """Plan a call and compare it between ranks, with what is ``said``; return the plan, the scores, the call's kind."""
    q, k, v = call.format.to_bhsd(query, key, value)
    with refusing(group):
        root = ROOT.get()
        if call.options.of_root and root is not None and root.sequence.mesh.get_group().group_name == call.group_name:
            check_length(call.seq_len, root.seq_len)
        scores = call.scores(q)
        plan = make_plan(q, k, v, call, group, scores.features)
        if root is not None and root.differs(plan.layout, plan.seq_len, call.group_name):
            hint = "pass layout=mask.layout, of the mask that reaches the module, or ShardedSequence(mesh, ZigZag())"
            refuse("layout", f"{root.sequence.layout.spec()}, of the root's batch", plan.layout.spec(), hint)

    def fields() -> dict[str, str]:
        note_callers()
        check_mark(query, call.seq_dim, plan.layout, group)
        own = _what_must_agree(plan, q, k, v, call) | field_of_tokens(group, root is None)
        return {PASS: "forward", **own, **said, ORDER: order_of("forward")}

    kind = *kind_of(plan, call), *said.items()
    compare(group, kind, fields)
    return plan, scores, kind


def forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Attention over the cp group: out, lse, and the tensors kept for the backward: rows, out and lse of this rank's
    heads. lse is empty if tensors are kept and it has no gradient."""
    call = Call.read(arguments)
    group = call.group
    plan, scores, _ = begin(q, k, v, call, group)
    out, lse, *kept = run_forward(plan, scores, call, group, q, k, v)
    return out, lse, *(kept or nothing_kept(q, lse))


def run_forward(
    plan: Plan, scores: Scores, call: Call, group: dist.ProcessGroup, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, ...]:
    """out, lse and what the method keeps of a call that was planned and compared; tensors in the caller's format."""
    if torch.is_autocast_enabled(query.device.type):  # it would cast the fp32 sums of kernels
        with torch.autocast(query.device.type, enabled=False):
            return run_forward(plan, scores, call, group, query, key, value)
    form = FORMATS[call.seq_dim]
    q, k, v = form.to_bhsd(query, key, value)
    try:
        out, lse, *kept = plan.method.forward(q, k, v, scores, plan, group)
    except BaseException as error:
        end_by(group, error)
        raise
    lse = form.lse_from_bhs(lse).contiguous() if lse.ndim > 1 else lse
    return *call.in_callers_format(out), lse, *kept


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    kept: Tensor | None,
    *arguments: Any,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v and of the tensors named in ``wanted``, from the gradients of `attention_op`'s results.

    ``wanted`` has names of `GRADED`, and captured tensors by `name_of_captured`. Gradients of captured tensors come as
    one flat tensor in the accumulation dtype, as DTensor and autograd do not look into lists.
    With ``kept``, out and lse are the tensors that the forward kept, and q, k and v are `without_rows`.
    """
    call, wanted = Call.read(arguments[:-1]), arguments[-1]
    group = call.group
    of_dout, *qkv = call.format.to_bhsd(dout, q, k, v)
    scores = call.scores(qkv[0])
    rows = of_dout.shape[2]  # with ``kept`` q, k and v have no rows
    of_q, of_k, of_v = (Operand(torch.Size((*x.shape[:2], rows, x.shape[3])), x.dtype, x.device) for x in qkv)
    plan = make_plan(of_q, of_k, of_v, call, group, scores.features)
    compare_backward(call, group, qkv, wanted)
    names = wanted.split(",") if wanted else ()
    given = Backward(dout, q, k, v, out, lse, dlse, kept, scores, names)
    dq, dk, dv, of_scores = run_backward(plan, call, group, given)
    read = [of_scores[name].flatten() for i in range(len(call.captured)) if (name := name_of_captured(i)) in names]
    flat = torch.cat(read) if read else q.new_empty(0, dtype=accumulation_dtype(q.dtype))
    return dq, dk, dv, *graded_of(call, of_scores, q), flat


def compare_backward(call: Call, group: dist.ProcessGroup, qkv: Sequence[Tensor], wanted: str) -> None:
    """In check mode, compare a backward between ranks; ``wanted`` as in `backward`."""

    def fields() -> dict[str, str]:
        own = {**_in_words(call, qkv[0], qkv[1], qkv[2]), "gradients wanted of": wanted}
        return {PASS: "backward", ORDER: order_of("backward"), **own}

    compare(group, None, fields)


def run_backward(
    plan: Plan, call: Call, group: dist.ProcessGroup, given: Backward
) -> tuple[Tensor, Tensor, Tensor, Mapping[str, Tensor]]:
    """dq, dk, dv, and gradients of score tensors by name, of a call that was planned and compared.

    Tensors are in the caller's format, but out and lse that the forward kept.
    """
    form, (dout, q, k, v, out, lse, dlse, kept, *_) = FORMATS[call.seq_dim], given
    if torch.is_autocast_enabled(q.device.type):  # as in the forward
        with torch.autocast(q.device.type, enabled=False):
            return run_backward(plan, call, group, given)
    try:
        if kept is None:
            dout, q, k, v, out = form.to_bhsd(dout, q, k, v, out)
            lse = form.lse_to_bhs(lse)
        else:
            dout, q, k, v = form.to_bhsd(dout, q, k, v)
        if dlse is not None:
            if not plan.kernel.capability.differentiable_lse:
                raise UnsupportedError(f"kernel {plan.kernel.name!r} takes no gradient of lse; kernel='reference' does")
            dlse = form.lse_to_bhs(dlse)
        given = Backward(dout, q, k, v, out, lse, dlse, kept, given.scores, given.wanted)
        *grads, of_scores = plan.method.backward(given, plan, group)
    except BaseException as error:
        end_by(group, error)
        raise
    dq, dk, dv = call.in_callers_format(*grads)
    return dq, dk, dv, of_scores


def graded_of(call: Call, grads: Mapping[str, Tensor], q: Tensor) -> list[Tensor]:
    """The gradients of `GRADED` as the op returns them: new tensors, empty if not wanted."""
    found = []
    for name in GRADED:
        x, grad = getattr(call.tensors, name), grads.get(name)
        if x is None or grad is None:
            found.append(q.new_empty(0))
        else:
            found.append(grad.to(x.dtype, copy=True, memory_format=torch.contiguous_format))
    return found
