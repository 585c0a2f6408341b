"""Run all causal families of the installed Transformers under `cp_mesh.integrations.transformers`: exact or refused.

    torchrun --nproc-per-node 2 tests/integrations/transformers_families.py [--csv FILE] [--tp 2] [family ...]

Each family is first built without weights and may be refused: a small config with the features of a released checkpoint
(transformers_released.py), else the default config. Otherwise a small model with random weights runs in fp64 on the
ranks, plain and packed, with images if it takes them. Its logits, loss and gradients are compared with one rank, as in
tests/integrations; without tp, casts to float32 are to float64. This script made
docs/results/transformers_families.csv; with named families it replaces only their rows. --tp 2 also runs linears over
tp, as in docs/results/transformers_families_tp.csv, made by 4 ranks. Exits with 1 if a family is neither exact nor
refused.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import sys
import warnings
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parent.parent))

import transformers
from families import HYBRIDS, build_with_images
from inside import inner
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers_released import RELEASED

from cp_mesh import ArgumentError, Striped, UnsupportedError, ZigZag
from cp_mesh.integrations.transformers import parallelize

IMAGES, Facts, check_config, check_model, plan_over_tp = inner(
    "transformers.families", "IMAGES", "Facts", "check_config", "check_model", "plan_over_tp"
)

BOUND = 1e-6
FIELDS = ("transformers", "torch", "family", "class", "checkpoint", "verdict", "logits", "loss", "gradient", "reason")
SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "padded_vocab_size"), 96),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "intermediate_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp"), 24),
    **dict.fromkeys(("expert_ffn_hidden_size", "dense_intermediate_size", "shared_intermediate_size"), 24),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "kv_channels", "query_pre_attn_scalar"), 8),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 128),
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12},
    **{"index_topk": 5, "index_n_heads": 4, "index_head_dim": 16},
    **{"sliding_window": 10, "attention_chunk_size": 7, "first_k_dense_replace": 1, "rotary_dim": 8},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
}
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_DOTS3 = {
    **dict.fromkeys(("num_attention_heads", "swa_num_attention_heads", "n_routed_experts"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads"), 4),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group"), 1),
    **{"swa_q_lora_rank": 24, "swa_kv_lora_rank": 16, "swa_head_dim": 24, "swa_qk_nope_head_dim": 16},
    **{"swa_v_head_dim": 12, "num_experts_per_tok": 2},
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
# fmt: off
OWN: dict[str, dict[str, Any]] = {
    **{key: {"head_dim": 8} for key in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2,
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROPE)},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8},
        "ffn_config": {"moe_num_experts": 4}},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "deepseek_v2": {"topk_group": 1, "n_group": 1, "num_experts_per_tok": 2},
    "dots3_note": _DOTS3,
    "dots3_note_text": _DOTS3,
    "dots1": {"head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gemma3n_text": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8},
    "gemma4_text": {"vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "qwen2_moe": {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1},
    "reformer": {"is_decoder": True},
    "roc_bert": {"pronunciation_embed_dim": 8, "shape_embed_dim": 8, "pronunciation_vocab_size": 9,
        "shape_vocab_size": 9},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
}
# fmt: on
"""Options that a family needs besides these. Transformers builds some default configs only with them."""
FIRST = dict.fromkeys(("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta"), 1)
FIRST |= {"xlm-roberta-xl": 1, "xmod": 1}
"""First position in families that count positions from the tokens; the call has to pass position_ids."""
EVALUATED = ("phimoe",)
"""Families whose routers draw random numbers in training; they are compared in evaluation."""


FAMILIES = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | {"mistral4": "Mistral4ForCausalLM"}
"""Class names of each family; AutoModelForCausalLM lacks Mistral-4."""
SMALL_HYBRIDS = dict(HYBRIDS)
"""Without the features of released checkpoints, which this script adds to `HYBRIDS`."""
OF_TEXT = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}
"""Families of which tests/integrations/families.py has a small hybrid under another name."""


def config_of(family: str, name: str, **options: Any) -> Any:
    """The family's config with these options; the config of its text model if the class takes no other."""
    config = CONFIG_MAPPING[family](**options)
    return (
        config if isinstance(config, getattr(transformers, name).config_class) else config.get_text_config(decoder=True)
    )


def check(family: str, name: str, tp: Any) -> None:
    """Raise if cp_mesh refuses the family's config, or its model on the meta device; ``tp``: mesh or None."""
    released = family in RELEASED or hybrid_of(family)
    config = small_config(family, name) if released else config_of(family, name, **OWN.get(family, {}))
    check_config(config, name)
    with torch.device("meta"):
        check_model(model := getattr(transformers, name)(config))
    if tp is not None:
        plan_over_tp(Facts(model), model, tp, {}, gather_output=False)


def hybrid_of(family: str) -> str | None:
    """The family's name in tests/integrations/families.py, if it has recurrent layers or convolutions."""
    return name if (name := OF_TEXT.get(family, family)) in HYBRIDS else None


