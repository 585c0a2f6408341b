"""Capabilities: which feature is exact or refused, for each method and kernel, by asking the code.

Only the calls are listed by hand. Kernels answer by `cp_mesh.kernels.contract.shortfalls`, methods by
`Method.settings`, as when a call is planned. Packages count as installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from cp_mesh.call.method import Method
from cp_mesh.call.plan import METHODS, request_of
from cp_mesh.call.spec import AttentionSpec, Operand
from cp_mesh.errors import ArgumentError, UnsupportedError
from cp_mesh.geometry.layouts import Layout, Permuted, ZigZag
from cp_mesh.geometry.mask import Mask
from cp_mesh.kernels.contract import Capability
from cp_mesh.kernels.merge import Kernel
from cp_mesh.kernels.table import KERNELS
from cp_mesh.tools.explain.variants import named_kernel

RANKS, TOKENS = 4, 32
EXACT = "exact"


@dataclass(frozen=True)
class Feature:
    """A call that uses one thing beyond causal attention with equal heads.

    Attributes:
        mask: options of `Mask`, of the whole sequence.
        layout: None is zigzag.
        scores: an option of the scores, as `cp_mesh.attention` or `cp_mesh.flex_attention` names it, or "".
        heads: query and kv heads.
        v_head_dim: k's is 8.
        through_lse: whether a gradient comes through lse.
        options: other options of the call.
    """

    mask: Mapping[str, Any] = field(default_factory=dict)
    layout: Layout | None = None
    scores: str = ""
    heads: tuple[int, int] = (16, 8)
    v_head_dim: int = 8
    through_lse: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


_POSITION = torch.arange(TOKENS)
FEATURES: dict[str, Feature] = {
    "causal": Feature(),
    "full": Feature({"causal": False}),
    "window": Feature({"window": (5, 0)}),
    "prefix": Feature({"prefix": 4}),
    "padding at the end (`length`)": Feature({"length": TOKENS - 3}),
    "packed documents": Feature({"documents": _POSITION // 11}),
    "documents whose ids come back": Feature({"documents": _POSITION // 5 % 2}),
    "key padding": Feature({"key_padding": _POSITION % 7 != 3}),
    "blocks of tokens that see each other": Feature({"blocks": (_POSITION // 6 % 2) * (_POSITION // 6 + 1) - 1}),
    "any permutation of tokens": Feature(layout=Permuted((_POSITION * 5 % TOKENS).tolist())),
    "softcap": Feature(scores="softcap"),
    "sinks": Feature(scores="sinks"),
    "ALiBi": Feature(scores="alibi_slopes"),
    "dense bias": Feature(scores="bias"),
    "dropout": Feature(scores="dropout_p"),
    "`score_mod` of `flex_attention`": Feature(scores="score_mod"),
    "its `mask_mod`": Feature(scores="mask_mod"),
    "multi-query: 1 kv head": Feature(heads=(16, 1)),
    "query heads that ranks do not divide": Feature(heads=(6, 2)),
    "heads in parts (`head_chunks=2`)": Feature(options={"head_chunks": 2}),
    "v head dim other than k's": Feature(v_head_dim=16),
    "gradient through lse": Feature(through_lse=True),
    "deterministic": Feature(options={"deterministic": True}),
    "deterministic, window": Feature({"window": (5, 0)}, options={"deterministic": True}),
}
"""What is asked, by the words of the table."""


def answer(feature: Feature, method: Method, kernel: Kernel) -> str:
    """`EXACT`, or why the call is refused, in a few words."""
    has = kernel.capability
    device, dtype = has.devices[0], torch.bfloat16 if torch.bfloat16 in has.dtypes else has.dtypes[0]
    capability = (has.only_on or ((9, 0),))[0] if device == "cuda" else (0, 0)
    layout, mask = feature.layout or ZigZag(), Mask(**feature.mask)
    options = AttentionSpec(layout.spec(), mask.spec(), 1.0, differentiable_lse=feature.through_lse, **feature.options)
    features = frozenset({"dropout_p": "dropout"}.get(feature.scores, feature.scores).split()) - {"sinks"}
    q, k, v = (
        Operand(torch.Size((1, heads, TOKENS // RANKS, dim)), dtype, torch.device(device))
        for heads, dim in zip((feature.heads[0], *feature.heads[1:] * 2), (16, 16, 2 * feature.v_head_dim), strict=True)
    )
    try:
        degree = method.choose_degree(options, q, k, RANKS)
        make = partial(method.make_schedule, layout, mask, TOKENS, RANKS, 0, degree=degree)
        schedule, _ = named_kernel(
            kernel.name, make, partial(request_of, q, v, options, features, compute_capability=capability), features
        )
        method.settings(options, q, k, v, schedule, kernel, features, degree)
    except (ArgumentError, UnsupportedError) as error:
        return _short(str(error))
    return EXACT


def cells() -> dict[tuple[str, str, str], str]:
    """Every answer: by feature, method and kernel."""
    return {
        (words, method.name, kernel.name): answer(feature, method, kernel)
        for words, feature in FEATURES.items()
        for kernel in KERNELS.values()
        for method in METHODS.values()
    }


def support_table() -> str:
    """For each feature the methods and kernels that compute it; what methods answer differently is told by method."""
    answers, usual = cells(), [name for name in KERNELS if name != "flex"]
    lines = ["| | methods | kernels |", "|---|---|---|"]
    for words in FEATURES:
        kernels: dict[str, list[str]] = {}
        for method in METHODS:
            able = [name for name in KERNELS if answers[words, method, name] == EXACT]
            if able:
                kernels.setdefault("any" if able == usual else ", ".join(able), []).append(method)
        methods = [method for names in kernels.values() for method in names]
        told = [f"{', '.join(names)}: {able}" if i else able for i, (able, names) in enumerate(kernels.items())]
        of_methods = "all" if len(methods) == len(METHODS) else ", ".join(methods)
        lines.append(f"| {words} | {of_methods} | {'; '.join(told)} |")
    return "\n".join(lines) + "\n"


def _short(message: str) -> str:
    """What is lacking, without where it is there and what works instead."""
    what = message.partition("; ")[0].partition(" lacks ")
    return (what[2] or what[0]).partition(" (has ")[0].partition(" (needs ")[0]


def kernel_table() -> str:
    """The capability records of all kernels as a Markdown table, in the order in which "auto" tries them."""
    header = "| kernel | devices | dtypes | tiles | scores | head dim | also |"
    lines = [header, "|---" * header.count(" | ") + "|---|"]
    for kernel in KERNELS.values():
        has = kernel.capability
        devices = ", ".join(has.devices)
        if has.compute_capability > (0, 0):
            only = [f"sm_{major}{minor}" for major, minor in has.only_on]
            devices += f" ({', '.join(only) or 'sm_{}{}+'.format(*has.compute_capability)}"
            devices += "".join(f"; auto: sm_{major}{minor}" for major, minor in has.auto_on) + ")"
        dims = f"multiples of {has.head_dim_multiple}" if has.head_dim_multiple > 1 else "any"
        dims += f" from {has.min_head_dim}" if has.min_head_dim > 1 else ""
        dims += f" to {has.max_head_dim}" if has.max_head_dim < 1 << 30 else ""
        cells = [
            kernel.name,
            devices,
            ", ".join(_SHORT[dtype] for dtype in has.dtypes),
            ", ".join(has.covers),
            ", ".join(sorted(has.features)) or "-",
            dims,
            ", ".join(_also(has)) or "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


_SHORT = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def _also(has: Capability) -> list[str]:
    """What else it can do."""
    found = ["v head dim"] * has.v_head_dim + ["gradient of lse"] * has.differentiable_lse
    if has.deterministic and has.deterministic_covers is not None:
        return [*found, f"deterministic ({', '.join(x for x in has.covers if x in has.deterministic_covers)})"]
    return [*found, "deterministic"] if has.deterministic else found
