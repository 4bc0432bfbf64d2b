"""The model card, README.md: origin, scores, training, hyperparameters and versions."""

import json
import os
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path

from huggingface_hub import EvalResult, ModelCardData

from finetune_trainer.contract import (
    AnyResult,
    DatasetSource,
    Environment,
    EvaluateConfig,
    EvaluateResult,
    PrepareResult,
    PushConfig,
    TrainConfig,
    TrainResult,
)
from finetune_trainer.contract.environment import GIT_SHA
from finetune_trainer.contract.uris import without_secrets
from finetune_trainer.runtime.artifacts import digest_of
from finetune_trainer.runtime.stage_folder import read_config, read_result

LIBRARIES = ("torch", "transformers", "peft", "lm_eval")
OBJECTIVES = {
    "SFT": "SFT: supervised fine-tuning, cross-entropy per token of the completions",
    "DPO": "DPO: [Direct Preference Optimization](https://arxiv.org/abs/2305.18290), loss per pair of completions",
}
"""What was minimised, in words."""


def card(
    config: PushConfig, environment: Environment, form: str, *, has_adapter: bool = True
) -> str:
    """Return README.md, built from the results and configs of earlier stages; omit what is missing.

    `has_adapter` says whether an adapter was trained, or all weights.
    """
    name = config.lineage.pipeline.partition("/")[2]
    train_folder = environment.stage_dir("train", config.train)
    prepared = read_result(environment.stage_dir("prepare", config.prepare))
    trained, train_config = read_result(train_folder), read_config(train_folder)
    evaluated = (
        read_result(environment.stage_dir("evaluate", config.evaluate)) if config.evaluate else None
    )
    scores = evaluated if isinstance(evaluated, EvaluateResult) else None
    kind = _kind(form) if has_adapter else "A base model of which all weights were trained."
    tags = ["lora", form.lower()] if has_adapter else ["full-fine-tuning"]
    tags += (
        ["dpo"]
        if isinstance(train_config, TrainConfig) and train_config.recipe.objective == "DPO"
        else []
    )
    sections = [
        f"---\n{front_matter(config, name, tags, scores, environment)}\n---",
        f"# {name}",
        kind,
        _origin(config, prepared, train_config, train_folder / "output"),
        _evaluation(scores),
        _training(config, trained, train_config),
        _hyper_parameters(train_config, train_folder / "output" if has_adapter else None),
        _versions(),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def front_matter(
    config: PushConfig,
    name: str,
    tags: list[str],
    scores: EvaluateResult | None,
    environment: Environment,
) -> str:
    """Return the card's metadata as YAML for the Hugging Face hub; the scores are its model-index."""
    data = ModelCardData(
        base_model=_hub_name(config.model.uri),
        datasets=list(dict.fromkeys(_hub_name(source.uri) for source in config.datasets)),
        library_name="peft" if "adapter" in tags else "transformers",
        pipeline_tag="text-generation",
        tags=tags,
        model_name=name if scores else None,
        eval_results=_eval_results(config, scores, environment) if scores else None,
    )
    return str(data.to_yaml())


def _hub_name(uri: str) -> str:
    return (
        "/".join(uri.removeprefix("hf://").split("/")[:2])
        if uri.startswith("hf://")
        else without_secrets(uri)
    )


def _eval_results(
    config: PushConfig, scores: EvaluateResult, environment: Environment
) -> list[EvalResult]:
    evaluate_config = read_config(environment.stage_dir("evaluate", config.evaluate or ""))
    tasks = evaluate_config.recipe.tasks if isinstance(evaluate_config, EvaluateConfig) else ()
    files = {task.name: task.file for task in tasks}
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=files.get(task) or task,
            dataset_name=task,
            metric_type=metric,
            metric_value=score.value,
            metric_args={"stderr": score.stderr} if score.stderr is not None else None,
        )
        for task, metrics in scores.scores.items()
        for metric, score in metrics.items()
    ]


def _origin(
    config: PushConfig, prepared: AnyResult | None, train_config: object, trained: Path
) -> str:
    # The last pin may be that of the data set to validate with, which the card does not list.
    pins = prepared.data_pins[: len(config.datasets)] if isinstance(prepared, PrepareResult) else ()
    rows = [
        ("Base model", _place(config.model.uri, config.model.revision, config.model_pin)),
        *(
            ("Data set", _data_set(source, pin))
            for source, pin in zip_longest(config.datasets, pins)
        ),
    ]
    if isinstance(prepared, PrepareResult):
        records = f"{prepared.records:,} read, {prepared.invalid:,} invalid, {prepared.dropped:,} too long"
        unused = f", {prepared.unused:,} left out by weight" if prepared.unused else ""
        rows += [("Data digest", f"`{prepared.data_digest}`"), ("Records", records + unused)]
    if isinstance(train_config, TrainConfig) and (start := train_config.recipe.start_from):
        place = _place(start.uri, start.revision, train_config.start_pin)
        rows.append(
            ("Adapter that training started from", f"{place}, digest `{train_config.start_digest}`")
        )
    rows.append(("Digest of the trained weights", f"`{digest_of(trained)}`"))
    return _table(("", ""), rows)


