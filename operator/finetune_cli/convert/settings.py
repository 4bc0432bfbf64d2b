"""Settings that the tools share, since they all pass them on to Transformers and PEFT."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune_cli.convert.conversion import (
    Conversion,
    Rule,
    Table,
    says,
    to,
    without_effect,
)

OWNER_AND_NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""A repository of the hub, as the tools write it."""
DATA_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".txt", ".gz", ".zst")
SCHEDULERS = {
    "linear": "Linear",
    "cosine": "Cosine",
    "cosine_with_min_lr": "Cosine",
    "constant": "Constant",
    "constant_with_warmup": "Constant",
    "warmup_stable_decay": "WarmupStableDecay",
}
EIGHT_BITS = frozenset({"adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"})
"""Optimizers with moments of 8 bits; ours is not paged, which changes no result."""
ADAMW = frozenset(
    {
        "adamw_torch",
        "adamw_torch_fused",
        "adamw_hf",
        "adamw_apex_fused",
        "adamw",
        "paged_adamw_32bit",
    }
)
NEAREST = "AdamW stands in the manifest, whose learning rate may need to be another"


def uri_of(name: str) -> str:
    """Return the URI of a model or a data set: a path on this machine, a URI as it is, else a repository of the hub."""
    if "://" in name:
        return name
    if Path(name).is_absolute():
        return f"file://{name}"
    is_file = Path(name).exists() or name.endswith(DATA_SUFFIXES)
    if OWNER_AND_NAME.fullmatch(name) and not is_file and not name.startswith("."):
        return f"hf://{name}"
    return name


def optimizer(conversion: Conversion, value: Any) -> None:
    """Take over the optimizer."""
    if value in EIGHT_BITS:
        conversion.set("train.optimizer.name", "AdamW8Bit")
    elif value not in ADAMW:
        conversion.note("optimizer", f"{value} has no counterpart here: {NEAREST}")


def scheduler(conversion: Conversion, value: Any) -> None:
    """Take over the schedule of the learning rate."""
    known = SCHEDULERS.get(str(value))
    if known:
        conversion.set("train.optimizer.scheduler", known)
        return
    text = f"{value} has no counterpart here: Cosine stands in the manifest"
    conversion.note("lr_scheduler", text)
    conversion.set("train.optimizer.scheduler", "Cosine")


def warmup_steps(conversion: Conversion, value: Any) -> None:
    """Take over a warm-up in steps, of which only the fraction of all steps can be expressed."""
    # Transformers reads a value below 1 as a fraction.
    if value < 1:
        conversion.set("train.optimizer.warmupFraction", value)
        return
    steps = conversion.get("train.maxSteps")
    if steps:
        fraction = round(min(1.0, value / steps), 6)
        conversion.set("train.optimizer.warmupFraction", fraction)
        return
    text = f"train.optimizer.warmupFraction should be {value} divided by the steps that `finetune plan` shows"
    conversion.note("warmup_steps", text)


def target_modules(conversion: Conversion, value: Any) -> None:
    """Take over the layers to adapt, as a list or as all of them."""
    if value in ("all-linear", True):
        conversion.set("train.lora.targetModules", ["all-linear"])
        return
    names = value if isinstance(value, list) else str(value).replace(",", " ").split()
    conversion.set("train.lora.targetModules", names)


def every(path: str, setting: str) -> Rule:
    """Return the rule of a number of steps; a fraction of the training cannot be expressed."""

    def rule(conversion: Conversion, value: Any) -> None:
        if value >= 1:
            conversion.set(path, int(value))
            return
        text = f"{path} counts steps: {value} of the steps that `finetune plan` shows"
        conversion.note(setting, text)

    return rule


def variant(name: str) -> Rule:
    """Return the rule of a switch that selects a variant of LoRA."""

    def rule(conversion: Conversion, value: Any) -> None:
        if value:
            conversion.set("train.lora.variant", name)

    return rule


def max_steps(conversion: Conversion, value: Any) -> None:
    """Take over the number of steps; -1 means none for Transformers."""
    if value > 0:
        conversion.set("train.maxSteps", int(value))


