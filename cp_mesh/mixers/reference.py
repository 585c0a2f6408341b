"""The reference of all rules: plain PyTorch, token by token, on any device, with autograd.

    S_t = exp(g_t) S_{t-1} + k_t u_t,   u_t = beta_t (v_t - k_t exp(g_t) S_{t-1}) of a delta rule, else v_t
    o_t = scale q_t S_t

S is [K, V] for each head; g is a number for each head, or one for each channel of K.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cp_mesh.kernels.combine import accumulation_dtype


class Inputs(NamedTuple):
    """What a rule reads, of T rows.

    Attributes:
        q, k: [T, H, K].
        v: [T, HV, V]; HV is a multiple of H, and heads of v take those of q and k in groups.
        g: logarithm of the decay, [T, HV] or [T, HV, K]; None: no decay.
        beta: [T, HV] of a delta rule; None: of another.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None

    def of_each(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        return Inputs(*[x if x is None else change(x) for x in self])  # type: ignore[arg-type]

    def at(self, rows: Tensor | slice) -> Inputs:
        """These rows of each tensor."""
        return self.of_each(lambda x: x[rows])


Run = Callable[..., tuple[Tensor, Tensor]]
"""What computes sequences of inputs, initial states and lengths, as `recurrence` with a scale."""


def recurrence(inputs: Inputs, initial: Tensor, lens: list[int], scale: float) -> tuple[Tensor, Tensor]:
    """Compute sequences that lie one after another.

    Args:
        inputs: of all of them.
        initial: the state before each sequence, [N, HV, K, V].
        lens: tokens of each sequence.
        scale: of q.

    Returns:
        [T, HV, V] in v's dtype, and the state after each sequence, [N, HV, K, V] in float32, or float64 as v.
    """
    q, k, v, g, beta = inputs
    dtype = accumulation_dtype(v.dtype)
    steps, device = max(lens, default=0), v.device
    at = torch.arange(steps, device=device)
    counts = torch.tensor(lens, dtype=torch.int64, device=device)
    ends = counts.cumsum(0)
    begins = ends - counts
    inside = begins[:, None] + at < ends[:, None]
    index = torch.where(inside, begins[:, None] + at, len(v))  # a row of zeros changes no state

    def padded(x: Tensor) -> Tensor:
        x = torch.cat([x.to(dtype), x.new_zeros(1, *x.shape[1:], dtype=dtype)])[index]
        return x.unbind(1)  # type: ignore[return-value]

    groups = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(groups, 1) for x in (q, k))
    qs, ks, vs = padded(q), padded(k), padded(v)
    gs = None if g is None else padded(g if g.ndim == 3 else g[..., None])
    betas = None if beta is None else padded(beta)
    state, found = initial.to(dtype), []
    for t in range(steps):
        if gs is not None:
            state = state * gs[t].exp()[..., None]
        u = vs[t]
        if betas is not None:
            u = betas[t][..., None] * (u - torch.einsum("nhk,nhkv->nhv", ks[t], state))
        state = state + ks[t][..., None] * u[..., None, :]
        found.append(torch.einsum("nhk,nhkv->nhv", qs[t], state) * scale)
    out = torch.stack(found, 1)[inside] if found else v.to(dtype)
    return out.to(v.dtype), state
