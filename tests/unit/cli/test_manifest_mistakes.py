"""Mistakes that people make in manifests: each has exactly one error, with its place, the problem and the fix."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from support.cli.apply_fix import apply_fix
from support.trainer.foreign_errors import FOREIGN

from finetune_cli.manifest.manifest import read_all
from finetune_cli.manifest.yaml import reader as yaml_reader

HEAD = """\
apiVersion: finetune.dev/v1alpha1
kind: FineTunePipeline
metadata: {name: demo}
spec:
"""
LEAST = {
    "model": "model: {uri: base}",
    "datasets": "datasets: [{uri: data.jsonl}]",
}
ROOT = Path(__file__).parents[3]
TABLE = ROOT / "tests/data/mistakes.txt"
APPLICABLE = 160
REVIEWED = 71
"""Mistakes that a review has tried."""


def mistakes():
    """Return the mistakes of the table as pairs of manifest and error."""
    blocks = TABLE.read_text().split("\n\n")[1:]
    pairs = [block.strip("\n").split("\n=> ") for block in blocks]
    return [(body, error) for body, error in pairs]


def manifest(body):
    """Return the whole manifest of a block."""
    if body.startswith("FILE\n"):
        return body.removeprefix("FILE\n") + "\n"
    lines = body.splitlines()
    given = {line.partition(":")[0] for line in lines}
    lines += [text for name, text in LEAST.items() if name not in given]
    return HEAD + "".join(f"  {line}\n" for line in lines)


@pytest.mark.parametrize(("body", "error"), mistakes())
def test_mistake_has_one_error_with_its_fix(body, error, diagnose):
    lines = diagnose(manifest(body))
    assert [line.replace("pipeline.yaml", "p.yaml") for line in lines] == [error]


SECOND_MISTAKES = {
    "train: {earlyStopping: 3}",
    "dataset: data.jsonl",
    "workspace: {sizeGb: 100}",
    "model: {name: Qwen/Qwen3-0.6B}",
    "deploy: true\npush: {targets: [{uri: published}]}",
}
"""Manifests with two mistakes, of which the second is seen only without the first."""


def fixed(body, error):
    """Return a manifest after the fix of its error; None if the fix needs a person."""
    file = yaml_reader.parse(Path("p.yaml"), manifest(body).encode())
    match = re.match(r"\d+: (\S+): (.*)$", error)
    if file.diagnostics or match is None or "no such field" in error:
        return None
    return apply_fix(file.documents[0].plain(), match[1], match[2])


@pytest.mark.parametrize(
    ("body", "error"), [pair for pair in mistakes() if fixed(*pair) is not None]
)
def test_manifest_is_valid_after_its_fix(body, error, diagnose):
    """The fix is applied as it is written."""
    lines = diagnose(json.dumps(fixed(body, error)))
    assert len(lines) == (body in SECOND_MISTAKES)


def test_most_fixes_can_be_applied_by_a_program():
    assert sum(fixed(*pair) is not None for pair in mistakes()) >= APPLICABLE


def test_table_has_the_mistakes_of_the_review_and_more():
    bodies = [body for body, _ in mistakes()]
    assert len(set(bodies)) == len(bodies) >= REVIEWED


def test_no_error_is_of_another_program():
    errors = [error for _, error in mistakes()]
    assert [error for error in errors if FOREIGN.search(error)] == []


def test_unknown_key_is_not_checked_as_the_guessed_key(diagnose):
    """Neither the type of the guess counts, nor its rules."""
    assert len(diagnose(manifest("datasets: [{uri: data.jsonl, limit: 100}]"))) == 1
    assert len(diagnose(manifest("sweep: {learningRate: [0.1, 0.2]}"))) == 1
    assert len(diagnose(manifest("seeds: [1, 2, 3]"))) == 1
    assert len(diagnose(manifest("trainer: {gpus: 1}"))) == 1


def test_misspelled_mapping_with_known_keys_is_checked(diagnose):
    lines = diagnose(manifest("trian: {epochs: 3, lora: {rnk: 8}}"))
    assert [line.split(": ")[1] for line in lines] == [
        "spec.trian",
        "spec.trian.lora.rnk",
    ]


def test_other_documents_are_checked_beside_another_kind(diagnose):
    job = "apiVersion: batch/v1\nkind: Job\nmetadata: {name: x}\n---\n"
    lines = diagnose(job + manifest("seed: -1"))
    assert [line.partition(":")[0] for line in lines] == ["2", "9"]


def files_of(package, pattern, every=1):
    """Return files of an installed package, or one of so many; none if the package is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return []
    return sorted(Path(spec.origin).parent.rglob(pattern))[::every]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([ROOT / "examples/demo/task.yaml"], "a task of lm-eval"),
        (files_of("lm_eval", "tasks/**/*.yaml", every=300), "a task of lm-eval"),
        (files_of("trl", "accelerate_configs/*.yaml"), "Accelerate or DeepSpeed"),
    ],
    ids=["demo", "lm-eval", "trl"],
)
def test_file_of_another_program_has_one_error(files, words):
    for file in files:
        (diagnostic,) = read_all(file).diagnostics
        assert diagnostic.message.startswith("this is no pipeline: ")
        assert words in diagnostic.message
