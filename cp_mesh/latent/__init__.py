"""Attention whose keys and values are expanded from one latent row a token (MLA): the latent travels, not K and V.

Read `function` (what users call), `ops` (its node) and `expand`: a kernel whose tiles expand the rows that they read.
Methods move latent rows as they move those of one kv head, so this room has no loop of its own. `selection` and
`indexed` are attention to keys that an indexer picked, which gathers them.
"""

from cp_mesh._names import lazy as _lazy

__getattr__, __dir__, __all__ = _lazy(__name__)
