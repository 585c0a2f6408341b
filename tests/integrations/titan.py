"""torchtitan's own Trainer on ranks of gloo: what it needs to run on CPUs at all, and runs of a few steps.

Nothing here is about context parallelism, except that a `Run` may ask for cp_mesh.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import tempfile
import types
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

IGNORED = -100
SEQ_LEN, BATCH, STEPS, VOCABULARY = 96, 4, 4, 2048


@dataclass(frozen=True)
class Run:
    """A few steps of a debug model.

    Attributes:
        model: its name in torchtitan; and the attention backend, as in "gpt_oss varlen".
        cp, tp, shard, replicate: degrees.
        ours: whether `context_parallel` is applied.
        checkpoint: "none", "selective" or "full".
        compile: a backend, or None.
        documents: lengths of packed documents in a batch row, another order in every row; None: one document.
        options: of `context_parallel`.
        settings: other attributes of the configuration, by dotted name.
    """

    model: str = "llama3"
    cp: int = 1
    tp: int = 1
    shard: int = 1
    replicate: int = 1
    ours: bool = True
    checkpoint: str = "none"
    compile: str | None = None
    documents: tuple[int, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


@functools.cache
def on_cpus() -> None:
    """Let torchtitan, which is not yet imported, take the CPU for its device."""
    assert not any(name.startswith("torchtitan.") for name in sys.modules)
    device = types.ModuleType("cpu_as_a_device")
    device.__getattr__ = functools.partial(getattr, torch.cpu)  # type: ignore[method-assign]
    nothing = dict.fromkeys(("set_device", "reset_peak_memory_stats", "empty_cache", "synchronize"))
    vars(device).update({name: lambda *_: None for name in nothing})
    vars(device).update(current_device=lambda: 0, get_device_name=lambda *_: "cpu", memory_stats=lambda *_: {})
    vars(device).update(get_device_properties=lambda *_: types.SimpleNamespace(total_memory=1 << 34))
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda *_: device
    divided = FSDPModule.set_gradient_divide_factor

    def summed(self: FSDPModule, factor: float) -> None:
        divided(self, factor)
        self.set_force_sum_reduction_for_comms(True)  # gloo has no sum that multiplies first

    FSDPModule.set_gradient_divide_factor = summed  # type: ignore[method-assign]
    counts = torch.histc
    torch.histc = lambda x, **bounds: counts(x.float(), **bounds).to(x.dtype)  # of routers; CPUs count no integers
    torch.Tensor.bfloat16 = lambda x: x  # type: ignore[method-assign]  # experts ask for it in a model of any dtype
    if not hasattr(dist, "set_timeout"):  # which torchtitan 0.3 calls, and PyTorch 2.13 lacks
        dist.set_timeout = lambda *_, **__: None  # type: ignore[attr-defined]
    os.environ.setdefault("LOCAL_RANK", "0")


def batches(run: Run, rows: slice) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Steps of random tokens, labels that are the next tokens, and positions: rows of the global batch."""
    numbers = torch.Generator().manual_seed(1)
    lengths = run.documents or (SEQ_LEN,)
    positions = torch.stack(
        [torch.cat([torch.arange(n) for n in (*lengths[i:], *lengths[:i])]) for i in range(len(lengths))]
    )
    positions = positions[torch.arange(BATCH) % len(lengths)]
    while True:
        tokens = torch.randint(VOCABULARY, (BATCH, SEQ_LEN + 1), generator=numbers)
        labels = tokens[:, 1:].clone()
        labels[:, 5:9] = IGNORED
        yield {"input": tokens[rows, :-1], "positions": positions[rows]}, labels[rows]


