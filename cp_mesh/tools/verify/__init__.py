"""Proofs: attention, or a whole model with its plan and trainer, against one device.

`verify` proves attention against `dense`. `verify_model` proves a model: `step` is a step of a trainer, `reference` the
model on one rank, `traces` what goes through modules, `compare` and `probes` find what is wrong, `report` says it.
"""
