"""Linears, embeddings and losses sharded over a tp axis, with communication overlapped by matmuls.

Read `styles` (the public styles) and `plan` (which module gets which style). Then read `matmul` and `overlap`, which
`colwise` and `rowwise` share, and `vocab_parallel`, which shards the vocabulary.
"""

from cp_mesh._aliases import moved_from

__getattr__ = moved_from(__name__, "styles")
