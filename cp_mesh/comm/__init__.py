"""How rows move between ranks, and how ranks compare what they are given.

Read `contract` (what a transport does), then `functional` and `symmetric_memory` (two of them), and `exchange`, which
chooses. `heads` swaps heads against rows; `shards` and `symmetric_shards` move rows of linears, `whole` small tensors.
`packing` and `waiting` are what they share; `groups` are parts of the cp group, and `group_state` is what is kept by
group. `agreement` finds ranks that differ before the first collective, `first_calls` says which calls it compares:
`store_messages` leaves words in the store and deletes them, `fingerprints` says tensors in short, and `model_groups`
who hears of a refusal.
"""
