"""Format the text of `cp_mesh.explain` from the figures of its variants."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from cp_mesh.geometry.layouts import Layout
from cp_mesh.tools.explain.variants import RankFigures, Setting, Variant, owners, sampled

WIDTH = 100  # columns of the text
MOST_LINES = 10  # lines of the table of ranks
FASTER = 0.97  # ratios between this and its inverse count as equal
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def text_of(setting: Setting, found: Variant, others: Sequence[Variant], columns: int) -> str:
    """The whole text."""
    lines = [
        *_head(setting, found),
        *_owners(found.layout, setting.seq_len, setting.cp_size, columns),
        *_ranks(setting, found),
        *_alternatives(found, others),
        *_advice(setting, found, others),
    ]
    return "\n".join(lines)


def _head(setting: Setting, found: Variant) -> list[str]:
    """Lines about layout, method and kernel."""
    kernel = f"kernel {setting.kernel}{f' = {found.kernel.name}' * (setting.kernel == 'auto')}"
    by_reason: dict[str, list[str]] = {}
    for name, lacks in found.passed_over.items():
        by_reason.setdefault(lacks, []).append(name)
    reasons = [f"  {', '.join(names)}: {lacks}" for lacks, names in by_reason.items()]
    kernel += "; kernels rejected for what they lack:" * bool(reasons)
    hosts = -(-setting.cp_size // setting.gpus_per_host)
    over = f"{setting.transport} over {hosts} hosts" if hosts > 1 else setting.transport
    chunks = f", {found.chunks} head chunks" if found.chunks > 1 else ""
    of = f"{setting.seq_len} tokens on {setting.cp_size} rank{'s' * (setting.cp_size > 1)}"
    first = f"{found.layout.spec()} layout, {of}, method {_method(found)}{chunks}, {over}"
    lines = [first, kernel, *reasons]
    return [line for text in lines for line in wrapped(text)]


def _owners(layout: Layout, seq_len: int, cp_size: int, columns: int) -> list[str]:
    """The owners of evenly spaced tokens: one digit each, or numbers if there are too many ranks for digits."""
    wide = 1 if cp_size <= len(_DIGITS) else len(str(cp_size - 1)) + 1
    ranks = owners(layout, seq_len, cp_size, sampled(seq_len, columns // wide)).tolist()
    strip = "".join(_DIGITS[rank] for rank in ranks) if wide == 1 else " ".join(map(str, ranks))
    return [f"owner {strip}"]


def _ranks(setting: Setting, found: Variant) -> list[str]:
    """The table of ranks, with as many stages as fit; one column sums the other stages."""
    ranks, size = found.ranks, setting.cp_size
    time = found.work if found.layer is None else found.layer
    slowest = max(ranks, key=lambda x: (time[x.rank], x.near + x.far))
    shown = sorted({x.rank: x for x in (*ranks[: MOST_LINES - 2], slowest, ranks[-1])}.items())
    for most, sources in ((4, True), (3, True), (4, False), (3, False), (2, False), (1, False)):
        table = aligned(*_rank_table(setting, found, [x for _, x in shown], most, sources))
        if len(table[0]) <= WIDTH:
            break
    left = size - len(shown)
    if found.method == "ulysses":
        table.append("each rank computes its share of the heads for all rows: all ranks are alike")
        return table
    if found.inner > 1:
        table.append(f"groups of {found.inner} ranks exchange heads for rows; the first rank of a group is shown")
        left -= len(shown) * (found.inner - 1)
    if left and len(ranks) * found.inner < size:
        table.append(f"{left} ranks are left out; memory is the largest of the {len(ranks)} computed ranks")
    elif left:
        table.append(f"{left} ranks are left out")
    return table


def _rank_table(
    setting: Setting, found: Variant, ranks: Sequence[RankFigures], most: int, sources: bool
) -> tuple[list[str], list[list[str]]]:
    num = len(ranks[0].received)
    alone = num if num <= most else most - 1
    head = ["rank", "rows", "work"] + ["layer", "documents"] * (found.layer is not None)
    head += ["calls", *(f"stage {i + 1}" for i in range(alone))]
    head += [f"stages {alone + 1}-{num}"] * (alone < num)
    with_bytes = setting.knows_heads and num > 0
    far, memory = any(x.far for x in ranks), any(x.memory for x in ranks)
    head += ["NVLink" if setting.q.device.type == "cuda" else "received"] * with_bytes
    head += ["network"] * (with_bytes and far) + ["memory"] * memory
    row_bytes, lines = found.row_bytes, []
    for x in ranks:
        line = [str(x.rank), str(x.rows), f"{x.work:.2f}"]
        if found.layer is not None:
            line += [f"{found.layer[x.rank]:.2f}", _documents(*setting.held(found.layout, x.rank))]
        line.append(str(x.calls))
        for rows, of in zip(x.received[:alone], x.sources, strict=False):
            words = f" from {','.join(map(str, of))}" if sources and rows and len(of) <= 2 else ""
            line.append(f"{rows}{words}" if rows else "-")
        line += [str(sum(x.received[alone:]))] * (alone < num)
        line += [as_bytes(x.near * row_bytes)] * with_bytes + [as_bytes(x.far * row_bytes)] * (with_bytes and far)
        lines.append(line + ([as_bytes(x.memory.peak)] if x.memory else []))
    return head, lines


def _documents(whole: int, cut: list[str]) -> str:
    """How many documents a rank holds whole, and the numbers of those of which it holds a part."""
    part = " ".join(f"#{number}" for number in cut) if len(cut) <= 2 else str(len(cut))
    return ", ".join([f"{whole} whole"] * (whole > 0) + [f"{part} cut"] * bool(cut)) or "-"


def _alternatives(found: Variant, others: Sequence[Variant]) -> list[str]:
    with_bytes = any(x.memory for x in (found, *others))
    head = ["layout and method", f"max {'work' if found.layer is None else 'layer'}"]
    head += ["moved per GPU" if with_bytes else "key rows moved"]
    head += ["memory"] * with_bytes + ["of latent", "memory"] * (found.latent is not None)
    lines = []
    for x in (found, *others):
        line = [_name(x) + " (this)" * (x is found), f"{x.slowest:.2f}"]
        line.append(as_bytes(x.moved) if with_bytes else f"{x.moved:.0f}")
        line += [as_bytes(x.memory) if x.memory is not None else "-"] * with_bytes
        lines.append(line + ([as_bytes(x.latent.moved), as_bytes(x.latent.memory)] if x.latent else []))
    return aligned(head, lines)


def _advice(setting: Setting, found: Variant, others: Sequence[Variant]) -> list[str]:
    """One sentence for each change that would be faster or move fewer bytes."""
    words = []
    alike = [x for x in others if x.inner == 1]
    alike.sort(key=lambda x: (round(_slower(x, found), 2), x.method != found.method))
    best = alike[0] if alike and _slower(alike[0], found) < FASTER else found
    if best is not found:
        words.append(f"{_name(best)} would be faster: {_compared(best, found)}.")
    rings = [x for x in alike if x.method == found.method]
    least = min(rings, key=lambda x: x.moved, default=found)
    if least is not best and least.moved < 0.8 * found.moved:
        word = "but" if _slower(least, found) > 1 / FASTER else "and"
        words.append(
            f"{_name(least)} would move {least.moved / found.moved:.2f} of the bytes, {word} {_compared(least, found)}."
        )
    if missing := [name for name, lacks in found.passed_over.items() if lacks.startswith("package")]:
        words.append(f"{missing[0]} is not installed here: kernel={missing[0]!r} explains the call with it.")
    words = words or ["None of these would be faster."]
    if found.latent and found.moved:
        ratio, products = found.latent.moved / found.moved, 100 * found.latent.expansion
        words.append(
            f"latent_attention would move {ratio:.2g} of the bytes; expanding takes {products:.2g} % of the products."
        )
    return [line for text in words for line in wrapped(text)]


def _slower(x: Variant, found: Variant) -> float:
    """The time of the slowest rank of ``x`` over that of ``found``."""
    return x.slowest / found.slowest if found.slowest else 1.0  # a mask that allows no pair


def _compared(x: Variant, found: Variant) -> str:
    of = "work" if x.layer is None else "time of a layer"
    if x.slowest <= 1.01 * found.slowest and found.slowest <= 1.01 * x.slowest:
        return f"its slowest rank has the same {of}"
    return f"its slowest rank has {x.slowest:.2f} times the mean {of}"


def _name(x: Variant) -> str:
    return "ulysses, any layout" if x.method == "ulysses" else f"{x.layout.spec()} {_method(x)}"


def _method(x: Variant) -> str:
    return f"{x.method} of {x.degree}" if x.method == "hybrid" else x.method


def as_bytes(num: float) -> str:
    if not num:
        return "-"
    power = 0
    while num >= 1000 and power < 3:
        num, power = num / 1024, power + 1
    return f"{num:.3g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ")


def aligned(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Lines of aligned columns: the first left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    return [
        "  ".join(x.rjust(n) if i else x.ljust(n) for i, (x, n) in enumerate(zip(line, widths, strict=True))).rstrip()
        for line in (head, *lines)
    ]
