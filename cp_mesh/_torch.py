"""The private names of PyTorch that cp_mesh uses, each under a name of our own that says what it is for.

No other file has one. `tests/test_torch_names.py` says of each what breaks without it, and in which releases it was
seen. Most are bound to what PyTorch has, so that Dynamo knows it and no call is added. Modules that `import torch` does
not load are functions here, which import them.
"""

from __future__ import annotations

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

untraced = torch._disable_dynamo  # as `torch.compiler.disable`, which imports Dynamo
loaded_dynamo: Callable[[], Any] = partial(sys.modules.get, "torch._dynamo.eval_frame")  # by the first torch.compile
inductor = partial(import_module, "torch._inductor")


def constant_in_traces(function: Function) -> Function:
    """As `torch.compiler.assume_constant_result`, which imports Dynamo: it calls this once and does not trace it."""
    vars(function)["_dynamo_marked_constant"] = True
    return function


# Groups and what ranks share.

resolve_group: Callable[..., dist.ProcessGroup] = dist.distributed_c10d._resolve_process_group  # of a name
funcol: Any = torch.ops._c10d_functional  # functional collectives, as operators that are traced
world = partial(getattr, dist.distributed_c10d, "_world")  # pg_map: groups, their backends and stores; pg_names
devices_of_group = attrgetter("_device_types")  # which its tensors may be on
SYMMETRIC_MEMORY = "torch.distributed._symmetric_memory"  # buffers that ranks of a host share
symmetric_memory = partial(import_module, SYMMETRIC_MEMORY)
active_ddp = DistributedDataParallel._get_active_ddp_module  # the wrapper whose forward runs
comm_hooks = attrgetter("_comm_hooks")  # by which a user of DistributedDataParallel says how gradients are summed


def flatten_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Several axes as one. A function, as Dynamo of PyTorch 2.11 knows this method of a mesh alone."""
    return mesh._flatten()


@untraced  # Dynamo traces this function by itself where compiled code calls what it cannot trace
def timeout_of(group: dist.ProcessGroup, device: torch.device | None = None) -> timedelta:
    """How long collectives of the group wait."""
    options = getattr(group._get_backend(device or group._device_types[0]), "options", None)
    timeout: timedelta = getattr(options, "_timeout", None) or dist.distributed_c10d.default_pg_timeout
    return timeout


def apply_style(style: Any, module: Any, mesh: DeviceMesh) -> Any:
    """As `parallelize_module`, which refuses meshes of several axes."""
    return style._apply(module, mesh)


def meshes_of_fsdp(module: Any) -> list[DeviceMesh]:
    """Over which FSDP2 shards and sums the parameters of this module; none if it has none of its own."""
    state = module._get_fsdp_state()
    parts = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # of PyTorch 2.11
    return [part.mesh_info.mesh for part in parts if part]


def ranks_of_fsdp(module: Any) -> set[int]:
    return {rank for mesh in meshes_of_fsdp(module) for rank in mesh.mesh.flatten().tolist()}


# The dispatcher, autograd, transforms and modes.

OpOverload = torch._ops.OpOverload  # an operator
schema_of = attrgetter("_schema")  # of an operator: what it takes, and whether it writes
DispatchKey = torch._C.DispatchKey
DispatchKeySet = torch._C.DispatchKeySet  # for which kernel of an operator is next
below_autograd = torch._C._AutoDispatchBelowADInplaceOrView  # results that are views are nobody's
KEYS_BELOW_AUTOGRAD = torch._C._after_ADInplaceOrView_keyset  # of the kernels behind ours
without_keys = torch._C._ExcludeDispatchKeyGuard
num_dispatch_modes = torch._C._len_torch_dispatch_stack
profiles = torch.autograd._profiler_enabled  # whether a profiler runs
in_transform = torch._C._are_functorch_transforms_active  # whether torch.func runs
is_batched = torch._C._functorch.is_batchedtensor  # as torch.func.vmap makes them
forward_level = partial(getattr, forward_ad, "_current_level")  # of forward-mode derivatives; negative: none is open
allows_plain = torch._C._get_dtensor_allow_implicit_replication  # whether plain tensors may join DTensors
backward_number = torch._C._current_graph_task_id  # of the backward that runs in this thread; -1: none
StopRecomputation = torch.utils.checkpoint._StopRecomputationError  # a checkpoint has all that it wants: no failure
set_grad_enabled = torch._C._set_grad_enabled  # which function modes see of torch.no_grad
function_mode = torch.overrides._get_current_function_mode  # the innermost one
function_modes = torch.overrides._get_current_function_mode_stack
without_function_modes = torch._C.DisableTorchFunction
DispatchMode = _python_dispatch.TorchDispatchMode  # sees the operators that a function runs
without_modes = _python_dispatch._disable_current_modes


@contextmanager
def dispatching(*names: str) -> Iterator[None]:
    """PyTorch's dispatcher with these keys. An op runs below autograd, and where a mode sees the op also below vmap."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for name in names:
        excluded = excluded.remove(getattr(DispatchKey, name))
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        yield


