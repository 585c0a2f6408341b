"""`widened`: run the forward of a half-precision model in float32, without a copy of the model.

Every operator gets its half-precision operands as float32, so one float32 weight at a time exists. Collectives and the
hooks of FSDP2 keep their dtypes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode

from cp_mesh._torch import DispatchMode, OpOverload, schema_of, tree_map_only
from cp_mesh.kernels.precision import without_tf32

HALF = (torch.bfloat16, torch.float16)
_SINGLE = (*HALF, torch.float32)
_OF_RANKS = ("c10d", "_c10d_functional", "fsdp")
"""Namespaces of collectives, and of operators that allocate their buffers."""
_aten = torch.ops.aten
_ROWS = (_aten.embedding.default, _aten.index_select.default, _aten.index.Tensor, _aten.gather.default)
"""Operators that copy a part of a tensor: the result is widened, not the whole operand."""


@contextmanager
def widened(model: nn.Module) -> Iterator[None]:
    """Compute half precision in float32, and float32 without TF32, within the context. float64 is unchanged.

    Layers that compare dtypes in Python before they call an operator, such as nn.GRU, raise in half precision.
    """
    mode = _Widen()
    with ExitStack() as stack:
        for part in model.modules():
            if isinstance(part, FSDPModule):
                mode.leave_hooks_of(part, stack)
        for context in (without_tf32(), _WidenFunctions(), mode):
            stack.enter_context(context)
        yield


def _wide(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.float() if x.dtype in HALF else x
    return torch.float32 if x in HALF else x


def _as(dtype: torch.dtype, x: Tensor) -> Tensor:
    return x.to(dtype) if x.dtype in _SINGLE else x


def _widen(tree: Any) -> Any:
    return tree_map_only((Tensor, torch.dtype), _wide, tree)


class _Widen(DispatchMode):
    """Widens the operands of every operator. ``aside`` is True while hooks of FSDP2 run."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.aside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.aside or not isinstance(func, OpOverload) or func.namespace in _OF_RANKS:
            return func(*args, **kwargs)
        if func.is_view:
            return func(*args, **kwargs)
        if schema_of(func).is_mutable:  # the written tensor keeps its dtype, and the other operands are cast to it
            if args and isinstance(args[0], Tensor) and (dtype := args[0].dtype) in _SINGLE:
                args, kwargs = tree_map_only(Tensor, partial(_as, dtype), (args, kwargs))
            return func(*args, **kwargs)
        if func in _ROWS:
            return _widen(func(*args, **kwargs))
        return func(*_widen(args), **_widen(kwargs))

    def leave_hooks_of(self, module: nn.Module, stack: ExitStack) -> None:
        """Register hooks before and after those of FSDP2, which set and clear ``aside``."""

        def put_aside(aside: bool) -> Any:
            def hook(*_: Any) -> None:
                self.aside = aside

            return hook

        for register in (module.register_forward_pre_hook, module.register_forward_hook):
            for first in (True, False):
                stack.callback(register(put_aside(first), prepend=first).remove)


class _WidenFunctions(TorchFunctionMode):
    """Widens arguments of functions: of convolutions, which compare dtypes before the operator, and of Tensor.to."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.to or "conv" in getattr(func, "__name__", ""):
            args, kwargs = _widen((args, kwargs))
        return func(*args, **kwargs)
