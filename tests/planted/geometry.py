"""Bugs of masks, layouts, the schedule, documents as sequences, and balanced layouts.

Those of the schedule change what `make_schedule` returns: every rank's, so that the ranks agree on what travels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from inside import Band, Distances

from planted.seams import in_area, with_arguments, with_result

# --- masks
plant = in_area("masks")


@plant("strict instead of inclusive diagonal", "mask:Mask.allowed", "masks")
def _(allowed: Any) -> Any:
    def mutant(self: Any, q_pos: Any, k_pos: Any) -> Any:
        return allowed(self, q_pos, k_pos) & ~((q_pos[:, None] == k_pos) & self.causal)

    return mutant


@plant("a document starts a token late", "mask:Mask.from_cu_seqlens", "masks")
def _(from_cu_seqlens: Any) -> Any:
    def late(mask: Any) -> Any:
        return replace(mask, documents=torch.cat([mask.documents[:1], mask.documents[:-1]]))

    return with_result(from_cu_seqlens, late)


@plant("masks read by local instead of global index", "kernels.contract:Pairs.allowed", "parity")
def _(allowed: Any) -> Any:
    return lambda self, *rows: allowed(replace(self, q_pos=torch.arange(len(self.q_pos))), *rows)


plant("a batch row has the key padding of another", "kernels.contract:Pairs.allowed", "parity")(
    lambda allowed: with_result(allowed, lambda pairs: pairs.flip(0))
)


@plant("a query does not see itself", "mask:Mask.reaches", "blocks")
def _(reaches: Any) -> Any:
    def later(found: Any) -> Any:
        return tuple(reach._replace(nearest=reach.nearest or 1) for reach in found)

    return with_result(reaches, later)


plant("pieces at the end of a window are left out", "block_table:sees", "coverage")(
    lambda sees: with_arguments(sees, k=lambda k: k._replace(farthest=k.farthest - 1))
)
plant("pieces that share their last document alone are left out", "survey:_labelled", "coverage")(
    lambda labelled: with_result(labelled, lambda pieces: pieces._replace(labels=pieces.labels - np.array([0, 1])))
)
plant("a step in which few ranks fetch is taken for idle", "survey:active_steps", "coverage")(
    lambda active_steps: with_result(active_steps, lambda steps: steps[:-1])
)


# --- layouts
plant = in_area("layouts")


plant("inverse and permutation mixed up", "layout:Layout.inverse", "layouts")(
    lambda inverse: lambda self, seq_len, cp_size: self.permutation(seq_len, cp_size)
)
plant("two ranks hold one stripe", "layouts:Striped.runs", "layouts")(
    lambda runs: with_arguments(runs, cp_rank=lambda cp_rank: max(0, cp_rank - 1))
)
plant("documents are dealt out by tokens alone", "balance:balance", "balance")(
    lambda balance: with_arguments(balance, mask=lambda mask: replace(mask, documents=None))
)


@plant("a row is given to two ranks where a document is cut", "balance:_deal", "balance")
def _(deal: Any) -> Any:
    def mutant(parts: Any, *others: Any) -> Any:
        most, shards = deal(parts, *others)
        starts = {part.begin for part in parts}
        early = [[(x - (n > 0 and x not in starts), n) for x, n in runs] for runs in shards]  # of later parts
        return most, early

    return mutant


# --- the schedule
plant = in_area("the schedule")


def of_tiles(change: Callable[[Any, bool], Any]) -> Callable[[Any], Any]:
    """Of `make_schedule`: every tile is what a function makes of it, told whether keys are this rank's own; or none."""

    def changed(schedule: Any) -> Any:
        def every(tiles: Any, local: bool) -> tuple[Any, ...]:
            made = (change(tile, local) for tile in tiles)
            return tuple(tile for tile in made if tile is not None)

        stages = tuple(replace(stage, tiles=every(stage.tiles, False)) for stage in schedule.route.stages)
        route = replace(schedule.route, stages=stages)
        return replace(schedule, local_tiles=every(schedule.local_tiles, True), route=route)

    return lambda make_schedule: with_result(make_schedule, changed)


@plant("the window against keys of other ranks is a key wider", "schedule:make_schedule", "coverage")
@of_tiles
def _(tile: Any, local: bool) -> Any:
    shape = tile.q[1] - tile.q[0], tile.k[1] - tile.k[0]
    if local or not isinstance(tile.cover, Band):
        return tile
    at = Distances.of(tile.cover, *shape)
    return replace(tile, cover=Distances(at.lo, None if at.hi is None else at.hi + 1).band(*shape))


@plant("bands counted from local rows", "block_table:block_table", "coverage")
def _(block_table: Any) -> Any:
    def by_row(pieces: Any) -> Any:
        return pieces._replace(low=pieces.row, high=pieces.row + pieces.length - 1)

    return with_arguments(block_table, q=by_row, k=by_row)


@plant("documents of the first row stand for all", "schedule:make_schedule", "coverage")
def _(make_schedule: Any) -> Any:
    def first(mask: Any) -> Any:
        return mask if mask.documents is None else replace(mask, documents=torch.atleast_2d(mask.documents)[:1])

    return with_arguments(make_schedule, mask=first)


plant("sources of a stage are served but not fetched", "schedule:make_schedule", "coverage")(
    lambda make_schedule: with_result(make_schedule, lambda schedule: replace(schedule, fetch=((),) * schedule.cp_size))
)
plant("the schedule of the rank among all processes", "schedule:make_schedule", "parity on the last axis")(
    lambda make_schedule: with_arguments(make_schedule, cp_rank=lambda _: dist.get_rank() // 2)
)


@plant("an id that comes back is another document", "schedule:make_schedule", "segments")
def _(make_schedule: Any) -> Any:
    def by_runs(mask: Any) -> Any:
        if mask.documents is None:
            return mask
        ids = torch.atleast_2d(mask.documents)
        new = torch.ones_like(ids)
        new[:, 1:] = ids[:, 1:] != ids[:, :-1]
        return replace(mask, documents=new.cumsum(1))

    return with_arguments(make_schedule, mask=by_runs)


@plant("excluded tokens are documents", "mask:Documents.of", "segments")
def _(of: Any) -> Any:
    def labelled(documents: Any) -> Any:
        labels = documents.labels
        return replace(documents, labels=labels + (labels < 0) * (1 + np.arange(len(labels))))

    return with_result(of, labelled)


plant("a document that is cut is computed with the rank's own keys alone", "schedule:make_schedule", "segments")(
    of_tiles(lambda tile, local: tile if local else None)
)
