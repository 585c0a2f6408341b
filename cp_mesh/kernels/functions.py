"""score_mod and mask_mod, as users write them for flex_attention: traced graphs, found by a handle.

The attention op takes the handle in a string argument, and kernels look the function up by it. A handle is a digest of
the graph and of the shapes and dtypes of the captured tensors, so equal functions share one and a change gives another.
A call keeps its functions alive until its backward has run; a cache keeps the most recent ones.
"""

from __future__ import annotations

import hashlib
import re
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from cp_mesh._torch import dispatching, tree_leaves, without_source
from cp_mesh.errors import refuse

INDICES = ("b", "h", "q_idx", "kv_idx")
KEPT = 64
"""Recent functions that stay alive without an owner, for example for a backward that recomputes its call."""


@dataclass(frozen=True, eq=False)
class ScalarFunction:
    """A traced score_mod or mask_mod: a function of one query and one key.

    Attributes:
        handle: equal for equal functions, on all ranks.
        said: a description for errors, different for different handles.
        graph: (b, h, q_idx, kv_idx, *captured) -> bool, or (score, b, h, q_idx, kv_idx, *captured) -> score; all but
            the captured tensors are scalars.
        num_captured: number of captured tensors.
        of_scalars: whether it reads single elements of these and computes with scalars only.
        code: text of the graph, including this rank's device, which the handle leaves out.
    """

    handle: str
    said: str
    graph: GraphModule
    num_captured: int
    of_scalars: bool
    code: str

    @classmethod
    def of(cls, name: str, graph: Graph, captured: Sequence[Tensor]) -> ScalarFunction:
        """The function of a graph; the existing one if an equal one is known."""
        code = "\n".join(f"{x.name} = {x.target} {x.args} {x.kwargs}" for x in graph.nodes)
        read = ", ".join(f"{str(x.dtype).removeprefix('torch.')}{[*x.shape]}" for x in captured)
        anywhere = re.sub(r"(device\(type='\w+'), index=\d+\)", r"\1)", code)
        handle = hashlib.sha256(f"{anywhere}\n{read}".encode()).hexdigest()[:24]
        function = _known.get(handle)
        if function is None or function.code != code:
            said = f"{name} of captured [{read}], {handle}"
            module = without_source(GraphModule(torch.nn.Module(), graph))
            function = _known[handle] = cls(handle, said, module, len(captured), _of_scalars(graph, captured), code)
        if function in _last:
            _last.remove(function)
        _last.append(function)
        return function

    def check(self, captured: Sequence[Tensor], sizes: tuple[int, int, int, int], tp_size: int = 1) -> None:
        """Refuse captured tensors that are too short for a dim read at b, h, q_idx or kv_idx, clamped or not.

        Args:
            captured: as the graph takes them, or DTensors.
            sizes: numbers of batch rows, heads, queries and keys that the indices count.
            tp_size: number of tp ranks; if h counts this rank's heads only, a tensor with all ranks' heads is refused.
        """
        inputs = self.graph.graph.find_nodes(op="placeholder")
        of_index = dict(zip(inputs[len(inputs) - len(captured) - 4 :], zip(INDICES, sizes, strict=True), strict=False))
        for node in self.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.clamp.default):
            if node.args[0] in of_index and node.args[1] is None and type(last := node.args[2]) is int:  # for padding
                of_index[node] = of_index[node.args[0]][0], min(of_index[node.args[0]][1], last + 1)
        of_captured = dict(zip(inputs[len(inputs) - len(captured) :], captured, strict=True))
        for node in self.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.index.Tensor):
            if node.args[0] not in of_captured:
                continue
            for dim, at in enumerate(node.args[1]):
                name, size = of_index.get(at, ("", 0))
                if (there := of_captured[node.args[0]].shape[dim]) < size:
                    hint = f"{name} is a global index: over the whole sequence, and over all ranks of DTensors"
                    refuse(f"dim {dim} of a captured tensor, read at {name}", f"{size} elements", there, hint)
                if name == "h" and there == size * tp_size > size:
                    hint = f"read it at h + {size} * tp_rank, or pass q, k, v as DTensors, for which h is global"
                    expected = f"{size} elements, the heads of this tp rank, which h counts"
                    refuse(f"dim {dim} of a captured tensor, read at h", expected, there, hint)

    def sizes(self, batch: int, heads: int) -> tuple[int, int]:
        """Numbers of batch rows and of heads with masks of their own; 1 if the function does not read that index."""
        indices = self.graph.graph.find_nodes(op="placeholder")[:2]
        return batch if indices[0].users else 1, heads if indices[1].users else 1

    def of_pairs(
        self, score: Tensor | None, indices: tuple[Tensor, Tensor, Tensor, Tensor], captured: Sequence[Tensor]
    ) -> Tensor:
        """Evaluate the function at all pairs.

        Args:
            score: [B, H, rows, keys], for a function that takes one.
            indices: global indices, int64 [B], [H], [rows] and [keys].
            captured: as the graph takes them.

        Returns:
            [B, H, rows, keys].
        """
        if not all(map(len, indices)):  # vmap refuses empty dims
            empty = torch.empty([len(x) for x in indices], dtype=torch.bool, device=indices[0].device)
            return empty if score is None else score
        call: Callable[..., Tensor] = self.graph
        scores = () if score is None else (score,)
        for dim in (3, 2, 1, 0):
            over = [0 if i == dim else None for i in range(4)]
            call = torch.vmap(call, in_dims=(*[0] * len(scores), *over, *[None] * len(captured)))
        with dispatching(*_OF_VMAP):
            result = call(*scores, *indices, *captured)
        return result if score is None else result.to(score.dtype)

    def gradients(
        self,
        dscore: Tensor,
        score: Tensor,
        indices: tuple[Tensor, Tensor, Tensor, Tensor],
        captured: Sequence[Tensor],
        wanted: Sequence[int],
        in_order: bool,
    ) -> tuple[Tensor, list[Tensor]]:
        """Gradients of the score [B, H, rows, keys], and of the captured tensors whose indices are ``wanted``.

        With ``in_order``, sums have a fixed order.
        """
        with dispatching(*_OF_AUTOGRAD), torch.enable_grad(), _fixed_order(in_order):
            score = score.detach().requires_grad_()
            leaves = {i: captured[i].detach().requires_grad_() for i in wanted}
            value = self.of_pairs(score, indices, [leaves.get(i, x) for i, x in enumerate(captured)])
            inputs = [score, *leaves.values()]
            if not value.requires_grad:
                return torch.zeros_like(dscore), [torch.zeros_like(x) for x in leaves.values()]
            found = torch.autograd.grad(value, inputs, dscore, allow_unused=True, materialize_grads=True)
        return found[0], list(found[1:])


