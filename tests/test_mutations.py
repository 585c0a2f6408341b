"""The mutation gate: bugs that this field is known for, put into a copy of the package, must turn a quick check red.

A mutation replaces text of one shipped file. If the text is no longer there, or there twice, the test of that mutation
fails and says so: bring it up to date. A check is a test of this suite, or a few of its cases, run on ranks that import
the copy instead of the package; on a copy without a mutation all checks are green. The quick form has one mutation of
each check, the full form all.
"""

from __future__ import annotations

import ast
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import test_aten_kernels
import test_balancing
import test_changing_layouts
import test_copies
import test_flash_attn
import test_gradients
import test_kernels
import test_layouts
import test_masks
import test_op
import test_parity
import test_seeds
import test_segments
import test_sequence
import test_styles
import test_traffic
import test_watching
import torch
from cases import LAYOUTS, make_mask, pairs, pairs_of
from checks import GQA, MHA, MQA, Case, coverage, parity_on_ranks, report
from ranks import Pool

import cp_mesh
from cp_mesh import Mask
from cp_mesh.kernels import KERNELS
from cp_mesh.masks import CAUSAL

PACKAGE = Path(cp_mesh.__file__).parent


@dataclass(frozen=True)
class Mutation:
    """A bug: the text it replaces in a file of the package, and the check that must find it."""

    name: str
    file: str
    old: str
    new: str
    check: str


