"""`Checkpointed`: blocks that keep their input, on request in host memory, and compute the rest again in the backward.

A stream of its own copies to the host while the block computes, and back one block ahead of the backward; PyTorch's
`save_on_cpu` copies on the stream that computes. DeepSpeed's ALST (arXiv 2506.13996) offloads inputs of blocks, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, noop_context_fn

from cp_mesh._torch import (
    COMPILED_CALL,
    DispatchMode,
    saved_tensors_hooks_here,
    times_written,
    traces_checkpoint,
    tree_flatten,
    tree_map_only,
    tree_unflatten,
    untraced,
)
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.training.host_copies import CopyStream, OffloadedBlock
from cp_mesh.training.parallelize import checkpoint_context_fn, is_attention
from cp_mesh.wrap import CHECKPOINT, Style, replaced


class Checkpointed(Style):
    """Makes a block keep its input and what attention returns; the backward computes the rest again.

    Outputs, gradients and random numbers are those of the plain block. It is PyTorch's checkpoint without reentry.
    Styles over cp and tp inside the block and `fully_shard` around it work as without.

    As under PyTorch's checkpoint, a forward that changes buffers or attributes changes them twice, so a forward that
    also reads them has wrong gradients. A write in place to an argument raises in the backward, even where plain
    autograd accepts it.

    With ``offload=True`` both wait in host memory, which is pinned on GPUs and used again by the next step. They come
    back one block ahead, so a GPU holds those of two blocks. The input is the first floating tensor among the
    arguments. Other arguments stay, since blocks share them. torch.compile leaves such a block out of its graph, so
    compile the forward before the plan: ``block.forward = torch.compile(block.forward)``.

    Args:
        offload: keep them in host memory; for blocks on GPUs or CPUs.
        keep_attention: False computes attention again too, and keeps only the input.

    Raises:
        UnsupportedError: at application, on a module with a style over cp. In the backward, if it reads a tensor that
            the block wrote in place after an operation saved it, as in ``x += y``: plain autograd raises then, too, but
            PyTorch's checkpoint gives wrong gradients, and so does this where torch.compile breaks the graph of a
            block. With ``offload=True`` also in a call of a block that ``block.compile()`` compiled, that has no
            floating tensor among its arguments, or a subclass of Tensor other than DTensor; and in the backward, if
            an argument or attention's output was written in place.
        RuntimeError: by PyTorch in the backward, without offload, if an argument or kept attention was written in
            place.

    Example:
        >>> plan["layers.*"] = Checkpointed(offload=True)  # doctest: +SKIP
    """

    key, alone = CHECKPOINT, "name the block around it"

    def __init__(self, *, offload: bool = False, keep_attention: bool = True) -> None:
        self.offload, self.keep_attention = offload, keep_attention
        self._streams: dict[torch.device, CopyStream] = {}

    def run(self, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        at.sort(key=lambda i: not leaves[i].is_floating_point())
        tensors = [leaves[i] for i in at]  # arguments of the checkpoint: it finds their device and saves them
        for i in at:
            leaves[i] = None

        def compute(*tensors: Tensor) -> Any:
            given = [*leaves]
            for i, x in zip(at, tensors, strict=True):
                given[i] = x
            args, kwargs = tree_unflatten(given, spec)
            return forward(*args, **kwargs)

        if self.offload and torch.is_grad_enabled():
            return self._offloaded(module, compute, tensors)
        if torch.compiler.is_compiling() or traces_checkpoint():  # writes become other operations
            options: Any = {"context_fn": checkpoint_context_fn} if self.keep_attention else {}
        else:
            contexts = checkpoint_context_fn if self.keep_attention else noop_context_fn
            options = {"context_fn": partial(_watched, self._name(module), contexts)}
        return checkpoint(compute, *tensors, use_reentrant=False, **options)

    def _name(self, module: nn.Module) -> str:
        where = getattr(replaced(module, CHECKPOINT), "where", "")
        return f"Checkpointed({type(module).__name__}{where and f' at {where}'})"

    @untraced
    def _offloaded(self, module: nn.Module, compute: Callable[..., Any], tensors: list[Tensor]) -> Any:
        what = self._name(module)
        if getattr(module, COMPILED_CALL, None) is not None:
            hint = "block.forward = torch.compile(block.forward) before the plan"
            refuse(what, "a block that is not compiled around the style", "block.compile()", hint, UnsupportedError)
        given = [f"{x.dtype} on {x.device.type}" for x in tensors]
        if not tensors or not tensors[0].is_floating_point() or tensors[0].device.type not in ("cuda", "cpu"):
            refuse(what, "a floating tensor on a GPU or CPU first", given, "Checkpointed()", UnsupportedError)
        x = tensors[0]
        if x.device not in self._streams:
            self._streams[x.device] = CopyStream(x.device)
        block, shape = OffloadedBlock(what, self._streams[x.device]), x.shape
        outs: list[Any] = []
        contexts = noop_context_fn
        if self.keep_attention:
            contexts = lambda: (_KeptAttention(block, outs), _KeptAttention(None, outs))  # noqa: E731

        def save(y: Tensor) -> Any:
            return (y, times_written(y)) if block.tensors or y.shape != shape else block.keep(y)

        def read(saved: Any) -> Any:
            if isinstance(saved, partial):
                return saved()
            y, times = saved
            if times_written(y) != times:
                got = f"a write in place to one of shape {tuple(y.shape)}, {y.dtype}"
                refuse(what, "arguments that stay", got, "write x = x + y instead of x += y", UnsupportedError)
            return y

        with saved_tensors_hooks(save, read):  # of the checkpoint's arguments; they live as long as these: not of x
            return checkpoint(compute, *tensors, use_reentrant=False, context_fn=partial(_watched, what, contexts))


def _watched(what: str, contexts: Callable[[], Any]) -> tuple[Any, Any]:
    """Contexts of a checkpoint whose backward refuses to read what was written since it was saved, as autograd does."""
    versions: list[int] = []

    def of_forward(pack: Callable[..., Any], unpack: Callable[..., Any]) -> tuple[Any, Any]:
        numbers = count()

        def read(saved: tuple[int, Any]) -> Tensor:
            number, holder = saved
            x: Tensor = unpack(holder)
            if versions[number] != times_written(x):
                got = f"a write to one of shape {tuple(x.shape)}, {x.dtype}"
                refuse(what, "saved tensors that stay", got, "write x = x + y instead of x += y", UnsupportedError)
            return x

        return lambda x: (next(numbers), pack(x)), read

    def of_recomputation(pack: Callable[..., Any], unpack: Callable[..., Any]) -> tuple[Any, Any]:
        versions.clear()

        def keep(x: Tensor) -> Any:
            versions.append(times_written(x))
            return pack(x)

        return keep, unpack

    forward, recomputation = contexts()
    return _Hooked(forward, of_forward), _Hooked(recomputation, of_recomputation)


class _Hooked:
    """A context inside which other hooks take the place of a checkpoint's hooks of saved tensors.

    Without autocast's cache: it may have casts that the forward does not make, and the recomputation does.
    """

    def __init__(self, inner: Any, replace: Callable[..., tuple[Any, Any]]) -> None:
        self.inner, self.replace = inner, replace

    def __enter__(self) -> None:
        self.inner.__enter__()
        self.cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        self.hooks = saved_tensors_hooks(*self.replace(*saved_tensors_hooks_here(False)))
        self.hooks.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.hooks.__exit__(*error)
        torch.set_autocast_cache_enabled(self.cached)
        self.inner.__exit__(*error)


class _KeptAttention(DispatchMode):
    """In a block's forward, keeps what attention returns. In its recomputation, without ``block``, returns that."""

    supports_higher_order_operators = True

    def __init__(self, block: OffloadedBlock | None, outs: list[Any]) -> None:
        super().__init__()
        self.block, self.outs = block, outs

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else what is compiled inside the block would run as it is

    def __enter__(self) -> Any:
        self.rest = iter([*self.outs])  # from the first, in each backward
        return super().__enter__()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.block is None and is_attention(op):
            return tree_map_only(partial, lambda y: y(), next(self.rest))
        out = op(*args, **kwargs or {})
        if self.block is not None and is_attention(op):
            self.outs.append(tree_map_only(Tensor, self.block.keep, out))
        return out
