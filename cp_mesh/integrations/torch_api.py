"""PyTorch's functions for context parallelism: programs that use them need only another import.

`torch.distributed.tensor.experimental.context_parallel` shards buffers in place, and every call of
`F.scaled_dot_product_attention` within it attends to the whole sequence. Here a `TorchFunctionMode` intercepts these
calls, and no function of torch is patched.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from cp_mesh._torch import balances_context_parallel, function_modes, tree_map_only
from cp_mesh.call.function import attention
from cp_mesh.comm.first_calls import agree_on_shapes
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.geometry.layouts import Contiguous, Layout, ZigZag
from cp_mesh.geometry.mask import Mask
from cp_mesh.sequence.sharded_sequence import ShardedSequence
from cp_mesh.training.sdpa_mode import ATTENTION, CHECKPOINTS, call_function, keep_uncompiled
from cp_mesh.training.style_helpers import announce, announcing

_METHODS = {"allgather": "all_gather", "alltoall": "ring"}
_AUTOGRAD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
_method: ContextVar[str] = ContextVar("cp_mesh_rotate_method", default="auto")


class _Context(TorchFunctionMode):
    """Replaces SDPA calls on this rank's rows of ``sequence`` with sharded attention."""

    def __init__(self, sequence: ShardedSequence, method: str) -> None:
        super().__init__()
        self.sequence, self.method = sequence, method

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in CHECKPOINTS:  # only in traces: Dynamo hides the body from modes outside of it
            return func(functools.partial(_within, self.sequence, self.method, args[0]), *args[1:], **kwargs)
        if name in ("backward", "grad") and func in _AUTOGRAD:
            return self.run_backward(func, args, kwargs)
        if name == "inside_context.default":
            return args[0].clone()
        if name not in ATTENTION:
            return call_function(func, args, kwargs)
        try:
            if func is not F.scaled_dot_product_attention:
                hint = "call F.scaled_dot_product_attention, or cp_mesh.attention, which has masks and scores"
                refuse("context_parallel", "F.scaled_dot_product_attention alone", name, hint, UnsupportedError)
            return self.attend(*args, **kwargs)
        except Exception as error:
            announce(self.sequence, error)
            raise

    def run_backward(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function of autograd with this mode active, so that the mode sees recomputation by checkpoints.

        A mode is inactive inside a function that it intercepts. It does not intercept calls with edges of the graph.
        """
        if func is Tensor.backward:
            func, kwargs["grad_tensors"] = torch.autograd.backward, kwargs.pop("gradient", None)
        args, kwargs["inputs"] = tree_map_only(Tensor, get_gradient_edge, (args, kwargs.get("inputs")))
        given = {key: x for key, x in kwargs.items() if x is not None}
        with self:
            return func(*args, **given)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Compute SDPA over the whole sequence: query [B, H, S_local, D], key and value [B, K, S_local, D]."""
        if attn_mask is not None or dropout_p:
            got = "an attn_mask" if attn_mask is not None else f"dropout_p={dropout_p}, which has no seed"
            hint = "cp_mesh.attention has mask=Mask(...), any mask as bias=, and dropout_p= with dropout_seed="
            refuse("context_parallel", "causal or full attention without dropout", got, hint, UnsupportedError)
        rows = (self.sequence.length or 0) // self.sequence.cp_size
        if (found := (query.shape[-2], key.shape[-2])) != (rows, rows):
            hint = "compute q, k and v from the buffers; attend to other sequences outside of the context"
            refuse("context_parallel: rows of query and key", f"{rows}, as the buffers have", found, hint)
        if not enable_gqa and query.shape[-3] != key.shape[-3]:
            refuse("heads", f"{query.shape[-3]} kv heads", key.shape[-3], "pass enable_gqa=True, as SDPA wants")
        checkpointed = torch.compiler.is_compiling() or _checkpointing()
        if checkpointed == "CheckpointFunction.forward":
            hint = "checkpoint(..., use_reentrant=False)"
            refuse("context_parallel", "no reentrant checkpoint", "use_reentrant=True", hint, UnsupportedError)
        out = attention(
            query, key, value, mesh=self.sequence.mesh, seq_dim=2, seq_len=self.sequence.length,
            layout=self.sequence.layout, mask=Mask(causal=is_causal), scale=scale, method=self.method,
        )  # fmt: skip
        return _Inside.apply(out) if checkpointed else out  # type: ignore[return-value]


def _within(sequence: ShardedSequence, method: str, body: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _Context(sequence, method):
        return body(*args, **kwargs)


def _checkpointing() -> str:
    """Return the name of the innermost running function of torch.utils.checkpoint, "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return frame.f_code.co_qualname
        frame = frame.f_back
    return ""


class _Inside(torch.autograd.Function):
    """Refuses a backward after the context ended, in which a checkpoint would attend to this rank's rows alone."""

    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _inside_context(grad)


# A custom op, because it must run in compiled code too, where checkpoints are unknown. An active context intercepts it.
@torch.library.custom_op("cp_mesh::inside_context", mutates_args=())
def _inside_context(grad: Tensor) -> Tensor:
    expected, hint = "a backward of compiled code or checkpoints inside of the context", "call loss.backward() in it"
    refuse("context_parallel", expected, "one after the context", hint)


@_inside_context.register_fake
def _(grad: Tensor) -> Tensor:
    return torch.empty_like(grad)


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
) -> Iterator[None]:
    """Shard buffers and SDPA within a context, like `torch.distributed.tensor.experimental.context_parallel`.

    Causal and full attention are exact, also in compiled code. Shards are those of PyTorch: head-tail (`ZigZag`) if the
    length is a multiple of twice the number of ranks, else contiguous.

    Args:
        mesh: the 1-D mesh of the cp axis.
        buffers: tensors of the whole sequence, equal on all ranks of ``mesh``, without requires_grad: batches, labels,
            tables of positions; at least one. Within the context each holds this rank's rows.
        buffer_seq_dims: the sequence dim of each buffer; all have the same length there, a multiple of the ranks.
        no_restore_buffers: buffers that keep this rank's rows after the context.

    Raises:
        ArgumentError: on other buffers; in SDPA, if the local length is not that of the buffers, as in cross-attention;
            in a backward of compiled code or checkpoints after the context ended. A backward of other code after the
            context is exact, or PyTorch's autograd raises if it needs a buffer.
        UnsupportedError: in a nested context; within it, on ``attn_mask``, dropout (SDPA has no seed), other attention
            functions, and reentrant checkpoints.
        RankMismatchError: if buffers differ between ranks, in the first context of these shapes.
    """
    buffers, dims, kept = [*(buffers or ())], [*(buffer_seq_dims or ())], [*(no_restore_buffers or ())]
    what = "context_parallel"
    if _is_inside():
        refuse(what, "no context around it", "another context", "open it once", UnsupportedError)
    sequence = ShardedSequence(mesh)
    with announcing(sequence):
        sequence = _with_length(sequence, _length(buffers, dims, kept, sequence.cp_size))
        found = {f"buffers[{i}]": x for i, x in enumerate(buffers)}
        shapes = (what, *((x.shape, x.dtype) for x in buffers))
        agree_on_shapes(sequence.mesh.get_group(), shapes, found)  # contents for new shapes, and in check mode
        shards = [sequence.shard(x, dim) for x, dim in zip(buffers, dims, strict=True)]
    ids = {id(x) for x in kept}
    wholes = [x if id(buffer) in ids else buffer.detach() for buffer, x in zip(buffers, shards, strict=True)]
    try:
        _hold(buffers, shards)
        keep_uncompiled(_Context.__torch_function__)
        with _Context(sequence, _method.get()):
            yield
    finally:
        _hold(buffers, wholes)


def _length(buffers: list[Tensor], dims: list[int], kept: list[Tensor], cp_size: int) -> int:
    """Return the length of the sequence; refuse buffers that cannot be sharded in place."""
    what = "context_parallel: buffers"
    if not buffers or len(buffers) != len(dims):
        got = f"{len(buffers)} buffers, {len(dims)} dims"
        refuse(what, "a buffer or more, and a dim for each", got, "they define the length of the whole sequence")
    for x in buffers:
        if not isinstance(x, Tensor) or isinstance(x, DTensor) or x.requires_grad:
            got = f"{type(x).__name__}{' that requires grad' * bool(getattr(x, 'requires_grad', False))}"
            refuse(what, "plain tensors that require no grad", got, "x.detach().clone(); requires_grad_() inside")
    if any(all(x is not y for x in buffers) for y in kept):
        refuse("context_parallel: no_restore_buffers", "some of buffers", "another tensor", "pass the same objects")
    lengths = [x.shape[dim] for x, dim in zip(buffers, dims, strict=True)]
    if len({*lengths}) > 1:
        refuse(what, "one length along buffer_seq_dims", lengths, "cut longer tables, table[:length]")
    if lengths[0] % cp_size:
        hint = "pad it; cp_mesh.ShardedSequence takes any length"
        refuse(what, f"a length that is a multiple of {cp_size} ranks", lengths[0], hint)
    return lengths[0]


@torch.no_grad()
def _hold(buffers: list[Tensor], others: list[Tensor]) -> None:
    """Point each buffer to the storage of its other tensor; for autograd that is an in-place change."""
    for buffer, other in zip(buffers, others, strict=True):
        # not a copy, because buffers may be views of one tensor, such as shifted tokens and labels
        buffer.set_(other)  # type: ignore[call-overload]


def _with_length(sequence: ShardedSequence, length: int) -> ShardedSequence:
    """Return the sequence with PyTorch's layout, which its private switch of load balancing also sets here."""
    balanced = balances_context_parallel() and length % (2 * sequence.cp_size) == 0
    layout: Layout = ZigZag() if balanced else Contiguous()
    return replace(sequence, layout=layout, length=length)


def _is_inside() -> bool:
    return any(isinstance(mode, _Context) for mode in function_modes())


@torch.no_grad()
def context_parallel_unshard(
    mesh: DeviceMesh, buffers: Sequence[Tensor], seq_dims: Sequence[int], load_balancer: None = None
) -> list[Tensor]:
    """Gather whole tensors, like `torch.distributed.tensor.experimental._attention.context_parallel_unshard`.

    Args:
        mesh: the 1-D mesh of the cp axis.
        buffers: this rank's rows, as sharded by `context_parallel` or returned by SDPA within it; or their gradients.
        seq_dims: the sequence dim of each buffer.
        load_balancer: None.

    Returns:
        The whole tensors in original order on every rank, without requires_grad.

    Raises:
        ArgumentError: on DTensors, or if the number of dims differs from the number of buffers.
        UnsupportedError: on a ``load_balancer``, which is for flex_attention.
    """
    what, sequence = "context_parallel_unshard", ShardedSequence(mesh)
    if load_balancer is not None:
        got, hint = type(load_balancer).__name__, "cp_mesh.ShardedSequence has other layouts"
        refuse(f"{what}: load_balancer", None, got, hint, UnsupportedError)
    if len(buffers) != len(seq_dims) or any(isinstance(x, DTensor) for x in buffers):
        got = f"{[type(x).__name__ for x in buffers]}, {len(seq_dims)} dims"
        refuse(f"{what}: buffers", "local tensors, and a dim for each", got, "pass x.to_local()")
    return [
        _with_length(sequence, x.shape[dim] * sequence.cp_size).unshard(x, dim)
        for x, dim in zip(buffers, seq_dims, strict=True)
    ]


def set_rotate_method(rotate_method: str) -> None:
    """Set the method of later contexts, like `torch.distributed.tensor.experimental._attention.set_rotate_method`.

    Args:
        rotate_method: "allgather" for ``method="all_gather"`` of `cp_mesh.attention`, or "alltoall" for
            ``method="ring"``. Without a call, contexts use ``method="auto"``.

    Raises:
        UnsupportedError: on another name, or within a context.
    """
    if rotate_method not in _METHODS or _is_inside():
        got = f"{rotate_method!r}{' within a context' * _is_inside()}"
        hint = "call it before context_parallel; cp_mesh.attention(method=) has more methods"
        refuse("set_rotate_method", " or ".join(map(repr, _METHODS)), got, hint, UnsupportedError)
    _method.set(_METHODS[rotate_method])