class Batches:
    """A dataloader of `batches`."""

    def __init__(self, run: Run, dp_rank: int, dp_world_size: int) -> None:
        rows = BATCH // dp_world_size
        self.run, self.rows = run, slice(dp_rank * rows, (dp_rank + 1) * rows)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        return batches(self.run, self.rows)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def set_settings(config: Any, settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        *path, last = name.split(".")
        target = functools.reduce(getattr, path, config)
        assert hasattr(target, last), name
        setattr(target, last, value)


def common(run: Run) -> dict[str, Any]:
    """Settings of every run."""
    return {
        "training.local_batch_size": BATCH // (run.shard * run.replicate),
        "training.seq_len": SEQ_LEN,
        "training.steps": STEPS,
        "training.mixed_precision_param": "float32",
        "parallelism.data_parallel_shard_degree": run.shard,
        "parallelism.data_parallel_replicate_degree": run.replicate,
        "parallelism.context_parallel_degree": run.cp,
        "parallelism.tensor_parallel_degree": run.tp,
        "checkpoint.enable": False,
        "metrics.log_freq": 1,
        "compile.enable": run.compile is not None,
        "compile.backend": run.compile or "inductor",
    }


def config_of(run: Run) -> Any:
    """A Trainer.Config."""
    name, _, backend = run.model.partition(" ")
    models = importlib.import_module(f"torchtitan.models.{name}")
    config = getattr(importlib.import_module(f"torchtitan.models.{name}.config_registry"), f"{name}_debugmodel")()
    config.model_spec = models.model_registry("debugmodel", attn_backend=backend or "flex")
    return prepare(config, run)


def read(config: Any, loader: Callable[[int, int], Any]) -> None:
    """Give a configuration a dataloader, made from rank and size of dp, and no tokenizer."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer

    class Loader(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            def build(self, *, dp_rank: int, dp_world_size: int, **_: Any) -> Any:
                return loader(dp_rank, dp_world_size)

    class NoTokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            def build(self, **_: Any) -> None:
                return None

    config.dataloader, config.tokenizer = Loader.Config(), NoTokenizer.Config()


def prepare(config: Any, run: Run) -> Any:
    """The configuration with the settings of a run, and with cp_mesh or `Dense` where it asks so."""
    from torchtitan.config.override import _REGISTRY, override
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.models.common.attention import FlexAttention, VarlenAttention
    from torchtitan.protocols.module import Module

    from cp_mesh.integrations.torchtitan import context_parallel

    class Dense(Module):
        """Attention with a mask of pairs, for one rank: FlexAttention has no backward on CPUs."""

        @dataclass(kw_only=True, slots=True)
        class Config(Module.Config):
            pass

        def __init__(self, config: Any) -> None:
            super().__init__()

        def forward(
            self,
            q_BLNH: Tensor,
            k_BLNH: Tensor,
            v_BLNH: Tensor,
            *,
            attention_masks: Tensor,
            scale: float | None = None,
            enable_gqa: bool = False,
            out_transform: Any = None,
        ) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
            mask = attention_masks[:, None]
            if out_transform is None:
                return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa).transpose(1, 2)
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            scores = (q @ k.mT * (scale or q.shape[-1] ** -0.5)).masked_fill(~mask, float("-inf"))
            return out_transform((scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1).transpose(1, 2))

    read(config, functools.partial(Batches, run))
    config.activation_checkpoint = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}[
        run.checkpoint
    ]
    settings = {
        "parallelism.spmd_backend": "partial_dtensor",
        "training.disable_cuda_graphs": True,
        "dump_folder": tempfile.gettempdir(),
        "validator.enable": False,
    }
    set_settings(config, common(run) | settings | run.settings)
    if run.ours:
        return context_parallel(config, **run.options)
    if config.override.imports:  # those of a configuration that is ours already
        return config
    for target in (FlexAttention.Config, VarlenAttention.Config):
        name = f"dense_{target.__qualname__.partition('.')[0]}"
        _REGISTRY.pop(f"{__name__}.{name}", None)

        def factory(given: Any) -> Any:
            return Dense.Config(sharding_config=given.sharding_config)

        factory.__name__, factory.__module__ = name, __name__
        override(target=target)(factory)
        config.override.imports.append(f"{__name__}.{name}")
    return config


def pairs(model: Any) -> Any:
    """A hook that gives a model the masks that `Dense` reads, from positions of the whole sequence."""

    def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple:
        documents = (kwargs["positions"] == 0).cumsum(-1)
        distance = torch.arange(SEQ_LEN)[:, None] - torch.arange(SEQ_LEN)
        basic = (documents[:, :, None] == documents[:, None]) & (distance >= 0)
        attention = model.config.layers[0].attention
        windows = {getattr(layer.attention, "sliding_window_size", None) for layer in model.config.layers} - {None}
        masks: Any = basic
        if hasattr(attention, "sliding_window_size"):
            masks = {"basic_mask": basic, "sliding_window_mask": basic & (distance < max(windows))}
        return args, kwargs | {"attention_masks": masks}

    return hook


def make(run: Run, config: Any = None) -> Any:
    """A Trainer with parameters that depend on their names alone; made from ``config``, if it is given."""
    on_cpus()
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    config = config_of(run) if config is None else prepare(config, run)
    trainer = config.build()
    if any("dense" in target for target in config.override.imports):
        trainer.model_parts[0].register_forward_pre_hook(pairs(trainer.model_parts[0]), with_kwargs=True)
    for name, parameter in trainer.model_parts[0].named_parameters():
        name = name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
        numbers = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        whole = torch.randn(parameter.shape, generator=numbers) * 0.05 + (parameter.ndim == 1)
        if isinstance(parameter, DTensor):
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        with torch.no_grad():
            parameter.copy_(whole)
    return trainer


def train(rank: int, run: Run, config: Any = None) -> list[tuple[float, float]]:
    """Losses and gradient norms of the steps, as torchtitan logs them."""
    trainer, found = make(run, config), []
    trainer.metrics_processor.log = lambda step, loss, max_loss, norm, **_: found.append((float(loss), float(norm)))
    trainer.metrics_processor.should_log = lambda step: True
    trainer.checkpointer.load = lambda **_: None
    data = trainer.batch_generator(trainer.dataloader)
    for step in range(1, STEPS + 1):
        trainer.step = step
        trainer.train_step(data)
    trainer.close()
    return found
