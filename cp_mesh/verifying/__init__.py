"""Proofs: attention, or a whole model with its plan and trainer, against one device."""
