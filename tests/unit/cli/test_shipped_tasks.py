"""Gates on tasks that lm-eval ships are accepted with each metric and filter that lm-eval reports for them.

The expected names are from lm-eval's own loader of task files and from its registry. No data is read.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from lm_eval.api.registry import DEFAULT_METRIC_REGISTRY
from lm_eval.tasks._yaml_loader import load_yaml

from finetune_cli.checks.built_in_tasks import BuiltInTasks, read_built_in_tasks
from finetune_cli.checks.tasks import task_errors
from finetune_cli.manifest.manifest import Manifest, read
from finetune_trainer.contract import Environment

LISTED = """
arc_easy arc_challenge hellaswag piqa winogrande boolq openbookqa sciq race copa rte cb wic record
gsm8k gsm8k_cot hendrycks_math minerva_math_algebra mathqa asdiv drop triviaqa nq_open squadv2 webqs
mmlu mmlu_anatomy mmlu_pro mmlu_pro_biology truthfulqa_mc1 truthfulqa_mc2 truthfulqa_gen ifeval humaneval mbpp
bbh bbh_cot_fewshot_navigate lambada_openai lambada wikitext commonsense_qa social_iqa logiqa logiqa2 medmcqa
medqa_4options pubmedqa headqa_en anli_r1 xnli_en xcopa_it xwinograd_en belebele_eng_Latn mgsm_direct_en
gpqa_main_zeroshot leaderboard leaderboard_bbh ceval-valid cmmlu cola mnli mrpc qnli qqp sst2 wnli swag prost
toxigen crows_pairs_english blimp blimp_adjunct_island coqa eq_bench fld_default swde unscramble tinyMMLU
"""
TASKS = LISTED.split()
COMMON = 60
"""Tasks of the list that every version of lm-eval has, at least."""
EVERY = 150
"""Of all other tasks, each of so many is tried."""
MAX_TASKS = 16
"""Tasks that a manifest may name."""


@pytest.fixture(scope="module")
def shipped() -> BuiltInTasks:
    tasks = read_built_in_tasks()
    assert tasks
    return tasks


def reported_metrics(config: dict[str, Any]) -> Iterator[str]:
    """Yield the names that lm-eval reports for a task; none for metrics that code of the task names."""
    if "class" in config or isinstance(config.get("task"), list):
        return
    default = DEFAULT_METRIC_REGISTRY.get(config.get("output_type", "generate_until"))
    entries = config.get("metric_list") or [{"metric": name} for name in default or ()]
    filters = [entry["name"] for entry in config.get("filter_list") or ()] or ["none"]
    for entry in entries:
        metric = entry["metric"]
        # The loader writes a function as the path of its module.
        if "/" in metric:
            continue
        for name in filters:
            yield f"{metric},{name}"
        if len(filters) == 1:
            yield metric


def manifest(folder: Path, gates: dict[str, list[str]]) -> Manifest:
    """Return a manifest with these metrics of these tasks in gates."""
    entries = [
        {"task": task, "metric": metric, "value": 0.1}
        for task, metrics in gates.items()
        for metric in metrics
    ]
    spec = {
        "model": {"uri": "base"},
        "datasets": [{"uri": "data.jsonl"}],
        "train": {},
        "evaluate": {
            "tasks": [{"name": name} for name in gates],
            "gates": entries,
        },
    }
    document = {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTunePipeline",
        "metadata": {"name": "demo"},
        "spec": spec,
    }
    path = folder / "p.yaml"
    path.write_text(yaml.safe_dump(document))
    return read(path)


def errors_of(folder: Path, gates: dict[str, list[str]]) -> list[str]:
    environment = Environment(workspace=folder / "workspace", manifest_dir=folder)
    errors = task_errors(manifest(folder, gates), environment)
    return [error.message for error in errors]


def gates_of(shipped: BuiltInTasks, names: list[str]) -> dict[str, list[str]]:
    """Return the metrics of each task that lm-eval itself can load, with and without their filters."""
    gates = {}
    for name in names:
        try:
            config = load_yaml(shipped.files[name], resolve_func=False)
        except Exception:  # noqa: BLE001  lm-eval cannot load some files of its own
            continue
        gates[name] = list(reported_metrics(config))
    return gates


def test_common_tasks_are_accepted_with_their_metrics(
    shipped: BuiltInTasks, tmp_path: Path
) -> None:
    known = [name for name in TASKS if name in shipped.files]
    gates = gates_of(shipped, known)
    assert len(gates) >= COMMON
    assert sum(map(bool, gates.values())) >= COMMON // 2
    for start in range(0, len(known), MAX_TASKS // 2):
        names = known[start : start + MAX_TASKS // 2]
        some = {name: gates[name][:2] for name in names if name in gates}
        assert errors_of(tmp_path, some) == []


def test_metric_of_another_task_is_refused(
    shipped: BuiltInTasks, tmp_path: Path
) -> None:
    """The check above would accept everything if it read nothing."""
    gates = {"gsm8k": ["acc"], "arc_easy": ["exact_match"]}
    first, second = errors_of(tmp_path, gates)
    assert first.startswith("acc is not measured by the task gsm8k")
    assert second.startswith("exact_match is not measured by the task arc_easy")


def test_each_metric_of_other_tasks_is_accepted(
    shipped: BuiltInTasks, tmp_path: Path
) -> None:
    names = sorted(shipped.files)[::EVERY]
    gates = gates_of(shipped, names)
    assert len(gates) > len(names) // 2
    for start in range(0, len(names), MAX_TASKS // 2):
        some = {
            name: gates[name][:2]
            for name in names[start : start + MAX_TASKS // 2]
            if name in gates
        }
        assert errors_of(tmp_path, some) == []
