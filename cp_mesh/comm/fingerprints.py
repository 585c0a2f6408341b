"""What tensors hold, in short, so that ranks can compare it."""

from __future__ import annotations

import hashlib

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
