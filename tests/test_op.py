"""The ops as torch.library sees them: schemas, fakes, autograd, and what they refuse to differentiate."""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from checks import lies_as
from dense import dense_attention, dense_mask, make_qkv
from inside import AttentionSpec, Tensors, room
from model import Core
from ranks import mesh, on_ranks
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils._python_dispatch import TorchDispatchMode

import cp_mesh
from cp_mesh import ContextParallel, Contiguous, Mask, ShardedSequence, ZigZag, attention
from cp_mesh.geometry import Permuted

ops, passes = room("op"), room("passes")

attention_module = room("call.function")  # whose name in the package is the function
B, H, K, S, D, E = 2, 4, 2, 12, 6, 5
FORMATS = (2, 1, 0)


def in_format(x: Tensor, seq_dim: int) -> Tensor:
    """[B, H, S, D] as [B, H, S, D], a strided [B, S, H, D], or [T, H, D] of the first row of the batch."""
    return x if seq_dim == 2 else x.transpose(1, 2) if seq_dim == 1 else x[0].transpose(0, 1)


def inputs(seq_dim: int, dtype: torch.dtype = torch.float64, requires_grad: bool = True, **sizes: Any) -> list[Tensor]:
    q, k, v, dout = make_qkv(B, H, K, S, D, sizes.get("Dv", D), dtype=dtype)
    q, k, v = (in_format(x, seq_dim).detach().requires_grad_(requires_grad) for x in (q, k, v))
    return [q, k, v, in_format(dout, seq_dim).contiguous()]


def tail(seq_dim: int, **options: Any) -> tuple:
    """The op's arguments after its tensors."""
    group = mesh((dist.get_world_size(),), ("cp",)).get_group().group_name
    defaults = {"layout": "zigzag", "mask": "1,,,0,", "scale": 1 / math.sqrt(D), "differentiable_lse": True}
    return [], S, seq_dim, group, AttentionSpec(**defaults | options).text()


def tensor_arguments(case: str) -> tuple[Tensors, dict[str, Any]]:
    """The tensors after q, k and v, and the options that go with them."""
    documents, keep = torch.arange(S).expand(B, S) // 5, torch.arange(S) % 4 > 0
    return {
        "no tensors": (Tensors(), {}),
        "documents": (Tensors(documents[:1]), {"mask": "0,,,0,"}),
        "all tensors": (Tensors(documents[:1], keep, documents[:1], torch.arange(S).flip(0)), {"layout": "permuted"}),
        "cpu_flash": (Tensors(sinks=torch.randn(H)), {"kernel": "cpu_flash", "differentiable_lse": False}),
        "scores": (scores(H), {"softcap": 2.0, "dropout_p": 0.3}),
    }[case]


def scores(H: int) -> Tensors:
    given = {"sinks": (H,), "alibi_slopes": (H,), "bias": (1, H, S, S)}
    tensors = {name: torch.randn(shape, dtype=torch.float64) for name, shape in given.items()}
    tensors["bias"] = tensors["bias"].mT.contiguous().mT  # as an embedding of distances is: not in order in memory
    return Tensors(**tensors, dropout_seed=torch.tensor([3]))


TENSORS = ("no tensors", "documents", "all tensors", "cpu_flash", "scores")


@pytest.mark.unpoisoned  # opcheck compares two runs bit by bit
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in ("documents", "scores") else pytest.mark.full) for case in TENSORS]
)
@pytest.mark.quick("scores")
@pytest.mark.more("parity")
@on_ranks(1)
def test_opcheck(full: bool, case: str) -> None:
    for seq_dim in FORMATS if full else FORMATS[TENSORS.index(case) % 2 :][:1]:
        tensors, options = tensor_arguments(case)
        q, k, v, dout = inputs(seq_dim)
        leaves = [x.requires_grad_() if x is not None and x.is_floating_point() else x for x in tensors]
        torch.library.opcheck(ops.attention_op, (q, k, v, *leaves, *tail(seq_dim, **options)))
        tensors = [None if x is None else x.detach() for x in tensors]
        q, k, v, dout = inputs(seq_dim, requires_grad=False)
        out, lse, *_ = ops.attention_op(q, k, v, *tensors, *tail(seq_dim, **options))
        dlse = None if case == "cpu_flash" else torch.randn_like(lse)
        arguments = (dout, q, k, v, out, lse, dlse, None, *tensors, *tail(seq_dim, **options))
        given = [name for name in ops.GRADED if getattr(Tensors(*tensors), name) is not None]
        torch.library.opcheck(ops.attention_backward_op, (*arguments, ",".join(given)))
        torch.library.opcheck(ops.attention_backward_op, (*arguments, ""))


