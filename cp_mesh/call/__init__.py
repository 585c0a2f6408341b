"""One call of attention: from the function to the method that runs it.

Read `function` (what users call), `spec` (the call as a record), `plan` (what it becomes for given shapes), `op` (what
is registered), `dtensor` (how it is sharded) and `passes` (what the op does, loaded by its first call). Then `method`,
the contract of a method, and `ring_loop`, the ring and all-gather, where owners sum the gradients that come home; and
`ulysses`, which has the hybrid too (`joined_layout` makes a group one rank). `methods` is their table,
and `choose` what "auto" takes. `captures` are tensors that functions of users read, `formats` says which dim is
which, and `operators` makes ops that cost the host little.
"""
