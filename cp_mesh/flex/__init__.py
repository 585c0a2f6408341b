"""Functions of users as scores and masks: `flex_attention` under context parallelism.

Read `function` (what users call), `trace` (a function becomes a graph) and `rank_mask` (whose keys a mask needs).
`block_mask` reads PyTorch's BlockMask, and `fingerprint` says when a function may be taken for traced. The kernel that
runs them is in `kernels/flex`.
"""

from cp_mesh._aliases import moved_from

__getattr__ = moved_from(__name__, "function")
