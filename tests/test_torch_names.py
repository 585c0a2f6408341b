"""Private names of PyTorch, all in `cp_mesh/_torch.py`: those that could do something else without an error.

A name that is bound there and gone ends `import cp_mesh`. A name that is asked for in a call, or written as text, has
a test here, which says what else would be wrong; or it is one of `LOUD`, whose loss raises where it is used.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from inside import SOURCES, room
from ranks import group_of_one
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

ours: Any = room("_torch")
NAMES: set[str] = set()
LOUD = {
    *("_dynamo_marked_constant", "torch._inductor", "torch.distributed._symmetric_memory", "_device_types", "_spec"),
    *("_schema", "_current_level", "_local_tensor", "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks"),
    *("_backward_hooks", "torch._higher_order_ops.flex_attention", "torch._dynamo._trace_wrapped_higher_order_op"),
    "_fsdp_param_groups",
}


def of(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Lists names that are written as text and that a test is about."""
    NAMES.update(names)
    return lambda test: test


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    with group_of_one():
        yield dist.new_group([0], timeout=timedelta(seconds=77))


class Seen(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@of("torch._dynamo.eval_frame", "_orig_mod", "_compiled_call_impl")
def test_compiled_modules() -> None:
    """Else the guard does not see attention in compiled parts, and plans do not match their names."""
    module = nn.Linear(1, 1)
    compiled = torch.compile(module, backend="eager")
    assert isinstance(compiled, ours.loaded_dynamo().OptimizedModule) and not isinstance(module, type(compiled))
    assert compiled.get_submodule(ours.COMPILED) is module and ours.COMPILED in dict(compiled.named_children())
    assert getattr(module, ours.COMPILED_CALL) is None
    module.compile(backend="eager")
    vars(module)[ours.COMPILED_CALL] = lambda x: x + 7
    assert module(torch.zeros(1)).item() == 7


@of("_world")
def test_known_groups(group: dist.ProcessGroup) -> None:
    """Else inner groups of some ranks have other names on the others, and never connect."""
    assert ours.world().pg_map[group][0] == "gloo" and isinstance(ours.world().pg_map[group][1], dist.Store)
    count, before = ours.world().group_count, len(ours.world().pg_names)
    with ours.uncounted():
        made = dist.new_group([0], use_local_synchronization=True)
    assert ours.world().group_count == count and len(ours.world().pg_names) == before + 1
    dist.destroy_process_group(made)
    assert made not in ours.world().pg_map


@of("_timeout")
def test_timeout(group: dist.ProcessGroup) -> None:
    """Else first calls wait for 30 minutes, whatever the group's timeout."""
    assert ours.timeout_of(group) == ours.timeout_of(group, torch.device("cpu")) == timedelta(seconds=77)


@of("_comm_hooks")
def test_ddp(group: dist.ProcessGroup) -> None:
    """Else DDP that averages gradients is not warned of, or hooks that sum them are."""

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


@of("_comm_hook", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
def test_wrappers(group: dist.ProcessGroup) -> None:
    """Else `verify_model` does not find a parameter in the other model, and hooks of FSDP1 are warned of."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import FullyShardedDataParallel

    module = nn.Sequential(checkpoint_wrapper(nn.Linear(1, 1)))
    wrapper = FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)
    assert [ours.unwrapped(name) for name, _ in wrapper.named_parameters()] == ["0.weight", "0.bias"]
    assert not ours.comm_hooks(wrapper)
    wrapper.register_comm_hook(None, lambda state, grad: None)
    assert ours.comm_hooks(wrapper)


@of("_base")
def test_views() -> None:
    """Else labels beside a view of logits are not compared with its layout, and gradient hooks of heads are lost."""
    x = torch.ones(2)
    assert ours.is_view(x.view(-1)) and not ours.is_view(x)
    assert ours.base_of(x[1:]) is x and ours.base_of(x) is None


@of("_version")
def test_writes() -> None:
    """Else what was read of a tensor is kept after it was written to."""
    x = torch.ones(4)
    before, view = ours.times_written(x), x[:2]
    view.add_(1)
    assert ours.times_written(x) == ours.times_written(view) == before + 1


def test_function_modes() -> None:
    """Else cores do not find the guard's watch, or a torch.no_grad of a user's function is traced away."""
    assert ours.function_mode() is None and ours.function_modes() == []
    with Seen() as outer, Seen() as inner:
        assert ours.function_mode() is inner and ours.function_modes() == [outer, inner]
        with ours.without_function_modes():
            torch.ones(2) + 1
        assert not inner.seen and not outer.seen
        with torch.no_grad():
            torch.ones(2)
    assert inner.seen[0] is ours.set_grad_enabled and torch.ones in inner.seen


def test_backward_number() -> None:
    """Else a checkpoint's recomputation compares ranks again; an optimizer in a hook is not known."""
    x, seen = torch.ones(2, requires_grad=True), []
    y = x * 2
    y.register_hook(lambda gradient: seen.append(ours.backward_number()))
    for _ in range(2):
        y.sum().backward(retain_graph=True)
    assert -1 not in seen and seen[0] != seen[1] and ours.backward_number() == -1


def test_recomputation_that_stops() -> None:
    """Else the end of a recomputation is told to all ranks as a refusal."""
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


def test_hooks_of_saved_tensors() -> None:
    """Else writes in place in checkpointed blocks are not seen."""

    def pack(x: Tensor) -> Tensor:
        return x

    assert ours.saved_tensors_hooks_here(False) is None
    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        assert ours.saved_tensors_hooks_here(False) == (pack, pack)


def test_classes_of_modules() -> None:
    """Else convolutions of models, and dropout that each rank of tp would draw for itself, are not refused."""
    kinds = nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.LazyConv1d
    assert all(issubclass(kind, ours.Convolution) for kind in kinds) and not issubclass(nn.Linear, ours.Convolution)
    kinds = nn.Dropout, nn.Dropout1d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout
    assert all(isinstance(kind(0.25), ours.Dropout) and kind(0.25).p == 0.25 for kind in kinds)


def test_sdpa() -> None:
    """Else a wrapper around PyTorch's SDPA is run without a word."""
    x = torch.ones(1, 1, 2, 2)
    with Seen() as mode:
        F.scaled_dot_product_attention(x, x, x)
    assert mode.seen == [ours.sdpa]


@of("_cuda_getCurrentRawStream")
def test_raw_stream() -> None:
    """Else copies between ranks and launches of Triton do not follow the current stream."""
    assert (ours.raw_stream is None) == (torch.version.cuda is None)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()) if torch.cuda.is_available() else ():
        with torch.cuda.stream(stream):
            assert ours.raw_stream(stream.device_index) == stream.cuda_stream


@of(*ours.ATTENTION_OPS)
def test_operators_that_attend() -> None:
    """Else attention outside of the plan is not refused: the watch looks for q and k by place and by name."""
    import_module("torch.nn.attention.varlen")
    for name, dim in ours.ATTENTION_OPS.items():
        (found,) = (getattr(home, name) for home in (torch.ops.aten, torch.ops.torch_attn) if hasattr(home, name))
        given = [x.name for x in found.default._schema.arguments]
        assert given[0] == "src" if dim is None else given[:2] in (["query", "key"], ["q", "k"]), name


@of("_sliced_mask_mod_error", "_validate_device", "torch._inductor.kernel.flex.flex_attention")
def test_flex_attention() -> None:
    """Else sliced block masks run on some ranks, cores hear of no backward on CPUs, merged results are rounded."""
    from torch.nn.attention import flex_attention

    mask = flex_attention.create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 256, 256, device="cpu")
    assert mask[:, :, :1].mask_mod.__name__ == ours.SLICED_MASK_MOD != mask.mask_mod.__name__
    assert all(callable(getattr(flex_attention, name)) for name in ours.ASKS_TENSORS)
    templates = Path(torch.__file__).parent / "_inductor/kernel/flex/flex_attention.py"  # to import it takes long
    calls = (node.func for node in ast.walk(ast.parse(templates.read_text())) if isinstance(node, ast.Call))
    assert {"FixedLayout", "empty_strided"} <= {x.id for x in calls if isinstance(x, ast.Name)}


