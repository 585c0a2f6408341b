"""Where a call of a mixer runs: over the sequence that it names, over that of its module's style, or on one rank."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch.distributed as dist

from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.geometry.layouts import same
from cp_mesh.geometry.mask import Mask
from cp_mesh.mixers.pieces import Pieces, pieces_of
from cp_mesh.sequence.auto import is_by_batch
from cp_mesh.sequence.sharded_sequence import ROOT, ShardedSequence
from cp_mesh.wrap import inside_checkpoint


@dataclass(eq=False)
class Scope:
    """One forward of a module with `RecurrentParallel`: what its calls take, and which came.

    Without a sequence it is a planned model outside of such modules, where calls without a sequence are refused.
    """

    sequence: ShardedSequence | None = None
    mask: Mask | None = None
    method: str = "auto"
    kernel: str = "auto"
    called: set[str] = field(default_factory=set)


SCOPE: ContextVar[Scope | None] = ContextVar("cp_mesh_mixers", default=None)


class CallPlace(NamedTuple):
    """Where and how one call runs. ``stated`` is a mask that the call gives beside that of a style."""

    sequence: ShardedSequence | None
    mask: Mask | None
    stated: Mask | None = None
    method: str = "auto"
    kernel: str = "auto"

    @property
    def group(self) -> dist.ProcessGroup | None:
        return None if self.sequence is None else self.sequence.mesh.get_group()

    @property
    def name(self) -> str:
        """Of the group; "" on one rank."""
        return "" if self.group is None else self.group.group_name

    def pieces(self, what: str, batch: int, rows: int) -> Pieces:
        """`pieces_of` this place; refuse other rows than the root's, and a mask with other documents than the style's.

        Raises:
            ArgumentError: as `pieces_of`.
        """
        pieces, root = pieces_of(self.sequence, self.mask, batch, rows), ROOT.get()
        of_root = self.sequence is not None and root is not None and root.sequence.mesh == self.sequence.mesh
        if root is not None and of_root and pieces.seq_len != root.seq_len:
            hint = "call it on this rank's rows, without cuts or padding of your own"
            refuse(f"{what}: tokens", f"{root.seq_len} of the root's sequence", pieces.seq_len, hint)
        layout = None if self.sequence is None else self.sequence.layout
        if root is not None and layout is not None and root.differs(layout, root.seq_len, self.name):
            expected, hint = root.sequence.layout.spec(), "pass the batch's mask, as it reaches the module"
            refuse(f"{what}: layout", f"{expected}, of the root's batch", layout.spec(), hint)
        if self.stated is not None and pieces_of(self.sequence, self.stated, batch, rows).digest != pieces.digest:
            hint = "let RecurrentParallel(mask=) give those of the batch, or leave it out of the call"
            refuse(f"{what}: mask or cu_seqlens", "the documents of the style's mask", "others", hint)
        return pieces


def in_layout_of(what: str, sequence: Any, mask: Any) -> Any:
    """The sequence in the layout of a batch that the mask has; another layout of the caller's is refused."""
    layout = mask.layout if isinstance(mask, Mask) and isinstance(sequence, ShardedSequence) else None
    if layout is None or same(layout, sequence.layout):
        return sequence
    if not is_by_batch(sequence.layout):
        hint = "pass the sequence of the batch, sequence.for_batch(length, mask)"
        refuse(f"{what}: layout", f"{layout.spec()}, of the mask's batch", sequence.layout.spec(), hint)
    return replace(sequence, layout=layout)


def place_of(
    what: str, sequence: Any = None, mask: Any = None, method: str = "auto", kernel: str = "auto", **_: Any
) -> CallPlace:
    """The place of a call, by its keywords and by what surrounds it.

    Raises:
        ArgumentError: on a method or kernel beside that of a style, and in a planned model outside of its styles.
        UnsupportedError: in a checkpoint that begins inside of the module.
    """
    scope, root = SCOPE.get(), ROOT.get()
    given = CallPlace(in_layout_of(what, sequence, mask), mask, None, method, kernel)
    if scope is not None and scope.sequence is not None:
        scope.called.add(what)
        if given.sequence is not None:
            return given
        if inside_checkpoint():
            hint = "checkpoint the module that has the style, checkpoint(module, x, use_reentrant=False)"
            refuse(what, "a checkpoint around the whole module", "one that begins inside of it", hint, UnsupportedError)
        if (given.method, given.kernel) != ("auto", "auto"):
            hint = "leave it out: RecurrentParallel(method=, kernel=) has it"
            refuse(f"{what}: method or kernel", "auto, in a module with a style", given[3:], hint)
        return CallPlace(scope.sequence, scope.mask, given.mask, scope.method, scope.kernel)
    if given.sequence is None and (scope is not None or (root is not None and root.sequence.cp_size > 1)):
        hint = "name the module that calls it in the plan, RecurrentParallel(sequence), or pass sequence="
        refuse(what, "a module with RecurrentParallel", "a call that sees the rows of this rank alone", hint)
    return given
