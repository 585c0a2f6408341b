"""All private PyTorch names that cp_mesh uses, each under a public name that describes its purpose.

No other file uses a private name. `tests/test_torch_names.py` lists for each what breaks without it, and the releases
that have it. Most names are bound to PyTorch's own objects, so that Dynamo recognizes them and no call is added.
Modules that `import torch` does not load are functions here, which import them.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from importlib import import_module
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _python_dispatch, _pytree

Function = TypeVar("Function", bound=Callable[..., Any])

# torch.compile.

untraced = torch._disable_dynamo  # like `torch.compiler.disable`, but does not import Dynamo
loaded_dynamo: Callable[[], Any] = partial(sys.modules.get, "torch._dynamo.eval_frame")  # None before torch.compile
inductor = partial(import_module, "torch._inductor")


def constant_in_traces(function: Function) -> Function:
    """Like `torch.compiler.assume_constant_result`, without importing Dynamo: traces use the result as a constant."""
    vars(function)["_dynamo_marked_constant"] = True
    return function


# Process groups, collectives, DDP and FSDP2.

resolve_group: Callable[..., dist.ProcessGroup] = dist.distributed_c10d._resolve_process_group  # group by name
funcol: Any = torch.ops._c10d_functional  # functional collectives, as traceable operators
world = partial(getattr, dist.distributed_c10d, "_world")  # pg_map: groups, their backends and stores; pg_names
devices_of_group = attrgetter("_device_types")  # device types that its collectives support
SYMMETRIC_MEMORY = "torch.distributed._symmetric_memory"  # buffers shared by the ranks of a host
symmetric_memory = partial(import_module, SYMMETRIC_MEMORY)
active_ddp = DistributedDataParallel._get_active_ddp_module  # the wrapper whose forward is running


def comm_hooks(wrapper: torch.nn.Module) -> Any:
    """Return what reduces gradients in place of DistributedDataParallel or FSDP1, if the user registered it."""
    return getattr(wrapper, "_comm_hooks", None) or getattr(wrapper, "_comm_hook", None)


@contextmanager
def uncounted() -> Iterator[None]:
    """Within it, new groups leave PyTorch's count of groups as it is.

    From PyTorch 2.14 on, a group that only some ranks make advances the count on these ranks. Later groups of all ranks
    are named by the count, and ranks with different names for a group never connect.
    """
    kept, world().group_count = world().group_count, -1 - len(world().pg_names)
    try:
        yield
    finally:
        world().group_count = kept


def flatten_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Flatten a mesh to one axis. A function: Dynamo of PyTorch 2.11 traces this method only as a call on a mesh."""
    return mesh._flatten()


@untraced  # after a graph break in its caller Dynamo would trace this function by itself
def timeout_of(group: dist.ProcessGroup, device: torch.device | None = None) -> timedelta:
    """The timeout of the group's collectives."""
    options = getattr(group._get_backend(device or group._device_types[0]), "options", None)
    timeout: timedelta = getattr(options, "_timeout", None) or dist.distributed_c10d.default_pg_timeout
    return timeout


def apply_style(style: Any, module: Any, mesh: DeviceMesh) -> Any:
    """Apply a style like `parallelize_module`, but also with a mesh of several axes."""
    return style._apply(module, mesh)


def meshes_of_fsdp(module: Any) -> list[DeviceMesh]:
    """The meshes over which FSDP2 shards and reduces this module's own parameters; empty if it manages none."""
    state = module._get_fsdp_state()
    parts = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # the latter in PyTorch 2.11
    return [part.mesh_info.mesh for part in parts if part]


def ranks_of_fsdp(module: Any) -> set[int]:
    return {rank for mesh in meshes_of_fsdp(module) for rank in mesh.mesh.flatten().tolist()}


# The dispatcher, autograd, transforms and modes.

OpOverload = torch._ops.OpOverload  # type of an operator
schema_of = attrgetter("_schema")  # an operator's arguments, and whether it writes to them
DispatchKey = torch._C.DispatchKey
DispatchKeySet = torch._C.DispatchKeySet  # the keys select the next kernel of an operator
below_autograd = torch._C._AutoDispatchBelowADInplaceOrView  # a view made inside has no base that autograd tracks
KEYS_BELOW_AUTOGRAD = torch._C._after_ADInplaceOrView_keyset  # keys of the kernels that follow autograd's
without_keys = torch._C._ExcludeDispatchKeyGuard
num_dispatch_modes = torch._C._len_torch_dispatch_stack
profiles = torch.autograd._profiler_enabled  # whether a profiler is running
in_transform = torch._C._are_functorch_transforms_active  # whether a transform of torch.func is active
is_batched = torch._C._functorch.is_batchedtensor  # whether torch.func.vmap made the tensor
forward_level = partial(getattr, forward_ad, "_current_level")  # level of forward-mode AD; negative: none is active
allows_plain = torch._C._get_dtensor_allow_implicit_replication  # whether plain tensors may join DTensors
backward_number = torch._C._current_graph_task_id  # id of the backward that runs in this thread; -1: none
traces_checkpoint = partial(torch.utils.checkpoint._is_compiling, None, (), {})  # whether make_fx or AOTAutograd does
StopRecomputation = torch.utils.checkpoint._StopRecomputationError  # ends a checkpoint's recomputation; no failure
saved_tensors_hooks_here: Any = torch._C._autograd._top_saved_tensors_default_hooks  # the innermost pair, or None
set_grad_enabled = torch._C._set_grad_enabled  # the call of torch.no_grad that function modes see
function_mode = torch.overrides._get_current_function_mode  # the innermost one
function_modes = torch.overrides._get_current_function_mode_stack
without_function_modes = torch._C.DisableTorchFunction
DispatchMode = _python_dispatch.TorchDispatchMode  # intercepts operators
without_modes = _python_dispatch._disable_current_modes


