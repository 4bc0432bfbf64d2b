"""The demo's base model: a toy, made on the spot so that no hub is needed.

Two thirds of a million weights and a minute of reading doc-strings. It has learnt a little English and some words
of Python, about as much as LoRA needs to have something to adapt, and it is good for nothing else.
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
"""Tokens in one row of the pre-training."""
ROWS = 8
"""Rows in one step of it."""
PEAK_RATE = 5e-3


def make(folder: Path, texts: list[str], steps: int, seed: int) -> float:
    """Write model and tokenizer in Hugging Face format; give the loss of the last steps in nats a token."""
    tokenizer = tokenizer_for(texts)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(shape(tokenizer))
    loss = pretrain(model, rows_of(texts, tokenizer), steps)
    disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return loss


def tokenizer_for(texts: list[str]) -> PreTrainedTokenizerFast:
    """Give a byte-level BPE tokenizer: every text can be written in it."""
    bpe = ByteLevelBPETokenizer()
    special = ["<pad>", "<bos>", "<eos>"]
    bpe.train_from_iterator(texts, vocab_size=VOCABULARY, special_tokens=special, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,  # noqa: SLF001  there is no public way from one library to the other
        model_max_length=512,
    )
    tokenizer.add_special_tokens({"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"})
    return tokenizer


def shape(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """Give the smallest Llama that learns this in a minute on two cores."""
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


def rows_of(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Give all texts as one long line cut into rows, (rows, ROW); <eos> stands between two texts.

    The texts come in the order of their files: what stands close together belongs together, and that is what
    a row teaches.
    """
    ids = list(chain.from_iterable([*tokenizer.encode(text), tokenizer.eos_token_id] for text in texts))
    whole = len(ids) // ROW * ROW
    return torch.tensor(ids[:whole]).view(-1, ROW)


def pretrain(model: LlamaForCausalLM, rows: torch.Tensor, steps: int) -> float:
    """Train the model as a plain language model; give the mean loss of the last ten steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    losses = []
    model.train()
    for step in range(steps):
        batch = rows[torch.randint(len(rows), (ROWS,))]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if step % 100 == 0:
            print(f"base-model: step {step} of {steps}, loss {losses[-1]:.2f}", flush=True)
    return sum(losses[-10:]) / len(losses[-10:])


def rate(step: int, steps: int) -> float:
    """Give the share of the peak rate: linear warm-up over a tenth of the steps, then half a cosine down to zero."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))) / 2