MUTATIONS = [
    # The loop.
    Mutation(
        "stale KV in the backward",
        "ring.py",
        "            backward.step(fetched[0], fetched[1], plan.tiles(stage), (written[0], written[1]))\n",
        "            kept = vars(incoming).setdefault('kept', fetched)\n"
        "            kept = kept if kept[0].shape == fetched[0].shape else fetched\n"
        "            backward.step(kept[0], kept[1], plan.tiles(stage), (written[0], written[1]))\n",
        "parity",
    ),
    Mutation(
        "dk and dv swapped on their way home",
        "ring.py",
        "plan.tiles(stage), (written[0], written[1]))",
        "plan.tiles(stage), (written[1], written[0]))",
        "parity",
    ),
    Mutation(
        "dk and dv swapped on their way home, equal head dims",
        "ring.py",
        "plan.tiles(stage), (written[0], written[1]))",
        "plan.tiles(stage), (written[1], written[0]))",
        "gradients come home",
    ),
    Mutation(
        "delivered gradients replace those of other ranks",
        "kernels/combine.py",
        "            total[:, :, begin : begin + x.shape[2]] += x\n",
        "            total[:, :, begin : begin + x.shape[2]] = x\n",
        "gradients come home",
    ),
    Mutation(
        "the last delivery is not added",
        "ring.py",
        "    collect()\n    for piece in local_pieces:",
        "    for piece in local_pieces:",
        "parity",
    ),
    Mutation(
        "local dv is not added",
        "ring.py",
        "        dk_sum.add(piece.begin, piece.dk)\n        dv_sum.add(piece.begin, piece.dv)\n    backward",
        "        dk_sum.add(piece.begin, piece.dk)\n    backward",
        "parity",
    ),
    Mutation(
        "sums of gradients are not zeroed",
        "kernels/combine.py",
        "total = torch.zeros(self._shape, dtype=self._dtype, device=self._device)",
        "total = torch.empty(self._shape, dtype=self._dtype, device=self._device)",
        "parity",
    ),
    Mutation(
        "gradients are summed in the inputs' dtype",
        "kernels/combine.py",
        "total = torch.zeros(self._shape, dtype=self._dtype, device=self._device)",
        "total = torch.zeros(self._shape, dtype=into.dtype, device=self._device)",
        "sums in fp32",
    ),
    Mutation(
        "tiles of another stage",
        "ring.py",
        "forward.step(fetched[0], fetched[1], plan.tiles(stage))",
        "forward.step(fetched[0], fetched[1], plan.tiles(route.stages[0]))",
        "parity",
    ),
    Mutation(
        "the forward stops after two stages",
        "ring.py",
        "        for stage in route.stages:\n            visit(stage)\n",
        "        for stage in route.stages[:2]:\n            visit(stage)\n",
        "parity on six ranks",
    ),
    Mutation(
        "the backward stops after two stages",
        "ring.py",
        "    for stage in route.stages:\n        visit(stage)\n",
        "    for stage in route.stages[:2]:\n        visit(stage)\n",
        "parity on six ranks",
    ),
    Mutation(
        "chunks of heads lose the scale in the forward",
        "ring.py",
        "_forward(q_c, k_c, v_c, plan.scores.heads(*heads), plan,",
        "_forward(q_c, k_c, v_c, replace(plan.scores.heads(*heads), scale=q.shape[3] ** -0.5), plan,",
        "parity",
    ),
    Mutation(
        "chunks of heads lose the scale in the backward",
        "ring.py",
        "scores if plan.head_chunks == 1 else scores.heads(*heads)",
        "scores if plan.head_chunks == 1 else replace(scores.heads(*heads), scale=q.shape[3] ** -0.5)",
        "parity",
    ),
    Mutation(
        "gradients added to the rows that were fetched instead of those that were served",
        "transport/functional.py",
        "split_arrived(exchange.wait(), stage.serve, self._packing)",
        "split_arrived(exchange.wait(), stage.fetch, self._packing)",
        "parity",
    ),
    Mutation(
        "the next hop starts after the step",
        "transport/functional.py",
        '        assert self._under_way is not None, "every stage is waited for once"\n'
        "        received = self._under_way.wait()\n"
        "        self._under_way = self._start()\n",
        "        received = (self._under_way or self._start()).wait()\n        self._under_way = None\n",
        "overlap",
    ),
    Mutation(
        "rank among all processes instead of the group's",
        "plan.py",
        "group.rank(),",
        "dist.get_rank() // (dist.get_world_size() // group.size()),",
        "parity on the last axis",
    ),
    # The transport.
    Mutation(
        "a missing wait",
        "transport/functional.py",
        "received = _funcol.wait_tensor(self._received)",
        "received = self._received",
        "parity",
    ),
    Mutation(
        "rows for another rank are served",
        "transport/functional.py",
        "for _, served in stage.serve for rows in served",
        "for _, served in reversed(stage.serve) for rows in served",
        "parity on four ranks",
    ),
    Mutation(
        "a range is served from the start of the shard",
        "transport/functional.py",
        "[x[:, :, begin:end] for x in self._tensors]",
        "[x[:, :, : end - begin] for x in self._tensors]",
        "parity",
    ),
    Mutation(
        "gradients travel in bf16",
        "ring.py",
        "Packing.of((k, v), plan.gradient_dtype)",
        "Packing.of((k, v), torch.bfloat16)",
        "parity",
    ),
    # Kernels.
    Mutation(
        "results of DTensors lie as their shards do",
        "attention.py",
        "as_inputs=not isinstance(query, DTensor)",
        "as_inputs=True",
        "specs of DTensors",
    ),
    Mutation(
        "plans are kept for another rank",
        "plan.py",
        "features, seq_len, group.size(), group.rank(), options)",
        "features, seq_len, group.size(), 0, options)",
        "parity",
    ),
    Mutation(
        "fp32 sums of fp64 inputs",
        "kernels/combine.py",
        "return torch.float64 if dtype == torch.float64 else torch.float32",
        "return torch.float32",
        "parity",
    ),
    Mutation(
        "sums in the inputs' dtype",
        "kernels/combine.py",
        "return torch.float64 if dtype == torch.float64 else torch.float32",
        "return dtype",
        "low precision",
    ),
    Mutation(
        "rows that no tile reaches keep what was in the buffer",
        "kernels/merge.py",
        "if _partition([tile.k for tile in parts], k.shape[2]):",
        "if True:",
        "parity",
    ),
    Mutation(
        "a step goes on from the gradients of the step before",
        "kernels/merge.py",
        "        dk_sum, dv_sum = (RowSum(x.shape, self._dtype, x.device) for x in (k, v))\n",
        "        dk_sum, dv_sum = self._sums = getattr(self, '_sums', None) or tuple(\n"
        "            RowSum(x.shape, self._dtype, x.device) for x in (k, v)\n"
        "        )\n",
        "kernels",
    ),
    Mutation(
        "a tile's dk is added twice",
        "kernels/merge.py",
        "            dk_sum.add(piece.begin, piece.dk)\n",
        "            dk_sum.add(piece.begin, piece.dk)\n            dk_sum.add(piece.begin, piece.dk)\n",
        "parity",
    ),
    Mutation(
        "dq of a tile lands on the first rows",
        "kernels/merge.py",
        "self._dq.add(tile.q[0], dq)",
        "self._dq.add(0, dq)",
        "kernels",
    ),
    Mutation(
        "delta without the gradient of lse",
        "kernels/combine.py",
        "return delta if dlse is None else delta - dlse",
        "return delta",
        "parity",
    ),
    Mutation(
        "the merge leaves lse as it was",
        "kernels/combine.py",
        "        largest.add_(total.log_())  # it is lse\n",
        "",
        "parity",
    ),
    Mutation(
        "rows without keys are merged to NaN",
        "kernels/combine.py",
        '        largest.masked_fill_(largest == float("-inf"), 0.0)\n',
        "",
        "parity",
    ),
    Mutation(
        "the merge does not divide by the sum of weights",
        "kernels/combine.py",
        "        running.div_(torch.where(total == 0, 1.0, total)[..., None])\n",
        "",
        "parity",
    ),
    Mutation(
        "the caller's queries are scaled in place",
        "kernels/reference.py",
        'torch.einsum("bkgid,bkjd->bkgij", q, k) * scores.scale',
        'torch.einsum("bkgid,bkjd->bkgij", q.mul_(scores.scale), k)',
        "parity",
    ),
    Mutation(
        "heads of a group interleaved",
        "kernels/reference.py",
        'rearrange(x.to(dtype), "b (k g) s d -> b k g s d", k=num_kv_heads)',
        'rearrange(x.to(dtype), "b (g k) s d -> b k g s d", k=num_kv_heads)',
        "head order",
    ),
    Mutation(
        "causal tiles computed as full ones",
        "kernels/aten.py",
        "flash_attention_for_cpu(q, k, v, 0.0, cover == CAUSAL",
        "flash_attention_for_cpu(q, k, v, 0.0, False",
        "parity",
    ),
    Mutation(
        "gradients of a group's heads are added to those of other kv heads",
        "kernels/aten.py",
        '"b (k g) s d -> b k s d", "sum"',
        '"b (g k) s d -> b k s d", "sum"',
        "heads of efficient attention",
    ),
    Mutation(
        "kv heads are repeated in another order",
        "kernels/aten.py",
        "x.repeat_interleave(groups, dim=1)",
        "x.repeat(1, groups, 1, 1)",
        "heads of efficient attention",
    ),
    Mutation(
        "the backward repeats values in another order than keys",
        "kernels/aten.py",
        "_expand_heads(t.v, num_heads), None,",
        "t.v.repeat(1, num_heads // num_kv_heads, 1, 1), None,",
        "heads of efficient attention",
    ),
    # Scores.
    Mutation(
        "the derivative of softcap is left out",
        "kernels/reference.py",
        "dx = dscores * slope * tile.scores.scale",
        "dx = dscores * tile.scores.scale",
        "scores",
    ),
    Mutation(
        "softcap is lost on the way to the kernel",
        "plan.py",
        "        options.softcap or None,\n",
        "        None,\n",
        "scores",
    ),
    Mutation(
        "gradients of sinks are those of all ranks on each of them",
        "ring.py",
        'of_scores["sinks"] = gradient_of_sinks(dout, out, lse, sinks)',
        'of_scores["sinks"] = group.size() * gradient_of_sinks(dout, out, lse, sinks)',
        "scores",
    ),
    Mutation(
        "gradients of sinks are those of the first rows",
        "ring.py",
        "return -(taken * make_delta(dout, out)).sum((0, 2))",
        "return -(taken * make_delta(dout, out))[:, :, :3].sum((0, 2))",
        "scores",
    ),
    Mutation(
        "gradients of sinks are those of one rank",
        "ring.py",
        'of_scores["sinks"] = gradient_of_sinks(dout, out, lse, sinks)',
        'of_scores["sinks"] = gradient_of_sinks(dout, out, lse, sinks) * (group.rank() == 0)',
        "scores",
    ),
    Mutation(
        "the gradient of a sink has the other sign",
        "ring.py",
        "return -(taken * make_delta(dout, out)).sum((0, 2))",
        "return (taken * make_delta(dout, out)).sum((0, 2))",
        "scores",
    ),
    Mutation(
        "a sink for each tile",
        "kernels/merge.py",
        "            self._sum.add(tile.q[0], out, lse)\n",
        "            if (sinks := self._scores.sinks) is not None:\n"
        "                out = out * torch.sigmoid(lse - sinks[:, None]).nan_to_num_(0.0)[..., None].to(out.dtype)\n"
        "            self._sum.add(tile.q[0], out, lse)\n",
        "scores",
    ),
    Mutation(
        "a sink in lse",
        "kernels/combine.py",
        "            running.mul_(torch.sigmoid(lse - sinks[:, None])",
        "            largest.copy_(torch.logaddexp(lse, sinks[:, None]))\n"
        "            running.mul_(torch.sigmoid(lse - sinks[:, None])",
        "scores",
    ),
    Mutation(
        "no sink where a single tile has all rows",
        "kernels/combine.py",
        "if sinks is None and len(self._pieces) == 1",
        "if len(self._pieces) == 1",
        "scores",
    ),
    Mutation(
        "no sink in the backward",
        "ring.py",
        "return torch.logaddexp(lse, sinks[:, None])",
        "return lse",
        "scores",
    ),
    Mutation(
        "the gradient of lse as if lse had the sink",
        "ring.py",
        "        if dlse is None:\n            lse = include_sinks",
        "        if True:\n            lse = include_sinks",
        "scores",
    ),
    Mutation(
        "the sink takes nothing where a gradient comes through lse",
        "ring.py",
        "dout = (dout * share_of_keys(lse, sinks)[..., None]).to(dout.dtype)  # rounded once",
        "pass",
        "scores",
    ),
    Mutation(
        "sinks of the first heads in every chunk",
        "kernels/contract.py",
        "self.sinks[begin:end]",
        "self.sinks[: end - begin]",
        "scores",
    ),
    Mutation(
        "distances of local rows",
        "plan.py",
        "not self.scores.needs_positions:\n            return tile.cover\n",
        "not self.scores.needs_positions:\n            return tile.cover\n"
        "        if isinstance(tile.cover, Band):\n"
        "            return Pairs(self._device_mask, torch.arange(*tile.q), torch.arange(*tile.k))\n",
        "scores",
    ),
    Mutation(
        "slopes of the first heads in every chunk",
        "kernels/contract.py",
        "self.alibi_slopes[begin:end]",
        "self.alibi_slopes[: end - begin]",
        "scores",
    ),
    Mutation(
        "gradients of slopes land on the first heads",
        "ring.py",
        "of_tiles.part(heads=heads).add_(of_chunk)",
        "of_tiles.part(heads=(0, heads[1] - heads[0])).add_(of_chunk)",
        "scores",
    ),
    Mutation(
        "gradients of a table are those of the last tile",
        "kernels/merge.py",
        "            self._of_scores.part(rows=tile.q).add_(gradients)\n",
        "            self._of_scores.relative_bias is not None and self._of_scores.relative_bias.zero_()\n"
        "            self._of_scores.part(rows=tile.q).add_(gradients)\n",
        "scores",
    ),
    Mutation(
        "the distances of a table are clipped one early",
        "kernels/reference.py",
        "table[:, distance.clamp(-reach, reach) + reach]",
        "table[:, distance.clamp(1 - reach, reach) + reach]",
        "scores",
    ),
    Mutation(
        "clipped distances have no gradient",
        "kernels/reference.py",
        "    total[:, 0] += (dscores * behind).sum((1, 2))\n",
        "",
        "scores",
    ),
    Mutation(
        "columns of a bias in the order of the tile",
        "kernels/reference.py",
        "bias = bias.index_select(3, cover.k_pos)",
        "bias = bias.narrow(3, 0, len(cover.k_pos))",
        "scores",
    ),
    Mutation(
        "every tile has the first rows of a bias",
        "kernels/merge.py",
        "            scores = self._scores.rows(*tile.q)\n            out,",
        "            scores = self._scores.rows(0, tile.q[1] - tile.q[0])\n            out,",
        "scores",
    ),
    Mutation(
        "softcap after the biases",
        "kernels/reference.py",
        '    x = torch.einsum("bkgid,bkjd->bkgij", q, k) * scores.scale\n',
        '    x = torch.einsum("bkgid,bkjd->bkgij", q, k) * scores.scale\n'
        "    if scores.softcap and scores.alibi_slopes is not None:\n"
        "        x = x + _biases(scores, cover, first_row, q.shape[3], k.shape[1])\n",
        "scores",
    ),
    Mutation(
        "dropout of the first heads in every chunk",
        "kernels/contract.py",
        "first_head=self.first_head + begin",
        "first_head=self.first_head",
        "scores",
    ),
    Mutation(
        "dropout of the first heads on every tp rank",
        "attention.py",
        "first_head=_first(query, 2 if seq_dim == 1 else 1) if dropout_p else 0,",
        "first_head=0,",
        "scores of DTensors",
    ),
    Mutation(
        "dropout by local rows",
        "kernels/reference.py",
        "    q_pos = cover.q_pos[first_row : first_row + num_rows, None]\n",
        "    q_pos = torch.arange(first_row, first_row + num_rows)[:, None]\n",
        "scores",
    ),
    Mutation(
        "dropped weights keep their gradient",
        "kernels/reference.py",
        "dprobs, used = dprobs * kept, probs * kept",
        "dprobs, used = dprobs, probs * kept",
        "scores",
    ),
    Mutation(
        "the offset of a seed is lost",
        "plan.py",
        "torch.nn.functional.pad(seed.reshape(-1), (0, 2 - seed.numel()))",
        "torch.nn.functional.pad(seed.reshape(-1)[:1], (0, 1))",
        "scores",
    ),
    Mutation(
        "DTensors' gradients of sinks pass for those of all ranks",
        "ops.py",
        'Replicate() if part == "whole" else Partial()',
        "Replicate()",
        "scores of DTensors",
    ),
    # Masks and layouts.
    Mutation("strict instead of inclusive diagonal", "masks.py", "(distance >= 0) |", "(distance > 0) |", "masks"),
    Mutation(
        "strict diagonal between runs",
        "masks.py",
        "d_min = 0 if d_min is None else max(0, d_min)",
        "d_min = 1 if d_min is None else max(1, d_min)",
        "coverage",
    ),
    Mutation(
        "inclusive diagonal between stripes of later ranks",
        "masks.py",
        "-((offset - d_min) // stride)  # ceil",
        "(d_min - offset) // stride",
        "coverage",
    ),
    Mutation("window off by one", "masks.py", "keep &= distance <= left", "keep &= distance < left", "masks"),
    Mutation(
        "window between runs off by one",
        "masks.py",
        "d_max = self.window[0]",
        "d_max = self.window[0] and self.window[0] - 1",
        "coverage",
    ),
    Mutation("window counted from local rows", "masks.py", "offset = q.start - k.start", "offset = 0", "coverage"),
    Mutation(
        "documents ignored",
        "masks.py",
        "keep = keep & (ids[:, q_pos, None] == ids[:, None, k_pos])",
        "keep = keep & (ids[:, q_pos, None] == ids[:, q_pos, None])",
        "masks",
    ),
    Mutation(
        "documents lost on the way to the kernel",
        "masks.py",
        "length=length), documents, key_padding)",
        "length=length), None, key_padding)",
        "parity",
    ),
    Mutation(
        "documents of the first row stand for all",
        "masks.py",
        "all(q[1] < k[0] or k[1] < q[0] for q, k in zip(q_ranges, k_ranges, strict=True))",
        "[q[1] < k[0] or k[1] < q[0] for q, k in zip(q_ranges, k_ranges, strict=True)][0]",
        "coverage",
    ),
    Mutation(
        "key padding lost on the way to the kernel",
        "masks.py",
        "length=length), documents, key_padding)",
        "length=length), documents, None)",
        "parity",
    ),
    Mutation("a document starts a token late", "masks.py", "torch.int64), right=True)", "torch.int64))", "masks"),
    Mutation(
        "padding is not hidden",
        "masks.py",
        "keep &= (k_pos < self.length)[None, :]",
        "keep &= (k_pos <= self.length)[None, :]",
        "masks",
    ),
    Mutation(
        "masks read by local instead of global index",
        "plan.py",
        "q_pos, k_pos = self._positions(None, stream),",
        "q_pos, k_pos = torch.arange(self.schedule.shard_lens[self.schedule.cp_rank]),",
        "parity",
    ),
    Mutation(
        "a piece is not near itself",
        "masks.py",
        "apart |= (k_low[:, None] > q_high) &",
        "apart |= (k_low[:, None] >= q_high) &",
        "near pieces",
    ),
    Mutation(
        "the last key of a prefix is not near",
        "masks.py",
        "(k_low >= self.prefix)[:, None]",
        "(k_low + 1 >= self.prefix)[:, None]",
        "near pieces",
    ),
    Mutation(
        "the oldest keys of a window are not near",
        "masks.py",
        "apart |= q_low - k_high[:, None] > left",
        "apart |= q_low - k_high[:, None] >= left",
        "near pieces",
    ),
    Mutation(
        "the farthest keys ahead are not near",
        "masks.py",
        "apart |= k_low[:, None] - q_high > right",
        "apart |= k_low[:, None] - q_high >= right",
        "near pieces",
    ),
    Mutation(
        "keys of the last document of a piece are not near",
        "masks.py",
        "((q_low > k_high[:, None]) |",
        "((q_low >= k_high[:, None]) |",
        "near pieces",
    ),
    Mutation(
        "the last tokens are dropped",
        "layouts.py",
        "size = -(-seq_len // num_chunks)",
        "size = seq_len // num_chunks",
        "layouts",
    ),
    Mutation(
        "inverse and permutation mixed up",
        "layouts.py",
        "return torch.argsort(self.permutation(seq_len, cp_size))",
        "return self.permutation(seq_len, cp_size)",
        "layouts",
    ),
    # The schedule.
    Mutation(
        "rows after the causal square are dropped",
        "schedule.py",
        "        parts.append(((square, num_q), (seen_by_all, num_k), False))\n",
        "        pass\n",
        "coverage",
    ),
    Mutation(
        "trimmed the wrong way", "schedule.py", "shift = k_begin - q_begin", "shift = q_begin - k_begin", "coverage"
    ),
    Mutation(
        "a window fetches whole shards",
        "schedule.py",
        "_travelling([[_union(tile.k for tile in tiles) for tiles in row] for row in grid])",
        "_travelling([[((0, sum(p.length for p in s)),) if t else () for t, s in zip(r, shards)] for r in grid])",
        "traffic",
    ),
    Mutation(
        "steps that nobody needs are taken",
        "schedule.py",
        "step for step in range(1, size) if any(rows[rank][(rank - step) % size] for rank in range(size))",
        "step for step in range(1, size)",
        "traffic",
    ),
    # Documents as sequences, plans by content, balanced layouts.
    Mutation(
        "causal blocks aligned to the upper left",
        "segments.py",
        "shift = k_end - q_end  #",
        "shift = torch.zeros_like(k_end)  #",
        "segments",
    ),
    Mutation(
        "a stripe sees the diagonal of a later one",
        "segments.py",
        "_ceil_div(nearest - (q_low - k_low), step)",
        "(nearest - (q_low - k_low)).div(step, rounding_mode='floor')",
        "segments",
    ),
    Mutation(
        "an id that comes back is another document",
        "segments.py",
        "    if len(ids[begins].unique()) != len(begins):\n        return None\n",
        "",
        "segments",
    ),
    Mutation(
        "blocks of a call share rows",
        "segments.py",
        "(blocks[1:, 0] >= blocks[:-1, 1]) & (blocks[1:, 2] >= blocks[:-1, 3])",
        "blocks[1:, 2] >= blocks[:-1, 3]",
        "segments",
    ),
    Mutation(
        "keys are not counted where they lie in the buffer",
        "segments.py",
        "    blocks[:, K] += moved\n    blocks[:, K_END] += moved\n",
        "    del moved\n",
        "segments",
    ),
    Mutation(
        "rows outside of all sequences are not cleared",
        "kernels/flash_attn.py",
        "out = q.new_zeros((q.shape[0], q.shape[2], q.shape[1], v_dim))",
        "out = q.new_full((q.shape[0], q.shape[2], q.shape[1], v_dim), float('nan'))",
        "sequences",
    ),
    Mutation(
        "gradients of keys outside of all sequences are not cleared",
        "kernels/flash_attn.py",
        "_writable(t.dk, k).zero_(), _writable(t.dv, v).zero_()",
        "_writable(t.dk, k).fill_(1.0), _writable(t.dv, v).zero_()",
        "sequences",
    ),
    Mutation(
        "a plan outlives the content of its mask",
        "plan.py",
        "        self.tensor = self.tensor.clone()\n",
        "",
        "planned once",
    ),
    Mutation(
        "plans are told apart by a sample of their tensors",
        "plan.py",
        "return np.array_equal(self.tensor.numpy(), other.tensor.numpy())",
        "return self._hash == other._hash",
        "planned once",
    ),
    Mutation(
        "plans are told apart by the first elements of their tensors",
        "plan.py",
        "return np.array_equal(self.tensor.numpy(), other.tensor.numpy())",
        "return np.array_equal(self.tensor.numpy()[..., :128], other.tensor.numpy()[..., :128])",
        "planned once",
    ),
    Mutation(
        "documents are dealt out by tokens alone",
        "balancing.py",
        "head = bisect_left(range(tokens + 1), -wanted, key=lambda head: -of_head(head))",
        "head = tokens",
        "balance",
    ),
    # Selective checkpointing, the data and the loss.
    Mutation(
        "recompute replays the ring",
        "parallel.py",
        "return CheckpointPolicy.MUST_SAVE if saved else",
        "return CheckpointPolicy.PREFER_RECOMPUTE if saved else",
        "recompute",
    ),
    Mutation(
        "mean of the loss by rank",
        "sequence.py",
        '        count = _funcol.wait_tensor(_funcol.all_reduce(count, "sum", name))\n',
        "        del name\n",
        "loss",
    ),
    Mutation(
        "mean of the loss by rank, seen by the gradients",
        "sequence.py",
        '        count = _funcol.wait_tensor(_funcol.all_reduce(count, "sum", name))\n',
        "        del name\n",
        "gradients of one rank",
    ),
    Mutation(
        "padding counts as tokens",
        "sequence.py",
        "whole = self._pad(leaf, dim, padding, self.seq_len)",
        "whole = self._pad(leaf, dim, 0, self.seq_len)",
        "gradients of one rank",
    ),
    Mutation(
        "the last token is dropped with the padding",
        "sequence.py",
        "whole.narrow(dim, 0, self.length)",
        "whole.narrow(dim, 0, self.length - 1)",
        "loss",
    ),
    Mutation(
        "positions count from the shard's start",
        "sequence.py",
        "return self.layout.positions(self._sharded_len(length), self.cp_size, self.cp_rank).to(device)",
        "return torch.arange(self._sharded_len(length) // self.cp_size).to(device)",
        "gradients of one rank",
    ),
    Mutation(
        "the backward is another one where it should repeat",
        "plan.py",
        "kernel.reproducible if options.deterministic and kernel.reproducible else kernel",
        "kernel",
        "deterministic",
    ),
    Mutation(
        "a deterministic backward of bands that it was not tried for",
        "kernels/flash_attn.py",
        "partial(_fa4_backward, deterministic=True), squares=True",
        "partial(_fa4_backward, deterministic=True)",
        "deterministic",
    ),
    Mutation(
        "positions in the layout of another batch",
        "styles.py",
        "given[self.positions] = sequence.positions(",
        "given[self.positions] = self.sequence.positions(",
        "changing layouts",
    ),
    Mutation(
        "an output gathered in the layout of another batch",
        "styles.py",
        "return self.gather(root.sequence, output)",
        "return self.gather(self.sequence, output)",
        "changing layouts",
    ),
    Mutation(
        "a core may have another layout than its root",
        "styles.py",
        "    if root.layout != layout:\n",
        "    if False:\n",
        "layouts agree",
    ),
    Mutation(
        "attention of modules outside of the plan is let through",
        "watching.py",
        '    "multi_head_attention_forward": 0,\n',
        "",
        "outside of the plan",
    ),
    Mutation(
        "compiled blocks are not watched",
        "watching.py",
        '                replace_forward(inner, WATCH, "Watch", _watched)\n',
        "                pass\n",
        "outside of the plan, compiled",
    ),
    Mutation(
        "a core may checkpoint its attention",
        "watching.py",
        " or _inside_checkpoint():",
        ":",
        "checkpoints in cores",
    ),
    Mutation(
        "a core may attend to other rows than its root's",
        "ops.py",
        "        if options.of_root and root is not None and ",
        "        if False and root is not None and ",
        "rows of the root",
    ),
    Mutation(
        "a copy that the module's class makes has no style",
        "forwards.py",
        "        return _like(self.module, self.make(*args))\n",
        "        return self.make(*args)\n",
        "copies",
    ),
    Mutation(
        "compiled cores do not tell the forward of an instance",
        "forwards.py",
        "inner, replacement = getattr(self, of_instance), getattr(self, key)",
        "inner, replacement = self.__dict__.get(of_instance), self.__dict__.get(key)",
        "compiled cores",
    ),
    Mutation(
        "runs that are no permutation are believed",
        "layouts.py",
        "        return Balanced(index)\n",
        "        layout = object.__new__(Balanced)\n"
        '        object.__setattr__(layout, "table", index)\n'
        "        return layout\n",
        "runs",
    ),
    Mutation(
        "FSDP takes the mean",
        "parallel.py",
        "module.set_gradient_divide_factor(1.0)",
        "module.set_gradient_divide_factor(3.0)",
        "gradients of one rank",
    ),
]

