"""`flex_attention` under context parallelism: score_mod and mask_mod are functions of the user.

Read `function` (what users call), `trace` (a function becomes a graph) and `rank_mask` (which ranks' keys a mask
needs). `block_mask` reads PyTorch's BlockMask, and `fingerprint` decides when an earlier trace of a function is still
valid. The kernel that runs the functions is in `kernels/flex`.
"""
