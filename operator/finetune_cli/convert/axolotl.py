"""Configs of axolotl. Its defaults: src/axolotl/utils/schemas/ in its repository, and Transformers' below them."""

from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from finetune_cli.convert.conversion import (
    Conversion,
    Spec,
    Table,
    ignore,
    says,
    take_over,
    to,
    without_effect,
)
from finetune_cli.convert.settings import (
    SHARED,
    note_eight_bits,
    optimizer,
    remove_overruled,
    scheduler,
    target_modules,
    uri_of,
    variant,
)
from finetune_operator.api.datasets import REPOSITORY

KEYS = frozenset(
    {"base_model", "micro_batch_size", "sequence_len", "adapter", "num_epochs"}
)
"""Settings of which a config of axolotl has several."""
# What axolotl uses if a config does not say. The manifest names it, so that our defaults may change.
DEFAULT_CONTEXT = 512
DEFAULT_SEED = 42
DEFAULT_WARMUP = 0.03
READ_ALIKE = frozenset(
    {"chat_template", "sharegpt", "alpaca", "alpaca_chat", "completion"}
)
"""Types of data sets whose records prepare recognises by their columns."""
FRAME = "axolotl frames the question with `### Instruction:`; here it is a message of the user, in the chat template"


def convert(config: Mapping[str, Any]) -> Conversion:
    """Return the conversion of a config."""
    conversion = Conversion()
    conversion.set("model.uri", uri_of(str(config.get("base_model", ""))))
    conversion.set("datasets", [*_datasets(conversion, config.get("datasets") or [])])
    _validation(conversion, config)
    conversion.set("seed", DEFAULT_SEED)
    conversion.set(
        "prepare.contextLength", config.get("sequence_len") or DEFAULT_CONTEXT
    )
    if not config.get("sample_packing"):
        conversion.set("prepare.packing", False)
    _method(conversion, config)
    conversion.set("train.epochs", config.get("num_epochs") or 1)
    conversion.set("train.microBatchSize", config.get("micro_batch_size") or 1)
    conversion.set("train.optimizer.scheduler", "Cosine")
    conversion.set("train.optimizer.warmupFraction", DEFAULT_WARMUP)
    take_over(conversion, config, TABLE)
    remove_overruled(conversion)
    _without_conflicts(conversion)
    return conversion


def _without_conflicts(conversion: Conversion) -> None:
    """Remove what the API refuses beside another field, or without it."""
    if conversion.get("train.earlyStopping") and not conversion.get("train.evalSteps"):
        conversion.remove("train.earlyStopping")
        conversion.note(
            "early_stopping_patience",
            "not taken over: it counts validations; set train.evalSteps and train.earlyStopping.patience",
        )
    if conversion.get("train.lora.variant") == "DoRA" and conversion.get(
        "train.compile"
    ):
        conversion.remove("train.compile")
        conversion.note("torch_compile", "not taken over: DoRA is not compiled here")
    if conversion.get("train.objective") == "DPO":
        for dataset in conversion.get("datasets"):
            columns = dataset.get("columns", {})
            # The conversation before the two answers.
            if "messages" in columns:
                columns["prompt"] = columns.pop("messages")


def _method(conversion: Conversion, config: Mapping[str, Any]) -> None:
    adapter = config.get("adapter")
    methods = {"lora": "LoRA", "qlora": "QLoRA", None: "Full", "": "Full"}
    method = methods.get(adapter)
    if method is None:
        conversion.note(
            "adapter", f"{adapter} has no counterpart here: LoRA stands in the manifest"
        )
        method = "LoRA"
    if config.get("load_in_4bit") and method == "LoRA":
        method = "QLoRA"
    note_eight_bits(conversion, config)
    conversion.set("train.method", method)
    if method != "Full":
        # PEFT would choose by the architecture; axolotl wants them named.
        conversion.set("train.lora.dropout", 0.0)


def _validation(conversion: Conversion, config: Mapping[str, Any]) -> None:
    sets = [*_datasets(conversion, config.get("test_datasets") or [])]
    if sets:
        first = {name: value for name, value in sets[0].items() if name != "weight"}
        conversion.set("validation", first)
        if len(sets) > 1:
            conversion.note(
                "test_datasets",
                "only the first is taken over: put the others into the same files",
            )
        return
    size = config.get("val_set_size") or 0
    if size > 1:
        conversion.note(
            "val_set_size",
            f"validation.fraction is {size} divided by the number of records",
        )
        return
    conversion.set("validation.fraction", size)


def _datasets(
    conversion: Conversion, entries: list[Mapping[str, Any]]
) -> Iterator[Spec]:
    for index, entry in enumerate(entries):
        setting = f"datasets[{index}]"
        columns = _columns(conversion, setting, entry)
        for uri in _uris(entry):
            dataset: Spec = {"uri": uri}
            if REPOSITORY.fullmatch(uri):
                dataset["split"] = entry.get("split") or "train"
                if entry.get("name"):
                    dataset["config"] = entry["name"]
            if entry.get("revision") and uri.startswith("hf://"):
                dataset["revision"] = entry["revision"]
            if columns:
                dataset["columns"] = dict(columns)
            yield dataset
        if entry.get("shards"):
            text = f"weight: {round(1 / entry['shards'], 4)} takes a sample of that size, not the first shard"
            conversion.note(f"{setting}.shards", text)


