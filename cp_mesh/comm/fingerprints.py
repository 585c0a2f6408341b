"""Short strings for tensors, which ranks compare."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def shape_of(tensor: Tensor | None) -> str:
    """Return dtype and shape."""
    return "None" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"


def fingerprint(tensor: Tensor | None) -> str:
    """Return shape, dtype, device type and a hash of the content; reads the tensor on the host."""
    if tensor is None:
        return "None"
    # a copy, because NumPy keeps the memory that it views alive, and FSDP2 frees a parameter's memory after use
    dense = torch.contiguous_format  # else a tensor of one element keeps its stride
    copy = tensor.detach().to("cpu", copy=True, memory_format=dense).reshape(-1)
    content = hashlib.sha1(copy.view(torch.uint8).numpy().tobytes()).hexdigest()[:12]
    return f"{shape_of(tensor)} on {tensor.device.type} {content}"
