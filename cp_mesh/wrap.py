"""Replace the forward of one module so that copies of the module have the replacement too.

A function set as ``module.forward`` is bound to the module: a shallow copy would run on the original's attributes, and
an unpickled module would run without the function. So the module's class is replaced, as FSDP2 does, by a subclass of
the same name. Its forward looks up the replacement in the instance on which it is called.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import sys
from collections.abc import Callable, Mapping
from functools import partial, partialmethod
from types import CellType, FrameType, FunctionType
from typing import Any, TypeGuard

import torch
import torch.utils.checkpoint
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement
from torch.distributed.tensor.parallel import ParallelStyle

from cp_mesh._torch import COMPILED
from cp_mesh.errors import UnsupportedError, describe, refuse

FILE = __file__
NEW: Any = vars(copyreg)["__newobj__"]  # pickle's default way to make an object
STYLE = "style"  # keys of `replace_forward`; this one: a style over cp
INPUT, OUTPUT = "input", "output"  # a module may have these beside a style
LINEAR = "linear"  # a style over tp; a module may have it beside one over cp
TILES = "tiles"  # computes few rows at a time; a module may have it beside one over tp
CHECKPOINT = "checkpoint"  # keeps a block's input; a block may have it beside one over tp
WATCH = "watch"  # checks the forward of a compiled part while it is traced
_ALL = "_cp_mesh"  # by key: the replacement, and the ``forward`` that was set on the instance before, or None


def with_names(own: FunctionType, names: dict[str, Any], cells: tuple[CellType, ...] | None = None) -> FunctionType:
    """The function with another file around it, and other ``cells`` of its closure if these are given."""
    made = FunctionType(own.__code__, names, own.__name__, own.__defaults__, cells or own.__closure__)
    made.__kwdefaults__ = own.__kwdefaults__
    return made


def asks_for(function: Any, *names: str) -> TypeGuard[FunctionType]:
    """Whether ``function`` is a plain Python function that reads these names."""
    return isinstance(function, FunctionType) and {*names} <= {*function.__code__.co_names}


class Replacement:
    """The function that replaces a module's forward. Copies of the module share it, as a style holds process groups.

    ``where``: the name of the module in the model that `parallelize` was given.
    """

    def __init__(self, name: str, run: Callable[..., Any]) -> None:
        self.name, self.run, self.where = name, run, ""

    def __copy__(self) -> Replacement:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Replacement:
        return self

    def __reduce__(self) -> Any:
        return type(None), ()  # None after unpickling; only watched modules can be pickled


def replace_forward(module: nn.Module, key: str, name: str, run: Callable[..., Any]) -> None:
    """Make ``module(*args, **kwargs)`` run ``run(module, forward, *args, **kwargs)``.

    Args:
        module: gets another class, in place. A ``forward`` set on the instance is removed and passed to ``run``.
        key: `STYLE`, `INPUT`, `OUTPUT`, `LINEAR`, `TILES`, `CHECKPOINT` or `WATCH`; a module has at most one of each.
        name: of the replacement, for messages.
        run: takes the module, its own forward, and the arguments of the call.
    """
    of_class: dict[str, Any] = getattr(type(module), _ALL, {})
    found = Replacement(name, run), module.__dict__.pop("forward", None)
    module.__dict__[_ALL] = of_class | module.__dict__.get(_ALL, {}) | {key: found}  # shallow copies keep the old one
    if key not in of_class:
        module.__class__ = _subclass(type(module), key)


def replaced(module: nn.Module, key: str) -> Replacement | None:
    """The module's replacement of this key, or None."""
    found: Replacement | None = module.__dict__.get(_ALL, {}).get(key, (None,))[0]
    return found


