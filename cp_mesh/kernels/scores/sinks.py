"""A logit of each head that joins the softmax's denominator. Tiles do not see it: see `Scores.sinks`."""

import torch
from torch import Tensor

from cp_mesh.kernels.combine import make_delta


def include_sinks(lse: Tensor, sinks: Tensor) -> Tensor:
    """The lse [B, H, S] of all keys and the sink: what a backward is given where no gradient comes through lse."""
    return torch.logaddexp(lse, sinks[:, None])


def share_of_keys(lse: Tensor, sinks: Tensor) -> Tensor:
    """[B, H, S], what the sink leaves to the keys: w = exp(lse) / (exp(lse) + exp(sink)); 0 for a query with no key.

    With P the softmax without sinks, out = w·PV and dS = P ∘ (w·dO Vᵀ - w·rowsum(dO ∘ out) + dlse), dV = Pᵀ(w·dO). So a
    backward that is given w·dO and the lse *without* sinks is right, whatever the sinks are. Given the lse with sinks,
    it would need dlse / w, which is infinite in float32 where a sink is above lse by 88.
    """
    return torch.sigmoid(lse - sinks[:, None]).nan_to_num_(0.0)  # NaN where neither has a weight


def gradient_of_sinks(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """[H], the sum over this rank's rows of -P · rowsum(dout · out), P the sink's probability."""
    taken = torch.sigmoid(sinks[:, None] - lse).nan_to_num_(0.0)  # NaN where neither has a weight: out is 0
    return -(taken * make_delta(dout, out)).sum((0, 2))
