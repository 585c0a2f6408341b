"""Linears, embeddings and losses sharded over a tp axis, with communication overlapped by matmuls.

Read `styles` (the public styles) and `plan` (which module gets which style). Then read `matmul` and `overlap`, which
`colwise` and `rowwise` share, and `vocab_parallel`, which shards the vocabulary. `losses_in_chunks` is a custom op.
"""

from cp_mesh._names import lazy as _lazy

__getattr__, __dir__, __all__ = _lazy(__name__)
