"""Bugs of the ring loop, of the transport beneath it, and of gradients on their way home."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import torch
from inside import inner

from planted.seams import Namespace, changed, in_area, with_arguments, with_call, with_result

# --- the loop
plant = in_area("the loop")


@plant("stale KV in the backward", "merge:SummingBackward.step", "parity")
def _(step: Any) -> Any:
    def mutant(self: Any, k: Any, v: Any, tiles: Any, into: Any = None) -> Any:
        if into is not None:  # rows that were fetched
            kept = vars(self).setdefault("kept", (k, v))
            k, v = kept if kept[0].shape == k.shape else (k, v)
        return step(self, k, v, tiles, into)

    return mutant


@plant("stale KV in the forward", "merge:MergingForward.step", "parity")
def _(step: Any) -> Any:
    def mutant(self: Any, k: Any, v: Any, tiles: Any) -> None:
        kept = vars(self).setdefault("kept", (k, v))
        step(self, *(kept if kept[0].shape == k.shape else (k, v)), tiles)

    return mutant


@plant("tiles of another stage", "schedule:make_schedule", "parity")
def _(make_schedule: Any) -> Any:
    def mixed_up(schedule: Any) -> Any:
        stages = schedule.route.stages
        stages = tuple(replace(stage, tiles=other.tiles) for stage, other in zip(stages, reversed(stages), strict=True))
        return replace(schedule, route=replace(schedule.route, stages=stages))

    return with_result(make_schedule, mixed_up)


def two_stages(plan: Any) -> Any:
    """A plan that ends after two stages."""
    route = replace(plan.schedule.route, stages=plan.schedule.route.stages[:2])
    return replace(plan, schedule=replace(plan.schedule, route=route))


plant("the forward stops after two stages", "ring_loop:RING", "parity on six ranks")(
    lambda method: changed(method, forward=with_arguments(method.forward, plan=two_stages))
)
plant("the backward stops after two stages", "ring_loop:RING", "parity on six ranks")(
    lambda method: changed(method, backward=with_arguments(method.backward, plan=two_stages))
)


@plant("chunks of heads lose the scale", "scores:Scores.heads", "random uses of two")
def _(heads: Any) -> Any:
    """Those after the first have the scale that is taken if none is given to heads of 16."""

    def mutant(self: Any, begin: int, end: int) -> Any:
        return replace(heads(self, begin, end), scale=self.scale if begin == 0 else 0.25)

    return mutant


@plant("the next hop starts after the step", "functional:FunctionalTransport.arrived", "overlap")
def _(arrived: Any) -> Any:
    """A stage is fetched when it is asked for."""

    def mutant(self: Any, stage: Any) -> Any:
        serve, self._serve = self._serve, lambda: None
        if not self._fetched:
            serve()
        try:
            return arrived(self, stage)
        finally:
            del self._serve

    return mutant


# --- gradients
plant = in_area("gradients")


@plant(
    "dk and dv swapped on their way home", "functional:FunctionalTransport.buffer",
    "parity", "gradients come home",
)  # fmt: skip
def _(buffer: Any) -> Any:
    return with_result(buffer, lambda views: views and tuple(reversed(views)))


@plant(
    "delivered gradients replace those of other ranks", "functional:FunctionalTransport.collect",
    "gradients come home",
)  # fmt: skip
def _(collect: Any) -> Any:
    def mutant(self: Any) -> Any:
        for begin, *tensors in collect(self):
            delivered = vars(self).setdefault("delivered", {})
            before = delivered.get(begin)
            delivered[begin] = tensors
            if before is not None and before[0].shape == tensors[0].shape:
                tensors = [x - y for x, y in zip(tensors, before, strict=True)]
            yield begin, *tensors

    return mutant


@plant("the last delivery is not added", "functional:FunctionalTransport.collect", "parity")
def _(collect: Any) -> Any:
    def mutant(self: Any) -> Any:
        arrived = list(collect(self))
        return arrived if self._num_sent < len(self._freight.route.stages) else []

    return mutant


plant("gradients land on the first rows of a shard", "comm.contract:split_arrived", "parity")(
    lambda split: with_result(split, lambda arrived: ((0, *tensors) for _, *tensors in arrived))
)
plant("local dv is not added", "merge:SummingBackward.step", "parity")(
    lambda step: with_result(step, lambda pieces: [(begin, dk, torch.zeros_like(dv)) for begin, dk, dv in pieces])
)
plant("local dk is not added", "merge:SummingBackward.step", "parity")(
    lambda step: with_result(step, lambda pieces: [(begin, torch.zeros_like(dk), dv) for begin, dk, dv in pieces])
)


@plant("sums of gradients begin with what was in memory", "combine:RowSum.__init__", "parity")
def _(init: Any) -> Any:
    def mutant(self: Any, shape: Any, dtype: Any, device: Any) -> None:
        init(self, shape, dtype, device)
        self.add(0, torch.full(tuple(shape), 7.0, dtype=dtype, device=device))

    return mutant


plant("gradients are summed in half precision", "combine:RowSum.__init__", "sums in fp32")(
    lambda init: with_arguments(init, dtype=lambda _: torch.bfloat16)
)
plant("gradients travel in bf16", "comm.contract:Freight.__init__", "parity")(
    lambda init: with_arguments(init, gradients=lambda packing: replace(packing, dtype=torch.bfloat16))
)


@plant("dk that travels is counted twice", "merge:SummingBackward.step", "gradients come home")
def _(step: Any) -> Any:
    def mutant(self: Any, k: Any, v: Any, tiles: Any, into: Any = None) -> Any:
        pieces = step(self, k, v, tiles, into)
        if into is not None:
            into[0].mul_(2.0)
        return pieces

    return mutant


@plant("the gradient of a rank's own keys goes to its neighbour", "ring_loop:RING", "gradients come home")
def _(method: Any) -> Any:
    import torch.distributed as dist

    def mutant(*args: Any, **kwargs: Any) -> Any:
        dq, dk, dv, of_scores = method.backward(*args, **kwargs)
        group, size = dist.group.WORLD, dist.get_world_size()
        gathered = [torch.empty_like(dk) for _ in range(size)]
        dist.all_gather(gathered, dk.contiguous(), group)
        return dq, gathered[(dist.get_rank() - 1) % size], dv, of_scores

    return changed(method, backward=mutant)


# --- other methods
plant = in_area("other methods")


@plant("all-gather's gradients go to wrong owners", "functional:FunctionalTransport.send", "all-gather")
def _(send: Any) -> Any:
    def mutant(self: Any, stage: Any) -> None:
        _, ranges = stage.fetch[0]
        self._written[0].copy_(self._written[0].roll(sum(end - begin for begin, end in ranges), 0))
        send(self, stage)

    return mutant


@plant("all-gather takes the stages of the ring", "ring_loop:ALL_GATHER", "overlap of all-gather")
def _(method: Any) -> Any:
    RING = inner("ring_loop", "RING")

    return changed(method, make_schedule=RING.make_schedule)


plant("heads go to other ranks", "heads:HeadExchange.to_heads", "Ulysses")(
    lambda to_heads: with_arguments(to_heads, tensors=lambda tensors: [x.flip(0) for x in tensors])
)
plant("heads come home in another order", "heads:HeadExchange.home", "Ulysses")(
    lambda home: with_result(home, lambda arrived: tuple(x.flip(0) for x in arrived))
)
plant("rows of all heads stay in the order of the layout", "heads:HeadExchange.__init__", "Ulysses")(
    lambda init: with_arguments(init, order=lambda _: None)
)


@plant("rows go home in the order of positions", "heads:HeadExchange.home", "Ulysses")
def _(home: Any) -> Any:
    def mutant(self: Any, *args: Any) -> Any:
        order, self._order = self._order, None
        try:
            return home(self, *args)
        finally:
            self._order = order

    return mutant


plant("every part of the heads is given what the first one kept", "ulysses:_Call.views", "Ulysses")(
    lambda views: with_arguments(views, chunk=lambda _: 0)
)
plant("keys that were kept are values", "ulysses:_Call.views", "Ulysses")(
    lambda views: with_result(views, lambda found: [found[0], found[2], found[1], found[3]])
)
plant("shares of sinks are of other heads", "ulysses:_Call.shares", "Ulysses")(
    lambda shares: with_result(shares, lambda found: found | {x: found[x].roll(1, 0) for x in found if x == "sinks"})
)


@plant("gradients of a kv head that was sent twice are not summed", "ulysses:_Call.summed", "Ulysses")
def _(summed: Any) -> Any:
    def mutant(self: Any, arrived: Any, x: Any) -> Any:
        return arrived[:, :: arrived.shape[1] // x.shape[1]].to(x.dtype)

    return mutant


@plant("gradients of a kv head that was sent twice count twice", "ulysses:_Call.summed", "Ulysses")
def _(summed: Any) -> Any:
    def mutant(self: Any, arrived: Any, x: Any) -> Any:
        return summed(self, arrived, x) * (arrived.shape[1] // x.shape[1])

    return mutant


@plant("kv heads that are sent twice go in turn", "ulysses:_Call.repeated", "Ulysses")
def _(repeated: Any) -> Any:
    def mutant(self: Any, x: Any) -> Any:
        return x.repeat(1, repeated(self, x).shape[1] // x.shape[1], 1, 1)

    return mutant


@plant("gradients of kv heads are rounded before they are summed", "ulysses:ULYSSES", "sums of Ulysses")
def _(method: Any) -> Any:
    rounded = with_result(method.settings, lambda settings: settings._replace(home_dtype=torch.bfloat16))
    return changed(method, settings=rounded)


@plant("scores are those of the first heads on every rank", "ulysses:_Call", "Ulysses")
def _(call: Any) -> Any:
    class Mutant(call):
        def __init__(self, plan: Any, group: Any, num_heads: int, scores: Any) -> None:
            super().__init__(plan, group, num_heads, scores)
            if (own := self.scores.alibi_slopes) is not None:
                self.scores = replace(self.scores, alibi_slopes=scores.alibi_slopes[: len(own)])

    return Mutant


@plant("dropout counts heads from the rank's first one", "ulysses:_Call", "Ulysses")
def _(call: Any) -> Any:
    class Mutant(call):
        def by_parts(self, tensors: Any) -> Any:
            self.scores = replace(self.scores, first_head=0)
            return super().by_parts(tensors)

    return Mutant


@plant("shares of scores are of other heads", "ulysses:_Call.shares", "Ulysses")
def _(shares: Any) -> Any:
    def rolled(found: Any) -> Any:
        return {name: x if name == "bias" else x.roll(1, 0) for name, x in found.items()}

    return with_result(shares, rolled)


# --- the hybrid
plant = in_area("the hybrid")


plant("inner groups hold what the others do", "joined_layout:Joined.runs", "hybrid")(
    lambda runs: with_arguments(runs, cp_rank=lambda rank: 1 - rank)
)


@plant("rows of an inner group stay in the order of its ranks", "joined_layout:rows_of_group", "hybrid")
def _(rows: Any) -> Any:
    def mutant(*args: Any) -> Any:
        found, begin, given = [], 0, rows(*args)
        for piece in given:
            found.append(type(given[0])(begin, 1, piece.length) if hasattr(piece, "stride") else piece)
            begin += piece.length
        return found

    return mutant


plant("heads are exchanged in the outer group", "groups:parts_of", "hybrid")(
    lambda parts_of: with_result(parts_of, lambda parts: parts._replace(outer=parts.inner, inner=parts.outer))
)
plant("the ring goes over the inner group", "groups:parts_of", "hybrid")(
    lambda parts_of: with_result(parts_of, lambda parts: parts._replace(outer=parts.inner))
)


@plant("dropout counts heads by the place in the ring", "ulysses:_Call", "hybrid")
def _(call: Any) -> Any:
    class Mutant(call):
        def by_parts(self, tensors: Any) -> Any:
            self.scores = replace(self.scores, first_head=self.outer.rank() * tensors[0].shape[1] // 2)
            return super().by_parts(tensors)

    return Mutant


@plant("gradients of keys are summed once more for each inner group", "ulysses:HYBRID", "hybrid")
def _(method: Any) -> Any:
    def mutant(*args: Any, **kept: Any) -> Any:
        dq, dk, dv, of_scores = method.backward(*args, **kept)
        return dq, 2 * dk, 2 * dv, of_scores

    return changed(method, backward=mutant)


@plant("the degree that was asked for is left aside", "ulysses:HYBRID", "degrees")
def _(method: Any) -> Any:
    def mutant(options: Any, *args: Any) -> int:
        return method.choose_degree(options._replace(ulysses_degree=0), *args)

    return changed(method, choose_degree=mutant)


# --- the transport
plant = in_area("the transport")

plant("rows that were fetched are held nowhere", "memory:_held_keys", "allocations")(
    lambda keys: with_result(keys, lambda found: [0] * len(found))
)
plant("groups within a group keep their memory", "symmetric_memory:release", "release")(
    lambda release: lambda group, within=(): release(group)
)


plant("a missing wait", "waiting:wait_for", "parity")(lambda wait_for: lambda started, *told: started)
plant("NaN that arrives is taken for 0", "waiting:wait_for", "NaN")(
    lambda wait_for: lambda started, *told: wait_for(started, *told).nan_to_num()
)


@plant("rows for another rank are served", "functional:_exchange", "parity on four ranks")
def _(exchange: Any) -> Any:
    def reversed_parts(sent: Any, sent_rows: Any) -> dict[str, Any]:
        return {"sent": torch.cat(sent.split(sent_rows)[::-1])}

    return with_call(exchange, reversed_parts)


@plant("a range is served from the start of the shard", "functional:FunctionalTransport.publish", "parity")
def _(publish: Any) -> Any:
    def from_start(freight: Any) -> Any:
        stages = []
        for stage in freight.route.stages:
            serve = ((rank, tuple((0, end - begin) for begin, end in ranges)) for rank, ranges in stage.serve)
            stages.append(replace(stage, serve=tuple(serve)))
        return replace(freight, route=replace(freight.route, stages=tuple(stages)))

    return with_arguments(publish, freight=from_start)


plant("batch rows change places on the way", "functional:FunctionalTransport.arrived", "parity")(
    lambda receive: with_result(receive, lambda rows: rows and tuple(x.flip(0) for x in rows))
)
plant("a buffer is sent before it is written", "functional:FunctionalTransport.buffer", "parity")(
    lambda buffer: with_result(buffer, lambda views: views and tuple(torch.empty_like(x) for x in views))
)


@plant("whole shards are fetched for a window", "functional:FunctionalTransport", "traffic")
def _(transport: Any) -> Any:
    class Whole(transport):
        def publish(self, tensors: Any, freight: Any) -> None:
            self.own = own = tensors[0].shape[2]  # shards are equal in that check
            whole = [
                replace(
                    stage,
                    fetch=tuple((rank, ((0, own),)) for rank, _ in stage.fetch),
                    serve=tuple((rank, ((0, own),)) for rank, _ in stage.serve),
                )
                for stage in freight.route.stages
            ]
            super().publish(tensors, replace(freight, route=replace(freight.route, stages=tuple(whole))))
            self.needed = freight

        def arrived(self, stage: Any) -> Any:
            if (rows := super().arrived(stage)) is None:
                return None
            needed = [
                torch.arange(begin, end) + i * self.own
                for i, (_, ranges) in enumerate(stage.fetch)
                for begin, end in ranges
            ]
            return tuple(x[:, :, torch.cat(needed)] for x in rows)

        def send(self, stage: Any) -> None:
            self._freight = self.needed
            super().send(stage)

    return Whole


def with_workspaces(wrap: Any) -> Any:
    """Of `group_memory`: its workspaces are made other ones, by a function of what one is for, itself, and the rank."""

    def make(group_memory: Any) -> Any:
        def mutant(group: Any, device: Any) -> Any:
            memory = group_memory(group, device)

            def workspace(purpose: str, *others: Any) -> Any:
                return wrap(purpose, memory.workspace(purpose, *others), group.rank())

            return Namespace(memory, workspace=workspace)

        return mutant

    return make


def without_barrier(purpose: str, number: int) -> Any:
    """Without the barrier of this number of every use of the workspaces for this purpose."""

    def wrap(what: str, workspace: Any, rank: int) -> Any:
        calls = count()

        def barrier(channel: int) -> None:
            if what != purpose or next(calls) != number:
                workspace.barrier(channel)

        return Namespace(workspace, barrier=barrier)

    return with_workspaces(wrap)


MEMORY = "symmetric_memory:group_memory"
OF_ROWS = "symmetric memory", "symmetric memory of Ulysses"
plant("rows are written before peers have read the last ones", MEMORY, *OF_ROWS)(without_barrier("rows", 0))
plant("rows are pulled before they are written", MEMORY, *OF_ROWS)(without_barrier("rows", 1))
plant("slots are summed before they are complete", MEMORY, "symmetric memory")(without_barrier("gradients", 0))


@plant("slots lie where other ranks still read rows", MEMORY, "symmetric memory")
def _(group_memory: Any) -> Any:
    def mutant(group: Any, device: Any) -> Any:
        memory = group_memory(group, device)
        return Namespace(memory, workspace=lambda purpose, *others: memory.workspace("rows", *others))

    return mutant


@plant("slots of another sender are read", MEMORY, "symmetric memory")
def _(group_memory: Any) -> Any:
    def wrap(what: str, workspace: Any, own: int) -> Any:
        def rows(rank: int, offset: int, *others: Any) -> Any:
            return workspace.rows(rank, 0 if what == "gradients" and rank == own else offset, *others)

        return Namespace(workspace, rows=rows)

    return with_workspaces(wrap)(group_memory)
