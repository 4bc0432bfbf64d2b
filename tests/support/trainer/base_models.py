"""Tiny base models of many architectures, in the files that hubs have: of transformers 4, with several tokenizers."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.trainer import architectures
from support.trainer.families import CHAT_TEMPLATE
from support.trainer.models import SENTENCES

os.environ.setdefault("HF_HUB_OFFLINE", "1")

VOCABULARY = 640
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
TURNS = ["<|im_start|>", "<|im_end|>"]
TOOL_TEMPLATE = (
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}" + CHAT_TEMPLATE
)
SIZES = architectures.SIZES | {"vocab_size": VOCABULARY}
LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Base:
    """One base model: architecture, tokenizer, and the place of its chat templates."""

    config: str
    """Name of the configuration's class in transformers."""
    options: dict[str, Any] = field(default_factory=dict)
    tokenizer: str = "byte-level"
    templates: str = "text"
    """Where the chat templates are: in the configuration as text or list, in files, or nowhere."""
    old_keys: dict[str, Any] = field(default_factory=dict)
    """Keys of config.json as transformers 4 writes them, for rope_parameters and other names of transformers 5."""
    names_class: bool = True
    experts: tuple[str, ...] = ()
    """Layers of the experts, by the names that an adapter may have."""


THETA = {"rope_theta": 500000.0}
MOE = {
    "head_dim": 8,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
BASES = {
    "llama-tied": Base("LlamaConfig", {"tie_word_embeddings": True}, "byte-fallback", "list", THETA),
    "llama-3": Base(
        "LlamaConfig", {"tie_word_embeddings": False}, templates="files",
        old_keys={**THETA, "rope_scaling": LLAMA_3_ROPE},
    ),
    "qwen2.5": Base("Qwen2Config", {"tie_word_embeddings": True}, old_keys={"rope_theta": 1000000.0}),
    "qwen3": Base("Qwen3Config", {"head_dim": 8, "tie_word_embeddings": True}, old_keys=THETA),
    "gemma": Base("GemmaConfig", {"head_dim": 8}, "unigram", old_keys=THETA),
    "gemma3-text": Base(
        "Gemma3TextConfig", {"head_dim": 8}, "unigram",
        old_keys={**THETA, "rope_local_base_freq": 20000.0},
    ),
    "mistral": Base("MistralConfig", {"sliding_window": None}, "byte-fallback", "none", THETA),
    "phi3": Base("Phi3Config", {}, "byte-fallback", old_keys=THETA),
    "gpt2": Base(
        "GPT2Config", {"n_positions": 256, "n_embd": 32, "n_layer": 2, "n_head": 4},
        templates="none", names_class=False,
    ),
    "qwen3-moe": Base(
        "Qwen3MoeConfig", MOE, old_keys=THETA | {"num_experts": 4},
        experts=("gate_proj", "up_proj", "down_proj"),
    ),
    "mixtral": Base(
        "MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}, "byte-fallback",
        old_keys=THETA, experts=("w1", "w2", "w3"),
    ),
    "granite-hybrid": Base(
        "GraniteMoeHybridConfig",
        {
            "layer_types": ["mamba", "attention"], "num_local_experts": 0, "shared_intermediate_size": 64,
            "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 1,
            "mamba_chunk_size": 16,
        },
        old_keys=THETA | {"layer_types": ["mamba", "attention"]},
    ),
    "lfm2": Base(
        "Lfm2Config", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        old_keys=THETA,
    ),
    "qwen3-next": Base(
        "Qwen3NextConfig",
        {
            **MOE, "shared_expert_intermediate_size": 32, "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
        old_keys=THETA | {"num_experts": 4},
    ),
    "cohere": Base("CohereConfig", {"tie_word_embeddings": True}, templates="list", old_keys=THETA),
    "olmo2": Base("Olmo2Config", {}, old_keys=THETA),
    "gemma3": Base(
        "Gemma3Config",
        {
            "text_config": SIZES | {"head_dim": 8}, "mm_tokens_per_image": 4, "image_token_index": 5,
            "vision_config": {
                "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
                "image_size": 28, "patch_size": 14,
            },
        },
        "unigram",
    ),
}  # fmt: skip


WIDE = {
    "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
    "initializer_range": 0.3,
}  # fmt: skip
# Also by the names of other models, which transformers takes for the same settings.
WIDE_GPT2 = {
    "n_embd": 128, "n_head": 2, "hidden_size": 128, "num_attention_heads": 2, "initializer_range": 0.3,
}  # fmt: skip


def make_base(name: str, folder: Path, *, seed: int = 5, is_wide: bool = False) -> Path:
    """Write a random base model; if it is wide, with heads of 64 numbers, and weights that make one token likely."""
    import torch  # noqa: PLC0415  tests without a model must not wait for torch
    import transformers  # noqa: PLC0415

    base = BASES[name]
    torch.manual_seed(seed)
    options = SIZES | base.options
    if is_wide:
        options |= WIDE_GPT2 if name == "gpt2" else WIDE
        if "mamba_d_head" in options:
            # All heads together have twice the hidden size.
            options["mamba_d_head"] = (
                2 * WIDE["hidden_size"] // options["mamba_n_heads"]
            )
    if "text_config" in base.options:
        text = base.options["text_config"] | (WIDE if is_wide else {})
        options = base.options | {"text_config": text}
    config = getattr(transformers, base.config)(**options)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        if weight.ndim == 1:
            # A new norm has the same weight in each dimension, and so hides a change of the order.
            weight.data += 0.1 * torch.randn_like(weight)
    model.save_pretrained(folder)
    _write_old_config(folder, base)
    _write_tokenizer(folder, base)
    if "vision_config" in base.options:
        _use_old_names(folder / "model.safetensors")
        processor = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 28, "width": 28}}  # fmt: skip
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
        (folder / "processor_config.json").write_text(
            '{"processor_class": "Gemma3Processor", "image_seq_length": 4}'
        )
    return folder


