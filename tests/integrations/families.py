"""Small models of Transformers with random weights, by family; what their configs say is what the tests are about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf

VOCABULARY = 96
_BASE = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 10}
_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
_QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_MLA = {
    **{"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16},
    **{"v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1},
    **{"topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 24},
}
_INDEXER = {"index_topk": 5, "index_n_heads": 4, "index_head_dim": 16}
_NO_DROPOUT = dict.fromkeys(("residual_dropout", "embedding_dropout", "attention_dropout"), 0.0)


def _of(model: str, config: str, **options: Any) -> Callable[[], tuple[type, Any]]:
    return lambda: (getattr(tf, model), getattr(tf, config)(**{**_BASE, **options}))


def _gpt2() -> tuple[type, Any]:
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return tf.GPT2LMHeadModel, tf.GPT2Config(**sizes, **dropouts, scale_attn_by_inverse_layer_idx=True)


# fmt: off
FAMILIES: dict[str, Callable[[], tuple[type, Any]]] = {
    "llama": _of("LlamaForCausalLM", "LlamaConfig"),
    "qwen2": _of("Qwen2ForCausalLM", "Qwen2Config", use_sliding_window=True, max_window_layers=1,
        sliding_window=10),
    "qwen2_moe": _of(*("Qwen2MoeForCausalLM", "Qwen2MoeConfig"), **_QWEN_EXPERTS,
        shared_expert_intermediate_size=24, use_sliding_window=False),
    "qwen3": _of("Qwen3ForCausalLM", "Qwen3Config", head_dim=16),
    "qwen3_moe": _of("Qwen3MoeForCausalLM", "Qwen3MoeConfig", head_dim=16, **_QWEN_EXPERTS),
    "mistral": _of("MistralForCausalLM", "MistralConfig", sliding_window=10),
    "mixtral": _of("MixtralForCausalLM", "MixtralConfig", sliding_window=10, **_EXPERTS),
    "gemma2": _of(*("Gemma2ForCausalLM", "Gemma2Config"), **_MIXED, head_dim=16, query_pre_attn_scalar=24,
        attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "gemma3": _of("Gemma3ForCausalLM", "Gemma3TextConfig", **_MIXED, head_dim=16, query_pre_attn_scalar=24),
    "gpt_oss": _of("GptOssForCausalLM", "GptOssConfig", **_MIXED, **_EXPERTS, head_dim=16),
    "gemma4": _of(*("Gemma4ForCausalLM", "Gemma4TextConfig"), layer_types=["sliding_attention", "full_attention"] *
        2, **{"sliding_window": 10, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
        **{"head_dim": 8, "global_head_dim": 16, "final_logit_softcapping": 3.0},
        **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY}),
    "phi3": _of("Phi3ForCausalLM", "Phi3Config", sliding_window=12),
    "deepseek_v3": _of("DeepseekV3ForCausalLM", "DeepseekV3Config", **_MLA),
    "deepseek_v32": _of("DeepseekV32ForCausalLM", "DeepseekV32Config", **_MLA, **_INDEXER),
    "glm_moe_dsa": _of(*("GlmMoeDsaForCausalLM", "GlmMoeDsaConfig"), **_MLA, **_INDEXER,
        indexer_types=["full", "shared"]),
    "llama4": _of(*("Llama4ForCausalLM", "Llama4TextConfig"), head_dim=8, attention_chunk_size=7,
        num_local_experts=2, intermediate_size_mlp=48, interleave_moe_layer_step=2, no_rope_layers=[1, 0]),
    "olmo3": _of("Olmo3ForCausalLM", "Olmo3Config", **_MIXED),
    "cohere2": _of("Cohere2ForCausalLM", "Cohere2Config", **_MIXED),
    "glm4": _of("Glm4ForCausalLM", "Glm4Config", head_dim=16),
    "smollm3": _of("SmolLM3ForCausalLM", "SmolLM3Config", no_rope_layers=[1, 0]),
    "granite": _of("GraniteForCausalLM", "GraniteConfig", attention_multiplier=0.2),
    "starcoder2": _of("Starcoder2ForCausalLM", "Starcoder2Config", sliding_window=12, **_NO_DROPOUT),
    "gpt2": _gpt2,
    "bert": _of("BertForMaskedLM", "BertConfig", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    "modernbert": _of(*("ModernBertForMaskedLM", "ModernBertConfig"), local_attention=16,
        global_attn_every_n_layers=2, **dict.fromkeys(("attention_dropout", "embedding_dropout", "mlp_dropout"),
        0.0), cls_token_id=1, sep_token_id=2),
}
# fmt: on
"""Qwen2-MoE is as released: without windows, of which its code asks for a mask all the same."""
_MIXED_STATES = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 16}
_GDN = _MIXED_STATES | {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"linear_conv_kernel_dim": 4},
}
_SEVERAL_OF_TEXT = {
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        **{"mrope_section": [1, 1, 0], "mrope_interleaved": True},
    }
}
_GDN_EXPERTS = _QWEN_EXPERTS | {"shared_expert_intermediate_size": 24}
_KDA = {
    **{"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12},
    **{"num_experts_per_tok": 2, "num_local_experts": 4, "moe_intermediate_size": 24, "linear_head_dim": 8},
    **{"linear_num_heads": 4, "layer_types": _MIXED_STATES["layer_types"]},
}
_SSD = {
    **{"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_d_conv": 4},
    **{"mamba_expand": 2, "mamba_chunk_size": 16},
}
_CONV = {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}
# fmt: off
HYBRIDS: dict[str, Callable[[], tuple[type, Any]]] = {
    "qwen3_next": _of("Qwen3NextForCausalLM", "Qwen3NextConfig", **_GDN, **_GDN_EXPERTS),
    "qwen3_5": _of("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", **_GDN, **_SEVERAL_OF_TEXT),
    "qwen3_5_moe": _of("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", **_GDN, **_GDN_EXPERTS),
    "olmo_hybrid": _of("OlmoHybridForCausalLM", "OlmoHybridConfig", **_GDN),
    "kimi_linear": _of("KimiLinearForCausalLM", "KimiLinearConfig", **_KDA),
    "bailing_hybrid": _of(*("BailingHybridForCausalLM", "BailingHybridConfig"), **_KDA, head_dim=8, num_experts=4,
        q_lora_rank=24, layer_group_size=2),
    "mamba2": _of(*("Mamba2ForCausalLM", "Mamba2Config"), num_heads=8, head_dim=8, state_size=8, n_groups=2,
        chunk_size=16),
    "nemotron_h": _of(*("NemotronHForCausalLM", "NemotronHConfig"), **{"mamba_num_heads": 8, "mamba_head_dim": 8,
        "n_groups": 2, "ssm_state_size": 8, "conv_kernel": 4}, **{"chunk_size": 16, "head_dim": 16,
        "num_hidden_layers": 3, "n_routed_experts": 4, "num_experts_per_tok": 2}, **{"moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24}, layer_types=["linear_attention", "full_attention", "moe"]),
    "bamba": _of("BambaForCausalLM", "BambaConfig", **_SSD, attn_layer_indices=[1]),
    "granitemoehybrid": _of(*("GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig"), **_SSD, **_EXPERTS,
        layer_types=_MIXED_STATES["layer_types"], shared_intermediate_size=24),
    "falcon_h1": _of("FalconH1ForCausalLM", "FalconH1Config", **_SSD, mamba_d_ssm=64, head_dim=16),
    "zamba2": _of(*("Zamba2ForCausalLM", "Zamba2Config"), **{"layers_block_type": ["linear_attention", "hybrid"],
        "mamba_ngroups": 2, "mamba_d_state": 8}, **{"n_mamba_heads": 8, "chunk_size": 16, "adapter_rank": 8}),
    "lfm2": _of("Lfm2ForCausalLM", "Lfm2Config", **_CONV),
    "lfm2_moe": _of("Lfm2MoeForCausalLM", "Lfm2MoeConfig", **_CONV, **_QWEN_EXPERTS, num_dense_layers=1),
    "minimax": _of("MiniMaxForCausalLM", "MiniMaxConfig", **_MIXED_STATES, **_EXPERTS, block_size=8),
}
# fmt: on
"""Of attention and recurrent layers or convolutions, a layer of each."""
IMAGE, VIDEO, SOUND = 95, 94, 93
"""The tokens in whose place features are put."""


def _images(model: str, config: str, text: dict[str, Any], vision: dict[str, Any], **options: Any) -> Any:
    def make() -> tuple[type, Any]:
        parts = {"text_config": {**_BASE, **text}, "vision_config": vision}
        tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": SOUND}
        return getattr(tf, model), getattr(tf, config)(**parts, **tokens, **options)

    return make


_TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
_PATCHES = {"depth": 1, "num_heads": 2, "patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 1}
_SEVERAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
_MERGED = {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, "num_position_embeddings": 16}
_POOLED = _TOWER | {"patch_size": 2, "pooling_kernel_size": 2, "head_dim": 8, "num_key_value_heads": 2}
_GEMMA4 = {"global_head_dim": 16, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 3.0}
# fmt: off
WITH_IMAGES: dict[str, Callable[[], tuple[type, Any]]] = {
    "gemma3": _images(*("Gemma3ForConditionalGeneration", "Gemma3Config"), {**_MIXED, "head_dim": 16,
        "query_pre_attn_scalar": 24}, _TOWER | {"image_size": 16}, mm_tokens_per_image=16),
    "gemma4": _images(*("Gemma4ForConditionalGeneration", "Gemma4Config"), {**_MIXED, **_GEMMA4, "head_dim": 8,
        "use_bidirectional_attention": "vision", "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}, _POOLED),
    "gemma4_e2b": _images(*("Gemma4ForConditionalGeneration", "Gemma4Config"), {**_GEMMA4, "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 10, "num_hidden_layers": 4,
        "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY},
        _POOLED, audio_config={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "subsampling_conv_channels": [32, 8], "output_proj_dims": 16}),
    "got_ocr2": _images(*("GotOcr2ForConditionalGeneration", "GotOcr2Config"), {"model_type": "qwen2"}, _TOWER
        | {"image_size": 32, "output_channels": 16, "mlp_dim": 24, "window_size": 4, "global_attn_indexes": [0]}),
    "internvl": _images(*("InternVLForConditionalGeneration", "InternVLConfig"), {"model_type": "qwen2"}, _TOWER
        | {"image_size": [16, 16], "patch_size": [4, 4], "norm_type": "layer_norm"}, image_seq_length=4),
    "llava": _images(*("LlavaForConditionalGeneration", "LlavaConfig"), {"model_type": "llama"}, _TOWER
        | {"image_size": 8, "model_type": "siglip_vision_model"}, vision_feature_layer=-1,
        vision_feature_select_strategy="full"),
    "mistral3": _images(*("Mistral3ForConditionalGeneration", "Mistral3Config"), {"model_type": "mistral",
        "sliding_window": 10}, _TOWER | {"image_size": 16, "model_type": "pixtral", "head_dim": 8},
        spatial_merge_size=2, vision_feature_layer=-1),
    "paligemma": _images(*("PaliGemmaForConditionalGeneration", "PaliGemmaConfig"), {**_MIXED,
        "model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 24}, _TOWER | {"image_size": 8,
        "model_type": "siglip_vision_model"}, projection_dim=32),
    "qwen2_vl": _images(*("Qwen2VLForConditionalGeneration", "Qwen2VLConfig"), _SEVERAL, _PATCHES
        | {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}),
    "qwen2_5_vl": _images(*("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig"), _SEVERAL, _PATCHES
        | {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, "window_size": 8}),
    "qwen3_5": _images("Qwen3_5ForConditionalGeneration", "Qwen3_5Config", _GDN | _SEVERAL_OF_TEXT, _PATCHES | _MERGED),
    "qwen3_5_moe": _images(*("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeConfig"), _GDN | _GDN_EXPERTS
        | _SEVERAL_OF_TEXT, _PATCHES | _MERGED),
    "qwen3_vl": _images(*("Qwen3VLForConditionalGeneration", "Qwen3VLConfig"), _SEVERAL | {"head_dim": 8}, _PATCHES
        | _MERGED | {"depth": 2, "deepstack_visual_indexes": [0, 1]}),
}
# fmt: on
"""Of models with images: a tower for these of one layer. An image of Gemma-3 has more tokens than a window."""
OLD = tf.__version__.startswith("4.")
if OLD:  # Bert, ModernBert and Qwen2-MoE have no AttentionInterface there, and DeepSeek-V3 adds fp32 to fp64
    for name in ("bert", "modernbert", "deepseek_v3", "gemma4", "qwen2_moe"):
        del FAMILIES[name]


def build_with_images(family: str, implementation: str) -> Any:
    """The implementation is that of the text tower."""
    model = build(WITH_IMAGES[family], "eager")
    model.set_attn_implementation({"text_config": implementation})
    return model


def build(family: Any, implementation: str, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """The model of a family in training mode, the same weights in every call; ``options`` are set on its config."""
    torch.manual_seed(0)
    made, config = (FAMILIES | HYBRIDS)[family]() if isinstance(family, str) else family()
    for name, value in options.items():
        setattr(config, name, value)
    config._attn_implementation = implementation
    config._experts_implementation = "eager"
    model = made(config).to(dtype).train()
    with torch.no_grad():  # biases, norms and sinks that begin as zeros or ones must count
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.15 if parameter.ndim > 1 else 0.3))
    return model
