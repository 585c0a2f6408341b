"""The custom op with which compiled code compares the inputs of a `ShardedModel` over the cp ranks."""

from typing import Any

import torch
from torch import Tensor

from cp_mesh._torch import resolve_group
from cp_mesh.comm.agreement import compare_batch
from cp_mesh.geometry.host_tensors import Content
from cp_mesh.geometry.layouts import parse_layout
from cp_mesh.sequence.cuts import note_cut


def kind_of(inputs: dict[str, Any]) -> tuple[Any, ...]:
    return tuple((name, None if x is None else (x.shape, x.dtype)) for name, x in inputs.items())


# A custom op, so that compiled code compares at run time. It returns copies, since an op may not return its inputs.
@torch.library.custom_op("cp_mesh::compare_inputs", mutates_args=())
def compare_inputs(inputs: list[Tensor], names: str, group_name: str, layout: str) -> list[Tensor]:
    """Compare the inputs over the group in the first forward of each shape, and note that this layout shards them.

    Tensors behind those with names are of the layouts of masks, and are compared in every forward.
    """
    found, group = dict(zip(names.split(), inputs, strict=False)), resolve_group(group_name)
    if inputs:
        tables = " ".join(f"{Content.of(x).number:x}" for x in inputs[len(found) :])
        compare_batch(group, kind_of(found), found, layout=tables)
    if layout:
        parsed = parse_layout(layout)
        multiple = parsed.multiple(group.size())
        for name, x in found.items():
            note_cut(name, x, parsed, -(-x.shape[-1] // multiple) * multiple, group)
    return [x.clone() for x in inputs]


@compare_inputs.register_fake
def _(inputs: list[Tensor], names: str, group_name: str, layout: str) -> list[Tensor]:
    return [torch.empty_like(x) for x in inputs]