FEW = [
    Case("zigzag", "full", 12),
    Case("contiguous", "causal", 13),
    Case("zigzag", "causal", 13, MQA, 1),
    Case("striped", "causal", 13, GQA, 0),
    Case("zigzag", "window", 13),
    Case("contiguous", "two-sided window", 13),
    Case("contiguous", "window", 13, MHA),
    Case("zigzag", "causal", 13, MHA),
    Case("shuffled", "causal", 13),
    Case("striped", "key padding", 13),
    Case("contiguous", "everything", 13, GQA, 1),
    Case("zigzag", "scattered documents", 13),
    Case("zigzag", "causal", 13, GQA, 2, "cpu_flash"),
    Case("striped", "causal", 13, MQA, 2, "cpu_flash"),
    Case("zigzag", "causal", 13, GQA, scale=0.7, head_chunks=3),
]

SCORED = [
    Case("zigzag", "causal", 13, GQA, 0, scores="softcap"),
    Case("zigzag", "key padding", 13, GQA, scores="sinks", head_chunks=3),
    Case("striped", "causal", 13, MHA, scores="softcap and sinks"),
    Case("contiguous", "causal", 13, scores="sinks"),
    Case("zigzag", "causal", 13, MHA, scores="softcap and alibi"),
    Case("contiguous", "window", 13, GQA, 1, scores="every score", head_chunks=3),
    Case("zigzag", "full", 13, MHA, scores="table"),
    Case("zigzag", "causal", 13, MHA, scores="bias"),
    Case("shuffled", "full", 13, GQA, scores="bias of all rows", head_chunks=3),
    Case("striped", "causal", 13, MHA, scores="dropout, sinks and alibi", head_chunks=3),
    Case("zigzag", "documents", 13, GQA, scores="dropout, a seed and an offset"),
    Case("striped", "causal", 13, GQA, 2, "cpu_flash", scores="sinks"),
]


