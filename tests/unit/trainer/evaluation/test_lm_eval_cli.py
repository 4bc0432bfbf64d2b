"""The stage reports what lm-eval's own command line reports for the merged model, digit by digit.

The command line gets the model as `push` publishes it: merged weights, tokenizer and chat template in one folder. Both
run with the same threads, data type, batch size and seed. Compared exactly are

- every metric and every standard error of lm-eval's results, those by bootstrap with lm-eval's 100,000 resamples; the
  stage itself takes 1,000,
- every prompt, log-likelihood and generated text.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from support.trainer.evaluation import (
    evaluate_config,
    evaluate_environment,
    make_chat_model,
    read_samples,
    run_evaluate,
    write_prepare_result,
)
from support.trainer.lm_eval_tasks import write_verbs_task

from finetune_trainer.contract import Environment, EvaluateConfig, Task
from finetune_trainer.stages import evaluate

pytestmark = pytest.mark.usefixtures("datasets_cache")

DATA = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: questions/{data}.jsonl}}}}
test_split: test
"""
TASKS = {
    "choices": DATA.format(name="choices", data="verbs")
    + """\
output_type: multiple_choice
doc_to_text: "{{sentence}}\\nVerb:"
doc_to_choice: [opens, closes, returns, ignores]
doc_to_target: label
num_fewshot: 2
fewshot_split: test
metric_list: [{metric: acc}, {metric: acc_norm}, {metric: brier_score}]
""",
    "writing": DATA.format(name="writing", data="verbs")
    + """\
output_type: generate_until
doc_to_text: "{{sentence}}"
doc_to_target: "opens"
num_fewshot: 1
fewshot_split: test
generation_kwargs: {until: ["x"], max_gen_toks: 12}
metric_list: [{metric: exact_match}, {metric: chrf}]
""",
    "likelihood": DATA.format(name="likelihood", data="verbs")
    + """\
output_type: loglikelihood
doc_to_text: "A sentence:"
doc_to_target: " {{sentence}}"
metric_list: [{metric: perplexity}, {metric: acc}]
""",
    # Several times the model's context of 512 tokens, so that a batch holds windows of several texts.
    "rolling": DATA.format(name="rolling", data="long")
    + """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{sentence}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
}
SYSTEM = "Answer with one verb. "
BATCH_SIZE = 4


def write_tasks(folder: Path) -> None:
    write_verbs_task(folder, questions=16)
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text)
    sentences = [
        json.loads(line)["sentence"]
        for line in (folder / "questions" / "verbs.jsonl").open()
    ]
    texts = [
        " ".join(sentences * repeats)[shift:]
        for repeats, shift in ((3, 0), (8, 5), (1, 100), (5, 40), (1, 200))
    ]
    (folder / "questions" / "long.jsonl").write_text(
        "".join(json.dumps({"sentence": text}) + "\n" for text in texts)
    )


def write_merged(folder: Path, base: Path, environment: Environment) -> Path:
    import torch  # noqa: PLC0415
    from transformers import AutoTokenizer  # noqa: PLC0415

    from finetune_trainer.data.records.chat_template import end_tokens  # noqa: PLC0415
    from finetune_trainer.models.trained.merge import save_merged  # noqa: PLC0415
    from finetune_trainer.publishing.generation_config import generation_config  # noqa: PLC0415

    folder.mkdir(parents=True, exist_ok=True)
    save_merged(
        base, environment.stage_dir("train", "first") / "output", torch.float32, folder
    )
    tokenizer = AutoTokenizer.from_pretrained(base)
    generation = generation_config(base, end_tokens(tokenizer, conversations=True))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    tokenizer.save_pretrained(folder)
    return folder


def link_lm_eval(folder: Path) -> Path:
    """Link lm-eval's code without its 14,000 task files, whose index takes the command line half a minute."""
    package = Path(str(lm_eval.__file__)).parent
    (folder / "lm_eval" / "tasks").mkdir(parents=True)
    for path in (*package.iterdir(), *package.glob("tasks/*.py")):
        if path.name not in {"tasks", "__pycache__"}:
            (folder / "lm_eval" / path.relative_to(package)).symlink_to(path)
    return folder


def run_command_line(
    merged: Path, tasks: Path, output: Path, datasets_cache: Path, options: list[str]
) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """Run `python -m lm_eval`; return the results and the samples by task."""
    command = [
        *(
            sys.executable,
            "-m",
            "lm_eval",
            "run",
            "--model",
            "hf",
            "--device",
            "cpu",
            "--seed",
            "5",
        ),
        *(
            "--model_args",
            f"pretrained={merged},dtype=float32",
            "--batch_size",
            str(BATCH_SIZE),
        ),
        *("--tasks", ",".join(str(tasks / f"{name}.yaml") for name in TASKS)),
        *("--output_path", str(output), "--log_samples", *options),
    ]
    variables = {
        "HF_DATASETS_CACHE": str(datasets_cache),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "DISABLE_MULTIPROC": "1",
        "PYTHONPATH": str(link_lm_eval(output / "code")),
        "HF_HOME": str(output / "home"),
    }
    done = subprocess.run(
        command,
        cwd=tasks,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = output.rglob("results_*.json")
    files = {name: next(output.rglob(f"samples_{name}_*.jsonl")) for name in TASKS}
    samples = {
        name: [json.loads(line) for line in file.open()] for name, file in files.items()
    }
    return json.loads(results.read_text())["results"], samples


def metrics_of(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        task: {key: value for key, value in numbers.items() if "," in key}
        for task, numbers in results.items()
    }


def answers_of(samples: list[dict[str, Any]]) -> dict[int, Any]:
    """Return prompts and responses by question; generation arguments are left out, which list the end of a turn."""
    return {
        sample["doc_id"]: (
            [_texts(arguments) for arguments in _arguments(sample)],
            _as_texts(sample["resps"]),
        )
        for sample in samples
    }


def _as_texts(value: Any) -> Any:
    """Return nested lists with every number as text, with all its digits, as the command line writes them."""
    if isinstance(value, list):
        return [_as_texts(item) for item in value]
    return str(value)


def _arguments(sample: dict[str, Any]) -> list[Any]:
    # The command line writes {"gen_args_0": {"arg_0": …}}, lm_eval.evaluate returns [[…]].
    arguments = sample["arguments"]
    if isinstance(arguments, dict):
        return [list(request.values()) for request in arguments.values()]
    return list(arguments)


def _texts(arguments: list[Any]) -> list[str]:
    return [argument for argument in arguments if isinstance(argument, str)]


CALLS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "template": (
        {"apply_chat_template": True, "system_instruction": SYSTEM},
        ["--apply_chat_template", "--system_instruction", SYSTEM],
    ),
}
if os.environ.get("TRAINING") == "all":
    CALLS["plain"] = ({"apply_chat_template": False}, [])


@pytest.mark.parametrize(("recipe", "options"), CALLS.values(), ids=CALLS)
def test_scores_equal_those_of_the_command_line(  # noqa: PLR0917  fixtures
    tmp_path: Path,
    tiny_model: Path,
    datasets_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    recipe: dict[str, Any],
    options: list[str],
) -> None:
    base = make_chat_model(tmp_path / "base", tiny_model)
    environment = evaluate_environment(tmp_path, base)
    tasks = tmp_path / "manifest" / "tasks"
    write_tasks(tasks)
    merged = write_merged(tmp_path / "merged", base, environment)
    expected, expected_samples = run_command_line(
        merged, tasks, tmp_path / "lm_eval", datasets_cache, options
    )

    write_prepare_result(environment, conversations=True)
    names = tuple(Task(name=name, file=f"tasks/{name}.yaml") for name in TASKS)
    config = evaluate_config(
        base, tasks=names, weights="Merged", batch_size=BATCH_SIZE, **recipe
    )
    config = config.model_copy(update={"dtype": "FP32", "seed": 5})
    monkeypatch.setattr(evaluate, "BOOTSTRAP_RESAMPLES", 100_000)
    run_evaluate(config, environment)

    assert metrics_of(read_results(config, environment)) == metrics_of(expected)
    for name in TASKS:
        assert answers_of(read_samples(config, environment, name)) == answers_of(
            expected_samples[name]
        ), name
    stderrs = [
        value
        for numbers in metrics_of(expected).values()
        for key, value in numbers.items()
        if "_stderr," in key
    ]
    assert sum(isinstance(value, float) for value in stderrs) >= 6  # not all are "N/A"


def read_results(config: EvaluateConfig, environment: Environment) -> dict[str, Any]:
    output = environment.stage_dir("evaluate", config.identity) / "output"
    results: dict[str, Any] = json.loads((output / "results.json").read_text())[
        "results"
    ]
    return results
