"""One call of attention: from the function to the method that runs it.

Read `function` (what users call), `spec` (the call as a record), `plan` (the call resolved for given shapes), `op` (the
registered operators), `dtensor` (sharding) and `passes` (what the op runs; its first call loads the file). Then read
`method`, the contract of a method; `ring_loop`, the ring and all-gather; and `ulysses`, Ulysses and the hybrid
(`joined_layout` treats a group as one rank). `known` finds repeated calls, `formats`
names the dims of each format, and `operators` makes ops with low host overhead.
"""