def small_config(family: str, name: str) -> Any:
    """The family's config in small, with the features of the released checkpoint if one is listed."""
    released = RELEASED.get(family, ("", {}))[1]
    if hybrid := hybrid_of(family):
        _, known = SMALL_HYBRIDS[hybrid]()
        return type(known)(**known.to_dict() | released)
    default = config_of(family, name)
    config_class, options = type(default), {}
    given = vars(default) | {key: getattr(default, key, None) for key in config_class.attribute_map}
    for key, value in SMALL.items():
        if given.get(key) and not isinstance(given[key], list):
            options[key] = value
    kinds = list(dict.fromkeys(given.get("layer_types") or ()))
    layers = max(2, len(kinds))
    options |= {key: layers for key in LAYERS if given.get(key) is not None}
    if kinds:
        options["layer_types"] = (kinds * layers)[:layers]
    options |= {key: 0.0 for key, x in given.items() if isinstance(x, float) and ("dropout" in key or "drop" in key)}
    own, names = OWN.get(family, {}) | released, config_class.attribute_map
    said = {names.get(key, key) for key in own}  # under any of its names
    return config_class(**{key: x for key, x in options.items() if names.get(key, key) not in said} | own)


def small_model(name: str, family: str, implementation: str) -> Any:
    """The model in fp64 and training mode, with random weights that are the same in every call."""
    config = small_config(family, name)
    with torch.device("meta"):
        if (number := sum(x.numel() for x in getattr(transformers, name)(config).parameters())) > 5_000_000:
            raise MemoryError(f"{number} parameters: some size has another name")
    torch.manual_seed(0)
    config._attn_implementation = implementation
    config._experts_implementation = "eager"
    with contextlib.suppress(AttributeError):
        config.output_router_logits = False
    model = getattr(transformers, name)(config).double().train(family not in EVALUATED)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.15 if parameter.ndim > 1 else 0.3))
    return model


def try_family(family: str, name: str, tp_size: int) -> dict[str, Any]:
    """The CSV row of a family, without versions."""
    import ranks
    import test_hybrids
    from oracle import Case, Wide, compare

    tp = ranks.mesh((dist.get_world_size() // tp_size, tp_size), ("cp", "tp"))["tp"] if tp_size > 1 else None
    row: dict[str, Any] = {"family": family, "class": name, "checkpoint": RELEASED.get(family, ("default",))[0]}
    try:
        check(family, name, tp)
    except (ArgumentError, UnsupportedError) as error:
        whole, reason = str(error), str(error).partition("got ")[2]
        return row | {"verdict": "refused", "reason": whole if whole.startswith("tensor_parallel_plan") else reason}
    except Exception as error:
        return row | {"verdict": "not tried", "reason": f"config: {type(error).__name__}: {error}"[:200]}
    worst: dict[str, float] = {}
    try:
        if (hybrid := hybrid_of(family)) and tp is None:  # against one rank and the family's code
            HYBRIDS[hybrid] = lambda: (getattr(transformers, name), small_config(family, name))
            for case, layout in (("plain", "zigzag"), ("packed", "striped"), (test_hybrids.LEFT, "contiguous")):
                found = test_hybrids.compare(dist.get_rank(), Case(hybrid, case, test_hybrids.LAYOUTS[layout]))
                worst["gradient"] = max(*found, worst.get("gradient", 0.0))
            verdict = "exact" if worst["gradient"] < BOUND else "wrong"
            note = "logits, loss or gradient, whichever is farthest"
            return row | {"gradient": f"{worst['gradient']:.1e}", "verdict": verdict, "reason": note}
        made = build_with_images if family in IMAGES else functools.partial(small_model, name)
        plain = Case(family, "plain", ZigZag(), made, first=FIRST.get(family))
        if tp is None:
            model = parallelize(made(family, "eager"), ranks.mesh((dist.get_world_size(),), ("cp",)))
            model(**plain.given)  # raises a refusal before the oracle can fail for another reason
        cases = [plain, replace(plain, batch="packed", layout=Striped())]
        if tp is not None:
            cases = [replace(case, layout=Striped(), tp=tp_size, linears={}) for case in cases]
        with Wide() if tp is None else contextlib.nullcontext():
            for _, found in compare(dist.get_rank(), *cases):
                worst = {key: max(x, worst.get(key, 0.0)) for key, x in found.items()}
    except (ArgumentError, UnsupportedError) as error:
        return row | {"verdict": "refused", "reason": "in the call: " + " ".join(str(error).split())}
    except Exception as error:
        if sys.flags.dev_mode:
            raise
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return row | {"verdict": "not tried", "reason": text[:200]}
    exact = all(x < BOUND for x in worst.values())
    row |= {key: f"{x:.1e}" for key, x in worst.items()} | {"verdict": "exact" if exact else "wrong"}
    notes = {"position_ids are passed, as the model counts its own from the tokens": family in FIRST}
    notes["with images"] = family in IMAGES
    notes["in evaluation, as its routers draw random numbers in training"] = family in EVALUATED
    return row | {"reason": "; ".join(note for note, applies in notes.items() if applies)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--tp", type=int, default=1)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rows = []
    for family, names in FAMILIES.items():
        if options.families and family not in options.families:
            continue
        name = names if isinstance(names, str) else names[0]
        row = {"transformers": transformers.__version__, "torch": torch.__version__.partition("+")[0]}
        rows.append(row | try_family(family, name, options.tp))
        dist.barrier()
        if dist.get_rank() == 0:
            print(*(rows[-1].get(key, "") for key in FIELDS[2:]), flush=True)
    if options.csv and dist.get_rank() == 0:
        if options.families:
            with options.csv.open() as file:
                known = {row["family"]: row for row in csv.DictReader(file)} | {row["family"]: row for row in rows}
            rows = [known[family] for family in FAMILIES]
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    dist.destroy_process_group()
    return int(any(row["verdict"] not in ("exact", "refused") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
