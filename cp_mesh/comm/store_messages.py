"""What ranks leave in the store of their process group, for others to read."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from cp_mesh._torch import world

Answers = dict[int, dict[str, str]]
"""What ranks of a group say, by rank."""


_clients = threading.local()  # of stores, by the store; none of the main thread


def store_of(group: dist.ProcessGroup | None) -> Any:
    """The store of a group, for this thread; None where it was made without one.

    A wait holds the lock of its client, so that no other thread could leave a word: each has a client of its own.
    """
    store = _store_of(group)
    if store is None or threading.current_thread() is threading.main_thread():
        return store
    clients = vars(_clients).setdefault("by_store", weakref.WeakKeyDictionary())
    if store not in clients:
        clients[store] = store.clone()
    return clients[store]


def _store_of(group: dist.ProcessGroup | None) -> Any:
    backend, store = world().pg_map.get(group, ("fake", None))
    return None if backend == "fake" else store


class Words:
    """What the ranks of a group leave in its store, each a word of its own.

    Attributes:
        rank, size: of the group.
    """

    def __init__(self, group: dist.ProcessGroup, topic: str, fields: Mapping[str, str]) -> None:
        self.rank, self.size = group.rank(), group.size()
        # PyTorch drops its own object when it destroys the group
        self._group_store, self._store = weakref.ref(_store_of(group)), dist.PrefixStore("cp_mesh", store_of(group))
        # a group made under the name of one that was destroyed finds in the store what that one left
        self._topic, self._made_before = topic, (self._store.add(topic, 1) - 1) // self.size
        self._room = f"{topic}/{self._made_before}"
        self._keys = [f"{self._room}/{rank}" for rank in range(self.size)]
        self._store.set(self._keys[self.rank], json.dumps(dict(fields)))

    def wait(self, patience: timedelta | None) -> Answers:
        """The words of those that come in time."""
        if patience is not None:
            with suppress(RuntimeError):
                self._store.wait(self._keys, patience)
                return self._of(range(self.size))
        keys = [self._keys[self.rank], f"{self._room}/when"]
        finalizer = weakref.finalize(self._group_store(), _take_back, self._store, self._topic, keys, self.size)
        finalizer.atexit = False
        with suppress(RuntimeError):  # the store is gone with the rank that served it
            return {} if patience is None else self.read()
        return {}

    def read(self) -> Answers:
        """The words that are there."""
        return self._of([rank for rank, key in enumerate(self._keys) if self._store.check([key])])

    def _of(self, present: Sequence[int]) -> Answers:
        found = self._store.multi_get([self._keys[rank] for rank in present])
        return {rank: json.loads(answer) for rank, answer in zip(present, found, strict=True)}

    def forget(self) -> None:
        """Leave nothing of a comparison that all ranks have read: they have come to a later one."""
        for before in range(self._made_before + 1):  # a refusal may have left one in an earlier room
            self._store.delete_key(f"{self._topic}/{before}/{self.rank}")
        if self.rank == 0:
            self._store.delete_key(self._topic)

    def settle(self, name: str, value: str) -> str:
        """What the first rank to settle this says."""
        return self._store.compare_set(f"{self._room}/{name}", "", value).decode()


def _take_back(store: dist.Store, topic: str, keys: Sequence[str], size: int) -> None:
    """Words that not all ranks came to read, so that no group of the same name takes them for its own."""
    with suppress(RuntimeError):  # whoever holds the store may have gone
        if store.add(topic, 0) % size:
            store.add(topic, -1)
            for key in keys:
                store.delete_key(key)


def left_for(group: dist.ProcessGroup, topic: str) -> Answers:
    """What others left for a comparison to which this rank has not come; none if their store is gone."""
    if (store := store_of(group)) is None:
        return {}
    size, mine = group.size(), dist.PrefixStore("cp_mesh", store)
    with suppress(RuntimeError):
        room = f"{topic}/{mine.add(topic, 0) // size}"
        present = [rank for rank in range(size) if mine.check([f"{room}/{rank}"])]
        return {rank: json.loads(mine.get(f"{room}/{rank}")) for rank in present}
    return {}
