"""Tokenizers of several kinds, and runs of the stage prepare with them."""

import os
from pathlib import Path
from typing import Any

from support.trainer.models import SENTENCES
from support.trainer.stages import run_to_result

from finetune_trainer.contract import Environment, PrepareConfig, PrepareResult
from finetune_trainer.data.documents import Split
from finetune_trainer.data.packing.rows import PackedRows

os.environ.setdefault("HF_HUB_OFFLINE", "1")

IDENTITY = "b" * 16


def make_tokenizer(
    folder: Path,
    *,
    chat_template: str | None = None,
    writes_bos: bool = False,
    trims_offsets: bool = False,
) -> Any:
    """Write a byte-level BPE tokenizer and what prepare needs of a model; return the loaded tokenizer."""
    from tokenizers import ByteLevelBPETokenizer, processors  # noqa: PLC0415  the import is slow
    from transformers import (  # noqa: PLC0415
        AutoTokenizer,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        SENTENCES,
        vocab_size=320,
        show_progress=False,
        special_tokens=["<pad>", "<bos>", "<eos>"],
    )
    steps: list[Any] = [
        processors.ByteLevel(add_prefix_space=False, trim_offsets=trims_offsets)
    ]
    if writes_bos:
        steps.append(
            processors.TemplateProcessing(
                single="<bos> $A", special_tokens=[("<bos>", 1)]
            )
        )
    bpe._tokenizer.post_processor = processors.Sequence(steps)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=131072,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


RECIPE = (
    "context_length",
    "too_long",
    "packing",
    "max_invalid_fraction",
    "unrendered",
    "chat_template",
    "chat_template_arguments",
)


def prepare_config(
    model: Path,
    uri: str = "data.jsonl",
    *,
    datasets: list[dict[str, Any]] | None = None,
    **changes: Any,
) -> PrepareConfig:
    """Return a config with rows of 64 tokens and no validation; `changes` are fields of data set and recipe."""
    recipe = {name: changes.pop(name) for name in RECIPE if name in changes}
    objective = changes.pop("objective", "SFT")
    seed = changes.pop("seed", 5)
    validation = changes.pop(
        "validation", {"fraction": changes.pop("validation_fraction", 0)}
    )
    return PrepareConfig.model_validate(
        {
            "identity": IDENTITY,
            "seed": seed,
            "model": {"uri": f"file://{model}"},
            "datasets": datasets or [{"uri": uri, **changes}],
            "validation": validation,
            "objective": objective,
            "recipe": {"context_length": 64, **recipe},
        }
    )


def prepare(config: PrepareConfig, environment: Environment) -> PrepareResult:
    return run_to_result(config, environment, PrepareResult)


def prepare_again(config: PrepareConfig, environment: Environment) -> PrepareResult:
    """Run the stage as if it had never run."""
    (environment.stage_dir("prepare", IDENTITY) / "result.json").unlink(missing_ok=True)
    return prepare(config, environment)


def output_folder(environment: Environment) -> Path:
    return environment.stage_dir("prepare", IDENTITY) / "output"


def packed_documents(
    environment: Environment, split: Split = "train"
) -> list[tuple[list[int], list[int]]]:
    """Return tokens and loss mask of every document in the rows, without padding, in the order of the rows."""
    rows = PackedRows(output_folder(environment), split)
    read = rows.read(range(len(rows)))
    documents = []
    for tokens, positions, loss_mask, length in zip(
        read.tokens, read.positions, read.loss_mask, read.lengths, strict=True
    ):
        starts = [
            index for index, position in enumerate(positions[:length]) if position == 0
        ]
        for start, end in zip(starts, [*starts[1:], length], strict=True):
            documents.append(
                (tokens[start:end].tolist(), loss_mask[start:end].tolist())
            )
    return documents


def trained_texts(environment: Environment, tokenizer: Any) -> list[str]:
    """Return the text with loss of each document, sorted; consecutive tokens are one run, runs are joined by a bar."""
    texts = []
    for tokens, loss_mask in packed_documents(environment):
        runs: list[list[int]] = []
        for index, (token, is_target) in enumerate(zip(tokens, loss_mask, strict=True)):
            if is_target and not (index and loss_mask[index - 1]):
                runs.append([])
            if is_target:
                runs[-1].append(token)
        texts.append("|".join(tokenizer.decode(run) for run in runs))
    return sorted(texts)
