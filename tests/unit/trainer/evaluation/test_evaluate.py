import json
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.trainer.evaluation import (
    VERBS,
    evaluate_config,
    evaluate_environment,
    load_tiny_lm,
    read_samples,
    run_evaluate,
    with_recipe,
)
from support.trainer.lm_eval_tasks import write_verbs_task
from support.trainer.models import SENTENCES
from support.trainer.stages import (
    read_progress,
    read_termination_message,
    run_to_failure,
    start_stage,
)

from finetune_trainer.contract import Environment, EvaluateConfig, ExitCode, Task

pytestmark = pytest.mark.usefixtures("datasets_cache")


@pytest.fixture
def environment(tmp_path: Path, tiny_model: Path) -> Environment:
    return evaluate_environment(tmp_path, tiny_model)


@pytest.fixture
def config(tiny_model: Path) -> EvaluateConfig:
    return evaluate_config(tiny_model)


def log_likelihoods(config: EvaluateConfig, environment: Environment) -> list[float]:
    return [
        float(response[0][0])
        for sample in read_samples(config, environment)
        for response in sample["resps"]
    ]


def test_task_file_yields_a_score_and_its_standard_error(
    environment: Environment, config: EvaluateConfig
) -> None:
    score = run_evaluate(config, environment).scores["verbs"]["acc"]
    assert 0 <= score.value <= 1
    # Standard error of a mean of zeros and ones, with Bessel's correction.
    assert score.stderr == pytest.approx((score.value * (1 - score.value) / 39) ** 0.5)
    output = environment.stage_dir("evaluate", "e1") / "output"
    assert (
        json.loads((output / "results.json").read_text())["results"]["verbs"][
            "acc,none"
        ]
        == score.value
    )
    assert (
        read_progress(environment)["step"] == read_progress(environment)["total"] == 160
    )


def test_result_is_reused_until_its_output_is_corrupt(
    environment: Environment, config: EvaluateConfig
) -> None:
    first = run_evaluate(config, environment)
    results = environment.stage_dir("evaluate", "e1") / "output" / "results.json"
    modified = results.stat().st_mtime_ns
    assert run_evaluate(config, environment) == first
    assert results.stat().st_mtime_ns == modified
    results.write_text("{}")
    assert run_evaluate(config, environment) == first
    assert results.stat().st_mtime_ns != modified


def test_responses_of_another_adapter_are_not_reused(
    environment: Environment, config: EvaluateConfig
) -> None:
    # Both runs use one stage folder, as if the identity did not depend on the adapter. So the cache must.
    run_evaluate(config, environment)
    of_first = log_likelihoods(config, environment)
    (environment.stage_dir("evaluate", "e1") / "result.json").unlink()
    run_evaluate(config.model_copy(update={"train": "second"}), environment)
    of_second = log_likelihoods(config, environment)
    assert max(abs(a - b) for a, b in zip(of_first, of_second, strict=True)) > 0.1


def test_merged_model_responds_like_base_model_with_adapter(
    environment: Environment, config: EvaluateConfig
) -> None:
    with_adapter = run_evaluate(config, environment)
    of_adapter = log_likelihoods(config, environment)
    merged = with_recipe(config, weights="Merged")
    assert (
        run_evaluate(merged, environment).scores["verbs"].keys()
        == with_adapter.scores["verbs"].keys()
    )
    assert log_likelihoods(merged, environment) == pytest.approx(of_adapter, abs=1e-3)
    assert log_likelihoods(merged, environment) != of_adapter


def test_base_model_is_evaluated_without_an_adapter(
    environment: Environment, config: EvaluateConfig, tiny_model: Path
) -> None:
    import torch  # noqa: PLC0415

    from finetune_trainer.evaluation.language_model import EvaluatedModel  # noqa: PLC0415  imports lm_eval
    from finetune_trainer.models.base_model import BaseModel  # noqa: PLC0415
    from finetune_trainer.stages.evaluate import Evaluation, scores_of  # noqa: PLC0415

    scores = scores_of(tiny_model, None, config.recipe, environment)
    assert 0 <= scores["verbs"]["acc"].value <= 1
    run_evaluate(config, environment)
    model = EvaluatedModel(BaseModel("m", tiny_model, ""), None, torch.float32)
    base = Evaluation(config.recipe, environment).answer(model)["samples"]["verbs"]
    of_base = [float(response[0][0]) for sample in base for response in sample["resps"]]
    of_adapter = log_likelihoods(config, environment)
    assert max(abs(a - b) for a, b in zip(of_base, of_adapter, strict=True)) > 0.1


