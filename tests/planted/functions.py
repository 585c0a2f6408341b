"""Bugs of functions of users: indices that are local, gradients that are lost, functions that are old."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from planted.seams import in_area, with_arguments, with_result

plant = in_area("functions of users")


def local(name: str) -> Any:
    """Indices [b, h, q, kv] of which one counts from 0."""
    place = ("b", "h", "q", "kv").index(name)

    def change(indices: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(torch.arange(len(x)) if i == place else x for i, x in enumerate(indices))

    return change


plant("score_mod sees the index of a local query", "scores:Scores._indices", "functions")(
    lambda indices: with_result(indices, local("q"))
)
plant("score_mod sees the index of a key in its tile", "scores:Scores._indices", "functions")(
    lambda indices: with_result(indices, local("kv"))
)
plant("functions of the first heads in every chunk", "scores:Scores.heads", "functions")(
    lambda heads: lambda self, begin, end: replace(heads(self, begin, end), first_head=self.first_head)
)


@plant("captured gradients are those of the last tile", "scores:ScoreGradients.add_", "functions")
def _(add: Any) -> Any:
    def mutant(self: Any, other: Any) -> None:
        for name, x in self.items():
            x.mul_(not name.startswith("captured."))
        add(self, other)

    return mutant


@plant("captured gradients of a rank's heads are lost", "ulysses:_Call.shares", "functions")
def _(shares: Any) -> Any:
    return with_result(shares, lambda found: {name: x * (name in ("bias", "sinks")) for name, x in found.items()})


@plant("the derivative of score_mod is 1", "scores:Scores.modified_gradient", "functions")
def _(gradient: Any) -> Any:
    def mutant(self: Any, dscores: Any, x: Any, where: Any, into: Any) -> Any:
        gradient(self, dscores, x, where, into)
        return dscores

    return mutant


@plant("the backward forgets mask_mod", "kernels.reference:REFERENCE", "functions")
def _(kernel: Any) -> Any:
    def backward(tile: Any) -> Any:
        return kernel.backward(tile._replace(scores=replace(tile.scores, mask_mod=None)))

    return replace(kernel, backward=backward)


@plant("captured gradients are summed in the inputs' dtype", "spec:make_scores", "captured sums in fp32")
def _(make_scores: Any) -> Any:
    def mutant(options: Any, tensors: Any, dtype: Any, captured: Any = (), *others: Any) -> Any:
        return replace(make_scores(options, tensors, dtype, captured, *others), captured=tuple(captured))

    return mutant


@plant("a function of the same name is the old one", "functions:ScalarFunction.of", "functions that change")
def _(make: Any) -> Any:
    known: dict[Any, Any] = {}
    return lambda cls, name, graph, captured: known.setdefault(name, make(cls, name, graph, captured))


plant("heads of DTensors count from 0", "dtensor:first_index", "functions of DTensors")(
    lambda first_index: lambda x, dim: 0
)
plant("what functions read is not compared", "passes:_what_must_agree", "functions that differ")(
    lambda fields: with_result(fields, lambda found: {name: x for name, x in found.items() if "captured" not in name})
)
plant("blocks are not compared with mask_mod", "block_mask:_check_blocks", "blocks of masks")(
    lambda check: lambda *given: None
)
plant("sums have no order where one is asked for", "functions:_fixed_order", "order of captured sums")(
    lambda fixed_order: lambda asked: fixed_order(False)
)
plant("heads over tp count from 0 in functions", "spec:make_spec", "heads of cores over tp")(
    lambda make_spec: with_result(make_spec, lambda spec: spec._replace(first_head=0))
)
plant("a core calls PyTorch's flex_attention", "sdpa_mode:_asked_by_flex", "flex_attention of PyTorch in cores")(
    lambda asked: lambda *given: False
)


@plant(
    "tensors that were written are taken for those before", "rank_mask:Unchanged.__eq__",
    "masks of cores", "refused masks of sequences",
)  # fmt: skip
def _(equal: Any) -> Any:
    return lambda self, other: len(self._tensors) == len(other._tensors)


@plant("a function of other numbers is known again", "fingerprint:reached_by", "functions of other numbers")
def _(reached_by: Any) -> Any:
    return with_result(reached_by, lambda x: x and x._replace(key=tuple(y for y in x.key if type(y) is not str)))


plant("a state of torch is taken for a constant", "fingerprint:_names_in", "functions of states")(
    lambda names_in: lambda code: names_in(code) or ()
)
plant("functions see indices of padding", "trace:trace", "padding of cores")(
    lambda trace: with_arguments(trace, last=lambda last: None)
)


@plant("gradients of shards are this rank's share", "whole:scatter_sum", "shards")
def _(scatter_sum: Any) -> Any:
    def mutant(x: Any, dim: int, lens: Any, inverse: Any, rank: int, *others: Any) -> Any:
        order = torch.arange(sum(lens)) if inverse is None else inverse.argsort()
        return x.index_select(dim, order.split(lens)[rank])

    return mutant


plant("shards are joined in the order of ranks", "whole:gather", "shards")(
    lambda gather: lambda x, dim, lens, inverse, *others: gather(x, dim, lens, None, *others)
)


def with_local(place: int, of_whole: Any) -> Any:
    """Of indices [b, h, q, kv] of a tile that are made global, one stays local."""

    def mutant(self: Any, *given: Any) -> Any:
        return tuple(given[i] if i == place else x for i, x in enumerate(of_whole(self, *given)))

    return mutant


plant("the flex kernel sees the index of a local query", "tiles:Tile._globals", "tiles of flex")(
    lambda of_whole: with_local(2, of_whole)
)
plant("heads of a chunk count from 0 in the flex kernel", "tiles:Tile._globals", "tables of flex")(
    lambda of_whole: with_local(1, of_whole)
)
plant("the flex kernel reads before and after a tensor", "reads:_Rewriting._counted", "indices of flex")(
    lambda counted: lambda self, at, size, pads: self._nodes[at]
)


@plant("what is read beyond a tensor is a number", "reads:_Rewriting._counted", "indices of flex")
def _(counted: Any) -> Any:
    def mutant(self: Any, at: Any, size: int, pads: Any) -> Any:
        index = counted(self, at, size, pads)
        self._inside = None
        return index

    return mutant


plant("what follows a tensor is a number", "reads:Read.of", "indices of flex")(
    lambda of: lambda self, x: of(self, x).nan_to_num()
)
plant("NaN follows a tensor in products too", "reads:_Rewriting._all_summed", "hidden reads of flex")(
    lambda summed: lambda self: set(self._function.graph.graph.nodes)
)


@plant("gradients of elements counted from the end are lost", "reads:Read.home", "pads of flex")
def _(home: Any) -> Any:
    def mutant(self: Any, grad: Any) -> Any:
        for dim, (before, _) in enumerate(self.pads):
            grad.narrow(dim, 0, before).zero_()
        return home(self, grad)

    return mutant


plant("the flex kernel's backward forgets mask_mod", "kernel:_backward", "tiles of flex")(
    lambda backward: lambda tile: backward(tile._replace(scores=replace(tile.scores, mask_mod=None)))
)


@plant("captured gradients of the flex kernel are summed in bfloat16", "kernel:_backward", "tiles of flex")
def _(backward: Any) -> Any:
    def mutant(tile: Any) -> Any:
        *grads, of_scores = backward(tile)
        for x in of_scores.values():
            x.copy_(x.bfloat16())
        return *grads, of_scores

    return mutant


@plant("blocks that somebody sees are not masked", "blocks:_made", "tables of flex")
def _(made: Any) -> Any:
    def turned(x: Any) -> Any:
        listed = x.full_kv_num_blocks, x.full_kv_indices, x.kv_num_blocks, x.kv_indices
        return x.from_kv_blocks(*listed, BLOCK_SIZE=x.BLOCK_SIZE, mask_mod=x.mask_mod, seq_lengths=x.seq_lengths)

    return with_result(made, turned)


plant("tables of blocks are kept though what they read was written", "tiles:kept_of", "tables of flex")(
    lambda kept_of: lambda cover, key, make: kept_of(cover, key[:7], make)
)
plant("the last source is never seen", "rank_mask:_seen", "masks of sequences")(
    lambda seen: with_result(seen, lambda found: [*found[:-1], False])
)
plant("sources are told to their receivers", "survey:say_sources", "masks of sequences")(
    lambda say_sources: with_arguments(say_sources, sources=lambda sources: sources.T)
)
plant("sources that nobody sees travel", "survey:parse_sources", "traffic of masks")(
    lambda parse_sources: lambda spec, cp_size: None
)
plant("a mask of a sequence is taken in another layout", "rank_mask:Sources.of_call", "refused masks of sequences")(
    lambda of_call: lambda self, *place: self.table
)
plant("ranks may have masks of other sources", "passes:_what_must_agree", "masks of sequences that differ")(
    lambda fields: with_result(fields, lambda found: {name: x for name, x in found.items() if "sources" not in name})
)
