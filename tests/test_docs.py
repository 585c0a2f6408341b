"""What the documents say is what the code does: their code runs, their commands exist, their figures are the files'."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Callable
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dense import dense_attention, dense_dropout, dense_mask
from test_pins import PACKAGES
from test_structure import FLOORS
from torch import Tensor, nn

import cp_mesh
from cp_mesh.geometry.layouts import LAYOUTS

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "examples"), str(ROOT / "examples" / "benchmarks"), str(ROOT / "docs")]

import capabilities  # noqa: E402
import draw  # noqa: E402
import llama  # noqa: E402
import plot  # noqa: E402
import tables  # noqa: E402

DOCUMENTS = (ROOT / "README.md", *(x for x in sorted((ROOT / "docs").rglob("*.md")) if x.name not in tables.PAGES))
NAMES = {str(path.relative_to(ROOT)): path for path in DOCUMENTS}
NEEDS_A_GPU = "# needs a GPU"


class Block(NamedTuple):
    """A fenced block of a document; ``line`` is that of its first line."""

    language: str
    line: int
    code: str


def blocks(path: Path, *languages: str) -> list[Block]:
    """All fenced blocks of these languages."""
    found: list[Block] = []
    opened: tuple[str, str, int] | None = None
    lines: list[str] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        fence = re.match(r"^( *)```(\w*)$", line)
        if opened is None and fence:
            opened, lines = (fence[1], fence[2], number + 1), []
        elif opened is not None and fence and not fence[2]:
            found.append(Block(opened[1], opened[2], "\n".join(lines) + "\n"))
            opened = None
        elif opened is not None:
            lines.append(line.removeprefix(opened[0]))
    assert opened is None, f"{path.name}: the block of line {opened[2]} does not end"
    return [block for block in found if block.language in languages]


def test_kernel_table_is_that_of_the_code() -> None:
    assert capabilities.kernel_table() in (ROOT / "docs" / "kernels.md").read_text()


def test_links_and_names_in_the_documents_exist() -> None:
    for document in DOCUMENTS:
        text = document.read_text()
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            is_made = (
                Path(target).name in tables.PAGES and (document.parent / target).resolve().parent == tables.RESULTS
            )
            assert is_made or (document.parent / target).exists(), f"{document.name} links to {target}"
        for name in re.findall(r"`(?:cp_mesh|tests|examples|docs)/[\w./]+\.(?:py|md|csv)", text):
            assert (ROOT / name.strip("`")).exists(), f"{document.name} names {name}"
        for name in re.findall(r"`cp_mesh\.(\w+)", text):
            assert hasattr(cp_mesh, name), f"{document.name} names cp_mesh.{name}"


def test_every_public_name_is_in_the_api() -> None:
    listed = re.findall(r"^::: cp_mesh\.([\w.]+)\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    public = {(getattr(package, name).__module__, name) for package in PACKAGES.values() for name in package.__all__}
    assert sorted((f"cp_mesh.{module}", name) for module, name in listed) == sorted(public)


def navigation() -> list[str]:
    """Names of the site's pages."""
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("theme:")[0]
    return [f"docs/{name}" for name in re.findall(r"[\w/]+\.md", nav)]


