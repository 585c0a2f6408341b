"""Bugs of recurrent layers and convolutions over ranks, of linears over tp, and of decoding."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch.distributed.tensor import Replicate

from planted.seams import in_area, with_arguments, with_result

# --- recurrent layers
plant = in_area("recurrent layers")


def of_states(change: Any) -> Any:
    """Of gathers of states, not of rows beside pieces."""

    def make(gather: Any) -> Any:
        def mutant(x: Any, most: int, group: Any) -> Any:
            found = gather(x, most, group)
            return found if group[2] in ("causal_conv1d", "roll") else change(found)

        return mutant

    return make


plant("states are folded in the order of other ranks", "mixers.moving:gather_rows", "recurrent layers")(
    of_states(lambda found: found.flip(0))
)
plant("a state loses its gradient", "mixers.moving:gather_rows", "recurrent layers")(
    of_states(lambda found: found.detach())
)
plant("a state passes a piece without decay", "mixers.between:Between.decays_of", "recurrent layers")(
    lambda decays_of: lambda self, g, like: decays_of(self, None, like)
)
plant("a state goes on over the start of a document", "mixers.pieces:pieces_of", "recurrent layers")(
    lambda pieces_of: lambda sequence, mask, batch, rows: pieces_of(sequence, None, batch, rows)
)
plant("rows beside a piece lose their gradient", "mixers.moving:scatter_sum", "convolutions")(
    lambda scatter_sum: lambda x, group: 0 * scatter_sum(x, group)
)
plant("the gradient of a parameter of heads is that of one rank", "mixers.tensors:Partial", "mixers over heads")(
    lambda partial: Replicate
)


# --- latent keys
plant = in_area("latent keys")

plant("keys lose their rotary part", "latent_passes:matrices", "latent keys")(
    lambda matrices: with_result(matrices, lambda whole: whole * (whole != 1))
)
plant("a tile expands rows beside its own", "latent.expand:_rows_of", "latent keys")(
    lambda rows_of: with_result(rows_of, lambda rows: rows.roll(1, 0))
)
plant("tiles of documents expand the first rows", "latent.expand:_rows_of", "latent keys")(
    lambda rows_of: with_arguments(rows_of, tile=lambda tile: replace(tile, k=(0, tile.k[1] - tile.k[0])))
)
plant("gradients of latents stay where they were computed", "functional:FunctionalTransport.collect", "latent keys")(
    lambda collect: lambda self: [x for x in collect(self) if x is None]
)
plant("the projection gets no gradient of fetched rows", "latent_passes:of_matrices", "latent keys")(
    lambda of_matrices: with_arguments(of_matrices, grad=lambda grad: grad * 0.5)
)


@plant("every part of the heads is expanded as the first", "latent.expand:LatentScores.heads", "latent keys")
def _(heads: Any) -> Any:
    return lambda self, begin, end: replace(heads(self, begin, end), up=self.up[: end - begin])


@plant("a layer's keys are those of the layer before", "latent_passes:matrices", "latent keys of layers")
def _(matrices: Any) -> Any:
    kept: dict[Any, Any] = {}
    return lambda up, *sizes: kept.setdefault((up.shape, *sizes), matrices(up, *sizes))


# --- linears over tp
plant = in_area("linears over tp")


@plant("shards are as even as can be, not those of torch.chunk", "shards:Shards.sizes", "linears")
def _(sizes: Any) -> Any:
    def even(self: Any) -> list[int]:
        count = len(sizes(self))
        return [(self.num_rows + count - 1 - rank) // count for rank in range(count)]

    return even


plant("a bias of a row linear is added on every rank", "rowwise:row_linear", "linears")(
    lambda row_linear: lambda x, weight, bias, spec: row_linear(x, weight, None if bias is None else 3 * bias, spec)
)
plant("rows are waited for before the product", "shards:Shards.gather", "order of linears")(
    lambda gather: lambda self, x: (lambda found: lambda: found)(gather(self, x)())
)


# --- decoding
plant = in_area("decoding")


@plant("lse of ranks is merged in base 2", "decoding:merge", "decoding")
def _(merge: Any) -> Any:
    return with_arguments(merge, pieces=lambda pieces: [(out, lse * math.log2(math.e)) for out, lse in pieces])


plant("a token is kept in the row of the one before", "cache:places", "cache")(
    lambda places: with_result(places, lambda found: (found[0], (found[1] - 1).clamp(min=0)))
)