def _kind(form: str) -> str:
    return (
        "A LoRA adapter, merged into its base model."
        if form == "Merged"
        else "A LoRA adapter for its base model."
    )


def _data_set(source: DatasetSource, pin: str | None) -> str:
    named = {"config": source.config, "split": source.split}
    parts = [f", {name} `{value}`" for name, value in named.items() if value]
    weight = f", weight {source.weight:g}" if source.weight != 1 else ""
    return _place(source.uri, source.revision, pin) + "".join(parts) + weight


def _place(uri: str, revision: str | None, pin: str | None) -> str:
    """Return where content is from: its URI, the revision of the manifest, and what that was when it was read."""
    found = f" (`{pin}`)" if pin and pin != revision else ""
    return f"`{without_secrets(uri)}`" + (f" at `{revision}`" if revision else "") + found


def _evaluation(scores: EvaluateResult | None) -> str:
    if scores is None:
        return ""
    measured = [
        (task, metric, score)
        for task, metrics in scores.scores.items()
        for metric, score in metrics.items()
    ]
    head: tuple[str, ...] = ("Task", "Metric", "Value", "Standard error")
    rows: list[tuple[str, ...]] = [
        (task, metric, _decimals(score.value), _decimals(score.stderr))
        for task, metric, score in measured
    ]
    note = "Measured with lm-eval."
    if any(score.base is not None for _, _, score in measured):
        head += ("Base model", "Standard error of the difference")
        note += " The base model answered the same questions; the difference is paired."
        more = [
            (_decimals(score.base), _decimals(score.difference_stderr)) for _, _, score in measured
        ]
        rows = [(*row, *columns) for row, columns in zip(rows, more, strict=True)]
    return f"## Evaluation\n\n{note}\n\n" + _table(head, rows)


def _decimals(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _training(config: PushConfig, trained: AnyResult | None, train_config: object) -> str:
    lineage = config.lineage
    rows = [("Pipeline", lineage.pipeline)]
    if isinstance(train_config, TrainConfig):
        rows.append(("Objective", OBJECTIVES[train_config.recipe.objective]))
    if isinstance(trained, TrainResult):
        rows += [
            (
                "Optimizer steps",
                f"{trained.steps:,}; the weights are those of step {trained.best_step:,}",
            ),
            ("Tokens", f"{trained.tokens:,}"),
            ("Training loss", f"{trained.loss:.4f}"),
        ]
        if trained.validation_loss is not None:
            rows.append(("Validation loss", f"{trained.validation_loss:.4f}"))
    rows.append(
        (
            "Interruptions",
            f"{lineage.interruptions}; {lineage.lost_steps} steps repeated, {lineage.lost_seconds:.0f} s lost",
        )
    )
    if lineage.spent:
        compared = f"{lineage.on_demand} on on-demand nodes, {lineage.lost} lost to interruptions"
        rows.append(("Cost before the push", f"{lineage.spent}; {compared}"))
    return "## Training\n\n" + _table(("", ""), rows)


def _hyper_parameters(config: object, adapter: Path | None) -> str:
    if isinstance(config, TrainConfig):
        is_dpo = config.recipe.objective == "DPO"
        shown = (
            config.recipe.model_copy(update={"dpo": config.recipe.preference})
            if is_dpo
            else config.recipe
        )
        recipe = shown.model_dump(mode="json", by_alias=True, exclude_none=True)
        rows = [("seed", str(config.seed)), *_flatten(recipe)]
    elif adapter is None:
        return ""
    else:
        settings = json.loads((adapter / "adapter_config.json").read_text())
        rows = [
            (key, f"{settings[key]}")
            for key in ("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora")
        ]
    return "## Hyper-parameters\n\n" + _table(("", ""), rows)


def _flatten(values: dict[str, object], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield (
                prefix + key,
                ", ".join(map(str, value)) if isinstance(value, list) else str(value),
            )


def _versions() -> str:
    rows = [(library, version(library)) for library in LIBRARIES]
    if sha := os.environ.get(GIT_SHA):
        rows.append(("Git commit", f"`{sha}`"))
    return "## Versions\n\n" + _table(("", ""), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
