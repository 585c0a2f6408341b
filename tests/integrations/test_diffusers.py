"""Transformers of diffusers on ranks, against their own code on one rank: output and every gradient, in fp64."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

diffusers = pytest.importorskip("diffusers")

from diffusers import FluxTransformer2DModel, WanTransformer3DModel  # noqa: E402
from diffusers.models import attention_dispatch  # noqa: E402
from diffusers.models.transformers import transformer_flux, transformer_wan  # noqa: E402
from diffusers.models.transformers.transformer_flux import (  # noqa: E402
    FluxAttnProcessor,
    FluxIPAdapterAttnProcessor,
)
from inside import room  # noqa: E402
from ranks import mesh, on_ranks, refused  # noqa: E402
from scripts import blocks  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from cp_mesh import ArgumentError, attention, sum_gradients  # noqa: E402
from cp_mesh.integrations.diffusers import parallelize  # noqa: E402

integration = room("diffusers")

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


def target_of(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def learn(model: nn.Module, given: dict[str, Tensor], other: dict[str, Tensor] | None = None) -> dict[str, Any]:
    """Whole output, and gradients of a loss that every rank computes alike; of parameters and of text and image.

    ``other``: inputs of a forward between this one and its backward.
    """
    leaves = {name: given[name].clone().requires_grad_() for name in ("hidden_states", "encoder_hidden_states")}
    (output,) = model(**(given | leaves), return_dict=False)
    if other is not None:
        model(**other)
    nn.functional.mse_loss(output, target_of(*output.shape)).backward()
    return {"output": output.detach()} | {name: x.grad for name, x in (*model.named_parameters(), *leaves.items())}


def apart(ours: Tensor, theirs: Tensor, least: float = 1e-12) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=least)).item()


SIZES = {
    "flux": [(6, 3, 4), (5, 3, 3)],
    "wan": [(1, 3, 2), (3, 3, 1)],
    "wan, a timestep a token": [(1, 3, 2), (7, 1, 1)],
}
"""Lengths that ranks divide, and others."""


def compare(kind: str, found: dict[str, Tensor | None], wanted: dict[str, Tensor | None]) -> None:
    """Outputs and gradients, relative to the largest numbers; of small gradients to a part of the largest of all."""
    present = {name: x for name, x in wanted.items() if x is not None}
    assert len(present) > 30 and present.keys() == {name for name, x in found.items() if x is not None}
    largest = max(x.abs().max().item() for name, x in present.items() if name != "output")
    off = {name: apart(found[name], x, 1e-12 if name == "output" else 1e-3 * largest) for name, x in present.items()}
    assert not {name: x for name, x in off.items() if not x < BOUNDS[kind]}


CASES = [(kind, sizes, n, False) for kind, several in SIZES.items() for sizes in several for n in (2, 3)]
CASES += [(kind, several[1], 2, True) for kind, several in SIZES.items()]


@pytest.mark.parametrize(("kind", "sizes", "num_ranks", "checkpointed"), CASES)
@on_ranks("num_ranks")
def test_models(axis: Any, kind: str, sizes: tuple[int, ...], checkpointed: bool) -> None:
    """With checkpoints a block is computed again after a forward of other lengths."""
    given = inputs(kind, sizes)
    model = parallelize(build(kind), axis)
    if checkpointed:
        model.enable_gradient_checkpointing()
    found = learn(model, given, other=inputs(kind, SIZES[kind][0]) if checkpointed else None)
    for name in found.keys() - {"output"}:
        if found[name] is not None:
            dist.all_reduce(found[name])
    compare(kind, found, learn(build(kind), given))


def trained(kind: str, watch: bool = True, summing: bool = True) -> None:
    """Gradients under FSDP2 over dp x cp, of a loss that is this dp rank's share; or without a sum over the ranks."""
    dp = dist.get_world_size() // 2
    whole, given = mesh((dp, 2), ("dp", "cp")), inputs(kind, SIZES[kind][1])
    data, place = whole["dp", "cp"]._flatten("data"), whole["dp"].get_local_rank()
    model = parallelize(build(kind), whole["cp"], watch=watch)
    rows = slice(None) if dp == 1 else slice(place, place + 1)
    own = {name: x if name in ("img_ids", "txt_ids") else x[rows] for name, x in given.items()}
    if summing:
        for block in model.modules():
            if "TransformerBlock" in type(block).__name__:
                fully_shard(block, mesh=data)
        sum_gradients(fully_shard(model, mesh=data))
    (output,) = model(**own, return_dict=False)
    (nn.functional.mse_loss(output, target_of(B, *output.shape[1:])[rows]) / dp).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    if summing:
        wanted = {name: x for name, x in learn(build(kind), given).items() if name in dict(model.named_parameters())}
        compare(
            kind, {name: x.grad.full_tensor() for name, x in model.named_parameters() if x.grad is not None}, wanted
        )


@pytest.mark.parametrize(("kind", "num_ranks"), [("flux", 2), pytest.param("wan", 4, marks=pytest.mark.full)])
@on_ranks("num_ranks")
def test_fsdp(kind: str) -> None:
    trained(kind)


