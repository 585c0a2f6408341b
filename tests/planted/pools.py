"""Pools of ranks on which bugs are planted, one after the other, while the ranks go on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ranks import Pool, Pools, RankFailure, join_anew

from planted import MUTATIONS
from planted.seams import forget


class InfectedPool(Pool):
    """Its ranks have one bug, or none; between two, and after a failure, they forget the past and join a group anew."""

    bug: Bug
    _planted: Bug | None = None

    def _call(self, fn: Callable[..., Any], args: tuple, timeout: float, expecting_error: bool) -> list[Any]:
        if self._planted is not self.bug and self.bug.name and MUTATIONS[self.bug.name].new_ranks:
            self.close()
        while self._planted is not self.bug or not self.processes:
            is_warm = bool(self.processes)
            try:
                super()._call(exchange, (self.bug.name,), 20.0 if is_warm else 60.0, False)
                self._planted = self.bug
            except RankFailure as failure:
                self.close()
                if not (is_warm and failure.is_lost):  # else what was in flight did not end
                    raise
        self.bug.is_planted = True
        return super()._call(fn, args, timeout, expecting_error)

    def _part(self, is_alive: bool) -> None:
        self._planted = None
        if not is_alive:
            self.close()


class Bug:
    """A planted bug, or none: gives the pools whose ranks have it."""

    def __init__(self, pools: Pools, name: str | None) -> None:
        self.name, self.is_planted, self._pools = name, False, pools

    def __call__(self, world_size: int) -> InfectedPool:
        pool: InfectedPool = self._pools(world_size)
        pool.bug = self
        return pool


def infected_pools() -> Pools:
    return Pools(partial(InfectedPool, group_timeout=5.0))  # which give up on a lost collective soon


def exchange(rank: int, name: str | None) -> None:
    """Plant the bug of this name, or none, in place of the one before."""
    if _undo:
        _undo.pop()()
        forget()
        join_anew(rank)
    _undo.append(MUTATIONS[name].plant() if name else lambda: None)


_undo: list[Callable[[], None]] = []
