"""Errors for users. Messages say what, what was expected, what was given, and the nearest setting that works."""

from __future__ import annotations

from typing import NoReturn


class ArgumentError(ValueError):
    """An argument is wrong in itself, or disagrees with another one."""


class UnsupportedError(NotImplementedError):
    """The combination is meaningful but not available: cp_mesh refuses it rather than compute something else."""


class RankMismatchError(RuntimeError):
    """Ranks were called with different arguments; found in check mode, on every rank."""


def describe(what: str, expected: object, got: object, hint: str) -> str:
    """One sentence in the house form."""
    return f"{what}: expected {expected}, got {got}; {hint}"


def refuse(what: str, expected: object, got: object, hint: str, error: type[Exception] = ArgumentError) -> NoReturn:
    """Raise with that sentence."""
    raise error(describe(what, expected, got, hint))
