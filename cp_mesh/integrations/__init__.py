"""Adapters to other packages and to PyTorch's own names, imported only when asked for.

`transformers`, `trainer`, `diffusers`, `torchtitan` (with `torchtitan_attention`, and `torchtitan_main` for its main
branch) and `torch_api`.
"""
