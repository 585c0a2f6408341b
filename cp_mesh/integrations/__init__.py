"""Adapters to other packages and to PyTorch's own names, imported only when asked for.

`transformers`, `trainer`, `diffusers`, `torchtitan` (with `torchtitan_attention`, and `torchtitan_main` for its main
branch) and `torch_api`. No function of another package is replaced for longer than a `with`: we register what they let
us, and copy functions that are to find something of ours (`renamed`).
"""
