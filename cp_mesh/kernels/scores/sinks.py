"""Sinks: a logit per head that enters the softmax denominator. Tile kernels ignore it: see `Scores.sinks`."""

import torch
from torch import Tensor

from cp_mesh.kernels.combine import make_delta


def include_sinks(lse: Tensor, sinks: Tensor) -> Tensor:
    """The lse [B, H, S] of all keys and the sink: the input of a backward without a gradient of lse."""
    return torch.logaddexp(lse, sinks[:, None])


def share_of_keys(lse: Tensor, sinks: Tensor) -> Tensor:
    """The keys' share of the softmax, w = exp(lse) / (exp(lse) + exp(sink)), [B, H, S]; 0 for a query without keys.

    With P the softmax without sinks, out = w·PV and dS = P ∘ (w·dO Vᵀ - w·rowsum(dO ∘ out) + dlse), dV = Pᵀ(w·dO). So a
    backward with w·dO and the lse *without* sinks is exact for any sinks. With an lse that includes sinks it would need
    dlse / w, which is infinite in float32 if a sink exceeds lse by 88.
    """
    return torch.sigmoid(lse - sinks[:, None]).nan_to_num_(0.0)  # NaN if lse and sink are -inf


def gradient_of_sinks(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Gradient [H] of sinks: the sum over this rank's rows of -P · rowsum(dout · out), P the sink's probability."""
    taken = torch.sigmoid(sinks[:, None] - lse).nan_to_num_(0.0)  # NaN if lse and sink are -inf, where out is 0
    return -(taken * make_delta(dout, out)).sum((0, 2))
