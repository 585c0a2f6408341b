"""All causal families of the installed Transformers under `cp_mesh.integrations.transformers`: exact, or refused.

    torchrun --nproc-per-node 2 examples/transformers_families.py [--csv FILE] [family ...]

A family is first built with its own default config, without weights, and may be refused for what it is. Otherwise a
small model with random weights runs in fp64 on the ranks, plain and packed, and logits, loss and every gradient are
compared with one rank's, as in tests/integrations. So docs/results/transformers_families.csv was made. Exits with 1 if
some family is neither exact nor refused.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "integrations")]

import transformers  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from cp_mesh.errors import ArgumentError, UnsupportedError  # noqa: E402
from cp_mesh.integrations.transformers import check_model  # noqa: E402

FIELDS = ("transformers", "torch", "family", "class", "verdict", "logits", "loss", "gradient", "reason")
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
    **{"sliding_window": 10, "attention_chunk_size": 7, "first_k_dense_replace": 1, "rotary_dim": 8},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
}
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
OWN: dict[str, dict[str, Any]] = {}
"""What a family needs beside that."""


def default_model(family: str, name: str) -> Any:
    """The model of the family's default config, without memory for its weights."""
    with torch.device("meta"):
        return getattr(transformers, name)(CONFIG_MAPPING[family]())


def small_model(family: str, name: str, implementation: str) -> Any:
    """With random weights, the same in every call, in fp64 and in training mode."""
    default = CONFIG_MAPPING[family]()
    config_class, options = type(default), {}
    given = vars(default) | {key: getattr(default, key, None) for key in config_class.attribute_map}
    for key, value in SMALL.items():
        if given.get(key) is not None and not isinstance(given[key], list):
            options[key] = min(value, given[key]) if key == "sliding_window" else value
    kinds = list(dict.fromkeys(given.get("layer_types") or ()))
    layers = max(2, len(kinds))
    options |= {key: layers for key in LAYERS if given.get(key) is not None}
    if kinds:
        options["layer_types"] = (kinds * layers)[:layers]
    options |= {key: 0.0 for key, x in given.items() if isinstance(x, float) and ("dropout" in key or "drop" in key)}
    options |= OWN.get(family, {})
    config = config_class(**options)
    with torch.device("meta"):
        if (number := sum(x.numel() for x in getattr(transformers, name)(config).parameters())) > 3_000_000:
            raise MemoryError(f"{number} parameters: some size has another name")
    torch.manual_seed(0)
    config._attn_implementation = implementation
    config._experts_implementation = "eager"
    with contextlib.suppress(AttributeError):
        config.output_router_logits = False
    model = getattr(transformers, name)(config).double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.15 if parameter.ndim > 1 else 0.3))
    return model


def try_family(family: str, name: str) -> dict[str, Any]:
    """The row of a family, but for the versions."""
    import test_transformers as tests

    row: dict[str, Any] = {"family": family, "class": name}
    try:
        check_model(default_model(family, name))
    except (ArgumentError, UnsupportedError) as error:
        return row | {"verdict": "refused", "reason": str(error).partition("got ")[2]}
    except Exception as error:
        return row | {"verdict": "not tried", "reason": f"default config: {type(error).__name__}: {error}"[:200]}
    worst: dict[str, float] = {}
    try:
        for case, layout in (("plain", "zigzag"), ("packed", "striped")):
            made = lambda _, implementation: small_model(family, name, implementation)  # noqa: E731
            found = tests.compare(dist.get_rank(), family, case, tests.LAYOUTS[layout], made=made)
            worst = {key: max(x, worst.get(key, 0.0)) for key, x in found.items()}
    except (ArgumentError, UnsupportedError) as error:
        return row | {"verdict": "refused", "reason": "in the call: " + " ".join(str(error).split())}
    except Exception as error:
        if sys.flags.dev_mode:
            raise
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return row | {"verdict": "not tried", "reason": text[:200]}
    exact = all(x < tests.BOUND for x in worst.values())
    return row | {key: f"{x:.1e}" for key, x in worst.items()} | {"verdict": "exact" if exact else "wrong"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rows = []
    for family, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if options.families and family not in options.families:
            continue
        name = names if isinstance(names, str) else names[0]
        row = {"transformers": transformers.__version__, "torch": torch.__version__.partition("+")[0]}
        rows.append(row | try_family(family, name))
        dist.barrier()
        if dist.get_rank() == 0:
            print(*(rows[-1].get(key, "") for key in FIELDS[2:]), flush=True)
    if options.csv and dist.get_rank() == 0:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    dist.destroy_process_group()
    return int(any(row["verdict"] not in ("exact", "refused") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