@pytest.mark.filterwarnings("ignore:cp_mesh")
@on_ranks(2)
def test_gradients_that_nobody_sums_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"gradients of.* equal on all ranks before the optimizer steps"):
        trained("flux", summing=False)
    trained("flux", watch=False, summing=False)


@on_ranks(2)
def test_options_are_those_of_attention(axis: Any) -> None:
    """And beside a parallel model a plain one computes what it did before."""
    options: dict[str, Any] = {"kernel": "reference", "method": "hybrid", "ulysses_degree": 2, "head_chunks": 3}
    options |= {"transport": "functional", "deterministic": True}
    given, plain = inputs("flux", (6, 3, 4)), build("flux", 1)
    before = plain(**given).sample
    model = parallelize(build("flux", 1), axis, **options)
    with mock.patch.object(integration, "attention", wraps=attention) as attend:
        model(**given)
    assert plain(**given).sample.equal(before)
    assert {name: attend.call_args.kwargs.get(name) for name in options} == options
    with pytest.raises(ArgumentError, match="method: expected"):
        parallelize(build("flux", 1), axis, method="rings")(**given)


@on_ranks(2)
def test_nothing_of_diffusers_is_changed(axis: Any) -> None:
    """Nor a model that gets processors of its own, after a model was parallel."""
    kinds = {"flux": (transformer_flux, FluxAttnProcessor), "wan": (transformer_wan, transformer_wan.WanAttnProcessor)}

    def held() -> dict[str, Any]:
        found = {f"backend {name}": x for name, x in attention_dispatch._AttentionBackendRegistry._backends.items()}
        for kind, (file, processor) in kinds.items():
            found |= {f"dispatch of {kind}": file.dispatch_attention_fn, f"call of {kind}": processor.__call__}
        return found

    before = held()
    for kind, (_, processor) in kinds.items():
        given, model = inputs(kind, SIZES[kind][0]), build(kind)
        want = build(kind)(**given).sample
        model = copy.deepcopy(parallelize(model, axis))
        assert apart(model(**given).sample, want) < BOUNDS[kind]
        again = build(kind)
        again.load_state_dict(model.state_dict())
        assert again(**given).sample.equal(want)
        own = [module.processor for module in model.modules() if hasattr(module, "processor")]
        assert all(isinstance(x, processor) and type(x) is not processor for x in own)
    after = held()
    assert not [name for name in before if before[name] is not after[name]]


@on_ranks(2)
def test_refused_models(axis: Any) -> None:
    adapted, backend, parallel = (build("flux", 1) for _ in range(3))
    adapter = FluxIPAdapterAttnProcessor(hidden_size=72, cross_attention_dim=16)
    adapted.transformer_blocks[0].attn.set_processor(adapter)
    backend.set_attention_backend("_native_math")
    tries = {
        "one of FluxTransformer2DModel, WanTransformer3DModel": nn.Linear(1, 1),
        "FluxIPAdapterAttnProcessor; IP adapters": adapted,
        "attention backend native": backend,
        "call parallelize alone, and once": parallelize(parallel, axis),
    }
    for words, model in tries.items():
        with refused(re.escape(words)):
            parallelize(model, axis)


@on_ranks(2)
def test_refused_calls(axis: Any) -> None:
    given = inputs("flux", (6, 3, 4))
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
    attend = functools.partial(integration.attend, q, q, q, parallel_config=own)
    tries: dict[str, Callable[[], Any]] = {
        "img_ids: expected 2 dims": lambda: model(**given | {"img_ids": given["img_ids"][None]}),
        "controlnet_block_samples": lambda: model(**given, controlnet_block_samples=[q]),
        "attn_mask: expected None": lambda: model(**given, joint_attention_kwargs={"attention_mask": mask}),
        "is_causal": lambda: attend(is_causal=True),
        "dropout_p": lambda: attend(dropout_p=0.1),
        "return_lse": lambda: attend(attention_kwargs={"return_lse": True}),
        "encoder_hidden_states whole": lambda: without_text(**given),
    }
    for words, call in tries.items():
        with refused(words):
            call()
    model.transformer_blocks[0].attn.set_processor(FluxAttnProcessor())
    with pytest.raises(ArgumentError, match="expected 2 calls of attention over all ranks, got 1"):
        model(**given)


@on_ranks(2)
def test_the_page_runs() -> None:
    whole, given = mesh((1, 2), ("dp", "cp")), inputs("flux", (6, 3, 4))
    names: dict[str, Any] = {
        "transformer": build("flux"), "mesh": whole, "data": whole["dp", "cp"]._flatten("dp_cp"), "dp": 1,
        "inputs": given, "target": target_of(B, 12, 4), "fully_shard": fully_shard, "F": nn.functional,
    }  # fmt: skip
    for block in blocks("diffusers"):
        exec(block, names)
    wanted = learn(build("flux"), given)
    assert apart(names["output"], wanted["output"]) < 1e-12
    for name, x in names["transformer"].named_parameters():
        assert apart(x.grad.full_tensor(), wanted[name], 1e-3) < 1e-12, name
