"""Load the factory of ``python -m cp_mesh verify module:function``: it returns arguments of `cp_mesh.verify_model`."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cp_mesh.errors import ArgumentError, describe, refuse
from cp_mesh.tools.verification.verify_model import verify_model

_MODULE, _HINT = "a module that can be imported", "start in its folder, or pass its path, path/to/my_trainer.py"
_ARGUMENTS = "a dict of verify_model's arguments"
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "make_model": (
        lambda x: callable(x) and not isinstance(x, nn.Module),
        "a function without arguments that returns the plain model",
    ),
    "plan": (lambda x: x is None or callable(x) or isinstance(x, Mapping), "a plan, a function of the model, or None"),
    "batch": (lambda x: isinstance(x, Mapping), "a dict of whole tensors by the names of the model's arguments"),
    "mesh": (lambda x: x is None or isinstance(x, DeviceMesh), "a DeviceMesh of all ranks, or None"),
}


def arguments_of(text: str) -> dict[str, Any]:
    """Import and call a factory, and check the dict that it returns.

    Args:
        text: "module:function" or "file.py:function".

    Raises:
        ArgumentError: naming the factory and the wrong argument. An exception of the user's own code is its cause.
    """
    what, (where, name) = f"factory {text}", split(text)
    factory = _function(what, _module(what, where), name)
    try:
        returned = factory()
    except (Exception, SystemExit) as error:
        raise _of_its_own(what, _ARGUMENTS, error) from error
    if not isinstance(returned, Mapping):
        refuse(what, _ARGUMENTS, type(returned), "return {'make_model': ..., 'plan': ..., 'batch': ..., 'mesh': ...}")
    parameters = inspect.signature(verify_model).parameters
    for key in returned.keys() - parameters.keys():
        close = difflib.get_close_matches(str(key), parameters, n=1)
        hint = f"similar: {close[0]}" if close else f"its arguments are {', '.join(parameters)}"
        refuse(f"{what}: {key!r}", "the name of an argument of verify_model", key, hint)
    for key, (is_right, expected) in _KINDS.items():
        if key not in returned and parameters[key].default is inspect.Parameter.empty:
            refuse(f"{what}: {key!r}", expected, f"only {[*returned]}", "add it to the dict")
        if key in returned and not is_right(returned[key]):
            refuse(f"{what}: {key!r}", expected, type(returned[key]), "see the docs of cp_mesh.verify_model")
    return dict(returned)


def split(text: str) -> tuple[str, str]:
    """Split "module:function" or "file.py:function" into its two parts.

    Raises:
        ArgumentError: if the text has another form, or the file does not exist.
    """
    what, (where, _, name) = f"factory {text}", text.rpartition(":")
    if where.endswith(".py"):
        if not os.path.isfile(where):
            refuse(what, _MODULE, f"no file {Path(where).absolute()}", _HINT)
        if "." in (stem := Path(where).stem):
            refuse(what, "a file name that is a module name", f"{stem}.py", "rename it without other dots")
    elif not all(where.split(".")) or "/" in where or ":" in where:
        refuse(what, "module:function or file.py:function", text, "for example my_trainer:verification")
    return where, name


def _module(what: str, where: str) -> ModuleType:
    """Import a module by name, or a file by path with its folder on sys.path."""
    path = Path(where).resolve() if where.endswith(".py") else None
    if path is not None:
        sys.path.insert(0, str(path.parent))
        where = path.stem
    try:
        module = importlib.import_module(where)
    except (Exception, SystemExit) as error:  # sys.exit(0) would pass for a verdict
        if isinstance(error, ModuleNotFoundError) and f"{where}.".startswith(f"{error.name}."):
            raise ArgumentError(describe(what, _MODULE, str(error), _HINT)) from None
        raise _of_its_own(what, _MODULE, error) from error
    found = getattr(module, "__file__", None)
    if path is not None and (found is None or Path(found).resolve() != path):
        refuse(what, f"{path} as module {where}", found or "a built-in module", "rename the file")
    return module


def _function(what: str, module: ModuleType, name: str) -> Callable[[], Any]:
    found = getattr(module, name, None)
    if not callable(found):
        own = [
            key
            for key, x in vars(module).items()
            if callable(x)
            and not isinstance(x, type)
            and key[0] != "_"
            # a functools.partial has neither a name nor the module that made it
            and (not hasattr(x, "__name__") or x.__module__ in (None, module.__name__))
        ]
        close = difflib.get_close_matches(name, own, n=3)
        got = f"no such name in {module.__name__}" if found is None else type(found)
        listed = ", ".join(own[:8]) + ", ..." * (len(own) > 8)
        refuse(what, "a function", got, f"similar: {', '.join(close)}" if close else f"it defines {listed or 'none'}")
    try:
        with suppress(ValueError):  # a class written in C has no signature
            inspect.signature(found).bind()
    except TypeError as error:
        refuse(what, "a function that needs no arguments", str(error), "bind them with functools.partial")
    return found


def _of_its_own(what: str, expected: str, error: BaseException) -> ArgumentError:
    return ArgumentError(describe(what, expected, f"{type(error).__name__}: {error}", "see its traceback"))
