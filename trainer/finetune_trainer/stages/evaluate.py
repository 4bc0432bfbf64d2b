"""Stage evaluate: what the adapter, or the model merged with it, scores in lm-eval's tasks."""

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
from finetune_trainer.models.loading import adapter_folder, dtype_of, load_base
from finetune_trainer.models.merge import merge_adapter, with_adapter
from finetune_trainer.runtime.artifacts import (
    atomic_folder,
    canonical_json,
    digest_file,
    digest_of,
    matches_digest,
    seal,
)
from finetune_trainer.runtime.errors import ConfigInvalid
from finetune_trainer.runtime.progress import ProgressReporter
from finetune_trainer.runtime.sources import fetch_model
from finetune_trainer.runtime.stage_folder import Context
from finetune_trainer.training.determinism import prepare_device

BOOTSTRAP_RESAMPLES = 1000
"""For metrics whose standard error has no formula; the error's own relative error is 1/sqrt(2·1000), 2 %."""

MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")

Output = dict[str, Any]
"""What lm_eval.evaluate gives."""


def run(config: EvaluateConfig, context: Context) -> EvaluateResult:
    """Raise ConfigInvalid, DataInvalid, SourceNotFound or ServiceUnavailable."""
    context.progress.update(note="loading the model and the tasks")
    output = evaluate_model(
        fetch_model(config.model.uri, config.model.revision, context.environment),
        adapter_folder(context.environment, config.train),
        config.recipe,
        context.environment,
        dtype=config.dtype,
        seed=config.seed,
        scratch=context.folder,
        tell=_progress_callback(context.progress),
    )
    scores = scores_in(output, config.recipe.tasks)
    with atomic_folder(context.folder / "output") as folder:
        write_output(output, folder)
        digest = seal(folder)
    return EvaluateResult(identity=config.identity, digest=digest, scores=scores)


def is_output_valid(result: EvaluateResult, config: EvaluateConfig, environment: Environment) -> bool:
    """Tell whether lm-eval's output is still there and whole."""
    return matches_digest(environment.stage_dir("evaluate", config.identity) / "output", result.digest)


def scores_of(
    model_folder: Path, adapter: Path | None, recipe: EvaluateRecipe, environment: Environment, *, seed: int = 0
) -> dict[str, dict[str, Score]]:
    """Give task -> metric -> score of a model, without an adapter the base model's own; leaves nothing on the disk."""
    return scores_in(evaluate_model(model_folder, adapter, recipe, environment, seed=seed), recipe.tasks)


def evaluate_model(
    model_folder: Path,
    adapter: Path | None,
    recipe: EvaluateRecipe,
    environment: Environment,
    *,
    dtype: str = "auto",
    seed: int = 0,
    scratch: Path | None = None,
    tell: OnProgress = lambda _done, _total, _known: None,
) -> Output:
    """Ask the model everything and give lm-eval's output; with `scratch`, answers in there are not asked for again."""
    tasks, questions = load_tasks(recipe.tasks, environment, seed)
    numbers = dtype_of(dtype, model_folder)
    file = None
    if scratch:
        file = scratch / f"answers-{cache_key(model_folder, adapter, recipe.model, numbers)}.jsonl"
    model = CachingLM(_load_lm(model_folder, adapter, recipe, numbers), ResponseCache(file), tell)
    transformers.set_seed(seed)
    # lm-eval would bootstrap in forked processes, and those would inherit our handler of SIGTERM.
    os.environ["DISABLE_MULTIPROC"] = "1"
    output: Output = lm_eval.evaluate(
        lm=model, task_dict=tasks, samples=questions or None, bootstrap_iters=BOOTSTRAP_RESAMPLES
    )
    return output


def _load_lm(model_folder: Path, adapter: Path | None, recipe: EvaluateRecipe, dtype: torch.dtype) -> Any:
    """Load what the recipe wants measured, to the accelerator where there is one."""
    if adapter is None:
        model = load_base(model_folder, dtype)
    elif recipe.model == "adapter":
        model = with_adapter(model_folder, adapter, dtype)
    else:
        model = merge_adapter(model_folder, adapter, dtype)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder, local_files_only=True)
    return HFLM(
        pretrained=model.to(prepare_device()), tokenizer=tokenizer, batch_size=recipe.batch_size, backend="causal"
    )


def cache_key(model_folder: Path, adapter: Path | None, measured: str, dtype: torch.dtype) -> str:
    """Give 16 hex digits over all that the model's answers depend on, its tokenizer and chat template included."""
    files = sorted({path for pattern in MODEL_FILES for path in model_folder.glob(pattern)})
    about = {
        "base": {path.name: digest_file(path) for path in files},
        "adapter": digest_of(adapter) if adapter else None,
        "measured": measured,
        "dtype": str(dtype),
        "libraries": [lm_eval.__version__, transformers.__version__],
    }
    return hashlib.sha256(canonical_json(about)).hexdigest()[:16]


def scores_in(output: Output, tasks: Iterable[str]) -> dict[str, dict[str, Score]]:
    """Give the numbers of the tasks asked for; raise ConfigInvalid where a task has none."""
    scores = {task: _scores(output["results"].get(task, {})) for task in tasks}
    if silent := [task for task, metrics in scores.items() if not metrics]:
        raise ConfigInvalid(f"evaluate.tasks.{silent[0]}: lm-eval gives no score for it; name tasks that have one")
    return scores


def _scores(results: Mapping[str, Any]) -> dict[str, Score]:
    # lm-eval names a metric "acc,none": the metric, a comma, the filter through which the answers went.
    filters: dict[str, list[str]] = {}
    for key in results:
        metric, comma, filtered = key.partition(",")
        if comma and not metric.endswith("_stderr") and _number(results[key]) is not None:
            filters.setdefault(metric, []).append(filtered)
    return {
        metric if len(names) == 1 else f"{metric},{filtered}": Score(
            value=_number(results[f"{metric},{filtered}"]), stderr=_number(results.get(f"{metric}_stderr,{filtered}"))
        )
        for metric, names in filters.items()
        for filtered in names
    }


def _number(value: Any) -> float | None:
    """Give a finite float of six digits, or None for what lm-eval puts in place of one: 'N/A', nan.

    results.json has all digits; with six, the scores of sixteen tasks fit into a termination message.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return float(f"{number:.6g}") if math.isfinite(number) else None


def write_output(output: Output, folder: Path) -> None:
    """Write results.json, and each task's questions and answers as JSON Lines."""
    samples = output.get("samples") or {}
    rest = {key: value for key, value in output.items() if key != "samples"}
    rest["versions_of_libraries"] = {"lm_eval": lm_eval.__version__, "transformers": transformers.__version__}
    (folder / "results.json").write_text(json.dumps(rest, indent=1, default=handle_non_serializable))
    for task, answered in samples.items():
        lines = (json.dumps(sample, default=handle_non_serializable) + "\n" for sample in answered)
        (folder / f"samples-{task}.jsonl").write_text("".join(lines))


def _progress_callback(progress: ProgressReporter) -> OnProgress:
    """Turn counts of requests into progress with an estimate of the time left."""
    started = time.monotonic()

    def tell(done: int, total: int, known: int) -> None:
        if done == known:  # the first of this kind of request
            progress.update(note="asking the model")
        seconds = (time.monotonic() - started) / max(1, done - known)
        left = (total - done) * seconds if done > known else None
        progress.update(step=done, total=total, start_step=known, step_seconds=seconds, eta_seconds=left)

    return tell
