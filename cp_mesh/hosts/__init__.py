"""The double ring: rows travel between hosts once, however many ranks of a host need them.

`double_ring` has the functions of its `Method`, `relay_plan` plans which rows travel between hosts and are read there,
`relayed` moves them. Nothing here is imported before a call uses it.
"""
