"""Tiny models of architectures whose layers are not attention alone, or whose attention has no mask of its own."""

from typing import Any

SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PLAIN = {"vocab_size": 320, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
MOE = {
    "head_dim": 8,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaConfig": SIZES,
    "GPT2Config": PLAIN | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "Qwen3MoeConfig": SIZES | MOE,
    "MixtralConfig": SIZES | {"num_local_experts": 4},
    "Gemma2Config": SIZES | {"head_dim": 8},
    "Olmo2Config": SIZES,
    "FalconH1Config": SIZES | MAMBA | {"mamba_d_ssm": 64},
    "BambaConfig": SIZES | MAMBA | {"attn_layer_indices": [1]},
    "JambaConfig": SIZES
    | {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
        "num_experts": 2,
    },
    "Mamba2Config": PLAIN
    | {
        "hidden_size": 32,
        "num_heads": 8,
        "head_dim": 8,
        "num_hidden_layers": 2,
        "state_size": 16,
        "n_groups": 1,
        "chunk_size": 16,
    },
    "MambaConfig": PLAIN
    | {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 16},
    "MptConfig": PLAIN
    | {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256},
    "BloomConfig": PLAIN | {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "OPTConfig": PLAIN
    | {
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 64,
        "max_position_embeddings": 256,
    },
    "Lfm2Config": SIZES
    | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "Qwen3NextConfig": SIZES
    | MOE
    | {
        "shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
}
"""Name of the configuration's class in transformers -> its options."""


def small_model(name: str) -> Any:
    """Return a model with random weights, larger than in a new model, which hides what its layers do."""
    import torch  # noqa: PLC0415  tests without a model must not wait for torch
    import transformers  # noqa: PLC0415

    torch.manual_seed(0)
    config = getattr(transformers, name)(**ARCHITECTURES[name])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():
        weight.data += 0.2 * torch.randn_like(weight)
    return model
