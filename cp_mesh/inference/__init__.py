"""Generation: few queries against keys that are sharded over ranks.

`decoding` has the function `decode`, `cache` holds the keys and values of a layer. `split_kv` and its kernels in
`split_kv_triton` split the keys of one head over a GPU.
"""

from cp_mesh._names import lazy as _lazy

__getattr__, __dir__, __all__ = _lazy(__name__)
