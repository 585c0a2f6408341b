"""Tools to run before training: verification, explanation, prediction and warm-up.

`verify` tests a configuration or a model, `explain` describes what a call will run, `warm_up` compiles kernels early.
"""
