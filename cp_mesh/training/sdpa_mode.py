"""`SDPAMode`: replaces the attention calls of a core with sharded attention. Also helpers that `coverage` shares.

While a `TorchFunctionMode` is active it sees Python calls to functions of torch and torch.nn.functional and to aten
operators, in eager mode and while torch.compile traces. It does not see torch.jit.script, calls made in C++ or in
another thread, attention written as matmul and softmax, or kernels of other packages. While torch.compile traces, it
does not see private functions such as torch._scaled_dot_product_attention_math (it sees the operator of that name) or
the body of a higher-order operator such as torch.cond.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cp_mesh._torch import ASKS_TENSORS, ATTENTION_OPS, FLEX, constant_in_traces, loaded_dynamo, sdpa
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.wrap import inside_checkpoint

# Attention functions by name (torch.compile guards look-ups by function, not by name), with the sequence dim of query
# and key; None: always self-attention. `nn.MultiheadAttention` passes [L, N, E].
_DIMS = {"scaled_dot_product_attention": -2, "flex_attention": -2, "multi_head_attention_forward": 0} | ATTENTION_OPS
ROWS = _DIMS | {f"{name}.default": dim for name, dim in _DIMS.items()}  # the names of aten operators
ATTENTION = frozenset(ROWS)
# torch.compile turns torch.utils.checkpoint into these operators. The mode is not active in their bodies.
CHECKPOINTS = frozenset(("tag_activation_checkpoint", "wrap_activation_checkpoint"))
PUT_BACK = (
    "what it does around the call is not known: leave it out of the core, or restore PyTorch's function, "
    "F.scaled_dot_product_attention = torch._C._nn.scaled_dot_product_attention"
)


class SDPAMode(TorchFunctionMode):
    """Active during one forward of one core; ``calls`` counts the core's attention calls.

    Args:
        attend: called instead of `F.scaled_dot_product_attention`.
        attend_by_functions: called by `cp_mesh.flex_attention`, which looks up this mode.
        watch: that of a watched forward, which looks at functions other than attention.
    """

    def __init__(self, attend: Callable[..., Any], attend_by_functions: Callable[..., Any], watch: Any) -> None:
        super().__init__()
        self.attend, self.attend_by_functions, self.watch = attend, attend_by_functions, watch
        self.calls, self.graded = 0, torch.is_grad_enabled()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name not in ATTENTION:
            if name in CHECKPOINTS:
                self.count(in_checkpoint=True)
            if _asked_by_flex(func, name):
                _refuse_flex()
            if self.watch is not None and name in self.watch.position_calls:
                self.watch.look(name, args, kwargs)
            return call_function(func, args, kwargs)
        if name == "flex_attention":
            _refuse_flex()
        if func is not F.scaled_dot_product_attention:
            if func is sdpa and (wrapper := replaced_sdpa()):
                expected = "PyTorch's own F.scaled_dot_product_attention"
                refuse("ContextParallel", expected, f"{wrapper}, which calls it", PUT_BACK, UnsupportedError)
            raise UnsupportedError(
                f"ContextParallel: {name} is not available in a core; call F.scaled_dot_product_attention "
                "and pass the mask as ContextParallel(mask=Mask(...)), or call cp_mesh.flex_attention"
            )
        self.count()
        return self.attend(*args, **kwargs)

    def count(self, in_checkpoint: bool = False) -> None:
        """Count an attention call, and refuse it in a checkpoint or no_grad that begins inside the core."""
        if in_checkpoint or (self.graded and not torch.is_grad_enabled()) or inside_checkpoint():
            raise UnsupportedError(
                "ContextParallel: attention inside of a checkpoint, or of no_grad, that begins inside the core is "
                "not available: the backward would recompute it outside of the core, from this rank's rows alone; "
                "checkpoint the module that holds the core, checkpoint(block, x, use_reentrant=False)"
            )
        self.calls += 1


def call_function(func: Any, args: Any, kwargs: Any) -> Any:
    if func is Tensor.unflatten:  # torch.compile traces the method call, but not a call of the function object
        return args[0].unflatten(*args[1:], **kwargs)
    return func(*args, **kwargs)


def keep_uncompiled(*functions: Callable[..., Any]) -> None:
    """Forbid torch.compile to compile these mode functions, and those of this module, as frames of their own.

    After a graph break Dynamo would do so. It does not distinguish getters such as `Tensor.ndim` and
    `Tensor.is_nested`, so each getter would return the value of the first one.
    """
    skip_code = getattr(loaded_dynamo(), "skip_code", None)
    if skip_code is not None:
        for function in (SDPAMode.__torch_function__, call_function, _asked_by_flex, *functions):
            skip_code(function.__code__)


def replaced_sdpa() -> str:
    """Describe the function that replaces PyTorch's `F.scaled_dot_product_attention`; "" if none does."""
    found = F.scaled_dot_product_attention
    if found is sdpa:
        return ""
    code = getattr(found, "__code__", None)  # not by __name__, which a wrapper may copy
    return repr(found) if code is None else f"the function of {code.co_filename}, line {code.co_firstlineno}"


@constant_in_traces  # so that Dynamo raises the error, and does not fall back to eager code
def _refuse_flex() -> NoReturn:
    raise UnsupportedError(
        "ContextParallel: PyTorch's flex_attention is not available in a core: it sees this rank's rows alone. "
        "Import cp_mesh.flex_attention under its name, and call it in the same way in the core; torch.compile leaves "
        "it out of the graph"
    )


def _asked_by_flex(func: Any, name: str) -> bool:
    """Whether PyTorch's flex_attention reads a tensor property: modes see the read, not the Python function itself."""
    if torch.compiler.is_compiling() or (func is not Tensor.size and name != "__get__"):
        return False
    caller = sys._getframe(2)
    return caller.f_globals.get("__name__") == FLEX and caller.f_code.co_name in ASKS_TENSORS
