"""Trainers of Transformers and TRL on ranks, against the same trainer on one rank: six steps, to 1e-5."""

from __future__ import annotations

import csv
import functools
import itertools
import math
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import chdir, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("accelerate")
trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "examples"))

from accelerate import ParallelismConfig  # noqa: E402
from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402
from accelerate.utils import TorchContextParallelConfig  # noqa: E402
from datasets import Dataset  # noqa: E402
from families import IMAGE, VOCABULARY, build, build_with_images  # noqa: E402
from inside import inner  # noqa: E402
from oracle import Wide, pixels, tokens_of  # noqa: E402
from ranks import REFUSALS, on_ranks  # noqa: E402
from scripts import Done, blocks, run_script  # noqa: E402
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from cp_mesh import ArgumentError, Contiguous, Striped, UnsupportedError, ZigZag, sum_gradients  # noqa: E402
from cp_mesh.integrations.trainer import context_parallel  # noqa: E402
from cp_mesh.integrations.transformers import parallelize, sequence_of  # noqa: E402

fsdp_on_cpus = inner("trainer", "fsdp_on_cpus")

BOUND = 1e-5
STEPS = 6
LORA = {
    kind: peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], modules_to_save=saved, init_lora_weights=False)
    for kind, saved in {"layers": None, "head": ["lm_head"]}.items()
}
"""Whose second factors do not begin as zeros."""
ROUTED = ("past_key_values", "cache", "aux_loss", "router_logits", "image_hidden_states", "image_outputs")
"""Entries of outputs beside logits; with cp predictions are logits alone."""
ROWS = 4
"""Of a batch of all dp ranks together; an evaluation has six, so its last batch is not full."""


@functools.cache
def rows() -> list[dict[str, list[int]]]:
    """Sequences of unequal lengths, whose first labels do not count, so that batches have unequal numbers of tokens."""
    numbers = torch.Generator().manual_seed(1)
    found = []
    for _ in range(4 * STEPS * ROWS):
        length, prompt = (int(torch.randint(*x, (1,), generator=numbers)) for x in ((18, 45), (0, 15)))
        ids = torch.randint(3, VOCABULARY, (length,), generator=numbers).tolist()
        found.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return found


