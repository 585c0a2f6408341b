"""Messages that ranks write to the store of their process group, for other ranks to read."""

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
"""The messages of a group's ranks, by rank."""


_clients = threading.local()  # clients by store, for threads other than the main one


def store_of(group: dist.ProcessGroup | None) -> Any:
    """Return the store of a group, for this thread; None if the group was made without a store.

    A waiting client holds its lock and would block other threads, so each thread has its own client.
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


class Comparison:
    """Each rank of a group writes one message to the group's store, and reads those of the others.

    Attributes:
        rank, size: of the group.
    """

    def __init__(self, group: dist.ProcessGroup, topic: str, fields: Mapping[str, str]) -> None:
        self.rank, self.size = group.rank(), group.size()
        # PyTorch drops the store object when it destroys the group
        self._group_store, self._store = weakref.ref(_store_of(group)), dist.PrefixStore("cp_mesh", store_of(group))
        # a group with the name of a destroyed group finds the messages of that group in the store
        self._topic, self._made_before = topic, (self._store.add(topic, 1) - 1) // self.size
        self._prefix = f"{topic}/{self._made_before}"
        self._keys = [f"{self._prefix}/{rank}" for rank in range(self.size)]
        self._store.set(self._keys[self.rank], json.dumps(dict(fields)))

    def wait(self, patience: timedelta | None) -> Answers:
        """Return the messages of the ranks that write them in time; without ``patience`` do not wait."""
        if patience is not None:
            with suppress(RuntimeError):
                self._store.wait(self._keys, patience)
                return dict(enumerate(map(json.loads, self._store.multi_get(self._keys))))
        keys = [self._keys[self.rank], f"{self._prefix}/when"]
        finalizer = weakref.finalize(self._group_store(), _take_back, self._store, self._topic, keys, self.size)
        finalizer.atexit = False
        with suppress(RuntimeError):  # the rank that served the store has ended
            return {} if patience is None else self.read()
        return {}

    def read(self) -> Answers:
        """Return the messages that are in the store."""
        return {rank: json.loads(self._store.get(x)) for rank, x in enumerate(self._keys) if self._store.check([x])}

    def delete(self) -> None:
        """Delete the messages of a comparison that all ranks have read: they have joined a later one."""
        for before in range(self._made_before + 1):  # a refusal may have left an earlier message
            self._store.delete_key(f"{self._topic}/{before}/{self.rank}")
        if self.rank == 0:
            self._store.delete_key(self._topic)

    def first_value(self, name: str, value: str) -> str:
        """Return the value that the first rank sets under this name."""
        return self._store.compare_set(f"{self._prefix}/{name}", "", value).decode()


def _take_back(store: dist.Store, topic: str, keys: Sequence[str], size: int) -> None:
    """Delete messages that not all ranks have read, so that a later group of the same name does not read them."""
    with suppress(RuntimeError):  # the rank that serves the store may have ended
        if store.add(topic, 0) % size:
            store.add(topic, -1)
            for key in keys:
                store.delete_key(key)


def read_errors(group: dist.ProcessGroup, topic: str) -> dict[int, str]:
    """Return errors of other ranks in a comparison that this rank has not joined; empty if their store is gone."""
    if (store := store_of(group)) is None:
        return {}
    size, mine = group.size(), dist.PrefixStore("cp_mesh", store)
    with suppress(RuntimeError):
        keys = [f"{topic}/{mine.add(topic, 0) // size}/{rank}" for rank in range(size)]
        found = {rank: json.loads(mine.get(key)) for rank, key in enumerate(keys) if mine.check([key])}
        return {rank: message["error"] for rank, message in found.items() if "error" in message}
    return {}


def send_error(text: str, ranks: Sequence[int]) -> None:
    """Write an error for those of these ranks that learn of a refusal by a collective and then call `read_error`."""
    if (store := store_of(dist.group.WORLD)) is not None:
        store.set(f"cp_mesh/error/{hash(tuple(ranks))}", text)


def read_error(ranks: Sequence[int]) -> str:
    """Return the text that some of these ranks wrote by `send_error`."""
    store = store_of(dist.group.WORLD)
    return "" if store is None else store.get(f"cp_mesh/error/{hash(tuple(ranks))}").decode()
