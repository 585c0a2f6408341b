"""Memory of a training step of a whole Llama: by term, at the moments that can be its peak; and what would fit.

`memory_of` is the formula, for the model of examples/train_llama.py: every block is recomputed, the MLP is gated, norms
save their input alone, as `nn.RMSNorm` does on GPUs, and AdamW is fused. What saves more takes more, such as norms that
are written in Python.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from cp_mesh.call.spec import check_choice, check_sizes, shown
from cp_mesh.errors import refuse, typed
from cp_mesh.tensor_parallel import losses_in_chunks
from cp_mesh.tools.explain.explain import explain
from cp_mesh.tools.explain.predict.memory import ExtraMemory
from cp_mesh.tools.explain.text import aligned, as_bytes

PRESETS: dict[str, dict[str, Any]] = {
    name: {"model_type": "llama", "hidden_size": C, "num_hidden_layers": L, "intermediate_size": F}
    | {"num_attention_heads": heads, "num_key_value_heads": 8, "vocab_size": 128256}
    for name, C, L, F, heads in (("llama-3-8b", 4096, 32, 14336, 32), ("llama-3-70b", 8192, 80, 28672, 64))
}
FAMILIES = ("llama", "mistral", "qwen2")
"""Model types of Transformers whose blocks are those of the formula."""
MOST = 1 << 24  # tokens; a longer sequence takes many seconds to plan


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a Llama, by their names in a config.json of Transformers."""

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool = False

    @classmethod
    def read(cls, model: str | Path | Mapping[str, Any]) -> ModelSizes:
        """The sizes of a preset, a config.json, its folder, or its content."""
        what, known = "explain_step: model", f"{', '.join(PRESETS)} are presets"
        if not isinstance(model, Mapping):
            path = Path(model, "config.json") if Path(model).is_dir() else Path(model)
            if str(model) not in PRESETS and not path.is_file():
                refuse(what, "a config.json of Transformers, or its folder", str(model), known)
            try:
                model = PRESETS.get(str(model)) or json.loads(path.read_text())
            except (ValueError, RecursionError) as error:
                refuse(what, "a config.json of Transformers", f"{path}: {type(error).__name__}: {error}", known)
            if not isinstance(model, Mapping):
                refuse(what, "a config.json of Transformers", f"{path}: {type(model).__name__}", known)
        if (family := model.get("model_type")) not in FAMILIES:
            refuse(f"{what}: model_type", f"one of {', '.join(FAMILIES)}", repr(family), known)
        given = {x.name: model[x.name] for x in fields(cls) if model.get(x.name) is not None}
        for name, x in given.items():
            if name != "tie_word_embeddings":
                check_sizes(what, known, 1 << 40, **{name: x})
            elif not isinstance(x, bool):
                refuse(f"{what}: {name}", "true or false", shown(x), known)
        heads = given.get("num_attention_heads", 1)
        given = {"num_key_value_heads": heads, "head_dim": given.get("hidden_size", 0) // heads} | given
        if missing := {x.name for x in fields(cls)} - {*given, "tie_word_embeddings"}:
            refuse(what, f"the key {min(missing)}", sorted(model), known)
        return cls(**given)

    @property
    def of_block(self) -> int:
        """Parameters of a block."""
        heads = 2 * (self.num_attention_heads + self.num_key_value_heads) * self.head_dim
        return self.hidden_size * (heads + 3 * self.intermediate_size + 2)

    @property
    def of_ends(self) -> int:
        """Parameters of embedding, last norm and head."""
        return self.hidden_size * (self.vocab_size * (2 - self.tie_word_embeddings) + 1)


SAVING: dict[str, tuple[str, Any, Any]] = {
    "cross_entropy(weight=)": ("tiled_loss", False, True),
    "TiledMLP(tile_rows=8192)": ("mlp_rows", None, 8192),
    "checkpoints in host memory": ("offload_checkpoints", False, True),
    "attention recomputed too": ("recompute", "selective", "full"),
    "CPUOffloadPolicy of FSDP2": ("offload_optimizer", False, True),
}
"""Lines of a plan that save memory: the option that each sets, its value without the line and with it."""


@dataclass(frozen=True, eq=False)
class StepExplanation:
    """The result of `explain_step`; ``str(explanation)`` is its text.

    Attributes:
        moments: bytes on a GPU, by moment and term.
        host: bytes in host memory, of one rank.
        longest: tokens of the longest sequence that fits by each line of the plan; "" as it is. Empty without
            ``gpu_memory``.
        text: the whole text.
    """

    moments: dict[str, dict[str, int]]
    host: int
    longest: dict[str, int] = field(default_factory=dict)
    text: str = ""

    def __repr__(self) -> str:
        return self.text

    @property
    def peak(self) -> int:
        """The most bytes on a GPU at any moment."""
        return max(sum(terms.values()) for terms in self.moments.values())


def memory_of(
    model: ModelSizes, rows: int, num_ranks: int, attention: ExtraMemory, *, itemsize: int, optimizer_itemsize: int,
    recompute: str, tiled_loss: bool, mlp_rows: int | None, offload_checkpoints: bool, offload_optimizer: bool,
) -> StepExplanation:  # fmt: skip
    """The formula: bytes at each moment, without a text.

    Args:
        model, recompute, tiled_loss, mlp_rows, offload_checkpoints, offload_optimizer: as in `explain_step`.
        rows: of this rank, in all sequences.
        num_ranks: over which FSDP2 shards.
        attention: what it takes beyond its inputs and results.
        itemsize, optimizer_itemsize: bytes of an element in computations; of weights, gradients, optimizer states.
    """
    m, n, e, s = model, num_ranks, itemsize, optimizer_itemsize
    C, F, V, L = m.hidden_size, m.intermediate_size, m.vocab_size, m.num_hidden_layers
    A, K = (m.head_dim * num for num in (m.num_attention_heads, 2 * m.num_key_value_heads))  # widths of q; of k and v
    P, E, row = m.of_block, m.of_ends, rows * e
    on_gpu, keeps_results = not offload_optimizer, recompute == "selective"
    results = row * A + rows * 4 * m.num_attention_heads  # of attention in a block
    sharded = s * (L * P + E) // n  # weights of this rank; its gradients, and each of AdamW's two states
    always = {"weights": sharded * on_gpu, "optimizer states": 2 * sharded * on_gpu}
    always |= {"symmetric memory": attention.symmetric}

    def kept(blocks: int, near: int, recomputed: int) -> dict[str, int]:
        """Blocks' inputs and attention's results; of ``near`` blocks alone, if the others wait in host memory."""
        here = min(blocks, near) if offload_checkpoints else blocks
        return {"checkpoints": row * C * here, "attention's results": results * (here if keeps_results else recomputed)}

    # Logits, of which the loss computes a chunk at a time in 4 bytes; tiled: and the gradient of the head's weight.
    chunk = V * min(rows, max(1, losses_in_chunks.CHUNK_BYTES // (4 * V)))
    loss = row * 2 * C + max(row * 2 * V + 4 * chunk, row * (V + C) + V * C * e)
    if tiled_loss:
        loss = row * 3 * C + V * C * (4 + e) + chunk * (16 + e if chunk < rows * V else 12)
    moments = {"loss": {"gathered by FSDP2": E * e, **kept(L, 1, recomputed=0), "logits and loss": loss}}

    # A block's backward: the MLP's with the inputs of attention, or attention's own; weights' gradients in e bytes.
    mlp, of_mlp = row * (2 * C + 6 * F), C * F * e
    if mlp_rows is not None:  # a tile of it, and weights' gradients in 4 + e bytes
        mlp, of_mlp = row * 3 * C + min(rows, mlp_rows) * e * (2 * C + 6 * F) + 3 * C * F * (4 + e), 0
    rotary = row * (2 * C + 7 * A + K)  # rotary embeddings compute in 4 bytes
    own = max(row * (2 * C + 3 * A + 2 * K) + attention.backward, rotary)
    in_attention, in_mlp, of_block = max((row * (2 * C + 2 * A + K), mlp, of_mlp), (own, 0, P * e), key=sum)
    in_attention += 4 * rows * m.head_dim  # cosines and sines
    of_head = V * C * e
    for i in sorted({L - 1, max(0, L - 2), min(1, L - 1), 0}, reverse=True):  # checkpoints go as gradients come
        later = L - 1 - i
        of_later = later * P * s // n * on_gpu + 4 * P * (later > 0)  # the last one's buffer, in 4 bytes, still travels
        moments[f"block {i}"] = {
            "gathered by FSDP2": (E + P * (2 if n > 1 and i else 1)) * e,  # and the next block
            "gradients": of_later + of_block + of_head,
            **kept(i + 1, 2, recomputed=1), "attention": in_attention, "MLP": in_mlp,
        }  # fmt: skip

    def reduced(num: int) -> int:
        """Bytes of ``num`` gradients while FSDP2 reduces them: they, their buffer, its sum, and that in the last dtype.

        On one rank the buffer is divided by the factor of `sum_gradients`, into one more.
        """
        buffers = 4 * num * (1 + (n == 1)) + 4 * num // n
        return max(num * (e + 4), buffers, 4 * num + 4 * num // n + s * num // n * (s != 4))

    of_first = (L - 1) * P * s // n * on_gpu + of_head + reduced(P)
    block_zero = {"gathered by FSDP2": E * e, "gradients": of_first, "checkpoints": row * C}
    of_ends = {"gradients": L * P * s // n * on_gpu + reduced(E)}
    moments["last gradients"] = max(block_zero, of_ends, key=lambda terms: sum(terms.values()))
    moments["optimizer"] = {"gradients": sharded * on_gpu}
    host = 4 * sharded * offload_optimizer + L * (row * C + results * keeps_results) * offload_checkpoints
    return StepExplanation({name: always | terms for name, terms in moments.items()}, host)


@typed
def explain_step(
    model: str | Path | Mapping[str, Any],
    seq_len: int,
    cp_size: int = 1,
    *,
    dp_size: int = 1,
    batch: int = 1,
    gpu_memory: float | None = None,
    host_memory: float | None = None,
    dtype: torch.dtype = torch.bfloat16,
    optimizer_dtype: torch.dtype = torch.float32,
    recompute: str = "selective",
    tiled_loss: bool = False,
    mlp_rows: int | None = None,
    offload_checkpoints: bool = False,
    offload_optimizer: bool = False,
    **attention: Any,
) -> StepExplanation:
    """Predict the peak memory of a training step of a Llama, and the longest sequence that fits.

    FSDP2 shards over all dp * cp ranks; blocks are `Checkpointed`. Needs no process group and no GPU. The formula is
    `cp_mesh.tools.explain.step.memory_of`; tests hold it to what steps allocate.

    Args:
        model: a config.json of Transformers, its folder, its content, or a preset: "llama-3-8b", "llama-3-70b".
        seq_len: tokens of the whole sequence.
        cp_size: ranks that share a sequence.
        dp_size: groups of ``cp_size`` ranks; FSDP2 shards over all of them.
        batch: sequences of a group.
        gpu_memory: GiB that PyTorch may take on a GPU; about 77 on an H100 of 80 GB, 138 on an H200.
        host_memory: GiB of host memory for each GPU; None: as much as it takes.
        dtype: of computations.
        optimizer_dtype: of sharded weights, their gradients, and AdamW's states.
        recompute: "selective" keeps what attention returns; "full" recomputes it too (``keep_attention=False``).
        tiled_loss: the loss is `cross_entropy` with ``weight``.
        mlp_rows: ``tile_rows`` of `TiledMLP`; None: MLPs compute all rows at once.
        offload_checkpoints: what `Checkpointed` keeps waits in host memory.
        offload_optimizer: ``CPUOffloadPolicy`` of FSDP2.
        attention: other arguments of `explain`, such as ``mask``, ``kernel`` and ``head_chunks``. ``device`` is "cuda".

    Returns:
        An object to print: bytes of each term at each moment; with ``gpu_memory`` also the longest sequence that fits,
        and that by each line of the plan that is not used yet.

    Raises:
        ArgumentError: on a model of another family, a config without its sizes, and as `explain`.

    >>> print(explain_step("llama-3-8b", 65536, tiled_loss=True, kernel="fa4"))  # doctest: +SKIP
    """
    check_choice("recompute", recompute, ("selective", "full"), "selective")
    tile = 1 if mlp_rows is None else mlp_rows
    check_sizes("explain_step", "1 works", 1 << 40, dp_size=dp_size, batch=batch, mlp_rows=tile)
    for name, memory in {"gpu_memory": gpu_memory, "host_memory": host_memory}.items():
        if memory is not None and not memory > 0:
            refuse(f"explain_step: {name}", "a number above 0, in GiB", shown(memory), "gpu_memory=77 fits an H100")
    if gpu_memory is None and host_memory is not None:
        refuse("explain_step: host_memory", "gpu_memory with it", None, "gpu_memory=77 fits an H100 of 80 GB")
    m = ModelSizes.read(model)
    heads = {"num_heads": m.num_attention_heads, "num_kv_heads": m.num_key_value_heads, "head_dim": m.head_dim}
    given: dict[str, Any] = {"device": "cuda", "dtype": dtype, "batch": batch} | heads | attention
    plan: dict[str, Any] = {"itemsize": dtype.itemsize, "optimizer_itemsize": optimizer_dtype.itemsize}
    plan |= {"recompute": recompute, "tiled_loss": tiled_loss, "mlp_rows": mlp_rows}
    plan |= {"offload_checkpoints": offload_checkpoints, "offload_optimizer": offload_optimizer}
    known: dict[tuple[int, int], ExtraMemory] = {}

    def at(plan: dict[str, Any], tokens: int, cp: int, planned: int) -> StepExplanation:
        if (planned, cp) not in known:
            of_ranks = [x.memory for x in explain(planned, cp, **given).found.ranks if x.memory is not None]
            known[planned, cp] = max(of_ranks, key=lambda memory: memory.backward + memory.symmetric)
        return memory_of(m, -(-batch * tokens // cp), dp_size * cp, known[planned, cp], **plan)

    def longest(plan: dict[str, Any], cp: int, gpu_memory: float) -> int:
        """Search among multiples of 128 rows; attention is planned at the next of eight lengths of each doubling."""
        unit, low, high = 128 * cp, 0, 1

        def fits(parts: int) -> bool:
            coarse = 1 << max(0, parts.bit_length() - 4)
            there = at(plan, parts * unit, cp, -(-parts // coarse) * coarse * unit)
            return there.peak <= gpu_memory * 2**30 and (host_memory is None or there.host <= host_memory * 2**30)

        while high * unit <= MOST and fits(high):
            low, high = high, 2 * high
        between = range(low, high if high * unit <= MOST else low + 1, max(1, low // 128))
        return unit * between[bisect_left(between, True, lo=1, key=lambda parts: not fits(parts)) - 1]

    found, lengths = at(plan, seq_len, cp_size, seq_len), dict[str, int]()
    if gpu_memory is not None:
        lacking = {name: (key, x) for name, (key, without, x) in SAVING.items() if plan[key] == without}
        plans = {"": plan} | {name: plan | {key: x} for name, (key, x) in lacking.items()}
        plans["all of these"] = plan | dict(lacking.values())
        lengths = {name: longest(x, cp_size, gpu_memory) for name, x in plans.items()}
        lengths[f"cp {2 * cp_size}"] = longest(plan, 2 * cp_size, gpu_memory)
    head = f"{m.num_hidden_layers * m.of_block + m.of_ends:,} parameters, {seq_len:,} tokens, "
    head += f"cp {cp_size}, dp {dp_size}: {-(-batch * seq_len // cp_size):,} rows on a GPU"
    text = [head, *_table(found)]
    if gpu_memory is not None:
        rows = [[name or "this plan", f"{n:,}" + " or more" * (n * 2 > MOST)] for name, n in lengths.items()]
        text += aligned([f"in {gpu_memory:g} GiB, with", "longest sequence"], rows)
    return replace(found, longest=lengths, text="\n".join(text))


def _table(found: StepExplanation) -> list[str]:
    """Terms at each moment, of blocks at the largest alone; and the peaks."""
    totals = {name: sum(terms.values()) for name, terms in found.moments.items()}
    blocks = [name for name in totals if name.startswith("block")]
    shown = [name for name in totals if name not in blocks or name == max(blocks, key=lambda x: totals[x])]
    terms = dict.fromkeys(term for name in shown for term, num in found.moments[name].items() if num)
    lines = [[term, *(as_bytes(found.moments[name].get(term, 0)) for name in shown)] for term in terms]
    lines.append(["all", *(as_bytes(totals[name]) for name in shown)])
    peak = f"peak {as_bytes(found.peak)} on a GPU, {as_bytes(found.host)} in host memory for each"
    return [*aligned(["at the", *shown], lines), peak]
