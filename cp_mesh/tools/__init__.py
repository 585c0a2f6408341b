"""Tools to run before training: verification, explanation, prediction and warm-up.

`verification` tests a configuration or a model, `explain` describes what a call will run, `warming` compiles early.
"""
