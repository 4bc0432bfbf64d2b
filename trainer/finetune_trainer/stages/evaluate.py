"""Stage evaluate: measures the adapter, or the merged model, on lm-eval tasks."""

import hashlib
import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import lm_eval
import torch
import transformers
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import handle_non_serializable

from finetune_trainer.contract import Environment, EvaluateConfig, EvaluateRecipe, EvaluateResult, Score
from finetune_trainer.evaluation.response_cache import CachingLM, OnProgress, ResponseCache
from finetune_trainer.evaluation.tasks import load_tasks
from finetune_trainer.models.base_model import open_base_model
from finetune_trainer.models.loading import dtype_of, load_base, open_adapter
from finetune_trainer.models.merge import load_merged, with_adapter
from finetune_trainer.runtime.artifacts import (
    atomic_folder,
    canonical_json,
    digest_file,
    digest_of,
    matches_digest,
    seal,
)
from finetune_trainer.runtime.errors import ConfigInvalid
from finetune_trainer.runtime.gpu import check_gpu
from finetune_trainer.runtime.progress import ProgressReporter
from finetune_trainer.runtime.stage_folder import Context
from finetune_trainer.training.determinism import prepare_device

BOOTSTRAP_RESAMPLES = 1000
"""For metrics whose standard error has no formula. The estimate's relative error is 1/sqrt(2·1000), about 2 %."""

MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
"""Patterns of the base model's files that affect its responses."""

Output = dict[str, Any]
"""The return value of lm_eval.evaluate."""


def run(config: EvaluateConfig, context: Context) -> EvaluateResult:
    """Run the stage. Raise ConfigInvalid, DataInvalid, SourceNotFound or ServiceUnavailable."""
    check_gpu(context.environment)
    context.progress.update(note="loading the model and the tasks")
    base = open_base_model(config.model, context.environment)
    output = evaluate_model(
        base.folder,
        open_adapter(context.environment, config.train, base),
        config.recipe,
        context.environment,
        dtype=config.dtype,
        seed=config.seed,
        cache_folder=context.folder,
        on_progress=_progress_callback(context.progress),
    )
    scores = extract_scores(output, config.recipe.tasks)
    with atomic_folder(context.folder / "output") as folder:
        write_output(output, folder)
        digest = seal(folder)
    return EvaluateResult(identity=config.identity, digest=digest, scores=scores)


def is_output_valid(result: EvaluateResult, config: EvaluateConfig, environment: Environment) -> bool:
    """Return whether lm-eval's output is intact."""
    return matches_digest(environment.stage_dir("evaluate", config.identity) / "output", result.digest)


def scores_of(
    model_folder: Path, adapter: Path | None, recipe: EvaluateRecipe, environment: Environment, *, seed: int = 0
) -> dict[str, dict[str, Score]]:
    """Return the scores of a model by task and metric; without an adapter, of the base model. Write no files."""
    return extract_scores(evaluate_model(model_folder, adapter, recipe, environment, seed=seed), recipe.tasks)


def evaluate_model(
    model_folder: Path,
    adapter: Path | None,
    recipe: EvaluateRecipe,
    environment: Environment,
    *,
    dtype: str = "auto",
    seed: int = 0,
    cache_folder: Path | None = None,
    on_progress: OnProgress = lambda _done, _total, _cached: None,
) -> Output:
    """Evaluate a model and return lm-eval's output. With `cache_folder`, responses are cached there across runs."""
    tasks, samples = load_tasks(recipe.tasks, environment, seed)
    torch_dtype = dtype_of(dtype, model_folder)
    file = None
    if cache_folder:
        file = cache_folder / f"answers-{cache_key(model_folder, adapter, recipe.model, torch_dtype)}.jsonl"
    model = CachingLM(_load_lm(model_folder, adapter, recipe, torch_dtype), ResponseCache(file), on_progress)
    transformers.set_seed(seed)
    # By default lm-eval bootstraps in forked processes, which would inherit this process's SIGTERM handler.
    os.environ["DISABLE_MULTIPROC"] = "1"
    output: Output = lm_eval.evaluate(
        lm=model, task_dict=tasks, samples=samples or None, bootstrap_iters=BOOTSTRAP_RESAMPLES
    )
    return output


