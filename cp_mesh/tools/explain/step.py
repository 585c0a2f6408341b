"""Memory of a training step of a whole Llama: by term, at the moments that can be its peak; and what would fit.

Per rank: R rows (batch * tokens / cp), n ranks (dp * cp) over which FSDP2 shards. C hidden size, F hidden units of the
MLP, A = query heads * head dim, K = 2 * kv heads * head dim, V vocabulary, E elements of embedding, last norm and head,
P parameters of a block. e bytes of an element in computations, s of weights, gradients and optimizer states.

    weights, optimizer states   s and 2·s bytes of a parameter / n; in host memory with ``offload_optimizer``
    gathered by FSDP2           E·e from the forward on; P·e of a block, and if n > 1 of the next one
    gradients                   s bytes / n once they are reduced. Before, those of a block and of the head in e bytes;
                                the buffer that travels has 4, and stays while the next block computes
    checkpoints                 R·C·e of each block: its input; with ``offload_checkpoints`` of two, in the loss of one
    attention's results         R·(A·e + 4 bytes of a head) of as many blocks; with ``recompute="full"`` of one
    attention                   R·(2·C + 2·A + K)·e during the MLP's backward; in its own R·(2·C + 3·A + 2·K)·e and
                                `predict.memory`, or R·(2·C + 7·A + K)·e while rotary embeddings compute in 4 bytes
    MLP                         R·(2·C + 6·F)·e; tiled R·3·C·e, the same of a tile, weights' gradients in 4 + e bytes
    logits and loss             R·(2·C + 2·V)·e; tiled R·3·C·e, V·C·(4 + e), and chunks (`token_losses`)

This is the model of examples/long_llama.py: every block is recomputed, the MLP is gated, norms save their input alone,
as `nn.RMSNorm` does on GPUs, and AdamW is fused. What saves more takes more, such as norms that are written in Python.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from cp_mesh.call.spec import check_choice
from cp_mesh.errors import refuse
from cp_mesh.tools.explain.explain import explain
from cp_mesh.tools.explain.predict.memory import ExtraMemory
from cp_mesh.tools.explain.text import aligned, as_bytes
from cp_mesh.training import token_losses

_NAMES = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")
PRESETS: dict[str, dict[str, Any]] = {
    name: {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256} | dict(zip(_NAMES, x, strict=True))
    for name, x in (("llama-3-8b", (4096, 32, 14336, 32)), ("llama-3-70b", (8192, 80, 28672, 64)))
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
            model = PRESETS.get(str(model)) or json.loads(path.read_text())
        if (family := model.get("model_type")) not in FAMILIES:
            refuse(f"{what}: model_type", f"one of {', '.join(FAMILIES)}", repr(family), known)
        heads = model.get("num_attention_heads") or 1
        given = {"num_key_value_heads": heads, "head_dim": model.get("hidden_size", 0) // heads}
        given |= {x.name: model[x.name] for x in fields(cls) if model.get(x.name) is not None}
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


@dataclass(frozen=True)
class Step:
    """A step on one rank: its sizes, and the lines of the plan that save memory; see `explain_step`."""

    model: ModelSizes
    rows: int
    num_ranks: int
    itemsize: int
    optimizer_itemsize: int
    recompute: str
    tiled_loss: bool
    mlp_rows: int | None
    offload_checkpoints: bool
    offload_optimizer: bool

    @property
    def of_rank(self) -> int:
        """Bytes of a rank's weights, and of its gradients."""
        m = self.model
        return self.optimizer_itemsize * (m.num_hidden_layers * m.of_block + m.of_ends) // self.num_ranks

    @property
    def host(self) -> int:
        """Bytes in host memory."""
        of_block = self.rows * self.model.hidden_size * self.itemsize + self.results * (self.recompute == "selective")
        kept = self.model.num_hidden_layers * of_block * self.offload_checkpoints
        return 4 * self.of_rank * self.offload_optimizer + kept

    @property
    def results(self) -> int:
        """Bytes that attention of a block returns."""
        return self.rows * self.model.num_attention_heads * (self.model.head_dim * self.itemsize + 4)

    def moments(self, attention: ExtraMemory) -> dict[str, dict[str, int]]:
        """Bytes on the GPU, by moment and term; ``attention``: what it takes beyond its inputs and results."""
        m, e, s, n, row = self.model, self.itemsize, self.optimizer_itemsize, self.num_ranks, self.rows * self.itemsize
        C, V, L, P, E = m.hidden_size, m.vocab_size, m.num_hidden_layers, m.of_block, m.of_ends
        is_here, selective = not self.offload_optimizer, self.recompute == "selective"
        always = {"weights": self.of_rank * is_here, "optimizer states": 2 * self.of_rank * is_here}
        always |= {"symmetric memory": attention.symmetric}
        found = {"loss": always | {
            "gathered by FSDP2": E * e, "checkpoints": row * C * (1 if self.offload_checkpoints else L),
            "attention's results": self.results * (1 if self.offload_checkpoints else L) * selective,
            "logits and loss": self._loss(),
        }}  # fmt: skip
        in_attention, in_mlp, of_block = self._block(attention.backward)
        for i in sorted({L - 1, max(0, L - 2), min(1, L - 1), 0}, reverse=True):  # checkpoints go as gradients come
            reduced = (L - 1 - i) * P * s // n * is_here
            near = min(i + 1, 2) if self.offload_checkpoints else i + 1
            found[f"block {i}"] = always | {
                "gathered by FSDP2": (E + P * (2 if n > 1 and i else 1)) * e,
                "gradients": reduced + of_block + V * C * e + 4 * P * (i < L - 1),
                "checkpoints": row * C * near, "attention's results": self.results * (near if selective else 1),
                "attention": in_attention, "MLP": in_mlp,
            }  # fmt: skip
        of_first = (L - 1) * P * s // n * is_here + V * C * e + self._reduced(P)
        of_ends = L * P * s // n * is_here + self._reduced(E)
        block_zero = {"gathered by FSDP2": E * e, "gradients": of_first, "checkpoints": row * C}
        last = max(block_zero, {"gradients": of_ends}, key=lambda terms: sum(terms.values()))
        found["last gradients"] = always | last
        found["optimizer"] = always | {"gradients": self.of_rank * is_here}
        return found

    def _reduced(self, num: int) -> int:
        """Bytes of ``num`` gradients while FSDP2 reduces them: they, their buffer, its sum, and that in the last dtype.

        On one rank the buffer is divided by the factor of `sum_gradients`, into one more.
        """
        n, s = self.num_ranks, self.optimizer_itemsize
        buffers = 4 * num * (1 + (n == 1)) + 4 * num // n
        return max(num * (self.itemsize + 4), buffers, 4 * num + 4 * num // n + s * num // n * (s != 4))

    def _loss(self) -> int:
        m, e, row = self.model, self.itemsize, self.rows * self.itemsize
        C, V = m.hidden_size, m.vocab_size
        chunk = V * min(self.rows, max(1, token_losses.CHUNK_BYTES // (4 * V)))
        if self.tiled_loss:
            return 3 * row * C + V * C * (4 + e) + chunk * (16 + e if chunk < self.rows * V else 12)
        return 2 * row * C + max(2 * row * V + 4 * chunk, row * (V + C) + V * C * e)

    def _block(self, attention: int) -> tuple[int, int, int]:
        """Bytes of attention, MLP and weights' gradients of a block, at the larger moment of its backward."""
        m, e, row = self.model, self.itemsize, self.rows * self.itemsize
        C, F, A, K = m.hidden_size, m.intermediate_size, *(
            m.head_dim * num for num in (m.num_attention_heads, 2 * m.num_key_value_heads)
        )  # fmt: skip
        rotary = 4 * self.rows * m.head_dim  # cosines and sines
        mlp, of_mlp = row * (2 * C + 6 * F), C * F * e
        if self.mlp_rows is not None:
            mlp = row * 3 * C + min(self.rows, self.mlp_rows) * e * (2 * C + 6 * F) + 3 * C * F * (4 + e)
            of_mlp = 0
        beside = row * (2 * C + 2 * A + K)
        own = max(row * (2 * C + 3 * A + 2 * K) + attention, row * (2 * C + 7 * A + K))
        first = beside + mlp + of_mlp >= own + m.of_block * e
        return (beside + rotary, mlp, of_mlp) if first else (own + rotary, 0, m.of_block * e)


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
    longest: dict[str, int]
    text: str

    def __repr__(self) -> str:
        return self.text

    @property
    def peak(self) -> int:
        """The most bytes on a GPU at any moment."""
        return max(sum(terms.values()) for terms in self.moments.values())


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

    FSDP2 shards over all dp * cp ranks; blocks are `Checkpointed`. Needs no process group and no GPU. The formula is in
    `cp_mesh.tools.explain.step`; tests hold it to what steps allocate.

    Args:
        model: a config.json of Transformers, its folder, its content, or a preset: "llama-3-8b", "llama-3-70b".
        seq_len: tokens of the whole sequence.
        cp_size, dp_size: ranks that share a sequence, and how many such groups there are.
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
    sizes = {"dp_size": dp_size, "batch": batch, "mlp_rows": 1 if mlp_rows is None else mlp_rows}
    for name, size in sizes.items():
        if size < 1:
            refuse(f"explain_step: {name}", "at least 1", size, f"{name}=1 works")
    if gpu_memory is None and host_memory is not None:
        refuse("explain_step: host_memory", "gpu_memory with it", None, "gpu_memory=77 fits an H100 of 80 GB")
    m = ModelSizes.read(model)
    heads = {"num_heads": m.num_attention_heads, "num_kv_heads": m.num_key_value_heads, "head_dim": m.head_dim}
    given: dict[str, Any] = {"device": "cuda", "dtype": dtype, "batch": batch} | heads | attention
    widths = dtype.itemsize, optimizer_dtype.itemsize
    step = Step(m, 0, 1, *widths, recompute, tiled_loss, mlp_rows, offload_checkpoints, offload_optimizer)
    known: dict[tuple[int, int], ExtraMemory] = {}

    def at(line: Step, length: int, cp: int, planned: int | None = None) -> tuple[Step, dict[str, dict[str, int]]]:
        key = planned or length, cp
        if key not in known:
            of_ranks = [x.memory for x in explain(*key, **given).found.ranks if x.memory is not None]
            known[key] = max(of_ranks, key=lambda memory: memory.backward + memory.symmetric)
        line = replace(line, rows=-(-batch * length // cp), num_ranks=dp_size * cp)
        return line, line.moments(known[key])

    def longest(line: Step, cp: int, most: float) -> int:
        """Search among multiples of 128 rows; attention is planned at the next of eight lengths of each doubling."""
        unit, low, high = 128 * cp, 0, 1

        def fits(parts: int) -> bool:
            coarse = 1 << max(0, parts.bit_length() - 4)
            here, moments = at(line, parts * unit, cp, -(-parts // coarse) * coarse * unit)
            in_host = host_memory is None or here.host <= host_memory * 2**30
            return in_host and max(sum(terms.values()) for terms in moments.values()) <= most * 2**30

        while high * unit <= MOST and fits(high):
            low, high = high, 2 * high
        while high - low > max(1, low // 128) and high * unit <= MOST:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low * unit

    step, moments = at(step, seq_len, cp_size)
    found = {} if gpu_memory is None else {name: longest(x, cp, gpu_memory) for name, x, cp in _lines(step, cp_size)}
    return StepExplanation(moments, step.host, found, _text(step, moments, seq_len, cp_size, gpu_memory, found))


_SAVING: dict[str, tuple[str, Any, Any]] = {
    "cross_entropy(weight=)": ("tiled_loss", False, True),
    "TiledMLP(tile_rows=8192)": ("mlp_rows", None, 8192),
    "checkpoints in host memory": ("offload_checkpoints", False, True),
    "attention recomputed too": ("recompute", "selective", "full"),
    "CPUOffloadPolicy of FSDP2": ("offload_optimizer", False, True),
}
"""Lines of a plan: the field of `Step` that each sets, its value without the line and with it."""


def _lines(step: Step, cp: int) -> list[tuple[str, Step, int]]:
    """The plan as it is, and with each line that it lacks."""
    lacking = {name: {key: after} for name, (key, without, after) in _SAVING.items() if getattr(step, key) == without}
    alone = [(name, replace(step, **change), cp) for name, change in lacking.items()]
    together = replace(step, **{key: x for change in lacking.values() for key, x in change.items()})
    return [("", step, cp), *alone, ("all of these", together, cp), (f"cp {2 * cp}", step, 2 * cp)]


def _text(
    step: Step, moments: dict[str, dict[str, int]], seq_len: int, cp: int, gpu_memory: float | None,
    longest: Mapping[str, int],
) -> str:  # fmt: skip
    m, totals = step.model, {name: sum(terms.values()) for name, terms in moments.items()}
    blocks = [name for name in moments if name.startswith("block")]
    shown = [name for name in moments if name not in blocks or name == max(blocks, key=lambda x: totals[x])]
    terms = dict.fromkeys(term for name in shown for term, num in moments[name].items() if num)
    lines = [[term, *(as_bytes(moments[name].get(term, 0)) for name in shown)] for term in terms]
    lines.append(["all", *(as_bytes(totals[name]) for name in shown)])
    first = f"{m.num_hidden_layers * m.of_block + m.of_ends:,} parameters, {seq_len:,} tokens, cp {cp}, "
    first += f"dp {step.num_ranks // cp}: {step.rows:,} rows on a GPU"
    peak = f"peak {as_bytes(max(totals.values()))} on a GPU, {as_bytes(step.host)} in host memory for each"
    text = [first, *aligned(["at the", *shown], lines), peak]
    if gpu_memory is not None:
        rows = [[name or "this plan", f"{n:,}" + " or more" * (n * 2 > MOST)] for name, n in longest.items()]
        text += aligned([f"in {gpu_memory:g} GiB, with", "longest sequence"], rows)
    return "\n".join(text)