def test_limit_and_few_shot_change_the_requests(
    environment: Environment, config: EvaluateConfig
) -> None:
    few = with_recipe(
        config,
        tasks=(Task(name="verbs", file="tasks/verbs.yaml", limit=5, few_shot=2),),
    )
    run_evaluate(few, environment)
    samples = read_samples(few, environment)
    assert len(samples) == 5
    assert samples[0]["arguments"][0][0].count("Verb:") == 3


def questions_of(config: EvaluateConfig, environment: Environment) -> list[int]:
    return [sample["doc_id"] for sample in read_samples(config, environment)]


def test_limit_draws_a_sample_that_depends_on_the_seed(
    environment: Environment, config: EvaluateConfig
) -> None:
    asked = []
    for seed, limit in ((0, 5), (0, 8), (1, 5)):
        few = with_recipe(
            config, tasks=(Task(name="verbs", file="tasks/verbs.yaml", limit=limit),)
        )
        few = few.model_copy(update={"seed": seed, "identity": f"s{seed}l{limit}"})
        run_evaluate(few, environment)
        asked.append(questions_of(few, environment))
    assert asked[0] == sorted(asked[0])
    assert asked[0] != list(range(5))
    assert set(asked[0]) < set(asked[1])
    assert asked[2] != asked[0]


def test_perplexity_and_generation_responses_are_cached(
    environment: Environment, config: EvaluateConfig
) -> None:
    tasks = environment.manifest_dir / "tasks"  # type: ignore[operator]  # set in local runs
    verbs = (tasks / "verbs.yaml").read_text()
    head = verbs[: verbs.index("output_type")].replace("task: verbs", "task: {}")
    (tasks / "rolling.yaml").write_text(
        head.format("rolling")
        + 'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{sentence}}"\n'
        "metric_list:\n  - metric: word_perplexity\n"
    )
    (tasks / "writing.yaml").write_text(
        head.format("writing")
        + 'output_type: generate_until\ndoc_to_text: "{{sentence}}"\ndoc_to_target: "opens"\n'
        'generation_kwargs: {until: ["\\n"], max_gen_toks: 3}\nmetric_list:\n  - metric: exact_match\n'
    )
    both = with_recipe(
        config,
        tasks=tuple(
            Task(name=name, file=f"tasks/{name}.yaml", limit=6)
            for name in ("rolling", "writing")
        ),
    )
    first = run_evaluate(both, environment)
    assert first.scores["rolling"]["word_perplexity"].value > 1
    assert first.scores["writing"].keys() == {"exact_match"}
    (environment.stage_dir("evaluate", both.identity) / "result.json").unlink()
    assert run_evaluate(both, environment).scores == first.scores
    assert read_progress(environment)["startStep"] == 12


