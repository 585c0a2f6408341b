"""Proofs: attention, or a whole model with its plan and trainer, against one device.

`verify` proves attention against `dense`. `verify_model` proves a model: `step` is a step of a trainer, `reference` and
`chunks` the model on one rank, `traces`, `comparing`, `probes` and `scales` what is compared, `report` and `hints` what
is said of it. `factory`, `models` and `ranks` are their helpers.
"""
