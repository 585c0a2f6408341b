"""PyTorch's FlexAttention as a kernel: users' score_mod and mask_mod, compiled by Inductor.

Read `kernel`, then `tiles` (the functions of one tile), `reads` and `bounds` (captured tensors and their indices),
`blocks` (skipped blocks of pairs) and `programs` (compilation and its cache).
"""