# Where the names are.

OTHERS = {
    "integrations/diffusers.py": {"_attention_backend", "_constraints", "_cp_plan", "_parallel_config"},
    "integrations/torchtitan.py": {"_owner"},
    "integrations/trainer.py": {"_shared_state", "_tp_size", "_track_num_input_tokens"},
    "kernels/flash_attn_4_package.py": {"_tile_size_bwd_sm90"},
}
"""Private names of other packages."""
ASKING = {"getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller"}


def is_private(path: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in path.split("."))


@cache
def nodes() -> dict[str, list[ast.AST]]:
    folder = Path(SOURCES)
    return {str(path.relative_to(folder)): [*ast.walk(ast.parse(path.read_text()))] for path in folder.rglob("*.py")}


def defined(file: list[ast.AST]) -> set[str]:
    """Functions, classes and attributes of our own."""
    found = {node.name for node in file if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    stores = [x for x in file if isinstance(x, ast.Name | ast.Attribute) and isinstance(x.ctx, ast.Store)]
    return found | {x.id if isinstance(x, ast.Name) else x.attr for x in stores}


def texts(file: list[ast.AST]) -> set[str]:
    strings = {x.value for x in file if isinstance(x, ast.Constant) and isinstance(x.value, str)}
    return {x for x in strings if re.fullmatch(r"[\w.]+", x) and is_private(x)}


def test_names_written_as_text() -> None:
    assert texts(nodes()["_torch.py"]) == NAMES | LOUD


def test_no_other_file_has_one() -> None:
    here = {x.attr for x in nodes()["_torch.py"] if isinstance(x, ast.Attribute)} | texts(nodes()["_torch.py"])
    files = {name: file for name, file in nodes().items() if name != "_torch.py"}
    own = {"_getframe", "_asdict", "_fields", "_replace"}.union(*map(defined, files.values())) - here
    for name, file in files.items():
        found = {x for x in texts(file) if x in NAMES | LOUD or x.startswith("torch.")}
        for node in file:
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = getattr(node, "module", None) or ""
                paths = {f"{module}.{x.name}" if module else x.name for x in node.names}
                found |= {x for x in paths if x.startswith("torch.") and is_private(x)}
            elif isinstance(node, ast.Attribute):
                holder = node.value.func if isinstance(node.value, ast.Call) else node.value
                if not (isinstance(holder, ast.Name) and holder.id in ("self", "cls", "super")):
                    found |= {node.attr} - own
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ASKING:
                found |= {x.value for x in node.args if isinstance(x, ast.Constant) and isinstance(x.value, str)} - own
        found = {x for x in found - OTHERS.get(name, set()) if is_private(x)}
        assert not found, f"{name} has {sorted(found)}: give them a name in cp_mesh/_torch.py"


def test_names_of_ours() -> None:
    """Each is imported somewhere."""
    froms = [
        x for file in nodes().values() for x in file if isinstance(x, ast.ImportFrom) and x.module == ours.__name__
    ]
    there = {x for x in vars(ours) if x in defined(nodes()["_torch.py"]) and not x.startswith("_")}
    assert {alias.name for node in froms for alias in node.names} == there - {"Function"}
