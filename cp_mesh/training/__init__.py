"""What a trainer applies to a model: styles, the loss, gradients, and the checks beside them.

Read `parallelize`, `sharded_model` (the style of the root), `context_parallel` (of attention cores) and `boundaries`
(where the sharded part begins); `style_helpers` is what styles share, and `cp_mesh/wrap.py` how they replace a forward.
`loss` and `clip_grad` are what a step needs beside. `token_losses` and `compare_inputs` are ops. `checks` looks for
mistakes of a set-up; `probe`, with `widening`, compares a model with itself on a piece of a batch.
"""
