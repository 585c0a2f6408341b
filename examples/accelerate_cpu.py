"""Imported, it lets accelerate use FSDP2 on ranks without GPUs, on which PyTorch has it: to try a script, and in tests."""

from typing import Any

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

_init = AcceleratorState.__init__


def _init_with_fsdp(self: AcceleratorState, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
    _init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU and fsdp_plugin is not None:
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin


AcceleratorState.__init__ = _init_with_fsdp  # type: ignore[method-assign]
