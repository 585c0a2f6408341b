"""`SDPAMode`: turns a core's calls of attention into sharded ones; and what modes that see attention share.

A `TorchFunctionMode` sees what Python code calls while it is active: functions of torch and torch.nn.functional, and
operators of PyTorch (torch.ops.aten), in eager mode and while torch.compile traces. It does not see code of
torch.jit.script, calls made in C++ or in another thread, attention written as matmul and softmax, or the kernels of
other packages; nor, while torch.compile traces, private functions such as torch._scaled_dot_product_attention_math
(its operator it does see), and what is in the body of a higher-order operator, such as torch.cond.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cp_mesh._torch import ASKS_TENSORS, ATTENTION_OPS, FLEX, constant_in_traces, loaded_dynamo, sdpa
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.wrap import FILE

# The functions that attend, by name (torch.compile guards every look-up of a function, none of a name), and the dim of
# query and key that counts rows; None: it always is self-attention. `nn.MultiheadAttention` hands on [L, N, E].
_DIMS = {"scaled_dot_product_attention": -2, "flex_attention": -2, "multi_head_attention_forward": 0} | ATTENTION_OPS
ROWS = _DIMS | {f"{name}.default": dim for name, dim in _DIMS.items()}  # and as operators are named
ATTENTION = frozenset(ROWS)
# What torch.compile makes of torch.utils.checkpoint: an operator, in whose body the mode that sees it is not active.
CHECKPOINTS = frozenset(("tag_activation_checkpoint", "wrap_activation_checkpoint"))
PUT_BACK = (
    "what it does around the call is not known: leave it out of the core, or put PyTorch's back, "
    "F.scaled_dot_product_attention = torch._C._nn.scaled_dot_product_attention"
)


class SDPAMode(TorchFunctionMode):
    """Lives for one forward of one core, and counts its ``calls`` of attention.

    Args:
        attend: called instead of `F.scaled_dot_product_attention`.
        attend_by_functions: called by `cp_mesh.flex_attention`, which finds this mode.
        look: in a forward that is watched, told of everything else that is called.
    """

    def __init__(
        self, attend: Callable[..., Any], attend_by_functions: Callable[..., Any], look: Callable[..., None] | None
    ) -> None:
        super().__init__()
        self.attend, self.attend_by_functions, self.look = attend, attend_by_functions, look
        self.calls, self.graded = 0, torch.is_grad_enabled()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name not in ATTENTION:
            if name in CHECKPOINTS:
                self.count(in_checkpoint=True)
            if _asked_by_flex(func, name):
                _refuse_flex()
            if self.look is not None:
                self.look(name, args, kwargs)
            return call_function(func, args, kwargs)
        if name == "flex_attention":
            _refuse_flex()
        if func is not F.scaled_dot_product_attention:
            if func is sdpa and (wrapper := replaced_sdpa()):
                expected = "PyTorch's own F.scaled_dot_product_attention"
                refuse("ContextParallel", expected, f"{wrapper}, which calls it", PUT_BACK, UnsupportedError)
            raise UnsupportedError(
                f"ContextParallel: {name} is not available in a core; call F.scaled_dot_product_attention "
                "and say the mask as ContextParallel(mask=Mask(...)), or call cp_mesh.flex_attention"
            )
        self.count()
        return self.attend(*args, **kwargs)

    def count(self, in_checkpoint: bool = False) -> None:
        """Of a call of attention."""
        if in_checkpoint or (self.graded and not torch.is_grad_enabled()) or _inside_checkpoint():
            raise UnsupportedError(
                "ContextParallel: attention inside of a checkpoint, or of no_grad, that the core itself begins is "
                "not available: the backward would recompute it outside of the core, from this rank's rows alone; "
                "checkpoint the module that holds the core, checkpoint(block, x, use_reentrant=False)"
            )
        self.calls += 1


def call_function(func: Any, args: Any, kwargs: Any) -> Any:
    if func is Tensor.unflatten:  # torch.compile traces a call of the method, but not what the function holds
        return args[0].unflatten(*args[1:], **kwargs)
    return func(*args, **kwargs)


def keep_uncompiled(*functions: Callable[..., Any]) -> None:
    """Have torch.compile trace these functions of modes, and those of this module, within other code alone.

    Where it falls back within a forward it would compile them by themselves, and of getters, such as those of
    `Tensor.ndim` and `Tensor.is_nested`, it tells none from another: each would return what the first one did.
    """
    skip_code = getattr(loaded_dynamo(), "skip_code", None)
    if skip_code is not None:
        for function in (SDPAMode.__torch_function__, call_function, _asked_by_flex, *functions):
            skip_code(function.__code__)


def replaced_sdpa() -> str:
    """What stands in the place of PyTorch's `F.scaled_dot_product_attention`, in words; "" where that is there."""
    found = F.scaled_dot_product_attention
    if found is sdpa:
        return ""
    code = getattr(found, "__code__", None)  # a wrapper may have the name of what it wraps
    return repr(found) if code is None else f"the function of {code.co_filename}, line {code.co_firstlineno}"


@constant_in_traces  # what it raises is no reason to try uncompiled
def _refuse_flex() -> NoReturn:
    raise UnsupportedError(
        "ContextParallel: PyTorch's flex_attention is not available in a core: it is told of this rank's rows alone. "
        "Import cp_mesh.flex_attention under its name, and call it alike in the core; in a model that is compiled it "
        "is left out of the graph"
    )


def _asked_by_flex(func: Any, name: str) -> bool:
    """Whether PyTorch's flex_attention asks what a tensor is like: a function in Python, which no mode sees itself."""
    if torch.compiler.is_compiling() or (func is not Tensor.size and name != "__get__"):
        return False
    caller = sys._getframe(2)
    return caller.f_globals.get("__name__") == FLEX and caller.f_code.co_name in ASKS_TENSORS


def _inside_checkpoint() -> bool:
    """Whether a checkpoint was begun between the core's forward and here; one that is traced is seen as an operator."""
    frame: FrameType | None = None if torch.compiler.is_compiling() else sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != FILE:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
        frame = frame.f_back
    return False
