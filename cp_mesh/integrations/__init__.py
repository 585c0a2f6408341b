"""Adapters to other packages, imported only on request.

`transformers`, `trainer`, `diffusers`, and `torchtitan` (with `torchtitan_attention`). No function of another package
stays patched after a `with`: adapters use the registries of these packages, or copies of their functions with other
globals.
"""
