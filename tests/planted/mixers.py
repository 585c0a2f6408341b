"""Bugs of recurrent layers and convolutions over ranks."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import Replicate

from planted.seams import in_area, with_result

plant = in_area("recurrent layers")


def of_states(change: Any, states: bool = True) -> Any:
    """Of gathers of states, or else of rows beside pieces."""

    def make(gather: Any) -> Any:
        def mutant(x: Any, most: int, group: Any) -> Any:
            found = gather(x, most, group)
            return change(found) if states != (group[2] in ("causal_conv1d", "roll")) else found

        return mutant

    return make


plant("states are folded in the order of other ranks", "mixers.moving:gather_rows", "recurrent layers")(
    of_states(lambda found: found.flip(0))
)
plant("a state loses its gradient", "mixers.moving:gather_rows", "recurrent layers")(
    of_states(lambda found: found.detach())
)
plant("what a piece does to a state is rounded to 16 bits", "mixers.between:Between.pass_on", "recurrent layers")(
    lambda pass_on: lambda self, a, b, back=False: pass_on(self, a.bfloat16().to(a.dtype), b, back)
)
plant("the state after a piece is rounded to 16 bits", "mixers.between:Between.pass_on", "recurrent layers")(
    lambda pass_on: lambda self, a, b, back=False: pass_on(self, a, b.bfloat16().to(b.dtype), back)
)
plant("rows lack what a state adds to them", "mixers.states:_of_state", "recurrent layers")(
    lambda of_state: with_result(of_state, lambda found: 0 * found)
)
plant("a state passes a piece without decay", "mixers.between:Between.decays_of", "recurrent layers")(
    lambda decays_of: lambda self, g, like: decays_of(self, None, like)
)
plant("a state goes on over the start of a document", "mixers.pieces:pieces_of", "recurrent layers", "convolutions")(
    lambda pieces_of: lambda sequence, mask, batch, rows: pieces_of(sequence, None, batch, rows)
)
plant("rows beside a piece are zeros", "mixers.moving:gather_rows", "convolutions")(
    of_states(lambda found: found * 0, states=False)
)
plant("rows beside a piece lose their gradient", "mixers.moving:scatter_sum", "convolutions")(
    lambda scatter_sum: lambda x, group: 0 * scatter_sum(x, group)
)
plant("a document is convolved with the end of the one before it", "mixers.halo:_states", "convolutions")(
    lambda states: with_result(states, lambda found: (*found[:2], found[2][:0], found[3][:0]))
)
plant("ranks whose documents are whole add a state", "mixers.between:Between.add", "whole documents")(
    lambda add: (
        lambda self, states, due, back=False: add(self, states, due, back) if self.reached.count(True) else states + 1
    )
)
plant("whole documents are computed with the pieces of others first", "mixers.states:_prepend", "whole documents")(
    lambda prepend: lambda run, *given: prepend(lambda *args: run(*args) and run(*args), *given)
)
plant("heads come back to other rows", "mixers.moving:to_rows", "recurrent layers by heads")(
    lambda to_rows: with_result(to_rows, lambda out: out.flip(1))
)
plant("a row of a chunk decays by its own decay, too", "mixers.chunks:_later", "recurrent layers")(
    lambda later: lambda g: later(g) + g
)
plant("a document is convolved from zeros", "mixers.halo:convolution", "states of convolutions")(
    lambda convolution: lambda *args: convolution(*args[:5])
)
plant("the gradient of a parameter of heads is that of one rank", "mixers.tensors:Partial", "mixers over heads")(
    lambda partial: Replicate
)


plant = in_area("recurrent layers in a plan")


def of_no_documents(scope: Any) -> Any:
    scope.mask = None
    return scope


plant("the mask of a recurrent style is not read", "recurrent_parallel:RecurrentParallel.prepare", "a recurrent plan")(
    lambda prepare: with_result(prepare, of_no_documents)
)
plant("functions of a file call what they import", "wrap:with_names", "a recurrent plan")(
    lambda with_names: lambda own, names: with_names(own, names) if "self" in own.__code__.co_varnames else own
)
plant("modules below one with a style call their own functions", "stand_ins:StandIns.within", "a recurrent plan")(
    lambda within: lambda self, module, skip: within(self, module, lambda part: True)
)
plant(
    "recurrent layers outside of the plan are let through", "stand_ins:refuse_unplanned", "outside of recurrent plans"
)(lambda refuse_unplanned: lambda *args, **kwargs: None)
