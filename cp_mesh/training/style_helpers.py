"""Helpers of the styles: check a module before a style is applied, find a call's layout, announce errors to ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cp_mesh.comm.agreement import announced_over, refusing
from cp_mesh.comm.groups import names_of_axes
from cp_mesh.errors import ArgumentError, describe, refuse, written
from cp_mesh.geometry.layouts import Layout, same
from cp_mesh.geometry.mask import Mask
from cp_mesh.sequence.auto import Open
from cp_mesh.sequence.cuts import note_mask
from cp_mesh.sequence.sharded_sequence import ROOT, ShardedSequence
from cp_mesh.wrap import INPUT, LINEAR, OUTPUT, STYLE, Style, replaced

SUMS = "_cp_mesh_sums"  # attribute of FSDP2 modules that sum gradients


class OverCP(Style):
    """A style of modules that run on this rank's rows of a sequence."""

    def __init__(self, sequence: ShardedSequence, layout: Callable[..., Layout] | None) -> None:
        name = type(self).__name__
        if not isinstance(sequence, ShardedSequence):
            refuse(f"{name}: sequence", "a ShardedSequence", sequence, "ShardedSequence(mesh) makes one")
        if layout is not None and not callable(layout):
            hint = "a layout for all batches is the sequence's, ShardedSequence(..., layout=)"
            refuse(f"{name}.layout", "a function that returns a Layout", layout, hint)
        self.sequence, self.layout = sequence, layout

    def check(self, module: nn.Module, mesh: DeviceMesh, where: str = "") -> None:
        super().check(module, mesh, where)
        if not has_axis(mesh, self.sequence.mesh):
            expected = f"the axis of the ShardedSequence, {written(self.sequence.mesh)}"
            refuse("mesh", expected, mesh, "apply the style to that axis")


class Core(OverCP):
    """A style of modules that mix tokens, which has a mask."""

    def __init__(self, sequence: ShardedSequence, mask: Any, layout: Callable[..., Layout] | None) -> None:
        name = type(self).__name__
        if not isinstance(mask, Mask) and not callable(mask):
            refuse(f"{name}.mask", "a Mask or a function that returns one", type(mask).__name__, "Mask(...)")
        super().__init__(sequence, layout)
        self.mask = mask

    def of_call(self, /, *args: Any, **kwargs: Any) -> tuple[Mask, Layout]:
        """Return the mask and the layout of a module's call, whose arguments these are."""
        mask = self.mask if isinstance(self.mask, Mask) else ask(self, "mask", self.mask, *args, **kwargs)
        if not isinstance(mask, Mask):
            name, got = type(self).__name__, type(mask).__name__
            refuse(f"{name}.mask", "a function that returns a Mask", got, "return one")
        layout = layout_of_call(self, mask, *args, **kwargs)
        check_root(self.sequence, layout)
        check_documents(self, mask)
        return mask, layout


def layout_of_call(style: Any, mask: Mask | None, /, *args: Any, **kwargs: Any) -> Layout:
    """Return the layout that the style's function gives for these arguments, or that of the mask or of its sequence."""
    if style.layout is None:
        layout = (mask and mask.layout) or style.sequence.layout
        if isinstance(layout, Open):
            root = None if torch.compiler.is_compiling() else ROOT.get()
            if root is None or root.sequence.mesh != style.sequence.mesh:
                layout.refuse()
            return root.sequence.layout
        return layout
    found = ask(style, "layout", style.layout, *args, **kwargs)
    if not isinstance(found, Layout):
        name, hint = type(style).__name__, "is it in the call? ShardedSequence.balanced(mask).layout makes one"
        refuse(f"{name}.layout", "a function that returns a Layout", type(found).__name__, hint)
    return found