def _of_scalars(graph: Graph, captured: Sequence[Tensor]) -> bool:
    inputs = graph.find_nodes(op="placeholder")
    whole = {node for node, x in zip(inputs[len(inputs) - len(captured) :], captured, strict=True) if x.ndim}
    computed = [node for node in graph.nodes if node.op == "call_function"]

    def reads_whole(node: Node) -> bool:
        read = node.args[1:] if node.target is torch.ops.aten.index.Tensor else node.args
        return not whole.isdisjoint(tree_leaves((read, node.kwargs)))

    return not any(reads_whole(node) or any(x.ndim for x in tree_leaves(node.meta.get("val", ()))) for node in computed)


_known: weakref.WeakValueDictionary[str, ScalarFunction] = weakref.WeakValueDictionary()
_last: deque[ScalarFunction] = deque(maxlen=KEPT)


def find(handle: str) -> ScalarFunction | None:
    """The function of a handle; None for the empty handle."""
    if not handle:
        return None
    function = _known.get(handle)
    if function is None:
        hint = "functions exist only in the process that traced them: call cp_mesh.flex_attention in this process"
        refuse("score_mod or mask_mod", "the handle of a function that this process traced", handle, hint)
    return function


_OF_AUTOGRAD = ("AutogradCPU", "AutogradCUDA", "ADInplaceOrView")
_OF_VMAP = (
    *("FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode", "FuncTorchBatched", "FuncTorchVmapMode"),
    *("FuncTorchGradWrapper", "PythonTLSSnapshot"),
)


@contextmanager
def _fixed_order(asked: bool) -> Iterator[None]:
    """Use deterministic algorithms if ``asked``: otherwise gradients of indexed tensors may be summed by atomics."""
    before = torch.are_deterministic_algorithms_enabled()
    if not asked or before:
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
