"""Recognizes files of other programs: they get one error, and not an error for each key."""

from dataclasses import dataclass
from pathlib import Path

from finetune_cli.diagnostics import Diagnostic, closest_match, quoted
from finetune_cli.manifest.annotations import aliases
from finetune_cli.manifest.yaml.reader import YamlNode
from finetune_operator.api.group import API_VERSION, KIND
from finetune_operator.api.spec import PipelineSpec

# Without metadata: tasks of lm-eval have it, too.
HEAD = frozenset({"apiVersion", "kind", "spec"})
"""Keys of a manifest; a file with any of them is meant as a manifest."""
INIT = "`finetune init` writes a pipeline"
NAMES = "docs/guides/quickstart.md names its settings here"


@dataclass(frozen=True)
class OtherFile:
    """A kind of file of another program."""

    words: str
    """What the file is or has, after the word it."""
    keys: frozenset[str]
    """Keys at the top of such a file that few other files have."""
    fix: str


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Of two kinds with as many keys of a file, the first wins: the training script stands behind axolotl's config.
OTHER_FILES = (
    OtherFile(
        "is a task of lm-eval",
        _words(
            "task dataset_path dataset_name dataset_kwargs output_type doc_to_text doc_to_target doc_to_choice"
            " metric_list test_split validation_split training_split fewshot_split generation_kwargs"
            " process_docs group aggregate_metric_list include"
        ),
        "name it in a pipeline: evaluate: {tasks: [{name: TASK, file: FILE}]}",
    ),
    OtherFile(
        "is a config of axolotl",
        _words(
            "base_model model_type tokenizer_type adapter sequence_len sample_packing pad_to_sequence_len"
            " val_set_size micro_batch_size num_epochs lora_target_linear lora_model_dir wandb_project wandb_watch"
            " special_tokens chat_template evals_per_epoch saves_per_epoch dataset_prepared_path strict rl"
            " lora_r flash_attention load_in_8bit load_in_4bit plugins"
        ),
        f"{INIT}, and {NAMES}",
    ),
    OtherFile(
        "is a config of LLaMA-Factory",
        _words(
            "stage do_train finetuning_type lora_target lora_rank dataset dataset_dir template cutoff_len"
            " max_samples overwrite_cache preprocessing_num_workers plot_loss overwrite_output_dir val_size"
            " quantization_bit model_name_or_path pref_beta pref_loss"
        ),
        f"{INIT}, and {NAMES}",
    ),
    OtherFile(
        "has the settings of a training script",
        _words(
            "model_name_or_path per_device_train_batch_size per_device_eval_batch_size num_train_epochs"
            " lr_scheduler_type gradient_accumulation_steps learning_rate output_dir bf16 fp16 max_seq_length"
            " max_length logging_steps save_steps eval_steps report_to use_peft lora_r lora_alpha"
            " dataset_text_field push_to_hub hub_model_id torch_dtype attn_implementation optim warmup_ratio"
            " weight_decay max_steps model dataset tokenizer training loss batch_size epochs recipe checkpointer"
            " lr trainer data"
        ),
        f"{INIT}, and {NAMES}",
    ),
    OtherFile(
        "is a config of Accelerate or DeepSpeed",
        _words(
            "compute_environment distributed_type num_machines num_processes machine_rank main_process_ip"
            " fsdp_config deepspeed_config zero_optimization train_batch_size mixed_precision"
            " train_micro_batch_size_per_gpu"
        ),
        INIT,
    ),
    OtherFile(
        "is the configuration of a model",
        _words(
            "architectures model_type hidden_size num_hidden_layers vocab_size torch_dtype peft_type"
            " base_model_name_or_path target_modules transformers_version"
        ),
        "name its folder in a pipeline: model: {uri: FOLDER}",
    ),
    OtherFile(
        "has records of data",
        _words(
            "messages conversations prompt completion chosen rejected text instruction input output"
            " system question answer"
        ),
        "name the file in a pipeline: datasets: [{uri: FILE}]",
    ),
)


def other_file(file: Path, document: YamlNode) -> Diagnostic | None:
    """Return the error for a document that is no pipeline, and None for a pipeline with or without errors.

    A misspelled kind is an error in a pipeline.
    """
    data = _first(document).data
    if not isinstance(data, dict):
        return None
    kind = data.get("kind")
    if kind is not None:
        return _other_kind(file, kind)
    if not is_other_file(document):
        return None
    message = f"this is no pipeline: it has neither apiVersion, kind nor spec; {INIT}"
    recognized, shared = _most_similar(data)
    spec_keys = aliases(PipelineSpec).keys() & data.keys()
    # A pipeline's spec without its head has keys such as model and datasets, which other files have, too.
    if recognized and shared > len(spec_keys):
        fix = recognized.fix.replace("FILE", file.name)
        fix = fix.replace("TASK", _task(data))
        message = f"this is no pipeline: it {recognized.words}; {fix}"
    elif spec_keys:
        head = f"apiVersion: {API_VERSION}, kind: {KIND}, metadata: {{name: …}}"
        message = f"this is no pipeline: it is the spec of a pipeline; write {head} and spec: above it, and indent it"
    return Diagnostic(file, document.line, "", message)


def is_other_file(document: YamlNode) -> bool:
    """Return whether a document has none of the keys with which a manifest begins."""
    data = _first(document).data
    return isinstance(data, dict) and bool(data) and HEAD.isdisjoint(data)


def _first(document: YamlNode) -> YamlNode:
    """Return the first entry of a list, such as an array of records; any other document itself."""
    if isinstance(document.data, list) and document.data:
        return document.data[0]
    return document


def _other_kind(file: Path, kind: YamlNode) -> Diagnostic | None:
    if not isinstance(kind.data, str) or closest_match(kind.data, [KIND]):
        return None
    message = f"this is no pipeline: it is of the kind {quoted(kind.data)}, and not {KIND}; {INIT}"
    return Diagnostic(file, kind.line, "kind", message)


def _task(data: dict[str, YamlNode]) -> str:
    task = data.get("task")
    if task is not None and isinstance(task.data, str) and task.data.isprintable():
        return task.data
    return "TASK"


def _most_similar(data: dict[str, YamlNode]) -> tuple[OtherFile | None, int]:
    """Return the kind of file that shares the most keys with these, and their number; None if none shares any."""
    similar: OtherFile | None = None
    most = 0
    for other in OTHER_FILES:
        shared = len(other.keys & data.keys())
        if shared > most:
            similar = other
            most = shared
    return similar, most
