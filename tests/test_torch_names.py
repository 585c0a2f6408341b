"""Every private name of PyTorch that cp_mesh uses: what breaks without it, the releases it was seen in, and a test.

`cp_mesh/_torch.py` gives each a name of our own, and no other file has one. A release that drops a name which
is bound there at import ends `import cp_mesh` with an error that names it; one that drops another, or has a name do
something else, turns its row red here, in seconds, and the row says what else will be wrong. All rows run in this
process on the CPU; what a kernel of GPUs computes is in the tests of that kernel.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import re
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from inside import SOURCES, room
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

ours: Any = room("_torch")
FILE = Path(ours.__file__)
ALL = "2.11.0, 2.12.0, 2.13.0, 2.14.0, 2.14.1"
"""2.13.0 and 2.14.1 ran these tests; in the others the name was found in a wheel: in its sources, stubs or library."""
ROWS: dict[str, tuple[str, str, Callable[..., None]]] = {}
"""By the name as `_torch.py` has it, with its module where that is known: what breaks, releases, the test."""
ATEN = "torch.ops.aten."


def row(name: str, breaks: str, seen: str = ALL) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def add(test: Callable[..., None]) -> Callable[..., None]:
        assert name not in ROWS
        ROWS[name] = breaks, seen, test
        return test

    return add


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    """Of this rank alone, with a timeout of its own."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore(), timeout=timedelta(seconds=77))
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def mesh(group: dist.ProcessGroup) -> DeviceMesh:
    return init_device_mesh("cpu", (1, 1), mesh_dim_names=("cp_ring", "cp_ulysses"))


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Operators(ours.DispatchMode):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def arguments(operator: Any) -> list[str]:
    """Names of an operator's arguments; of a function its parameters."""
    if isinstance(operator, torch._ops.OpOverloadPacket):
        return [x.name for x in operator.default._schema.arguments]
    return [*inspect.signature(operator).parameters]


# torch.compile.


@row("torch._disable_dynamo", "plans and refusals are traced: graph breaks; `import cp_mesh` takes seconds more")
def check_untraced() -> None:
    compiled = []

    @ours.untraced
    def note(x: Tensor) -> Tensor:
        compiled.append(torch.compiler.is_compiling())
        return x + 1

    assert torch.compile(lambda x: note(x) * 2, backend="eager")(torch.ones(2)).tolist() == [4, 4]
    assert compiled == [False]


@row("_dynamo_marked_constant", "fullgraph fails where groups are looked up and refusals are told while Dynamo traces")
def check_constant_in_traces() -> None:
    calls = []

    @ours.constant_in_traces
    def length(name: str) -> int:
        calls.append(sys._getframe().f_code.co_name)  # which Dynamo cannot trace
        return len(name)

    compiled = torch.compile(lambda x: x * length("four"), backend="eager", fullgraph=True)
    assert [compiled(torch.ones(1)).item() for _ in range(3)] == [4, 4, 4]
    assert len(calls) == 1


@row(
    "torch._dynamo.eval_frame",
    "the watch does not know compiled parts of models, or its modes are compiled alone",
)
def check_loaded_dynamo() -> None:
    module, compiled_alone = nn.Linear(1, 1), list[bool]()
    compiled = torch.compile(module, backend="eager")
    assert isinstance(compiled, ours.loaded_dynamo().OptimizedModule) and not isinstance(module, type(compiled))

    def inner(x: Tensor) -> Tensor:
        compiled_alone.append(torch.compiler.is_compiling())
        return x + 1

    def outer(x: Tensor) -> Tensor:
        for _ in range(2):
            torch._dynamo.graph_break()  # for which the whole function runs as it is
        return inner(x)

    ours.loaded_dynamo().skip_code(inner.__code__)
    assert torch.compile(outer, backend="eager")(torch.ones(1)).item() == 2
    assert compiled_alone == [False]


@row("_orig_mod", "names of parameters and plans do not match those of compiled models")
def check_name_in_a_compiled_module() -> None:
    module = nn.Linear(1, 1)
    compiled = torch.compile(module, backend="eager")
    assert compiled.get_submodule(ours.COMPILED) is module
    assert ours.COMPILED in dict(compiled.named_children()) and ours.COMPILED not in dict(module.named_children())