def test_texts_in_several_windows_form_the_same_batches(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lm-eval gets the texts in parts, so that each part is cached; the batches are the same as in one call."""
    import torch  # noqa: PLC0415
    from lm_eval.models.huggingface import HFLM  # noqa: PLC0415  imports lm_eval

    from finetune_trainer.evaluation.response_cache import CachingLM, ResponseCache  # noqa: PLC0415

    lm = load_tiny_lm(tiny_model, batch_size=4)
    lm._max_length = 16
    batches: list[list[list[int]]] = []
    call = HFLM._model_call

    def record(self: HFLM, inps: torch.Tensor) -> torch.Tensor:
        batches.append(inps.tolist())
        return call(self, inps)

    monkeypatch.setattr(HFLM, "_model_call", record)
    texts = [
        " ".join(SENTENCES[start : start + count])
        for start, count in ((0, 1), (1, 7), (9, 2), (20, 1), (30, 9))
    ]
    requests = [SimpleNamespace(args=(text,)) for text in texts]
    expected = lm.loglikelihood_rolling(requests)
    of_one_call, batches = batches, []
    durable: list[tuple[int, int]] = []
    caching = CachingLM(
        lm,
        ResponseCache(),
        lambda done, _total, _cached: durable.append((done, len(batches))),
    )
    assert caching.loglikelihood_rolling(requests) == expected
    assert batches == of_one_call
    assert durable[1][1] < len(
        batches
    )  # the first response is cached before the last batch


@pytest.mark.parametrize(
    ("tasks", "expected", "code"),
    [
        (
            (Task(name="nouns", file="tasks/verbs.yaml"),),
            "`task: verbs`",
            ExitCode.CONFIG,
        ),
        (
            (Task(name="verbs", file="tasks/none.yaml"),),
            "none.yaml",
            ExitCode.NOT_FOUND,
        ),
        (
            (Task(name="bad", file="tasks/bad.yaml"),),
            "evaluate.tasks[bad]",
            ExitCode.CONFIG,
        ),
        (
            (Task(name="lost", file="tasks/lost.yaml"),),
            "evaluate.tasks[lost]: tasks/lost.yaml: its data does not exist",
            ExitCode.NOT_FOUND,
        ),
        (
            (Task(name="torn", file="tasks/torn.yaml"),),
            "evaluate.tasks[torn]: tasks/torn.yaml: its data cannot be read",
            ExitCode.DATA,
        ),
        (
            (Task(name="empty", file="tasks/empty.yaml"),),
            "evaluate.tasks[empty]",
            ExitCode.DATA,
        ),
    ],
)
def test_task_that_cannot_be_loaded_is_reported_with_the_reason(
    environment: Environment,
    config: EvaluateConfig,
    tasks: dict[str, Task],
    expected: str,
    code: ExitCode,
) -> None:
    folder = Path(str(environment.manifest_dir)) / "tasks"
    text = (folder / "verbs.yaml").read_text()
    for name in ("lost", "torn", "empty"):
        (folder / f"{name}.yaml").write_text(text.replace("verbs", name))
    (folder / "bad.yaml").write_text("task: bad\ndataset_path: [")
    (folder / "questions" / "torn.jsonl").write_text('{"sentence": "A reader opens')
    (folder / "questions" / "empty.jsonl").write_text("")
    message, exit_code = run_to_failure(with_recipe(config, tasks=tasks), environment)
    assert expected in message
    assert exit_code == code


@pytest.fixture
def built_in_arc_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce lm-eval's built-in tasks to arc, unchanged: reading all 14,000 takes seconds."""
    import datasets  # noqa: PLC0415
    from lm_eval.tasks import manager  # noqa: PLC0415

    built_in = Path(str(manager.__file__)).parent
    shutil.copytree(built_in / "arc", tmp_path / "built-in" / "arc")
    monkeypatch.setattr(manager, "__file__", str(tmp_path / "built-in" / "manager.py"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("built_in_arc_tasks")
@pytest.mark.parametrize(
    ("name", "expected", "code"),
    [
        ("arc_esay", "did you mean arc_easy", ExitCode.CONFIG),
        (
            "ai2_arc",
            "evaluate.tasks[ai2_arc]: this is a tag for several lm-eval tasks",
            ExitCode.CONFIG,
        ),
        (
            "arc_easy",
            "evaluate.tasks[arc_easy]: its data cannot be downloaded",
            ExitCode.UNAVAILABLE,
        ),
    ],
)
def test_built_in_task_that_cannot_be_loaded_is_reported(
    environment: Environment,
    config: EvaluateConfig,
    name: str,
    expected: str,
    code: ExitCode,
) -> None:
    message, exit_code = run_to_failure(
        with_recipe(config, tasks=(Task(name=name), *VERBS)), environment
    )
    assert expected in message
    assert exit_code == code


def test_corrupt_adapter_is_not_evaluated(
    environment: Environment, config: EvaluateConfig
) -> None:
    weights = (
        environment.stage_dir("train", "first") / "output" / "adapter_model.safetensors"
    )
    weights.write_bytes(weights.read_bytes()[:-1])
    message, code = run_to_failure(config, environment)
    assert "adapter_model.safetensors" in message
    assert code == ExitCode.NOT_FOUND


def test_requests_answered_before_a_kill_are_not_repeated(
    environment: Environment, config: EvaluateConfig
) -> None:
    write_verbs_task(Path(str(environment.manifest_dir)) / "tasks", questions=96)
    slow = with_recipe(config, batch_size=1)
    folder = environment.stage_dir("evaluate", slow.identity)

    process = start_stage(slow, environment)
    wait_for_responses(folder, 10)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == ExitCode.INTERRUPTED
    assert read_termination_message(environment).interruption
    answered = len(cached_responses(folder))
    assert answered < 4 * 96

    truncate_last_line(folder)

    resumed = run_evaluate(slow, environment)
    assert read_progress(environment)["startStep"] == answered - 1
    assert len(set(cached_responses(folder))) == 4 * 96 + 1
    uninterrupted = run_evaluate(
        slow.model_copy(update={"identity": "uninterrupted"}), environment
    )
    assert resumed.scores == uninterrupted.scores


def cached_responses(folder: Path) -> list[bytes]:
    return [
        line
        for file in folder.glob("answers-*")
        for line in file.read_bytes().splitlines()
        if line
    ]


def truncate_last_line(folder: Path) -> None:
    (file,) = folder.glob("answers-*")
    file.write_bytes(file.read_bytes()[:-5])


def wait_for_responses(folder: Path, count: int) -> None:
    for _ in range(30000):
        if len(cached_responses(folder)) >= count:
            return
        time.sleep(0.01)
    raise AssertionError(
        f"the stage did not cache {count} responses within five minutes"
    )
