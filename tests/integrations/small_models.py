# SPDX-License-Identifier: Apache-2.0
"""Models of transformers' own classes, small and randomly initialised."""

import transformers

WINDOW = 24  # window of the models that have one
CHUNK = 32
IMAGE = 255  # token
_SMALL = dict(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_EXPERTS = dict(num_experts_per_tok=2)
_ALTERNATING = ["sliding_attention", "full_attention"]


def _causal(name, **changes):
    def make(**others):
        config = getattr(transformers, f"{name}Config")(**{**_SMALL, **changes, **others})
        return getattr(transformers, f"{name}ForCausalLM")(config)

    return make


def _deepseek(**others):
    """Head dims 192 and 128, as the model has them."""
    dims = dict(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, kv_lora_rank=32, q_lora_rank=32)
    experts = dict(n_routed_experts=4, n_group=2, topk_group=1, moe_intermediate_size=32, first_k_dense_replace=1)
    return _causal("DeepseekV3", **dims, **experts, **_EXPERTS, num_key_value_heads=4, head_dim=64)(**others)


def _llama4(**others):
    config = transformers.Llama4TextConfig(
        **{
            **_SMALL,
            "intermediate_size_mlp": 96,
            "head_dim": 16,
            "attention_chunk_size": CHUNK,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
            **others,
        }
    )
    return transformers.Llama4ForCausalLM(config)


def _bert(**others):
    config = transformers.BertConfig(**{**_SMALL, **others})
    return transformers.BertForMaskedLM(config)


def _modernbert(**others):
    """Bidirectional, with windows in every second layer."""
    config = transformers.ModernBertConfig(
        **{
            **_SMALL,
            "local_attention": WINDOW,
            "global_attn_every_n_layers": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
            **others,
        }
    )
    return transformers.ModernBertForMaskedLM(config)


def _gemma3(**others):
    """The text model and its masks of image blocks; a vision tower that is never asked."""
    text = {
        **_SMALL,
        "head_dim": 16,
        "sliding_window": WINDOW,
        "layer_types": _ALTERNATING,
        "query_pre_attn_scalar": 16,
        **others,
    }
    vision = dict(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, image_size=14, patch_size=14
    )
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, image_token_index=IMAGE, mm_tokens_per_image=1
    )
    return transformers.Gemma3ForConditionalGeneration(config)


MODELS = {
    "llama": _causal("Llama"),
    "qwen3": _causal("Qwen3", head_dim=16),
    "mistral": _causal("Mistral", sliding_window=WINDOW),
    "phi3": _causal("Phi3", hidden_size=384),  # head dim 96
    "gemma2": _causal(
        "Gemma2", head_dim=16, sliding_window=WINDOW, layer_types=_ALTERNATING, attn_logit_softcapping=2.0
    ),
    "gemma3": _gemma3,
    "gpt_oss": _causal(
        "GptOss", head_dim=16, sliding_window=WINDOW, layer_types=_ALTERNATING, num_local_experts=2, **_EXPERTS
    ),
    "deepseek_v3": _deepseek,
    "llama4": _llama4,
    "bert": _bert,
    "modernbert": _modernbert,
}
ENCODERS = ("bert", "modernbert")
