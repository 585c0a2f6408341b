"""Predict the memory of a call from its schedule.

`memory` has the formulas, `methods` selects them for a method.
Predictions are for information only: no call depends on them.
"""
