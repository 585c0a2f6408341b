"""Who holds which tokens, and who sees whom: integers, without process groups or devices.

Read `layout` (what a layout says), `layouts` and `tensor_layouts` (the layouts), `mask` and `batch_mask`.
`block_table` and `survey` say which rows of each rank see which keys of the others, and what all ranks must know alike.
`schedule` makes tiles and stages of that; `varlen` makes documents sequences of unequal length. `balance` makes layouts
for uneven masks, and `host_tensors` keeps what was read of a tensor.
"""
