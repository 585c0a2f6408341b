"""One call of a tiled module: reads its arguments, runs it on some tokens, and checks in the first call that tokens do
not depend on one another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import get_device_states, set_device_states

from cp_mesh._torch import hooks_of_module, hooks_of_tensor, times_written, tree_flatten, tree_unflatten
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.wrap import style_over_cp

_KNOWN = ("torch.distributed.tensor", "cp_mesh.")  # hooks of styles over tp, and of checks
_ALONE = "leave it out of the plan, or tile a module within it that computes each token alone"


class TiledCall:
    """One call of a module. It holds no rows, so that hooks of saved tensors may move them to the host.

    Attributes:
        weights: the parameters with a gradient.
        lead: dims of the batch and of the rows.
        tiles: begin and length of each.
        kept: a node of autograd that saves the rows, if one has a gradient.
        flat, places, out_spec: of outputs: whether batch and rows are one dim, their numbers, None for no tensor.
    """

    def __init__(self, what: str, module: nn.Module, forward: Callable[..., Any], dim: int) -> None:
        self.what, self.module, self.forward, self.dim = what, module, forward, dim
        self.weights = [x for x in module.parameters() if x.requires_grad]
        self.versions = [times_written(x) for x in self.weights] if torch.is_grad_enabled() else []
        self.kinds, self.flat = list[Any](), list[bool]()
        self.kept: Any = None
        for part in module.modules():
            if part is not module:
                style = "fully_shard" if isinstance(part, FSDPModule) else style_over_cp(part)
                hooks = (hook for kind in hooks_of_module(part) for hook in kind.values())
                homes = {getattr(hook, "func", hook).__module__ for hook in hooks}
                if style or not all(home.startswith(_KNOWN) for home in homes):
                    got = f"{type(part).__name__} with {style or f'a hook of {sorted(homes)}'}"
                    self.refuse("modules inside without hooks and styles over cp", got, "they would run for each tile")
        if any(hooks_of_tensor(x) for x in self.weights):
            self.refuse("weights without hooks", "register_hook", "use register_post_accumulate_grad_hook")

    def refuse(self, expected: str, got: object, hint: str) -> NoReturn:
        refuse(self.what, expected, got, hint, UnsupportedError)

    def read(self, args: Any, kwargs: Any) -> list[Tensor]:
        """The rows among the arguments; of a DTensor that all ranks hold alike, the local ones."""
        self.leaves, self.spec = tree_flatten((args, kwargs))
        self.at = [i for i, x in enumerate(self.leaves) if isinstance(x, Tensor)]
        given = [self.leaves[i] for i in self.at]
        self.over = [(x.device_mesh, x.placements) if isinstance(x, DTensor) else None for x in given]
        if wrong := [each[1] for each in self.over if each and not all(isinstance(x, Replicate) for x in each[1])]:
            self.refuse("rows that tp does not shard", wrong[0], "let the styles inside take local tensors")
        rows = [x.to_local(grad_placements=x.placements) if isinstance(x, DTensor) else x for x in given]
        self.lead = rows[0].shape[: self.dim + 1] if rows else torch.Size()
        if len(self.lead) <= self.dim or any(x.shape[: self.dim + 1] != self.lead for x in rows):
            expected, got = f"tensors with the same first {self.dim + 1} dims", [tuple(x.shape) for x in rows]
            hint = "expand positions [S] to [B, S], hold other tensors in buffers; TiledMLP(dim=) is the dim of rows"
            refuse(self.what, expected, got, hint)
        if all(x.ndim == self.dim + 1 and x.is_floating_point() for x in rows):
            expected, got = f"rows with features, {self.dim + 2} dims at least", [tuple(x.shape) for x in rows]
            refuse(self.what, expected, got, "name the block of experts, not one of them; [n, C] needs TiledMLP(dim=0)")
        for i in self.at:
            self.leaves[i] = None
        self.device = rows[0].device.type
        self.dtype = torch.get_autocast_dtype(self.device) if torch.is_autocast_enabled(self.device) else None
        return rows

    def cut_into(self, tiles: int | None, tile_rows: int | None) -> None:
        length = self.lead[-1]
        count = tiles or max(1, -(-length // (tile_rows or 1)))
        edges = [length * i // count for i in range(count + 1)]
        if count == length > 1:  # of one row each, outputs [B, 1] may be a number a token, or [B * S, 1]
            edges[1] = 2
        self.tiles = [(begin, end - begin) for begin, end in pairwise(edges)]

    def run(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """The outputs of some rows, each with the dims of the batch and the rows first."""
        leaves, lead = [*self.leaves], rows[0].shape[: self.dim + 1]
        for i, x, over in zip(self.at, rows, self.over, strict=True):
            x = x.contiguous()  # a module may view it
            leaves[i] = x if over is None else DTensor.from_local(x, *over, run_check=False)
        args, kwargs = tree_unflatten(leaves, self.spec)
        # without its cache, which would keep copies of weights that have no graph
        with torch.autocast(self.device, self.dtype, self.dtype is not None, cache_enabled=False):
            found, self.out_spec = tree_flatten(self.forward(*args, **kwargs))
        outs = [y for y in found if y is not None]
        places = iter(range(len(outs)))
        self.places = [None if y is None else next(places) for y in found]
        if len(self.flat) != len(outs):
            self.flat = [isinstance(y, Tensor) and y.shape[: self.dim + 1] != lead for y in outs]
        firsts = [(lead.numel(),) if flat else lead for flat in self.flat]
        for y, first in zip(outs, firsts, strict=True):
            if not isinstance(y, Tensor) or isinstance(y, DTensor) or y.shape[: len(first)] != first:
                got = tuple(y.shape) if isinstance(y, Tensor) else y
                refuse(self.what, f"outputs of rows, {tuple(lead)} or ({lead.numel()},) first", got, _ALONE)
        outs = [y.unflatten(0, lead) if flat else y for y, flat in zip(outs, self.flat, strict=True)]
        kinds = [(y.shape[self.dim + 1 :], y.dtype) for y in outs]
        if kinds != (self.kinds or kinds):
            self.refuse(f"the same outputs of each tile, {self.kinds}", kinds, _ALONE)
        self.kinds = kinds
        return outs

    def check_weights(self) -> None:
        now = [x for x in self.module.parameters() if x.requires_grad]
        if [*map(id, now)] != [*map(id, self.weights)] or [times_written(x) for x in now] != self.versions:
            self.refuse("the weights of the forward in the backward", "others", "step, or swap weights, behind it")

    def part(self, x: Tensor, tile: tuple[int, int]) -> Tensor:
        return x.narrow(self.dim, *tile)

    @torch.inference_mode(False)
    def look(self, rows: Sequence[Tensor]) -> None:
        """Refuse a module that would compute something else in tiles: see `TiledMLP`."""
        length, device = self.lead[-1], rows[0].device
        num = min(length, max(2, min(max(num for _, num in self.tiles), length // 2)))
        among = torch.arange(0, length, max(1, length // max(1, num)), device=device)[:num]
        halves = [torch.arange(i, num, 2, device=device).flip(0) for i in range(min(2, num))]  # in another order
        leaves = [x.detach().index_select(self.dim, among).requires_grad_(x.is_floating_point()) for x in rows]
        random, training = random_state(rows), [x for x in self.module.modules() if x.training]
        # a checkpoint around the module counts what is saved
        with torch.enable_grad(), drawing(random), saved_tensors_hooks(lambda x: x, lambda x: x):
            given = [x.clone() for x in leaves]  # autograd forbids to write leaves
            before = self._state(given)
            found = self.run(given)
            drawn = not all(map(torch.equal, random.states, random_state(rows).states))
        if self._state(given) != before:
            self.refuse("buffers, attributes and an input that stay", "a write", f"it would come twice; {_ALONE}")
        self._check_graph(found, leaves)
        try:
            for part in training if drawn else ():
                part.training = False  # without dropout, which is another for each place
            with torch.no_grad(), drawing(random):
                outs = self.run(given) if drawn else [y.detach() for y in found]
                alone = [self.run([x.index_select(self.dim, half) for x in given]) for half in halves]
        finally:
            for part in training:
                part.training = True
        dtypes = {x.dtype for x in (*outs, *rows, *self.weights) if x.is_floating_point()}
        eps = max(torch.finfo(x).eps for x in (*dtypes, self.dtype or torch.float64))
        for x, ys in zip(outs, zip(*alone, strict=True), strict=False):  # without rows none were computed alone
            x, y = x.index_select(self.dim, torch.cat(halves)), torch.cat(ys, self.dim)
            bound = eps**0.5 * float(x.abs().nan_to_num(0, 0, 0).max()) if x.numel() else 0.0
            same = torch.isclose(x, y, rtol=0.0, atol=bound, equal_nan=True)[..., None].flatten(self.dim + 1).all(-1)
            if (wrong := int((~same).sum())) > 16 * eps * same.numel():  # near ties of a router in half precision
                got = f"{wrong} rows of {same.numel()} that depend on other rows, or on their place"
                self.refuse("rows that are computed alone", got, _ALONE)
        self._check_gradient(found, leaves)
        self.kinds, self.flat = [], []  # of one row they may have been misread

    def _check_gradient(self, outs: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
        """One row of the outputs has a gradient in its own inputs alone: this sees less than rounding, too."""
        number = rows[0].shape[: self.dim + 1].numel()
        own = number // 2
        given = [x for x in rows if x.requires_grad]
        picked = [y.flatten(0, self.dim)[own].sum() for y in outs if number and y.requires_grad]
        for grad in torch.autograd.grad(picked, given, allow_unused=True) if picked and given else ():
            if grad is not None:
                moved = grad.reshape(number, -1).nan_to_num(0.0, 0.0, 0.0).ne(0).any(-1)
                moved[own] = False
                if wrong := int(moved.sum()):
                    self.refuse("rows that are computed alone", f"one row that depends on {wrong} others", _ALONE)

    def _state(self, rows: Sequence[Tensor]) -> dict[Any, Any]:
        held: dict[Any, Any] = dict(enumerate(rows))
        for part in self.module.modules():
            held |= {(part, name): x for name, x in (*vars(part).items(), *part.named_buffers(recurse=False))}
        tensors = {name: (id(x), times_written(x)) for name, x in held.items() if isinstance(x, Tensor)}
        return tensors | {
            name: [*map(id, (y for y in x if isinstance(y, Tensor)))] for name, x in held.items() if isinstance(x, list)
        }

    def _check_graph(self, outs: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
        known, seen = {id(x) for x in (*rows, *self.weights)}, set[Any]((None,))
        nodes: list[Any] = [y.grad_fn for y in outs]
        while nodes:
            if (node := nodes.pop()) not in seen:
                seen.add(node)
                nodes += [before for before, _ in node.next_functions]
                if hasattr(node, "variable") and id(node.variable) not in known:
                    got, hint = f"another, {tuple(node.variable.shape)}", "its gradient would be lost; pass it as rows"
                    self.refuse("arguments and parameters as the tensors with a gradient", got, hint)


class Random(NamedTuple):
    """States of random numbers, of the CPU and then of devices."""

    devices: list[int]
    states: list[Tensor]


def random_state(rows: Sequence[Tensor]) -> Random:
    devices, states = get_device_states(*rows)
    return Random(devices, [torch.get_rng_state(), *states])


@contextmanager
def drawing(random: Random) -> Iterator[None]:
    """Draw from there, and leave the state outside as it was."""
    with torch.random.fork_rng(random.devices):
        torch.set_rng_state(random.states[0])
        set_device_states(random.devices, random.states[1:])
        yield
