"""Bugs of linears, embeddings and losses over tp."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import torch

from planted.seams import in_area, with_arguments, with_result

plant = in_area("linears over tp")


plant("rows are read before they have come", "shards:Shards._wait", "traffic of linears")(
    lambda wait: lambda self, started, sent: started
)


@plant("rows are waited for before the product", "shards:Shards.gather", "order of linears")
def _(gather: Any) -> Any:
    def mutant(self: Any, x: Any) -> Any:
        found = gather(self, x)()
        return lambda: found

    return mutant


@plant("shards are as even as can be, not those of torch.chunk", "shards:Shards.sizes", "linears")
def _(sizes: Any) -> Any:
    def even(self: Any) -> list[int]:
        count = len(sizes(self))
        return [(self.num_rows + count - 1 - rank) // count for rank in range(count)]

    return even


plant("a sum over tp is that of one rank", "shards:Shards.all_sum", "linears")(
    lambda all_sum: lambda self, x: lambda: x.clone()
)


def with_call(**others: Any) -> Any:
    """Of `_ColumnLinears.forward`: its inputs are read in another way."""
    return lambda forward: lambda ctx, call, *given: forward(ctx, call._replace(**others), *given)


COLUMNS = "colwise:_ColumnLinears.forward"
plant("what should be gathered again is kept", COLUMNS, "traffic of linears")(with_call(recompute=False))
plant("rows are gathered for frozen weights", COLUMNS, "traffic of linears")(
    lambda forward: lambda ctx, call, keeps, *given: forward(ctx, call, True, *given)
)


@plant("a bias of a row linear is added on every rank", "rowwise:sum_rows", "linears")
def _(sum_rows: Any) -> Any:
    def mutant(what: Any, x: Any, bias: Any, *where: Any) -> Any:
        return sum_rows(what, x if bias is None else x + bias, None, *where)

    return mutant


@plant("the gradient of a row linear's bias is of this rank's rows", "rowwise:_RowGradients.backward", "linears")
def _(backward: Any) -> Any:
    def mutant(ctx: Any, dout: Any) -> Any:
        *others, dbias = backward(ctx, dout)
        return *others, None if dbias is None else dout.flatten(0, -2).sum(0)

    return mutant


plant("rows never travel beside products", "overlap:chosen_transport", "order of forwards", "order of copies")(
    lambda chosen: lambda *_: None
)


@plant("rows are waited for before the product of this rank's own", "overlap:moving", "order of forwards")
def _(moving: Any) -> Any:
    class Waiting:
        def __init__(self, moves: Any) -> None:
            self.sums, self.moves = moves.sums, moves

        def gather(self, *args: Any) -> Any:
            gather = self.moves.gather(*args)
            gather.whole()
            return gather

    @contextmanager
    def mutant(*args: Any) -> Any:
        with moving(*args) as moves:
            yield Waiting(moves)

    return mutant


plant("what one rank has computed is left out of a sum", "shards:FunctionalSums.send", "beside products")(
    lambda send: (
        lambda self, chunk, write: send(self, chunk, lambda part, out: write(part, out) if part.start else out.zero_())
    )
)
plant("ranks pull what was computed for others", "symmetric_shards:SymmetricSums._slot", "beside copies")(
    lambda slot: lambda self, rank, step, chunk: slot(self, rank, step if rank == self._rank else 1, chunk)
)
plant("what is kept for the backward was only lent", "symmetric_shards:SymmetricMoves.gather", "beside copies")(
    lambda gather: lambda self, x, whole: gather(self, x, whole and "lent")
)
plant(
    "memory is written while peers still read it",
    "symmetric_shards:SymmetricMoves.workspace",
    "order of copies",
)(lambda workspace: lambda self, purpose, nbytes: setattr(self, "_is_clear", True) or workspace(self, purpose, nbytes))
plant("tokens of other ranks take this rank's first row", "vocab_parallel:_own_index", "linears")(
    lambda own_index: with_result(own_index, lambda found: (found[0], torch.ones_like(found[1])))
)
plant("padding of an embedding is trained", "vocab_parallel:embed", "linears")(
    lambda embed: with_arguments(embed, padding_idx=lambda index: None)
)
plant("logits of the last rows are left out", "vocab_parallel:_chunks", "chunks of logits")(
    lambda chunks: with_result(chunks, lambda rows: list(rows)[:-1])
)
plant("tp ranks do not compare their first calls", "agreement:compare", "unlike tokens over tp")(
    lambda compare: lambda *_: False
)
plant("tp ranks do not compare what requires a gradient", "matmul:graded_names", "unlike gradients over tp")(
    lambda graded_names: lambda *_: "none"
)
plant("ranks of tp do not hear of what a core refuses", "model_groups:stand_beside", "refusals in cores over tp")(
    lambda stand_beside: lambda *_: None
)
plant("a head that is trained alone has a hidden input", "styles:_hidden", "a head under FSDP2")(
    lambda hidden: lambda x, weight: x
)
