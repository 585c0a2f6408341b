"""Bugs of linears, embeddings and losses over tp."""

from __future__ import annotations

from typing import Any

import torch

from planted.seams import in_area, with_arguments, with_result

plant = in_area("linears over tp")


@plant("rows are read before they have come", "transport.shards:Shards._wait", "traffic of linears")
def _(wait: Any) -> Any:
    return lambda self, started, sent: started


@plant("rows are waited for before the product", "transport.shards:Shards.gather", "order of linears")
def _(gather: Any) -> Any:
    def mutant(self: Any, x: Any) -> Any:
        found = gather(self, x)()
        return lambda: found

    return mutant


@plant("shards are as even as can be, not those of torch.chunk", "transport.shards:Shards.sizes", "linears")
def _(sizes: Any) -> Any:
    def even(self: Any) -> list[int]:
        count = len(sizes(self))
        return [(self.num_rows + count - 1 - rank) // count for rank in range(count)]

    return even


plant("a sum over tp is that of one rank", "transport.shards:Shards.all_sum", "linears")(
    lambda all_sum: lambda self, x: lambda: x.clone()
)


def with_call(**others: Any) -> Any:
    """Of `_ColumnLinears.forward`: its inputs are read in another way."""
    return lambda forward: lambda ctx, call, *given: forward(ctx, call._replace(**others), *given)


COLUMNS = "linears:_ColumnLinears.forward"
plant("what should be gathered again is kept", COLUMNS, "traffic of linears")(with_call(recompute=False))
plant("rows are gathered for frozen weights", COLUMNS, "traffic of linears")(
    lambda forward: lambda ctx, call, keeps, *given: forward(ctx, call, True, *given)
)


@plant("a bias of a row linear is added on every rank", "linears:sum_rows", "linears")
def _(sum_rows: Any) -> Any:
    def mutant(x: Any, bias: Any, *where: Any) -> Any:
        return sum_rows(x if bias is None else x + bias, None, *where)

    return mutant


@plant("the gradient of a row linear's bias is of this rank's rows", "linears:_SumRows.backward", "linears")
def _(backward: Any) -> Any:
    def mutant(ctx: Any, dout: Any) -> Any:
        dx, dbias, *others = backward(ctx, dout)
        return dx, None if dbias is None else dout.flatten(0, -2).sum(0), *others

    return mutant


plant("tokens of other ranks take this rank's first row", "vocabulary:_own_index", "linears")(
    lambda own_index: with_result(own_index, lambda found: (found[0], torch.ones_like(found[1])))
)
plant("padding of an embedding is trained", "vocabulary:embed", "linears")(
    lambda embed: with_arguments(embed, padding_idx=lambda index: None)
)
plant("logits of the last rows are left out", "vocabulary:_chunks", "chunks of logits")(
    lambda chunks: with_result(chunks, lambda rows: list(rows)[:-1])
)
plant("tp ranks do not compare their first calls", "agreement:agree_once", "unlike tokens over tp")(
    lambda agree_once: lambda *_: None
)
plant("a head that is trained alone has a hidden input", "tensor_parallel:_hidden", "a head under FSDP2")(
    lambda hidden: lambda x, weight: x
)
