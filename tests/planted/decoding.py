"""Bugs of decoding: how results of ranks are merged, and which rank keeps a token where."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from planted.seams import in_area, with_arguments, with_result

plant = in_area("decoding")


def in_pieces(change: Any) -> Any:
    """Of `merge`: the lse of each rank's result is another."""
    return lambda merge: with_arguments(merge, pieces=lambda pieces: [(out, change(lse)) for out, lse in pieces])


plant("lse of ranks is merged in base 2", "decoding:merge", "decoding", "random uses")(
    in_pieces(lambda lse: lse * math.log2(math.e))
)
plant("ranks weigh alike, whatever they hold", "decoding:merge", "decoding")(in_pieces(torch.zeros_like))
plant("the last rank's result is lost", "decoding:merge", "decoding")(
    lambda merge: with_arguments(merge, pieces=lambda pieces: pieces[:-1])
)
plant("sinks are lost where ranks are merged", "decoding:merge", "decoding")(
    lambda merge: with_arguments(merge, sinks=lambda sinks: None)
)
plant("keys of a window are read one position late", "decoding:decode", "decoding")(
    lambda decode: with_arguments(decode, k_positions=lambda x: None if x is None else x + 1)
)
plant("positions of sharded queries are those of the ranks before", "decoding:_gather", "sharded queries")(
    lambda gather: with_result(gather, lambda found: (found[0], None if found[1] is None else found[1].roll(1)))
)
plant("results of sharded queries are merged without the first rank's", "decoding:_to_owners", "sharded queries")(
    lambda to_owners: with_result(to_owners, lambda pieces: pieces[1:])
)
plant("a token is kept in the row of the one before", "cache:places", "cache")(
    lambda places: with_result(places, lambda found: (found[0], (found[1] - 1).clamp(min=0)))
)
plant("a token's keeper is told without those that came before", "cache:places", "cache")(
    lambda places: with_arguments(places, counts=torch.zeros_like)
)


@plant("the position of an appended token is off by one", "cache:ShardedCache.append", "cache")
def _(append: Any) -> Any:
    def mutant(self: Any, key: Any, value: Any) -> None:
        append(self, key, value)
        positions = self._allocated()[2]
        positions[positions == self.length - 1] += 1

    return mutant


@plant("padding of the prompt is cached", "cache:ShardedCache.prefill", "cache")
def _(prefill: Any) -> Any:
    def mutant(self: Any, key: Any, value: Any) -> None:
        self.sequence = replace(self.sequence, length=self.sequence.seq_len)
        prefill(self, key, value)

    return mutant