def describe(tensors: tuple[Tensor, ...]) -> list[tuple]:
    return [(tuple(x.shape), x.stride(), x.dtype, x.device.type) for x in tensors]


IN_MEMORY = {
    "as it is": lambda x: x,
    "dims turned around": lambda x: x.permute(*reversed(range(x.ndim))).contiguous().permute(*reversed(range(x.ndim))),
    "part of a fused tensor": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "heads expanded": lambda x: x[:1].expand_as(x),
}


@pytest.mark.parametrize("seq_dim", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.quick("float64")
@on_ranks(1)
def test_fakes_are_as_the_real(seq_dim: int, dtype: torch.dtype) -> None:
    """And results lie in memory as q, k and v do, if that is asked for."""
    for Dv, in_memory, as_inputs in product((D, E), IN_MEMORY, (False, True)):
        *qkv, dout = inputs(seq_dim, dtype, requires_grad=False, Dv=Dv)
        q, k, v = map(IN_MEMORY[in_memory], qkv)
        arguments = (*scores(H), *tail(seq_dim, kernel="reference", dropout_p=0.3, as_inputs=as_inputs))
        out, lse, *_ = ops.attention_op(q, k, v, *arguments)
        assert (lies_as(out, q) if as_inputs else out.is_contiguous()) and lse.is_contiguous()
        # Gradients arrive with any strides: of a sum they are expanded, of a transposed result transposed.
        grads = ops.attention_backward_op(
            dout.expand_as(out), q, k, v, out, lse, torch.ones_like(lse), None, *arguments, "sinks,bias"
        )
        with FakeTensorMode(allow_non_fake_inputs=False) as mode:
            fq, fk, fv, fdout = (mode.from_tensor(x) for x in (q, k, v, dout))
            arguments = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in arguments]
            fout, flse, *_ = ops.attention_op(fq, fk, fv, *arguments)
            fgrads = ops.attention_backward_op(fdout, fq, fk, fv, fout, flse, flse, None, *arguments, "sinks,bias")
        assert describe((fout, flse)) == describe((out, lse))
        assert describe(fgrads) == describe(grads)
        for grad, x in zip(grads, (q, k, v), strict=False):
            assert lies_as(grad, x) if as_inputs else grad.is_contiguous()


@pytest.mark.parametrize("seq_dim", FORMATS)
@on_ranks(2)
def test_fakes_of_what_is_kept(seq_dim: int) -> None:
    q, k, v, dout = inputs(seq_dim, requires_grad=False, Dv=E)
    options = {"method": "ulysses", "keeps": True, "as_inputs": True, "differentiable_lse": False}
    arguments = (*Tensors(), [], 2 * S, *tail(seq_dim, **options)[2:])
    results = ops.attention_op(q, k, v, *arguments)
    _, lse, kept, *of_heads = results
    likes = [ops.without_rows(x, seq_dim) for x in (q, k, v)]
    grads = ops.attention_backward_op(dout, *likes, *of_heads, None, kept, *arguments, "")
    assert kept.ndim == 2 and not lse.numel() and all(map(lies_as, grads, (q, k, v)))
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v, dout, *likes)]
        fresults = ops.attention_op(*fakes[:3], *arguments)
        fgrads = ops.attention_backward_op(*fakes[3:], *fresults[3:], None, fresults[2], *arguments, "")
    assert describe(fresults) == describe(results) and describe(fgrads) == describe(grads)


