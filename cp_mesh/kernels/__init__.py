"""Attention of one tile on one device.

Read `contract` (what a kernel is asked) and `reference` (the specification), then `scores` (terms), `functions` (those
of users), `combine` and `merge` (one result of partial ones). The kernels are `aten` (PyTorch's), `flash_attn`,
`flash_attn_4`, `triton_attention`, of which the other `triton_*` are parts, and `flex`. `compiling` shares what is
compiled. `table` names them, and of "auto" takes the first that can serve the call.
"""
