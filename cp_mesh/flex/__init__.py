"""`flex_attention` under context parallelism: score_mod and mask_mod are functions of the user.

Read `function` (what users call), `trace` (a function becomes a graph) and `rank_mask` (which ranks' keys a mask
needs). `block_mask` reads PyTorch's BlockMask, and `fingerprint` decides when an earlier trace of a function is still
valid. The kernel that runs the functions is in `kernels/flex`.
"""

from cp_mesh._names import lazy as _lazy

__getattr__, __dir__, __all__ = _lazy(__name__)
