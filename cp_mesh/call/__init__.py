"""One call of attention: from the function to the method that runs it.

Read `function` (what users call), `spec` (the call as a record), `plan` (what it becomes for given shapes), `op` (what
is registered) and `dtensor` (how it is sharded). Then `method`, the contract, `ring_loop`, which ring and all-gather
share, `ulysses` and `double_ring`; `methods` is their table, and `choose` what "auto" takes. `captures` are tensors
that functions of users read.
"""
