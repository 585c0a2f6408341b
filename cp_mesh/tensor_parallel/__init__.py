"""Linears, embeddings and losses sharded over a tp axis, with communication overlapped by matmuls.

Read `styles` (the public styles) and `plan` (which module gets which style). Then read `matmul` and `overlap`, which
`colwise` and `rowwise` share, and `vocab_parallel`, which shards the vocabulary.
"""
