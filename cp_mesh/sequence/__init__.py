"""A sequence whose rows are sharded over ranks, and records of how it was used.

`sharded_sequence` has a mesh axis, a layout and a length; it shards and gathers batches. `cuts` records the tensors
that were sharded, so that a loss can check the rows of its labels. `losses` records the losses that ran before a
model's first optimizer step; the loss itself is `training/loss.py`.
"""