def _load_lm(model_folder: Path, adapter: Path | None, recipe: EvaluateRecipe, dtype: torch.dtype) -> Any:
    """Load the model that the recipe selects, on the accelerator if there is one."""
    if adapter is None:
        model = load_base(model_folder, dtype)
    elif recipe.model == "adapter":
        model = with_adapter(model_folder, adapter, dtype)
    else:
        model = load_merged(model_folder, adapter, dtype)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder, local_files_only=True)
    return HFLM(
        pretrained=model.to(prepare_device()), tokenizer=tokenizer, batch_size=recipe.batch_size, backend="causal"
    )


def cache_key(model_folder: Path, adapter: Path | None, measured: str, dtype: torch.dtype) -> str:
    """Return 16 hex digits of a hash over everything that affects the model's responses.

    That includes the tokenizer, the chat template and the versions of the libraries.
    """
    files = sorted({path for pattern in MODEL_FILES for path in model_folder.glob(pattern)})
    inputs = {
        "base": {path.name: digest_file(path) for path in files},
        "adapter": digest_of(adapter) if adapter else None,
        "measured": measured,
        "dtype": str(dtype),
        "libraries": [lm_eval.__version__, transformers.__version__],
    }
    return hashlib.sha256(canonical_json(inputs)).hexdigest()[:16]


def extract_scores(output: Output, tasks: Iterable[str]) -> dict[str, dict[str, Score]]:
    """Return the scores of the configured tasks; raise ConfigInvalid if a task has none."""
    scores = {task: _scores(output["results"].get(task, {})) for task in tasks}
    if without_score := [task for task, metrics in scores.items() if not metrics]:
        raise ConfigInvalid(f"evaluate.tasks.{without_score[0]}: lm-eval reports no score; choose a task that has one")
    return scores


def _scores(results: Mapping[str, Any]) -> dict[str, Score]:
    # lm-eval names a metric "acc,none": the metric, a comma, and the filter applied to the responses.
    filters: dict[str, list[str]] = {}
    for key in results:
        metric, comma, filter_name = key.partition(",")
        if comma and not metric.endswith("_stderr") and _number(results[key]) is not None:
            filters.setdefault(metric, []).append(filter_name)
    return {
        metric if len(names) == 1 else f"{metric},{name}": Score(
            value=_number(results[f"{metric},{name}"]), stderr=_number(results.get(f"{metric}_stderr,{name}"))
        )
        for metric, names in filters.items()
        for name in names
    }


def _number(value: Any) -> float | None:
    """Return a finite float with six significant digits, or None for lm-eval's placeholders 'N/A' and nan.

    With six digits, the scores of sixteen tasks fit into a termination message; results.json has all digits.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return float(f"{number:.6g}") if math.isfinite(number) else None


def write_output(output: Output, folder: Path) -> None:
    """Write results.json, and one JSON Lines file per task with its questions and responses."""
    samples = output.get("samples") or {}
    rest = {key: value for key, value in output.items() if key != "samples"}
    rest["versions_of_libraries"] = {"lm_eval": lm_eval.__version__, "transformers": transformers.__version__}
    (folder / "results.json").write_text(json.dumps(rest, indent=1, default=handle_non_serializable))
    for task, task_samples in samples.items():
        lines = (json.dumps(sample, default=handle_non_serializable) + "\n" for sample in task_samples)
        (folder / f"samples-{task}.jsonl").write_text("".join(lines))


def _progress_callback(progress: ProgressReporter) -> OnProgress:
    """Return a callback that reports the number of requests with an estimate of the remaining time."""
    started = time.monotonic()

    def report(done: int, total: int, cached: int) -> None:
        if done == cached:  # no new response yet
            progress.update(note="evaluating")
        seconds = (time.monotonic() - started) / max(1, done - cached)
        remaining = (total - done) * seconds if done > cached else None
        progress.update(step=done, total=total, start_step=cached, step_seconds=seconds, eta_seconds=remaining)

    return report
