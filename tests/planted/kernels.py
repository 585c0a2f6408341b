"""Bugs of kernels on one tile, of merging their partial results, and of what they make of scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from einops import rearrange

from planted.seams import changed, in_area, with_arguments, with_call, with_result

# --- kernels
plant = in_area("kernels")


plant("fp32 sums of fp64 inputs", "combine:accumulation_dtype", "parity")(
    lambda accumulation_dtype: lambda dtype: torch.float32
)
plant("sums in the inputs' dtype", "combine:accumulation_dtype", "low precision")(
    lambda accumulation_dtype: lambda dtype: dtype
)


@plant("tiles that share keys overwrite each other's gradients", "merge:SummingBackward.step", "parity")
def _(step: Any) -> Any:
    def mutant(self: Any, k: Any, v: Any, tiles: Any, into: Any = None) -> Any:
        pieces = [piece for tile in tiles for piece in step(self, k, v, [tile])]
        if into is None:
            return pieces
        for begin, dk, dv in pieces:
            rows = slice(begin, begin + dk.shape[2])
            into[0][:, :, rows], into[1][:, :, rows] = dk, dv
        return []

    return mutant


@plant("a step goes on from the gradients of the step before", "merge:SummingBackward.step", "kernels")
def _(step: Any) -> Any:
    def mutant(self: Any, k: Any, v: Any, tiles: Any, into: Any = None) -> Any:
        pieces = step(self, k, v, tiles, into)
        before = vars(self).get("before")
        if into is None:
            vars(self)["before"] = pieces
        elif before and before[0][1].shape == into[0].shape:
            into[0].add_(before[0][1])
        return pieces

    return mutant


@plant("dk of the first tile of several is added twice", "merge:SummingBackward.step", "parity")
def _(step: Any) -> Any:
    def mutant(self: Any, k: Any, v: Any, tiles: Any, into: Any = None) -> Any:
        pieces = step(self, k, v, tiles, into)
        if into is not None and len(tiles) > 1:
            into[0][:, :, tiles[0].k[0] : tiles[0].k[1]].mul_(2.0)
        return pieces

    return mutant


plant("a partial gradient lands on the first rows", "combine:RowSum.add", "kernels")(
    lambda add: with_arguments(add, begin=lambda begin: 0)
)


@plant("the last of many partial gradients is left out", "combine:RowSum.add", "kernels")
def _(add: Any) -> Any:
    def mutant(self: Any, begin: int, x: Any) -> None:
        count = vars(self)["count"] = vars(self).get("count", 0) + 1
        if count < 3:
            add(self, begin, x)

    return mutant


plant("delta without the gradient of lse", "combine:make_delta", "parity")(
    lambda make_delta: with_arguments(make_delta, dlse=lambda dlse: None)
)


@plant("the caller's queries are scaled in place", "merge:MergingForward.__init__", "parity")
def _(init: Any) -> Any:
    def mutant(self: Any, kernel: Any, q: Any, v_head_dim: int, scores: Any) -> None:
        init(self, kernel, q.mul_(scores.scale), v_head_dim, replace(scores, scale=1.0))

    return mutant


@plant("blocks lost in the backward", "kernels.reference:REFERENCE", "parity")
def _(kernel: Any) -> Any:
    from inside import Pairs

    def without_blocks(tile: Any) -> Any:
        known = isinstance(tile.cover, Pairs)
        return tile._replace(cover=replace(tile.cover, mask=replace(tile.cover.mask, blocks=None))) if known else tile

    return replace(kernel, backward=lambda tile: kernel.backward(without_blocks(tile)))


plant("heads of a group interleaved", "kernels.reference:_grouped", "head order")(
    lambda grouped: lambda x, num_kv_heads, dtype: rearrange(x.to(dtype), "b (g k) s d -> b k g s d", k=num_kv_heads)
)


@plant("causal tiles computed as full ones", "aten:CPU_FLASH", "parity")
def _(kernel: Any) -> Any:
    from inside import FULL

    return replace(kernel, forward=lambda q, k, v, cover, scores: kernel.forward(q, k, v, FULL, scores))


@plant("the backward computes causal tiles as full ones", "aten:CPU_FLASH", "parity")
def _(kernel: Any) -> Any:
    from inside import FULL

    return replace(kernel, backward=lambda tile: kernel.backward(tile._replace(cover=FULL)))


@plant("rows outside of all sequences are not cleared", "flash_attn_4_package:run_forward", "sequences")
def _(run: Any) -> Any:
    def uncleared(call: Any, out: Any, lse: Any) -> Any:
        kernels = run(call, out, lse)
        out.masked_fill_(torch.isneginf(lse).mT[..., None], torch.nan)
        return kernels

    return uncleared


@plant("gradients of keys outside of all sequences are not cleared", "flash_attn_4_package:run_backward", "sequences")
def _(run: Any) -> Any:
    def uncleared(*given: Any) -> Any:
        kernels = run(*given)
        dk = given[5]
        dk.masked_fill_((dk == 0).all(-1, keepdim=True), 1.0)
        return kernels

    return uncleared


plant("the backward is another one where it should repeat", "flash_attn_4:FA4", "deterministic")(
    lambda kernel: replace(kernel, reproducible=None)
)
plant("a deterministic backward of bands that it was not tried for", "merge:_squares", "deterministic")(
    lambda squares: lambda tiles: list(tiles)
)


# --- merging
@plant("fp32 sums of dk are not cleared", "flash_attn_4_package:Launches.__call__", "kernels launched directly")
def _(launches: Any) -> Any:
    def uncleared(found: Any) -> Any:
        if len(found) == 5:
            found[1][7].add_(1.0)
        return found

    return with_result(launches, uncleared)


plant("calls of unlike bands share a kernel", "flash_attn_4_package:Call.kind", "kernels launched directly")(
    lambda kind: with_result(kind, lambda found: (*found[:6], *found[9:]))
)
plant("another softcap shares a kernel", "flash_attn_4_package:Call.kind", "kernels launched directly")(
    lambda kind: with_result(kind, lambda found: (*found[:9], *found[10:]))
)
plant("what a release launches is not compared", "flash_attn_4_package:_same", "kernels launched directly")(
    lambda same: lambda recorded, launches, given: True
)
plant("tensors in each other's place pass for the same", "flash_attn_4_package:_same", "kernels launched directly")(
    lambda same: lambda recorded, launches, given: same(recorded, launches, set())
)


plant = in_area("merging")


def remembering(output_sum: Any) -> Any:
    """An `OutputSum` that keeps what it was given, for mutants to look at."""

    class Remembering(output_sum):
        def __init__(self, shape: Any, dtype: Any, device: Any) -> None:
            super().__init__(shape, dtype, device)
            self.of, self.given = (tuple(shape), dtype, device), []

        def add(self, begin: int, out: Any, lse: Any) -> None:
            self.given.append((begin, out, lse))
            super().add(begin, out, lse)

        @property
        def largest(self) -> Any:
            """The largest lse of a row, [B, H, S]."""
            shape, dtype, device = self.of
            largest = torch.full(shape[:3], -torch.inf, dtype=dtype, device=device)
            for begin, out, lse in self.given:
                rows = largest[:, :, begin : begin + out.shape[2]]
                torch.maximum(rows, lse.to(dtype), out=rows)
            return largest

    return Remembering


@plant("the merge leaves lse as it was", "combine:OutputSum", "parity")
def _(output_sum: Any) -> Any:
    class Mutant(remembering(output_sum)):
        def finish(self, *args: Any, **kwargs: Any) -> Any:
            out, lse = super().finish(*args, **kwargs)
            return out, lse.copy_(self.largest)

    return Mutant


@plant("the merge does not divide by the sum of weights", "combine:OutputSum", "parity")
def _(output_sum: Any) -> Any:
    class Mutant(remembering(output_sum)):
        def finish(self, *args: Any, **kwargs: Any) -> Any:
            out, lse = super().finish(*args, **kwargs)
            return out.mul_(torch.exp(lse - self.largest).nan_to_num(0.0)[..., None]), lse

    return Mutant


@plant("rows without keys are merged to NaN", "combine:OutputSum.finish", "parity")
def _(finish: Any) -> Any:
    def with_nan(results: Any) -> Any:
        out, lse = results
        return out.masked_fill_(torch.isneginf(lse)[..., None], torch.nan), lse

    return with_result(finish, with_nan)


plant("partial outputs are added without weights", "combine:OutputSum.add", "kernels")(
    lambda add: with_arguments(add, lse=lambda lse: lse.clamp(-1e-6, 1e-6))
)


@plant("more pieces than are held are folded without the first", "combine:OutputSum.add", "parity on six ranks")
def _(add: Any) -> Any:
    def mutant(self: Any, begin: int, out: Any, lse: Any) -> None:
        count = vars(self)["count"] = vars(self).get("count", 0) + 1
        if count < 3:
            add(self, begin, out, lse)

    return mutant


# --- scores
plant = in_area("scores")


plant("the derivative of softcap is left out", "kernels.reference:_scores", "scores")(
    lambda scores: with_result(scores, lambda results: (results[0], 1.0))
)


def with_scores(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Of a kernel: its passes are given other scores."""

    def make(kernel: Any) -> Any:
        def forward(*given: Any) -> Any:
            return kernel.forward(*given[:-1], change(given[-1]))

        def backward(tile: Any) -> Any:
            return kernel.backward(tile._replace(scores=change(tile.scores)))

        return replace(kernel, forward=forward, backward=backward)

    return make


