"""What a module says of its own attention, and whether a style says the same.

`F.scaled_dot_product_attention` is told of no window, softcap or sinks: models hold them in attributes or in a config,
and make a mask tensor or call another kernel. In a core only what the style says counts.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from cp_mesh.errors import refuse
from cp_mesh.geometry.mask import Mask

_WINDOWS = ("sliding_window", "window_size", "attention_window")
_CHUNKS = ("attention_chunk_size",)
_HEAD_DIMS = ("head_dim", "dim_head", "d_head", "head_size")
_NUMBERS_OF_HEADS = ("num_heads", "n_heads", "num_attention_heads", "n_head", "heads")
HEAD_DIM = "_cp_mesh_head_dim"  # of a core: what is known of it, a `HeadDim`
_SOFTCAPS = ("attn_logit_softcapping", "attn_softcap", "logits_soft_cap", "softcap")


class Reach(NamedTuple):
    """How many keys a module says that its queries see. 0: all."""

    window: float
    chunk: float


def stated_reach(module: nn.Module) -> Reach:
    """By the module's attributes or by its config, as models of Hugging Face have them."""
    window, chunk = _own_number(module, _WINDOWS), _own_number(module, _CHUNKS)
    config = getattr(module, "config", None)
    if config is None:
        return Reach(window or 0, chunk or 0)
    kinds, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    kind = kinds[layer] if kinds and isinstance(layer, int) and layer < len(kinds) else None
    if window is None and (kind == "sliding_attention" if kinds else getattr(config, "use_sliding_window", True)):
        window = _own_number(config, ("sliding_window",))
    if chunk is None and kind == "chunked_attention":
        chunk = _own_number(config, ("attention_chunk_size",))
    return Reach(window or 0, chunk or 0)


def _own_number(owner: Any, names: tuple[str, ...]) -> Any:
    """The first attribute of these names, 0 if it is no positive number; None if there is none."""
    for name in names:
        if hasattr(owner, name):
            found = getattr(owner, name)
            return found if type(found) in (int, float) and found > 0 else 0
    return None


class HeadDim(NamedTuple):
    """The head dim that queries have if the forward counts the heads of a tp rank, rather than all.

    Attributes:
        size: of all queries.
        tp: ranks over which the features of the linears are sharded.
        said: where it was read, for messages.
    """

    size: int
    tp: int
    said: str


def stated_head_dim(module: nn.Module, queries: nn.Linear | None, tp: int) -> HeadDim | None:
    """By an attribute of a module with linears over tp, or by its number of heads and the linear of its queries."""
    if size := _own_number(module, _HEAD_DIMS):
        return HeadDim(size, tp, f"head_dim={size}")
    heads = _own_number(module, _NUMBERS_OF_HEADS)
    if queries is None or not heads or queries.out_features % heads:
        return None
    return HeadDim(queries.out_features // heads, tp, f"{heads} heads of {queries.out_features} features")


def check_head_dim(module: nn.Module, query: Tensor) -> None:
    """Refuse the queries of a forward that takes this tp rank's features for those of all heads."""
    stated: HeadDim | None = module.__dict__.get(HEAD_DIM)
    if stated is not None and stated.tp > 1 and query.shape[-1] * stated.tp == stated.size:
        hint = "count heads by -1, as unflatten(-1, (-1, head_dim)): a tp rank has some of them; if it is meant so, "
        hint += f"say it by the attribute head_dim={query.shape[-1]}"
        got = f"{query.shape[-1]} on tp={stated.tp}"
        refuse(f"ContextParallel({type(module).__name__}): head dim", f"{stated.size}, of {stated.said}", got, hint)


def check_reach(name: str, reach: Reach, mask: Mask, seq_len: int) -> None:
    """Refuse a mask that does not say the window or chunks of its module, where the sequence is longer."""
    if 0 < reach.window < seq_len and (mask.window is None or mask.window[0] not in (reach.window - 1, reach.window)):
        hint = f"ContextParallel(sequence, mask=Mask(window=({reach.window - 1}, 0)))"
        got = "a mask without a window" if mask.window is None else f"window={mask.window}"
        refuse(f"ContextParallel({name})", f"the module's window of {reach.window} keys", got, hint)
    if 0 < reach.chunk < seq_len and mask.documents is None:
        hint = f"chunks are documents: mask=Mask(documents=positions // {reach.chunk})"
        refuse(f"ContextParallel({name})", f"the module's chunks of {reach.chunk} keys", "a mask without them", hint)


def check_scores_stated(module: nn.Module, scores: Mapping[str, Any]) -> None:
    """Refuse scores that leave out a softcap, sinks or slopes that the module holds."""
    name, config = f"ContextParallel({type(module).__name__})", getattr(module, "config", None)
    softcap = _own_number(module, _SOFTCAPS)
    if softcap is None and config is not None:
        softcap = _own_number(config, _SOFTCAPS[:1])
    if softcap and scores.get("softcap") != softcap:
        hint = f'ContextParallel(sequence, scores={{"softcap": {softcap}}})'
        refuse(name, f"the module's softcap of {softcap}", scores.get("softcap"), hint)
    for term in ("sinks", "alibi_slopes"):
        if isinstance(getattr(module, term, None), Tensor) and term not in scores:
            hint = f'ContextParallel(sequence, scores=lambda core, *_, **__: {{"{term}": core.{term}}})'
            refuse(name, f"the module's {term} in scores", [*scores] or "none", hint)


def check_mask_read(module: nn.Module, mask: Mask, given: tuple[Any, ...]) -> None:
    """Refuse a `Mask` among a core's arguments that its style, which has a mask of its own, does not read."""
    for x in given:
        if isinstance(x, Mask) and x is not mask and x != mask:
            what, hint = f"ContextParallel({type(module).__name__})", "mask=lambda q, k, v, mask: mask reads it"
            refuse(what, "a style that reads the Mask that the core is called with", "mask=Mask(...)", hint)


def variables(function: Any) -> dict[str, Any]:
    """What a function reads beside its arguments, by name: variables around it, and globals."""
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    names = {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    found = {name: function.__globals__[name] for name in names if name in function.__globals__}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # it has no value yet
            continue
    return found


def check_variables(what: str, function: Callable[..., Any], before: Mapping[str, Any]) -> None:
    """Refuse a function whose variables are other ones than when its style was made, as those of a loop are."""
    for name, now in variables(function).items():
        if name in before and now is not before[name]:
            then = before[name]
            plain = isinstance(now, int | float | str | tuple | Mask) and type(now) is type(then)
            if plain and now == then:
                continue
            hint = f"bind it where the style is made, lambda ..., {name}={name}: ...; a loop rebinds its variable"
            shown = f"{then!r}, and now {now!r}" if plain else "another object now"
            refuse(what, f"a function of its arguments alone: its variable {name!r} as it was", shown, hint)