SEQUENCES = [
    Case(
        layout,
        {"documents": torch.tensor([[0] * 4 + [1] * 17 + [2] * 3, [0] * 12 + [1] * 12])},
        24,
        GQA,
        kernel="fa4",
        sizes=(2, 8, 8),
    )
    for layout in ("zigzag", "striped", "balanced")
]


def quick(rank: int, name: str) -> list[str]:
    """Checks that need no other rank."""
    problems = []
    if name == "coverage":
        masks = ("causal", "causal and length", "window", "documents", "everything")
        for S, cp_size, layout, mask in product((7, 12), (2, 3), LAYOUTS, masks):
            problems += coverage(LAYOUTS[layout](S), make_mask(mask, 2, S), pairs(mask, 2, S), cp_size)
        return problems
    if name == "segments":
        runs = ("contiguous", "zigzag", "striped", "balanced")
        documents = [torch.tensor([[0] * 3 + [1] * 6 + [2] * 3]), torch.tensor([[0, 0, 1, 1, 0, 0, 0, 2, 2, 3, 3, 3]])]
        for cp_size, layout, ids, window in product((1, 2, 3), runs, documents, (None, (2, None))):
            options = {"documents": ids, "window": window}
            want = pairs_of(options, 12)
            problems += coverage(LAYOUTS[layout](12), Mask(**options), want, cp_size, segments=True)
        return problems
    calls: dict[str, list[tuple[Callable[..., None], Any]]] = {
        "layouts": [
            *((test_layouts.test_every_position_is_held_once, (make, 7)) for make in LAYOUTS.values()),
            *((test_layouts.test_permutation_and_inverse, (make, 7)) for make in LAYOUTS.values()),
        ],
        "masks": [
            *(
                (test_masks.test_allowed_is_the_dense_mask, (mask, 7))
                for mask in ("causal", "window", "length", "documents")
            ),
            (test_masks.test_documents_from_cumulative_lengths, ([0, 3, 5], [0, 0, 0, 1, 1], torch.int64)),
        ],
        "runs": [(test_changing_layouts.test_runs_that_compiled_code_did_not_read_are_checked, ())],
        "planned once": [
            (test_segments.test_what_is_written_to_documents_is_seen, ()),
            *(
                (test_segments.test_plans_are_told_apart_by_every_element_of_a_tensor, (name,))
                for name in ("documents", "key_padding", "layout_index")
            ),
        ],
        "near pieces": [
            (test_masks.test_near_pieces_are_those_with_an_allowed_pair, (name,)) for name in test_masks.NEAR
        ],
        "heads of efficient attention": [(test_aten_kernels.test_a_tile, ("GQA", CAUSAL))],
        "balance": [(test_balancing.test_packed_documents, (65536, 4, 1))],
        "kernels": [
            (test_kernels.test_each_step_returns_gradients_of_its_own, (KERNELS["reference"],)),
            (test_kernels.test_partial_results_add_up, (KERNELS["cpu_flash"], GQA)),
        ],
    }
    for test, arguments in calls[name]:
        try:
            test(*arguments)
        except (AssertionError, RuntimeError, pytest.fail.Exception) as error:
            problems.append(f"{test.__name__}: {str(error)[:200]}")
    return problems


