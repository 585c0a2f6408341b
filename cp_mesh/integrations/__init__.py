"""Adapters to other packages and to PyTorch's context-parallel API, imported only on request.

`transformers`, `trainer`, `diffusers`, `torchtitan` (with `torchtitan_attention`) and `torch_api`. No function of
another package stays patched after a `with`: adapters use the registries of these packages, or copies of their
functions with other globals (`renamed`).
"""
