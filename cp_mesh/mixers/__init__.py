"""Recurrent layers and causal convolutions over a sharded sequence, exact in every layout."""

from cp_mesh._names import lazy as _lazy

__getattr__, __dir__, __all__ = _lazy(__name__)
