"""The double ring: rows travel between hosts once, however many ranks of a host need them.

`double_ring` has the functions of its `Method`, `relay_plan` plans the rows between hosts and their readers,
`relayed` moves them. Nothing here is imported before a call uses it.
"""