@contextmanager
def dispatching(*names: str) -> Iterator[None]:
    """Stop excluding these dispatch keys: the kernel of an op runs with autograd excluded, under a mode also vmap."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for name in names:
        excluded = excluded.remove(getattr(DispatchKey, name))
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        yield


# Tensors and modules.

times_written = attrgetter("_version")  # the write counter; inference tensors have none
local_tensor = attrgetter("_local_tensor")  # of a DTensor, without an autograd node
spec_of_dtensor = attrgetter("_spec")  # a DTensor's mesh, placements and global shape
is_view = Tensor._is_view
base_of = attrgetter("_base")  # the tensor of which one is a view; None of others
FakeTensor, FakeTensorMode = torch._subclasses.FakeTensor, torch._subclasses.FakeTensorMode  # shapes without data
tree_leaves, tree_map_only = _pytree.tree_leaves, _pytree.tree_map_only  # for tensors in nested values
tree_flatten, tree_unflatten = _pytree.tree_flatten, _pytree.tree_unflatten
tree_map_with_path, MappingKey = _pytree.tree_map_with_path, _pytree.MappingKey
Convolution, Dropout = nn.modules.conv._ConvNd, nn.modules.dropout._DropoutNd  # base classes, for any number of dims
hooks_of_tensor = attrgetter("_backward_hooks")  # on its gradient, by register_hook; None or a dict
hooks_of_module = attrgetter("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")  # dicts
COMPILED = "_orig_mod"  # attribute of torch.compile(module) that holds the module
COMPILED_CALL = "_compiled_call_impl"  # set by Module.compile(): the compiled call; None if not compiled
WRAPPED = ("_fsdp_wrapped_module", COMPILED, "_checkpoint_wrapped_module", "module")  # names that wrappers add to paths


def unwrapped(path: str) -> str:
    """The path of a module or parameter without the names that wrappers add."""
    return ".".join(name for name in path.split(".") if name not in WRAPPED)


# Kernels of PyTorch.


class _Passes(NamedTuple):
    forward: Any
    backward: Any


_aten = torch.ops.aten
cpu_flash = _Passes(
    _aten._scaled_dot_product_flash_attention_for_cpu, _aten._scaled_dot_product_flash_attention_for_cpu_backward
)
cudnn = _Passes(_aten._scaled_dot_product_cudnn_attention, _aten._scaled_dot_product_cudnn_attention_backward)
flash = _Passes(_aten._scaled_dot_product_flash_attention, _aten._scaled_dot_product_flash_attention_backward)
sdpa = torch._C._nn.scaled_dot_product_attention  # F.scaled_dot_product_attention, unless someone has patched that
to_copy = _aten._to_copy.default  # dtype conversion, as traces record it
multiply_each, norm_of_each = torch._foreach_mul_, torch._foreach_norm  # many tensors in one kernel
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # address of the stream; None without CUDA

ATTENTION_OPS = {
    **dict.fromkeys(("_flash_attention_forward", "_efficient_attention_forward", "_varlen_attn"), -3),
    **dict.fromkeys(
        (
            *("_scaled_dot_product_attention_math", "_scaled_dot_product_attention_math_for_mps"),
            *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
            *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
            *("_scaled_dot_product_fused_attention_overrideable", "_cudnn_attention_forward"),
            *("_native_multi_head_attention", "_triton_multi_head_attention", "_triton_scaled_dot_attention"),
        ),
        -2,
    ),
    "_transformer_encoder_layer_fwd": None,
}
"""Attention operators, and the sequence dim of their query and key; None: the operator is always self-attention."""


def without_source(module: Any) -> Any:
    """Return a GraphModule whose code tracebacks do not show: FX would keep its text for good."""
    name = type(module).forward.__code__.co_filename
    for kept in (linecache.cache, torch.fx.graph_module._loader.eval_cache):
        kept.pop(name, None)
    return module


# flex_attention.

FLEX = "torch.nn.attention.flex_attention"
ASKS_TENSORS = ("flex_attention", "_validate_device")  # functions of that module that lead to its operator
SLICED_MASK_MOD = "_sliced_mask_mod_error"  # name of the mask_mod of a sliced mask, block_mask[...]
flex_operators = partial(import_module, "torch._higher_order_ops.flex_attention")  # operators with Inductor templates
flex_lowering = partial(import_module, "torch._inductor.kernel.flex.flex_attention")  # outputs and dtypes of templates
indexing = partial(import_module, "torch._dynamo._trace_wrapped_higher_order_op")  # templates scatter in its backward
