"""One sequence whose rows ranks share, and what a rank saw of it.

Read `sharded_sequence` (a mesh axis, a layout, a length; it cuts and joins batches). `rows` remembers what was sharded
and how attention was called, so that a loss can tell whose rows its labels are. `losses` remembers which losses gave
which models their first gradients; the loss itself is `training/loss.py`.
"""

from cp_mesh._aliases import moved_from

__getattr__ = moved_from(__name__, "sharded_sequence")
