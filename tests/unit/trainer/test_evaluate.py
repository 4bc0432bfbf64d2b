import json
import shutil
import signal
import time
from pathlib import Path

import pytest
from support.adapters import make_adapter
from support.lm_eval_tasks import write_verbs_task
from support.stages import environment_in, made, message_in, progress_in, refusal, start

from finetune_trainer.contract import (
    Environment,
    EvaluateConfig,
    EvaluateRecipe,
    EvaluateResult,
    ExitCode,
    ModelSource,
    Task,
)

VERBS = {"verbs": Task(file="tasks/verbs.yaml")}


@pytest.fixture(autouse=True)
def own_cache_of_datasets(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets  # noqa: PLC0415  it fixes its folders when it is imported
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)
    cache = tmp_path_factory.getbasetemp() / "datasets"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(cache))


@pytest.fixture
def environment(tmp_path: Path, tiny_model: Path) -> Environment:
    """Two trained adapters, and a task file beside the manifest."""
    here = environment_in(tmp_path)
    for seed, name in enumerate(("first", "second")):
        make_adapter(here.stage_dir("train", name) / "output", tiny_model, seed=seed)
    write_verbs_task(tmp_path / "manifest" / "tasks")
    return here


@pytest.fixture
def config(tiny_model: Path) -> EvaluateConfig:
    return EvaluateConfig(
        identity="e1",
        train="first",
        model=ModelSource(uri=f"file://{tiny_model}"),
        recipe=EvaluateRecipe(tasks=VERBS, batch_size=4),
    )


def with_recipe(config: EvaluateConfig, **changes: object) -> EvaluateConfig:
    recipe = config.recipe.model_copy(update=changes)
    return config.model_copy(update={"recipe": recipe, "identity": f"e{abs(hash(str(changes)))}"})


def result_of(config: EvaluateConfig, environment: Environment) -> EvaluateResult:
    return made(config, environment, EvaluateResult)


def log_likelihoods(config: EvaluateConfig, environment: Environment) -> list[float]:
    samples = environment.stage_dir("evaluate", config.identity) / "output" / "samples-verbs.jsonl"
    return [float(answer[0][0]) for line in samples.open() for answer in json.loads(line)["resps"]]


def test_a_task_file_gives_a_value_and_its_standard_error(environment: Environment, config: EvaluateConfig) -> None:
    score = result_of(config, environment).scores["verbs"]["acc"]
    assert 0 <= score.value <= 1
    # The formula for a mean of zeros and ones, with Bessel's correction.
    assert score.stderr == pytest.approx((score.value * (1 - score.value) / 39) ** 0.5)
    output = environment.stage_dir("evaluate", "e1") / "output"
    assert json.loads((output / "results.json").read_text())["results"]["verbs"]["acc,none"] == score.value
    assert progress_in(environment)["step"] == progress_in(environment)["total"] == 160


def test_a_result_is_repeated_while_its_output_is_whole_and_made_again_when_it_is_not(
    environment: Environment, config: EvaluateConfig
) -> None:
    first = result_of(config, environment)
    results = environment.stage_dir("evaluate", "e1") / "output" / "results.json"
    written = results.stat().st_mtime_ns
    assert result_of(config, environment) == first
    assert results.stat().st_mtime_ns == written
    results.write_text("{}")
    assert result_of(config, environment) == first
    assert results.stat().st_mtime_ns != written


def test_another_adapter_does_not_get_the_answers_of_the_first(
    environment: Environment, config: EvaluateConfig
) -> None:
    # The same stage folder, so the same scratch: an identity that its operator forgot to change.
    result_of(config, environment)
    of_first = log_likelihoods(config, environment)
    (environment.stage_dir("evaluate", "e1") / "result.json").unlink()
    result_of(config.model_copy(update={"train": "second"}), environment)
    of_second = log_likelihoods(config, environment)
    assert max(abs(a - b) for a, b in zip(of_first, of_second, strict=True)) > 0.1


