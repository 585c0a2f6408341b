"""Bugs of the ring loop and other methods, of the transports beneath them, and of gradients on their way home."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import torch
from inside import Stage

from planted.seams import Namespace, changed, in_area, with_arguments, with_result

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


@plant("tiles of another stage", "schedule:make_schedule", "parity")
def _(make_schedule: Any) -> Any:
    def mixed_up(schedule: Any) -> Any:
        stages = schedule.route.stages
        stages = tuple(replace(stage, tiles=other.tiles) for stage, other in zip(stages, reversed(stages), strict=True))
        return replace(schedule, route=replace(schedule.route, stages=stages))

    return with_result(make_schedule, mixed_up)


def two_stages(plan: Any) -> Any:
    route = replace(plan.schedule.route, stages=plan.schedule.route.stages[:2])
    return replace(plan, schedule=replace(plan.schedule, route=route))


plant("the forward stops after two stages", "ring_loop:RING", "parity on six ranks")(
    lambda method: changed(method, forward=with_arguments(method.forward, plan=two_stages))
)
plant("the backward stops after two stages", "ring_loop:RING", "parity on six ranks")(
    lambda method: changed(method, backward=with_arguments(method.backward, plan=two_stages))
)


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


plant("rows go home in the order of positions", "heads:HeadExchange.home", "Ulysses")(
    lambda home: lambda self, *given: home(changed(self, _order=None), *given)
)
plant("heads are exchanged in the outer group", "groups:parts_of", "hybrid")(
    lambda parts_of: with_result(parts_of, lambda parts: parts._replace(outer=parts.inner, inner=parts.outer))
)


# --- gradients
plant = in_area("gradients")


plant("dk and dv swapped on their way home", "functional:FunctionalTransport.buffer", "gradients come home")(
    lambda buffer: with_result(buffer, lambda views: views and tuple(reversed(views)))
)


@plant(
    "delivered gradients replace those of other ranks", "functional:FunctionalTransport.collect", "gradients come home"
)
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


plant("gradients land on the first rows of a shard", "comm.contract:split_arrived", "parity")(
    lambda split: with_result(split, lambda arrived: ((0, *tensors) for _, *tensors in arrived))
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


@plant("all-gather's gradients go to wrong owners", "functional:FunctionalTransport.send", "all-gather")
def _(send: Any) -> Any:
    def mutant(self: Any, stage: Any) -> None:
        _, ranges = stage.fetch[0]
        self._written[0].copy_(self._written[0].roll(sum(end - begin for begin, end in ranges), 0))
        send(self, stage)

    return mutant


@plant("gradients of kv heads are rounded before they are summed", "ulysses:ULYSSES", "sums of Ulysses")
def _(method: Any) -> Any:
    rounded = with_result(method.settings, lambda settings: settings._replace(home_dtype=torch.bfloat16))
    return changed(method, settings=rounded)


@plant("gradients of keys are summed once more for each inner group", "ulysses:HYBRID", "hybrid")
def _(method: Any) -> Any:
    def mutant(*args: Any, **kept: Any) -> Any:
        dq, dk, dv, of_scores = method.backward(*args, **kept)
        return dq, 2 * dk, 2 * dv, of_scores

    return changed(method, backward=mutant)


# --- the transport
plant = in_area("the transport")


plant("a missing wait", "waiting:wait_for", "parity")(lambda wait_for: lambda started, *told: started)
plant("NaN that arrives is taken for 0", "waiting:wait_for", "NaN")(
    lambda wait_for: with_result(wait_for, torch.nan_to_num)
)


@plant("a range is served from the start of the shard", "functional:FunctionalTransport.publish", "parity")
def _(publish: Any) -> Any:
    def from_start(freight: Any) -> Any:
        stages = []
        for stage in freight.route.stages:
            serve = ((rank, tuple((0, end - begin) for begin, end in ranges)) for rank, ranges in stage.serve)
            stages.append(replace(stage, serve=tuple(serve)))
        return replace(freight, route=replace(freight.route, stages=tuple(stages)))

    return with_arguments(publish, freight=from_start)


plant("a buffer is sent before it is written", "functional:FunctionalTransport.buffer", "parity")(
    lambda buffer: with_result(buffer, lambda views: views and tuple(torch.empty_like(x) for x in views))
)


@plant("steps that nobody needs are taken", "schedule:make_schedule", "traffic")
def _(make_schedule: Any) -> Any:
    def more(schedule: Any) -> Any:
        active = {step for stage in schedule.route.stages for step in stage.steps}
        idle = [step for step in range(1, schedule.cp_size) if step not in active]
        stages = (*schedule.route.stages, *(Stage((step,), (), (), ()) for step in idle))
        return replace(schedule, route=replace(schedule.route, stages=stages))

    return with_result(make_schedule, more)


def without_barrier(purpose: str, number: int) -> Any:
    """Of `group_memory`: without the barrier of this number of every use of the workspaces for this purpose."""

    def make(group_memory: Any) -> Any:
        def mutant(*given: Any) -> Any:
            memory = group_memory(*given)

            def workspace(what: str, *others: Any) -> Any:
                found, calls = memory.workspace(what, *others), count()

                def barrier(channel: int) -> None:
                    if what != purpose or next(calls) != number:
                        found.barrier(channel)

                return Namespace(found, barrier=barrier)

            return Namespace(memory, workspace=workspace)

        return mutant

    return make


plant("rows are written before peers have read the last ones", "symmetric_memory:group_memory", "symmetric memory")(
    without_barrier("rows", 0)
)
plant("slots are summed before they are complete", "symmetric_memory:group_memory", "symmetric memory")(
    without_barrier("gradients", 0)
)
