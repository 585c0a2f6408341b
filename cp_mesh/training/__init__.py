"""What a trainer applies to a model: parallel styles, the loss, gradient clipping, and checks.

Read `parallelize`, `sharded_model` (the style of the root), `context_parallel` (the style of attention cores) and
`boundaries` (styles where the sharded part begins and ends). `tiled` (with `tile_call`) is a style that saves memory.
`style_helpers` holds what styles share, and `cp_mesh/wrap.py` replaces forwards. `loss` and `clip_grad` complete a
training step; `log_probs` is for other losses, and `token_losses` checks arguments of both. `compare_inputs` is a
custom op. `checks` finds mistakes in a training set-up. `probe` (with `widening` and `traces`) compares the sharded
model with the unsharded one on the first tokens of a batch.
"""

from cp_mesh._names import lazy as _lazy

__getattr__, __dir__, __all__ = _lazy(__name__)