def test_the_merged_model_answers_like_the_base_model_with_its_adapter(
    environment: Environment, config: EvaluateConfig
) -> None:
    beside = result_of(config, environment)
    of_adapter = log_likelihoods(config, environment)
    merged = with_recipe(config, model="merged")
    assert result_of(merged, environment).scores["verbs"].keys() == beside.scores["verbs"].keys()
    assert log_likelihoods(merged, environment) == pytest.approx(of_adapter, abs=1e-3)
    assert log_likelihoods(merged, environment) != of_adapter


def test_without_an_adapter_the_base_model_itself_is_measured(
    environment: Environment, config: EvaluateConfig, tiny_model: Path
) -> None:
    from finetune_trainer.stages.evaluate import evaluate_model, scores_of  # noqa: PLC0415  imports lm_eval

    scores = scores_of(tiny_model, None, config.recipe, environment)
    assert 0 <= scores["verbs"]["acc"].value <= 1
    result_of(config, environment)
    base = evaluate_model(tiny_model, None, config.recipe, environment)["samples"]["verbs"]
    of_base = [float(answer[0][0]) for sample in base for answer in sample["resps"]]
    of_adapter = log_likelihoods(config, environment)
    assert max(abs(a - b) for a, b in zip(of_base, of_adapter, strict=True)) > 0.1


def test_a_limit_and_few_shots_change_what_is_asked(environment: Environment, config: EvaluateConfig) -> None:
    few = with_recipe(config, tasks={"verbs": Task(file="tasks/verbs.yaml", limit=5, few_shot=2)})
    result_of(few, environment)
    output = environment.stage_dir("evaluate", few.identity) / "output"
    samples = [json.loads(line) for line in (output / "samples-verbs.jsonl").open()]
    assert len(samples) == 5
    assert samples[0]["arguments"][0][0].count("Verb:") == 3


def test_perplexity_and_generation_are_measured_and_remembered_too(
    environment: Environment, config: EvaluateConfig
) -> None:
    tasks = environment.manifest_dir / "tasks"  # type: ignore[operator]  # a laptop has one
    verbs = (tasks / "verbs.yaml").read_text()
    head = verbs[: verbs.index("output_type")].replace("task: verbs", "task: {}")
    (tasks / "rolling.yaml").write_text(
        head.format("rolling") + 'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{sentence}}"\n'
        "metric_list:\n  - metric: word_perplexity\n"
    )
    (tasks / "writing.yaml").write_text(
        head.format("writing") + 'output_type: generate_until\ndoc_to_text: "{{sentence}}"\ndoc_to_target: "opens"\n'
        'generation_kwargs: {until: ["\\n"], max_gen_toks: 3}\nmetric_list:\n  - metric: exact_match\n'
    )
    both = with_recipe(
        config, tasks={name: Task(file=f"tasks/{name}.yaml", limit=6) for name in ("rolling", "writing")}
    )
    first = result_of(both, environment)
    assert first.scores["rolling"]["word_perplexity"].value > 1
    assert first.scores["writing"].keys() == {"exact_match"}
    (environment.stage_dir("evaluate", both.identity) / "result.json").unlink()
    assert result_of(both, environment).scores == first.scores
    assert progress_in(environment)["startStep"] == 12


