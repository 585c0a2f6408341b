"""Lower and upper bounds of the integers that a function computes, from its code and the bounds of positions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from cp_mesh._torch import to_copy

Bounds = tuple[int, int] | None  # None: unknown
aten = torch.ops.aten
MOST = 2**31 - 1


def _product(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    corners = [x * y for x in a for y in b]
    return min(corners), max(corners)


def _quotient(a: tuple[int, int], b: tuple[int, int]) -> Bounds:
    return (a[0] // b[0], a[1] // b[0]) if b[0] == b[1] > 0 else None


def _right(a: tuple[int, int], n: tuple[int, int]) -> Bounds:
    return (a[0] >> n[0], a[1] >> n[0]) if 0 <= n[0] < 32 else None


def _left(a: tuple[int, int], n: tuple[int, int]) -> Bounds:
    return (a[0] << n[0], a[1] << n[0]) if 0 <= n[0] < 32 else None


def _power(a: tuple[int, int], n: tuple[int, int]) -> Bounds:
    if not 0 <= n[0] < 32:
        return None
    corners = [x ** n[0] for x in (*a, *((0,) if a[0] < 0 < a[1] else ()))]
    return min(corners), max(corners)


_OF: dict[Any, Callable[..., Bounds]] = {
    aten.add.Tensor: lambda a, b: (a[0] + b[0], a[1] + b[1]),
    aten.sub.Tensor: lambda a, b: (a[0] - b[1], a[1] - b[0]),
    aten.rsub.Scalar: lambda a, b: (b[0] - a[1], b[1] - a[0]),
    aten.mul.Tensor: _product,
    aten.neg.default: lambda a: (-a[1], -a[0]),
    aten.abs.default: lambda a: (max(0, a[0], -a[1]), max(-a[0], a[1])),
    aten.minimum.default: lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    aten.maximum.default: lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    aten.floor_divide.default: _quotient,
    aten.scalar_tensor.default: lambda a: a,
    aten.detach.default: lambda a: a,
    aten.__rshift__.Scalar: _right,
    aten.bitwise_right_shift.Tensor_Scalar: _right,
    aten.__lshift__.Scalar: _left,
    aten.bitwise_left_shift.Tensor_Scalar: _left,
    aten.pow.Tensor_Scalar: _power,
}
_OF |= {aten.clamp_min.default: _OF[aten.maximum.default], aten.clamp_max.default: _OF[aten.minimum.default]}
_ALWAYS: dict[Any, Callable[[int], tuple[int, int]]] = {  # for any first argument
    aten.remainder.Scalar: lambda n: (0, n - 1),
    aten.bitwise_and.Scalar: lambda n: (0, n),
}
_NUMBERS = {aten.zeros_like.default: (0, 0), aten.ones_like.default: (1, 1)}
_KEEP_32_BITS = {  # results fit in 32 bits if the arguments do
    *(aten.detach.default, aten.sign.default, aten.minimum.default, aten.maximum.default, aten.where.self),
    *(aten.remainder.Tensor, aten.remainder.Scalar, aten.fmod.Tensor, aten.fmod.Scalar),
    *(aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_xor.Tensor, aten.bitwise_not.default),
    *(aten.bitwise_and.Scalar, aten.bitwise_or.Scalar, aten.bitwise_xor.Scalar),
}


def bounds_of(graph: Graph, known: Mapping[Node, Bounds]) -> dict[Node, Bounds]:
    """Bounds of all nodes, given those of indices (``known``); None for values that may exceed 32 bits."""
    found = dict(known)
    for node in graph.nodes:
        if node not in found:
            bounds = _bounds(node, found) if node.op == "call_function" else None
            found[node] = bounds if bounds and -MOST <= bounds[0] <= bounds[1] <= MOST else None
    return found


def may_leave_32_bits(graph: Graph, indices: Collection[Node], bounds: Mapping[Node, Bounds]) -> bool:
    """Whether an int64 computed from ``indices`` may overflow if they become int32, or uses a constant above 32 bits.

    Values that are read, or cast to int64 explicitly, stay int64, and so do results computed with them.
    """
    of_32 = set(indices)
    for node in graph.nodes:
        if any(type(x) is int and abs(x) > MOST for x in node.args) and not of_32.isdisjoint(node.all_input_nodes):
            return True
        if node.op != "call_function" or getattr(node.meta.get("val"), "dtype", None) != torch.int64:
            continue
        wide = (x for x in node.all_input_nodes if x not in of_32 and x.meta["val"].dtype == torch.int64)
        named = node.target is to_copy and node.kwargs.get("dtype") == torch.int64
        if node.target is aten.index.Tensor or named or any(True for _ in wide):
            continue
        of_32.add(node)
        if bounds[node] is None and not _keeps_32_bits(node, bounds):
            return True
    return False


def _keeps_32_bits(node: Node, bounds: Mapping[Node, Bounds]) -> bool:
    if node.target is not aten.floor_divide.default:
        return node.target in _KEEP_32_BITS
    by = _of_argument(node.args[1], bounds)  # -2^31 // -1 needs 33 bits
    return by is not None and not by[0] <= -1 <= by[1]


def _bounds(node: Node, found: Mapping[Node, Bounds]) -> Bounds:
    target, args = node.target, node.args
    dtype = getattr(node.meta.get("val"), "dtype", None)
    if dtype == torch.bool:
        return 0, 1
    if dtype not in (torch.int32, torch.int64):
        return None  # floats, or integers that wrap at fewer bits
    if target in _NUMBERS:
        return _NUMBERS[target]
    if target is aten.full_like.default:
        return _of_argument(args[1], found)
    if target in _ALWAYS and type(args[1]) is int and args[1] > 0:
        return _ALWAYS[target](args[1])
    if target in (aten.where.self, to_copy):
        parts = [_of_argument(x, found) for x in (args[1:] if target is aten.where.self else args)]
        return None if None in parts else (min(a for a, _ in parts), max(b for _, b in parts))  # type: ignore[misc]
    if target is aten.clamp.default:
        bounds = _of_argument(args[0], found)
        for limit, nearest in zip(args[1:], (max, min), strict=False):
            if limit is not None and bounds is not None:
                bounds = (nearest(bounds[0], limit), nearest(bounds[1], limit)) if type(limit) is int else None
        return bounds
    each = [_of_argument(x, found) for x in args]
    if target is aten.div.Tensor_mode and None not in each and node.kwargs["rounding_mode"] in ("floor", "trunc"):
        floors = _quotient(*each)  # type: ignore[arg-type]
        return floors and (floors[0], floors[1] + (node.kwargs["rounding_mode"] == "trunc"))
    return None if target not in _OF or None in each or set(node.kwargs) & {"alpha"} else _OF[target](*each)


def _of_argument(x: Any, found: Mapping[Node, Bounds]) -> Bounds:
    if isinstance(x, Node):
        return found[x]
    return (x, x) if type(x) is int else None
