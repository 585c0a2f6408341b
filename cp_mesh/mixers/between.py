"""What pieces of other ranks do to the states of this rank's pieces: a gather, and a fold in order of position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cp_mesh.kernels.precision import exactly
from cp_mesh.mixers.moving import gather_rows
from cp_mesh.mixers.pieces import Ints, Pieces


class Between:
    """Passes states on from piece to piece, or their gradients ``back``.

    A piece makes A S + B of the state S before it, where B is what it makes of the state that its rank knows. A is a
    matrix [HV, K, K] for each piece, or what decays, [HV, 1 or K, 1]. Backward, A is the transpose, S the gradient of
    the state after the piece, and B the gradient of the state before it that its rank knows of.
    """

    def __init__(self, pieces: Pieces, device: torch.device, given: bool, group_name: str, what: str) -> None:
        self.pieces, self.device, self.given, self.group_name, self.what = pieces, device, given, group_name, what
        self.shape = torch.Size()  # [HV, K, V] of states, in the seam of delta rules
        self.a: Tensor | None = None  # of own pieces [HV, 1 or K, 1]; in that seam of `Pieces.through`, [HV, K, K]

    @property
    def begin(self) -> Ints:
        """Of each own piece, the state that is known: 0 is none, then come those of documents if ``given``."""
        pieces, own = self.pieces, self.pieces.own
        opens = pieces.kept[own] & (pieces.start == pieces.first)[own]
        return np.where(opens, (pieces.document[own] + 1) * self.given, 0)

    @property
    def held(self) -> Tensor:
        """Own pieces with a state before them."""
        pieces = self.pieces
        return self.index(("held", self.given), lambda: np.flatnonzero((self.begin > 0) | pieces.receives[pieces.own]))

    def sent(self, back: bool = False) -> Tensor:
        """Own pieces whose A and B are gathered."""
        return self.index(("sent", back), lambda: self.pieces.chains(back)[0].own)

    def due(self, back: bool = False) -> Tensor:
        """Own pieces to whose state `pass_on` adds."""
        return self.index(("due", back), lambda: self.pieces.chains(back)[1].own)

    def taken(self) -> Tensor:
        """A, which is not kept here any longer."""
        a, self.a = self.a, None
        assert a is not None
        return a

    def index(self, key: Any, make: Callable[[], Ints]) -> Tensor:
        return self.pieces.on(self.device, key, make)

    def pass_on(self, a: Tensor, b: Tensor, back: bool = False) -> tuple[Tensor, Tensor]:
        """States [receivers, HV, K, V] that this rank's pieces are due, of A and B of those that are sent.

        Also returns what was gathered: a rank without receivers needs it for its backward.
        """
        sent, chains = self.pieces.chains(back)
        both = torch.cat([a.flatten(1), b.flatten(1)], 1)
        gathered = gather_rows(both, sent.lens, self.pieces.cp_rank, self.group_name, self.what)
        of_a, of_b = gathered.split([a.shape[1:].numel(), b.shape[1:].numel()], 1)
        of_a, of_b = of_a.unflatten(1, a.shape[1:]), of_b.unflatten(1, b.shape[1:])
        if not len(chains.own):
            return b[:0], gathered
        slots = self.index(("slots", back), lambda: chains.slots).unbind(1)
        states = [of_b[slots[0]]]
        for slot in slots[1:]:
            a = of_a[slot]
            states.append((a * states[-1] if a.shape[-1] == 1 else exactly(torch.matmul, a, states[-1])) + of_b[slot])
        at = self.index(("at", back), lambda: (chains.depths - 1) * len(chains.slots) + chains.of)
        return torch.cat(states)[at], gathered

    def add(self, states: Tensor, due: Tensor, back: bool = False) -> Tensor:
        """States of this rank's pieces [pieces, HV, K, V], those that receive with what they are due."""
        return states.index_add(0, self.due(back), due.to(states.dtype))

    def decays_of(self, g: Tensor | None, like: Tensor) -> Tensor:
        """A of this rank's pieces, of decays [rows, HV] or [rows, HV, K] and states [pieces, HV, K, V]."""
        if g is None:
            return like.new_ones(len(like), like.shape[1], 1, 1)
        pieces, none = self.pieces, like.new_zeros(g.shape[1:])
        passes = (pieces.sends | pieces.receives)[pieces.own].tolist()
        parts = zip(g.to(like.dtype).split(pieces.lens.tolist()), passes, strict=True)
        a = torch.stack([*(part.sum(0) if passes else none for part, passes in parts), none])[:-1].exp()
        return a[..., None] if g.ndim == 3 else a[..., None, None]