@row("_compiled_call_impl", "attention in a model that Module.compile() compiled is not seen by the guard")
def check_compiled_in_place() -> None:
    module = nn.Linear(1, 1)
    assert getattr(module, ours.COMPILED_CALL) is None
    module.compile(backend="eager")
    assert callable(vars(module)[ours.COMPILED_CALL])
    vars(module)[ours.COMPILED_CALL] = lambda x: x + 7
    assert module(torch.zeros(1)).item() == 7


@row("torch._inductor", "kernel='flex' has no programs")
def check_compile_graph() -> None:
    assert arguments(ours.inductor().compile)[:3] == ["gm", "example_inputs", "options"]


# Groups and what ranks share.


@row("torch.distributed.distributed_c10d._resolve_process_group", "no call: ops carry the group by its name")
def check_group_of_a_name(group: dist.ProcessGroup) -> None:
    assert ours.resolve_group(group.group_name) is group


@row("torch.ops._c10d_functional", "no call over functional collectives; sums of losses and gradients")
def check_functional_collectives(group: dist.ProcessGroup) -> None:
    x, name = torch.arange(4.0), group.group_name
    started = (
        ours.funcol.all_reduce(x, "sum", name),
        ours.funcol.all_gather_into_tensor(x, 1, name),
        ours.funcol.reduce_scatter_tensor(x, "sum", 1, name),
        ours.funcol.all_to_all_single(x, [4], [4], name),
    )
    assert all(torch.equal(ours.funcol.wait_tensor(y), x) and y is not x for y in started)


@row("_world", "ranks cannot compare what they are given, or make inner groups that have one name on all of them")
def check_known_groups(group: dist.ProcessGroup) -> None:
    before, (backend, store) = len(ours.world().pg_names), ours.world().pg_map[group]
    assert backend == "gloo" and isinstance(store, dist.Store)
    count = ours.world().group_count
    with ours.uncounted():
        made = dist.new_group([0], use_local_synchronization=True)
    assert len(ours.world().pg_names) == before + 1 and made in ours.world().pg_map
    assert ours.world().group_count == count
    dist.destroy_process_group(made)
    assert made not in ours.world().pg_map


@row("_flatten", "method='hybrid' over a mesh of two axes")
def check_flattened_mesh(mesh: DeviceMesh) -> None:
    flat = ours.flatten_mesh(mesh)
    assert flat.ndim == 1 and flat.get_group().size() == 1 and ours.flatten_mesh(mesh).get_group() is flat.get_group()


@row("_device_types", "norms over NCCL of gradients that FSDP2 keeps on the host")
@row("_get_backend", "first calls and barriers do not wait as long as the group does")
@row("_timeout", "first calls and barriers wait for 30 minutes, whatever the group's timeout")
def check_timeout(group: dist.ProcessGroup) -> None:
    assert torch.device("cpu") in ours.devices_of_group(group)
    assert ours.timeout_of(group) == ours.timeout_of(group, torch.device("cpu")) == timedelta(seconds=77)


@row("torch.distributed._symmetric_memory", "transport='symmetric_memory'")
def check_symmetric_memory() -> None:
    assert arguments(ours.symmetric_memory().rendezvous) == ["tensor", "group"]
    assert {"dtype", "device"} <= {*arguments(ours.symmetric_memory().empty)}


@row("torch.nn.parallel.DistributedDataParallel._get_active_ddp_module", "DDP that averages gradients is not warned of")
@row("_comm_hooks", "gradients that a hook of DDP sums are warned of")
def check_wrapper_whose_forward_runs(group: dist.ProcessGroup) -> None:
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(ours.active_ddp())
            return super().forward(x)

    seen: list[Any] = []
    wrapper = nn.parallel.DistributedDataParallel(Model(1, 1))
    wrapper(torch.ones(1))
    assert seen == [wrapper] and ours.active_ddp() is None and not ours.comm_hooks(wrapper)
    wrapper.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
    assert ours.comm_hooks(wrapper)