@pytest.mark.parametrize(("size", "length"), [(2, 12), (2, 3), (4, 3)])
@pytest.mark.parametrize("given", ["distributed", "redistributed"])
@pytest.mark.parametrize("beside", ["", "plain sinks"])
@pytest.mark.parametrize("seq_dim", [1, 2])
@on_ranks("size")
def test_dtensors_are_what_their_specs_say(axis: Any, length: int, seq_dim: int, beside: str, given: str) -> None:
    """Strides of specs, after views and a backward through them, on all ranks alike.

    Shards may lie otherwise than their specs say, have one row, or none.
    """
    batch, heads, dim = B, H, D
    if given == "redistributed" and length % axis.size():
        return
    x = torch.randn(batch, length, heads, dim, generator=torch.Generator().manual_seed(0))
    x = x if seq_dim == 1 else x.transpose(1, 2)
    if given == "distributed":
        leaf = distribute_tensor(x, axis, [Shard(seq_dim)]).requires_grad_()
        q = leaf
    else:  # heads to rows
        leaf = distribute_tensor(x, axis, [Shard(3 - seq_dim)]).requires_grad_()
        q = leaf.redistribute(placements=[Shard(seq_dim)])
    options: dict[str, Any] = {"sinks": torch.zeros(heads)} if beside else {}
    out = attention(q, q, q, layout=Contiguous(), seq_dim=seq_dim, **options)
    assert isinstance(out, DTensor)
    rows = out if seq_dim == 1 else out.transpose(1, 2)
    rows.reshape(batch, length, heads * dim).sum().backward()
    grad = leaf.grad if seq_dim == 1 else leaf.grad.transpose(1, 2)
    grad.reshape(batch, length, heads * dim)
    assert out.is_contiguous()
    mine, every = [out.stride(), out.to_local().is_contiguous(), tuple(out.full_tensor().shape)], [None] * axis.size()
    dist.all_gather_object(every, mine)
    assert every == [mine] * axis.size()


def call(*tensors: Tensor, **options: Any) -> Any:
    return attention(*tensors, mesh=mesh((dist.get_world_size(),), ("cp",)), **options)


@pytest.mark.parametrize("seq_dim", FORMATS)
@on_ranks(1)
def test_masks_of_fakes(seq_dim: int) -> None:
    """Of out and of gradients, as tools that estimate memory see them: no mask has a content."""
    q, k, v = inputs(seq_dim, torch.float32)[:3]
    want = [tuple(x.shape) for x in (q, q, k, v)]
    mesh((dist.get_world_size(),), ("cp",))  # kept, as none can be made of fakes
    with FakeTensorMode(allow_non_fake_inputs=False):
        q, k, v = (torch.empty(x.shape, requires_grad=True) for x in inputs(seq_dim, torch.float32)[:3])
        ids = torch.arange(S) // 5
        mask = Mask(documents=ids, key_padding=torch.ones(S, dtype=torch.bool), blocks=ids)
        out = call(q, k, v, seq_dim=seq_dim, seq_len=S, mask=mask)
        out.sum().backward()
        assert [tuple(x.shape) for x in (out, q.grad, k.grad, v.grad)] == want


