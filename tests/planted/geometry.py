"""Bugs of masks, layouts, the schedule, documents as sequences, and balanced layouts.

Those of the schedule change what `make_schedule` returns: every rank's, so that the ranks agree on what travels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch

from planted.seams import in_area, with_arguments, with_call, with_result

# --- masks
plant = in_area("masks")


def without(seen: Callable[..., Any]) -> Callable[[Any], Any]:
    """Of `Mask.allowed`: pairs that are not allowed any more, told by a function of the mask and the distance."""

    def make(allowed: Any) -> Any:
        def mutant(self: Any, q_pos: Any, k_pos: Any) -> Any:
            return allowed(self, q_pos, k_pos) & ~seen(self, q_pos[:, None] - k_pos)

        return mutant

    return make


def of_other_mask(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Of `Mask.allowed`: what another mask allows."""
    return lambda allowed: lambda self, q_pos, k_pos: allowed(change(self), q_pos, k_pos)


plant("strict instead of inclusive diagonal", "mask:Mask.allowed", "masks")(
    without(lambda mask, distance: (distance == 0) & mask.causal)
)
plant("window off by one", "mask:Mask.allowed", "masks")(
    without(lambda mask, distance: distance == ((mask.window or (None,))[0] or torch.inf))
)
plant("documents ignored", "mask:Mask.allowed", "masks")(of_other_mask(lambda mask: replace(mask, documents=None)))
plant("padding is not hidden", "mask:Mask.allowed", "masks")(
    of_other_mask(lambda mask: mask if mask.length is None else replace(mask, length=mask.length + 1))
)


def without_exclusion(mask: Any) -> Any:
    """Tokens of no document are one."""
    return mask if mask.documents is None else replace(mask, documents=mask.documents.where(mask.documents >= 0, 99))


plant("excluded tokens see each other", "mask:Mask.allowed", "masks")(of_other_mask(without_exclusion))


@plant("tokens of a block see each other across documents", "mask:Mask.allowed", "masks")
def _(allowed: Any) -> Any:
    def mutant(self: Any, q_pos: Any, k_pos: Any) -> Any:
        if self.blocks is None:
            return allowed(self, q_pos, k_pos)
        ids = torch.atleast_2d(self.blocks)
        return allowed(self, q_pos, k_pos) | (ids[:, q_pos, None] == ids[:, None, k_pos]) & (ids[:, None, k_pos] >= 0)

    return mutant


@plant("a document starts a token late", "mask:Mask.from_cu_seqlens", "masks", "random uses")
def _(from_cu_seqlens: Any) -> Any:
    def late(mask: Any) -> Any:
        ids = mask.documents
        return replace(mask, documents=torch.cat([ids[:1], ids[:-1]]))

    return with_result(from_cu_seqlens, late)


