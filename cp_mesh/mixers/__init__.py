"""Recurrent layers and causal convolutions over a sharded sequence, exact in every layout."""

from cp_mesh.mixers.rules import Options, causal_conv1d, delta_rule, gated_delta_rule, gla, kda, roll, ssd, token_shift

__all__ = [
    "Options",
    "causal_conv1d",
    "delta_rule",
    "gated_delta_rule",
    "gla",
    "kda",
    "roll",
    "ssd",
    "token_shift",
]
