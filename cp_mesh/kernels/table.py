"""The kernels by name, and the choice that ``kernel="auto"`` makes."""

from __future__ import annotations

from cp_mesh._names import Loaded
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.kernels.contract import Request, shortfalls
from cp_mesh.kernels.merge import Kernel

KERNELS = Loaded(
    fa4="kernels.flash_attn_4:FA4",
    cudnn="kernels.aten:CUDNN",
    fa2="kernels.aten:FA2",
    triton="kernels.triton_attention:TRITON",
    flex="kernels.flex.kernel:FLEX",
    cpu_flash="kernels.aten:CPU_FLASH",
    reference="kernels.reference:REFERENCE",
)
"""In order of preference. On Hopper, FA4 is fastest if installed, then cuDNN, both written for Hopper.
FlashAttention-2 was written for the generation before. The library's Triton kernel supports what these lack: float32,
masks read from tensors, score terms, determinism, gradients of lse. "flex" takes score_mod
and mask_mod. The reference supports everything."""


def choose_kernel(name: str, request: Request) -> Kernel:
    """Return the kernel of that name, or for "auto" the first of `KERNELS` that supports the request.

    Raises:
        ArgumentError: on an unknown name.
        UnsupportedError: if the kernel does not support the request; the message names what it lacks and one that does.
    """
    able = (kernel for kernel in KERNELS.values() if not shortfalls(kernel.capability, request))  # may import packages
    if name == "auto":
        chosen = next(able, None)
        if chosen is None:
            lacks = "; ".join(
                f"{kernel.name} lacks {', '.join(shortfalls(kernel.capability, request))}"
                for kernel in KERNELS.values()
            )
            raise UnsupportedError(f"kernel='auto': no kernel can serve this call: {lacks}")
        return chosen
    if name not in KERNELS:
        known = ", ".join(["auto", *KERNELS])
        refuse("kernel", f"one of {known}", repr(name), "kernel='auto' picks one that works")
    missing = shortfalls(KERNELS[name].capability, request, named=True)
    if missing:
        other = next(able, None)
        hint = "no kernel can serve this call" if other is None else f"kernel={other.name!r} can serve this call"
        raise UnsupportedError(f"kernel={name!r} lacks {'; '.join(missing)}; {hint}")
    return KERNELS[name]
