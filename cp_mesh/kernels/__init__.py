"""Attention of one tile on one device.

Read `contract` (the kernels' interface) and `reference` (the specification), then `scores` (score terms), `functions`
(users' score_mod and mask_mod), `combine` and `merge` (merging partial results). Kernels are `aten` (PyTorch's),
`flash_attn_4` (with `flash_attn_4_package`), `triton_attention` (with other `triton_*` files) and `flex`. With
`compiling`, one rank of a host compiles for all. `table` lists the kernels; "auto" takes the first that can.
"""
