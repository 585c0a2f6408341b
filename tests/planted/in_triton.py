"""Bugs of the Triton kernels, which the checks run in Triton's interpreter.

A seam is the Python that launches a kernel, or a device function: a kernel finds those by their names when it runs, so
they are replaced like any other function. No kernel's source is quoted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from planted.geometry import without_exclusion
from planted.seams import in_area, with_arguments, with_call, with_result

plant = in_area("kernels in Triton")


def result(change: Any) -> Any:
    """Of a device function: its result is changed."""
    return lambda device_function: lambda *args, **kwargs: change(device_function(*args, **kwargs))


plant("strict instead of inclusive diagonal in Triton", "triton_attention:_bounds", "a band in Triton")(
    lambda bounds: with_result(bounds, lambda found: (found[0] + 1, found[1]))
)
plant("a band is wider by a key in Triton", "triton_attention:_bounds", "a band in Triton")(
    lambda bounds: with_result(bounds, lambda found: (found[0], found[1] + 1))
)
plant("the last block of keys that is masked is left out", "triton_visits:visits", "a band in Triton")(
    result(lambda found: (found[0] - 1, *found[1:]))
)
plant("blocks of which all pairs are allowed are left out", "triton_visits:visits", "a band in Triton")(
    result(lambda found: (found[0], found[1] - found[1], *found[2:]))
)
plant("delta is left out in Triton", "triton_tiles:statistics", "a band in Triton")(
    result(lambda found: (found[0], found[1] * 0.0))
)
plant("lse in natural log where powers of two are read", "triton_attention:LOG2_E", "a band in Triton")(
    lambda log2_e: 1.0
)
plant("a block is read a row late", "triton_tiles:load", "a band in Triton")(
    lambda load: lambda x, strides, batch, head, first, *others: load(x, strides, batch, head, first + 1, *others)
)
plant("window off by one in Triton", "mask:Mask.key_intervals", "documents in Triton")(
    lambda key_intervals: with_result(key_intervals, lambda found: (found[0], found[1] - 1, found[2]))
)
plant("documents ignored in Triton", "triton_visits:allowed_pairs", "documents in Triton")(
    lambda allowed_pairs: lambda *given: allowed_pairs(*given[:-1], False)
)
plant("excluded tokens see each other in Triton", "mask:Mask.document_ids", "documents in Triton")(
    lambda document_ids: lambda self, positions: document_ids(without_exclusion(self), positions)
)


@plant("blocks lost in the backward of Triton", "triton_attention:_mask_rows", "documents in Triton")
def _(mask_rows: Any) -> Any:
    def mutant(cover: Any, blocks: tuple[Any, ...]) -> Any:
        others = replace(cover, mask=replace(cover.mask, blocks=None), kept={})
        return mask_rows(cover if len(blocks) == 1 else others, blocks)

    return mutant


plant("documents of the first row stand for all in Triton", "mask:Mask.document_ids", "documents in Triton")(
    lambda document_ids: with_result(document_ids, lambda ids: ids[:1])
)
plant("bounds of ids leave a document out", "triton_visits:_id_bounds", "documents in Triton")(
    lambda id_bounds: lambda *given: (id_bounds(*given)[1], id_bounds(*given)[1])
)
plant("the derivative of softcap is left out in Triton", "triton_tiles:scored", "scores in Triton")(
    result(lambda found: (*found[:2], 1.0))
)


def with_score_arguments(change: Any) -> Any:
    """Of what kernels are given of scores: (softcap, slopes, bias, dropout) and numbers."""
    return lambda score_arguments: with_result(score_arguments, lambda found: change(*found))


plant("softcap is lost on the way to Triton", "triton_attention:_score_arguments", "scores in Triton")(
    with_score_arguments(lambda tensors, numbers: ((None, *tensors[1:]), numbers))
)
plant("kept weights are not scaled in Triton", "triton_attention:_score_arguments", "scores in Triton")(
    with_score_arguments(lambda tensors, numbers: ((*tensors[:3], tensors[3] and (*tensors[3][:3], 1.0)), numbers))
)
plant("dropout counts heads from this rank's first", "triton_attention:_dropout_words", "scores in Triton")(
    lambda dropout_words: lambda cover, scores, q: dropout_words(cover, replace(scores, first_head=0), q)
)
plant("dropout counts batch rows from the first", "triton_attention:_dropout_words", "scores in Triton")(
    lambda dropout_words: lambda cover, scores, q: dropout_words(cover, replace(scores, first_batch=0), q)
)
plant("words of queries are not mixed with those of keys", "triton_dropout:key_words", "scores in Triton")(
    result(lambda words: words ^ words)
)


@plant("the second word of a query is lost", "triton_dropout:query_words", "scores in Triton")
def _(query_words: Any) -> Any:
    def mutant(*given: Any) -> Any:
        one, two = query_words(*given)
        return one, two ^ two

    return mutant


plant("the sign of a block's distances is turned", "triton_visits:_sign", "scores in Triton")(
    result(lambda sign: sign * -1.0)
)
plant("the next position is taken for one step away", "triton_visits:_steps", "scores in Triton")(
    result(lambda found: (found[0], found[1] * 0 + 1))
)
plant("a block that two runs share counts as one run", "triton_visits:_run", "scores in Triton")(
    lambda run: result(lambda found: (found[0], found[1], found[2] | True))(run)
)


@plant("slopes have the gradient of the first rows", "triton_attention:_ScoreParts.sum", "scores in Triton")
def _(add_up: Any) -> Any:
    def mutant(self: Any) -> Any:
        self.slopes = None if self.slopes is None else self.slopes[:, :, :1]
        return add_up(self)

    return mutant


plant("a merge in Triton without weights", "combine_triton:_piece_lse", "sums in Triton")(
    lambda piece_lse: lambda *given: piece_lse(*given) * 0.0
)
plant("a merge in Triton without sinks", "combine_triton:merge_pieces", "sums in Triton")(
    lambda merge_pieces: with_arguments(merge_pieces, sinks=lambda sinks: None)
)


@plant("a piece is read from the first row on", "combine_triton:_piece", "sums in Triton")
def _(piece: Any) -> Any:
    return lambda x, strides, piece_rows, *others: piece(x, strides, (piece_rows[0] * 0, *piece_rows[1:]), *others)


plant("the last piece of a sum in Triton is left out", "combine_triton:sum_pieces", "sums in Triton")(
    lambda sum_pieces: with_arguments(sum_pieces, sums=lambda sums: [(pieces[:-1], into) for pieces, into in sums])
)
plant("delta in Triton without the gradient of lse", "combine_triton:row_dots", "sums in Triton")(
    lambda row_dots: with_call(row_dots, lambda minus: {"minus": None})
)
plant("keys behind those that there are are read", "split_kv:attend_few", "few queries in Triton")(
    lambda attend_few: with_arguments(attend_few, num_keys=lambda num_keys: None)
)


@plant(
    "a token is written where the one before belongs",
    "split_kv:Further.append_fused",
    "few queries in Triton",
)
def _(append_fused: Any) -> Any:
    return lambda self, *given: append_fused(self._replace(rows=self.rows.roll(1)), *given)
