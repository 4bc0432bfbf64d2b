"""Stage evaluate: measures the trained model on lm-eval tasks and held-out records, and the base model beside it."""

import gc
import json
import os
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lm_eval
import torch
import transformers
from jinja2 import TemplateError
from lm_eval.utils import handle_non_serializable

from finetune_trainer.contract import (
    HELD_OUT,
    Environment,
    EvaluateConfig,
    EvaluateRecipe,
    EvaluateResult,
    PrepareResult,
    Score,
)
from finetune_trainer.contract.question_scores import HELD_OUT_FILE, SAMPLES
from finetune_trainer.data.chat_templates import read_chat_templates
from finetune_trainer.data.packing.rows import PackedRows, open_prepared
from finetune_trainer.data.records.chat_template import end_tokens
from finetune_trainer.data.records.records import InvalidRecord
from finetune_trainer.evaluation.batch_size import largest_batch_size
from finetune_trainer.evaluation.language_model import EvaluatedModel, load_lm
from finetune_trainer.evaluation.measured import check_gated
from finetune_trainer.evaluation.prompts import PromptFormat
from finetune_trainer.evaluation.response_cache import (
    CachingLM,
    OnProgress,
    ResponseCache,
)
from finetune_trainer.evaluation.scores import (
    Output,
    compare_scores,
    extract_scores,
    numbers_of,
)
from finetune_trainer.evaluation.tasks import (
    load_tasks,
    members_of,
    prepare_tasks,
)
from finetune_trainer.models.base_model import BaseModel, open_base_model
from finetune_trainer.models.loading import dtype_of, open_trained_adapter
from finetune_trainer.runtime.artifacts import (
    atomic_folder,
    digest_of_value,
    matches_digest,
    seal,
)
from finetune_trainer.runtime.errors import ConfigInvalid, short_reason
from finetune_trainer.runtime.machine.gpu import check_gpu
from finetune_trainer.runtime.progress.progress import ProgressReporter
from finetune_trainer.runtime.stage_folder import Context, read_result
from finetune_trainer.tracking.registry import open_trackers, training_rows
from finetune_trainer.training.determinism import prepare_device
from finetune_trainer.training.held_out import HeldOut, Sums, held_out_scores
from finetune_trainer.training.requirements import check_validation

BASE = "base-"
"""Prefix of what belongs to the base model."""
BOOTSTRAP_RESAMPLES = 1000
"""For metrics whose standard error has no formula. The estimate's relative error is 1/sqrt(2·1000), about 2 %."""
MISTAKES = (
    *(TypeError, KeyError, IndexError, AttributeError, AssertionError),
    *(ZeroDivisionError, re.error, NotImplementedError),
)
"""Errors that lm-eval raises for a task whose settings do not fit together: another attempt meets them again."""


def run(config: EvaluateConfig, context: Context) -> EvaluateResult:
    """Run the stage. Raise ConfigInvalid, DataInvalid, SourceNotFound or ServiceUnavailable."""
    check_gpu(context.environment)
    trackers = open_trackers(config, context)
    context.progress.update(note="loading the tasks and the model")
    held_out = open_held_out(config, context.environment)
    evaluation = None
    # Before the model, which may be large: a mistake in a task ends the stage at once.
    if config.recipe.lm_eval_tasks:
        evaluation = Evaluation(
            config.recipe,
            context.environment,
            seed=config.seed,
            conversations=trained_on_conversations(config, context.environment),
            cache_folder=context.folder,
        )
        check_gated(config.gated, evaluation.metrics)
    model, base = open_models(config, context.environment)
    measured: dict[str, Sums] = {}
    if held_out:
        measured = measure(held_out, config, context, model, base)
    outputs: dict[str, Output] = {}
    if evaluation:
        outputs = ask(evaluation, config, context, model, base)
    with atomic_folder(context.folder / "output", fence=context.fence) as output_folder:
        for prefix, sums in measured.items():
            sums.write(output_folder / f"{prefix}{HELD_OUT_FILE}")
        for prefix, output in outputs.items():
            write_output(output, output_folder, prefix)
        digest = seal(output_folder)
    scores = {}
    if held_out:
        scores[HELD_OUT] = held_out_scores(measured[""], measured.get(BASE))
    if evaluation:
        scores |= evaluation.scores(outputs[""], outputs.get(BASE))
    with trackers:
        trackers.log_all_rows(training_rows(context.environment, config.train))
        trackers.log_scores(numbers_of(scores))
    return EvaluateResult(identity=config.identity, digest=digest, scores=scores)


def open_held_out(config: EvaluateConfig, environment: Environment) -> HeldOut | None:
    """Return the validation rows if the recipe asks for them. Raise DataInvalid if there are none."""
    if not config.recipe.has_held_out or config.training is None:
        return None
    rows = PackedRows(open_prepared(environment, config.prepare), "validation")
    if not len(rows):
        check_validation(None, "prepare has held out none", held_out=True)
    return HeldOut(config.training, rows)


