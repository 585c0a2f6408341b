"""Who holds which tokens, and who sees whom: integers, without ranks or devices.

Read `layout` (what a layout says), `layouts` and `tensor_layouts` (the layouts), `mask` and `batch_mask`. `block_table`
and the surveys say which rows of each rank see which keys of the others; `schedule` makes tiles and stages of that, and
`varlen` sequences of documents. `balance` makes layouts for uneven masks, `relay_plan` plans what crosses hosts.
"""
