"""TRL's trainers, as bench/train.py runs them: without shuffling, so that they see our rows in our order."""

from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from train_bench.benchmark import Benchmark
from train_bench.hf import pauses_of, stack_rows, train_with
from train_bench.measuring import Pause


class InOrderSFT(SFTTrainer):  # type: ignore[misc]  # a library without types
    """TRL's SFTTrainer without shuffling."""

    def _get_train_sampler(self, *_: object) -> None:
        return None


class InOrderDPO(DPOTrainer):  # type: ignore[misc]  # a library without types
    """TRL's DPOTrainer without shuffling, on tokens."""

    def _get_train_sampler(self, *_: object) -> None:
        return None

    def _prepare_dataset(self, dataset: Dataset, *_: object) -> Dataset:
        return dataset


def train_sft(benchmark: Benchmark, **changes: Any) -> list[float]:
    """Train with trl.SFTTrainer; return the times at which the steps ended."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(benchmark.model)
    return train_with(
        benchmark,
        lambda train_dataset, **arguments: InOrderSFT(
            train_dataset=Dataset.from_list(train_dataset).with_format("torch"),
            processing_class=tokenizer,
            data_collator=stack_rows,
            **arguments,
        ),
        SFTConfig,
        dataset_kwargs={"skip_prepare_dataset": True},
        packing=False,
        **changes,
    )


def pauses_sft(benchmark: Benchmark) -> tuple[list[float], list[Pause]]:
    """Return the times at which the steps of trl.SFTTrainer ended, and its checkpoints."""
    return pauses_of(train_sft, InOrderSFT, benchmark)


def train_dpo(benchmark: Benchmark, **changes: Any) -> list[float]:
    """Train with trl.DPOTrainer; return the times at which the steps ended."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(benchmark.model)
    return train_with(
        benchmark,
        lambda train_dataset, **arguments: InOrderDPO(
            train_dataset=Dataset.from_list(train_dataset),
            processing_class=tokenizer,
            **arguments,
        ),
        DPOConfig,
        precompute_ref_log_probs=True,
        remove_unused_columns=True,
        **changes,
    )


def pauses_dpo(benchmark: Benchmark) -> tuple[list[float], list[Pause]]:
    """Return the times at which the steps of trl.DPOTrainer ended, and its checkpoints."""
    return pauses_of(train_dpo, InOrderDPO, benchmark)
