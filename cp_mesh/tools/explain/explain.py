"""Explain a call: what runs and why, its traffic and memory, and the alternatives.

Needs no process group and no GPU. `cp_mesh.tools.explain.variants` computes the figures.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from cp_mesh.call.plan import METHODS, choose_method
from cp_mesh.call.spec import SCORE_OPTIONS, AttentionSpec, Operand, check_choice, check_sizes
from cp_mesh.comm.exchange import TRANSPORTS
from cp_mesh.errors import ArgumentError, UnsupportedError, refuse, typed
from cp_mesh.geometry.balance import balance
from cp_mesh.geometry.layouts import Contiguous, Layout, Striped, ZigZag
from cp_mesh.geometry.mask import Mask
from cp_mesh.geometry.survey import of_many_ranks
from cp_mesh.kernels.table import KERNELS
from cp_mesh.tools.explain.predict.methods import degrees
from cp_mesh.tools.explain.text import as_bytes, text_of
from cp_mesh.tools.explain.variants import ALL_RANKS, Setting, Variant

MOST_TOKENS = 1 << 27  # which take 6 GB
MOST_RANKS = 1 << 13  # tables have an entry for each pair of ranks
MOST_CUTS = 100_000  # documents times ranks; above it, planning striped layouts takes many seconds


@dataclass(frozen=True, eq=False)
class Explanation:
    """The result of `explain`; ``str(explanation)`` is its text.

    Attributes:
        found: figures of the requested layout and method.
        others: figures of other layouts and methods, for the same mask.
        seq_len, cp_size, mask: the arguments.
        text: the whole text.
    """

    found: Variant
    others: list[Variant]
    seq_len: int
    cp_size: int
    mask: Mask
    text: str

    def __repr__(self) -> str:
        return self.text

    @property
    def verdict(self) -> str:
        """One line: layout, method, kernel and extra memory."""
        words = [f"RUNS: {self.found.layout.spec()} {self.found.method}, kernel {self.found.kernel.name}"]
        if self.found.memory is not None:
            words.append(f"{as_bytes(self.found.memory)} of extra memory")
        return ", ".join(words)

    def plot(self, path: str | Path, points: int = 512) -> None:
        """Draw the owner of each token, and the stage that computes each query-key pair, into a picture file.

        Args:
            path: path of the file; its suffix sets the format, as in matplotlib.
            points: at most this many positions are drawn along each side, evenly spaced.

        Raises:
            ArgumentError: if matplotlib cannot write files with this suffix.
            UnsupportedError: if matplotlib is not installed.
        """
        from cp_mesh.tools.explain.picture import draw  # matplotlib is not needed for the text

        draw(path, self.found, self.mask, self.seq_len, self.cp_size, points)


@typed
@of_many_ranks()
def explain(
    seq_len: int,
    cp_size: int,
    *,
    layout: Layout = ZigZag(),  # noqa: B008 - frozen
    mask: Mask = Mask(causal=True),  # noqa: B008 - frozen
    scores: Collection[str] = (),
    device: str = "cpu",
    compute_capability: tuple[int, int] | None = None,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 128,
    v_head_dim: int | None = None,
    latent_dim: int | None = None,
    batch: int = 1,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_chunks: int | None = None,
    kernel: str = "auto",
    method: str = "auto",
    ulysses_degree: int | None = None,
    transport: str = "auto",
    gpus_per_host: int | None = None,
    columns: int = 64,
) -> Explanation:
    """Show what a call will run and why, as a short text and a picture.

    Args:
        seq_len: tokens in the whole sequence.
        cp_size: number of ranks. Above 36, figures are those of a sample: the first ranks, those that compute or fetch
            most, one in the middle, the last.
        layout, mask: as in `cp_mesh.attention`.
        scores: names of the score options that the call uses, as in `cp_mesh.attention`.
        device: device type, "cpu" or "cuda".
        compute_capability: of the CUDA device; None: (9, 0), that of an H100 or H200.
        dtype: dtype of q, k and v.
        head_dim: head dim of q, k and v.
        v_head_dim: another head dim of v.
        latent_dim: features of a token's latent and rotary keys together, 576 in DeepSeek-V3: compares
            `latent_attention`, which moves them and expands keys and values on every rank that sees them.
        batch: batch size on one rank.
        num_heads: query heads of one rank; adds bytes and extra memory to the text.
        num_kv_heads: kv heads of one rank; None: as many as query heads.
        kernel: as in `cp_mesh.attention`. A kernel given by name need not be installed; "auto" takes an installed one.
        head_chunks, method, ulysses_degree: as in `cp_mesh.attention`.
        transport: as in `cp_mesh.attention`; "auto" is symmetric memory for "cuda" on one host.
        gpus_per_host: ranks per host, in order of rank; None: 8 for "cuda", else all ranks.
        columns: width of the owner line.

    Returns:
        An object to print, or to ``.plot("file.png")``. Its text has: the kernel, and those that "auto" rejected; the
        owner of sampled tokens; a table of ranks: rows, work (1.00 is the mean), with documents also the time of a
        layer of Llama-3-8B's shape over the mean and which documents lie whole or in part on the rank, kernel calls of
        a forward, key rows received in each stage, bytes of keys received in a forward, and the peak memory of both
        passes beyond inputs and results; other layouts and methods; advice.

    Raises:
        ArgumentError: for sizes that do not fit together, and unknown names.
        UnsupportedError: for symmetric memory across hosts or on CPUs.

    >>> print(explain(16, 2, layout=ZigZag(), columns=16))
    zigzag layout, 16 tokens on 2 ranks, method ring, functional
    kernel auto = cpu_flash
    owner 0000111111110000
    rank  rows  work  calls   stage 1
    0        8  1.00      2  8 from 1
    1        8  1.00      2  4 from 0
    layout and method      max work  key rows moved
    zigzag ring (this)         1.00               6
    zigzag all_gather          1.00               6
    contiguous ring            1.47               4
    contiguous all_gather      1.47               4
    striped ring               1.06               8
    striped all_gather         1.06               8
    contiguous ring would move 0.67 of the bytes, but its slowest rank has 1.47 times the mean work.
    """
    check_sizes("explain", "explain(16, 2) works", MOST_TOKENS, seq_len=seq_len)
    check_sizes("explain", "explain(16, 2) works", MOST_RANKS, cp_size=cp_size)
    check_choice("explain: device", device, ("cpu", "cuda"), "cuda")
    sizes = {
        "batch": (batch, "batch=1 is the default"),
        "head_dim": (head_dim, "head_dim=128 is the default"),
        "v_head_dim": (v_head_dim, "None means head_dim"),
        "latent_dim": (latent_dim, "latent_dim=576 is that of DeepSeek-V3"),
        "num_heads": (num_heads, "num_heads=32 works"),
        "num_kv_heads": (num_kv_heads, "None means as many as query heads"),
        "head_chunks": (head_chunks, "None is automatic"),
        "ulysses_degree": (ulysses_degree, "None is automatic"),
        "gpus_per_host": (gpus_per_host, "gpus_per_host=8 fits an H200 host"),
        "columns": (columns, "columns=64 is the default"),
    }
    for name, (size, hint) in sizes.items():
        if size is not None or "default" in hint:
            check_sizes("explain", hint, **{name: size})  # type: ignore[arg-type]
    for name, tensor in (("documents", mask.documents), ("key_padding", mask.key_padding), ("blocks", mask.blocks)):
        if tensor is not None and tensor.shape[-1] != seq_len:
            refuse(f"Mask.{name}", f"{seq_len} tokens", tensor.shape[-1], f"seq_len={tensor.shape[-1]} works")
    for name in scores:
        if name not in SCORE_OPTIONS:
            known = ", ".join(SCORE_OPTIONS)
            refuse("explain: scores", f"names of {known}", repr(name), "see the docs of cp_mesh.attention")
    if gpus_per_host is None:
        gpus_per_host = 8 if device == "cuda" else cp_size
    check_choice("kernel", kernel, ("auto", *KERNELS), "auto")
    within = "symmetric_memory" if (device, transport) == ("cuda", "auto") else "functional"
    transport = _transport(transport, device, cp_size, gpus_per_host)
    within = within if cp_size > gpus_per_host else transport
    choose_method(method)
    if ulysses_degree is not None and method != "hybrid":
        expected, hint = "None, except with method='hybrid'", "method='hybrid' takes it"
        refuse("explain: ulysses_degree", expected, ulysses_degree, hint)
    num_kv_heads = num_kv_heads or num_heads or 1
    if (num_heads or num_kv_heads) % num_kv_heads:
        refuse("explain: num_heads", f"a multiple of the {num_kv_heads} kv heads", num_heads, "num_kv_heads=1 works")

    if latent_dim and num_kv_heads != num_heads:
        got, hint = f"{num_heads} and {num_kv_heads}", "num_heads=128 works"
        refuse("explain: latent_dim", "num_heads, and as many kv heads", got, hint)

    def of_heads(num: int, dim: int = head_dim) -> Operand:
        return Operand(torch.Size((batch, num, 1, dim)), dtype, torch.device(device))

    capability = compute_capability or ((9, 0) if device == "cuda" else (0, 0))
    features = {{"dropout_p": "dropout"}.get(name, name) for name in scores} - {"sinks", "dropout_seed"}
    options = AttentionSpec(
        layout.spec(), mask.spec(), 1.0, ulysses_degree=ulysses_degree or 0, head_chunks=head_chunks or 0,
    )  # fmt: skip
    setting = Setting(
        seq_len, cp_size, mask, options, frozenset(features), of_heads(num_heads or num_kv_heads),
        of_heads(num_kv_heads), of_heads(num_kv_heads, v_head_dim or head_dim), latent_dim or 0, num_heads is not None,
        kernel, capability, transport, within, gpus_per_host,
    )  # fmt: skip
    found = setting.look_at(layout, choose_method(method).name)
    others = list(_others(setting, found))
    text = text_of(setting, found, others, columns)
    return Explanation(found, others, seq_len, cp_size, mask, text)


def _transport(name: str, device: str, cp_size: int, gpus_per_host: int) -> str:
    check_choice("transport", name, TRANSPORTS, "functional")
    hosts = -(-cp_size // gpus_per_host)
    if cp_size == 1:
        return "functional"
    if device == "cuda" and hosts == 1:
        return "symmetric_memory" if name == "auto" else name
    if name == "symmetric_memory":
        got = f"{hosts} hosts" if device == "cuda" else f"device={device!r}"
        hint = "transport='functional' works"
        refuse("transport='symmetric_memory'", "CUDA devices of one host", got, hint, UnsupportedError)
    return "functional"


def _others(setting: Setting, found: Variant) -> Iterator[Variant]:
    """Figures of other layouts and methods that the call supports and that are fast to plan."""
    known = ZigZag(), Contiguous(), Striped()
    layouts: list[Layout] = [found.layout, *(layout for layout in known if layout != found.layout)]
    documents, cp_size = setting.mask.documents, setting.cp_size
    if documents is not None:
        if setting.mask.key_padding is None and (even := balance(setting.mask, setting.seq_len, cp_size)) != layouts[0]:
            layouts.append(even)
        if sum(len(row.labels) for row in setting.mask.runs()) * cp_size > MOST_CUTS:
            layouts = [layout for layout in layouts if not isinstance(layout, Striped) or layout == found.layout]
    rings = [name for name, method in METHODS.items() if method.inner_size(2) == 1]
    variants = [(layout, name, 0) for layout in layouts for name in rings]
    if setting.knows_heads:
        variants.append((found.layout, "ulysses", 0))
        tried = degrees(cp_size, setting.gpus_per_host)
        variants += [(found.layout, "hybrid", degree) for degree in (tried if cp_size <= ALL_RANKS else tried[-1:])]
    best: Variant | None = None
    for layout, name, degree in variants:
        if (layout, name, degree or found.degree) == (found.layout, found.method, found.degree):
            continue
        # heads may not divide by ranks or chunks; a kernel given by name may not support the layout
        with suppress(UnsupportedError, ArgumentError):
            other = setting.look_at(layout, name, degree)
            if not degree:
                yield other
            elif best is None or other.moved < best.moved:
                best = other
    if best is not None:
        yield best
