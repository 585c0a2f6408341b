"""The double ring: rows cross from host to host once, however many ranks of a host need them.

`double_ring` is what its `Method` calls, `relay_plan` says what crosses and who reads it, and `relayed` moves it.
Nothing here is loaded before a call asks for it.
"""
