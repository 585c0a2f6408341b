"""Compiled calls of PyTorch's flex operators, one for a shape, by a key that says all on which their code depends."""

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
"""Programs that are kept."""
FEWER_STAGES: tuple[dict[str, int], ...] = ({}, {"num_stages": 2}, {"num_stages": 1})
_lowering = Lock()
_programs: OrderedDict[Hashable, Callable[..., Any]] = OrderedDict()  # the last KEPT


def program(
    key: Hashable,
    inputs: Sequence[Tensor],
    make: Callable[[dict[str, int]], Callable[..., Any]],
    num_stages: int | None = None,
) -> Callable[..., Any]:
    """What ``make`` returns, compiled for tensors like these; on the CPU as it is: PyTorch compiles no backward there.

    It is given options of PyTorch's kernels: those that read more in a loop may need shared memory for fewer stages,
    than ``num_stages`` where the caller chose these.
    Inductor must not pad strides: the templates take rows of lse and delta to follow each other.
    """
    # the templates ask for float32's precision when they are compiled
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

        # In a thread: this one may be below autograd, in an op, or under modes, such as those of checkpoints.
        # Inductor keeps results of each device apart.
        with nullcontext() if on_cpu else one_rank_compiles(device.index), ThreadPoolExecutor(1) as beside:
            _programs[key] = beside.submit(made).result()
        if len(_programs) > KEPT:
            _programs.popitem(last=False)
    _programs.move_to_end(key)
    return _programs[key]


def with_fewer_stages(
    compiled: Callable[[dict[str, int]], Callable[..., Any]], num_stages: int | None
) -> Callable[..., Any]:
    """What compiles first: as many stages as the caller chose, or PyTorch for None, and then fewer."""
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
    """Templates that Inductor fills in this thread write out, dq, dk and dv as they sum them, not as q, k and v are.

    Tiles are merged and gradients added before they are rounded: else a ring of two has up to 1.5 times the error of
    one GPU. PyTorch has no option for it, but a tensor in these places of the lowering has. Programs on disk are told
    from those of others by the number RESULTS_IN_FLOAT32 of `kernel`: what changes here needs another one.
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
    """What Inductor makes of it, or finds on disk, for any tensors like these.

    Inductor looks there only where inputs are fake tensors of a mode with a ShapeEnv. A tensor that is given twice is
    traced as two: tracing goes by identity, and later calls may give different ones.
    """
    inputs = [x.detach() for x in inputs]
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    with torch.no_grad(), _results_in_float32():  # no backward of its own for inputs with a gradient
        fakes: list[Any] = [mode.from_tensor(x) for x in inputs]
        return inductor().compile(traced(function, inputs), fakes, {"comprehensive_padding": False})


def traced(function: Callable[..., Any], inputs: Sequence[Tensor]) -> GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, tracing_mode="fake")(*inputs)
