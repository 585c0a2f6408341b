"""Recurrent layers over a sharded sequence, in the signatures of flash-linear-attention, with ``sequence``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

from cp_mesh._torch import untraced
from cp_mesh.call.spec import check_dense
from cp_mesh.comm.group_state import states_of_all
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.geometry.mask import Mask
from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.mixers.fla import by_fla, normalize
from cp_mesh.mixers.halo import convolution, last_rows, rolled
from cp_mesh.mixers.kernels import Kernel, choose_kernel, convolves_by_fla, folds
from cp_mesh.mixers.moving import gather_rows, to_heads, to_rows
from cp_mesh.mixers.pieces import Pieces
from cp_mesh.mixers.reference import Inputs
from cp_mesh.mixers.repeated import Decided, decide
from cp_mesh.mixers.scope import CallPlace, in_layout_of, place_of
from cp_mesh.mixers.states import by_states
from cp_mesh.mixers.tensors import Tensors, check
from cp_mesh.mixers.traffic import StateSizes, choose_method
from cp_mesh.sequence.cuts import Cuts
from cp_mesh.sequence.sharded_sequence import ShardedSequence

Method = Literal["auto", "states", "heads"]
METHODS = "auto", "states", "heads"


class Options(TypedDict, total=False):
    """Keywords of `gated_delta_rule`, `kda`, `delta_rule`, `gla` and `ssd`.

    Attributes:
        sequence: how the whole sequence is sharded. None: as the `RecurrentParallel` of the module that calls says; in
            a model without a plan this rank has all tokens.
        mask: documents, padding and length of the whole sequence; nothing else is read. A document begins from
            ``initial_state``, and rows of no document are 0. None: one document, or that of `RecurrentParallel`.
        scale: of q; None: K ** -0.5. Not of `ssd`.
        initial_state: before each document, [N, HV, K, V], equal on every cp rank; its gradient is this rank's share.
            N counts documents of the batch rows in order, B if there are none.
        output_final_state: return the state after each document, [N, HV, K, V] in float32, on every rank. The losses
            of all ranks read it, or of none: its backward is a collective.
        use_qk_l2norm_in_kernel: normalize q and k first. Not of `ssd`.
        method: "states" computes own rows and gathers states; "heads" exchanges rows for whole sequences of some heads;
            "auto", the default, takes the one that sends less.
        kernel: "torch" computes in chunks, in plain PyTorch; "fla" by the package fla-core, half precision on GPUs;
            "reference" token by token; "auto", the default, takes "fla" on GPUs, but not for `gla` with a decay
            for each channel; else "torch", of which it warns there.
    """

    sequence: ShardedSequence | None
    mask: Mask | None
    scale: float | None
    initial_state: Tensor | None
    output_final_state: bool
    use_qk_l2norm_in_kernel: bool
    method: Method
    kernel: Kernel


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Unpack[Options]
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule (Qwen3-Next, Qwen3.5, OLMo hybrid) over a sharded sequence.

    ``S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - k_t exp(g_t) S_{t-1})``, ``o_t = scale q_t S_t``.

    Args:
        q, k: this rank's rows, [B, T, H, K], local or DTensors over an axis that shards heads, Shard(2), and over the
            cp axis, Shard(1); all others alike. q, k and v have one dtype.
        v: [B, T, HV, V]; HV is a multiple of H.
        g: logarithm of the decay, [B, T, HV].
        beta: [B, T, HV].
        **options: `Options`.

    Returns:
        [B, T, HV, V] in v's dtype, and the final state or None; DTensors if the arguments are.

    Raises:
        ArgumentError: on shapes, dtypes, devices and placements that do not fit.
        UnsupportedError: on documents that come back, and heads that cp does not divide where the
            layout needs "heads". All ranks raise before the first collective.
    """
    return mix("gated_delta_rule", {"q": q, "k": k, "v": v, "g": g, "beta": beta}, options)


def kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Unpack[Options]
) -> tuple[Tensor, Tensor | None]:
    """Kimi delta attention: `gated_delta_rule` with a decay for each channel, g [B, T, HV, K]."""
    return mix("kda", {"q": q, "k": k, "v": v, "g": g, "beta": beta}, options)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **options: Unpack[Options]
) -> tuple[Tensor, Tensor | None]:
    """`gated_delta_rule` without decay."""
    return mix("delta_rule", {"q": q, "k": k, "v": v, "beta": beta}, options)


def gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, **options: Unpack[Options]
) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention: ``S_t = exp(g_t) S_{t-1} + k_t v_t``, ``o_t = scale q_t S_t``.

    Args:
        q, k, v: as in `gated_delta_rule`.
        g: logarithm of the decay, [B, T, HV] for each head (RetNet, lightning attention, simple GLA) or [B, T, HV, K]
            for each channel (GLA); None: none.
        **options: `Options`.
    """
    return mix("gla", {"q": q, "k": k, "v": v} | ({} if g is None else {"g": g}), options)


def ssd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, D: Tensor | None = None, **options: Unpack[Options]
) -> tuple[Tensor, Tensor | None]:
    """State space duality (Mamba-2): ``S_t = exp(dt_t A) S_{t-1} + dt_t B_t x_t``, ``y_t = C_t S_t + D x_t``.

    Args:
        x: this rank's rows, [B, T, H, P]. DTensors as in `gated_delta_rule`; then A and D are sharded by heads, too.
        dt: [B, T, H], positive: after its bias and softplus.
        A: [H], negative.
        B, C: [B, T, G, N], for groups of heads, in x's dtype.
        D: [H] or [H, P]; None: none.
        **options: `Options` without scale and normalization. States are [N, H, N of B, P].

    Returns:
        [B, T, H, P] in x's dtype, and the final state or None.
    """
    return mix("ssd", {"C": C, "B": B, "x": x, "dt": dt, "A": A, "D": D}, options)


@untraced
def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, sequence: ShardedSequence | None = None,
    mask: Mask | None = None, activation: Literal["silu", "swish"] | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, kernel: Kernel = "auto",
) -> Any:  # fmt: skip
    """Causal convolution of each channel over a sharded sequence, which does not reach into other documents.

    Args:
        x: this rank's rows, [B, T, D]; a DTensor may be sharded by channels, Shard(2), and weight and bias then, too.
        weight: [D, W]; its gradient, and that of the bias, is this rank's share.
        bias: [D].
        sequence, mask: as in `Options`.
        activation: applied to what comes out.
        initial_state: the inputs before each document, [N, D, W] as in flash-linear-attention, of which the last W - 1
            are read; equal on every cp rank, and its gradient is this rank's share. None: zeros.
        output_final_state: return the last W inputs of each document, too.
        kernel: "fla" is a kernel of fla-core, for half precision on GPUs, "torch" is `torch.convolution`; "auto" takes
            "fla" on GPUs, where it can, unless the module's style names "torch" or "reference".

    Returns:
        [B, T, D]; with ``output_final_state`` that and [N, D, W], on every rank. Rows of no document are as if each run
        of them were one.
    """
    what = "causal_conv1d"
    tensors = {"x": x, "weight": weight, "bias": bias, "initial_state": initial_state}
    place = place_of(what, sequence, mask, kernel=kernel)
    options = {"activation": activation, "output_final_state": output_final_state, "kernel": kernel}
    pieces, group, (fused, dtype), given, wrap = decide(_convolution, what, place, tensors, options)
    own, taps, bias, initial = given.values()
    assert own is not None and taps is not None
    convolved = own
    if fused:
        convolved, taps, bias = own.to(dtype), taps.to(dtype), None if bias is None else bias.to(dtype)
    out = convolution(convolved, taps, bias, pieces, group, initial, activation, fused)
    out = out if wrap.lead is None else wrap.rows(out)
    if not output_final_state:
        return out
    return out, wrap.states(last_rows(own.flatten(0, 1), taps.shape[1], initial, pieces, group))


def _convolution(what: str, place: CallPlace, options: Mapping[str, Any], given: Tensors) -> Decided:
    """Whether fla-core convolves, and the dtype of rows then."""
    (own, taps, bias, initial), activation = given.values(), options["activation"]
    autocast = own is not None and torch.is_autocast_enabled(own.device.type)
    check(what, given, _OF_CONVOLUTION, () if autocast else ("weight", "bias"))
    assert own is not None and taps is not None
    if activation not in (None, "silu", "swish"):
        refuse(f"{what}: activation", 'None, "silu" or "swish"', activation, "apply others to what is returned")
    half = autocast and own.dtype != torch.float64  # which autocast leaves as it is
    dtype = torch.get_autocast_dtype(own.device.type) if half else own.dtype
    fused = convolves_by_fla(what, options["kernel"], place.kernel, own.new_empty(0, dtype=dtype))
    pieces, moved = _pieces(what, place, own, initial), dtype if fused else own.dtype
    # both dtypes travel: final states in the first
    arguments = len(own), own.dtype, moved, *taps.shape, bias is None, initial is None, options["output_final_state"]
    return pieces, arguments, (fused, moved)


def token_shift(x: Tensor, *, sequence: ShardedSequence | None = None, mask: Mask | None = None) -> Tensor:
    """The row before each row of its document, 0 before the first (RWKV): `roll` by 1."""
    return _roll("token_shift", x, 1, {"sequence": sequence, "mask": mask})


def roll(
    x: Tensor, shifts: int, *, sequence: ShardedSequence | None = None, mask: Mask | None = None, fill_value: float = 0
) -> Tensor:
    """Rows of a sharded sequence moved by some positions, as `torch.roll` along dim 1, within their document.

    Args:
        x: this rank's rows, [B, T, ...]: labels or tokens of multi-token prediction, or states.
        shifts: row p gets what row ``p - shifts`` had; -1 gets the next token.
        sequence, mask: as in `Options`.
        fill_value: of rows that get none; -100 for labels.
    """
    return _roll("roll", x, shifts, {"sequence": sequence, "mask": mask}, fill_value)


_SHAPES = {"q": "B T H K", "k": "B T H K", "v": "B T HV V", "g": "B T HV", "beta": "B T HV"}
_OF_SSD = {"C": "B T G N", "B": "B T G N", "x": "B T H P", "dt": "B T H", "A": "H", "D": "H"}
_OF_CONVOLUTION = {"x": "B T D", "weight": "D W", "bias": "D", "initial_state": "documents D W"}


@untraced
def mix(what: str, tensors: Tensors, options: Options) -> tuple[Tensor, Tensor | None]:
    """Any of the rules, of its tensors by name."""
    place = place_of(what, **options)
    tensors = {**tensors, "initial_state": options.get("initial_state")}
    pieces, group, (run, scale, unit, heads, final), given, wrap = decide(_rule, what, place, tensors, options)
    found, initial = _inputs(what, given), given["initial_state"]
    if unit is not None:
        found = found._replace(q=unit(found.q), k=unit(found.k))
    v, here, of_here = found.v, pieces, group
    if heads:
        here, of_here = pieces.whole or pieces, (1, *group[1:])
        found = found.of_each(lambda x: to_heads(x, pieces, group))
        initial = None if initial is None else initial.chunk(group[0], 1)[pieces.cp_rank]
    casts = torch.is_autocast_enabled(v.device.type)
    with torch.autocast(v.device.type, enabled=False) if casts else nullcontext():
        out, states = by_states(run, found, initial, here, of_here, final, scale)
    if heads:
        out = to_rows(out, pieces, group)
        if states is not None:
            states = gather_rows(states.transpose(0, 1), states.shape[1], group).transpose(0, 1)
    if (D := given.get("D")) is not None and (x := given["x"]) is not None:
        out = (out + (D if D.ndim == 2 else D[:, None]) * x).to(x.dtype)
    if not pieces.all_kept:
        kept = pieces.on(v.device, "kept", lambda: np.repeat(pieces.kept[pieces.own], pieces.lens))
        out = out.masked_fill(~kept.view(*out.shape[:2], 1, 1), 0.0)
    return (out, states) if wrap.lead is None else (wrap.rows(out), wrap.states(states))


def _rule(what: str, place: CallPlace, options: Options, given: Tensors) -> Decided:
    """What runs, the scale, what normalizes q and k if anything does, whether by heads, and whether states go out."""
    for name in options:
        if name not in Options.__annotations__ or (what == "ssd" and name in ("scale", "use_qk_l2norm_in_kernel")):
            refuse(what, "options of cp_mesh.mixers", name, f"it has {', '.join(Options.__annotations__)}")
    _check(what, given)
    with torch.no_grad():  # a layer that is recomputed does not come here, and would save fewer tensors
        found = _inputs(what, given)
    initial, scale = given["initial_state"], options.get("scale")
    compute, q, v = choose_kernel(what, place.kernel, *found), found.q, found.v
    unit = normalize if compute is by_fla else _normalized
    pieces = _pieces(what, place, v, initial)
    method = _choose(what, place.method, pieces, found)
    scale = 1.0 if what == "ssd" else q.shape[-1] ** -0.5 if scale is None else scale
    run, final = partial(compute, scale=scale), options.get("output_final_state", False)
    shapes = len(v), q.shape[2:], v.shape[2:], v.dtype
    arguments = *shapes, method, scale, initial is None, final, "fla" if folds(run) else "no fla"
    normalizes, heads = options.get("use_qk_l2norm_in_kernel", False), method == "heads" and len(pieces.shard_lens) > 1
    return pieces, arguments, (run, scale, unit if normalizes else None, heads, final)


def _check(what: str, given: Tensors) -> None:
    if what == "ssd":
        D = given["D"]
        of_heads = "H P" if isinstance(D, Tensor) and D.ndim == 2 else "H"
        sizes = check(what, given, _OF_SSD | {"D": of_heads, "initial_state": "documents H N P"}, ("B", "x"))
        groups, heads = sizes["G"], sizes["H"]
    else:
        g = given.get("g")
        by_channel = what == "kda" or (what == "gla" and isinstance(g, Tensor) and g.ndim == 4)
        shapes = _SHAPES | {"initial_state": "documents HV K V"} | ({"g": "B T HV K"} if by_channel else {})
        sizes = check(what, given, shapes, ("k", "v"))
        groups, heads = sizes["H"], sizes["HV"]
    if heads % groups:
        refuse(f"{what}: heads", f"a multiple of {groups}", heads, "repeat heads, or groups")


def _inputs(what: str, given: Any) -> Inputs:
    """As [B, T, ...], of tensors that were checked."""
    if what != "ssd":
        return Inputs(given["q"], given["k"], given["v"], given.get("g"), given.get("beta"))
    x, dt = given["x"], given["dt"]
    dtype = accumulation_dtype(x.dtype)
    u = (x.to(dtype) * dt[..., None].to(dtype)).to(x.dtype)
    return Inputs(given["C"], given["B"], u, dt.to(dtype) * given["A"].to(dtype), None)


@untraced
def _roll(what: str, x: Tensor, shifts: int, options: dict[str, Any], fill_value: float = 0) -> Tensor:
    place = place_of(what, **options)
    if what == "roll" and place.sequence is None and any(cuts.last for cuts in states_of_all(Cuts)):
        hint = "pass sequence=; of whole tokens torch.roll, or a ShardedSequence over a mesh of one rank"
        refuse(what, "the sequence of x, in a process that shards sequences", None, hint)

    def checked(what: str, place: CallPlace, options: Any, given: Tensors) -> Decided:
        own = given["x"]
        check_dense(**{f"{what}: x": own})
        if own is None or own.ndim < 2:
            refuse(f"{what}: x", "[B, T, ...]", [*x.shape], "add a batch dim")
        if isinstance(shifts, bool) or not isinstance(shifts, int):
            refuse(f"{what}: shifts", "an int", shifts, "-1 gets the next token")
        pieces = _pieces(what, place, own, None)
        return pieces, (len(own), own.shape[2:], own.dtype, shifts, fill_value), None

    pieces, group, _, given, wrap = decide(checked, what, place, {"x": x}, {"shifts": shifts, "fill": fill_value})
    own: Any = given["x"]
    return wrap.rows(rolled(own.flatten(0, 1), shifts, pieces, group, fill_value).unflatten(0, own.shape[:2]))


@untraced
def agreed_pieces(what: str, x: Tensor, sequence: ShardedSequence, mask: Mask | None) -> Pieces:
    """The pieces of rows x [B, T, ...], compared over the ranks in a first call."""
    place, arguments = CallPlace(in_layout_of(what, sequence, mask), mask), (len(x), x.shape[2:], x.dtype)
    return decide(lambda *_: (_pieces(what, place, x, None), arguments, None), what, place, {"x": x}, {})[0]


def _pieces(what: str, place: CallPlace, x: Tensor, initial: Tensor | None) -> Pieces:
    if not len(x):
        refuse(f"{what}: batch", "1 row or more", 0, "leave the call out, on all ranks")
    pieces = place.pieces(what, *x.shape[:2])
    if initial is not None and len(initial) != pieces.num_documents:
        refuse(f"{what}: initial_state", pieces.num_documents, len(initial), "one state for each document")
    return pieces


def _normalized(x: Tensor) -> Tensor:
    """As flash-linear-attention does, in float32 or float64."""
    y = x.to(accumulation_dtype(x.dtype))
    return (y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


def _choose(what: str, method: str, pieces: Pieces, inputs: Inputs) -> str:
    """By the bytes that a rank sends."""
    q, _, v, g, beta = inputs
    (H, K), (HV, V), size = q.shape[2:], v.shape[2:], len(pieces.shard_lens)
    if method not in METHODS:
        refuse(f"{what}: method", " or ".join(METHODS), method, '"auto" decides by what travels')
    if method == "heads" and H % size:
        refuse(f"{what}: method", f"{size} ranks that divide {H} heads", "heads", 'method="states"', UnsupportedError)
    if method != "auto":
        return method
    decays = 0 if g is None else 1 if g.ndim == 3 else K
    return choose_method(pieces, StateSizes(len(v), H, HV, K, V, decays, beta is not None, v.dtype))
