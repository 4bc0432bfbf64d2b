"""HF's Trainer with the model and the rows of bench/gpu.py."""

import itertools
import statistics
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import TrainingArguments

from finetune_trainer.data.packing.rows import PackedRows
from train_bench.hf import InOrder, StepTimesCallback, stack_rows
from train_bench.large_model import LargeModel

STEPS = 4


def speed(large: LargeModel) -> dict[str, Any]:
    """Train without checkpoints; return tokens per second and the peak memory.

    Each row is one document here, because with two its attention would need a mask. So it has twice the products of
    tokens with tokens. Ours asks for deterministic kernels; this trainer does not.
    """
    torch.use_deterministic_algorithms(False)
    config = LoraConfig(
        r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    rows = PackedRows(large.folder / "prepare" / "rows" / "output", "train")
    tokens = torch.from_numpy(rows.read(range(len(rows))).tokens.astype(np.int64))
    times = StepTimesCallback("wall")
    arguments = TrainingArguments(
        output_dir=str(large.folder / "theirs"),
        max_steps=STEPS,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=large.rows_per_step,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        bf16=True,
        gradient_checkpointing=False,
        use_cpu=large.device == "cpu",
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=500,
        remove_unused_columns=False,
    )
    trainer = InOrder(
        model=get_peft_model(large.load(), config),
        args=arguments,
        train_dataset=[
            {"input_ids": row, "labels": row} for row in tokens.repeat(STEPS, 1)
        ],
        data_collator=stack_rows,
        callbacks=[times],
    )
    large.reset_peak()
    trainer.train()
    seconds = statistics.median(
        after - before for before, after in itertools.pairwise(times.ends)
    )
    return {
        "seconds a step": seconds,
        "tokens/s": large.rows_per_step * large.context / seconds,
        "peak GiB": large.peak_gib(),
    }
