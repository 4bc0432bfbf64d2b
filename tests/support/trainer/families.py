"""Tiny models of several architectures, with a chat template whose turns do not end with EOS."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.trainer import architectures
from support.trainer.models import SENTENCES

os.environ.setdefault("HF_HUB_OFFLINE", "1")

SPECIAL_TOKENS = ["<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]
TURN_END = SPECIAL_TOKENS.index("<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# With the usual 0.02 a frozen output head could express no confident answer.
SIZES = architectures.SIZES | {"initializer_range": 0.3}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class Family:
    """One architecture, and the layers that its adapter changes."""

    config: str
    """Name of the configuration's class in transformers."""
    options: dict[str, Any] = field(default_factory=dict)
    targets: tuple[str, ...] = ("all-linear",)
    packing: bool = True


FAMILIES = {
    "llama-tied": Family(
        "LlamaConfig",
        {"tie_word_embeddings": True},
        (*ATTENTION, "lm_head", "embed_tokens"),
    ),
    "llama-untied": Family("LlamaConfig", {"tie_word_embeddings": False}),
    "qwen2.5": Family("Qwen2Config", {"tie_word_embeddings": True}),
    "gemma3": Family(
        "Gemma3TextConfig",
        {"head_dim": 8, "tie_word_embeddings": True},
        (*ATTENTION, "lm_head"),
    ),
    "mistral": Family("MistralConfig", {"sliding_window": None}),
    "qwen3-moe": Family(
        "Qwen3MoeConfig",
        {
            "head_dim": 8,
            "moe_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "granite-hybrid": Family(
        "GraniteMoeHybridConfig",
        {
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 64,
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 16,
        },
        packing=False,
    ),
}


def make_family_model(family: Family, folder: Path, *, seed: int = 3) -> Path:
    """Write a random model of the family and a byte-level tokenizer with the chat template."""
    import torch  # noqa: PLC0415  tests without a model must not wait for torch
    import transformers  # noqa: PLC0415
    from tokenizers import ByteLevelBPETokenizer  # noqa: PLC0415

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        SENTENCES, vocab_size=320, show_progress=False, special_tokens=SPECIAL_TOKENS
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
    )
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL_TOKENS[3:]})
    tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(seed)
    config = getattr(transformers, family.config)(**SIZES, **family.options)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.get_input_embeddings().weight.data[0].normal_(
        std=0.02
    )  # a new model's row for padding is zero
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
