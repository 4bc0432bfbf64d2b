"""The model card, README.md: origin, use, scores, training, loss, hyperparameters and versions."""

import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path, PurePosixPath

from huggingface_hub import EvalResult, ModelCardData

from finetune_trainer.contract import (
    AnyResult,
    DatasetSource,
    Environment,
    EvaluateConfig,
    EvaluateResult,
    PrepareResult,
    PushConfig,
    Score,
    TrainConfig,
    TrainResult,
)
from finetune_trainer.contract.environment import GIT_SHA
from finetune_trainer.contract.metric_rows import METRICS, read_rows
from finetune_trainer.contract.results import LAST_STEPS
from finetune_trainer.contract.uris import hub_id, without_secrets
from finetune_trainer.contract.usage import load_code
from finetune_trainer.publishing.loss_chart import loss_section
from finetune_trainer.runtime.artifacts import digest_of
from finetune_trainer.runtime.stage_folder import read_config, read_result

# These decide the numbers of a training and of its evaluation.
LIBRARIES = ("torch", "transformers", "peft", "lm_eval")
ADAPTER_SETTINGS = ("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora")
"""Keys of adapter_config.json that training chose."""
SERVE = "vllm serve ."
"""Command that serves a merged model of this folder."""
NO_ID = re.compile(r"[^\w.-]+", re.ASCII)
"""Matches what the id of a data set must not have."""
OBJECTIVES = {
    "SFT": "SFT: supervised fine-tuning, cross-entropy per token of the completions",
    "DPO": "DPO: [Direct Preference Optimization](https://arxiv.org/abs/2305.18290), loss per pair of completions",
}
"""The minimised loss of each objective, in words."""