@row("_apply", "no style is applied, cp_mesh's own ones neither")
def check_application_of_a_style(mesh: DeviceMesh) -> None:
    class Style(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            given.append((module, device_mesh))
            return module

    given: list[Any] = []
    style, module = Style(), nn.Linear(1, 1)
    parallelize_module(module, mesh["cp_ring"], style)
    ours.apply_style(style, module, mesh["cp_ring"])
    assert given == [(module, mesh["cp_ring"])] * 2


@row("_get_fsdp_state", "over which ranks FSDP2 reduces is not known: gradients of too few or too many pass")
@row("_fsdp_param_groups", "as of _get_fsdp_state", "2.12.0, 2.13.0, 2.14.0")
@row("_fsdp_param_group", "as of _get_fsdp_state, in PyTorch 2.11")
def check_ranks_of_fsdp(mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import fully_shard

    outer = fully_shard(nn.Sequential(fully_shard(nn.Linear(1, 1), mesh=mesh["cp_ring"])), mesh=mesh["cp_ring"])
    assert ours.ranks_of_fsdp(outer[0]) == {0} and ours.ranks_of_fsdp(outer) == set()


# The dispatcher, autograd, transforms and modes.


@row("torch._ops.OpOverload", "kernel='flex' does not tell operators from functions in the graphs that it changes")
def check_overload() -> None:
    assert isinstance(torch.ops.aten.add.Tensor, ours.OpOverload)
    assert torch.ops.aten.add.Tensor.overloadpacket is torch.ops.aten.add
    assert not isinstance(torch.ops.aten.add, ours.OpOverload)


@row("_schema", "functions of users that write are not refused; kernel='flex' takes literals for tensors")
def check_schema() -> None:
    assert ours.schema_of(torch.ops.aten.add_.Tensor).is_mutable
    schema = ours.schema_of(torch.ops.aten.add.Tensor)
    assert not schema.is_mutable and [str(x.type) for x in schema.arguments] == ["Tensor", "Tensor", "number"]


@row("torch._C.DispatchKey", "no op is registered")
@row("torch._C.DispatchKeySet", "no op is registered")
@row("torch._C._after_ADInplaceOrView_keyset", "ops run their own autograd again, for ever")
def check_keys() -> None:
    keys = ours.DispatchKeySet(ours.DispatchKey.AutogradCPU) | ours.DispatchKeySet(ours.DispatchKey.CPU)
    assert keys.highestPriorityTypeId() == ours.DispatchKey.AutogradCPU
    assert (keys & ours.KEYS_BELOW_AUTOGRAD).highestPriorityTypeId() == ours.DispatchKey.CPU


@row("torch._C._ExcludeDispatchKeyGuard", "ops under torch.autocast call themselves for ever")
def check_without_keys() -> None:
    x = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        with ours.without_keys(ours.DispatchKeySet(ours.DispatchKey.AutocastCPU)):
            assert (x @ x).dtype == torch.float32


@row("torch._C._AutoDispatchBelowADInplaceOrView", "results of ops that are views are refused to who writes to them")
@row("torch._C._dispatch_tls_local_exclude_set", "functions of users have no gradient inside of ops")
@row("torch._C._dispatch_tls_local_include_set", "functions of users have no gradient inside of ops")
@row("torch._C._ForceDispatchKeyGuard", "functions of users have no gradient inside of ops")
def check_below_autograd_and_back() -> None:
    x = torch.ones(2, requires_grad=True)
    with ours.below_autograd():
        below = (x * 2).view(-1)
        with ours.dispatching("AutogradCPU", "AutogradCUDA", "ADInplaceOrView"):
            back = (x * 2).view(-1)
        assert (x * 2).grad_fn is None
    assert below.grad_fn is None and not ours.is_view(below)
    assert back.grad_fn is not None and ours.is_view(back)


@row("torch.Tensor._is_view", "FSDP2 warns of each output of a VocabParallelHead, or a gradient hook of it is lost")
def check_view() -> None:
    x = torch.ones(2)
    assert ours.is_view(x.view(-1)) and not ours.is_view(x)


@row("torch._C._len_torch_dispatch_stack", "modes, such as FlopCounterMode, do not see operators, or each call is slow")
@row("torch.utils._python_dispatch.TorchDispatchMode", "functions of users are not traced: no score_mod, no mask_mod")
@row("torch.utils._python_dispatch._disable_current_modes", "selective checkpoints count what tracing a function runs")
def check_dispatch_modes() -> None:
    assert ours.num_dispatch_modes() == 0
    with Operators() as outer:
        with ours.without_modes():
            torch.ones(2)
            assert ours.num_dispatch_modes() == 0
        assert ours.num_dispatch_modes() == 1 and not outer.seen
        torch.ones(2)
    assert outer.seen == [torch.ops.aten.ones.default]


@row("torch.autograd._profiler_enabled", "profiles of eager calls do not have the name of the op")
def check_profilers() -> None:
    assert not ours.profiles()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert ours.profiles()
    assert not ours.profiles()


@row("torch._C._are_functorch_transforms_active", "derivatives of torch.func are wrong where they were refused")
def check_transforms() -> None:
    assert not ours.in_transform()
    seen = []
    torch.func.grad(lambda x: seen.append(ours.in_transform()) or x.sum())(torch.ones(2))
    torch.func.vmap(lambda x: seen.append(ours.in_transform()) or x)(torch.ones(2))
    assert seen == [True, True]


@row("torch._C._functorch.is_batchedtensor", "calls under torch.func.vmap are refused with a message of PyTorch's")
def check_batched() -> None:
    seen = []
    torch.func.vmap(lambda x: seen.append(ours.is_batched(x)) or x)(torch.ones(2))
    assert seen == [True] and not ours.is_batched(torch.ones(2))


@row("_current_level", "tangents of forward-mode derivatives are dropped where they were refused")
def check_forward_level() -> None:
    assert ours.forward_level() == -1
    with forward_ad.dual_level():
        assert ours.forward_level() == 0


@row(
    "torch._C._get_dtensor_allow_implicit_replication", "a caller's implicit_replication ends with a call of attention"
)
def check_plain_tensors_beside_dtensors() -> None:
    assert not ours.allows_plain()
    with implicit_replication():
        assert ours.allows_plain()


@row(
    "torch._C._current_graph_task_id",
    "a checkpoint's recomputation compares ranks again; an optimizer in a hook is not known",
)
def check_backward() -> None:
    x, seen = torch.ones(2, requires_grad=True), []

    y = x * 2
    y.register_hook(lambda gradient: seen.append(ours.backward_number()))
    for _ in range(2):
        y.sum().backward(retain_graph=True)
    first, second = seen
    assert -1 not in (first, second) and first != second
    assert ours.backward_number() == -1


@row("torch.utils.checkpoint._StopRecomputationError", "the end of a recomputation is told to all ranks as a refusal")
def check_recomputation_that_stops() -> None:
    ends = []

    def block(x: Tensor) -> Tensor:
        y = x.sin()
        try:
            return (y * y).cos() + 1
        except ours.StopRecomputation:
            ends.append("stopped")
            raise

    checkpoint(block, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert ends == ["stopped"]


@row("torch.utils.checkpoint._is_compiling", "make_fx of a model with checkpointed blocks raises")
def check_traces_of_checkpoints() -> None:
    found = []

    def block(x: Tensor) -> Tensor:
        found.append(ours.traces_checkpoint())
        return x.sin()

    from torch.fx.experimental.proxy_tensor import make_fx

    make_fx(block)(block(torch.ones(2)))
    assert found == [False, True]


@row("torch.fx.graph_module._loader.eval_cache", "each new function of flex_attention keeps 2 KB")
def check_text_of_graphs() -> None:
    from torch.fx import graph_module, symbolic_trace

    module = symbolic_trace(torch.nn.Identity())
    name = type(module).forward.__code__.co_filename
    assert name in linecache.cache and name in graph_module._loader.eval_cache
    assert ours.without_source(module)(2) == 2
    assert name not in linecache.cache and name not in graph_module._loader.eval_cache


@row("torch._C._autograd._top_saved_tensors_default_hooks", "writes in place in checkpointed blocks are not seen")
def check_innermost_hooks_of_saved_tensors() -> None:
    def pack(x: Tensor) -> Tensor:
        return x

    assert ours.saved_tensors_hooks_here(False) is None
    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        assert ours.saved_tensors_hooks_here(False) == (pack, pack)


@row("torch._C._set_grad_enabled", "torch.no_grad in a function of a user is traced away: a gradient is wrong")
@row("torch.overrides._get_current_function_mode", "the guard's watch is not found by cores")
@row("torch.overrides._get_current_function_mode_stack", "functions of users are traced under modes that change them")
@row("torch._C.DisableTorchFunction", "the watch over a forward sees the guard's own look at labels")
def check_function_modes() -> None:
    assert ours.function_mode() is None and ours.function_modes() == []
    with Functions() as outer, Functions() as inner:
        assert ours.function_mode() is inner and ours.function_modes() == [outer, inner]
        with ours.without_function_modes():
            torch.ones(2) + 1
        assert not inner.seen and not outer.seen
        with torch.no_grad():
            torch.ones(2)
    assert inner.seen[0] is ours.set_grad_enabled and torch.ones in inner.seen


# Tensors and modules.


@row("_base", "labels beside a view of a model's output are not compared with its layout")
def check_base_of() -> None:
    x = torch.zeros(4)
    assert ours.base_of(x) is None and ours.base_of(x[1:]) is x


@row("_version", "what was read of a tensor is kept after it was written to")
def check_times_written() -> None:
    x = torch.ones(4)
    before, view = ours.times_written(x), x[:2]
    view.add_(1)
    assert ours.times_written(x) == ours.times_written(view) == before + 1


@row("_local_tensor", "a DTensor that a function of a user makes is not refused: its gradient is lost")
@row("_spec", "gradients of linears over tp are not DTensors as their parameters are")
def check_parts_of_a_dtensor(mesh: DeviceMesh) -> None:
    local = torch.ones(2, 3)
    x = DTensor.from_local(local, mesh["cp_ring"], (Replicate(),))
    assert ours.local_tensor(x).data_ptr() == local.data_ptr() and type(ours.local_tensor(x)) is Tensor
    spec = ours.spec_of_dtensor(x)
    assert (spec.mesh, spec.placements, spec.shape, spec.stride) == (mesh["cp_ring"], (Replicate(),), (2, 3), (3, 1))
    again = DTensor(local, spec, requires_grad=False)
    assert again.placements == x.placements and again.shape == x.shape


@row("torch._subclasses.FakeTensor", "calls on tensors without data ask for their values")
@row("torch._subclasses.FakeTensorMode", "kernel='flex' has no programs, FlashAttention-4 no shared memory of a launch")
def check_fake_tensors() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with ours.FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True) as mode:
        x = mode.from_tensor(torch.ones(2, 3))
        assert isinstance(x, ours.FakeTensor) and (x @ x.mT).shape == (2, 2)


@row("torch.utils._pytree.tree_leaves", "tensors in nested arguments are not found")
@row("torch.utils._pytree.tree_flatten", "a tiled module does not find its rows", "2.13.0")
@row("torch.utils._pytree.tree_unflatten", "a tiled module returns a list", "2.13.0")
@row("torch.utils._pytree.tree_map_only", "DTensors that functions of users read are not traced")
@row("torch.utils._pytree.tree_map_with_path", "ShardedSequence.shard of nested batches")
@row("torch.utils._pytree.MappingKey", "ShardedSequence.shard pads labels with zeros")
def check_trees() -> None:
    tree = {"labels": [1, (2.0, None)], "rest": 3}
    assert ours.tree_leaves(tree) == [1, 2.0, None, 3]
    assert ours.tree_map_only(int, lambda x: -x, tree) == {"labels": [-1, (2.0, None)], "rest": -3}
    leaves, form = ours.tree_flatten(tree)
    assert leaves == [1, 2.0, None, 3] and ours.tree_unflatten(leaves, form) == tree
    paths: list[Any] = []
    ours.tree_map_with_path(lambda path, leaf: paths.append(path), tree)
    assert [path[0].key for path in paths] == ["labels"] * 3 + ["rest"]
    assert all(isinstance(path[0], ours.MappingKey) for path in paths)


@row("_forward_pre_hooks", "hooks in a tiled module are not refused: they see tiles", "2.13.0")
@row("_forward_hooks", "hooks in a tiled module are not refused: outputs that they keep have no gradient", "2.13.0")
@row("_backward_pre_hooks", "hooks in a tiled module are not refused: they see tiles", "2.13.0")
@row("_backward_hooks", "hooks in a tiled module, or of its weights, are not refused: they run twice", "2.13.0")
def check_hooks() -> None:
    module, kinds = (
        nn.Linear(1, 1),
        ("forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"),
    )
    for i, kind in enumerate(kinds):
        getattr(module, f"register_{kind}")(print)
        assert [[*hooks.values()] for hooks in ours.hooks_of_module(module)] == [[print]] * (i + 1) + [[]] * (3 - i)
    assert not ours.hooks_of_tensor(module.weight)
    module.weight.register_hook(print)
    assert [*ours.hooks_of_tensor(module.weight).values()] == [print]


@row("torch.nn.modules.conv._ConvNd", "models of Transformers that mix rows by convolutions are not refused")
@row("torch.nn.modules.dropout._DropoutNd", "dropout that each rank of tp would draw for itself is not refused")
def check_classes_of_modules() -> None:
    kinds = nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.LazyConv1d
    assert all(issubclass(kind, ours.Convolution) for kind in kinds) and not issubclass(nn.Linear, ours.Convolution)
    made = [kind(0.25) for kind in (nn.Dropout, nn.Dropout1d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)]
    assert all(isinstance(module, ours.Dropout) and module.p == 0.25 for module in made)


@row("_checkpoint_wrapped_module", "verify_model does not find a checkpointed parameter in the other model")
def check_checkpointed_module() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    wrapper = checkpoint_wrapper(nn.Linear(1, 1))
    assert [name for name, _ in wrapper.named_children()] == ["_checkpoint_wrapped_module"]
    assert "_checkpoint_wrapped_module" in ours.WRAPPED


@row("_fsdp_wrapped_module", "verify_model does not find a parameter under FSDP1 in the other model")
@row("_comm_hook", "gradients that a hook of FSDP1 sums are warned of")
def check_name_under_fsdp1(group: dist.ProcessGroup) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrapper = FullyShardedDataParallel(nn.Linear(1, 1), device_id=torch.device("cpu"), use_orig_params=True)
    assert [name for name, _ in wrapper.named_children()] == ["_fsdp_wrapped_module"] and not ours.comm_hooks(wrapper)
    wrapper.register_comm_hook(None, lambda state, grad: None)
    assert ours.comm_hooks(wrapper)
    assert "_fsdp_wrapped_module" in ours.WRAPPED


# Kernels of PyTorch.

QKV = ["query", "key", "value"]
NOT_RUN = "run by the tests of GPUs; here its arguments are compared"


@row(f"{ATEN}_scaled_dot_product_flash_attention_for_cpu", "kernel='cpu_flash'")
@row(f"{ATEN}_scaled_dot_product_flash_attention_for_cpu_backward", "kernel='cpu_flash'")
def check_attention_on_the_cpu() -> None:
    q, k, v = (torch.randn(1, 2, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    scores = (0.5 * q @ k.mT).masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -torch.inf)
    out, dout = scores.softmax(-1) @ v, torch.randn(1, 2, 5, 8, dtype=torch.float64)
    with torch.no_grad():
        got, lse = ours.cpu_flash.forward(q, k, v, 0.0, True, scale=0.5)
        grads = ours.cpu_flash.backward(dout, q, k, v, got, lse, 0.0, True, scale=0.5)
    want = torch.autograd.grad(out, (q, k, v), dout)
    torch.testing.assert_close((got, lse, *grads), (out, scores.logsumexp(-1), *want), check_stride=False)


@row(f"{ATEN}_scaled_dot_product_flash_attention", f"kernel='fa2'; {NOT_RUN}")
@row(f"{ATEN}_scaled_dot_product_flash_attention_backward", f"kernel='fa2'; {NOT_RUN}")
@row(f"{ATEN}_scaled_dot_product_cudnn_attention", f"kernel='cudnn'; {NOT_RUN}")
@row(f"{ATEN}_scaled_dot_product_cudnn_attention_backward", f"kernel='cudnn'; {NOT_RUN}")
def check_attention_on_gpus() -> None:
    of_backward = ["grad_out", *QKV]
    assert arguments(ours.flash.forward) == [*QKV, "dropout_p", "is_causal", "return_debug_mask", "scale"]
    assert arguments(ours.flash.backward) == [
        *(*of_backward, "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"),
        *("philox_seed", "philox_offset", "scale"),
    ]
    assert arguments(ours.cudnn.forward) == [
        *(*QKV, "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal", "return_debug_mask", "scale")
    ]
    assert arguments(ours.cudnn.backward) == [
        *(*of_backward, "out", "logsumexp", "philox_seed", "philox_offset", "attn_bias", "cum_seq_q", "cum_seq_k"),
        *("max_q", "max_k", "dropout_p", "is_causal", "scale"),
    ]


@row("torch._C._nn.scaled_dot_product_attention", "a wrapper around PyTorch's SDPA is run without a word")
def check_sdpa() -> None:
    assert F.scaled_dot_product_attention is ours.sdpa
    x = torch.ones(1, 1, 2, 2)
    with Functions() as mode:
        F.scaled_dot_product_attention(x, x, x)
    assert mode.seen == [ours.sdpa]


@row(f"{ATEN}_to_copy.default", "functions of users that cast: traces are not what kernel='flex' reads")
def check_another_dtype() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(lambda x: x.double())(torch.ones(2)).graph
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [ours.to_copy]
    assert ours.to_copy(torch.ones(2), dtype=torch.int64).tolist() == [1, 1]


@row("torch._foreach_mul_", "clip_grad_norm(foreach=True)")
@row("torch._foreach_norm", "clip_grad_norm(foreach=True)")
def check_many_tensors_at_once() -> None:
    xs = [torch.full((4,), 2.0, dtype=torch.bfloat16), torch.ones(9, dtype=torch.bfloat16)]
    norms = ours.norm_of_each(xs, 2.0, dtype=torch.float32)
    assert [x.item() for x in norms] == [4, 3] and norms[0].dtype == torch.float32
    ours.multiply_each(xs, torch.tensor(0.5))
    assert xs[0].tolist() == [1] * 4


@row("_cuda_getCurrentRawStream", "copies between ranks and launches of Triton on GPUs")
def check_raw_stream() -> None:
    if torch.cuda.is_available():
        for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                assert ours.raw_stream(stream.device_index) == stream.cuda_stream
    else:
        assert (ours.raw_stream is None) == (torch.version.cuda is None)


def check_operators_that_attend(name: str) -> None:
    import_module("torch.nn.attention.varlen")
    (found,) = (getattr(home, name) for home in (torch.ops.aten, torch.ops.torch_attn) if hasattr(home, name))
    if ours.ATTENTION_OPS[name] is None:
        assert arguments(found)[0] == "src"
    else:  # where the watch looks for them, by place and by name
        assert arguments(found)[:2] in (["query", "key"], ["q", "k"])


for operator in ours.ATTENTION_OPS:
    row(operator, "attention outside of the plan is not refused")(partial(check_operators_that_attend, operator))


# flex_attention.


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


@row("_sliced_mask_mod_error", "a slice of a block mask runs until PyTorch refuses it, on some ranks")
def check_slice_of_a_mask() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    mask = create_block_mask(causal, 1, 1, 256, 256, device="cpu")
    assert mask[:, :, :1].mask_mod.__name__ == ours.SLICED_MASK_MOD != mask.mask_mod.__name__


@row("_validate_device", "a core that calls PyTorch's flex_attention on CPUs hears of no backward there, and no more")
def check_what_asks_tensors() -> None:
    from torch.nn.attention import flex_attention

    assert all(inspect.isfunction(getattr(flex_attention, name)) for name in ours.ASKS_TENSORS)


@row("torch._higher_order_ops.flex_attention", "kernel='flex'")
def check_operators_of_flex_attention() -> None:
    of_mask = ["block_mask", "scale", "kernel_options", "score_mod_other_buffers", "mask_mod_other_buffers"]
    forward, backward = (arguments(type(x).__call__)[1:] for x in (
        ours.flex_operators().flex_attention, ours.flex_operators().flex_attention_backward
    ))  # fmt: skip
    assert forward == [*QKV, "score_mod", *of_mask]
    assert backward == [
        *QKV, "out", "logsumexp", "grad_out", "grad_logsumexp", "fw_graph", "joint_graph", *of_mask
    ]  # fmt: skip


@row("torch._inductor.kernel.flex.flex_attention", "kernel='flex' rounds what it merges to the dtype of q")
def check_what_templates_write() -> None:
    """Read, not imported, which takes long; test_flex_kernel.py has it in use."""
    path = Path(torch.__file__).parent / "_inductor/kernel/flex/flex_attention.py"
    called = {node.func.id for node in ast.walk(ast.parse(path.read_text())) if is_call_of_name(node)}
    assert {"FixedLayout", "empty_strided"} <= called


def is_call_of_name(node: Any) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)


@row("torch._dynamo._trace_wrapped_higher_order_op", "kernel='flex' has no gradients of tensors that functions read")
def check_indexing() -> None:
    x, i = torch.arange(6.0).reshape(2, 3).requires_grad_(), torch.tensor(1)
    found = ours.indexing().mod_index(x, [i, torch.tensor(2)])
    found.backward(torch.tensor(7.0))
    assert found.item() == 5 and x.grad.tolist() == [[0, 0, 0], [0, 0, 7]]


# The table is complete.

NAMED_TUPLE = {"_asdict", "_fields", "_replace"}
OTHERS = {
    "integrations/diffusers.py": {"_attention_backend", "_constraints", "_cp_plan", "_parallel_config"},
    "integrations/trainer.py": {"_shared_state", "_tp_size", "_track_num_input_tokens"},
    "kernels/flash_attn_4_package.py": {"_tile_size_bwd_sm90"},
}
"""Private names of other packages."""
BARE = {name.rpartition(".")[2] for name in ROWS}
ASKING = {"getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller"}


def is_private(path: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in path.split("."))


def private_names(tree: ast.Module) -> tuple[set[str], set[str], set[str]]:
    """Names with an underscore in front, in them or in their module: imported from PyTorch, read as attributes, written
    as strings. Of attributes that begin at a module of PyTorch it is the whole name."""
    aliases: dict[str, str] = {}

    def path_of(node: ast.AST) -> str:
        if isinstance(node, ast.Name):
            return aliases.get(node.id, "")
        start = path_of(node.value) if isinstance(node, ast.Attribute) else ""
        return f"{start}.{node.attr}" if start and isinstance(node, ast.Attribute) else ""

    imported, read, written, inside = set[str](), set[str](), set[str](), set[ast.AST]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [x for x in node.names if x.name.partition(".")[0] == "torch"]
            aliases |= {x.asname or "torch": x.name if x.asname else "torch" for x in names}
            imported |= {x.name for x in names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            aliases |= {x.asname or x.name: f"{node.module}.{x.name}" for x in node.names}
            imported |= {f"{node.module}.{x.name}" for x in node.names}
    for node in ast.walk(tree):  # what holds an attribute comes before it
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and (path := path_of(node.value)):
            aliases.setdefault(node.targets[0].id, path)
        elif isinstance(node, ast.Attribute):
            inside.add(node.value)
            holder = node.value.func if isinstance(node.value, ast.Call) else node.value
            own = isinstance(holder, ast.Name) and holder.id in ("self", "cls", "super")
            path = path_of(node)
            if node not in inside and not own and path not in sys.modules:
                read.add(path or node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.]+", node.value):
            written.add(node.value)
    return tuple({*filter(is_private, names)} for names in (imported, read, written))  # type: ignore[return-value]


@cache
def trees() -> dict[str, ast.Module]:
    folder = Path(SOURCES)
    return {str(path.relative_to(folder)): ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py"))}


def defined(tree: ast.Module) -> set[str]:
    """Functions, classes and attributes of our own."""
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    stores = [x for x in ast.walk(tree) if isinstance(x, ast.Name | ast.Attribute) and isinstance(x.ctx, ast.Store)]
    return found | {x.id if isinstance(x, ast.Name) else x.attr for x in stores}


def test_the_table_has_every_name() -> None:
    _, read, written = private_names(trees()[FILE.name])
    assert read | written == {*ROWS}
    assert all(breaks and "2.13.0" in seen for breaks, seen, _ in ROWS.values())


def test_no_other_file_has_one() -> None:
    files = {name: tree for name, tree in trees().items() if name != FILE.name}
    own = {"_getframe", *NAMED_TUPLE}.union(*map(defined, files.values())) - BARE
    for name, tree in files.items():
        imported, read, written = private_names(tree)
        asked = {
            x.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ASKING
            for x in node.args
            if isinstance(x, ast.Constant) and isinstance(x.value, str) and is_private(x.value)
        }
        named = {x for x in written if x in ROWS or x.startswith("torch.")}
        found = imported | (read | asked) - own - OTHERS.get(name, set()) | named
        assert not found, f"{name} has {sorted(found)}: give them a name in cp_mesh/_torch.py"


def test_names_of_ours() -> None:
    """Each is imported somewhere, and what is imported is there."""
    nodes = [node for tree in trees().values() for node in ast.walk(tree)]
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == ours.__name__]
    there = {name for name in vars(ours) if name in defined(trees()[FILE.name]) and not name.startswith("_")}
    assert {alias.name for node in froms for alias in node.names} == there - {"Function"}


@pytest.mark.parametrize("name", ROWS)
def test_private_name(name: str, request: pytest.FixtureRequest) -> None:
    breaks, seen, test = ROWS[name]
    given = {x: request.getfixturevalue(x) for x in arguments(test)}
    try:
        test(**given)
    except Exception as error:
        raise AssertionError(f"{name} of PyTorch {torch.__version__} is another (seen in {seen}): {breaks}") from error