def precision(conversion: Conversion, value: Any) -> None:
    """Take over a training in float32."""
    if str(value).removeprefix("torch.") == "float32":
        conversion.set("train.dtype", "FP32")


def half_precision(conversion: Conversion, value: Any) -> None:
    """Add a note that float16 becomes bfloat16."""
    if value:
        text = (
            "train.dtype is BF16, which needs no loss scaling; FP32 on GPUs without it"
        )
        conversion.note("fp16", text)


def note_eight_bits(conversion: Conversion, config: Mapping[str, Any]) -> None:
    """Add a note that a base model in 8 bits becomes one in the training's data type."""
    if config.get("load_in_8bit"):
        text = "the base model is held in train.dtype; QLoRA holds it in 4 bits"
        conversion.note("load_in_8bit", text)


def remove_overruled(conversion: Conversion) -> None:
    """Remove the epochs beside a number of steps, and the adapter of a training without one."""
    if conversion.get("train.maxSteps"):
        conversion.remove("train.epochs")
    if conversion.get("train.method") == "Full":
        conversion.remove("train.lora")


def publish(conversion: Conversion, value: Any) -> None:
    """Publish to a repository of the hub."""
    target = {"uri": f"hf://{value}"}
    # The tools upload what they trained: the adapter, if there is one.
    if conversion.get("train.method") != "Full":
        target["format"] = "Adapter"
    conversion.set("push.targets", [target])


SHARED: Table = {
    "max_steps": max_steps,
    # float: 2e-4 is a text for the YAML reader of most tools, and a number for the tools.
    "learning_rate": to("train.optimizer.learningRate", float),
    "weight_decay": to("train.optimizer.weightDecay", float),
    "max_grad_norm": to("train.optimizer.maxGradNorm", float),
    "adam_beta1": to("train.optimizer.beta1", float),
    "adam_beta2": to("train.optimizer.beta2", float),
    "warmup_ratio": to("train.optimizer.warmupFraction", float),
    "warmup_steps": warmup_steps,
    "gradient_accumulation_steps": to("train.gradientAccumulationSteps"),
    "gradient_checkpointing": to("train.gradientCheckpointing", bool),
    "torch_compile": to("train.compile", bool),
    "neftune_noise_alpha": to("train.neftuneNoiseAlpha", float),
    "lora_r": to("train.lora.rank"),
    "lora_alpha": to("train.lora.alpha"),
    "lora_dropout": to("train.lora.dropout", float),
    "lora_target_modules": target_modules,
    "lora_modules_to_save": to("train.lora.modulesToSave"),
    "eval_steps": every("train.evalSteps", "eval_steps"),
    "save_steps": every("train.checkpoint.everySteps", "save_steps"),
    "save_total_limit": to("train.checkpoint.keep"),
    "seed": to("seed"),
    "hub_model_id": publish,
    "wandb_project": to("tracking.wandb.project"),
    "wandb_entity": to("tracking.wandb.entity"),
    "wandb_mode": to("tracking.wandb.mode", lambda value: str(value).capitalize()),
    "fp16": half_precision,
    "loss_watchdog_threshold": says(
        "loss_watchdog_threshold",
        "not taken over: train.earlyStopping ends a training that gets worse",
    ),
    **without_effect(
        # What only decides how fast, how often reported, or in which folder.
        "bf16 tf32 flash_attention sdp_attention xformers_attention attn_implementation logging_steps"
        " logging_first_step log_level report_to output_dir dataset_prepared_path dataset_processes"
        " dataset_num_proc dataloader_num_workers dataloader_pin_memory gradient_checkpointing_kwargs"
        " pad_to_sequence_len group_by_length save_strategy eval_strategy evaluation_strategy do_train do_eval"
        " eval_batch_size per_device_eval_batch_size overwrite_output_dir hub_strategy push_to_hub"
        " save_safetensors local_rank wandb_watch wandb_log_model wandb_name wandb_run_id run_name ddp_timeout"
        " use_liger_kernel remove_unused_columns load_best_model_at_end resume_from_checkpoint"
        " auto_resume_from_checkpoints debug"
    ),
}
"""Setting -> its rule. The order counts: a warm-up in steps needs the number of steps."""