def card(
    config: PushConfig, environment: Environment, form: str, *, has_adapter: bool = True
) -> str:
    """Return README.md, built from the results and configs of earlier stages; omit results that are missing.

    `has_adapter` says whether an adapter was trained, or all weights.
    """
    _, _, name = config.lineage.pipeline.partition("/")
    train_folder = environment.stage_dir("train", config.train)
    prepared = read_result(environment.stage_dir("prepare", config.prepare))
    trained = read_result(train_folder)
    train_config = read_config(train_folder)
    scores = _scores(config, environment)
    if has_adapter:
        kind = _kind(form, config)
        tags = ["lora", form.lower()]
        adapter = train_folder / "output"
    else:
        kind = "A base model of which all weights were trained."
        tags = ["full-fine-tuning"]
        adapter = None
    if isinstance(train_config, TrainConfig) and train_config.recipe.objective == "DPO":
        tags.append("dpo")
    sections = [
        f"---\n{front_matter(config, name, tags, scores, environment)}\n---",
        f"# {name}",
        kind,
        _origin(config, prepared, train_config, train_folder / "output"),
        _usage(config, prepared, form),
        _evaluation(scores),
        _training(config, trained, train_config),
        loss_section(read_rows(train_folder / METRICS)),
        _hyper_parameters(train_config, adapter),
        _versions(),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _scores(config: PushConfig, environment: Environment) -> EvaluateResult | None:
    """Return the result of evaluate; None if the pipeline has no such stage, or its result is lost."""
    if not config.evaluate:
        return None
    result = read_result(environment.stage_dir("evaluate", config.evaluate))
    if not isinstance(result, EvaluateResult):
        return None
    return result


def front_matter(
    config: PushConfig,
    name: str,
    tags: list[str],
    scores: EvaluateResult | None,
    environment: Environment,
) -> str:
    """Return the card's metadata as YAML for the Hugging Face hub; the scores are its model-index."""
    # Two splits of one data set are one data set for the hub.
    names = [hub_id(source.uri) for source in config.datasets]
    datasets = dict.fromkeys(name for name in names if name)
    # The hub's model-index needs both a name and results.
    model_name = None
    results = None
    if scores is not None:
        results = _eval_results(config, scores, environment) or None
        model_name = name if results else None
    data = ModelCardData(
        # The hub refuses a card that names anything else here. The text has the other places.
        base_model=hub_id(config.model.uri),
        datasets=list(datasets) or None,
        library_name="peft" if "adapter" in tags else "transformers",
        pipeline_tag="text-generation",
        tags=tags,
        model_name=model_name,
        eval_results=results,
    )
    return str(data.to_yaml())


def _eval_results(
    config: PushConfig, scores: EvaluateResult, environment: Environment
) -> list[EvalResult]:
    evaluate_folder = environment.stage_dir("evaluate", config.evaluate or "")
    evaluate_config = read_config(evaluate_folder)
    files = {}
    if isinstance(evaluate_config, EvaluateConfig):
        files = {task.name: task.file for task in evaluate_config.recipe.tasks}
    results = []
    for task, metric, score in _measured(scores):
        # The metadata become JSON, which has no NaN.
        if not math.isfinite(score.value):
            continue
        arguments = None
        if score.stderr is not None and math.isfinite(score.stderr):
            arguments = {"stderr": score.stderr}
        # A task of the user's own has a name that means something in this pipeline only.
        source = PurePosixPath(files.get(task) or task).name
        results.append(
            EvalResult(
                task_type="text-generation",
                # The hub demands the form of a data set's id.
                dataset_type=NO_ID.sub("-", source),
                dataset_name=task,
                metric_type=metric,
                metric_value=score.value,
                metric_args=arguments,
            )
        )
    return results


def _measured(scores: EvaluateResult) -> list[tuple[str, str, Score]]:
    """Return task, metric and score of each measurement."""
    return [
        (task, metric, score)
        for task, metrics in scores.scores.items()
        for metric, score in metrics.items()
    ]


def _origin(
    config: PushConfig, prepared: AnyResult | None, train_config: object, trained: Path
) -> str:
    model = config.model
    base = _place(model.uri, model.revision, config.model_pin)
    rows = [("Base model", base)]
    pins: tuple[str | None, ...] = ()
    if isinstance(prepared, PrepareResult):
        # The last pin may belong to the data set to validate with, which the card does not list.
        pins = prepared.data_pins[: len(config.datasets)]
    for source, pin in zip_longest(config.datasets, pins):
        rows.append(("Data set", _data_set(source, pin)))
    if isinstance(prepared, PrepareResult):
        rows.append(("Data digest", f"`{prepared.data_digest}`"))
        rows.append(("Records", _records(prepared)))
    if isinstance(train_config, TrainConfig) and train_config.recipe.start_from:
        start = train_config.recipe.start_from
        place = _place(start.uri, start.revision, train_config.start_pin)
        origin = f"{place}, digest `{train_config.start_digest}`"
        rows.append(("Adapter that training started from", origin))
    rows.append(("Digest of the trained weights", f"`{digest_of(trained)}`"))
    return _table(("", ""), rows)


def _records(prepared: PrepareResult) -> str:
    """Return how many records prepare has read, and how many of them it has left out."""
    parts = [
        f"{prepared.records:,} read",
        f"{prepared.invalid:,} invalid",
        f"{prepared.dropped:,} too long",
    ]
    if prepared.unused:
        parts.append(f"{prepared.unused:,} left out by weight")
    return ", ".join(parts)


def _kind(form: str, config: PushConfig) -> str:
    if form == "Merged":
        return "A LoRA adapter, merged into its base model."
    text = "A LoRA adapter for its base model."
    if hub_id(config.model.uri) is None:
        place = without_secrets(config.model.uri)
        text += f" That is not on the Hugging Face hub: load it from `{place}`, then attach the adapter."
    return text


def _data_set(source: DatasetSource, pin: str | None) -> str:
    text = _place(source.uri, source.revision, pin)
    if source.config:
        text += f", config `{source.config}`"
    if source.split:
        text += f", split `{source.split}`"
    if source.weight != 1:
        text += f", weight {source.weight:g}"
    return text


def _place(uri: str, revision: str | None, pin: str | None) -> str:
    """Return the origin of content: its URI, the revision of the manifest, and the pin that it had when it was read."""
    text = f"`{without_secrets(uri)}`"
    if revision:
        text += f" at `{revision}`"
    # A manifest may name the commit itself.
    if pin and pin != revision:
        text += f" (`{pin}`)"
    return text


def _usage(config: PushConfig, prepared: AnyResult | None, form: str) -> str:
    """Return the code that loads the model, and the command that serves it."""
    base = None
    serve = f"To serve it: `{SERVE}`."
    if form == "Adapter":
        uri = config.model.uri
        base = hub_id(uri) or without_secrets(uri)
        serve = ""
    conversations = isinstance(prepared, PrepareResult) and prepared.conversations
    code = load_code(".", base, conversations=conversations)
    place = (
        "`.` is a copy of this folder; a name on the Hugging Face hub works as well."
    )
    parts = ["## How to use", f"```python\n{code}\n```", f"{place} {serve}".rstrip()]
    return "\n\n".join(parts)


def _evaluation(scores: EvaluateResult | None) -> str:
    if scores is None:
        return ""
    measured = _measured(scores)
    has_base = any(score.base is not None for _, _, score in measured)
    note = "Measured with lm-eval."
    head = ["Task", "Metric", "Value", "Standard error"]
    if has_base:
        note += " The base model answered the same questions; the difference is paired."
        head += ["Base model", "Standard error of the difference"]
    rows = []
    for task, metric, score in measured:
        numbers = [score.value, score.stderr]
        if has_base:
            numbers += [score.base, score.difference_stderr]
        rows.append([task, metric, *map(_decimals, numbers)])
    return f"## Evaluation\n\n{note}\n\n" + _table(head, rows)


def _decimals(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4f}"


def _training(
    config: PushConfig, trained: AnyResult | None, train_config: object
) -> str:
    lineage = config.lineage
    rows = [("Pipeline", lineage.pipeline)]
    if isinstance(train_config, TrainConfig):
        objective = train_config.recipe.objective
        rows.append(("Objective", OBJECTIVES[objective]))
    if isinstance(trained, TrainResult):
        steps = f"{trained.steps:,}"
        best = f"{trained.best_step:,}"
        rows.append(("Optimizer steps", f"{steps}; the weights are from step {best}"))
        rows.append(("Tokens", f"{trained.tokens:,}"))
        loss = f"{trained.loss:.4f}, {LAST_STEPS}"
        rows.append(("Training loss", loss))
        if trained.validation_loss is not None:
            rows.append(("Validation loss", f"{trained.validation_loss:.4f}"))
    repeated = f"{lineage.lost_steps} steps repeated"
    lost = f"{lineage.lost_seconds:.0f} s lost"
    rows.append(("Interruptions", f"{lineage.interruptions}; {repeated}, {lost}"))
    if lineage.spent:
        compared = f"{lineage.on_demand} on on-demand nodes, {lineage.lost} lost to interruptions"
        rows.append(("Cost before the push", f"{lineage.spent}; {compared}"))
    return "## Training\n\n" + _table(("", ""), rows)


def _hyper_parameters(config: object, adapter: Path | None) -> str:
    """Return the section from the config of train, or from the adapter if the config is lost; "" without both."""
    if isinstance(config, TrainConfig):
        recipe = config.recipe
        if recipe.objective == "DPO":
            # The settings that training used, also if the manifest has none and the defaults count.
            recipe = recipe.model_copy(update={"dpo": recipe.preference})
        values = recipe.model_dump(mode="json", by_alias=True, exclude_none=True)
        rows = [("seed", str(config.seed)), *_flatten(values)]
    elif adapter is None:
        return ""
    else:
        settings = json.loads((adapter / "adapter_config.json").read_text())
        rows = [(key, f"{settings[key]}") for key in ADAPTER_SETTINGS]
    return "## Hyper-parameters\n\n" + _table(("", ""), rows)


def _flatten(values: dict[str, object], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            yield prefix + key, ", ".join(map(str, value))
        else:
            yield prefix + key, str(value)


def _versions() -> str:
    rows = [(library, version(library)) for library in LIBRARIES]
    sha = os.environ.get(GIT_SHA)
    if sha:
        rows.append(("Git commit", f"`{sha}`"))
    return "## Versions\n\n" + _table(("", ""), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = []
    for cells in (head, ["---"] * len(head), *rows):
        row = " | ".join(cells)
        lines.append(f"| {row} |")
    return "\n".join(lines)
