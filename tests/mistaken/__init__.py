"""Mistakes of training set-ups: each overrides one part of what `set_ups.Training` does right.

Their names, by group, are rows of docs/results/mistakes.md: what docs/guard.md says is caught, what it says is not, and
what users' models did in trials. A group of set-ups that are right shows that nothing is said of them.
"""

from importlib import import_module

from set_ups import Training

from mistaken.listing import GROUPS, MISTAKES, RIGHT, made

made(RIGHT, "right")(Training)
for name in ("batches", "attention", "positions", "mixing", "labels", "gradients", "beside"):
    import_module(f"mistaken.{name}")

TRACED = (
    *("right", "another batch on each rank", "batches that differ later", "another length on each rank"),
    *("another length later, one that was before", "a replica without rows in the first step"),
    *("whole inputs without a root", "inputs sharded twice", "chunks of the tokens given to the root"),
    *("a layer left out of the plan", "a window that the style does not state", "a Mask that no style reads"),
    *("a variable of a loop", "a tensor mask on one rank", "another window on each rank"),
    *("positions that nobody gives", "positions counted from 0 by the caller", "counted: learned, arange"),
    *("counted: learned, a buffer of ids", "counted: rotary, a table sliced", "counted: in the core, a table sliced"),
    *("positions taken and ignored", "matmul and softmax", "a convolution", "half of the rows in the core"),
    *("registers before q, k and v in the core", "labels by chunk", "labels shifted after sharding"),
    *("the last row of a shard", "the mean of a rank's rows", "a loss in the model from labels among its inputs"),
    *("gathered logits counted on every rank", "wrong labels of a loss compiled with the model"),
    *("gradients over cp alone", "gradients that nobody reduces", "other weights on each rank"),
)
"""Mistakes that are run in models compiled as a whole, too; each takes seconds, and others like them are left out."""
assert {*TRACED} <= {*MISTAKES}
__all__ = ["GROUPS", "MISTAKES", "RIGHT", "TRACED"]