plant("softcap is lost on the way to the kernel", "kernels.reference:REFERENCE", "scores")(
    with_scores(lambda scores: replace(scores, softcap=None))
)


@plant("softcap after the biases", "kernels.reference:_scores", "scores")
def _(masked_scores: Any) -> Any:
    def mutant(q: Any, k: Any, cover: Any, first_row: int, scores: Any) -> Any:
        if not scores.softcap or scores.alibi_slopes is None:
            return masked_scores(q, k, cover, first_row, scores)
        x, _ = masked_scores(q, k, cover, first_row, replace(scores, softcap=None))
        tanh = torch.tanh(x / scores.softcap)
        return (scores.softcap * tanh).masked_fill(torch.isneginf(x), -torch.inf), 1 - tanh.square()

    return mutant


@plant("gradients of sinks are those of all ranks on each of them", "sinks:gradient_of_sinks", "scores")
def _(gradient_of_sinks: Any) -> Any:
    return with_result(gradient_of_sinks, lambda gradient: gradient * torch.distributed.get_world_size())


@plant("gradients of sinks are those of the first rows", "sinks:gradient_of_sinks", "scores")
def _(gradient_of_sinks: Any) -> Any:
    def first(x: Any) -> Any:
        return x[:, :, :3]

    return with_arguments(gradient_of_sinks, dout=first, out=first, lse=first)