def open_models(
    config: EvaluateConfig, environment: Environment
) -> tuple[EvaluatedModel, EvaluatedModel]:
    """Return the trained model and the base model; neither is loaded yet."""
    source = open_base_model(config.model, environment, config.model_pin)
    adapter = open_trained_adapter(environment, config.train, source)
    dtype = dtype_of(config.dtype, source.folder)
    templates = read_chat_templates(environment, config.prepare)
    is_merged = config.recipe.weights == "Merged"
    model = EvaluatedModel(
        source, adapter, dtype, is_merged=is_merged, chat_templates=templates
    )
    return model, EvaluatedModel(source, None, dtype, chat_templates=templates)


def measure(
    held_out: HeldOut,
    config: EvaluateConfig,
    context: Context,
    model: EvaluatedModel,
    base: EvaluatedModel,
) -> dict[str, Sums]:
    """Measure the validation rows; return what was measured of the trained model, and of the base model if asked."""
    measured = {}
    device = prepare_device()
    if config.recipe.compare_with_base or held_out.needs_base:
        free_memory()
        inputs = digest_of_value(
            {
                "model": base.base.digest,
                "prepare": config.prepare,
                "dtype": str(base.dtype),
            }
        )
        measured[BASE] = held_out.measure_base(base.load(), device, context, inputs)
    free_memory()
    measured[""] = held_out.measure(model.load(), device, context)
    free_memory()
    if not config.recipe.compare_with_base:
        measured.pop(BASE, None)
    return measured


def ask(
    evaluation: "Evaluation",
    config: EvaluateConfig,
    context: Context,
    model: EvaluatedModel,
    base: EvaluatedModel,
) -> dict[str, Output]:
    """Ask the trained model all questions, and then the base model if asked for."""
    compares = config.recipe.compare_with_base
    progress = RequestProgress(context.progress, 2 if compares else 1)
    outputs = {"": evaluation.answer(model, progress.next_model("evaluating"))}
    if compares:
        outputs[BASE] = evaluation.answer(
            base, progress.next_model("evaluating the base model")
        )
    return outputs


def is_output_valid(
    result: EvaluateResult, config: EvaluateConfig, environment: Environment
) -> bool:
    """Return whether lm-eval's output is intact."""
    return matches_digest(
        environment.stage_dir("evaluate", config.identity) / "output", result.digest
    )


def trained_on_conversations(config: EvaluateConfig, environment: Environment) -> bool:
    """Return whether the training records are conversations; False if the prepare stage does not say so."""
    prepared = read_result(environment.stage_dir("prepare", config.prepare))
    return isinstance(prepared, PrepareResult) and prepared.conversations


def scores_of(
    model_folder: Path,
    adapter: Path | None,
    recipe: EvaluateRecipe,
    environment: Environment,
    *,
    seed: int = 0,
) -> dict[str, dict[str, Score]]:
    """Return the scores of a model by task and metric; without an adapter, of the base model. Write no files."""
    evaluation = Evaluation(recipe, environment, seed=seed)
    # Only a cache needs the digest.
    base = BaseModel(str(model_folder), model_folder, digest="")
    dtype = dtype_of("Auto", model_folder)
    model = EvaluatedModel(base, adapter, dtype, is_merged=recipe.weights == "Merged")
    return evaluation.scores(evaluation.answer(model))


