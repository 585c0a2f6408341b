"""Compiled calls of PyTorch's flex operators, cached by shape and by all else that their code depends on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from threading import Lock, get_ident
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from cp_mesh._torch import FakeTensorMode, flex_lowering, inductor
from cp_mesh.kernels.compiling import one_rank_compiles

KEPT = 256
"""Number of programs cached."""
FEWER_STAGES: tuple[dict[str, int], ...] = ({}, {"num_stages": 2}, {"num_stages": 1})
_lowering = Lock()
_programs: OrderedDict[Hashable, Callable[..., Any]] = OrderedDict()  # the last KEPT


def program(
    key: Hashable,
    inputs: Sequence[Tensor],
    make: Callable[[dict[str, int]], Callable[..., Any]],
    num_stages: int | None = None,
) -> Callable[..., Any]:
    """The function that ``make`` returns, compiled for tensors like ``inputs``, from the cache if it is there.

    On the CPU it is not compiled: PyTorch compiles no flex backward there. ``make`` gets kernel options: if shared
    memory is too small, these ask for fewer stages than ``num_stages``, the caller's choice, or than PyTorch's.
    """
    # compiled templates depend on the current float32 precision
    precision = torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32
    key = key, precision, tuple((x.shape, x.stride(), x.dtype, x.device) for x in inputs)
    if key not in _programs:
        on_cpu, device = inputs[0].device.type == "cpu", inputs[0].device

        def compiled(options: dict[str, int]) -> Callable[..., Any]:
            return compiled_of(make(options), inputs)

        def made() -> Callable[..., Any]:
            if on_cpu:
                return make({})
            torch.cuda.set_device(device)
            return with_fewer_stages(compiled, num_stages)

        # In a new thread: this one may be below autograd, in an op, or under modes, such as a checkpoint's.
        # The lock is per device, as Inductor's cache is.
        with nullcontext() if on_cpu else one_rank_compiles(device.index), ThreadPoolExecutor(1) as beside:
            _programs[key] = beside.submit(made).result()
        if len(_programs) > KEPT:
            _programs.popitem(last=False)
    _programs.move_to_end(key)
    return _programs[key]


def with_fewer_stages(
    compiled: Callable[[dict[str, int]], Callable[..., Any]], num_stages: int | None
) -> Callable[..., Any]:
    """Compile with ``num_stages``, or PyTorch's choice for None, and with fewer stages until shared memory suffices."""
    fewer = [x for x in FEWER_STAGES if num_stages is None or x.get("num_stages", 0) < num_stages]
    for options in fewer:
        try:
            return compiled(options)
        except Exception as error:
            if "out of resource" not in str(error) or options == fewer[-1]:
                raise
    raise AssertionError("the last options return or raise")


@contextmanager
def _results_in_float32() -> Iterator[None]:
    """Let Inductor's templates compiled in this thread write out, dq, dk and dv in float32, not in the inputs' dtype.

    So tiles are merged, and gradients summed, before they are rounded: else a ring of two has up to 1.5 times the error
    of one GPU. PyTorch has no option for this, so two names of its lowering are patched. In Inductor's disk cache the
    number RESULTS_IN_FLOAT32 of `kernel` marks these programs: increase it with every change here.
    """
    lowering: Any = flex_lowering()
    thread, as_they_are = get_ident(), (lowering.FixedLayout, lowering.empty_strided)

    def wide(dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if get_ident() == thread and dtype in (torch.bfloat16, torch.float16) else dtype

    def layout(device: torch.device, dtype: torch.dtype, *args: Any, **options: Any) -> Any:
        return as_they_are[0](device, wide(dtype), *args, **options)

    def empty_strided(*args: Any, dtype: torch.dtype, **options: Any) -> Any:
        return as_they_are[1](*args, dtype=wide(dtype), **options)

    with _lowering:
        lowering.FixedLayout, lowering.empty_strided = layout, empty_strided
        try:
            yield
        finally:
            lowering.FixedLayout, lowering.empty_strided = as_they_are


def compiled_of(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """Compile a function with Inductor, or load it from Inductor's disk cache, for tensors like ``inputs``.

    Inductor uses that cache only for fake tensors of a mode with a ShapeEnv. A tensor that is passed twice is traced as
    two: tracing goes by identity, and later calls may pass different ones.
    """
    inputs = [x.detach() for x in inputs]
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    with torch.no_grad(), _results_in_float32():  # no_grad: no autograd for inputs with a gradient
        fakes: list[Any] = [mode.from_tensor(x) for x in inputs]
        # no padded strides: the templates read rows of lse and delta as contiguous
        return inductor().compile(traced(function, inputs), fakes, {"comprehensive_padding": False})


def traced(function: Callable[..., Any], inputs: Sequence[Tensor]) -> GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, tracing_mode="fake")(*inputs)
