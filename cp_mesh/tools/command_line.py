"""Command lines of functions: options, their types, defaults and help are those of a signature and its docstring."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import os
import re
import sys
import textwrap
import time
import typing
from collections.abc import Callable, Collection
from fractions import Fraction
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from cp_mesh.errors import refuse

WIDTH = 100
REFUSED = 2  # exit status if something could not run; 1 if something is wrong
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}


class Parser(argparse.ArgumentParser):
    """Argument parser whose errors only rank 0 prints.

    Args:
        command: after ``python -m cp_mesh``.
        text: description.
    """

    def __init__(self, command: str, text: str) -> None:
        def columns(prog: str) -> argparse.HelpFormatter:
            return argparse.HelpFormatter(prog, width=WIDTH - 2)

        super().__init__(f"python -m cp_mesh {command}".strip(), description=text, formatter_class=columns)

    def add_options(
        self, function: Callable[..., Any], names: Collection[str] = (), skip: Collection[str] = (), **defaults: Any
    ) -> None:
        """Add an option for each parameter of a function, or of those of ``names``, but those of ``skip``."""
        hints, texts = typing.get_type_hints(function), _texts(function)
        for name, parameter in inspect.signature(function).parameters.items():
            if name in skip or (names and name not in names) or parameter.kind is parameter.VAR_KEYWORD:
                continue
            kinds = [kind for kind in (*typing.get_args(hints[name]), hints[name]) if kind is not NoneType]
            given: dict[str, Any] = {"help": texts.get(name, "").replace("%", "%%")}
            given["default"] = default = defaults.get(name, parameter.default)
            if default is parameter.empty:
                given |= {"required": True, "default": None}
            elif default:
                given["help"] += f"; default: {str(default).removeprefix('torch.')}"
            if kinds[0] is bool:
                given["action"] = "store_true"
            else:
                kind = {int: number, float: float, torch.dtype: dtype}.get(kinds[0], str)
                given |= {"type": kind, "metavar": {number: "N", float: "X"}.get(kind, "NAME")}
                given |= {"nargs": "+"} if typing.get_origin(hints[name]) is Collection else {}
            self.add_argument(f"--{name.replace('_', '-')}", **given)

    def error(self, message: str) -> NoReturn:
        """Print the error on rank 0 and exit; other ranks wait first, since torchrun kills all ranks when one exits."""
        if os.environ.get("RANK", "0") == "0":
            lines = textwrap.wrap(f"{self.prog}: error: {message}", WIDTH, break_on_hyphens=False)
            print(*lines, f"see {self.prog} --help", sep="\n", file=sys.stderr, flush=True)
        else:
            time.sleep(1.0)
        if dist.is_initialized():
            dist.destroy_process_group()
        raise SystemExit(REFUSED)


def _texts(function: Callable[..., Any]) -> dict[str, str]:
    """Return what the ``Args:`` of a docstring say of each parameter."""
    section = re.search(r"^Args:\n((?:    .*\n|\n)+)", inspect.getdoc(function) or "", re.MULTILINE)
    found = re.findall(r"^    ([\w, ]+): ((?:.|\n(?!    \w))+)", section[1] if section else "", re.MULTILINE)
    return {name: " ".join(text.split()).rstrip(".") for names, text in found for name in names.split(", ")}


def number(text: str) -> int:
    """Parse a whole number such as 131072, 131_072, 128K, 1M or 1e6; K is 1024, M is 1024 * 1024."""
    parts = re.fullmatch(r"([+-]?[0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?(?:e\+?[0-9]{1,2})?)([km]?)", text.lower())
    value = Fraction(parts[1]) * UNITS[parts[2]] if parts else Fraction(1, 2)
    if value.denominator > 1:
        raise argparse.ArgumentTypeError(f"expected a whole number (131072, 128K, 1e6), got {text!r}")
    return int(value)


def dtype(text: str) -> torch.dtype:
    """Parse the name of a floating dtype."""
    names = ("bfloat16", "float16", "float32", "float64")
    if text not in names:
        raise argparse.ArgumentTypeError(f"expected {', '.join(names)}, got {text!r}")
    found: torch.dtype = getattr(torch, text)
    return found


def function_of(text: str) -> Callable[[], Any]:
    """Import the function "module:function" or "file.py:function"; modules beside the file can be imported, too."""
    where, _, name = text.rpartition(":")
    if not where or not name.isidentifier():
        refuse("factory", "module:function or file.py:function", text, "for example my_trainer:verification")
    if not where.endswith(".py"):
        found: Callable[[], Any] = getattr(importlib.import_module(where), name)
        return found
    path = Path(where).resolve()
    if not path.is_file():
        refuse("factory", "a file", str(path), "start in its folder, or pass the path of a file")
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules.setdefault(path.stem, importlib.util.module_from_spec(spec))
    if getattr(module, "__file__", None) != str(path):
        refuse("factory", f"{path} as module {path.stem}", str(module), "rename the file")
    spec.loader.exec_module(module)
    found = getattr(module, name)
    return found
