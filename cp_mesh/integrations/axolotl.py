"""`ContextParallelPlugin`: trains with axolotl on sequences that are sharded over accelerate's cp axis.

axolotl takes the mean over the tokens of each batch, then over batches and dp ranks, and so does this trainer.
"""

from __future__ import annotations

from typing import Any

from accelerate import ParallelismConfig
from axolotl.core.trainers import AxolotlTrainer
from axolotl.integrations.base import BasePlugin
from transformers import Trainer

from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.integrations.trainer import context_parallel

_KEYS = {
    **dict.fromkeys(("rl", "orpo_alpha", "reward_model", "process_reward_model"), "its trainer has a loss of its own"),
    "dp_shard_size": "the plugin computes it, of the number of ranks",
    "trainer_cls": "the plugin chooses the trainer",
    "use_ray": "its workers do not get context_parallel_size",
    **dict.fromkeys(("deepspeed", "fsdp"), "use fsdp_version: 2 with fsdp_config"),
    **dict.fromkeys(("tensor_parallel_size", "expert_parallel_size"), "write your own loop"),
}
"""Keys of axolotl that do not work with this plugin, and why, or what to do instead."""


class ContextParallelPlugin(BasePlugin):
    """Shards sequences over ``context_parallel_size`` ranks; the key's value 1 leaves axolotl as it is.

    Losses, gradients and metrics equal those without cp, also with ``sample_packing``. Needs ``fsdp_version: 2`` and
    ``fsdp_config``. Keys that do not work are refused when the configuration is read.
    """

    size = 1

    def register(self, cfg: dict[str, Any]) -> None:
        # axolotl would ask for ring-flash-attn where it finds this key, and shard the batch itself
        self.size = cfg.pop("context_parallel_size", None) or 1
        if old := cfg.get("sequence_parallel_degree"):
            refuse("axolotl: sequence_parallel_degree", "context_parallel_size", old, "rename the key")
        if self.size == 1:
            return
        for key, hint in _KEYS.items():
            if str(cfg.get(key) or 1) != "1":
                refuse(f"axolotl with context_parallel_size: {key}", "none", cfg[key], hint, UnsupportedError)
        if not cfg.get("fsdp_config") or str(cfg.get("fsdp_version")) != "2":
            got = f"fsdp_version: {cfg.get('fsdp_version')}"
            refuse("axolotl with context_parallel_size", "fsdp_version: 2 with fsdp_config", got, "add both")

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:
        if not preprocess:
            cfg.batch_size //= self.size  # axolotl counts steps by it, and has multiplied it by all ranks

    def get_training_args(self, cfg: Any) -> dict[str, Any] | None:
        if self.size == 1:
            return None
        copies = cfg.dp_replicate_size or 1
        sizes = {"dp_replicate_size": copies, "dp_shard_size": cfg.world_size // self.size // copies}
        return {"parallelism_config": ParallelismConfig(cp_size=self.size, **sizes)}

    def get_trainer_cls(self, cfg: Any) -> type[Trainer] | None:
        return None if self.size == 1 else context_parallel(_AxolotlTrainer)

    def post_trainer_create(self, cfg: Any, trainer: Trainer) -> None:
        if self.size > 1 and not isinstance(trainer, _AxolotlTrainer):
            hint = "leave out the plugin that brings it"
            refuse("axolotl with context_parallel_size", "the trainer of this plugin", type(trainer).__name__, hint)


class _AxolotlTrainer(AxolotlTrainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = True  # False in axolotl, which would keep the model from its divisor

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> None:
        """Without a number for several batches, `context_parallel` counts the tokens of each."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        before = dict(getattr(self.state, "tokens", {}))
        loss = super().training_step(*args, **kwargs)
        for name, total in getattr(self.state, "tokens", {}).items():  # summed over ranks that have the same batch
            counted = before.get(name, 0)
            self.state.tokens[name] = counted + (total - counted) // self.get_cp_size()
        return loss