def test_every_page_is_in_the_site() -> None:
    """In the navigation, or outside of it and linked by another page."""
    (patterns,) = re.findall(r"^not_in_nav: \|\n((?:  .+\n)+)", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {name for name in NAMES if name.startswith("docs/")}
    outside = {name for name in pages if any(fnmatch(name, f"docs/{pattern}") for pattern in patterns.split())}
    assert set(navigation()) == pages - outside
    linked = {
        (document.parent / target).resolve()
        for document in DOCUMENTS
        for target in re.findall(r"\]\(([^)#:]+\.md)[)#]", document.read_text())
        if (document.parent / target).resolve() != document
    }
    assert not {name for name in outside if NAMES[name] not in linked}


def test_every_file_of_figures_is_explained() -> None:
    made = (tables.RESULTS / "README.md").read_text()
    files = {path.name for path in tables.RESULTS.iterdir() if path.suffix in (".csv", ".json")}
    assert not {name for name in files if f"[`{name}`]({name})" not in made}


def test_every_module_is_in_its_place() -> None:
    """In the tree of files, and on its floor."""
    contributing, design = (NAMES[f"docs/{name}.md"].read_text() for name in ("contributing", "design"))
    for name, floor in FLOORS.items():
        file = f"{name}/" if (ROOT / "cp_mesh" / name).is_dir() else f"{name}.py"
        assert re.search(rf"^  .*\b{file}", contributing, re.MULTILINE), f"docs/contributing.md lacks {file}"
        row = re.search(rf"^\| L{floor} \|.*$", design, re.MULTILINE)
        assert row and f"`{file.removesuffix('.py')}`" in row[0], f"docs/design.md lacks {name} on floor {floor}"


# ---- pictures and tables


def test_pictures_are_those_of_the_library() -> None:
    drawn = draw.pictures()
    assert {path.name for path in draw.FOLDER.iterdir()} == set(drawn)
    for name, text in drawn.items():
        assert (draw.FOLDER / name).read_text() == text, f"{name}: run python docs/draw.py"


@pytest.mark.full
def test_tables_are_those_of_the_files() -> None:
    assert all(make().count("\n|") > 3 for make in tables.PAGES.values())
    shown = []
    for name in tables.DOCUMENTS:
        text = (ROOT / name).read_text()
        assert tables.with_tables(text) == text, f"{name}: run python examples/benchmarks/tables.py"
        shown += re.findall(r"<!-- table: (.+?) -->", text)
    assert set(shown) == {*tables.REGIONS, *tables.ASKED}


def test_pictures_of_speed_are_of_the_files() -> None:
    for name in ("speed", "against", "memory"):
        text = (tables.RESULTS / f"{name}.svg").read_text()
        assert plot.figures_drawn() in text, f"{name}.svg: run python examples/benchmarks/plot.py --page"


@pytest.mark.full
def test_pictures_of_speed_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = plot.main(["--page", "--out", str(tmp_path)])
    assert [path.name for path in written] == ["speed.svg", "against.svg", "memory.svg"]
    assert all("</svg>" in path.read_text() for path in written)
    rows = plot.page_rows(*plot.MACHINES[0][:2])
    drawn = plot.best_of(rows, ("32", "8"), ("queued",))["cp_mesh"]
    line = f"| {' | '.join(f'{x:.0f}' for x in drawn.values())} |"
    assert line in tables.REGIONS["speed on 2 GPUs"]()


# ---- commands


READERS_OWN = {"train.py", "FILE.csv"}  # what a reader writes


def commands(path: Path) -> list[list[str]]:
    """Commands of the shell blocks, and inline code that begins like one; the page's own variables are filled in."""
    variables: dict[str, str] = {}
    found = []
    texts = re.findall(r"`((?:python3?|torchrun|pip) [^`]+)`", path.read_text())
    inline = [Block("", 0, " ".join(text.split()) + "\n") for text in texts]
    for block in blocks(path, "sh") + inline:
        for line in re.sub(r"\\?\n +", " ", block.code.replace("\\\n", " ")).splitlines():
            line = re.sub(r"^(?:[A-Z_]+=\w+ )+", "", line.strip())  # of the environment
            for name, value in variables.items():
                line = line.replace(f"${name}", value)
            if setting := re.match(r'^(\w+)="(.*)"$', line.strip()):
                variables[setting[1]] = setting[2]
            elif words := shlex.split(line, comments=True):
                found.append(words)
    return found


def options_of(script: Path) -> str:
    """Where a script's options are defined."""
    if script.name == "run.py":  # of pytest
        return (ROOT / "tests" / "conftest.py").read_text()
    return script.read_text()


@pytest.mark.parametrize("name", NAMES)
def test_commands_exist(name: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for words in commands(NAMES[name]):
        program, script, rest = words[0], None, words[1:]
        if program == "pip":
            assert rest[0] == "install", words
            for extra in re.findall(r"^(?:\.|cp_mesh)\[(\w+)\]$", rest[1]):
                assert extra in extras, words
            continue
        if program == ".ci/run":
            assert (ROOT / program).exists()
            continue
        assert program in ("python", "python3", "torchrun"), words
        for i, word in enumerate(rest):
            if word == "-m":
                assert rest[i + 1] == "cp_mesh", words
                script = ROOT / "cp_mesh" / "__main__.py"
            elif word.endswith(".py") and script is None and word not in READERS_OWN:
                script = ROOT / word
                assert script.exists(), words
            elif word.startswith("--"):
                option = word.split("=")[0]
                if program == "torchrun" and script is None:
                    assert option in ("--nproc-per-node", "--standalone"), words
                elif script is not None:
                    of_script = options_of(script)
                    if "BooleanOptionalAction" in of_script:
                        option = option.replace("--no-", "--")
                    assert f'"{option}"' in of_script, f"{option} of {script.name}: {words}"
            elif re.match(r"^(tests|docs|examples)/", word):
                assert (ROOT / word.partition(":")[0]).exists(), words


# ---- code


def whole(seed: int, *shape: int) -> Tensor:
    """Equal on all ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def integers(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    """As in docs/index.md, called with whatever else the model is called with."""

    def __init__(self, dim: int, num_heads: int, sinks: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.sinks = nn.Parameter(torch.zeros(num_heads)) if sinks else None

    def forward(self, x: Tensor, mask: Any = None, layout: Any = None) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Hands on what its attention modules are called with."""

    def __init__(self, sinks: bool = False, dim: int = 32, num_heads: int = 4) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(64, dim), nn.Embedding(256, dim)
        self.layers = nn.ModuleList(nn.ModuleDict({"attention": Attention(dim, num_heads, sinks)}) for _ in range(2))
        self.head = nn.Linear(dim, 64)
        self.double()
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3, generator=generator)

    def forward(self, tokens: Tensor, positions: Tensor, mask: Any = None, layout: Any = None) -> Tensor:
        x = self.token(tokens) + self.position(positions)
        for layer in self.layers:
            given = [y for y in (mask, layout) if y is not None]
            x = x + layer["attention"](x, *given)
        return self.head(x)

    def dense(
        self,
        tokens: Tensor,
        masks: list[cp_mesh.Mask],
        of_layers: Any = ({}, {}),
        positions: Tensor | None = None,
        **scores: Any,
    ) -> Tensor:
        """The logits of one rank; a mask for each layer. No code of the library attends."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]) if positions is None else positions)
        for layer, mask, own in zip(self.layers, masks, of_layers, strict=True):
            module = layer["attention"]
            q, k, v = (y.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for y in module.qkv(x).chunk(3, dim=-1))
            out = attend(q, k, v, mask, sinks=module.sinks, **scores, **own)
            x = x + module.out(out.transpose(1, 2).flatten(2))
        return self.head(x)


class Dropping(Attention):
    layer = 0

    def forward(self, x: Tensor, seed: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2)
        return self.out(out.transpose(1, 2).flatten(2))


class DroppingModel(Model):
    def __init__(self) -> None:
        super().__init__()
        for i, layer in enumerate(self.layers):
            layer["attention"].__class__, layer["attention"].layer = Dropping, i

    def forward(self, tokens: Tensor, positions: Tensor, seed: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(tokens, positions, seed)


class Body(Model):
    """Without the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Identity()  # type: ignore[assignment]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(32, 4, False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x)


class Part(nn.Module):
    """Embeddings and the last layer are of whole sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.layers = nn.Embedding(64, 32), nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 64)
        self.double()
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: cp_mesh.Mask, **scores: Any) -> Tensor:
    """Attention of one device by the oracle of the tests."""
    options = {"causal": mask.causal, "window": mask.window, "documents": mask.documents}
    return dense_attention(q, k, v, dense_mask(q.shape[2], **options), **scores)[0]


def close(a: Any, b: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance, check_dtype=False)


class Page(NamedTuple):
    """A page with Python blocks: ranks, the names that it takes for granted, and what must hold at its end."""

    world_size: int
    names: Callable[[int], dict[str, Any]] = lambda rank: {}
    check: Callable[[dict[str, Any]], None] = lambda names: None


S = 64  # tokens of the pages' sequences


def check_readme(names: dict[str, Any]) -> None:
    torch.manual_seed(0)  # the weights of the page
    layer = names["Layer"]
    plain = nn.Sequential(nn.Embedding(96, 64), layer(), layer(), nn.Linear(64, 96, False))
    expected = F.cross_entropy(plain(names["text"][:, :-1]).flatten(0, 1), names["text"][:, 1:].flatten())
    expected.backward()
    loss = names["loss"].detach().clone()
    dist.all_reduce(loss, group=names["mesh"].get_group())
    close(loss, expected.detach(), 1e-5)
    for found, parameter in zip(names["model"].parameters(), plain.parameters(), strict=True):
        close(found.grad.full_tensor(), parameter.grad, 1e-5 * float(parameter.grad.abs().max()))


def check_index(names: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain, text = names["Model"](), names["text"]
    logits = plain(text[:, :-1], torch.arange(1000))
    close(names["losses"][0], F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).item(), 1e-4)
    assert names["losses"][-1] < names["losses"][0]
    torch.manual_seed(1)
    mask = cp_mesh.Mask(window=(255, 0))
    close(names["out"], attend(*torch.randn(3, 1, 4, 1000, 16), mask)[:, :, names["sequence"].positions()], 1e-5)


def recipe_names(rank: int) -> dict[str, Any]:
    mesh = ranks.mesh((1, 2), ("dp", "cp"))
    sequence = cp_mesh.ShardedSequence(mesh["cp"], length=S)
    q, k, v = (whole(i, 2, 4, S, 16) for i in range(3))
    documents = torch.tensor([[0] * 40 + [1] * 3 + [2] * 21, [0] * 10 + [1] * 50 + [2] * 4])
    models = {"model": Model(), "model_with_sinks": Model(sinks=True), "dropping_model": DroppingModel()}
    attention_mask = torch.ones(2, S, dtype=torch.int64)
    attention_mask[1, 50:] = 0
    return {
        "mesh": mesh, "data": mesh["dp", "cp"]._flatten("dp_cp"), "sequence": sequence, "seq_len": S, "cp_size": 2,
        "tokens": integers(64, 2, S), "labels": integers(64, 2, S + 1)[:, 1:], "documents": documents,
        "token_type_ids": (torch.arange(S) // 9 % 2).expand(2, S), "attention_mask": attention_mask, "step": 3,
        "whole_q": q, "whole_k": k, "whole_v": v, **models,
        "qkv_of_text": [x[:, :, :9] for x in (q, k, v)], "qkv_of_image": [x[:, :, 9:] for x in (q, k, v)],
    }  # fmt: skip


def check_masks(names: dict[str, Any]) -> None:
    sequence, tokens, documents = (names[name] for name in ("sequence", "tokens", "documents"))
    packed, causal, kept = cp_mesh.Mask(documents=documents), cp_mesh.Mask(), names["kept"]
    window = cp_mesh.Mask(window=(1023, 0))
    close(sequence.unshard(kept[0]["logits"]), names["model"].dense(tokens, [window, causal]))
    qkv = [names[f"whole_{name}"] for name in "qkv"]
    ids = torch.where(names["token_type_ids"] == 1, torch.arange(S) // 18, -1)
    seen = dense_mask(S, blocks=ids, documents=documents)
    close(names["images_out"], dense_attention(*qkv, seen)[0][:, :, sequence.positions()])
    assert torch.equal(names["blocks"], ids) and names["local_images"].window == (1023, None)
    whole, rank = dense_attention(*qkv, dense_mask(S, causal=False))[0], names["mesh"]["cp"].get_local_rank()
    image = range(9, 37) if rank == 0 else range(37, S)
    text = range(5) if rank == 0 else range(5, 9)
    close(names["joint_out"], whole[:, :, [*text, *image]])
    scored = names["model_with_sinks"].dense(tokens, [packed, packed], softcap=50.0)
    close(sequence.unshard(kept[-2]["logits"]), scored)
    seed = int(sequence.dropout_seed(3))
    weights = [{"kept": dense_dropout(2, 4, S, 0.2, seed + i)} for i in range(2)]
    close(sequence.unshard(kept[-1]["logits"]), names["dropping_model"].dense(tokens, [causal] * 2, of_layers=weights))


THD = {"cu_seqlens": torch.tensor([0, 10, 27, 59]), "cu_seqlens_padded": torch.tensor([0, 12, 32, S])}


def packed_names(rank: int) -> dict[str, Any]:
    """Documents with padding at the end of one row; and documents of `THD`, of which a rank has some rows, packed."""
    names = recipe_names(rank)
    sequence, qkv = names["sequence"], [names[f"whole_{name}"] for name in "qkv"]
    documents = names["documents"].clone()
    documents[1, 60:] = cp_mesh.Mask.EXCLUDED
    rows: list[int] = []
    for begin, end in pairwise(THD["cu_seqlens_padded"].tolist()):
        chunks = torch.arange(begin, end).chunk(4)
        rows += torch.cat([chunks[rank], chunks[3 - rank]]).tolist()
    local = {f"{name}_thd": x[0, :, rows].transpose(0, 1) for name, x in zip("qkv", qkv, strict=True)}
    local |= dict(zip("qkv", sequence.shard(qkv, dim=2), strict=True))
    position_ids = cp_mesh.document_positions(names["documents"])
    of_page = {"documents": documents, "position_ids": position_ids, "balanced_model": Model(), "rows_thd": rows}
    return names | THD | local | of_page


def check_packed(names: dict[str, Any]) -> None:
    """Positions begin anew in each document, and no label is a token of another one."""
    sequence, tokens, documents, kept = (names[name] for name in ("sequence", "tokens", "documents", "kept"))
    packed, counted = cp_mesh.Mask(documents=documents), cp_mesh.document_positions(documents)
    valid = [[i + 1 < S and documents[b, i] == documents[b, i + 1] >= 0 for i in range(S)] for b in range(2)]
    labels = torch.where(torch.tensor(valid), tokens.roll(-1, 1), -100)
    logits = names["model"].dense(tokens, [packed, packed], positions=counted)
    close(sequence.unshard(kept[0]["logits"]), logits)
    assert torch.equal(kept[0]["local_labels"], sequence.shard({"labels": labels})["labels"])
    close(names["packed"].unshard(kept[3]["logits"]), logits)
    assert torch.equal(kept[3]["local_labels"], names["packed"].shard({"labels": labels})["labels"])
    forms = [names[f"from_{name}"].documents for name in ("positions", "lengths", "padding")]
    assert torch.equal(forms[0].diff() != 0, names["position_ids"].diff() != 1)
    assert forms[1].bincount().tolist() == THD["cu_seqlens"].diff().tolist()
    assert torch.equal(forms[2], names["attention_mask"] - 1)
    qkv, rows = [names[f"whole_{name}"] for name in "qkv"], names["rows_thd"]
    close(kept[1]["out"], attend(*qkv, packed)[:, :, sequence.positions()])
    masks = [names["styles"][f"layers.{i}.attention"].mask(None, packed) for i in range(2)]
    assert [mask.window for mask in masks] == [(63, 0), (127, 0)]
    assert all(torch.equal(mask.documents, documents) for mask in masks)
    ids = torch.repeat_interleave(torch.arange(3), THD["cu_seqlens_padded"].diff())
    is_token = torch.arange(S) - THD["cu_seqlens_padded"][ids] < THD["cu_seqlens"].diff()[ids]
    want = dense_attention(*(x[:1] for x in qkv), dense_mask(S, documents=ids[None]) & is_token)[0]
    close(names["thd"][is_token[rows]], want[0, :, rows].transpose(0, 1)[is_token[rows]])


def gradient_names(rank: int) -> dict[str, Any]:
    names = recipe_names(rank)
    plan = {
        "": cp_mesh.ShardedModel(names["sequence"], inputs=("tokens",), positions="positions"),
        "layers.*.attention": cp_mesh.ContextParallel(names["sequence"]),
    }
    names["twin"] = copy.deepcopy(names["model"])
    cp_mesh.parallelize(names["model"], names["mesh"]["cp"], plan)
    names |= {"body": Body(), "part_model": Part(), "head": nn.Linear(32, 64).double()}
    names["router"] = nn.Linear(32, 6).double()
    for module in (names["head"], names["router"]):
        generator = torch.Generator().manual_seed(1)
        nn.init.normal_(module.weight, std=0.3, generator=generator)
        nn.init.zeros_(module.bias)
    cp_mesh.parallelize(names["body"], names["mesh"]["cp"], plan)
    labels = integers(64, 2, 2, S)
    labels[0, :, 5:40] = -100
    names["micro_batches"] = [
        {"tokens": x, "labels": y} for x, y in zip(integers(64, 2, 2, S) // 2, labels, strict=True)
    ]
    return names


def check_gradients(names: dict[str, Any]) -> None:
    twin = names["twin"]
    logits = twin.dense(names["tokens"], [cp_mesh.Mask()] * 2)
    F.cross_entropy(logits.flatten(0, 1), names["labels"].flatten()).backward()
    norm = nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    assert norm > 2.0  # else clipping would leave the gradients as they are
    close(names["norm"], norm)
    gradients = dict(names["model"].named_parameters())
    for name, parameter in twin.named_parameters():
        close(gradients[name].grad, parameter.grad)
    # losses in parts
    body, head = Body(), copy.deepcopy(names["head"])
    head.zero_grad()
    tokens, labels = (torch.stack([x[name] for x in names["micro_batches"]]) for name in ("tokens", "labels"))
    hidden = torch.stack([body.dense(x, [cp_mesh.Mask()] * 2) for x in tokens])
    F.cross_entropy(head(hidden).flatten(0, 2), labels.flatten()).backward()
    for found, wanted in ((names["head"], head), (names["body"], body)):
        for x, y in zip(found.parameters(), wanted.parameters(), strict=True):
            dist.all_reduce(x.grad)
            close(x.grad, y.grad)
    # a loss of routers
    weights, real = names["router"](hidden[1]).softmax(-1), names["attention_mask"][..., None]
    hits = F.one_hot(weights.topk(2).indices, 6).sum(2).double()
    want = 6 * ((hits * real).sum((0, 1)) / real.sum() * (weights * real).sum((0, 1)) / real.sum()).sum()
    close(names["balancing"], want)
    close(names["share"], 0.01 * want / 2)
    # a loss of documents
    labels = names["micro_batches"][1]["labels"]
    logits = head(body.dense(names["micro_batches"][1]["tokens"], [cp_mesh.Mask()] * 2))
    want = -F.cross_entropy(logits.mT, labels, reduction="none").sum(1)
    close(names["sums"], want)
    close(names["dpo"], -F.logsigmoid(0.1 * (want[:1] - want[1:])).mean() / 2)
    # a part of a model
    names["loss"].backward()
    part = Part()
    F.cross_entropy(part(names["tokens"]).flatten(0, 1), names["labels"].flatten()).backward()
    for x, y in zip(names["part_model"].parameters(), part.parameters(), strict=True):
        dist.all_reduce(x.grad)
        close(x.grad, y.grad)


def test_parts_of_a_loss_are_as_many_on_every_rank() -> None:
    """Under FSDP each is a collective, and shards may be of unlike lengths."""
    (parts,) = re.findall(r"parts = (zip.*?\)\))$", (ROOT / "docs/gradients.md").read_text(), re.DOTALL | re.MULTILINE)
    for rows in (3, 9, 16):
        names = {"leaf": torch.zeros(2, rows, 3), "batch": {"labels": torch.zeros(2, rows)}}
        assert len(list(eval(parts, names))) == 4


def decoding_names(rank: int) -> dict[str, Any]:
    """The page's model, and its weights; all 1000 tokens of a step by hand."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"token": (256, 64), "position": (4096, 64), "head": (256, 64)}
    shapes |= {f"layers.{i}.{name}": (n * 64, 64) for i in range(2) for name, n in (("qkv", 3), ("out", 1))}
    weights = {f"{name}.weight": torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    weights |= {f"{name}.bias": torch.zeros(shapes[name][0]) for name in shapes if name not in ("token", "position")}
    whole_qkv = [whole(i, 2, heads, 1000, 16) for i, heads in enumerate((4, 2, 2))]
    return {
        "mesh": {"cp": ranks.mesh((2,), ("cp",))}, "torch": torch, "whole_qkv": whole_qkv, "weights": weights,
        "prompt": integers(256, 2, 50),
    }  # fmt: skip


def check_decoding(names: dict[str, Any]) -> None:
    q, k, v = names["whole_qkv"]
    dense = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    close(names["kept"][1]["out"], dense[:, :, 999:])
    own = names["own"]
    close(names["mine"], dense[:, :, own])
    model, tokens = names["model"], names["prompt"]
    with torch.no_grad():
        for _ in range(20):
            x = model.token(tokens) + model.position(torch.arange(tokens.shape[1]))
            for layer in model.layers:
                q, k, v = (y.unflatten(-1, (4, 16)).transpose(1, 2) for y in layer.qkv(x).chunk(3, dim=-1))
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                x = x + layer.out(out.transpose(1, 2).flatten(2))
            tokens = torch.cat([tokens, model.head(x)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(names["text"], tokens[:, 50:]) and len(set(names["text"].flatten().tolist())) > 10


def flex_names(rank: int) -> dict[str, Any]:
    whole_q, whole_k, whole_v = (whole(i, 2, 4, S, 8) for i in range(3))
    return mesh_names(rank) | {"torch": torch, "whole_q": whole_q, "whole_k": whole_k, "whole_v": whole_v}


def check_flex(names: dict[str, Any]) -> None:
    """Against plain broadcasting: the page's table and its images."""
    q, k, v, table = *(names[f"whole_{name}"] for name in "qkv"), names["table"]
    i, j = torch.arange(S)[:, None], torch.arange(S)
    mine = names["sequence"].positions()
    want = table.detach().requires_grad_()
    scores = q @ k.mT * 8**-0.5 + want[:, i - j + S]
    out = scores.masked_fill(i < j, -torch.inf).softmax(-1) @ v
    close(names["kept"][0]["out"], out[:, :, mine])
    out.sum().backward()
    close(table.grad, want.grad)
    images = names["images"]
    seen = (i >= j) | ((images[:, None] == images) & (images[:, None] >= 0))
    out = (q @ k.mT * 8**-0.5).masked_fill(~seen, -torch.inf).softmax(-1) @ v
    close(names["kept"][1]["out"], out[:, :, mine])
    documents = names["documents"]
    alike = (i >= j) & (documents[:, None] == documents)
    close(names["kept"][2]["out"], ((q @ k.mT * 8**-0.5).masked_fill(~alike, -torch.inf).softmax(-1) @ v)[:, :, mine])
    weight, share = torch.ones(8, dtype=q.dtype, requires_grad=True), names["weight"].grad
    scores = q @ k.mT * 8**-0.5 + F.logsigmoid(k @ weight)[:, :, None]
    out = scores.masked_fill(i < j, -torch.inf).softmax(-1) @ v
    close(names["kept"][3]["out"], out[:, :, mine])
    out.square().sum().backward()
    dist.all_reduce(share)
    close(share, weight.grad)
    out = (q @ k.mT * 8**-0.5 + want[:, i - j + S]).masked_fill(~seen, -torch.inf).softmax(-1) @ v
    close(names["kept"][4]["out"], out[:, :, mine])


def mesh_names(rank: int) -> dict[str, Any]:
    return {"mesh": {"cp": ranks.mesh((2,), ("cp",))}}


def verify_names(rank: int) -> dict[str, Any]:
    tokens, labels = integers(64, 2, 61), integers(64, 2, 61).roll(-1, 1)
    return mesh_names(rank) | {"Model": Model, "tokens": tokens, "labels": labels}


def check_verify(names: dict[str, Any]) -> None:
    """What is right passes; mistakes in the model of the page are found by the checks that it lists."""
    assert names["report"].passed and names["report"].verdict.startswith("RIGHT")
    own = names["own_report"]
    assert own.passed and {"far token", "loss of the logits", "gradients of ranks"} <= {x.check for x in own.findings}
    axis, labels = names["mesh"]["cp"], names["labels"][:, :60]
    mistakes = {
        "far token": {"all_gather": lambda part, group: [part, part]},
        "loss of the logits": {"labels": names["labels"].roll(7 * axis.get_local_rank(), 1)},
        "gradients of ranks": {"DistributedDataParallel": lambda model, **options: model},
    }
    for check, mistake in mistakes.items():
        with mock.patch.dict(names, mistake), pytest.raises(cp_mesh.tools.VerificationError) as caught:
            cp_mesh.verify_model(
                names["own_model"],
                lambda model: names["DistributedDataParallel"](model, process_group=names["group"]),
                {"tokens": names["tokens"][:, :60], "labels": labels},
                axis,
                loss=lambda model, batch: names["own_loss"](model, batch | {"labels": names["labels"][:, :60]}),
                rows=names["mine"],
                total="mean",
                reference=False,
            )
        wrong = {finding.check for finding in caught.value.report.findings if not finding.passed}
        assert check in wrong, (check, str(caught.value))


def migrating_names(rank: int) -> dict[str, Any]:
    """Rows as other packages cut them, by the formulas of their sources: [B, S, H, D], or packed [T, H, D]."""
    whole_qkv, lengths = [whole(i, 2, S, 4 if i == 0 else 2, 8) for i in range(3)], [12, 4, 48]
    chunks = [x.chunk(4, dim=1) for x in whole_qkv]
    packed = [x[0] for x in whole_qkv]
    cut = [[part.chunk(4) for part in x.split(lengths)] for x in packed]
    mesh = {"cp": ranks.mesh((2,), ("cp",))}
    return {
        "mesh": mesh, "group": mesh["cp"].get_group(), "whole_qkv": whole_qkv, "lengths": lengths,
        "cu_seqlens": torch.tensor([0, 12, 16, S]), "sinks": whole(9, 4),
        "local_qkv": [torch.cat([x[rank], x[3 - rank]], 1) for x in chunks],  # of test_zigzag_ring_flash_attn_func.py
        "striped_qkv": [x[:, rank::2] for x in whole_qkv],  # of test_stripe_flash_attn_func.py
        "contiguous_qkv": [x.chunk(2, dim=1)[rank] for x in whole_qkv],
        "packed_qkv": [x.chunk(2)[rank] for x in packed],
        "varlen_qkv": [torch.cat([y for part in x for y in (part[rank], part[3 - rank])]) for x in cut],
        "q": whole_qkv[0].transpose(1, 2).contiguous(),  # with as many heads as keys
        **{"kv"[i]: x.transpose(1, 2).repeat_interleave(2, 1) for i, x in enumerate(whole_qkv[1:])},
    }  # fmt: skip


def check_migrating(names: dict[str, Any]) -> None:
    rank, q, k, v = dist.get_rank(), *(x.transpose(1, 2) for x in names["whole_qkv"])
    packed = cp_mesh.Mask(documents=torch.tensor([0] * 12 + [1] * 4 + [2] * 48).expand(2, S))

    def rows(found: Tensor, layout: cp_mesh.Layout, mask: cp_mesh.Mask, **scores: Any) -> None:
        own = layout.positions(S, 2, rank)
        dense = attend(q, k, v, mask, **scores).transpose(1, 2)[:, own]
        close(found if found.ndim == 4 else found[None], dense if found.ndim == 4 else dense[:1])

    close(names["out"], attend(q, k, v, cp_mesh.Mask()))
    window, zigzag = cp_mesh.Mask(window=(15, 0)), cp_mesh.ZigZag()
    rows(names["zigzag"], zigzag, window)
    rows(names["stripe"], cp_mesh.Striped(), cp_mesh.Mask())
    rows(names["varlen"], names["per_document"](names["lengths"], 2, True), packed)
    rows(names["llama3"], cp_mesh.Contiguous(), packed)
    rows(names["ulysses"], cp_mesh.Contiguous(), cp_mesh.Mask())
    rows(names["te"], zigzag, window, sinks=names["sinks"])
    rows(names["hybrid"], zigzag, cp_mesh.Mask())
    contiguous = names["per_document"](names["lengths"], 2, False).positions(S, 2, rank)
    parts = [part.chunk(2)[rank] for part in torch.arange(S).split(names["lengths"])]
    assert torch.equal(contiguous, torch.cat(parts))  # of test_ring_flash_attn_varlen_func.py


def long_names(rank: int) -> dict[str, Any]:
    """A model without its head, and 61 tokens."""
    mesh = ranks.mesh((2,), ("cp",))
    model, text = llama.Llama(llama.LlamaConfig(64, 32, 2, 4, 2), core=llama.CoreAttention), integers(64, 2, 62)
    model.init_weights(0)
    head, model.output = model.output, nn.Identity()  # type: ignore[assignment]
    twin = copy.deepcopy((model, head))
    sequence = cp_mesh.ShardedSequence(mesh, length=61)
    plan = {"": cp_mesh.ShardedModel(sequence), "layers.*.attention.core": cp_mesh.ContextParallel(sequence)}
    cp_mesh.parallelize(model, mesh, plan)
    torch.manual_seed(0)  # the same teacher on every rank
    return {
        "mesh": {"cp": mesh}, "sequence": sequence, "model": model, "head": head, "twin": twin,
        "tokens": text[:, :-1], "labels": text[:, 1:],
        "teacher": lambda tokens: sequence.shard(torch.eye(64)[tokens]), "teacher_head": nn.Linear(64, 64, False),
    }  # fmt: skip


def check_long(names: dict[str, Any]) -> None:
    (model, head), weight = names["twin"], names["teacher_head"].weight.detach()
    logits, soft = head(model(names["tokens"])).flatten(0, 1), weight.t()[names["tokens"]].flatten(0, 1)
    total = names["distilled"].detach().clone()
    dist.all_reduce(total)
    close(total, F.cross_entropy(logits.detach() / 2, (soft / 2).softmax(-1)), 1e-5)
    expected = F.cross_entropy(logits, names["labels"].flatten())
    expected.backward()
    loss = names["loss"].detach().clone()
    dist.all_reduce(loss)
    close(loss, expected.detach(), 1e-5)
    found = [*names["model"].parameters(), *names["head"].parameters()]
    for x, y in zip(found, [*model.parameters(), *head.parameters()], strict=True):
        dist.all_reduce(x.grad)
        close(x.grad, y.grad, 1e-5 * float(y.grad.abs().max()))


def pipelining_names(rank: int) -> dict[str, Any]:
    mesh = ranks.mesh((2, 1, 2), ("pp", "dp", "cp"))
    model, number = llama.Llama(llama.LlamaConfig(64, 32, 2, 4, 2), core=llama.CoreAttention), rank // 2
    model.init_weights(0)
    text, documents = integers(64, 4, 62), torch.arange(61).expand(4, 61) // 20
    return {
        "mesh": mesh, "seq_len": 61, "num_stages": 2, "device": torch.device("cpu"), "losses": [],
        "documents": documents, "positions": torch.arange(61).expand(4, 61) % 20, "tokens": text[:, :-1],
        "labels": text[:, 1:], "count": 4 * 61,
        "twin": copy.deepcopy(model), "stage": llama.Stage(model, range(number, number + 1)),
    }  # fmt: skip


def check_pipelining(names: dict[str, Any]) -> None:
    twin = names["twin"]
    for layer in twin.layers:
        layer.attention.core = llama.DenseDocumentAttention()
    logits = twin(names["tokens"], names["positions"], names["documents"])
    expected = F.cross_entropy(logits.flatten(0, 1), names["labels"].flatten())
    expected.backward()
    norm = nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    close(names["norm"], norm, 1e-5 * float(norm))
    if names["number"] == 1:
        loss = torch.stack(names["losses"]).detach().sum()
        dist.all_reduce(loss, group=names["data"].get_group())
        close(loss, expected.detach(), 1e-5)


def guard_names(rank: int) -> dict[str, Any]:
    model = llama.Llama(llama.LlamaConfig(64, 32, 2, 4, 2), core=llama.CoreAttention)
    model.init_weights(0)
    return {"mesh": ranks.mesh((1, 2), ("dp", "cp")), "model": model, "tokens": integers(64, 2, 64)}


def check_guard(names: dict[str, Any]) -> None:
    assert names["skipped"] == ""


def linears_names(rank: int) -> dict[str, Any]:
    model, text = llama.Llama(llama.LlamaConfig(64, 32, 2, 4, 2), core=llama.CoreAttention), integers(64, 2, 65)
    model.init_weights(0)
    return {
        "mesh": ranks.mesh((1, 2, 2), ("dp", "cp", "tp")), "seq_len": S, "model": model, "twin": copy.deepcopy(model),
        "text": text, "tokens": text[:, :-1], "labels": text[:, 1:],
    }  # fmt: skip


def check_linears(names: dict[str, Any]) -> None:
    twin, text = names["twin"], names["text"]
    assert names["by_hand"].keys() == names["plan"].keys()
    for key, style in names["by_hand"].items():
        made = names["plan"][key]
        assert isinstance(made, type(style)) and getattr(made, "names", ()) == getattr(style, "names", ())
    expected = twin(text[:, :-1])
    loss = F.cross_entropy(expected.flatten(0, 1), text[:, 1:].flatten())
    loss.backward()
    close(names["logits"], names["sequence"].shard(expected.detach()), 1e-4)
    own = names["loss"].detach().clone()
    dist.all_reduce(own, group=names["data"].get_group())
    close(own, loss.detach(), 1e-5)
    names["model"].reshard()  # after the last forward
    for found, parameter in zip(names["model"].parameters(), twin.parameters(), strict=True):
        close(found.grad.full_tensor(), parameter.grad, 1e-5 * float(parameter.grad.abs().max()))


class MixerModel(nn.Module):
    """With one recurrent layer, in the words of docs/mixers.md."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixer = MixerModel.Mixer()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.mixer(x)

    class Mixer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            rows = F.normalize(x.unflatten(-1, (2, 4)), dim=-1)
            return cp_mesh.mixers.gla(rows, rows, rows)[0].flatten(2)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(5, 8), nn.Sequential(MixerModel.Layer(), MixerModel.Layer())

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(self.embed(tokens))


def mixer_names(rank: int) -> dict[str, Any]:
    made = torch.Generator().manual_seed(0)
    shapes = {"q": (2, 16, 2, 4), "k": (2, 16, 2, 4), "v": (2, 16, 4, 8), "g": (2, 16, 4), "beta": (2, 16, 4)}
    found = {name: torch.rand(*shape, generator=made) - 0.5 for name, shape in shapes.items()}
    found |= {"whole_labels": torch.arange(32).reshape(2, 16), "weight": torch.rand(6, 4, generator=made)}
    axes = ranks.mesh((2,), ("cp",))
    sequence = cp_mesh.ShardedSequence(axes, length=16)
    found |= {"labels": sequence.shard(found["whole_labels"]), "x": torch.rand(2, 8, 6, generator=made)}
    documents = torch.tensor([0] * 5 + [1] * 11)
    torch.manual_seed(0)
    found |= {"model": MixerModel(), "plain": None, "tokens": torch.arange(32).view(2, 16) % 5}
    found["plain"] = copy.deepcopy(found["model"])
    return found | {"mesh": {"cp": axes}, "documents": documents}


def check_mixers(names: dict[str, Any]) -> None:
    whole = torch.cat([names["whole_labels"][:, 1:], torch.full((2, 1), -100)], 1)
    whole[:, 4] = -100  # the last token of the first document
    assert torch.equal(names["sequence"].unshard(names["labels"]), whole)
    assert names["out"].shape == (2, 8, 4, 8) and names["x"].shape == (2, 8, 6)
    parts = [names["plain"](names["tokens"][:, at]) for at in (slice(5), slice(5, None))]
    close(names["sequence"].unshard(names["model"](names["tokens"])), torch.cat(parts, 1), 1e-5)


PAGES = {
    "README.md": Page(2, check=check_readme),
    "docs/index.md": Page(2, check=check_index),
    "docs/concepts.md": Page(1),
    "docs/support.md": Page(1),
    "docs/kernels.md": Page(1),
    "docs/masks.md": Page(2, recipe_names, check_masks),
    "docs/packed.md": Page(2, packed_names, check_packed),
    "docs/flex.md": Page(2, flex_names, check_flex),
    "docs/decoding.md": Page(2, decoding_names, check_decoding),
    "docs/guard.md": Page(2, guard_names, check_guard),
    "docs/gradients.md": Page(2, gradient_names, check_gradients),
    "docs/mathematics.md": Page(2, mesh_names),
    "docs/verify.md": Page(2, verify_names, check_verify),
    "docs/performance.md": Page(1),
    "docs/extending.md": Page(2, mesh_names),
    "docs/design.md": Page(1),
    "docs/api.md": Page(1),
    "docs/migrating.md": Page(2, migrating_names, check_migrating),
    "docs/mixers.md": Page(2, mixer_names, check_mixers),
    "docs/long.md": Page(2, long_names, check_long),
    "docs/linears.md": Page(4, linears_names, check_linears),
    "docs/pipelining.md": Page(4, pipelining_names, check_pipelining),
}
ELSEWHERE = {"docs/transformers.md", "docs/trainer.md", "docs/diffusers.md", "docs/torchtitan.md"}
"""Pages of other packages, whose code runs in tests/integrations."""
NOT_RUN = [("docs/kernels.md", "warm_up"), ("docs/performance.md", "CUDAGraph")]
"""Blocks that need a GPU: page and a word of each. `test_warming.py` and `test_symmetric_memory.py` do the same."""


def run_page(rank: int, name: str) -> None:
    """Runs the blocks of a page in order, in one namespace, and compares what they print with what the page shows."""
    page, path = PAGES[name], NAMES[name]
    names: dict[str, Any] = {"__name__": "__main__", "kept": []} | page.names(rank)
    known = dict(LAYOUTS)
    printed = ""
    environment = mock.patch.dict(os.environ, {"WORLD_SIZE": str(page.world_size)})  # as torchrun sets it
    # The processes live on: a script that ends its group, as scripts do, must not end that of the tests.
    with environment, mock.patch.object(dist, "destroy_process_group"):
        try:
            for block in blocks(path, "python", "text"):
                if block.language == "text":
                    if printed:
                        assert block.code == printed, f"{name}:{block.line} shows something else than is printed"
                    printed = ""
                elif not block.code.startswith(NEEDS_A_GPU):
                    # lines as in the document, for tracebacks
                    code = compile("\n" * (block.line - 1) + block.code, str(path), "exec")
                    with contextlib.redirect_stdout(io.StringIO()) as out:
                        exec(code, names)
                    names["kept"].append({key: names[key] for key in ("out", "logits", "local_labels") if key in names})
                    printed = out.getvalue()
            page.check(names)
        finally:
            LAYOUTS.clear()
            LAYOUTS.update(known)


def test_every_page_with_code_is_run() -> None:
    assert {name for name, path in NAMES.items() if blocks(path, "python")} == set(PAGES) | ELSEWHERE
    left_out = [
        (name, block.code) for name in PAGES for block in blocks(NAMES[name], "python") if NEEDS_A_GPU in block.code
    ]
    assert len(left_out) == len(NOT_RUN)
    for (name, code), (page, word) in zip(left_out, NOT_RUN, strict=True):
        assert name == page and word in code
        compile(code, name, "exec")


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.quick(
    "docs/index.md", "docs/masks.md", "README.md", "docs/decoding.md", "docs/linears.md", "docs/kernels.md"
)
def test_code_of_the_documents_runs(name: str, pool: Callable[..., ranks.Pool]) -> None:
    pool(PAGES[name].world_size).run(run_page, name, timeout=120)


def test_pages_are_short() -> None:
    """In words, as ``wc -w`` counts them."""
    words = {name: len((ROOT / name).read_text().split()) for name in ("README.md", *navigation())}
    assert words.pop("README.md") <= 500
    assert sum(words.values()) <= 19_000, words


@pytest.mark.parametrize("name", ["README.md", *navigation()])
def test_code_lines_fit(name: str) -> None:
    """In the site's column, which 88 characters fill."""
    inside, wide = False, []
    for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            inside = not inside
        elif inside and len(line) > 88:
            wide.append(f"{name}:{number}: {len(line)} columns")
    assert not wide


def test_example_of_readme_is_a_file() -> None:
    example = (ROOT / "examples" / "minimal.py").read_text()
    assert [block.code for block in blocks(ROOT / "README.md", "python")] == [example]
    assert sum(bool(line) for line in example.splitlines()) <= 30


def test_support_says_what_is_refused(pool: Callable[..., ranks.Pool]) -> None:
    """What docs/support.md says is refused for now; whoever builds one of these finds the page here."""
    for refused in pool(2).run(refusals):
        assert all(kind == "UnsupportedError" for kind in refused.values()), refused


def refusals(rank: int) -> dict[str, str]:
    mesh = ranks.mesh((2,), ("cp",))
    q, k, v = (whole(i, 1, 2, 8, 8) for i in range(3))
    found = {}
    try:
        cp_mesh.attention(q[:, :, :1], k, v, mesh=mesh)
        found["fewer queries than keys"] = "nothing"
    except Exception as error:
        found["fewer queries than keys"] = type(error).__name__
    try:
        keep = torch.tensor([True] * 5 + [False] * 3)
        cp_mesh.inference.decode(q[:, :, :1], k, v, mesh=mesh, mask=cp_mesh.Mask(key_padding=keep))
        found["rows of unequal lengths"] = "nothing"
    except Exception as error:
        found["rows of unequal lengths"] = type(error).__name__
    return found
