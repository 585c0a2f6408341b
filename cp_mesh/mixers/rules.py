"""Recurrent layers over a sharded sequence, in the signatures of flash-linear-attention, with ``sequence``."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from cp_mesh._torch import untraced
from cp_mesh.comm.agreement import refusing
from cp_mesh.comm.first_calls import agree_once
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.geometry.mask import Mask
from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.mixers.halo import convolution, with_halo
from cp_mesh.mixers.kernels import Kernel, choose_kernel
from cp_mesh.mixers.moving import gather_rows, to_heads, to_rows
from cp_mesh.mixers.pieces import Pieces, pieces_of
from cp_mesh.mixers.recurrence import Inputs
from cp_mesh.mixers.states import by_states
from cp_mesh.mixers.traffic import Sizes, choose_method
from cp_mesh.sequence.sharded_sequence import ShardedSequence

Method = Literal["auto", "states", "heads"]
METHODS = "auto", "states", "heads"


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    sequence: ShardedSequence,
    mask: Mask | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    method: Method = "auto",
    kernel: Kernel = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule (Qwen3-Next, Qwen3.5, OLMo hybrid) over a sharded sequence.

    ``S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - k_t exp(g_t) S_{t-1})``, ``o_t = scale q_t S_t``.

    Args:
        q, k: this rank's rows, [B, T, H, K].
        v: [B, T, HV, V]; HV is a multiple of H.
        g: logarithm of the decay, [B, T, HV]; with [B, T, HV, K] it is `kda`.
        beta: [B, T, HV].
        sequence: how the whole sequence is sharded.
        mask: its documents, its padding and its length; nothing else is read. A document begins from ``initial_state``,
            and rows of no document are 0.
        scale: of q; None: K ** -0.5.
        initial_state: before each document, [N, HV, K, V], equal on every cp rank; its gradient is this rank's share.
            N counts documents of the batch rows in order, B if there are none.
        output_final_state: return the state after each document, [N, HV, K, V] in float32, on every rank.
        use_qk_l2norm_in_kernel: normalize q and k first.
        method: "states" computes own rows and gathers states; "heads" exchanges rows for whole sequences of some heads;
            "auto" takes the one that sends less.
        kernel: "torch" computes in chunks, in plain PyTorch; "fla" by the package fla-core, half precision on GPUs;
            "reference" token by token; "auto" takes "torch".

    Returns:
        [B, T, HV, V] in v's dtype, and the final state or None.

    Raises:
        ArgumentError: on shapes that do not fit.
        UnsupportedError: on documents that come back, layouts with copies, and heads that cp does not divide where the
            layout needs "heads". All ranks raise before the first collective.
    """
    if use_qk_l2norm_in_kernel:
        q, k = _normalized(q), _normalized(k)
    options = Options("gated_delta_rule", sequence, mask, scale, initial_state, output_final_state, method, kernel)
    return mix(options, q, k, v, g, beta)


def kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, use_qk_l2norm_in_kernel: bool = False, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Kimi delta attention: `gated_delta_rule` with a decay for each channel, g [B, T, HV, K]."""
    if use_qk_l2norm_in_kernel:
        q, k = _normalized(q), _normalized(k)
    return mix(options_of("kda", **options), q, k, v, g, beta)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *, use_qk_l2norm_in_kernel: bool = False, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """`gated_delta_rule` without decay."""
    if use_qk_l2norm_in_kernel:
        q, k = _normalized(q), _normalized(k)
    return mix(options_of("delta_rule", **options), q, k, v, None, beta)


def gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention: ``S_t = exp(g_t) S_{t-1} + k_t v_t``, ``o_t = scale q_t S_t``.

    Args:
        q, k, v: as in `gated_delta_rule`.
        g: logarithm of the decay, [B, T, HV] for each head (RetNet, lightning attention, simple GLA) or [B, T, HV, K]
            for each channel (GLA); None: none.
        **options: those of `gated_delta_rule`.
    """
    return mix(options_of("gla", **options), q, k, v, g, None)


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """State space duality (Mamba-2): ``S_t = exp(dt_t A) S_{t-1} + dt_t B_t x_t``, ``y_t = C_t S_t + D x_t``.

    Args:
        x: this rank's rows, [B, T, H, P].
        dt: [B, T, H], positive: after its bias and softplus.
        A: [H], negative.
        B, C: [B, T, G, N], for groups of heads.
        D: [H] or [H, P]; None: none.
        **options: those of `gated_delta_rule`, without ``scale``. States are [N, H, N of B, P].

    Returns:
        [B, T, H, P] in x's dtype, and the final state or None.
    """
    dtype = accumulation_dtype(x.dtype)
    u = (x.to(dtype) * dt[..., None].to(dtype)).to(x.dtype)
    out, state = mix(options_of("ssd", scale=1.0, **options), C, B, u, dt.to(dtype) * A.to(dtype), None)
    if D is not None:
        out = out + (D if D.ndim == 2 else D[:, None]) * x
    return out, state


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    sequence: ShardedSequence,
    mask: Mask | None = None,
    activation: Literal["silu", "swish"] | None = None,
) -> Tensor:
    """Causal convolution of each channel over a sharded sequence, which does not reach into other documents.

    Args:
        x: this rank's rows, [B, T, D].
        weight: [D, W]; its gradient, and that of the bias, is this rank's share.
        bias: [D].
        sequence, mask: as in `gated_delta_rule`.
        activation: applied to what comes out.

    Returns:
        [B, T, D]. Rows of no document are as if each run of them were one.
    """
    what = "causal_conv1d"
    with refusing(sequence.mesh.get_group().group_name):
        if x.ndim != 3 or weight.shape[:1] != x.shape[2:]:
            refuse(what, "x [B, T, D] and weight [D, W]", f"{tuple(x.shape)} and {tuple(weight.shape)}", "transpose x")
        if activation not in (None, "silu", "swish"):
            refuse(f"{what}: activation", 'None, "silu" or "swish"', activation, "apply others to what is returned")
    pieces, name = agreed_pieces(what, x, sequence, mask, weight.shape)
    out = convolution(x.flatten(0, 1), weight, bias, pieces, name, what).unflatten(0, x.shape[:2])
    return out if activation is None else F.silu(out)


def token_shift(x: Tensor, *, sequence: ShardedSequence, mask: Mask | None = None) -> Tensor:
    """The row before each row of its document, 0 before the first (RWKV): `roll` by 1."""
    return roll(x, 1, sequence=sequence, mask=mask)


def roll(x: Tensor, shifts: int, *, sequence: ShardedSequence, mask: Mask | None = None, fill_value: int = 0) -> Tensor:
    """Rows of a sharded sequence moved by some positions, as `torch.roll` along dim 1, within their document.

    Args:
        x: this rank's rows, [B, T, ...]: labels or tokens of multi-token prediction, or states.
        shifts: row p gets what row ``p - shifts`` had; -1 gets the next token.
        sequence, mask: as in `gated_delta_rule`.
        fill_value: of rows that get none; -100 for labels.
    """
    pieces, name = agreed_pieces("roll", x, sequence, mask, (shifts,))
    before, after = max(shifts, 0), max(-shifts, 0)
    rows, at = with_halo(x.flatten(0, 1), pieces, before, after, name, "roll", fill_value)
    return rows[at - shifts].unflatten(0, x.shape[:2])


@untraced
def agreed_pieces(
    what: str, x: Tensor, sequence: ShardedSequence, mask: Mask | None, own: tuple[int, ...]
) -> tuple[Pieces, str]:
    """The pieces of rows x [B, T, ...], compared over the ranks with ``own`` in a first call; and the group's name."""
    group = sequence.mesh.get_group()
    with refusing(group.group_name):
        pieces = pieces_of(sequence, mask, *x.shape[:2])
    kind = what, len(x), x.shape[2:], x.dtype, tuple(own), sequence.layout.spec(), pieces.seq_len
    agree_once(group, kind, lambda: {"call": what, "arguments": repr(kind), "documents": pieces.digest})
    return pieces, group.group_name


class Options(NamedTuple):
    """What functions share; see `gated_delta_rule`."""

    what: str
    sequence: ShardedSequence
    mask: Mask | None
    scale: float | None
    initial_state: Tensor | None
    output_final_state: bool
    method: Method
    kernel: Kernel


def options_of(
    what: str,
    *,
    sequence: ShardedSequence,
    mask: Mask | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    method: Method = "auto",
    kernel: Kernel = "auto",
) -> Options:
    return Options(what, sequence, mask, scale, initial_state, output_final_state, method, kernel)


