"""Transformers of diffusers on ranks, against their own code on one rank: output and every gradient, in fp64."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

diffusers = pytest.importorskip("diffusers")

from checks import report  # noqa: E402
from diffusers import FluxTransformer2DModel, WanTransformer3DModel  # noqa: E402
from diffusers.models import attention_dispatch  # noqa: E402
from diffusers.models.transformers import transformer_flux, transformer_wan  # noqa: E402
from diffusers.models.transformers.transformer_flux import (  # noqa: E402
    FluxAttnProcessor,
    FluxIPAdapterAttnProcessor,
)
from inside import room  # noqa: E402
from ranks import RankFailure, mesh, num_collectives  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from cp_mesh import ArgumentError, UnsupportedError, attention, sum_gradients  # noqa: E402
from cp_mesh.integrations.diffusers import parallelize  # noqa: E402

integration = room("diffusers")

ROOT = Path(__file__).resolve().parents[2]

BOUNDS = {"flux": 1e-12, "wan": 1e-6, "wan, a timestep a token": 1e-6}
"""Of differences relative to the largest number. Wan computes its last norm in float32, whatever the dtype."""
B = 2


def build(kind: str, layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    if kind == "flux":
        model = FluxTransformer2DModel(
            in_channels=4, num_layers=layers, num_single_layers=layers, attention_head_dim=12, num_attention_heads=6,
            joint_attention_dim=16, pooled_projection_dim=8, guidance_embeds=True, axes_dims_rope=(4, 4, 4),
        )  # fmt: skip
    else:
        model = WanTransformer3DModel(
            num_attention_heads=6, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=8,
            ffn_dim=32, num_layers=layers,
        )  # fmt: skip
    for parameter in model.parameters():  # among them those that begin as 0 or 1
        nn.init.normal_(parameter, std=0.15)
    return model.double()


def inputs(kind: str, sizes: tuple[int, ...]) -> dict[str, Tensor]:
    """Whole inputs. Sizes of Flux: text, rows and columns of the image; of Wan: frames, rows and columns of patches."""
    torch.manual_seed(1)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    if kind == "flux":
        text, *image = sizes
        places = torch.cartesian_prod(torch.arange(1), *(torch.arange(n) for n in image)).double()
        return {
            "hidden_states": numbers(B, len(places), 4), "encoder_hidden_states": numbers(B, text, 16),
            "pooled_projections": numbers(B, 8), "timestep": torch.tensor([0.3, 0.8]), "img_ids": places,
            "txt_ids": torch.zeros(text, 3).double(), "guidance": torch.tensor([3.5, 1.0]),
        }  # fmt: skip
    frames, rows, columns = sizes
    timestep = torch.tensor([300, 800])
    if kind != "wan":
        timestep = timestep[:, None] - torch.arange(frames * rows * columns)
    return {
        "hidden_states": numbers(B, 4, frames, 2 * rows, 2 * columns), "timestep": timestep,
        "encoder_hidden_states": numbers(B, 7, 16),
    }  # fmt: skip


def learn(
    model: nn.Module, given: dict[str, Tensor], other: dict[str, Tensor] | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Whole output, and gradients of a loss that every rank computes alike; of parameters and of text and image.

    ``other``: inputs of a forward between this one and its backward.
    """
    leaves = {name: given[name].clone().requires_grad_() for name in ("hidden_states", "encoder_hidden_states")}
    (output,) = model(**(given | leaves), return_dict=False)
    target = torch.randn(output.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    if other is not None:
        model(**other)
    nn.functional.mse_loss(output, target).backward()
    return output.detach(), {name: x.grad for name, x in (*model.named_parameters(), *leaves.items())}


def apart(ours: Tensor, theirs: Tensor, least: float = 1e-12) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=least)).item()


def compare(rank: int, kind: str, sizes: tuple[int, ...], checkpointed: bool = False, **options: Any) -> list[str]:
    given = inputs(kind, sizes)
    want, wanted = learn(build(kind), given)
    model = parallelize(build(kind), mesh((dist.get_world_size(),), ("cp",)), **options)
    if checkpointed:
        model.enable_gradient_checkpointing()
    got, grads = learn(model, given, other=inputs(kind, SIZES[kind][0]) if checkpointed else None)
    assert all((x is None) == (grads[name] is None) for name, x in wanted.items())
    found = {"output": apart(got, want)}
    largest = max(x.abs().max().item() for x in wanted.values() if x is not None)
    for name, x in wanted.items():
        if x is not None:
            dist.all_reduce(grads[name])
            found[name] = apart(grads[name], x, 1e-3 * largest)
    assert len(found) > 30
    return [f"{kind} {sizes}: {name} is off by {x:.1e}" for name, x in found.items() if not x < BOUNDS[kind]]


SIZES = {
    "flux": [(6, 3, 4), (5, 3, 3)],
    "wan": [(1, 3, 2), (3, 3, 1)],
    "wan, a timestep a token": [(1, 3, 2), (7, 1, 1)],
}
"""Lengths that ranks divide, and others."""