@pytest.mark.parametrize(
    ("tasks", "words", "code"),
    [
        ({"nouns": Task(file="tasks/verbs.yaml")}, "`task: verbs`", ExitCode.CONFIG),
        ({"verbs": Task(file="tasks/none.yaml")}, "none.yaml", ExitCode.NOT_FOUND),
        ({"bad": Task(file="tasks/bad.yaml")}, "evaluate.tasks.bad", ExitCode.CONFIG),
        ({"lost": Task(file="tasks/lost.yaml")}, "evaluate.tasks.lost: its data does not exist", ExitCode.NOT_FOUND),
        ({"torn": Task(file="tasks/torn.yaml")}, "evaluate.tasks.torn: its data cannot be read", ExitCode.DATA),
        ({"empty": Task(file="tasks/empty.yaml")}, "evaluate.tasks.empty", ExitCode.DATA),
    ],
)
def test_a_task_that_cannot_be_made_is_named_with_the_reason(
    environment: Environment, config: EvaluateConfig, tasks: dict[str, Task], words: str, code: ExitCode
) -> None:
    folder = Path(str(environment.manifest_dir)) / "tasks"
    text = (folder / "verbs.yaml").read_text()
    for name in ("lost", "torn", "empty"):
        (folder / f"{name}.yaml").write_text(text.replace("verbs", name))
    (folder / "bad.yaml").write_text("task: bad\ndataset_path: [")
    (folder / "questions" / "torn.jsonl").write_text('{"sentence": "A reader opens')
    (folder / "questions" / "empty.jsonl").write_text("")
    message, found = refusal(with_recipe(config, tasks=tasks), environment)
    assert words in message
    assert found == code


@pytest.fixture
def lm_evals_own_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one of them, unchanged: to read all 14,000 takes seconds."""
    import datasets  # noqa: PLC0415
    from lm_eval.tasks import manager  # noqa: PLC0415

    own = Path(str(manager.__file__)).parent
    shutil.copytree(own / "arc", tmp_path / "own" / "arc")
    monkeypatch.setattr(manager, "__file__", str(tmp_path / "own" / "manager.py"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("lm_evals_own_tasks")
@pytest.mark.parametrize(
    ("name", "words", "code"),
    [
        ("arc_esay", "did you mean arc_easy", ExitCode.CONFIG),
        ("ai2_arc", "evaluate.tasks.ai2_arc: this is a tag for several lm-eval tasks", ExitCode.CONFIG),
        ("arc_easy", "evaluate.tasks.arc_easy: its data cannot be downloaded", ExitCode.UNAVAILABLE),
    ],
)
def test_tasks_of_lm_evals_own_are_known_by_name_and_need_their_data(
    environment: Environment, config: EvaluateConfig, name: str, words: str, code: ExitCode
) -> None:
    message, found = refusal(with_recipe(config, tasks={name: Task(), **VERBS}), environment)
    assert words in message
    assert found == code


def test_a_damaged_adapter_is_not_measured(environment: Environment, config: EvaluateConfig) -> None:
    weights = environment.stage_dir("train", "first") / "output" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    message, code = refusal(config, environment)
    assert "adapter_model.safetensors" in message
    assert code == ExitCode.NOT_FOUND


def test_what_was_answered_before_a_kill_is_not_asked_again(environment: Environment, config: EvaluateConfig) -> None:
    write_verbs_task(Path(str(environment.manifest_dir)) / "tasks", questions=96)
    slow = with_recipe(config, batch_size=1)
    folder = environment.stage_dir("evaluate", slow.identity)

    process = start(slow, environment)
    wait_for_answers(folder, 10)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == ExitCode.INTERRUPTED
    assert message_in(environment).interruption
    answered = len(answers_in(folder))
    assert answered < 4 * 96

    tear_last_line(folder)

    disturbed = result_of(slow, environment)
    assert progress_in(environment)["startStep"] == answered - 1
    assert len(set(answers_in(folder))) == 4 * 96 + 1
    undisturbed = result_of(slow.model_copy(update={"identity": "undisturbed"}), environment)
    assert disturbed.scores == undisturbed.scores


def answers_in(folder: Path) -> list[bytes]:
    return [line for file in folder.glob("answers-*") for line in file.read_bytes().splitlines() if line]


def tear_last_line(folder: Path) -> None:
    (file,) = folder.glob("answers-*")
    file.write_bytes(file.read_bytes()[:-5])


def wait_for_answers(folder: Path, count: int) -> None:
    for _ in range(30000):
        if len(answers_in(folder)) >= count:
            return
        time.sleep(0.01)
    raise AssertionError("the stage did not answer anything within five minutes")
