"""Verify attention, or a whole model with its plan and trainer, against one device.

`verify` compares attention with `dense`. `verify_model` tests a model: `step` runs a step of a trainer, `reference` the
model on one rank, `compare` and `probes` find errors, `report` prints them. `training/traces.py` has rows of modules.
"""
