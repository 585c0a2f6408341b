"""Check mode: find disagreements between ranks before the first collective of a call.

Off by default: an exchange on every call costs a round trip, and one made by some ranks only is itself a hang. On in
the tests, in `cp_mesh.verify`, inside ``with check_mode():``, and where the environment sets ``CP_MESH_CHECK=1``.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.distributed as dist
from torch import Tensor

from cp_mesh.errors import RankMismatchError

_enabled: ContextVar[bool | None] = ContextVar("cp_mesh_check", default=None)


@contextmanager
def check_mode(enabled: bool = True) -> Iterator[None]:
    """Compare the arguments of every `attention` call in this context over the ranks of its cp group.

    Also the whole inputs of a `ShardedModel`, and what `decode` and `ShardedCache.append` must be given alike. Every
    rank raises `RankMismatchError` if anything that must agree does not, and if any rank refused its arguments while
    others accepted theirs.

    Args:
        enabled: False turns the mode off inside the context. Must be the same on all ranks.
    """
    token = _enabled.set(enabled)
    try:
        yield
    finally:
        _enabled.reset(token)


def checking() -> bool:
    """Whether check mode is on."""
    enabled = _enabled.get()
    return os.environ.get("CP_MESH_CHECK", "0") == "1" if enabled is None else enabled


def announce_refusal(group: dist.ProcessGroup, error: Exception) -> None:
    """In check mode: tell the other ranks, which may have accepted their arguments, that this one has not.

    Args:
        group: the cp group.
        error: what this rank is about to raise.
    """
    if isinstance(error, RankMismatchError):
        return  # of an exchange, so that every rank knows
    if not getattr(error, "_cp_mesh_announced", False):  # once, however many frames it passes through
        error._cp_mesh_announced = True  # type: ignore[attr-defined]
        require_agreement(group, {"error": f"{type(error).__name__}: {error}"})


def fingerprint(tensor: Tensor | None) -> str:
    """Shape, dtype, device type and a hash of the content; reads the tensor on the host."""
    if tensor is None:
        return "None"
    # a copy: NumPy pins the memory that it is shown, and FSDP2 frees that of a parameter after its use
    copy = tensor.detach().to("cpu", copy=True).reshape(-1)
    content = hashlib.sha1(copy.view(torch.uint8).numpy().tobytes()).hexdigest()[:12]
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device.type} {content}"


def exchange(group: dist.ProcessGroup, fields: Mapping[str, str]) -> list[dict[str, str]]:
    """The fields of every rank; raises on ranks that refused nothing if another one did, see `require_agreement`."""
    answers: list[dict[str, str]] = [{} for _ in range(group.size())]
    dist.all_gather_object(answers, dict(fields), group=group)
    refused = {rank: answer["error"] for rank, answer in enumerate(answers) if "error" in answer}
    if refused and "error" not in fields:
        rank, error = next(iter(refused.items()))
        raise RankMismatchError(f"attention: cp rank {rank} refused its arguments while this rank did not: {error}")
    return answers


def require_agreement(group: dist.ProcessGroup, fields: Mapping[str, str]) -> None:
    """Exchange ``fields`` over the group and raise on every rank if they differ.

    Args:
        group: the cp group.
        fields: values by name; a rank that refused its arguments says so under the name "error".
    """
    answers = exchange(group, fields)
    if "error" in fields:
        return  # this rank raises its own error
    for name in fields:
        values = [answer.get(name, "missing") for answer in answers]
        if len(set(values)) > 1:
            shown = "; ".join(f"cp rank {rank}: {value}" for rank, value in enumerate(values))
            raise RankMismatchError(
                f"attention: expected the same {name} on every cp rank, got {shown}; "
                "give every rank of a cp group the same batch and options"
            )
