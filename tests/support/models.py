"""Tiny models, tokenizers and stage folders, made on the spot."""

import json
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SENTENCES = [
    f"{subject} {verb} {what} number {number}"
    for number in range(6)
    for subject in ("A reader", "The parser", "Some writer", "This loop")
    for verb in ("opens", "closes", "returns", "ignores")
    for what in ("the file", "a socket", "one row", "the lock")
]


def make_tiny_model(folder: Path, *, hidden: int = 32, layers: int = 2, vocabulary: int = 320, seed: int = 7) -> Path:
    """Write a random Llama (about 60 thousand weights) and a byte-level BPE tokenizer in Hugging Face format."""
    import torch  # noqa: PLC0415  tests that need no model should not wait for torch
    from tokenizers import ByteLevelBPETokenizer  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: PLC0415

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(SENTENCES, vocab_size=vocabulary, special_tokens=["<pad>", "<bos>", "<eos>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_jsonl(path: Path, records: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def prompt_records(count: int) -> list[dict[str, object]]:
    """Records whose completion follows from the prompt, so that a model can learn them."""
    return [
        {
            "prompt": f"{sentence}\nVerb:",
            "completion": " " + next(v for v in ("opens", "closes", "returns", "ignores") if v in sentence),
        }
        for sentence in (SENTENCES * (count // len(SENTENCES) + 1))[:count]
    ]
