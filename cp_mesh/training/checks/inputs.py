"""Checks of a model without a `ShardedModel`, whose caller shards the inputs.

The inputs are checked once, in the first eager forward of the module that was passed to `cp_mesh.parallelize`.
Attention outside of the plan is checked as in a `ShardedModel`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cp_mesh.comm.agreement import exchange, refusing
from cp_mesh.comm.fingerprints import fingerprint
from cp_mesh.errors import REFUSALS, refuse, warn
from cp_mesh.sequence.cuts import is_cut
from cp_mesh.sequence.sharded_sequence import ROOT, WHOLE
from cp_mesh.training.checks.coverage import first_forward, look_of, run_in_mode, watch_encoders
from cp_mesh.training.foreign_functions import refuse_unplanned
from cp_mesh.training.sharded_model import POSITIONS, check_traced, names_of, refuse_counted
from cp_mesh.training.style_helpers import cores_of
from cp_mesh.wrap import INPUT, STYLE, WATCH, replace_forward, replaced


def watch_rootless(module: nn.Module) -> None:
    """Check the first forward of ``module``, which contains attention cores."""
    if replaced(module, STYLE) is None and replaced(module, WATCH) is None:
        replace_forward(module, WATCH, "Watch", functools.partial(_run, set(), check_traced(module)))
        watch_encoders(module)


def _run(
    checked_modes: set[tuple[Any, ...]],
    check: Callable[[], None],
    module: nn.Module,
    forward: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if replaced(module, STYLE) is not None:  # a ShardedModel was applied later
        return forward(*args, **kwargs)
    if torch.compiler.is_compiling():
        check()
        return run_in_mode(None, None, None, forward, *args, **kwargs)
    if ROOT.get() is not None or (look := look_of(module)) in checked_modes:
        return forward(*args, **kwargs)
    from cp_mesh.mixers.scope import SCOPE, Scope  # recurrent layers, which a model with a root needs not

    is_first = all(known[0] != look[0] for known in checked_modes)
    styles = cores_of(module)
    names = names_of(forward)
    with refusing(styles[0].sequence.mesh.get_group if styles else None, REFUSALS):
        whole = any(replaced(part, INPUT) is not None for part in module.modules())  # a ShardInput takes whole tokens
        given = dict(zip(names, args, strict=False)) | kwargs
        rows = _check(styles, names, given) if styles and is_first and not whole else None
        outside = Scope() if styles and styles[0].sequence.cp_size > 1 else None
        token = SCOPE.set(outside)
        try:
            if outside is not None:
                refuse_unplanned(module)
            with first_forward(module, rows, tokens=rows if outside is not None else None):
                result = forward(*args, **kwargs)
        finally:
            SCOPE.reset(token)
    checked_modes.add(look)
    return result


def _check(styles: list[Any], names: list[str], given: dict[str, Any]) -> int | None:
    """Refuse whole tokens, and positions counted on each rank; return the local length if the forward takes none."""
    sequence = styles[0].sequence
    tokens = next((x for name, x in given.items() if name not in (*POSITIONS, *WHOLE) and _is_ids(x)), None)
    if tokens is None or sequence.cp_size == 1:
        return None
    if sequence.length is None:
        group = sequence.mesh.get_group()
        # ranks exchange what each knows before any of them raises
        said = {"tokens": fingerprint(tokens), "cut": str(is_cut(tokens, group))}
        answers = exchange(group, said)
        alike = len(answers) > 1 and all(answer == said for answer in answers) and said["cut"] == "False"
        if alike and tokens.numel() > 1 and tokens.min() != tokens.max():
            hint = (
                "shard them, sequence.shard({...}), or give the plan a root, ShardedModel(sequence); for a benchmark "
                "on random tokens, parallelize(..., watch=False)"
            )
            refuse("model", "this rank's rows of the tokens", f"the same {tuple(tokens.shape)} on every cp rank", hint)
    found = {name: given.get(name) for name in names if name in POSITIONS}
    if not found:
        return int(tokens.shape[1])
    if all(x is None for x in found.values()):
        warn(
            f"the model's forward takes {' and '.join(found)}, and the call leaves them out: if every rank "
            "counts from 0, they are wrong on most ranks. Pass sequence.positions(seq_len), or give the plan a root, "
            "ShardedModel(sequence, positions=...)"
        )
    refuse_counted(sequence, styles, found, tokens.shape[1])
    return None


def _is_ids(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim == 2 and not x.is_floating_point() and x.dtype != torch.bool
