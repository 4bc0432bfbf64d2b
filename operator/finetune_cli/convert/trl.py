"""Configs of TRL's scripts (`trl sft --config`, `trl dpo --config`). Its defaults: the Config classes of TRL 1.16."""

from collections.abc import Mapping
from typing import Any

from finetune_cli.convert.conversion import (
    Conversion,
    Table,
    take_over,
    to,
    without_effect,
)
from finetune_cli.convert.settings import (
    SHARED,
    note_eight_bits,
    optimizer,
    precision,
    remove_overruled,
    scheduler,
    uri_of,
    variant,
)

KEYS = frozenset(
    {
        "model_name_or_path",
        "dataset_name",
        "per_device_train_batch_size",
        "num_train_epochs",
        "use_peft",
    }
)
"""Settings of which a config of TRL has several."""
DPO_KEYS = frozenset(
    {"beta", "precompute_ref_log_probs", "ref_model_sync_steps", "loss_type"}
)
"""Settings that only a training on pairs has; an SFT may have a loss_type, of which nll and dft are SFT's."""
SFT_LOSSES = frozenset({"nll", "dft", "chunked_nll"})


def convert(config: Mapping[str, Any]) -> Conversion:
    """Return the conversion of a config."""
    conversion = Conversion()
    is_dpo = _is_dpo(config)
    conversion.set("model.uri", uri_of(str(config.get("model_name_or_path", ""))))
    _data(conversion, config)
    conversion.set("seed", 42)
    conversion.set(
        "prepare.contextLength",
        config.get("max_length") or config.get("max_seq_length") or 1024,
    )
    if is_dpo:
        conversion.set("train.objective", "DPO")
    else:
        conversion.set("prepare.packing", bool(config.get("packing")))
    _method(conversion, config)
    conversion.set("train.epochs", config.get("num_train_epochs") or 3)
    conversion.set(
        "train.microBatchSize", config.get("per_device_train_batch_size") or 8
    )
    conversion.set("train.gradientCheckpointing", True)
    conversion.set("train.optimizer.learningRate", 1e-6 if is_dpo else 2e-5)
    conversion.set("train.optimizer.scheduler", "Linear")
    conversion.set("train.optimizer.warmupFraction", 0.0)
    take_over(conversion, config, TABLE)
    remove_overruled(conversion)
    return conversion


def _is_dpo(config: Mapping[str, Any]) -> bool:
    loss = config.get("loss_type")
    is_sft = isinstance(loss, str) and loss in SFT_LOSSES
    return bool(config.keys() & DPO_KEYS) and not is_sft


def _data(conversion: Conversion, config: Mapping[str, Any]) -> None:
    uri = uri_of(str(config.get("dataset_name", "")))
    dataset: dict[str, Any] = {"uri": uri}
    split = config.get("dataset_train_split") or "train"
    if uri.startswith("hf://"):
        dataset["split"] = split
        if config.get("dataset_config"):
            dataset["config"] = config["dataset_config"]
    field = config.get("dataset_text_field")
    if field not in {None, "text"}:
        dataset["columns"] = {"text": field}
    conversion.set("datasets", [dataset])
    conversion.set("validation.fraction", 0)
    # TRL validates only if it is asked to, with a split of the same data set.
    strategy = config.get("eval_strategy") or config.get("evaluation_strategy") or "no"
    if strategy != "no" and uri.startswith("hf://"):
        test = config.get("dataset_test_split") or "test"
        conversion.set("validation", {**dataset, "split": test})
    elif strategy != "no":
        conversion.set("validation.fraction", 0.05)
        conversion.note(
            "eval_strategy", "a file has no split: 5 % of its records are held out"
        )


def _method(conversion: Conversion, config: Mapping[str, Any]) -> None:
    if not config.get("use_peft"):
        conversion.set("train.method", "Full")
        return
    conversion.set("train.method", "QLoRA" if config.get("load_in_4bit") else "LoRA")
    conversion.set("train.lora", {"rank": 16, "alpha": 32, "dropout": 0.05})
    note_eight_bits(conversion, config)
    if not config.get("lora_target_modules"):
        text = "PEFT chooses the layers by the architecture; all linear layers stand in the manifest"
        conversion.note("lora_target_modules", text)
        conversion.set("train.lora.targetModules", ["all-linear"])


def loss_type(conversion: Conversion, value: Any) -> None:
    """Take over the loss, of which the sigmoid of DPO is known here."""
    if value not in ("sigmoid", "nll", ["sigmoid"]):
        conversion.note(
            "loss_type",
            f"{value} has no counterpart here: the manifest has DPO's sigmoid, or SFT",
        )


TABLE: Table = {
    **SHARED,
    "model_revision": to("model.revision"),
    "optim": optimizer,
    "lr_scheduler_type": scheduler,
    "beta": to("train.dpo.beta"),
    "label_smoothing": to("train.dpo.labelSmoothing"),
    "loss_type": loss_type,
    "use_rslora": variant("RsLoRA"),
    "use_dora": variant("DoRA"),
    "dtype": precision,
    "torch_dtype": precision,
    "chat_template_path": to("prepare.chatTemplate"),
    **without_effect(
        "model_name_or_path dataset_name dataset_config dataset_train_split dataset_test_split"
        " dataset_text_field max_length max_seq_length packing use_peft load_in_4bit load_in_8bit"
        " num_train_epochs per_device_train_batch_size lora_task_type eval_packing packing_strategy"
        " padding_free completion_only_loss assistant_only_loss precompute_ref_log_probs hub_private_repo"
    ),
}
