"""Functions of one score or one pair, as users write them for flex_attention: traced graphs, kept by a handle.

The string of an op carries a handle, and kernels find the function by it. A handle is a digest of the graph and of
shapes and dtypes of the tensors that it reads, captured ones, so equal functions are one, and a changed one is another.
A call keeps its functions alive until its backward has run; beside that the last ones are kept.
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

from cp_mesh._torch import dispatching, tree_leaves
from cp_mesh.errors import refuse

INDICES = ("b", "h", "q_idx", "kv_idx")
KEPT = 64
"""Functions that are kept though nobody holds them: those of a call whose backward recomputes it, for one."""


@dataclass(frozen=True, eq=False)
class ScalarFunction:
    """A function of one pair of a query and a key.

    Attributes:
        handle: the same for equal functions, on all ranks.
        said: what differs between functions of unlike handles, for an error.
        graph: (b, h, q_idx, kv_idx, *captured) -> bool, or with a score before these -> score; all of them scalars but
            the captured tensors.
        num_captured: how many tensors it reads.
        of_scalars: whether it reads these at single elements, and computes with scalars alone.
        code: of the graph, with the device of this rank, which the handle leaves out.
    """

    handle: str
    said: str
    graph: GraphModule
    num_captured: int
    of_scalars: bool
    code: str

    @classmethod
    def of(cls, name: str, graph: Graph, captured: Sequence[Tensor]) -> ScalarFunction:
        """The function of a graph; one that is known already if it is equal."""
        code = "\n".join(f"{x.name} = {x.target} {x.args} {x.kwargs}" for x in graph.nodes)
        read = ", ".join(f"{str(x.dtype).removeprefix('torch.')}{[*x.shape]}" for x in captured)
        anywhere = re.sub(r"(device\(type='\w+'), index=\d+\)", r"\1)", code)
        handle = hashlib.sha256(f"{anywhere}\n{read}".encode()).hexdigest()[:24]
        function = _known.get(handle)
        if function is None or function.code != code:
            said = f"{name} of captured [{read}], {handle}"
            function = _known[handle] = cls(
                handle, said, GraphModule(torch.nn.Module(), graph), len(captured), _of_scalars(graph, captured), code
            )
        if function in _last:
            _last.remove(function)
        _last.append(function)
        return function

    def check(self, captured: Sequence[Tensor], sizes: tuple[int, int, int, int], tp_size: int = 1) -> None:
        """Refuse tensors that are too short where they are read at an index itself, or at one that is cut at a number.

        Args:
            captured: as the graph takes them, or DTensors.
            sizes: how many batch rows, heads, queries and keys are counted.
            tp_size: ranks that have other heads, which are not counted: tensors of all of these are refused.
        """
        inputs = self.graph.graph.find_nodes(op="placeholder")
        of_index = dict(zip(inputs[len(inputs) - len(captured) - 4 :], zip(INDICES, sizes, strict=True), strict=False))
        for node in self.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.clamp.default):
            if node.args[0] in of_index and node.args[1] is None and type(last := node.args[2]) is int:  # as padding is
                of_index[node] = of_index[node.args[0]][0], min(of_index[node.args[0]][1], last + 1)
        of_captured = dict(zip(inputs[len(inputs) - len(captured) :], captured, strict=True))
        for node in self.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.index.Tensor):
            if node.args[0] not in of_captured:
                continue
            for dim, at in enumerate(node.args[1]):
                name, size = of_index.get(at, ("", 0))
                if (there := of_captured[node.args[0]].shape[dim]) < size:
                    hint = f"{name} counts all of the call: those of the whole sequence, and of all ranks of DTensors"
                    refuse(f"dim {dim} of a captured tensor, read at {name}", f"{size} elements", there, hint)
                if name == "h" and there == size * tp_size > size:
                    hint = f"read it at h + {size} * the rank of tp, or give q, k, v as DTensors, where h is global"
                    expected = f"{size} elements, the heads of this rank of tp, from which h counts"
                    refuse(f"dim {dim} of a captured tensor, read at h", expected, there, hint)

    def sizes(self, batch: int, heads: int) -> tuple[int, int]:
        """Of how many batch rows and heads a mask_mod differs; 1 where it does not read the index."""
        indices = self.graph.graph.find_nodes(op="placeholder")[:2]
        return batch if indices[0].users else 1, heads if indices[1].users else 1

    def of_pairs(
        self, score: Tensor | None, indices: tuple[Tensor, Tensor, Tensor, Tensor], captured: Sequence[Tensor]
    ) -> Tensor:
        """Of all pairs at once.

        Args:
            score: [B, H, rows, keys], for a function that takes one.
            indices: int64 [B], [H], [rows] and [keys], global ones.
            captured: as the graph takes them.

        Returns:
            [B, H, rows, keys].
        """
        if not all(map(len, indices)):  # which vmap refuses
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
        """Gradients of the score [B, H, rows, keys], and of those captured tensors that are wanted, by index.

        ``in_order``: sums have a fixed order.
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
    """The function of a handle; None for the empty one."""
    if not handle:
        return None
    function = _known.get(handle)
    if function is None:
        hint = "functions live in the process that traced them: call cp_mesh.flex_attention in this one"
        refuse("score_mod or mask_mod", "the handle of a function that was traced here", handle, hint)
    return function


_OF_AUTOGRAD = ("AutogradCPU", "AutogradCUDA", "ADInplaceOrView")
_OF_VMAP = (
    *("FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode", "FuncTorchBatched", "FuncTorchVmapMode"),
    *("FuncTorchGradWrapper", "PythonTLSSnapshot"),
)


@contextmanager
def _fixed_order(asked: bool) -> Iterator[None]:
    """Gradients of what is read at an index are sums by atomics else, if there are many."""
    before = torch.are_deterministic_algorithms_enabled()
    if not asked or before:
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
