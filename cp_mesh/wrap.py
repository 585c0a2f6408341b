"""Replacing the forward of one module so that copies of the module have the replacement too.

A function set as ``module.forward`` is bound to the module, so a shallow copy of the module would run the original's
attributes, and a module read back from a pickle would run without it. Here the module's class is replaced, as FSDP2
does, by a subclass of the same name whose forward looks up the replacement in the instance that it is called on.
"""

from __future__ import annotations

import copy
import copyreg
import functools
from collections.abc import Callable
from functools import partial, partialmethod
from typing import Any

import torch
from torch import nn

from cp_mesh._torch import COMPILED
from cp_mesh.errors import UnsupportedError, describe, refuse

FILE = __file__
NEW: Any = vars(copyreg)["__newobj__"]  # what makes an object that has no way of its own
STYLE = "style"  # keys of `replace_forward`: a style's forward
INPUT, OUTPUT = "input", "output"  # which a module may have beside a style
LINEAR = "linear"  # of the styles over tp, which a module may have beside one over cp
WATCH = "watch"  # the forward of a compiled part, which is looked at while it is traced
_ALL = "_cp_mesh"  # by key the replacements of a module and the forwards of the instance that they found, or None


class Replacement:
    """What a module runs instead of its forward. Copies of the module share it, as a style holds process groups.

    ``where``: the name of the module in the model that `parallelize` was given.
    """

    def __init__(self, name: str, run: Callable[..., Any]) -> None:
        self.name, self.run, self.where = name, run, ""

    def __copy__(self) -> Replacement:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Replacement:
        return self

    def __reduce__(self) -> Any:
        return type(None), ()  # what is read back of a module that is only watched


def replace_forward(module: nn.Module, key: str, name: str, run: Callable[..., Any]) -> None:
    """Make ``module(*args, **kwargs)`` run ``run(module, forward, *args, **kwargs)``.

    Args:
        module: changed in place: its class, and a ``forward`` that was set on the instance, which is still called.
        key: `STYLE`, `INPUT`, `OUTPUT`, `LINEAR` or `WATCH`; a module has at most one replacement of each.
        name: of the replacement, for messages.
        run: is given the module, its own forward, and the arguments of the call.
    """
    check_plain(name, module)
    of_class: dict[str, Any] = getattr(type(module), _ALL, {})
    found = Replacement(name, run), module.__dict__.pop("forward", None)
    module.__dict__[_ALL] = of_class | module.__dict__.get(_ALL, {}) | {key: found}  # shallow copies keep the old one
    if key not in of_class:
        module.__class__ = _subclass(type(module), key)


def replaced(module: nn.Module, key: str) -> Replacement | None:
    """The replacement of this key, if there is one."""
    found: Replacement | None = module.__dict__.get(_ALL, {}).get(key, (None,))[0]
    return found


def check_plain(what: str, module: nn.Module) -> None:
    """Refuse a module that runs another one, or no forward in Python: there is none to replace."""
    if isinstance(module, torch.jit.ScriptModule):
        hint = "apply the plan to the plain module, which torch.jit cannot compile then; torch.compile can"
        raise UnsupportedError(describe(what, "a module in Python", "one of torch.jit", hint))
    if COMPILED in dict(module.named_children()):
        hint = "cp_mesh.parallelize applies it to the module inside; of several linears compile what holds them all"
        refuse(what, "a module", "what torch.compile made of one", hint)


def plain_name(path: str) -> str:
    """A compiled module goes by the name of the one that it calls."""
    return ".".join(part for part in path.split(".") if part != COMPILED)


def check_class(module: nn.Module) -> None:
    """Refuse a module that was given a style and then another class, which runs without the style."""
    style = replaced(module, STYLE)
    if style is not None and STYLE not in getattr(type(module), _ALL, ()):
        what, hint = f"{type(module).__name__} with {style.name}", "change module.__class__ before parallelize"
        refuse(what, "the class that the style gave it", "another one", hint)


def _subclass(base: type[nn.Module], key: str) -> type[nn.Module]:
    """One for all modules of a class; its class knows it weakly, so that both go with them."""
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
            got, hint = "an object of its class alone", "build the plain module and call parallelize on it"
            refuse(type(self).__name__, "a module that has its style", got, hint)
        return inner(*args, **kwargs)

    # Code of its own: torch.compile counts recompilations, and keeps what varied between calls, by code.
    code: Any = forward
    code.__code__ = code.__code__.replace(co_name=f"forward of {base.__module__}.{base.__qualname__}")

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        if any(replaced(self, each) for each in (STYLE, INPUT, OUTPUT, LINEAR)):
            raise UnsupportedError(
                f"{base.__name__}: a module with a style of cp_mesh cannot be pickled, as the style holds process "
                "groups; save model.state_dict(), then build the model and call parallelize where it is loaded"
            )
        make, *rest = _in_class(base, self, base.__reduce_ex__, protocol)
        return base.__new__ if make is NEW else make, *rest  # of a new object pickle would ask for the class of self

    def copied(how: Callable[..., Any], self: nn.Module, *memo: Any) -> Any:
        return _like(self, _in_class(base, self, how, *memo))

    members = {"forward": forward, "__reduce_ex__": __reduce_ex__, "__doc__": base.__doc__}
    members |= {f"__{name}__": partialmethod(partial(copied, getattr(copy, name))) for name in ("copy", "deepcopy")}
    members[_ALL] = getattr(base, _ALL, {}) | {key: (None, None)}  # of a module that was made by its class alone
    made = type(base.__name__, (base,), members)
    made.__module__, made.__qualname__ = base.__module__, base.__qualname__
    return made


def _in_class(base: type[nn.Module], module: nn.Module, run: Callable[..., Any], *args: Any) -> Any:
    """``run(module, *args)`` while the module is one of ``base``, whose own way to copy or to pickle it that takes."""
    made, module.__class__ = type(module), base
    try:
        return run(module, *args)
    finally:
        module.__class__ = made


def _like(module: nn.Module, twin: nn.Module) -> nn.Module:
    """``twin`` with the class and the replacements of ``module``, of which the way of its class knows nothing."""
    twin.__class__ = type(module)
    twin.__dict__.setdefault(_ALL, {key: (found, None) for key, (found, _) in getattr(module, _ALL).items()})
    return twin