@untraced
def mix(
    options: Options, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Any of the rules; shapes as of `gated_delta_rule`."""
    what, sequence, mask, scale, initial, final, _, kernel = options
    group = sequence.mesh.get_group()
    with refusing(group.group_name):
        _check(options, q, k, v, g, beta)
        batch, rows = v.shape[:2]
        pieces = pieces_of(sequence, mask, batch, rows)
        if initial is not None and initial.shape != (expected := (pieces.num_documents, *_state(q, v))):
            refuse(f"{what}: initial_state", expected, tuple(initial.shape), "one state for each document")
        compute = choose_kernel(what, kernel, q, k, v, g)
        chosen = _choose(options, pieces, q, v, g, beta)
    shapes = batch, q.shape[2:], v.shape[2:], v.dtype, pieces.seq_len
    kind = what, shapes, chosen, sequence.layout.spec(), scale, initial is None, final
    agree_once(group, kind, lambda: {"call": what, "arguments": repr(kind), "documents": pieces.digest})
    run = partial(compute, scale=q.shape[-1] ** -0.5 if scale is None else scale)
    given: list[Tensor | None] = [q, k, v, g, beta]
    name, heads = group.group_name, chosen == "heads" and sequence.cp_size > 1
    if heads:
        inverse = pieces.on(v.device, "inverse", lambda: pieces.inverse)
        given = [None if x is None else to_heads(x, pieces.shard_lens, inverse, name, what) for x in given]
        if initial is not None:
            initial = initial.chunk(sequence.cp_size, 1)[sequence.cp_rank]
    here = pieces.whole if heads and pieces.whole is not None else pieces
    flat = Inputs(*(None if x is None else x.flatten(0, 1) for x in given))  # type: ignore[arg-type]
    out, states = by_states(run, flat, initial, here, name, what, final)
    out = out.unflatten(0, (batch, -1))
    if heads:
        order = pieces.on(v.device, "order", lambda: pieces.order)
        out = to_rows(out, pieces.shard_lens, order, sequence.cp_rank, name, what)
        if states is not None:
            lens = (states.shape[1],) * sequence.cp_size
            states = gather_rows(states.transpose(0, 1), lens, sequence.cp_rank, name, what).transpose(0, 1)
    return out, states


def _normalized(x: Tensor) -> Tensor:
    """As flash-linear-attention does, in float32 or float64."""
    y = x.to(accumulation_dtype(x.dtype))
    return (y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


def _state(q: Tensor, v: Tensor) -> tuple[int, int, int]:
    return v.shape[2], q.shape[3], v.shape[3]


def _check(options: Options, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None) -> None:
    what = options.what
    if any(isinstance(x, DTensor) for x in (q, k, v, g, beta)):
        refuse(what, "local tensors", "a DTensor", "pass x.to_local() of each, and wrap what is returned")
    if v.ndim != 4 or q.ndim != 4:
        refuse(
            what, "q, k [B, T, H, K] and v [B, T, HV, V]", f"{tuple(q.shape)} and {tuple(v.shape)}", "add a batch dim"
        )
    (B, T, H, K), HV = q.shape, v.shape[2]
    shapes: dict[str, tuple[Tensor | None, list[tuple[int, ...]]]] = {
        "k": (k, [(B, T, H, K)]),
        "v": (v, [(B, T, HV, v.shape[3])]),
        "g": (g, [(B, T, HV), (B, T, HV, K)]),
        "beta": (beta, [(B, T, HV)]),
    }
    for name, (x, expected) in shapes.items():
        if x is not None and tuple(x.shape) not in expected:
            refuse(f"{what}: {name}", " or ".join(map(str, expected)), tuple(x.shape), "heads are dim 2, as in FLA")
    if HV % H:
        refuse(f"{what}: heads", f"a multiple of {H} heads of v", HV, "repeat heads")
    if options.method not in METHODS:
        refuse(f"{what}: method", " or ".join(METHODS), options.method, '"auto" decides by what travels')


def _choose(options: Options, pieces: Pieces, q: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None) -> Method:
    """By the bytes that a rank sends."""
    what, (HV, K, V), H = options.what, _state(q, v), q.shape[2]
    if options.method == "heads" and H % (size := len(pieces.shard_lens)):
        refuse(f"{what}: method", f"{size} ranks that divide {H} heads", "heads", 'method="states"', UnsupportedError)
    if options.method != "auto":
        return options.method
    decays = 0 if g is None else 1 if g.ndim == 3 else K
    return choose_method(pieces, Sizes(len(v), H, HV, K, V, decays, beta is not None, v.dtype))