def few(pool: Any, cases: list[Case]) -> None:
    """On a group that delivers at the wait; see recording.py."""
    report(pool(3).run(parity_on_ranks, (3,), ("cp",), cases, True, timeout=20.0))


CHECKS: dict[str, Callable[[Any], None]] = {
    "coverage": lambda pool: report(pool(1).run(quick, "coverage")),
    "layouts": lambda pool: report(pool(1).run(quick, "layouts")),
    "masks": lambda pool: report(pool(1).run(quick, "masks")),
    "kernels": lambda pool: report(pool(1).run(quick, "kernels")),
    "segments": lambda pool: report(pool(1).run(quick, "segments")),
    "sequences": lambda pool: report(pool(3).run(test_segments.fa4_on_ranks, 3, SEQUENCES)),
    "planned once": lambda pool: report(pool(1).run(quick, "planned once")),
    "near pieces": lambda pool: report(pool(1).run(quick, "near pieces")),
    "heads of efficient attention": lambda pool: report(pool(1).run(quick, "heads of efficient attention")),
    "balance": lambda pool: report(pool(1).run(quick, "balance")),
    "parity": lambda pool: few(pool, FEW),
    "scores": lambda pool: few(pool, SCORED),
    "parity on the last axis": lambda pool: report(
        pool(4).run(parity_on_ranks, (2, 2), ("other", "cp"), [Case("zigzag", "causal", 13)])
    ),
    "parity on four ranks": lambda pool: report(
        pool(4).run(parity_on_ranks, (4,), ("cp",), [Case("zigzag", "causal", 13), Case("striped", "full", 16, GQA)])
    ),
    "parity on six ranks": lambda pool: report(
        pool(6).run(parity_on_ranks, (6,), ("cp",), [Case("zigzag", "causal", 13, heads) for heads in (GQA, MHA)])
    ),
    "gradients come home": lambda pool: test_seeds.test_gradients_of_keys_come_home(pool, "full"),
    "sums in fp32": lambda pool: test_seeds.test_gradients_are_summed_in_fp32(pool, torch.bfloat16),
    "head order": test_seeds.test_heads_are_grouped_in_torchs_order,
    "specs of DTensors": lambda pool: test_op.test_dtensors_are_what_their_specs_say(pool, 2, "", "distributed"),
    "low precision": lambda pool: test_parity.test_low_precision(pool, torch.bfloat16, 1.5, "reference"),
    "scores of DTensors": lambda pool: report(
        pool(4).run(
            test_parity.dtensors,
            (2, 2),
            ("cp", "tp"),
            {"tp": "heads"},
            [Case("zigzag", "causal", 16, (8, 4), seq_dim, scores="dropout, sinks and alibi") for seq_dim in (2, 1)],
        )
    ),
    "traffic": test_traffic.test_by_hand,
    "overlap": test_traffic.test_hops_are_under_way_while_tiles_are_computed,
    "recompute": test_traffic.test_selective_recompute_does_not_replay_the_ring,
    "deterministic": lambda pool: test_flash_attn.test_a_deterministic_call_has_the_reproducible_backward(pool, True),
    "changing layouts": lambda pool: test_changing_layouts.test_whole_model(pool, 24, False),
    "layouts agree": test_changing_layouts.test_a_core_in_another_layout_than_its_root_is_refused,
    "outside of the plan": lambda pool: report(pool(2).run(test_watching.found, "not", False, ("MHA",))),
    "outside of the plan, compiled": lambda pool: report(
        pool(2).run(test_watching.found, "blocks in place", True, ("SDPA",))
    ),
    "checkpoints in cores": lambda pool: test_styles.test_checkpoint_inside_a_core_is_refused(pool, False),
    "rows of the root": lambda pool: test_watching.test_cores_that_attend_to_other_rows_are_refused(
        pool, test_watching.part_of_rows, "blocks in place", False
    ),
    "copies": lambda pool: test_copies.test_copies_have_the_style_and_their_own_attributes(
        pool, test_copies.OwnReduce, "deepcopy"
    ),
    "compiled cores": test_watching.test_compiled_cores_of_one_class_are_told_apart,
    "runs": lambda pool: report(pool(1).run(quick, "runs")),
    "loss": lambda pool: test_sequence.test_cross_entropy(pool, "ragged", 3, 1),
    "gradients of one rank": lambda pool: test_gradients.test_gradients_are_those_of_one_rank(
        pool, test_gradients.Setup(cp=3, S=22)
    ),
}