class Style(ParallelStyle):
    """A style of this library; `parallelize` checks all modules of a plan before it applies the first style.

    A module then calls `run` with what `bind` returned, the module, its own forward, and the arguments of the call.
    """

    key = STYLE
    placements: Mapping[str, Placement] = {}  # of parameters that it shards, by name
    alone = ""  # of a style whose module must have no other one but over tp: what to do instead
    run: Callable[..., Any]

    def parts(self, module: nn.Module) -> list[nn.Module]:
        """The modules whose forward the style replaces."""
        return [module]

    def check(self, module: nn.Module, mesh: DeviceMesh, where: str = "") -> None:
        """Refuse a module that the style cannot be applied to, and change nothing. ``where``: its name in the model."""
        name = type(self).__name__
        if mesh.ndim != 1:
            refuse(f"{name}: mesh", "one axis", f"{mesh.ndim} axes", 'pass mesh["cp"] or mesh["tp"]')
        if self.alone and (other := style_over_cp(module)) is not None:
            got = f"{type(module).__name__} with {other}"
            refuse(name, "a module without a style over cp", got, self.alone, UnsupportedError)
        for part in self.parts(module):
            check_module(name + (where and f" at {where!r}"), part, self.key)

    def bind(self, module: nn.Module, mesh: DeviceMesh) -> tuple[Any, ...]:
        """Prepare a module that `check` took; the result is what `run` gets first."""
        return ()

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Apply the style to a module that `check` took."""
        replace_forward(module, self.key, type(self).__name__, partial(self.run, *self.bind(module, mesh)))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.check(module, device_mesh)
        self.apply(module, device_mesh)
        return module


def style_over_cp(module: nn.Module) -> str | None:
    found = (replaced(module, key) for key in (STYLE, INPUT, OUTPUT, TILES, CHECKPOINT))
    return next((each.name for each in found if each is not None), None)


def check_module(what: str, module: nn.Module, key: str) -> None:
    """Refuse a module whose forward is replaced already, or cannot be: of torch.jit, from torch.compile, or none."""
    kind = type(module).__name__
    if (other := replaced(module, key)) is not None:
        refuse(what, "a module without a style", f"{kind} with {other.name}", "apply once")
    if isinstance(module, torch.jit.ScriptModule):
        hint = "apply the plan to the plain module; compile that with torch.compile, as torch.jit cannot"
        raise UnsupportedError(describe(what, "a module in Python", "one of torch.jit", hint))
    if COMPILED in dict(module.named_children()):
        hint = "cp_mesh.parallelize applies it to the module inside; compile the module that holds all of the linears"
        refuse(what, "a plain module", "one that torch.compile made", hint)
    if type(module).forward is nn.Module.forward and "forward" not in vars(module):
        hint = "name the modules that it holds, as in 'layers.*'"
        refuse(what, "a module with a forward", f"a {kind}, which is never called", hint)


def inside_checkpoint() -> bool:
    """Whether a checkpoint began between the innermost forward that is replaced and here; in traces they are operators.

    What it recomputes in the backward would run outside of that forward.
    """
    frame: FrameType | None = None if torch.compiler.is_compiling() else sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != FILE:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


def plain_name(path: str) -> str:
    """The path without the names that torch.compile adds."""
    return ".".join(part for part in path.split(".") if part != COMPILED)


def check_classes(root: nn.Module) -> None:
    """Refuse modules whose class was changed after they got a style: they would run without the style."""
    for module in root.modules():
        style = replaced(module, STYLE) if _ALL in vars(module) else None
        if style is not None and STYLE not in getattr(type(module), _ALL, ()):
            what, hint = f"{type(module).__name__} with {style.name}", "change module.__class__ before parallelize"
            refuse(what, "the class that the style gave it", "another one", hint)


def _subclass(base: type[nn.Module], key: str) -> type[nn.Module]:
    """The subclass for a class and a key, made once. ``base`` holds it weakly, so both can be collected."""
    made = (each for each in base.__subclasses__() if key in vars(each).get(_ALL, ()))
    return next(made, None) or _make_subclass(base, key)


def _make_subclass(base: type[nn.Module], key: str) -> type[nn.Module]:
    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        replacement, inner = getattr(self, _ALL)[key]
        if inner is None:
            inner = partial(base.forward, self)
        if replacement is not None:
            return replacement.run(self, inner, *args, **kwargs)
        if key != WATCH:
            got, hint = "one that was made from its class", "build the plain module and call parallelize on it"
            refuse(type(self).__name__, "a module to which a style was applied", got, hint)
        return inner(*args, **kwargs)

    # A code object of its own: torch.compile counts recompilations, and tracks what varied between calls, by code.
    code: Any = forward
    code.__code__ = code.__code__.replace(co_name=f"forward of {base.__module__}.{base.__qualname__}")

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        if any(replaced(self, each) for each in (STYLE, INPUT, OUTPUT, LINEAR, TILES, CHECKPOINT)):
            raise UnsupportedError(
                f"{base.__name__}: a module with a style of cp_mesh cannot be pickled, as the style holds process "
                "groups; save model.state_dict(), then build the model and call parallelize where it is loaded"
            )
        make, *rest = _in_class(base, self, base.__reduce_ex__, protocol)
        return base.__new__ if make is NEW else make, *rest  # for `NEW`, pickle would require the class of self

    def copied(how: Callable[..., Any], self: nn.Module, *memo: Any) -> Any:
        return _like(self, _in_class(base, self, how, *memo))

    members = {"forward": forward, "__reduce_ex__": __reduce_ex__, "__doc__": base.__doc__}
    members |= {f"__{name}__": partialmethod(partial(copied, getattr(copy, name))) for name in ("copy", "deepcopy")}
    members[_ALL] = getattr(base, _ALL, {}) | {key: (None, None)}  # for a module made from its class
    made = type(base.__name__, (base,), members)
    made.__module__, made.__qualname__ = base.__module__, base.__qualname__
    return made


def _in_class(base: type[nn.Module], module: nn.Module, run: Callable[..., Any], *args: Any) -> Any:
    """``run(module, *args)`` with the module's class set to ``base``, so that its own copying or pickling is used."""
    made, module.__class__ = type(module), base
    try:
        return run(module, *args)
    finally:
        module.__class__ = made


def _like(module: nn.Module, twin: nn.Module) -> nn.Module:
    """The copy ``twin``, with the class and replacements of ``module``, which the copying of ``base`` drops."""
    twin.__class__ = type(module)
    twin.__dict__.setdefault(_ALL, {key: (found, None) for key, (found, _) in getattr(module, _ALL).items()})
    return twin
