"""Linears, embeddings and losses sharded over a tp axis; rows of the sequence travel while products are computed.

Read `styles` (what plans name) and `plan` (which module gets which style), then `matmul` and `overlap`, what `colwise`
and `rowwise` share, and `vocab_parallel`, the vocabulary over tp.
"""

from cp_mesh._aliases import moved_from

__getattr__ = moved_from(__name__, "styles")