class Seen(TorchDispatchMode):
    """Whether the ops were called on DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (ops.attention_op, ops.attention_backward_op):
            self.calls.append((func._opname, isinstance(args[0], DTensor)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("length", "whole"), [(S, True), (1, False)])
@pytest.mark.parametrize("implicit", [False, True])
@on_ranks(2)
def test_dtensors_are_dispatched_and_planned_once(axis: Any, length: int, whole: bool, implicit: bool) -> None:
    """With plain tensors beside them; but for a sequence shorter than the axis, which dispatch would gather."""
    plans = []
    sequence = ShardedSequence(axis, Contiguous(), length=length, pad=False)
    placed = [
        DTensor.from_local(
            sequence.shard(x, dim=2), axis, [Shard(2)], run_check=False, shape=x.shape, stride=x.stride()
        ).requires_grad_()
        for x in make_qkv(B, H, K, length, D)[:3]
    ]
    sinks, ids = torch.zeros(H, dtype=torch.float64, requires_grad=True), torch.arange(length) // 3
    make_plan = passes.make_plan
    with Seen() as seen, pytest.MonkeyPatch.context() as patch, implicit_replication() if implicit else nullcontext():
        patch.setattr(passes, "make_plan", lambda *given: plans.append(given) or make_plan(*given))
        patch.setattr(attention_module, "make_plan", passes.make_plan)
        out = attention(*placed, layout=Contiguous(), mask=Mask(documents=ids), sinks=sinks)
        num_plans = len(plans)
        assert DTensor._op_dispatcher._allow_implicit_replication == implicit
        out.sum().backward()
    assert type(sinks.grad) is Tensor and isinstance(placed[0].grad, DTensor)
    # a mode sees the op before and after DTensor takes its arguments apart
    assert seen.calls[0] == ("attention", whole) and ("attention_backward", whole) in seen.calls and num_plans == 1
    assert whole or not any(on_dtensors for _, on_dtensors in seen.calls)


@on_ranks(2)
def test_dtensors_of_each_kind_are_looked_at(rank: int) -> None:
    """DTensors of one kind after another: right ones, then such as differ from them in one thing."""
    axis, length = mesh((2, 1), ("cp", "tp")), 15
    rows = Contiguous().positions(length, 2, rank)
    q, k, v = (x[:, :, rows] for x in make_qkv(B, H, K, length, D)[:3])

    def call(layout: cp_mesh.Layout, on_tp: Any, *tensors: Tensor) -> None:
        whole = [x.new_empty(*x.shape[:2], length, x.shape[3]) for x in tensors]
        placed = [
            DTensor.from_local(x, axis, [Shard(2), on_tp], run_check=False, shape=like.shape, stride=like.stride())
            for x, like in zip(tensors, whole, strict=True)
        ]
        attention(*placed, mesh=axis["cp"], layout=layout)

    for _ in range(2):
        call(Contiguous(), Replicate(), q, k, v)
        for wrong, says in {
            (Contiguous(), Partial(), q, k, v): "placement on mesh axis 'tp'",
            (ZigZag(), Replicate(), q, k, v): "torch.chunk shards",
            (Contiguous(), Replicate(), q, k.float(), v): "one dtype",
            (Contiguous(), Replicate(), q, k[:, :1], v): "equal heads",
            (Contiguous(), Replicate(), q[:, :3], k, v): "a multiple of kv heads",
        }.items():
            with pytest.raises((ValueError, NotImplementedError), match=says):
                call(*wrong)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.quick(without="True")
@on_ranks(2)
def test_a_process_group_for_the_mesh(rank: int, axis: Any, compiled: bool) -> None:
    """A process group in place of the mesh, for local tensors, DTensors and the sequence kit."""
    group = axis.get_group()
    sequence = ShardedSequence(group, ZigZag())
    assert (sequence.cp_size, sequence.cp_rank, sequence.mesh.get_group()) == (2, rank, group)
    qkv = [sequence.shard(x, dim=2) for x in make_qkv(B, H, K, S, D)[:3]]
    placed = [DTensor.from_local(x, axis, [Shard(2)], run_check=False) for x in qkv]
    want = attention(*qkv, mesh=axis)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, mesh=group)

    attend = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    assert torch.equal(attend(*qkv), want)
    assert torch.equal(attend(*placed).to_local(), want)
    core = cp_mesh.parallelize(Core(), sequence.mesh, {"": ContextParallel(sequence)})
    assert torch.equal(core(*qkv), want)


@on_ranks(1)
def test_what_has_no_gradient() -> None:
    """What has no gradient takes none: masks and layouts, no_grad and inference mode."""
    q, k, v, _ = inputs(2)
    ids, keep = torch.zeros(B, S, dtype=torch.int64), torch.ones(B, S, dtype=torch.bool)
    mask = Mask(documents=ids, key_padding=keep)
    out, lse = call(q, k, v, mask=mask, layout=Permuted(range(S)), return_lse=True)
    grads = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
    assert all(grad.isfinite().all() for grad in grads)
    with torch.no_grad():
        assert not call(q, k, v).requires_grad
    with torch.inference_mode():
        assert call(q, k, v).is_inference()
    leaves = [x.detach() for x in (q, k, v)]
    copies = [x.clone() for x in leaves]
    assert not call(*leaves).requires_grad
    assert all(torch.equal(x, copy) for x, copy in zip(leaves, copies, strict=True))  # inputs are never written


@on_ranks(1)
def test_unused_results() -> None:
    """A result that the loss does not read costs nothing and needs no kernel that differentiates it."""
    q, k, v, dout = inputs(2)
    out, lse = call(q, k, v, return_lse=True)
    alone = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    both = torch.autograd.grad((out, lse), (q, k, v), (dout, torch.zeros_like(lse)), retain_graph=True)
    torch.testing.assert_close(alone, both, rtol=1e-12, atol=1e-12)
    of_lse = torch.autograd.grad(lse.sum(), (q, k, v))
    dense_q, dense_k, dense_v, _ = inputs(2)
    _, dense_lse = dense_attention(dense_q, dense_k, dense_v, dense_mask(S))
    want = torch.autograd.grad(dense_lse.sum(), (dense_q, dense_k))
    torch.testing.assert_close(of_lse[:2], want, rtol=1e-10, atol=1e-10)
    assert (of_lse[2] == 0).all()
    out, lse = call(q, k, v, return_lse=True, kernel="reference", layout=Contiguous())
    assert torch.autograd.grad(out.sum(), (v,))[0].shape == v.shape


@pytest.mark.parametrize("version", ("later", "none", "0.1"))
@on_ranks(1)
def test_programs_of_other_versions_are_refused(version: str) -> None:
    """What the op says of options of another version, or in another form."""
    *others, spec = tail(2)
    spec = {"later": spec.replace('"version": 2', '"version": 3'), "none": "{}", "0.1": "zigzag|1,,,0,|0.3"}[version]
    with pytest.raises(cp_mesh.UnsupportedError) as refused:
        torch.ops.cp_mesh.attention(*inputs(2)[:3], *Tensors(), *others, spec)
    said = str(refused.value)
    assert "options of version 2, got " in said and "export or compile" in said


@pytest.mark.parametrize("of_lse", [False, True])
@on_ranks(1)
def test_double_backward_is_refused(of_lse: bool) -> None:
    q, k, v, _ = inputs(2)
    (dq,) = torch.autograd.grad(call(q, k, v, return_lse=True)[of_lse].pow(2).sum(), q, create_graph=True)
    with pytest.raises((RuntimeError, cp_mesh.UnsupportedError), match="attention_backward"):
        dq.sum().backward()


@on_ranks(1)
def test_a_result_can_be_written_in_place() -> None:
    """It is no view of anything, on however few ranks; and a backward that needs the old one says so."""
    q, k, v, _ = inputs(2)
    want, out = 2 * call(q, k, v).detach(), call(q, k, v)
    out.mul_(2)
    assert torch.equal(out, want)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@on_ranks(1)
def test_gradcheck() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 5, 3, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1))

    def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return call(q, k, v, mask=Mask(window=(2, 0)), return_lse=True, layout=Contiguous())

    assert torch.autograd.gradcheck(both, (q, k, v))


@on_ranks(1)
def test_who_watches_sees_the_op(rank: int, axis: Any) -> None:
    """Else eager calls go past the dispatcher, which resolves a negated view as well."""

    def attend(*qkv: Tensor) -> Tensor:
        return cp_mesh.attention(*qkv, mesh=axis, kernel="reference")

    q, k, v = (torch.randn(1, 2, 8, 4, dtype=torch.float64) for _ in range(3))
    want = attend(q, k, v)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        attend(q, k, v)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(attend, (q, k, v), check_trace=False)
    negated = torch.complex(torch.zeros_like(q), -q).conj().imag  # a view of memory that holds -q
    seen = []
    passes = room("passes")
    with mock.patch.object(passes, "forward", side_effect=passes.forward) as forward:
        with torch.no_grad():
            got = attend(negated, k, v)
        seen += [call.args[0].is_neg() for call in forward.call_args_list]
    assert [
        "cp_mesh::attention" in {event.name for event in profile.events()},
        "cp_mesh::attention" in str(traced.graph),
        negated.is_neg() and torch.equal(got, want),
        not any(seen),
    ] == [True, True, True, True]
