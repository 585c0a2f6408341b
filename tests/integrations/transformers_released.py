"""Features of released checkpoints of Transformers, for the small configs of transformers_families.py.

`RELEASED` maps a family to a checkpoint and to the options that give a small config its features: the order of layer
kinds, windows and chunks, rotary embeddings, routers and groups of experts, softcaps, norms, biases, multipliers, tied
and shared weights. Sizes are those of the script. Windows, chunks and softcaps are smaller, so that they matter in 45
tokens, and repeated layers are left out. Facts are from each checkpoint's config.json, as public code, model cards and
the documentation of Transformers 5.24 quote it; not each value was compared with the file.
"""

from __future__ import annotations

from typing import Any

_KINDS = {
    **{"L": "sliding_attention", "G": "full_attention", "C": "chunked_attention", "R": "linear_attention"},
    **{"V": "conv", "E": "moe", "M": "mlp", "S": "minimax_m3_sparse", "I": "indexed_attention", "H": "hybrid"},
}
WINDOW, CHUNK = 10, 7


def _layers(order: str, **options: Any) -> dict[str, Any]:
    """Layers in this order: L sliding, G full, C chunked, R recurrent, V convolution, E experts, H hybrid, ..."""
    return {"layer_types": [_KINDS[x] for x in order], "num_hidden_layers": len(order), **options}


def _windows(order: str, **options: Any) -> dict[str, Any]:
    return _layers(order, sliding_window=WINDOW, **options)


def _rope(kind: str = "default", theta: float = 1e4, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **options}}


def _llama3(factor: float, theta: float = 5e5) -> dict[str, Any]:
    more = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return _rope("llama3", theta, factor=factor, **more)


def _yarn(factor: float, theta: float = 1e4, **options: Any) -> dict[str, Any]:
    more = {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096}
    return _rope("yarn", theta, factor=factor, **more | options)


def _longrope(numbers: int, **options: Any) -> dict[str, Any]:
    """Its short factors, as all positions are below the original maximum."""
    short, long = ([1.0 + step * i for i in range(numbers)] for step in (0.1, 2.0))
    more = {"short_factor": short, "long_factor": long, "original_max_position_embeddings": 64}
    return _rope("longrope", **more, **options) | {"original_max_position_embeddings": 64}


def _experts(count: str, number: int, chosen: int, **options: Any) -> dict[str, Any]:
    return {count: number, "num_experts_per_tok": chosen, **options}


_GROUPS = {"n_group": 4, "topk_group": 2}
_DYNAMIC = _rope("dynamic", alpha=1000.0, factor=1.0)
_SEVERAL = _rope(theta=1e7, mrope_section=[1, 1, 0], mrope_interleaved=True, partial_rotary_factor=0.25)
_GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.015625}
_MLA = {"num_key_value_heads": 4, "rope_interleave": True}