@plant("gradients of sinks are those of one rank", "sinks:gradient_of_sinks", "scores")
def _(gradient_of_sinks: Any) -> Any:
    return with_result(gradient_of_sinks, lambda gradient: gradient * (torch.distributed.get_rank() == 0))


plant("the gradient of a sink has the other sign", "sinks:gradient_of_sinks", "scores")(
    lambda gradient_of_sinks: with_result(gradient_of_sinks, torch.neg)
)


@plant("a sink for each tile", "combine:OutputSum", "scores")
def _(output_sum: Any) -> Any:
    class Mutant(remembering(output_sum)):
        def finish(self, like: Any, dtype: Any, into: Any = None, sinks: Any = None) -> Any:
            if sinks is None:
                return super().finish(like, dtype, into)
            again = output_sum(*self.of)
            for begin, out, lse in self.given:
                left = torch.sigmoid(lse - sinks[:, None]).nan_to_num(0.0)
                again.add(begin, out * left[..., None].to(out.dtype), lse)
            return again.finish(like, dtype, into, sinks)

    return Mutant


@plant("a sink in lse", "combine:OutputSum.finish", "scores")
def _(finish: Any) -> Any:
    def mutant(self: Any, like: Any, dtype: Any, into: Any = None, sinks: Any = None) -> Any:
        out, lse = finish(self, like, dtype, into, sinks)
        return out, lse if sinks is None else lse.copy_(torch.logaddexp(lse, sinks[:, None]))

    return mutant