# Tensors and modules.

times_written = attrgetter("_version")  # which tensors of inference do not count
local_tensor = attrgetter("_local_tensor")  # of a DTensor, without a node of autograd
spec_of_dtensor = attrgetter("_spec")  # its mesh, placements and whole shape
is_view = Tensor._is_view
FakeTensor, FakeTensorMode = torch._subclasses.FakeTensor, torch._subclasses.FakeTensorMode  # shapes without data
tree_leaves, tree_map_only = _pytree.tree_leaves, _pytree.tree_map_only  # of tensors in nested values
tree_map_with_path, MappingKey = _pytree.tree_map_with_path, _pytree.MappingKey
Convolution, Dropout = nn.modules.conv._ConvNd, nn.modules.dropout._DropoutNd  # of any number of dims
COMPILED = "_orig_mod"  # in what torch.compile made of a module, the name of this
COMPILED_CALL = "_compiled_call_impl"  # what Module.compile() has a module call; None: its own code
WRAPPED = ("_fsdp_wrapped_module", COMPILED, "_checkpoint_wrapped_module", "module")  # what wrappers put into paths


def unwrapped(path: str) -> str:
    """The path of a module or parameter without what wrappers add to it."""
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
efficient = _Passes(
    _aten._scaled_dot_product_efficient_attention, _aten._scaled_dot_product_efficient_attention_backward
)
sdpa = torch._C._nn.scaled_dot_product_attention  # what F.scaled_dot_product_attention is if nobody replaced it
to_copy = _aten._to_copy.default  # another dtype, as traces have it
multiply_each, norm_of_each = torch._foreach_mul_, torch._foreach_norm  # of many tensors in one kernel
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # its address; None in builds without CUDA

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
"""Operators that attend, and the dim of query and key that counts rows; None: it always is self-attention."""


def balances_context_parallel() -> bool:
    """Whether PyTorch's context_parallel would cut in zigzag: a switch of its own, on by default."""
    found = sys.modules.get("torch.distributed.tensor.experimental._attention")
    return getattr(getattr(found, "_cp_options", None), "enable_load_balance", True)


# flex_attention.

FLEX = "torch.nn.attention.flex_attention"
ASKS_TENSORS = ("flex_attention", "_validate_device")  # functions of that module, on the way to its operator
SLICED_MASK_MOD = "_sliced_mask_mod_error"  # the name of the mask_mod of block_mask[...]
flex_operators = partial(import_module, "torch._higher_order_ops.flex_attention")  # for which Inductor has templates
flex_lowering = partial(import_module, "torch._inductor.kernel.flex.flex_attention")  # what these write, in which dtype
indexing = partial(import_module, "torch._dynamo._trace_wrapped_higher_order_op")  # whose backward templates scatter
