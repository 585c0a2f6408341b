"""What pieces of other ranks do to the states of this rank's pieces: a gather, and a fold in order of position."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cp_mesh.kernels.precision import exactly
from cp_mesh.mixers.moving import Group, gather_rows
from cp_mesh.mixers.pieces import Index, Ints, Kept, Pieces, index_on


class Way(NamedTuple):
    """How states pass on from piece to piece, or their gradients back.

    Attributes:
        most: states that a rank sends, at most.
        senders, receivers: own pieces whose A and B are gathered, and those to whose state `pass_on` adds; on the
            device ``sent`` and ``due``.
        steps: what each step of the fold takes of each document, among what was gathered; any index if nothing.
        at: of each receiver, where its state is among those after all steps.
        through: those that documents go through, among the senders.
    """

    most: int
    senders: Ints
    receivers: Ints
    sent: Index
    due: Index
    steps: list[Index]
    at: Index
    through: Index

    @classmethod
    def of(cls, pieces: Pieces, device: torch.device, back: bool) -> Way:
        sends, receives = (pieces.receives, pieces.sends) if back else (pieces.sends, pieces.receives)
        sent, slots = pieces.sent(sends)
        at, num = np.arange(len(pieces.rank)), len(pieces.rank)
        opens = np.flatnonzero(np.r_[True, np.diff(pieces.batch) != 0] | (pieces.start == pieces.first))
        lens = np.diff(np.r_[opens, num])
        depth = np.repeat(opens + lens - 1, lens) - at if back else at - np.repeat(opens, lens)
        receivers = np.flatnonzero(receives[pieces.own])
        depths, step = depth[pieces.own[receivers]], -1 if back else 1
        heads, of = np.unique(pieces.own[receivers] - step * depths, return_inverse=True)  # where documents begin
        order = np.clip(heads[:, None] + step * np.arange(depths.max(initial=0)), 0, num - 1)
        on = (sent.own, receivers, (depths - 1) * len(heads) + of, np.searchsorted(sent.own, pieces.through))
        own, due, end, through = (index_on(device, x) for x in on)
        steps = [index_on(device, x) for x in slots[order].T]
        return cls(sent.most, sent.own, receivers, own, due, steps, end, through)


class Between(Kept):
    """Passes states on from piece to piece, or their gradients ``back``; all calls over some pieces share one.

    A piece makes A S + B of the state S before it, where B is what it makes of the state that its rank knows. A is a
    matrix [HV, K, K] for each piece, or what decays, [HV, 1 or K, 1]. Backward, A is the transpose, S the gradient of
    the state after the piece, and B the gradient of the state before it that its rank knows of.

    Attributes:
        ways: forth and back.
        begin: of each own piece, the state that is known: 0 is none, then come those of documents if ``given``.
        held: own pieces with a state before them; ``num_held``: how many.
        sends, passes: whether a document goes on behind a piece of any rank, and through one, so that A is needed.
        reached: of each own piece, whether its document is on another rank, too; ``through``: those amid it.
    """

    def __init__(self, pieces: Pieces, device: torch.device, given: bool, group: Group) -> None:
        own, sends, receives = pieces.own, pieces.sends, pieces.receives
        opens = pieces.kept[own] & (pieces.start == pieces.first)[own]
        begin = np.where(opens, (pieces.document[own] + 1) * given, 0)
        held = np.flatnonzero((begin > 0) | receives[own])
        self.device, self.given, self.group, self.through = device, given, group, pieces.through
        self.lens: list[int] = pieces.lens.tolist()
        self.ways = Way.of(pieces, device, False), Way.of(pieces, device, True)
        self.begin, self.held, self.num_held = index_on(device, begin), index_on(device, held), len(held)
        self.sends, self.passes = bool(sends.any()), bool((sends & receives).any())
        self.reached: list[bool] = (sends | receives)[own].tolist()

    def pass_on(self, a: Tensor | None, b: Tensor, back: bool = False) -> tuple[Tensor, Tensor]:
        """States [receivers, HV, K, V] that this rank's pieces are due, of A and B of those that are sent.

        Also returns what was gathered: a rank without receivers needs it for its backward. A may be None where it is
        not needed.
        """
        way, both = self.ways[back], b
        if self.passes and a is not None:
            both = torch.cat([a.flatten(1), b.flatten(1)], 1)
        gathered = of_b = gather_rows(both, way.most, self.group)
        if not len(way.receivers):
            return b[:0], gathered
        if self.passes and a is not None:
            of_a, of_b = gathered.split([a.shape[1:].numel(), b.shape[1:].numel()], 1)
            of_a, of_b = of_a.unflatten(1, a.shape[1:]), of_b.unflatten(1, b.shape[1:])
        states = [of_b[way.steps[0]]]
        for slot in way.steps[1:]:
            a = of_a[slot]
            states.append((a * states[-1] if a.shape[-1] == 1 else exactly(torch.matmul, a, states[-1])) + of_b[slot])
        return (states[0] if len(states) == 1 else torch.cat(states))[way.at], gathered

    def add(self, states: Tensor | None, due: Tensor, back: bool = False) -> Tensor | None:
        """States of this rank's pieces [pieces, HV, K, V], those that receive with what they are due; None: zeros."""
        way, num = self.ways[back], len(self.lens)
        if not len(way.receivers):
            return states
        if len(way.receivers) == num:
            return due if states is None else states + due
        whole = due.new_zeros(num, *due.shape[1:]) if states is None else states.clone()
        whole[way.due] = due if states is None else whole[way.due] + due
        return whole

    def decays_of(self, g: Tensor | None, like: Tensor) -> Tensor:
        """A of this rank's pieces, of decays [rows, HV] or [rows, HV, K] and states [pieces, HV, K, V]."""
        if g is None:
            return like.new_ones(len(like), like.shape[1], 1, 1)
        none, parts = like.new_zeros(g.shape[1:]), zip(g.to(like.dtype).split(self.lens), self.reached, strict=True)
        a = torch.stack([*(part.sum(0) if reaches else none for part, reaches in parts), none])[:-1].exp()
        return a[..., None] if g.ndim == 3 else a[..., None, None]