# fmt: off
RELEASED: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("arcee-ai/Trinity-Mini", _windows("LLLG", num_dense_layers=2, route_scale=2.826)),
    "apertus": ("swiss-ai/Apertus-8B-Instruct-2509", _llama3(8.0, 12e6)),
    "arcee": ("arcee-ai/AFM-4.5B", _yarn(20.0)),
    "bamba": ("ibm-ai-platform/Bamba-9B-v2", {"attn_layer_indices": [1], "num_hidden_layers": 3,
        "mamba_n_groups": 1, **_rope(partial_rotary_factor=0.5)}),
    "bitnet": ("microsoft/bitnet-b1.58-2B-4T", _rope(theta=5e5) | {"tie_word_embeddings": True}),
    "cohere": ("CohereLabs/c4ai-command-r-plus", {"use_qk_norm": True, "logit_scale": 0.8333, **_rope(theta=75e6)}),
    "cohere2": ("CohereLabs/c4ai-command-r7b-12-2024", _windows("LLLG", logit_scale=0.25, **_rope(theta=5e4))),
    "cwm": ("facebook/cwm", _windows("GLLLG", **_llama3(16.0, 1e6))),
    "deepseek_v2": ("deepseek-ai/DeepSeek-V2", {**_experts("n_routed_experts", 8, 2, n_shared_experts=2,
        first_k_dense_replace=1, routed_scaling_factor=16.0), **{"n_group": 4, "topk_group": 2,
        "topk_method": "group_limited_greedy", "norm_topk_prob": False}, **_yarn(40.0, mscale=0.707,
        mscale_all_dim=0.707)}),
    "deepseek_v3": ("deepseek-ai/DeepSeek-V3", _experts("n_routed_experts", 8, 3, first_k_dense_replace=1,
        **_GROUPS, **_yarn(40.0, mscale=1.0, mscale_all_dim=1.0))),
    "deepseek_v32": ("deepseek-ai/DeepSeek-V3.2-Exp", {}),
    "dots1": ("rednote-hilab/dots.llm1.base", _experts("n_routed_experts", 4, 2, n_shared_experts=2,
        first_k_dense_replace=1) | {"head_dim": 8, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        **_layers("GG")}),
    "ernie4_5": ("baidu/ERNIE-4.5-0.3B-PT", {"head_dim": 16, **_rope(theta=5e5)}),
    "ernie4_5_moe": ("baidu/ERNIE-4.5-21B-A3B-PT", {"moe_num_experts": 6, "moe_k": 3, "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1, **_rope(theta=5e5)}),
    "exaone": ("LGAI-EXAONE/EXAONE-3.5-7.8B-Instruct", _llama3(8.0, 1e6)),
    "exaone4": ("LGAI-EXAONE/EXAONE-4.0-32B", _windows("LLLG", **_llama3(16.0, 1e6))),
    "exaone_moe": ("LGAI-EXAONE/K-EXAONE-236B-A23B", _windows("LLLG", mlp_layer_types=["dense"] + 3 * ["sparse"],
        **_experts("num_experts", 8, 3), **_rope(theta=1e6))),
    "falcon": ("tiiuae/falcon-7b", {"multi_query": True, "parallel_attn": True}),
    "falcon_h1": ("tiiuae/Falcon-H1-0.5B-Base", {**{"mamba_norm_before_gate": False, "mamba_rms_norm": False,
        "mamba_n_groups": 1, "key_multiplier": 0.39}, **{"mlp_multipliers": [0.88, 0.59], "ssm_multipliers": [0.35,
        0.25, 0.35, 0.5, 0.35]}, **{"ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.236, **_rope(theta=1e11)}}),
    "flex_olmo": ("allenai/FlexOlmo-7x7B-1T", _experts("num_experts", 7, 5)),
    "gemma": ("google/gemma-7b", {"head_dim": 16, "num_key_value_heads": 4}),
    "gemma2": ("google/gemma-2-9b", _windows("LGLG", head_dim=16, query_pre_attn_scalar=16,
        attn_logit_softcapping=2.0, final_logit_softcapping=3.0)),
    "gemma3_text": ("google/gemma-3-4b-it", _windows("LLLLLG") | {"head_dim": 16, "query_pre_attn_scalar": 16}
        | {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}}),
    "gemma3n_text": ("google/gemma-3n-E4B", _windows("LLGLLG", num_kv_shared_layers=3,
        activation_sparsity_pattern=[0.95] * 2 + [0.0] * 4, intermediate_size=48)
        | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96, "final_logit_softcapping": 3.0}),
    "gemma4_text": ("google/gemma-4-E2B-it", _windows("LLGLLG", num_kv_shared_layers=3, use_double_wide_mlp=True,
        final_logit_softcapping=3.0) | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96,
        "global_head_dim": 16}),
    "glm": ("zai-org/glm-4-9b-chat-hf", _rope(partial_rotary_factor=0.5) | {"attention_bias": True}),
    "glm4": ("zai-org/GLM-4-9B-0414", _rope(partial_rotary_factor=0.5) | {"attention_bias": True}),
    "glm4_moe": ("zai-org/GLM-4.5", _experts("n_routed_experts", 6, 3, use_qk_norm=True, attention_bias=True,
        routed_scaling_factor=2.5) | _rope(theta=1e6, partial_rotary_factor=0.5) | {"head_dim": 16}),
    "glm4_moe_lite": ("zai-org/GLM-4.7-Flash", _experts("n_routed_experts", 6, 3, routed_scaling_factor=1.8,
        mlp_layer_types=["dense", "sparse"], **_rope(theta=1e6))),
    "glm_moe_dsa": ("zai-org/GLM-5", {}),
    "gpt_oss": ("openai/gpt-oss-20b", _windows("LGLG", **_yarn(32.0, 15e4, truncate=False), attention_bias=True)),
    "granite": ("ibm-granite/granite-3.3-8b-base", _GRANITE | {"logits_scaling": 16.0, **_rope(theta=1e7)}),
    "granitemoe": ("ibm-granite/granite-3.1-3b-a800m-base", _GRANITE | _experts("num_local_experts", 8, 4,
        logits_scaling=6.0, tie_word_embeddings=True)),
    "granitemoehybrid": ("ibm-granite/granite-4.0-h-small", _layers("RRGR", position_embedding_type="nope",
        mamba_n_groups=1, logits_scaling=16.0, **_GRANITE) | _experts("num_local_experts", 8, 4,
        tie_word_embeddings=True)),
    "granitemoeshared": ("ibm-research/moe-7b-1b-active-shared-experts", _GRANITE | _experts("num_local_experts", 8,
        4, logits_scaling=6.0, shared_intermediate_size=24)),
    "hunyuan_v1_dense": ("tencent/Hunyuan-7B-Instruct", _DYNAMIC | {"head_dim": 8}),
    "hunyuan_v1_moe": ("tencent/Hunyuan-A13B-Instruct", _DYNAMIC | {"head_dim": 8, "num_experts": 8, "moe_topk": 3,
        "tie_word_embeddings": True}),
    "jamba": ("ai21labs/Jamba-v0.1", {"attn_layer_period": 2, "attn_layer_offset": 1}),
    "kimi_linear": ("moonshotai/Kimi-Linear-48B-A3B-Instruct", _layers("RRRG", mlp_layer_types=["dense"] + 3 *
        ["sparse"])),
    "lfm2": ("LiquidAI/LFM2-1.2B", _layers("VVGVVG", block_auto_adjust_ff_dim=True)),
    "lfm2_moe": ("LiquidAI/LFM2-8B-A1B", _layers("VVGVVG", num_dense_layers=2, use_expert_bias=True)),
    "llama": ("meta-llama/Llama-3.2-1B", _llama3(32.0) | {"tie_word_embeddings": True}),
    "llama4_text": ("meta-llama/Llama-4-Scout-17B-16E", _layers("CCCG", no_rope_layers=[1, 1, 1, 0],
        attention_chunk_size=CHUNK, use_qk_norm=True, **_llama3(8.0)) | _experts("num_local_experts", 4, 1,
        moe_layers=[0, 1, 2, 3])),
    "longcat_flash": ("meituan-longcat/LongCat-Flash-Chat", {"n_routed_experts": 6, "zero_expert_num": 3,
        "moe_topk": 3}),
    "mimo_v2_flash": ("XiaomiMiMo/MiMo-V2-Flash", _windows("GLLLLG", mlp_layer_types=["dense"] + 5 * ["sparse"],
        attention_value_scale=0.707)),
    "minicpm3": ("openbmb/MiniCPM3-4B", _longrope(4)),
    "minimax": ("MiniMaxAI/MiniMax-Text-01-hf", _layers("RRRRRRRG", **_rope(theta=1e7))
        | {f"{x}_alpha_factor": 3.5565588200778455 for x in ("full_attn", "linear_attn", "mlp")}),
    "minimax_m2": ("MiniMaxAI/MiniMax-M2", _experts("num_local_experts", 8, 3, head_dim=16, **_rope(theta=5e6,
        partial_rotary_factor=0.5))),
    "minimax_m3_vl_text": ("MiniMaxAI/MiniMax-M3", _layers("GGGS", mlp_layer_types=3 * ["dense"] + ["sparse"])),
    "ministral": ("mistralai/Ministral-8B-Instruct-2410", _windows("GLLL", head_dim=8, **_rope(theta=1e8))),
    "ministral3": ("mistralai/Ministral-3-8B-Base-2512", _yarn(16.0, 1e6, original_max_position_embeddings=16,
        mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1)),
    "mistral": ("mistralai/Mistral-7B-v0.1", {"sliding_window": WINDOW}),
    "mistral4": ("mistralai/Mistral-Small-4-119B-2603", _experts("n_routed_experts", 8, 4) | _yarn(128.0,
        original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1,
        partial_rotary_factor=0.5) | {"head_dim": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "num_key_value_heads": 4, "first_k_dense_replace": 0}),
    "mixtral": ("mistralai/Mixtral-8x7B-v0.1", _experts("num_local_experts", 8, 2, sliding_window=None)),
    "nemotron": ("nvidia/Minitron-4B-Base", _rope(partial_rotary_factor=0.5) | {"head_dim": 16,
        "num_key_value_heads": 2}),
    "nemotron_h": ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", _layers("RERERGE", n_routed_experts=6,
        num_experts_per_tok=3, routed_scaling_factor=2.5)),
    "olmo": ("allenai/OLMo-7B-0424-hf", {"clip_qkv": 0.5, "num_key_value_heads": 4}),
    "olmo2": ("allenai/OLMo-2-1124-7B", _rope(theta=5e5) | {"num_key_value_heads": 4}),
    "olmo3": ("allenai/Olmo-3-7B-Instruct", _windows("LLLG")
        | {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        "full_attention": _yarn(8.0, 5e5, original_max_position_embeddings=8192)["rope_parameters"]}}),
    "olmo_hybrid": ("allenai/Olmo-Hybrid-7B", _layers("RRRG", linear_allow_neg_eigval=True)),
    "olmoe": ("allenai/OLMoE-1B-7B-0924", _experts("num_experts", 8, 4, num_key_value_heads=4,
        norm_topk_prob=False)),
    "phi": ("microsoft/phi-2", _rope(partial_rotary_factor=0.5) | {"num_key_value_heads": 4, "head_dim": 8}),
    "phi3": ("microsoft/Phi-4-mini-instruct", _longrope(3, partial_rotary_factor=0.75)
        | {"tie_word_embeddings": True, "sliding_window": None}),
    "phimoe": ("microsoft/Phi-3.5-MoE-instruct", _experts("num_local_experts", 8, 2, attention_bias=True,
        lm_head_bias=True, sliding_window=None) | _longrope(4, short_mscale=1.243163121016122,
        long_mscale=1.243163121016122)),
    "qwen2": ("Qwen/Qwen2.5-7B", _rope(theta=1e6) | {"use_sliding_window": False}),
    "qwen2_moe": ("Qwen/Qwen1.5-MoE-A2.7B", _experts("num_experts", 6, 3, use_sliding_window=False,
        norm_topk_prob=False, **_rope(theta=1e6))),
    "qwen3": ("Qwen/Qwen3-0.6B", _rope(theta=1e6) | {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_5_moe_text": ("Qwen/Qwen3.5-35B-A3B", _layers("RRRG", **_SEVERAL)),
    "qwen3_5_text": ("Qwen/Qwen3.5-27B", _layers("RRRG", **_SEVERAL)),
    "qwen3_moe": ("Qwen/Qwen3-30B-A3B", _experts("num_experts", 8, 3, head_dim=16, norm_topk_prob=True,
        decoder_sparse_step=1, **_rope(theta=1e6))),
    "qwen3_next": ("Qwen/Qwen3-Next-80B-A3B-Instruct", _layers("RRRG", norm_topk_prob=True, decoder_sparse_step=1,
        **_rope(theta=1e7, partial_rotary_factor=0.25))),
    "seed_oss": ("ByteDance-Seed/Seed-OSS-36B-Instruct", _rope(theta=1e7) | {"head_dim": 16, "attention_bias": True,
        "attention_out_bias": False}),
    "smollm3": ("HuggingFaceTB/SmolLM3-3B", _layers("GGGG", no_rope_layers=[1, 1, 1, 0], **_rope(theta=5e6))),
    "stablelm": ("stabilityai/stablelm-2-12b", _rope(partial_rotary_factor=0.25) | {"head_dim": 8,
        "qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": False}),
    "starcoder2": ("bigcode/starcoder2-7b", {"sliding_window": WINDOW, "use_bias": True, **_rope(theta=1e6)}),
    "zamba2": ("Zyphra/Zamba2-2.7B", {"layers_block_type": [_KINDS[x] for x in "RRHRH"], "num_hidden_layers": 5,
        "hybrid_layer_ids": [2, 4]} | {"num_mem_blocks": 2, "use_shared_attention_adapter": False,
        "use_mem_rope": False, "mamba_ngroups": 1}),
}
# fmt: on
RELEASED |= {"qwen3_5": RELEASED["qwen3_5_text"], "qwen3_5_moe": RELEASED["qwen3_5_moe_text"]}
RELEASED |= {"llama4": RELEASED["llama4_text"]}
