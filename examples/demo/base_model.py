"""The demo's base model: a toy Llama, pre-trained here so that no model hub is needed.

It has two thirds of a million parameters and is pre-trained on doc-strings for about a minute. It learns a little
English and some Python terms, which is enough for LoRA to have something to adapt. It has no other use.
"""

import math
from itertools import chain
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

VOCABULARY = 2048
ROW = 256
"""Tokens in one row of pre-training."""
BATCH_ROWS = 8
"""Rows in one step of pre-training."""
PEAK_LEARNING_RATE = 5e-3


def make(folder: Path, texts: list[str], steps: int, seed: int) -> float:
    """Write model and tokenizer in Hugging Face format; return the mean loss of the last ten steps."""
    tokenizer = train_tokenizer(texts)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(model_config(tokenizer))
    loss = pretrain(model, to_rows(texts, tokenizer), steps)
    disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return loss


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer, which can encode any text."""
    bpe = ByteLevelBPETokenizer()
    special = ["<pad>", "<bos>", "<eos>"]
    bpe.train_from_iterator(
        texts, vocab_size=VOCABULARY, special_tokens=special, show_progress=False
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,  # noqa: SLF001  tokenizers offers no public conversion
        model_max_length=512,
    )
    tokenizer.add_special_tokens(
        {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    )
    return tokenizer


def model_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """Return the config of the smallest Llama that learns the task in a minute on two cores."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def to_rows(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Concatenate all texts, each followed by <eos>, and cut them into rows; the shape is [rows, ROW].

    The texts must be in the order of their files: texts close to each other are about the same module, and a row
    teaches the model that.
    """
    ids = list(
        chain.from_iterable(
            [*tokenizer.encode(text), tokenizer.eos_token_id] for text in texts
        )
    )
    length = len(ids) // ROW * ROW
    return torch.tensor(ids[:length]).view(-1, ROW)


def pretrain(model: LlamaForCausalLM, rows: torch.Tensor, steps: int) -> float:
    """Pre-train the model with the next-token loss; return the mean loss of the last ten steps."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, steps)
    )
    losses = []
    model.train()
    for step in range(steps):
        batch = rows[torch.randint(len(rows), (BATCH_ROWS,))]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if step % 100 == 0:
            print(
                f"base-model: step {step} of {steps}, loss {losses[-1]:.2f}", flush=True
            )
    return sum(losses[-10:]) / len(losses[-10:])


def learning_rate_factor(step: int, steps: int) -> float:
    """Return the fraction of the peak learning rate: linear warm-up over a tenth of the steps, then cosine decay."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))) / 2