def _use_old_names(path: Path) -> None:
    """Rename the tensors of a vision tower as they are called in hubs; transformers 5 saves other names."""
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    renamed = {}
    for name, tensor in load_file(path).items():
        renamed[name.replace("vision_tower.", "vision_tower.vision_model.")] = tensor
    save_file(renamed, path, metadata={"format": "pt"})


def _write_old_config(folder: Path, base: Base) -> None:
    """Write config.json as transformers 4 does."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["torch_dtype"] = config.pop("dtype")
    if base.old_keys:
        config.pop("rope_parameters", None)
        config |= base.old_keys
    path.write_text(json.dumps(config, indent=2))


def _write_tokenizer(folder: Path, base: Base) -> None:
    """Write the tokenizer's files as transformers 4 does."""
    from tokenizers import AddedToken  # noqa: PLC0415

    tokenizer = TOKENIZERS[base.tokenizer]()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in TURNS])
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False), AddedToken("naïve")])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    config: dict[str, Any] = {
        **names,
        "additional_special_tokens": TURNS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**30,
    }
    if base.names_class:
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if base.templates == "text":
        config["chat_template"] = CHAT_TEMPLATE
    elif base.templates == "list":
        config["chat_template"] = [
            {"name": "default", "template": CHAT_TEMPLATE},
            {"name": "tool_use", "template": TOOL_TEMPLATE},
        ]
    elif base.templates == "files":
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates/tool_use.jinja").write_text(TOOL_TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    special = {**names, "additional_special_tokens": TURNS}
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2))


def _byte_level() -> Any:
    """Return a tokenizer as of GPT-2, Llama 3 and Qwen: every byte is a letter."""
    from tokenizers import ByteLevelBPETokenizer  # noqa: PLC0415

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        SENTENCES, vocab_size=400, show_progress=False, special_tokens=SPECIAL
    )
    return bpe._tokenizer


def _byte_fallback() -> Any:
    """Return a tokenizer as of Llama 2 and Mistral: SentencePiece's BPE, and bytes for unknown letters."""
    import tokenizers  # noqa: PLC0415
    from tokenizers import decoders, models, normalizers, processors  # noqa: PLC0415

    spaces = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = spaces
    trained.train_from_iterator(
        SENTENCES, tokenizers.trainers.BpeTrainer(vocab_size=120, show_progress=False)
    )
    state = json.loads(trained.to_str())["model"]
    pieces = [*SPECIAL, *_BYTES, *state["vocab"]]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    merges = [tuple(merge) for merge in state["merges"]]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )  # fmt: skip
    tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    return tokenizer


def _unigram() -> Any:
    """Return a tokenizer as of T5 and Gemma's kind: SentencePiece's pieces with scores, and bytes."""
    from tokenizers import SentencePieceUnigramTokenizer, Tokenizer, models, processors  # noqa: PLC0415

    trained = SentencePieceUnigramTokenizer()
    trained.train_from_iterator(
        SENTENCES, vocab_size=120, show_progress=False, unk_token="<unk>"
    )
    state = json.loads(trained.to_str())["model"]["vocab"]
    scores = dict.fromkeys(SPECIAL, 0.0) | dict.fromkeys(_BYTES, -20.0)
    for piece, score in state:
        scores.setdefault(piece, score)
    tokenizer = Tokenizer(
        models.Unigram(list(scores.items()), unk_id=3, byte_fallback=True)
    )
    tokenizer.pre_tokenizer = trained._tokenizer.pre_tokenizer
    tokenizer.decoder = trained._tokenizer.decoder
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


_BYTES = [f"<0x{number:02X}>" for number in range(256)]
TOKENIZERS: dict[str, Callable[[], Any]] = {
    "byte-level": _byte_level,
    "byte-fallback": _byte_fallback,
    "unigram": _unigram,
}