@plant("no sink where a single tile has all rows", "combine:OutputSum", "scores")
def _(output_sum: Any) -> Any:
    class Mutant(remembering(output_sum)):
        def finish(self, like: Any, dtype: Any, into: Any = None, sinks: Any = None) -> Any:
            single = len(self.given) == 1 and self.given[0][1].shape == self.of[0]
            return super().finish(like, dtype, into, None if single else sinks)

    return Mutant


plant("no sink in the backward", "sinks:include_sinks", "scores")(lambda include_sinks: lambda lse, sinks: lse)


@plant("the gradient of lse as if lse had the sink", "ring_loop:RING", "scores")
def _(method: Any) -> Any:
    def with_sink(given: Any) -> dict[str, Any]:
        sinks = given.scores.sinks
        if given.dlse is None or sinks is None:
            return {}
        return {"given": given._replace(lse=torch.logaddexp(given.lse, sinks[:, None]))}

    return changed(method, backward=with_call(method.backward, with_sink))


plant("the sink takes nothing where a gradient comes through lse", "sinks:share_of_keys", "scores")(
    lambda share_of_keys: lambda lse, sinks: torch.ones_like(lse)
)


@plant("sinks of the first heads in every chunk", "scores:Scores.heads", "scores")
def _(heads: Any) -> Any:
    def mutant(self: Any, begin: int, end: int) -> Any:
        part = heads(self, begin, end)
        return part if part.sinks is None else replace(part, sinks=self.sinks[: end - begin])

    return mutant


@plant("slopes of the first heads in every chunk", "scores:Scores.heads", "scores")
def _(heads: Any) -> Any:
    def mutant(self: Any, begin: int, end: int) -> Any:
        part = heads(self, begin, end)
        return part if part.alibi_slopes is None else replace(part, alibi_slopes=self.alibi_slopes[: end - begin])

    return mutant


plant("dropout of the first heads in every chunk", "scores:Scores.heads", "scores")(
    lambda heads: lambda self, begin, end: replace(heads(self, begin, end), first_head=self.first_head)
)
plant("gradients of slopes land on the first heads", "scores:ScoreGradients.part", "scores")(
    lambda part: with_arguments(part, heads=lambda heads: heads and (0, heads[1] - heads[0]))
)


plant("every tile has the first rows of a bias", "scores:Scores.rows", "scores")(
    lambda rows: lambda self, begin, end: rows(self, 0, end - begin)
)
plant("distances of local rows", "scores:Where.distance", "scores")(
    lambda distance: lambda self: torch.arange(len(self.q_pos))[:, None] - torch.arange(len(self.k_pos))
)
plant("dropout by local rows", "kernels.reference:_dropout_factors", "scores")(
    lambda factors: with_arguments(factors, cover=lambda cover: replace(cover, q_pos=torch.arange(len(cover.q_pos))))
)
plant("columns of a bias in the order of the tile", "scores.bias:added", "scores")(
    lambda added: lambda x, where: x[..., : len(where.k_pos)]
)


@plant("gradients of a bias in the order of the tile", "scores.bias:add_gradient", "scores")
def _(add_gradient: Any) -> Any:
    def by_tile(where: Any) -> dict[str, Any]:
        return {"where": where._replace(k_pos=torch.arange(len(where.k_pos)))}

    return with_call(add_gradient, by_tile)


plant("slopes without the sign of their gradient", "alibi_slopes:add_gradient", "scores")(
    lambda add_gradient: with_arguments(add_gradient, dscores=lambda dscores: -dscores)
)


@plant("the backward drops no weights", "kernels.reference:REFERENCE", "scores")
def _(kernel: Any) -> Any:
    def backward(tile: Any) -> Any:
        return kernel.backward(tile._replace(scores=replace(tile.scores, dropout_p=0.0)))

    return replace(kernel, backward=backward)


plant("weights that are kept are not scaled", "kernels.reference:_dropout_factors", "scores")(
    lambda kept: with_result(kept, lambda factors: factors.sign())
)


def without_offset(scores: Any) -> Any:
    seed = scores.dropout_seed
    return scores if seed is None else replace(scores, dropout_seed=seed * torch.tensor([1, 0]))


plant("the offset of a seed is lost", "kernels.reference:REFERENCE", "scores")(with_scores(without_offset))
