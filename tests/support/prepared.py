"""Tokenizers of several kinds, and runs of the prepare stage with them."""

import os
from pathlib import Path
from typing import Any

from support.models import SENTENCES
from support.stages import made

from finetune_trainer.contract import Environment, PrepareConfig, PrepareResult
from finetune_trainer.data.packing import PackedRows, Split

os.environ.setdefault("HF_HUB_OFFLINE", "1")

IDENTITY = "b" * 16


def make_tokenizer(
    folder: Path, *, chat_template: str | None = None, writes_bos: bool = False, trims_offsets: bool = False
) -> Any:
    """Write a byte-level BPE tokenizer and as much of a model as prepare needs; give it as loaded."""
    from tokenizers import ByteLevelBPETokenizer, processors  # noqa: PLC0415  only where a tokenizer is made
    from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast  # noqa: PLC0415

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(SENTENCES, vocab_size=320, show_progress=False, special_tokens=["<pad>", "<bos>", "<eos>"])
    steps: list[Any] = [processors.ByteLevel(add_prefix_space=False, trim_offsets=trims_offsets)]
    if writes_bos:
        steps.append(processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)]))
    bpe._tokenizer.post_processor = processors.Sequence(steps)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    LlamaConfig(vocab_size=320).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def prepare_config(model: Path, uri: str = "data.jsonl", **changes: Any) -> PrepareConfig:
    """A config with rows of 64 tokens and no validation; changes are by field names of data set and recipe."""
    recipe = {name: changes.pop(name) for name in ("context_length", "too_long") if name in changes}
    seed = changes.pop("seed", 5)
    return PrepareConfig.model_validate(
        {
            "identity": IDENTITY,
            "seed": seed,
            "model": {"uri": f"file://{model}"},
            "dataset": {"uri": uri, "validation_fraction": 0, **changes},
            "recipe": {"context_length": 64, **recipe},
        }
    )


def prepare(config: PrepareConfig, environment: Environment) -> PrepareResult:
    return made(config, environment, PrepareResult)


def output_of(environment: Environment) -> Path:
    return environment.stage_dir("prepare", IDENTITY) / "output"


def packed_documents(environment: Environment, split: Split = "train") -> list[tuple[list[int], list[int]]]:
    """Give tokens and counted of every document in the rows, without padding, in the order of the rows."""
    rows = PackedRows(output_of(environment), split)
    found = []
    for tokens, positions, counted in zip(rows.tokens, rows.positions, rows.loss_mask, strict=True):
        starts = [at for at, position in enumerate(positions) if position == 0]
        for first, behind in zip(starts, [*starts[1:], len(tokens)], strict=True):
            if tokens[first] != rows.pad_token_id:
                found.append((tokens[first:behind].tolist(), counted[first:behind].tolist()))
    return found


def counted_texts(environment: Environment, tokenizer: Any) -> list[str]:
    """Give what is learnt of each document, runs of counted tokens joined by a bar; sorted."""
    texts = []
    for tokens, counted in packed_documents(environment):
        runs: list[list[int]] = []
        for at, (token, is_counted) in enumerate(zip(tokens, counted, strict=True)):
            if is_counted and not (at and counted[at - 1]):
                runs.append([])
            if is_counted:
                runs[-1].append(token)
        texts.append("|".join(tokenizer.decode(run) for run in runs))
    return sorted(texts)