def asked(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Of `Pairs.allowed`, by which a kernel reads the mask: what other `Pairs` allow."""
    return lambda allowed: lambda self, q_rows, k_rows: allowed(change(self), q_rows, k_rows)


plant("documents lost on the way to the kernel", "kernels.contract:Pairs.allowed", "parity")(
    asked(lambda pairs: replace(pairs, mask=replace(pairs.mask, documents=None)))
)
plant("key padding lost on the way to the kernel", "kernels.contract:Pairs.allowed", "parity")(
    asked(lambda pairs: replace(pairs, mask=replace(pairs.mask, key_padding=None)))
)
plant("masks read by local instead of global index", "kernels.contract:Pairs.allowed", "parity")(
    asked(lambda pairs: replace(pairs, q_pos=torch.arange(len(pairs.q_pos))))
)


def with_local_blocks(pairs: Any) -> Any:
    """Of `Pairs`: blocks of this rank's first tokens, whatever their positions."""
    if pairs.mask.blocks is None:
        return pairs
    blocks = pairs.mask.blocks.clone()
    blocks[..., pairs.q_pos] = pairs.mask.blocks[..., : len(pairs.q_pos)]
    return replace(pairs, mask=replace(pairs.mask, blocks=blocks))


plant("blocks read by local instead of global index", "kernels.contract:Pairs.allowed", "parity")(
    asked(with_local_blocks)
)
plant("a batch row has the key padding of another", "kernels.contract:Pairs.allowed", "parity")(
    lambda allowed: lambda self, q_rows, k_rows: allowed(self, q_rows, k_rows).flip(0)
)


# --- reaches
plant = in_area("masks as integers")


def of_reaches(change: Callable[[Any, Any], dict[str, int]]) -> Callable[[Any], Any]:
    """Of `Mask.reaches`: fields of every reach are others, told by a function of the mask and the reach."""

    def make(reaches: Any) -> Any:
        def mutant(self: Any, seq_len: int) -> Any:
            changed = (reach._replace(**change(self, reach)) for reach in reaches(self, seq_len))
            return tuple(reach for reach in changed if reach.begin < reach.end)

        return mutant

    return make


plant("a query does not see itself", "mask:Mask.reaches", "blocks")(
    of_reaches(lambda mask, reach: {"nearest": 1} if reach.nearest == 0 else {})
)
plant("the last key of a prefix is no part of it", "mask:Mask.reaches", "blocks")(
    of_reaches(lambda mask, reach: {"end": reach.end - 1} if reach.end == mask.prefix else {})
)
plant("the oldest keys of a window are not seen", "mask:Mask.reaches", "blocks")(
    of_reaches(lambda mask, reach: {"farthest": reach.farthest - 1})
)
plant("the farthest keys ahead are not seen", "mask:Mask.reaches", "blocks")(
    of_reaches(lambda mask, reach: {"nearest": reach.nearest + 1} if reach.nearest < 0 else {})
)
plant("the key after the last is seen", "mask:Mask.reaches", "blocks")(
    of_reaches(lambda mask, reach: {"end": reach.end + 1} if reach.end == mask.length else {})
)
plant("pieces at the end of a window are left out", "block_table:sees", "coverage")(
    lambda sees: with_arguments(sees, k=lambda k: k._replace(farthest=k.farthest - 1))
)
plant("pieces that see themselves alone are left out", "block_table:sees", "coverage")(
    lambda sees: with_arguments(sees, k=lambda k: k._replace(nearest=k.nearest + 1))
)
plant("pieces that share their last document alone are left out", "survey:_labelled", "coverage")(
    lambda labelled: with_result(labelled, lambda pieces: pieces._replace(labels=pieces.labels - np.array([0, 1])))
)
plant("pieces that hold the rest of a block are left out", "block_table:keys_of", "coverage")(
    lambda keys_of: with_arguments(keys_of, mask=lambda mask: replace(mask, blocks=None))
)
plant("rows that travel are counted of the first pairs alone", "survey:_pairs", "facts")(
    lambda pairs: lambda *given: islice(pairs(*given), 1)
)
plant("two calls with the same keys go unseen", "block_table:shares_keys", "facts")(
    lambda shares_keys: with_result(shares_keys, lambda shared: False)
)
plant("a step in which few ranks fetch is taken for idle", "survey:active_steps", "coverage")(
    lambda active_steps: with_result(active_steps, lambda steps: steps[:-1])
)


# --- layouts
plant = in_area("layouts")


plant("the last tokens are dropped", "layouts:Contiguous.runs", "layouts")(
    lambda runs: with_call(runs, lambda seq_len, cp_size: {"seq_len": seq_len // cp_size * cp_size})
)
plant("inverse and permutation mixed up", "layout:Layout.inverse", "layouts")(
    lambda inverse: lambda self, seq_len, cp_size: self.permutation(seq_len, cp_size)
)
plant("two ranks hold one stripe", "layouts:Striped.runs", "layouts", "random uses")(
    lambda runs: with_arguments(runs, cp_rank=lambda cp_rank: max(0, cp_rank - 1))
)
plant("all ranks hold the chunks of the last one", "layouts:ZigZag.runs", "layouts")(
    lambda runs: with_call(runs, lambda cp_rank, cp_size: {"cp_rank": cp_size - 1})
)


@plant("documents are cut in chunks together", "tensor_layouts:ZigZagDocuments.runs", "layouts")
def _(runs: Any) -> Any:
    def together(self: Any, seq_len: int, cp_size: int, cp_rank: int) -> Any:
        from cp_mesh import ZigZag

        return ZigZag().runs(seq_len, cp_size, cp_rank)

    return together


plant("every stream counts from 0", "layouts:shifted", "layouts", "random uses")(
    lambda shifted: with_arguments(shifted, begin=lambda begin: 0)
)


@plant("runs that are no permutation are believed", "layouts:parse_layout", "runs")
def _(parse_layout: Any) -> Any:
    def mutant(spec: str, index: Any = None) -> Any:
        if spec != "balanced":
            return parse_layout(spec, index)
        from cp_mesh.geometry import Balanced

        layout = object.__new__(Balanced)
        object.__setattr__(layout, "table", index)
        return layout

    return mutant


# --- the schedule
plant = in_area("the schedule")


def of_tiles(change: Callable[[Any, bool], Any]) -> Callable[[Any], Any]:
    """Of `make_schedule`: every tile is what a function makes of it, or none.

    The function is told whether the keys are this rank's own.
    """

    def changed(schedule: Any) -> Any:
        def every(tiles: Any, local: bool) -> tuple[Any, ...]:
            made = (change(tile, local) for tile in tiles)
            return tuple(tile for tile in made if tile is not None)

        stages = tuple(replace(stage, tiles=every(stage.tiles, False)) for stage in schedule.route.stages)
        route = replace(schedule.route, stages=stages)
        return replace(schedule, local_tiles=every(schedule.local_tiles, True), route=route)

    return lambda make_schedule: with_result(make_schedule, changed)


def moved(lo: int = 0, hi: int = 0, where: Callable[[Any, bool], bool] = lambda tile, local: True) -> Any:
    """Of `make_schedule`: the bounds of bands are others."""

    def change(tile: Any, local: bool) -> Any:
        from inside import Band, Distances

        shape = tile.q[1] - tile.q[0], tile.k[1] - tile.k[0]
        if not isinstance(tile.cover, Band) or not where(tile, local):
            return tile
        at = Distances.of(tile.cover, *shape)
        at = Distances(None if at.lo is None else at.lo + lo, None if at.hi is None else at.hi + hi)
        return replace(tile, cover=at.band(*shape))

    return of_tiles(change)


def is_band(cover: Any) -> bool:
    from inside import Band

    return isinstance(cover, Band)


@plant("strict diagonal between runs", "schedule:make_schedule", "coverage")
def _(make_schedule: Any) -> Any:
    def strict(tile: Any, local: bool) -> Any:
        from inside import CAUSAL

        (q, q_end), (k, k_end) = tile.q, tile.k
        if tile.cover != CAUSAL or q_end - q < 2 or k_end - k < 2:
            return tile
        return replace(tile, q=(q + 1, q_end), k=(k, k_end - 1))  # which is causal too, one row smaller

    return of_tiles(strict)(make_schedule)


plant("inclusive diagonal between stripes of later ranks", "schedule:make_schedule", "coverage")(
    moved(lo=-1, where=lambda tile, local: not local)
)
plant("window between runs off by one", "schedule:make_schedule", "coverage")(moved(hi=-1))
plant("the window against keys of other ranks is a key wider", "schedule:make_schedule", "coverage", "random uses")(
    moved(hi=1, where=lambda tile, local: not local)
)


@plant("bands counted from local rows", "block_table:block_table", "coverage")
def _(block_table: Any) -> Any:
    def by_row(pieces: Any) -> Any:
        return pieces._replace(low=pieces.row, high=pieces.row + pieces.length - 1)

    return with_arguments(block_table, q=by_row, k=by_row)


@plant("rows after the causal square are dropped", "schedule:split_causal", "coverage")
def _(split: Any) -> Any:
    return with_result(split, lambda parts: parts[:-1] if parts and len(parts) > 1 and not parts[-1][2] else parts)


plant("local tiles are left out", "schedule:make_schedule", "coverage")(
    of_tiles(lambda tile, local: None if local else tile)
)
plant("tiles of other ranks lose their last key", "schedule:make_schedule", "coverage")(
    of_tiles(
        lambda tile, local: (
            tile
            if local or tile.k[1] - tile.k[0] < 2 or not is_band(tile.cover)
            else replace(tile, k=(tile.k[0], tile.k[1] - 1))
        )
    )
)
plant("a tile's keys are counted from the start of the buffer", "schedule:make_schedule", "coverage")(
    of_tiles(lambda tile, local: tile if local else replace(tile, k=(0, tile.k[1] - tile.k[0])))
)


@plant("documents of the first row stand for all", "schedule:make_schedule", "coverage", "random uses")
def _(make_schedule: Any) -> Any:
    def first(mask: Any) -> Any:
        return mask if mask.documents is None else replace(mask, documents=torch.atleast_2d(mask.documents)[:1])

    return with_arguments(make_schedule, mask=first)


@plant("steps that nobody needs are taken", "schedule:make_schedule", "traffic")
def _(make_schedule: Any) -> Any:
    def more(schedule: Any) -> Any:
        from inside import Stage

        active = {step for stage in schedule.route.stages for step in stage.steps}
        idle = [step for step in range(1, schedule.cp_size) if step not in active]
        stages = (*schedule.route.stages, *(Stage((step,), (), (), ()) for step in idle))
        return replace(schedule, route=replace(schedule.route, stages=stages))

    return with_result(make_schedule, more)


plant("sources of a stage are served but not fetched", "schedule:make_schedule", "coverage")(
    lambda make_schedule: with_result(make_schedule, lambda schedule: replace(schedule, fetch=((),) * schedule.cp_size))
)


@plant("the schedule of the rank among all processes", "schedule:make_schedule", "parity on the last axis")
def _(make_schedule: Any) -> Any:
    import torch.distributed as dist

    def among_all(cp_rank: int, cp_size: int) -> dict[str, Any]:
        return {"cp_rank": dist.get_rank() // (dist.get_world_size() // cp_size)}

    return with_call(make_schedule, among_all)


plant("the schedule of rank 0 on every rank", "schedule:make_schedule", "parity")(
    lambda make_schedule: with_arguments(make_schedule, cp_rank=lambda cp_rank: 0)
)


# --- documents
plant = in_area("documents as sequences")


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


def of_blocks(change: Callable[[Any, bool], Any]) -> Callable[[Any], Any]:
    """Of `make_schedule`: tiles by documents have other `Segments`."""

    def changed(tile: Any, local: bool) -> Any:
        from inside import Segments

        return replace(tile, cover=change(tile.cover, local)) if isinstance(tile.cover, Segments) else tile

    return of_tiles(changed)


@plant("blocks aligned to the upper left", "varlen:Segments.bands", "segments")
def _(bands: Any) -> Any:
    def mutant(self: Any, blocks: Any) -> Any:
        lo, hi = bands(self, blocks)
        shift = (blocks[:, 3] - blocks[:, 2]) - (blocks[:, 1] - blocks[:, 0])
        return lo + shift, hi + shift

    return mutant


plant("a stripe sees the diagonal of a later one", "schedule:make_schedule", "segments")(
    of_blocks(lambda x, local: x if local or x.right is None else replace(x, right=x.right + 1))
)


def shared(cover: Any, local: bool) -> Any:
    """Blocks of which each begins a row early."""

    def early(blocks: Any) -> Any:
        blocks = blocks.clone()
        blocks[1:, 0] -= 1
        return blocks

    return replace(cover, blocks=tuple(map(early, cover.blocks)))


plant("blocks of a call share rows", "schedule:make_schedule", "segments")(of_blocks(shared))
plant("the last document of a tile is left out", "schedule:make_schedule", "segments")(
    of_blocks(lambda cover, local: replace(cover, blocks=tuple(blocks[:-1] for blocks in cover.blocks)))
)
plant("keys are not counted where they lie in the buffer", "schedule:make_schedule", "segments")(
    of_tiles(lambda tile, local: tile if local else replace(tile, k=(0, tile.k[1] - tile.k[0])))
)
plant("a document that is cut is computed with the rank's own keys alone", "schedule:make_schedule", "segments")(
    of_tiles(lambda tile, local: tile if local else None)
)


# --- balanced layouts
plant = in_area("balanced layouts")


plant("documents are dealt out by tokens alone", "balance:balance", "balance")(
    lambda balance: with_arguments(balance, mask=lambda mask: replace(mask, documents=None))
)
plant("excluded tokens count as work", "pair_counts:pairs_between", "balance")(
    lambda pairs_between: with_arguments(pairs_between, mask=without_exclusion)
)
plant("keys of blocks count as no work", "pair_counts:pairs_between", "balance")(
    lambda pairs_between: with_arguments(pairs_between, mask=lambda mask: replace(mask, blocks=None))
)
plant("every key of a document counts as work of every query", "pair_counts:pairs_between", "balance")(
    lambda pairs_between: with_arguments(pairs_between, mask=lambda mask: replace(mask, causal=False, blocks=None))
)


@plant("a row is given to two ranks where a document is cut", "balance:_deal", "balance")
def _(deal: Any) -> Any:
    def mutant(parts: Any, *others: Any) -> Any:
        most, shards = deal(parts, *others)
        starts = {part.begin for part in parts}
        early = [[(x - (n > 0 and x not in starts), n) for x, n in runs] for runs in shards]  # of later parts
        return most, early

    return mutant


@plant("a document is cut though a rank has room for it", "pair_counts:parts_between", "balance")
def _(parts_of: Any) -> Any:
    def halves(part: Any) -> Any:
        num = part.num // 2
        first = part._replace(num=num, pairs=part.pairs * num / part.num - part.rise * num * (part.num - num) / 2)
        rest = part._replace(begin=part.begin + num, num=part.num - num, pairs=part.pairs - first.pairs)
        return [x for x in (first, rest) if x.num]

    return with_result(parts_of, lambda parts: [half for part in parts for half in halves(part)])


plant("a hole is filled with the wrong document", "balance:_adding_up", "balance")(
    lambda adding_up: lambda numbers, total: {(i + 1) % len(numbers) for i in adding_up(numbers, total)}
)
plant("a layer's time is that of its linears", "balance:balance", "balance")(
    lambda balance: with_arguments(balance, pairs_per_token=lambda given: 1 << 29)
)