def mutations() -> Iterator[Any]:
    """The first mutation of each check is part of the quick form."""
    checks: set[str] = set()
    for mutation in MUTATIONS:
        yield pytest.param(mutation, id=mutation.name, marks=[pytest.mark.full] * (mutation.check in checks))
        checks.add(mutation.check)


def origin(rank: int) -> str:
    return cp_mesh.__file__


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the package, which ranks that start from now on import."""
    shutil.copytree(PACKAGE, tmp_path / "cp_mesh", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "cp_mesh"


class OwnPools:
    """Pools of ranks that import the copy, and give up on a lost collective soon."""

    def __init__(self, copy: Path) -> None:
        self.file, self.pools = str(copy / "__init__.py"), {}

    def __call__(self, world_size: int) -> Pool:
        if world_size not in self.pools:
            pool = Pool(world_size, group_timeout=5.0)
            try:
                assert set(pool.run(origin)) == {self.file}
            except BaseException:
                pool.close()
                raise
            self.pools[world_size] = pool
        return self.pools[world_size]


@pytest.fixture
def own_pool(copy: Path) -> Iterator[OwnPools]:
    made = OwnPools(copy)
    yield made
    for pool in made.pools.values():
        pool.close()


def test_the_list_is_in_order():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 16
    assert {mutation.check for mutation in MUTATIONS} == set(CHECKS)


def test_checks_are_green_without_a_mutation(own_pool):
    for check in CHECKS.values():
        check(own_pool)


@pytest.mark.parametrize("mutation", list(mutations()))
def test_mutation_is_found(mutation, copy, own_pool, monkeypatch):
    monkeypatch.setattr("ranks.GRACE", 0.5)
    file = copy / mutation.file
    text = file.read_text()
    if (times := text.count(mutation.old)) != 1:
        pytest.fail(
            f"{mutation.file} holds the text that {mutation.name!r} replaces {times} times, not once: update it"
        )
    mutant = text.replace(mutation.old, mutation.new)
    assert ast.dump(ast.parse(mutant)) != ast.dump(ast.parse(text))
    file.write_text(mutant)
    with pytest.raises((Exception, pytest.fail.Exception)) as found:
        CHECKS[mutation.check](own_pool)
    assert own_pool.pools, "a mutant that cannot be imported proves nothing"
    words = str(found.value)
    assert not any(error in words for error in ("NameError", "SyntaxError", "ImportError", "TypeError")), words