def _uris(entry: Mapping[str, Any]) -> Iterator[str]:
    """Yield the URIs of the files of an entry: its path, or files below it."""
    path = str(entry.get("path", ""))
    files = entry.get("data_files") or []
    if isinstance(files, str):
        files = [files]
    names = {PurePath(str(file)).name for file in files}
    # With a file as path, or a format as path, the files are the data.
    if not files or PurePath(path).name in names:
        yield uri_of(path)
        return
    is_format = path in {"json", "csv", "parquet", "text"}
    for file in files:
        if is_format:
            yield uri_of(str(file))
        else:
            yield f"{uri_of(path)}/{file}"


def _columns(
    conversion: Conversion, setting: str, entry: Mapping[str, Any]
) -> dict[str, str]:
    """Return the columns of an entry that have other names than prepare expects."""
    kind = entry.get("type")
    if isinstance(kind, Mapping):
        return _own_columns(conversion, setting, kind)
    name = str(kind or "").replace(":", ".").partition(".")[0]
    columns = {}
    if name.startswith("alpaca"):
        conversion.note(f"{setting}.type", FRAME)
    elif name not in READ_ALIKE:
        text = f"{kind} is not read by its name: prepare recognises records by their columns; see `finetune preview`"
        conversion.note(f"{setting}.type", text)
    if entry.get("field_messages") not in {None, "messages"}:
        columns["messages"] = str(entry["field_messages"])
    elif name == "sharegpt":
        columns["messages"] = "conversations"
    if entry.get("field") not in {None, "text"}:
        columns["text"] = str(entry["field"])
    for key in ("field_chosen", "field_rejected"):
        if entry.get(key):
            columns[key.removeprefix("field_")] = str(entry[key])
    return columns


OWN = {
    "field_instruction": "instruction",
    "field_input": "input",
    "field_output": "output",
    "field_system": "system",
    "field_prompt": "prompt",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
}
"""Field of a type that the user has defined -> column of prepare."""


def _own_columns(
    conversion: Conversion, setting: str, kind: Mapping[str, Any]
) -> dict[str, str]:
    """Return the columns of a type that the user has defined."""
    columns = {}
    for there, here in OWN.items():
        if kind.get(there):
            columns[here] = str(kind[there])
    for key in (
        "system_prompt",
        "format",
        "no_input_format",
        "system_format",
        "prompt_format",
    ):
        if kind.get(key) and kind[key] not in {
            "{instruction}",
            "{instruction} {input}",
            "{system}",
        }:
            text = f"{kind[key]!r} is not taken over: a Jinja template in columns writes such a text"
            conversion.note(f"{setting}.type.{key}", text)
    return columns


def chat_template(conversion: Conversion, value: Any) -> None:
    """Take over the choice of a template: the base model's, or a template of axolotl, which has to be written down."""
    if value in {"tokenizer_default", "jinja"}:
        return
    text = f"the base model's template is used; for axolotl's {value}, set prepare.chatTemplate to a file with its text"
    conversion.note("chat_template", text)


def objective(conversion: Conversion, value: Any) -> None:
    """Take over the objective."""
    if value == "dpo":
        conversion.set("train.objective", "DPO")
        # Pairs are not packed.
        conversion.remove("prepare.packing")
        return
    conversion.note(
        "rl",
        f"{value} has no counterpart here: the manifest trains on completions (SFT)",
    )


TABLE: Table = {
    **SHARED,
    "rl": objective,
    "rl_beta": to("train.dpo.beta"),
    "dpo_beta": to("train.dpo.beta"),
    "dpo_label_smoothing": to("train.dpo.labelSmoothing"),
    "optimizer": optimizer,
    "lr_scheduler": scheduler,
    "cosine_min_lr_ratio": to("train.optimizer.minLearningRateFraction"),
    "lora_target_linear": target_modules,
    "peft_use_rslora": variant("RsLoRA"),
    "peft_use_dora": variant("DoRA"),
    "lora_model_dir": to("train.startFrom.uri", lambda value: uri_of(str(value))),
    "early_stopping_patience": to("train.earlyStopping.patience"),
    "chat_template": chat_template,
    "chat_template_jinja": to("prepare.chatTemplate"),
    "evals_per_epoch": says(
        "evals_per_epoch",
        "train.evalSteps counts steps: the steps of an epoch, which `finetune plan` shows, divided by it",
    ),
    "saves_per_epoch": ignore,
    "mlflow_tracking_uri": to("tracking.mlflow.uri"),
    "mlflow_experiment_name": to("tracking.mlflow.experiment"),
    **without_effect(
        "base_model model_type tokenizer_type adapter load_in_4bit load_in_8bit datasets test_datasets"
        " val_set_size sequence_len sample_packing eval_sample_packing micro_batch_size num_epochs strict"
        " train_on_inputs lora_fan_in_fan_out base_model_config is_llama_derived_model"
        " is_mistral_derived_model shuffle_merged_datasets is_preprocess lora_mlp_kernel lora_qkv_kernel"
        " lora_o_kernel"
    ),
}
