"""Communication: transports that move rows between ranks, and comparisons of the ranks' arguments.

`contract` defines transports, `functional` and `symmetric_memory` implement them, `exchange` chooses one. `heads` does
the all-to-all of heads and rows; `shards` moves rows of linears, and whole small tensors.
`packing` and `waiting` are shared helpers; `groups` makes groups within the cp group, and links those of one model;
`group_state` keeps state by group. `agreement` compares ranks before the first collective: `store_messages` writes
messages to the store, `fingerprints` makes digests of tensors.
"""