def padded(batch: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    longest = max(len(x["input_ids"]) for x in batch)
    rows = [x | {"attention_mask": [1] * len(x["input_ids"])} for x in batch]
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {k: torch.tensor([x[k] + [v] * (longest - len(x[k])) for x in rows]) for k, v in fill.items()}


def with_images(family: str, batch: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """One at the beginning of each row, another for every first token."""
    found, first, width = padded(batch), torch.tensor([x["input_ids"][0] for x in batch]), tokens_of(family)
    found["input_ids"].clamp_(max=IMAGE - 5)[:, :width] = IMAGE
    found["labels"][:, :width] = -100
    found["token_type_ids" if family == "gemma3" else "mm_token_type_ids"] = (found["input_ids"] == IMAGE).long()
    images = pixels(family, len(batch), width)
    shades = (first / 50).repeat_interleave(len(images["pixel_values"]) // len(batch))
    return found | images | {"pixel_values": (images["pixel_values"].T * shades).T}


def apart(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The documents of a packed batch as rows that are padded."""
    found = []
    for ids, labels, positions in zip(*(batch[name] for name in ("input_ids", "labels", "position_ids")), strict=True):
        begins = (positions == 0).nonzero()[:, 0].tolist()
        for begin, end in itertools.pairwise([*begins, len(ids)]):
            found.append({"input_ids": ids[begin:end].tolist(), "labels": labels[begin:end].tolist()})
    return padded(found)


def texts(ids: list[list[int]]) -> list[str]:
    return [" ".join(f"w{i}" for i in row) for row in ids]


def pairs(rows: list[dict[str, list[int]]]) -> list[dict[str, str]]:
    """Prompts with two answers, of which the second is another prompt's."""
    prompts, answers = (texts([row["input_ids"][place] for row in rows]) for place in (slice(9), slice(9, None)))
    every = zip(prompts, answers, answers[1:] + answers[:1], strict=True)
    return [{"prompt": f"{prompt} ", "chosen": chosen, "rejected": rejected} for prompt, chosen, rejected in every]


class Streamed(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return iter(rows())


class Characters(transformers.PreTrainedTokenizerFast):
    """What SFTTrainer asks of a tokenizer when its data are tokens."""

    def __init__(self) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers

        words = {f"w{i}": i for i in range(VOCABULARY)}
        made = Tokenizer(models.WordLevel(words, unk_token="w0"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        super().__init__(tokenizer_object=made, pad_token="w0", eos_token="w2", unk_token="w0")


@contextmanager
def launched() -> Iterator[None]:
    """What torchrun tells accelerate, which keeps it for as long as a process lives."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    with mock.patch.dict(os.environ, told if size != "1" else {}):
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        yield


OF_TRAINER = (
    *("model", "callbacks", "compute_loss_func", "model_init", "train_dataset", "compute_metrics", "data_collator"),
)


def make(kind: str, case: str = "plain", dp: int = 1, parallel: bool = True, **changes: Any) -> Any:
    """A trainer of this rank.

    Args:
        kind: "Trainer", "SFTTrainer" or "DPOTrainer".
        case: "plain", sequences padded to the longest, or "packed".
        dp: the size of dp_shard; the other ranks are those of cp.
        parallel: with cp; otherwise the class as it is.
        **changes: of its arguments, the trainer, the model, or options of context_parallel.
    """
    size, of_trl, of_pairs = dist.get_world_size(), kind != "Trainer", kind == "DPOTrainer"

    def taken(*names: str) -> dict[str, Any]:
        return {name: changes.pop(name) for name in names if name in changes}

    made: Any = getattr(trl, kind) if of_trl else Trainer
    options = taken("layout", "dropout_seed", "method")
    made = context_parallel(made, **options) if parallel else made
    arguments: dict[str, Any] = {
        **{"output_dir": changes.pop("folder", tempfile.gettempdir()), "use_cpu": True, "bf16": False, "seed": 3},
        **{"per_device_train_batch_size": ROWS // dp, "per_device_eval_batch_size": ROWS // dp, "report_to": []},
        **{"gradient_accumulation_steps": 2, "max_steps": STEPS, "logging_steps": 1, "learning_rate": 0.3},
        **{"optim": "sgd", "lr_scheduler_type": "constant", "save_strategy": "no", "disable_tqdm": True},
        "include_num_input_tokens_seen": "all",
    }
    copies, unpacked, lora = changes.pop("copies", 1), changes.pop("apart", False), LORA.get(changes.pop("lora", ""))
    if size > 1:
        sizes = {"cp_size": size // dp, "dp_replicate_size": copies, "dp_shard_size": dp // copies}
        arguments |= {"parallelism_config": ParallelismConfig(**sizes), "fsdp": True}
    family, of_model = changes.pop("family", "llama"), taken("attention_dropout")
    if changes.pop("routers", False):
        family, of_model = "mixtral", {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    if of_images := changes.pop("images", None):
        model = build_with_images(of_images, "sdpa")
        collator = functools.partial(with_images, of_images)
        changes |= {"data_collator": collator, "remove_unused_columns": False}
    else:
        model = build(family, "sdpa", **of_model).float()
    if changes.pop("means", False):
        model.accepts_loss_kwargs = False
    given = {"model": peft.get_peft_model(model, lora) if lora and not of_trl else model}
    data = {"train_dataset": rows(), "eval_dataset": rows()[:6]}
    if of_trl:
        arguments |= {"max_length": 48, "gradient_checkpointing": False}
        arguments |= {} if of_pairs else {"packing": case == "packed"}
        data = {name: Dataset.from_list(pairs(x) if of_pairs else x) for name, x in data.items()}
        data["processing_class"] = Characters()
        if changes.get("padding_free"):
            data["train_dataset"] = trl.pack_dataset(data["train_dataset"], 48)
        given |= {"peft_config": lora} if lora else {}
        if of_pairs and not lora:
            given["ref_model"] = build(family, "sdpa").float()
            given["ref_model"].model.norm.weight.data.mul_(0.7)
    else:
        flattening = DataCollatorWithFlattening(return_seq_idx=True, return_flash_attn_kwargs=True)
        data["data_collator"] = flattening if case == "packed" else padded
    given |= data | taken(*OF_TRAINER)
    configs = {"SFTTrainer": trl.SFTConfig, "DPOTrainer": trl.DPOConfig}
    with nullcontext() if parallel else fsdp_on_cpus():
        trainer = made(args=configs.get(kind, TrainingArguments)(**arguments | changes), **given)
    if unpacked:
        collator = trainer.data_collator
        trainer.data_collator = lambda rows: apart(collator(rows))
    return trainer


def test_fsdp_on_cpus_is_undone() -> None:
    before = AcceleratorState.__init__
    with pytest.raises(ZeroDivisionError), fsdp_on_cpus():
        assert AcceleratorState.__init__ is not before
        raise ZeroDivisionError
    assert AcceleratorState.__init__ is before


def weights(trainer: Any) -> dict[str, Tensor]:
    found = trainer.model.state_dict()
    return {name: (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone() for name, x in found.items()}


LOGGED = (
    *("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens", "num_input_tokens_seen", "aux_loss"),
    *("rewards/chosen", "rewards/margins", "logits/rejected"),
)
EVALUATED = ("eval_loss", "eval_entropy", "eval_mean_token_accuracy", "eval_aux_loss", "eval_rewards/margins")


def only(log: dict[str, float], names: tuple[str, ...]) -> dict[str, float]:
    return {name: log[name] for name in names if name in log}


def logged(trainer: Any) -> list[dict[str, float]]:
    return [only(x, LOGGED) for x in trainer.state.log_history if "grad_norm" in x]


def train(
    rank: int, kind: str, case: str, dp: int = 1, parallel: bool = True, changes: Any = (), folder: str = ""
) -> dict[str, Any]:
    """Six steps, an evaluation and a prediction; the model is saved to the folder."""
    wide = (
        Wide() if "images" in dict(changes) else nullcontext()
    )  # as float32 in layers is far from 1e-5 after six steps
    with launched(), warnings.catch_warnings(record=True) as caught, wide:
        warnings.simplefilter("always")
        trainer = make(kind, case, dp, parallel, **dict(changes))
        trainer.train()
        ignored = None if parallel else [*ROUTED]
        predicted = [] if kind != "Trainer" else [torch.tensor(x) for x in trainer.predict(rows()[:6], ignored)[:2]]
        if folder:
            trainer.save_model(folder)
        for number, row in enumerate(rows()[:6] if predicted and case == "plain" else ()):
            predicted[0][number, len(row["input_ids"]) :] = 0  # of padding
        return {
            "logged": logged(trainer),
            "weights": weights(trainer),
            "evaluated": only(trainer.evaluate(), EVALUATED),
            "predicted": predicted,
            "flos": trainer.state.total_flos,
            "warned": [str(x.message) for x in caught if "cp_mesh" in str(x.message)],
        }


@functools.cache
def without_cp(pool: Any, kind: str, case: str, ranks: int = 1, changes: Any = ()) -> dict[str, Any]:
    """On one rank, or on ranks with other batches."""
    found: dict[str, Any] = pool(ranks).run(train, kind, case, ranks, False, changes, timeout=TIMEOUT)[0]
    return found


def check(found: dict[str, Any], wanted: dict[str, Any], over_dp: bool = False) -> None:
    assert len(found["logged"]) == STEPS and not found["warned"]
    for ours, theirs in zip(found["logged"], wanted["logged"], strict=True):
        assert ours == pytest.approx(theirs, rel=0, abs=BOUND)
    check_weights(found["weights"], wanted["weights"])
    # TRL leaves some ranks of dp out of other metrics of the last batch, but cp does not
    names = EVALUATED if found["predicted"] or not over_dp else ("eval_loss",)
    check_evaluation(found, wanted, names)


def check_losses(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    ours, theirs = ([x["loss"] for x in each["logged"]] for each in (found, wanted))
    assert ours == pytest.approx(theirs, rel=0, abs=BOUND)


def check_weights(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert max((x - wanted[name]).abs().max().item() for name, x in found.items()) < BOUND


def check_evaluation(found: dict[str, Any], wanted: dict[str, Any], names: tuple[str, ...] = EVALUATED) -> None:
    assert only(found["evaluated"], names) == pytest.approx(only(wanted["evaluated"], names), rel=0, abs=BOUND)
    for ours, theirs in zip(found["predicted"], wanted["predicted"], strict=True):
        assert ours.shape == theirs.shape and (ours - theirs).abs().max() < BOUND


KINDS = ("Trainer", "SFTTrainer")
CASES = ("plain", "packed")
TIMEOUT = 240.0


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_six_steps(pool: Any, full: bool, kind: str, case: str) -> None:
    """Of two micro-batches each, with another number of tokens in all of them; then metrics and predictions.

    Over cp against one rank. Over dp and cp against dp alone, where each rank pads its own batch too, and one rank.
    """
    one = without_cp(pool, kind, case)
    for found in pool(2).run(train, kind, case, timeout=TIMEOUT):
        check(found, one)
        assert found["flos"] == one["flos"]
    if full or (kind, case) in (("Trainer", "plain"), ("SFTTrainer", "packed")):
        found, alone = pool(4).run(train, kind, case, 2, timeout=TIMEOUT)[0], without_cp(pool, kind, case, 2)
        check(found, alone, over_dp=True)
        check_losses(found, one)
        check_weights(found["weights"], one["weights"])


ROUTERS = {"routers": True}
MEANS = {"means": True}
"""Of a model that is not told the number of tokens, as Gemma 4 and most of Qwen with images."""


def _wrapping(layer: str, **options: Any) -> dict[str, Any]:
    return {"fsdp_config": {"transformer_layer_cls_to_wrap": [layer], **options}}


CHANGES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "means of each rank": ("Trainer", "plain", {"average_tokens_across_devices": False}),
    "means of each batch": ("Trainer", "plain", MEANS | {"routers": True}),
    "means of each batch in TRL": ("SFTTrainer", "packed", MEANS),
    "checkpointing": ("Trainer", "packed", {"activation_checkpointing": True}),
    "checkpointing by FSDP": ("Trainer", "plain", {"fsdp_config": {"activation_checkpointing": True}}),
    "weights of rank 0": ("Trainer", "plain", {"fsdp_config": {"cpu_ram_efficient_loading": True}}),
    "checkpointing in TRL": ("SFTTrainer", "packed", {"gradient_checkpointing": True}),
    "wrapped": ("SFTTrainer", "packed", {"packing_strategy": "wrapped"}),
    "packed before": ("SFTTrainer", "plain", {"padding_free": True, "max_length": None}),
    "TRL's loss in chunks": ("SFTTrainer", "plain", {"loss_type": "chunked_nll"}),
    "a loss of TRL": ("SFTTrainer", "plain", {"loss_type": "dft"}),
    "windows": ("SFTTrainer", "packed", {"family": "gemma3"}),
    "clipping": ("Trainer", "plain", {"max_grad_norm": 0.5}),
    "the end of an epoch": ("Trainer", "plain", {"train_dataset": torch.utils.data.Subset(rows(), range(22))}),
    "a loss of routers": ("Trainer", "plain", ROUTERS),
    "a loss of routers in TRL": ("SFTTrainer", "packed", ROUTERS),
    "a loss of routers in TRL, of padded rows": ("SFTTrainer", "plain", ROUTERS),
    "a loss of routers, means of each rank": ("Trainer", "packed", ROUTERS | {"average_tokens_across_devices": False}),
    **{
        f"images of {family}": ("Trainer", "plain", {"images": family, **_wrapping(layer)})
        for family, layer in {
            "gemma3": "Gemma3DecoderLayer",
            "gemma4": "Gemma4TextDecoderLayer",
            "qwen2_5_vl": "Qwen2_5_VLDecoderLayer",
            "qwen3_vl": "Qwen3VLTextDecoderLayer",
            "qwen3_5": "Qwen3_5DecoderLayer",
        }.items()
    },
    "pairs": ("DPOTrainer", "plain", {}),
    "pairs, losses of tokens": ("DPOTrainer", "plain", {"loss_type": "sft", "ld_alpha": 0.5}),
    "pairs, adapters": ("DPOTrainer", "plain", {"lora": "layers"}),
    "pairs, routers": ("DPOTrainer", "plain", ROUTERS),
    "a stream": ("Trainer", "plain", {"train_dataset": Streamed()}),
}
"""Arguments that change what is computed, or how, and what is equal to one rank all the same."""
QUICK = (
    *("means of each rank", "packed before", "checkpointing", "a loss of TRL", "clipping"),
    *("a loss of routers, means of each rank", "a loss of routers in TRL", "images of gemma4", "pairs"),
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in CHANGES]
)
def test_arguments(pool: Any, name: str) -> None:
    kind, case, changes = CHANGES[name]
    alone = {name: x for name, x in changes.items() if name != "fsdp_config"}
    found = pool(2).run(train, kind, case, 1, True, tuple(changes.items()), timeout=TIMEOUT)[0]
    check(found, without_cp(pool, kind, case, 1, tuple(alone.items())))


@pytest.mark.full
def test_pairs_over_dp(pool: Any) -> None:
    found = pool(4).run(train, "DPOTrainer", "plain", 2, timeout=TIMEOUT)[0]
    check(found, without_cp(pool, "DPOTrainer", "plain", 2), over_dp=True)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "changed"),
    [*itertools.product(KINDS, (ROUTERS, MEANS)), ("Trainer", {"average_tokens_across_devices": False})],
    ids=str,
)
def test_losses_of_each_dp_rank(pool: Any, kind: str, changed: dict[str, bool]) -> None:
    """Of routers, or where ranks are not told the tokens of all, so that dp alone is what it is compared with."""
    changes = tuple(changed.items())
    found = pool(4).run(train, kind, "plain", 2, True, changes, timeout=TIMEOUT)[0]
    check(found, without_cp(pool, kind, "plain", 2, changes), over_dp=True)


@pytest.mark.full
def test_copies_over_dp(pool: Any) -> None:
    """HSDP: two copies of models that two ranks of dp and two of cp share, against one rank."""
    wanted = without_cp(pool, "Trainer", "plain")
    for found in pool(8).run(train, "Trainer", "plain", 4, True, (("copies", 2),), timeout=TIMEOUT):
        check_losses(found, wanted)
        check_weights(found["weights"], wanted["weights"])


@pytest.mark.parametrize(
    ("kind", "case", "lora"),
    [("Trainer", "plain", "head"), pytest.param("SFTTrainer", "packed", "layers", marks=pytest.mark.full)],
)
def test_adapters_of_peft(pool: Any, kind: str, case: str, lora: str, tmp_path: Path) -> None:
    """LoRA, with a head that is trained too: as on one rank, and saved."""
    changes = (("lora", lora),)
    found = pool(2).run(train, kind, case, 1, True, changes, str(tmp_path), timeout=TIMEOUT)[0]
    check(found, without_cp(pool, kind, case, 1, changes))
    saved = peft.PeftModel.from_pretrained(build("llama", "sdpa").float(), tmp_path)
    check_weights(dict(saved.state_dict()), found["weights"])


# ---- hybrids of attention and recurrent layers


HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5DecoderLayer", {"learning_rate": 0.03}),  # a larger one makes rounding grow from step to step
    "nemotron_h": ("NemotronHBlock", {}),
}
"""The class of their layers, and changes."""
REENTRANT = {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
OF_HYBRIDS: dict[str, tuple[int, dict[str, Any]]] = {
    "auto": (2, {}),
    "zigzag": (2, {"layout": ZigZag()}),
    "contiguous": (3, {"layout": Contiguous()}),
    "checkpointing": (2, {"gradient_checkpointing": True}),
    "reentrant": (2, {"gradient_checkpointing": True, **REENTRANT}),
    "checkpointing by FSDP": (2, {"fsdp_config": {"activation_checkpointing": True}}),
}
SOME = {("zigzag", "Trainer", "packed"), ("auto", "SFTTrainer", "packed"), ("contiguous", "SFTTrainer", "plain")}


@pytest.mark.parametrize("option", OF_HYBRIDS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", HYBRIDS)
def test_hybrids(pool: Any, full: bool, family: str, kind: str, case: str, option: str) -> None:
    """Against the family's own code on one rank; as that ignores documents on CPUs, it gets each as a row."""
    if not full and (option, kind, case) not in SOME:
        pytest.skip("in the full form")
    (size, options), (layer, changes) = OF_HYBRIDS[option], HYBRIDS[family]
    changes = changes | {"family": family}
    given = changes | options | _wrapping(layer, **options.get("fsdp_config", {}))
    found = pool(size).run(train, kind, case, 1, True, tuple(given.items()), timeout=TIMEOUT)[0]
    wanted = without_cp(pool, kind, case, 1, (*changes.items(), ("apart", case == "packed")))
    # norms of gradients and logits of Qwen3.5 are larger: so is their rounding; but weights tell of all gradients
    exact = family == "nemotron_h"
    names = ("loss", *(("grad_norm",) if exact else ()))
    assert len(found["logged"]) == STEPS and not found["warned"]
    for ours, theirs in zip(found["logged"], wanted["logged"], strict=True):
        assert only(ours, names) == pytest.approx(only(theirs, names), rel=0, abs=BOUND)
    check_weights(found["weights"], wanted["weights"])
    check_evaluation(found, wanted if exact and case == "plain" else wanted | {"predicted": found["predicted"]})


# ---- saving and resuming


def resumed(rank: int, kind: str, folder: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Six steps with a checkpoint after three; then a trainer with other weights, which goes on from it."""
    found = []
    for checkpoint in (None, f"{folder}/checkpoint-3"):
        with launched():
            trainer = make(kind, "packed", folder=folder, save_strategy="steps", save_steps=3, **changes)
            if checkpoint is not None:
                for x in trainer.model.parameters():
                    torch.nn.init.zeros_(x)
            trainer.train(resume_from_checkpoint=checkpoint)
            found.append({"logged": logged(trainer), "weights": weights(trainer)})
    trainer.save_model(f"{folder}/final")
    return {"whole": found[0], "resumed": found[1], "tokens": trainer.state.num_input_tokens_seen}


@pytest.mark.parametrize("kind", ["Trainer", pytest.param("SFTTrainer", marks=pytest.mark.full)])
def test_a_run_that_is_resumed_goes_on(pool: Any, kind: str, tmp_path: Path) -> None:
    """With dropout in attention, which depends on how many steps there were."""
    changes = {"attention_dropout": 0.3, "optim": "adamw_torch", "learning_rate": 1e-2}
    for found in pool(2).run(resumed, kind, str(tmp_path), changes, timeout=TIMEOUT):
        whole, again = found["whole"], found["resumed"]
        assert [x["loss"] for x in again["logged"]] == [x["loss"] for x in whole["logged"]]
        assert all(torch.equal(x, whole["weights"][name]) for name, x in again["weights"].items())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert type(model).__name__ == "LlamaForCausalLM" and model.config._attn_implementation == "sdpa"
    check_weights(dict(model.state_dict()), whole["weights"])


# ---- options


@on_ranks(2, timeout=TIMEOUT)
def test_options_are_followed() -> None:
    for options, name in (({"layout": Striped()}, "Striped"), ({"layout": "balanced"}, "Balanced"), ({}, "Balanced")):
        with launched():
            trainer = make("Trainer", "packed", max_steps=1, **options)
            trainer.train()
            assert type(sequence_of(trainer.model).layout).__name__ == name
    found = []
    for seed in (0, 0, 1):
        with launched():
            trainer = make("Trainer", attention_dropout=0.3, dropout_seed=seed, max_steps=2)
            trainer.train()
            found.append(logged(trainer))
    one, same, other = found
    assert one == same and abs(one[0]["loss"] - other[0]["loss"]) > 1e-3


@pytest.mark.parametrize("kind", (*KINDS, "DPOTrainer"))
@on_ranks(2, timeout=TIMEOUT)
def test_losses_of_liger_are_off(kind: str) -> None:
    """In training; in an evaluation without metrics the Trainer tells Liger's forward to leave logits out."""
    with launched(), mock.patch("transformers.trainer.apply_liger_kernel") as apply:
        trainer = make(kind, max_steps=1, use_liger_kernel=True, liger_kernel_config={"rope": False})
        trainer.train()
        assert trainer.evaluate()["eval_loss"] > 0
    (_, config), _ = apply.call_args
    assert config == {"rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False}


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2, timeout=TIMEOUT)
def test_metrics_are_given_whole_logits(kind: str) -> None:
    """How often they tell the next token, as a user's function of them counts."""

    def count(prediction: Any) -> dict[str, float]:
        logits, labels = (torch.tensor(x) for x in prediction)
        valid = labels[:, 1:] != -100
        return {"right": ((logits[:, :-1].argmax(-1) == labels[:, 1:]) & valid).sum().item(), "of": valid.sum().item()}

    with launched():
        trainer = make(kind, compute_metrics=count, max_steps=1)
        trainer.train()
        found = trainer.evaluate()
    of = sum(label != -100 for row in rows()[:6] for label in row["labels"][1:])
    assert 0 <= found["eval_right"] <= found["eval_of"] == of


class Raises(TrainerCallback):
    """At the end of the Trainer's own __init__."""

    def on_init_end(self, args: Any, *others: Any, **kwargs: Any) -> None:
        raise RuntimeError(args)


@on_ranks(2)
def test_packing_stays_in_the_arguments() -> None:
    with launched():
        trainer = make("SFTTrainer", "packed")
        with pytest.raises(RuntimeError) as raised:
            make("SFTTrainer", "packed", callbacks=[Raises()])
    assert type(trainer).__name__ == "SFTTrainer" and trainer.args.packing and raised.value.args[0].packing


# ---- what is refused


def other_on_each_rank(batch: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    found = padded(batch)
    found["input_ids"] += dist.get_rank()
    return found


class Does(TrainerCallback):
    """Something to the model once it is sharded."""

    def __init__(self, change: Any) -> None:
        self.change = change

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.change(model)


def _make(kind: str = "Trainer", **changes: Any) -> Any:
    return lambda: make(kind, **changes)


def _train(**changes: Any) -> Any:
    return lambda: make("Trainer", max_steps=1, **changes).train()


def _another_model() -> None:
    trainer = make("Trainer", max_steps=1)
    trainer.model = trainer.model_wrapped = build("llama", "sdpa").float()
    trainer.train()


def _twice() -> None:
    from ranks import mesh

    make("Trainer", model=parallelize(build("llama", "sdpa").float(), mesh((2,), ("cp",))))


def _no_kwargs() -> None:
    model = build("llama", "sdpa")
    model.forward = lambda input_ids=None, labels=None: None
    make("Trainer", model=model)


def _drops_counts() -> None:
    class LlamaForCausalLM(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Any = None, labels: Any = None, position_ids: Any = None, **given: Any) -> Any:
            logits = self.lm_head(self.model(input_ids=input_ids, position_ids=position_ids).last_hidden_state)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
            return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)

    model = build("llama", "sdpa").float()
    model.__class__ = LlamaForCausalLM
    make("Trainer", model=model).train()


def _adapted(config: Any) -> Any:
    return lambda: make("Trainer", model=peft.get_peft_model(build("llama", "sdpa").float(), config))


_ALL_TO_ALL = TorchContextParallelConfig(cp_comm_strategy="alltoall")
REFUSED: dict[str, tuple[Any, str]] = {
    "no cp": (_make(dp=2), "cp_size: expected 2 or more, got 1"),
    "accelerate's own method": (
        _make(parallelism_config=ParallelismConfig(cp_size=2, cp_handler=_ALL_TO_ALL)),
        "method='all_gather'",
    ),
    "label smoothing": (_make(label_smoothing_factor=0.1), "label_smoothing_factor: expected 0, got 0.1"),
    "noise": (_make(neftune_noise_alpha=5.0), "neftune_noise_alpha"),
    "tensor parallelism": (
        _make(parallelism_config=ParallelismConfig(cp_size=2, tp_size=2)),
        "tp_size: expected 1, got 2",
    ),
    "a loss of Liger": (
        _make(use_liger_kernel=True, liger_kernel_config={"fused_linear_cross_entropy": True}),
        "liger_kernel_config: expected fused_linear_cross_entropy=False, got True",
    ),
    "the root compiled": (_make(torch_compile=True), "layer.compile()"),
    "a cache": (_make(use_cache=True), "use_cache: expected False"),
    "gathered objects": (_make(eval_use_gather_object=True), "eval_use_gather_object"),
    "a sampler of ranks": (_make(train_sampling_strategy="batch_rebalance"), "train_sampling_strategy"),
    "a loss function": (_make(compute_loss_func=lambda *x, **y: 0), "compute_loss_func"),
    "models made later": (
        _make(model=None, model_init=lambda: build("llama", "sdpa")),
        "build the model and pass it",
    ),
    "a model without counts": (_no_kwargs, "a model whose forward takes num_items_in_batch"),
    "a model that drops counts": (_drops_counts, "a forward that passes the Trainer's num_items_in_batch on"),
    "means of each rank in TRL": (
        _make("SFTTrainer", average_tokens_across_devices=False),
        "average_tokens_across_devices: expected True, got False",
    ),
    "dispatched batches": (_make(accelerator_config={"dispatch_batches": True}), "dispatch_batches"),
    "batches of each rank": (_train(data_collator=other_on_each_rank), "the same input_ids on every cp rank"),
    "sums of gradients": (_train(callbacks=[Does(sum_gradients)]), "leave sum_gradients out"),
    "other attention": (
        _train(callbacks=[Does(lambda model: model.set_attn_implementation("sdpa"))]),
        "scaled_dot_product_attention",
    ),
    "another model": (_another_model, "the model that it made parallel"),
    "a model that is parallel": (_twice, "apply once"),
    "a trained head in TRL": (_make("SFTTrainer", lora="head"), "peft_config: expected a frozen lm_head"),
    "adapters that read the tokens": (
        _adapted(peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[5])),
        "got ALORA",
    ),
    "adapters that are prompts": (
        _adapted(peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)),
        "got PROMPT_TUNING",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(pool: Any, name: str) -> None:
    pool(4 if name == "tensor parallelism" else 2).run(refuse, name, timeout=TIMEOUT)


def refuse(rank: int, name: str) -> None:
    run, words = REFUSED[name]
    with launched(), pytest.raises(REFUSALS, match=re.escape(words)):
        run()


def test_refused_options_and_classes() -> None:
    for options in ({"gather_output": True}, {"data": None}):
        with pytest.raises(ArgumentError, match="the Trainer sets it"):
            context_parallel(Trainer, **options)
    own = {"prediction_step": Trainer, "_compute_loss": trl.DPOTrainer, "compute_ref_log_probs": trl.DPOTrainer}
    for kind in (trl.GRPOTrainer, *(type("Own", (base,), {name: _make}) for name, base in own.items())):
        with pytest.raises(UnsupportedError, match="expected that of Trainer, SFTTrainer or DPOTrainer"):
            context_parallel(kind)
    with pytest.raises(ArgumentError, match=re.escape("context_parallel(Trainer)(model, args, ...)")):
        context_parallel(object())  # type: ignore[arg-type]


# ---- examples


@pytest.mark.parametrize("name", ["finetune_transformers", pytest.param("finetune_sft", marks=pytest.mark.full)])
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = ROOT / "examples" / f"{name}.py"
    if name == "finetune_sft":  # whose ranks accelerate starts
        given = ["--config_file", script.with_name("accelerate.yaml"), "--main_process_port", "0", script]
        command = [sys.executable, "-m", "accelerate.commands.launch", *map(str, given)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
        done = Done(ended.returncode, ended.stdout + ended.stderr)
    else:
        done = run_script(script, [], 2)
    assert done.returncode == 0, done.printed
    losses = [float(x) for x in re.findall(r"'loss': '([\d.]+)'", done.printed)]
    evaluated = [float(x) for x in re.findall(r"'eval_loss': ([\d.]+)", done.printed)]
    assert len(losses) == 5 and losses[-1] < losses[0] - 0.5 and len(evaluated) == 2
    assert evaluated == pytest.approx([losses[-1]] * 2, abs=0.5)
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "build" / name / "final")
    assert saved.config.num_hidden_layers == 2


@pytest.mark.nightly("benchmarks")
def test_the_benchmark_runs(tmp_path: Path) -> None:
    """In sizes that say nothing of speed, without accelerate's cp, which refuses CPUs."""
    words = "--device cpu --tiny --layers 1 --seq-len 64 --warmup 1 --steps 1 --contestants cp_mesh --csv"
    script, table = ROOT / "examples" / "benchmarks" / "sft.py", tmp_path / "rows.csv"
    done = run_script(script, [*words.split(), str(table)], 2)
    assert done.returncode == 0, done.printed
    with table.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [(row["documents"], row["status"], row["tokens"]) for row in found] == [
        ("one", "ok", "64"),
        ("packed", "ok", "64"),
    ]
    assert [float(row["loss"]) for row in found] == pytest.approx([math.log(1000)] * 2, abs=0.2)


@pytest.mark.full
def test_the_check_on_gpus_runs_on_cpus() -> None:
    """Which compares with the Trainer alone, in bfloat16 too."""
    done = run_script(ROOT / "tests" / "integrations" / "gpu_trainer.py", ["--device", "cpu"], timeout=900.0)
    assert done.returncode == 0 and done.printed.count("what is allowed: ok") == 10, done.printed


# ---- docs/trainer.md


@on_ranks(2, timeout=TIMEOUT)
def test_the_page_runs() -> None:
    """Its blocks in order, in a folder of its own."""
    characters = Characters()
    names: dict[str, Any] = {
        **{"dataset": rows(), "collator": padded, "tokenizer": characters},
        **{"model": build("llama", "sdpa").float(), "model_to_tune": build("llama", "sdpa").float()},
        "texts": Dataset.from_dict({"text": texts([row["input_ids"] for row in rows()])}),
    }
    found, as_written = [], TrainingArguments.__post_init__

    def on_cpu(arguments: Any) -> None:
        arguments.use_cpu, arguments.report_to, arguments.logging_steps = True, [], 1
        as_written(arguments)

    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        with mock.patch.object(TrainingArguments, "__post_init__", on_cpu):
            for block in blocks("trainer"):
                with launched():
                    exec(block, names)
                found.append(logged(names["trainer"])[-1])
    assert len(found) == 2 and all(x["loss"] < 10 for x in found)
