"""Layouts and masks as integers: which rank holds which tokens, and which queries see which keys.

`layout` has the interface of layouts, `layouts` and `tensor_layouts` have the layouts, `mask` and `batch_mask` the
masks. `block_table` and `survey` compute which rows of each rank see which keys of the other ranks. `schedule` turns
this into tiles and stages, `varlen` turns documents into variable-length sequences. `balance` makes layouts for uneven
masks, whose pairs `pair_counts` counts. `host_tensors` caches what was computed from the content of a tensor.
"""

from cp_mesh._names import lazy as _lazy

__getattr__, __dir__, __all__ = _lazy(__name__)
