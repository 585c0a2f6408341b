"""How rows move between ranks, and how ranks compare what they are given.

Read `contract` (what a transport does), then `functional` and `symmetric_memory` (two of them), and `exchange`, which
chooses; `relayed` crosses hosts. `heads` and `shards` move heads, and rows of linears; `groups` are parts of the cp
group. `agreement` finds ranks that differ before the first collective; `store_messages`, `fingerprints` and
`model_groups` are its parts.
"""
