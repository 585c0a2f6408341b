"""Predict the time and memory of a call from its schedule and a few measured numbers.

`time` and `memory` have the formulas, `methods` selects them for a method, `machines` reads and writes measurements.
Predictions are for information only: no call depends on them.
"""