def ask(style: Any, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a style's function with the arguments of a module's call; its errors are sent to the other ranks."""
    with refusing(style.sequence.mesh.get_group):
        try:
            return function(*args, **kwargs)
        except Exception as error:
            try:
                inspect.signature(function).bind(*args, **kwargs)
            except TypeError:
                given = [*(type(x).__name__ for x in args), *(f"{key}=" for key in kwargs)]
                expected = f"a function of the core's call arguments, ({', '.join(given)})"
                got, hint = f"one of {inspect.signature(function)}", "take *args, **kwargs"
                raise ArgumentError(describe(f"{type(style).__name__}.{name}", expected, got, hint)) from error
            raise


def check_root(sequence: ShardedSequence, layout: Layout) -> None:
    """Refuse a core's call whose layout differs from the layout in which the root sharded over the same ranks."""
    found = None if torch.compiler.is_compiling() else ROOT.get()
    if found is None or found.sequence.mesh != sequence.mesh:
        return
    check_layout_of_root(found.sequence, layout, "the core")


def check_documents(style: Any, mask: Mask) -> None:
    """Refuse a mask with documents beside one of another style without them, in one forward of a root."""
    if torch.compiler.is_compiling():
        return
    note_mask(mask, style.sequence.mesh.get_group())
    root = ROOT.get()
    if root is None or root.sequence.mesh != style.sequence.mesh:
        return
    name, packed = type(style).__name__, mask.documents is not None
    root.packed.setdefault(name, packed)
    for other, theirs in root.packed.items():
        if theirs != packed and other != name:
            words = ["no documents", "documents"]
            hint = "give both the same mask; documents=torch.zeros(length) says that all tokens are of one"
            refuse(f"{name}.mask", f"{words[theirs]}, as in that of {other}", words[packed], hint)


def check_layout_of_root(root: ShardedSequence, layout: Layout, where: str) -> None:
    """Refuse a layout that differs from the layout in which the root of a forward sharded the rows."""
    if not same(root.layout, layout):
        hint = "give all styles of a model one sequence, or functions that return the same layout for a batch"
        got = f"{layout.spec()} in {where}, {root.layout.spec()} at the root"
        refuse("layout", "one for the whole model", got, hint)


def styles_of(model: nn.Module) -> Iterator[Any]:
    """Yield the cp_mesh styles that were applied to a model."""
    for module in model.modules():
        yield from (style for key in (STYLE, INPUT, OUTPUT) if (style := style_of(module, key)) is not None)


def cores_of(model: nn.Module) -> list[Any]:
    return [style for style in styles_of(model) if isinstance(style, Core)]


def style_of(module: nn.Module, key: str = STYLE) -> Any:
    """Return the style of this module, or None."""
    replacement = replaced(module, key)
    run: Any = None if replacement is None else replacement.run  # a method of the style, or a partial of one
    return None if run is None else getattr(run, "func", run).__self__


def groups_over_cp(model: nn.Module) -> set[dist.ProcessGroup]:
    """Return the process groups over which the styles of a model split the sequence."""
    return {style.sequence.mesh.get_group() for style in styles_of(model)}


def groups_over_tp(module: nn.Module) -> set[dist.ProcessGroup]:
    """Return the process groups of the linear styles in a module."""
    runs: list[Any] = [found.run for part in module.modules() if (found := replaced(part, LINEAR)) is not None]
    return {run.args[0].mesh.get_group() for run in runs}


def gathers(model: nn.Module) -> bool:
    """Whether the model gathers its output, so that every cp rank computes the same loss."""
    return any(getattr(style, "gather_output", False) for style in styles_of(model))


announced = announced_over(lambda style, *_: style.sequence.mesh.get_group())


def has_axis(mesh: DeviceMesh, axis: DeviceMesh) -> bool:
    """Whether a mesh has this axis, or the two axes that were flattened to it."""
    name, names = axis.get_group().group_name, {mesh.get_group(i).group_name for i in range(mesh.ndim)}
    return name in names or any(names.issuperset(pair) for pair in names_of_axes(name))