@pytest.mark.parametrize("num_ranks", (2, 3))
@pytest.mark.parametrize(("kind", "sizes"), [(kind, sizes) for kind, several in SIZES.items() for sizes in several])
def test_models(pool: Any, kind: str, sizes: tuple[int, ...], num_ranks: int) -> None:
    report(pool(num_ranks).run(compare, kind, sizes))


@pytest.mark.parametrize("kind", SIZES)
def test_checkpointing(pool: Any, kind: str) -> None:
    """A block is computed again after a forward of other lengths."""
    report(pool(2).run(compare, kind, SIZES[kind][1], True))


def trained(rank: int, kind: str, watch: bool, summing: bool) -> list[str]:
    """Gradients under FSDP2 over dp x cp, of a loss that is this dp rank's share; or without a sum over the ranks."""
    dp = dist.get_world_size() // 2
    whole = mesh((dp, 2), ("dp", "cp"))
    data, given = whole["dp", "cp"]._flatten(f"dp_cp_{kind[:4]}"), inputs(kind, SIZES[kind][1])
    _, wanted = learn(build(kind), given)
    model = parallelize(build(kind), whole["cp"], watch=watch)
    rows = slice(None) if dp == 1 else slice(rank // 2, rank // 2 + 1)
    own = {name: x if name in ("img_ids", "txt_ids") else x[rows] for name, x in given.items()}
    if summing:
        for block in model.modules():
            if "TransformerBlock" in type(block).__name__:
                fully_shard(block, mesh=data)
        fully_shard(model, mesh=data)
        sum_gradients(model)
    (output,) = model(**own, return_dict=False)
    target = torch.randn(B, *output.shape[1:], generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (nn.functional.mse_loss(output, target[rows]) / dp).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        optimizer.step()
    except ArgumentError as error:
        return [str(error)]
    if not summing:
        return []
    largest = max(x.abs().max().item() for x in wanted.values() if x is not None)
    found = {name: x.grad.full_tensor() for name, x in model.named_parameters() if x.grad is not None}
    problems = {name: apart(x, wanted[name], 1e-3 * largest) for name, x in found.items()}
    assert len(problems) > 30
    return [f"{name} is off by {x:.1e}" for name, x in problems.items() if not x < BOUNDS[kind]]


@pytest.mark.parametrize(("kind", "num_ranks"), [("flux", 2), pytest.param("wan", 4, marks=pytest.mark.full)])
def test_fsdp(pool: Any, kind: str, num_ranks: int) -> None:
    report(pool(num_ranks).run(trained, kind, True, True))


@pytest.mark.filterwarnings("ignore:cp_mesh")
def test_gradients_that_nobody_sums_are_refused(pool: Any) -> None:
    for (said,) in pool(2).run(trained, "flux", True, False):
        assert "gradients of" in said and "equal on all ranks before the optimizer steps" in said
    report(pool(2).run(trained, "flux", False, False))


def asked(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    """The keywords of attention in a parallel model; beside it a plain model computes what it did before."""
    given, plain = inputs("flux", (6, 3, 4)), build("flux", 1)
    before = plain(**given).sample
    model = parallelize(build("flux", 1), mesh((2,), ("cp",)), **options)
    with mock.patch.object(integration, "attention", wraps=attention) as attend:
        model(**given)
    assert plain(**given).sample.equal(before)
    return {name: attend.call_args.kwargs.get(name) for name in options}


def unchanged(rank: int) -> list[str]:
    """What is another thing in diffusers, or in a model that gets processors of its own, after a model was parallel."""
    kinds = {"flux": (transformer_flux, FluxAttnProcessor), "wan": (transformer_wan, transformer_wan.WanAttnProcessor)}

    def held() -> dict[str, Any]:
        found = {f"backend {name}": x for name, x in attention_dispatch._AttentionBackendRegistry._backends.items()}
        for kind, (file, processor) in kinds.items():
            found |= {f"dispatch of {kind}": file.dispatch_attention_fn, f"call of {kind}": processor.__call__}
        return found

    problems, before = [], held()
    for kind, (_, processor) in kinds.items():
        given, model = inputs(kind, SIZES[kind][0]), build(kind)
        want = build(kind)(**given).sample
        model = copy.deepcopy(parallelize(model, mesh((2,), ("cp",))))
        problems += [f"{kind} is off"] * (apart(model(**given).sample, want) > BOUNDS[kind])
        again = build(kind)
        again.load_state_dict(model.state_dict())
        problems += [f"another {kind} is another"] * (not again(**given).sample.equal(want))
        attending = [module for module in model.modules() if hasattr(module, "processor")]
        own = [module.processor for module in attending]
        problems += [f"{x} of {kind}" for x in own if not isinstance(x, processor) or type(x) is processor]
    after = held()
    return problems + [name for name in before if before[name] is not after[name]]


def test_nothing_of_diffusers_is_changed(pool: Any) -> None:
    report(pool(2).run(unchanged))


def test_options_are_those_of_attention(pool: Any) -> None:
    options: dict[str, Any] = {"kernel": "reference", "method": "hybrid", "ulysses_degree": 2, "head_chunks": 3}
    options |= {"transport": "functional", "deterministic": True}
    assert pool(2).run(asked, options) == [options] * 2
    with pytest.raises(RankFailure, match="method: expected"):
        pool(2).run(asked, {"method": "rings"})


def of_models(rank: int) -> list[str]:
    """What is wrong with the refusals of models."""
    axis = mesh((2,), ("cp",))

    def adapted() -> nn.Module:
        model = build("flux", 1)
        processor = FluxIPAdapterAttnProcessor(hidden_size=72, cross_attention_dim=16)
        model.transformer_blocks[0].attn.set_processor(processor)
        return model

    def with_backend() -> nn.Module:
        model = build("flux", 1)
        model.set_attention_backend("_native_math")
        return model

    tries = {
        "one of FluxTransformer2DModel, WanTransformer3DModel": lambda: nn.Linear(1, 1),
        "FluxIPAdapterAttnProcessor; IP adapters": adapted,
        "attention backend native": with_backend,
        "call parallelize alone, and once": lambda: parallelize(build("flux", 1), axis),
    }
    return [x for words, make in tries.items() for x in refused(words, lambda make=make: parallelize(make(), axis))]


def refused(words: str, call: Callable[[], Any]) -> list[str]:
    before, said = num_collectives(), "nothing"
    try:
        call()
    except (ArgumentError, UnsupportedError) as error:
        said = str(error)
    return [f"{words}: {said}"] if words not in said or num_collectives() > before else []


def of_calls(rank: int) -> list[str]:
    """What is wrong with the refusals of calls."""
    axis, given = mesh((2,), ("cp",)), inputs("flux", (6, 3, 4))
    model = parallelize(build("flux", 1), axis)
    mask = torch.ones(B, 9, dtype=torch.bool)
    own = model.transformer_blocks[0].attn.processor._parallel_config
    own.lengths = {"hidden_states": 4, "encoder_hidden_states": 4}
    q = torch.randn(1, 4, 2, 4)
    without_text = build("flux", 1)
    plan = dict(without_text._cp_plan)
    plan[""] = {name: x for name, x in plan[""].items() if name not in ("encoder_hidden_states", "txt_ids")}
    without_text._cp_plan = plan
    parallelize(without_text, axis)
    tries: dict[str, Callable[[], Any]] = {
        "img_ids: expected 2 dims": lambda: model(**given | {"img_ids": given["img_ids"][None]}),
        "controlnet_block_samples": lambda: model(**given, controlnet_block_samples=[q]),
        "attn_mask: expected None": lambda: model(**given, joint_attention_kwargs={"attention_mask": mask}),
        "is_causal": lambda: integration.attend(q, q, q, is_causal=True, parallel_config=own),
        "dropout_p": lambda: integration.attend(q, q, q, dropout_p=0.1, parallel_config=own),
        "return_lse": lambda: integration.attend(q, q, q, attention_kwargs={"return_lse": True}, parallel_config=own),
        "encoder_hidden_states whole": lambda: without_text(**given),
    }
    problems = [said for words, call in tries.items() for said in refused(words, call)]
    model.transformer_blocks[0].attn.set_processor(FluxAttnProcessor())
    try:
        model(**given)
    except ArgumentError as error:
        return problems if "expected 2 calls of attention over all ranks, got 1" in str(error) else [str(error)]
    return [*problems, "a processor that was set later is not seen"]


@pytest.mark.parametrize("tries", (of_models, of_calls))
def test_what_is_refused(pool: Any, tries: Any) -> None:
    report(pool(2).run(tries))


def run_page(rank: int) -> list[str]:
    """The blocks of the page, in order."""
    whole, given, kept = mesh((1, 2), ("dp", "cp")), inputs("flux", (6, 3, 4)), []
    target = torch.randn(B, 12, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    names: dict[str, Any] = {
        "transformer": build("flux"), "mesh": whole, "data": whole["dp", "cp"]._flatten("dp_cp"), "dp": 1,
        "inputs": given, "target": target, "fully_shard": fully_shard, "F": nn.functional,
    }  # fmt: skip
    text = (ROOT / "docs" / "diffusers.md").read_text()
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        exec(block, names)
        kept.append(names["output"])
    want, wanted = learn(build("flux"), given)
    grads = [apart(x.grad.full_tensor(), wanted[name], 1e-3) for name, x in names["transformer"].named_parameters()]
    return [f"off by {x:.1e}" for x in (apart(names["output"], want), *grads) if not x < 1e-12]


def test_the_page_runs(pool: Any) -> None:
    report(pool(2).run(run_page))