class Evaluation:
    """The questions of a recipe, to be answered by one model after the other."""

    def __init__(
        self,
        recipe: EvaluateRecipe,
        environment: Environment,
        *,
        seed: int = 0,
        conversations: bool = False,
        cache_folder: Path | None = None,
    ) -> None:
        """Load the tasks and their data. With `cache_folder`, responses are cached there across runs.

        Raise ConfigInvalid, DataInvalid, SourceNotFound or ServiceUnavailable.
        """
        self._recipe = recipe
        self._seed = seed
        self._cache_folder = cache_folder
        self._prompts = PromptFormat.of(recipe, conversations=conversations)
        # The published model, too, stops at the end of a turn if it was trained on turns.
        self._has_turns = conversations or self._prompts.apply_chat_template
        tasks = recipe.lm_eval_tasks
        loaded = load_tasks(tasks, environment, seed)
        self._tasks = loaded.tasks
        self._questions = loaded.questions
        self.metrics = loaded.metrics
        """The names of the scores of each task, as far as they are known."""
        names = [task.name for task in tasks]
        self._members = members_of(names, self._tasks)

    def answer(
        self,
        model: EvaluatedModel,
        on_progress: OnProgress = lambda _done, _total, _cached: None,
    ) -> Output:
        """Ask a model all questions and return lm-eval's output. The model is in memory only during this call."""
        free_memory()
        try:
            return self._evaluate(self._load(model, on_progress))
        except (TemplateError, InvalidRecord) as error:
            raise ConfigInvalid(
                f"evaluate: the chat template rejects a question: {error}; set evaluate.applyChatTemplate to false, "
                "or set evaluate.fewshotAsMultiturn to false if the template needs turns in another order"
            ) from error
        except MISTAKES as error:
            names = ", ".join(task.name for task in self._recipe.lm_eval_tasks)
            raise ConfigInvalid(
                f"evaluate.tasks ({names}): lm-eval cannot evaluate a task: {short_reason(error)}; "
                "correct its metrics, filters and generation_kwargs"
            ) from error

    def _load(self, model: EvaluatedModel, on_progress: OnProgress) -> CachingLM:
        chat = self._prompts.apply_chat_template
        tokenizer = model.load_tokenizer(apply_chat_template=chat)
        ends = end_tokens(tokenizer, conversations=self._has_turns)
        # A task ends its answers with text, the model with tokens.
        stop_texts = [tokenizer.decode([token]) for token in ends]
        prepare_tasks(self._tasks, self._seed, stop_texts)
        cache_file = None
        if self._cache_folder:
            key = model.cache_key(tokenizer, ends, apply_chat_template=chat)
            cache_file = self._cache_folder / f"answers-{key}.jsonl"
        batch_size = self._recipe.batch_size
        lm = load_lm(
            model,
            tokenizer,
            ends,
            prepare_device(),
            batch_size=batch_size or 1,
            apply_chat_template=chat,
        )
        # Without a batch size in the recipe, the largest that fits into memory is used.
        find_batch_size = None if batch_size else largest_batch_size
        return CachingLM(lm, ResponseCache(cache_file), on_progress, find_batch_size)

    def _evaluate(self, lm: CachingLM) -> Output:
        # By default lm-eval bootstraps in forked processes, which would inherit this process's SIGTERM handler.
        os.environ["DISABLE_MULTIPROC"] = "1"
        transformers.set_seed(self._seed)
        output: Output = lm_eval.evaluate(
            lm=lm,
            task_dict=self._tasks,
            samples=self._questions or None,
            bootstrap_iters=BOOTSTRAP_RESAMPLES,
            **asdict(self._prompts),
        )
        return output

    def scores(
        self, output: Output, base: Output | None = None
    ) -> dict[str, dict[str, Score]]:
        """Return the scores by task and metric, compared with the base model's output if there is one."""
        if base is None:
            return extract_scores(output, self._members)
        return compare_scores(output, base, self._tasks, self._members)


def free_memory() -> None:
    """Free the memory of the model before. The accelerator may have room for a single model."""
    # lm-eval's model and its cache refer to each other, so counting references does not free them.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def write_output(output: Output, folder: Path, prefix: str = "") -> None:
    """Write results.json, and one JSON Lines file per task with its questions and responses.

    The names start with the prefix.
    """
    samples = output.get("samples") or {}
    rest: dict[str, Any] = {
        key: value for key, value in output.items() if key != "samples"
    }
    rest["versions_of_libraries"] = {
        "lm_eval": lm_eval.__version__,
        "transformers": transformers.__version__,
    }
    results = json.dumps(rest, indent=1, default=handle_non_serializable)
    (folder / f"{prefix}results.json").write_text(results)
    for task, task_samples in samples.items():
        lines = [
            json.dumps(sample, default=handle_non_serializable) + "\n"
            for sample in task_samples
        ]
        (folder / f"{prefix}{SAMPLES.format(task)}").write_text("".join(lines))


class RequestProgress:
    """Reports the requests to all models as one count, with an estimate of the remaining time.

    Every model gets the same number of requests, so the total is known as soon as the first model's is.
    """

    def __init__(self, progress: ProgressReporter, models: int) -> None:
        self._progress = progress
        self._models = models
        self._started = time.monotonic()
        self._before = self._latest = (0, 0, 0)
        """Done, total and cached requests of the earlier models, and those with the present one."""

    def next_model(self, note: str) -> OnProgress:
        """Return the callback for the next model; the note says what the stage does meanwhile."""
        self._before = self._latest
        self._models -= 1

        def report(done: int, total: int, cached: int) -> None:
            # No new response of this model yet, so the note is still from the step before.
            if done == cached:
                self._progress.update(note=note)
            earlier_done, earlier_total, earlier_cached = self._before
            self._latest = (
                earlier_done + done,
                earlier_total + total,
                earlier_cached + cached,
            )
            self._report(total)

        return report

    def _report(self, total_of_model: int) -> None:
        done, total, cached = self._latest
        expected = total + self._models * total_of_model
        seconds = (time.monotonic() - self._started) / max(1, done - cached)
        # Cached responses take no time, so they say nothing about the rest.
        remaining = None
        if done > cached:
            remaining = (expected - done) * seconds
        self._progress.update(
            step=done,
            total=expected,
            start_step=cached,
            step_seconds=seconds,
            eta_seconds=remaining,
        )
