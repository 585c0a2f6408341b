"""What tensors hold, in short, so that ranks can compare it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


def shape_of(tensor: Tensor | None) -> str:
    """Dtype and shape."""
    return "None" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"


def fingerprint(tensor: Tensor | None) -> str:
    """Shape, dtype, device type and a hash of the content; reads the tensor on the host."""
    if tensor is None:
        return "None"
    # a copy: NumPy pins the memory that it is shown, and FSDP2 frees that of a parameter after its use
    dense = torch.contiguous_format  # else one element keeps its stride
    copy = tensor.detach().to("cpu", copy=True, memory_format=dense).reshape(-1)
    content = hashlib.sha1(copy.view(torch.uint8).numpy().tobytes()).hexdigest()[:12]
    return f"{shape_of(tensor)} on {tensor.device.type} {content}"


class Digest(NamedTuple):
    """A number for each tensor, int64 [n], on its way to the host."""

    numbers: Tensor
    copied: torch.cuda.Event | None

    @classmethod
    def of(cls, inputs: Sequence[Tensor]) -> Digest:
        found = []
        for x in inputs:
            flat = x.detach().reshape(-1).to(torch.int64)
            weights = torch.arange(1, len(flat) + 1, device=x.device) * 0x9E3779B97F4A7C1 + 1  # unlike of all places
            found.append(((flat + 1) * weights).sum())
        numbers = torch.stack(found)
        if not numbers.is_cuda:
            return cls(numbers, None)
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True).copy_(numbers, non_blocking=True)
        (copied := torch.cuda.Event()).record()
        return cls(host, copied)

    def is_there(self) -> bool:
        return self.copied is None or self.copied.query()
