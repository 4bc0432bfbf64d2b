"""The page on the stage contract says all that the contract holds."""

from pathlib import Path

import pytest

from finetune_operator.kubernetes.resources import job
from finetune_trainer.contract import (
    DeployResult,
    EvaluateResult,
    ExitCode,
    PrepareResult,
    Progress,
    PushResult,
    TrainResult,
    environment,
)
from finetune_trainer.contract.results import (
    MAX_NUMBER,
    MAX_TEXT_CHARACTERS,
    PROGRESS_BYTES,
    TERMINATION_MESSAGE_BYTES,
    StageResult,
)

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "stage-contract.md").read_text()
COMMON = {*StageResult.model_fields, "stage"}


def own_fields(result: type[StageResult]) -> dict[str, bool]:
    """Give the fields of a stage's result as they are in JSON, and whether they are needed."""
    own = {name: field for name, field in result.model_fields.items() if name not in COMMON}
    return {field.alias or name: field.is_required() for name, field in own.items()}


def line_of(stage: str) -> str:
    """Give the row of a stage in the table of results."""
    return next(row for row in PAGE.partition("| stage | fields |")[2].splitlines() if row.startswith(f"| {stage} |"))


@pytest.mark.parametrize("result", [PrepareResult, TrainResult, EvaluateResult, PushResult, DeployResult])
def test_every_field_of_a_result_is_named_and_the_optional_ones_in_parentheses(result):
    needed, _, optional = line_of(result.model_fields["stage"].default).partition("(")
    for name, required in own_fields(result).items():
        assert f"`{name}`" in (needed if required else optional), name


def test_every_variable_of_the_environment_is_explained():
    names = [value for value in vars(environment).values() if str(value).startswith("FINETUNE_")]
    assert len(names) == 8
    assert [name for name in names if f"| `{name}` |" not in PAGE] == []


def test_every_exit_code_has_its_meaning():
    table = PAGE.partition("| code | meaning |")[2]
    assert [code for code in ExitCode if str(int(code)) not in table] == []


def test_every_field_of_progress_is_named():
    assert [field.alias for field in Progress.model_fields.values() if f'"{field.alias}"' not in PAGE] == []


def test_places_and_limits_in_a_pod_are_those_of_the_job():
    for fact in (job.WORKSPACE, job.CLAIMS, job.TERMINATION_LOG, job.METRICS_PORT, f"{job.USER}:{job.USER}"):
        assert str(fact) in PAGE
    assert f"{TERMINATION_MESSAGE_BYTES:,} bytes" in PAGE
    assert f"at most {PROGRESS_BYTES >> 10} KiB" in PAGE
    assert f"cut to {MAX_TEXT_CHARACTERS} characters" in PAGE
    assert MAX_NUMBER == 10**15
    assert PAGE.count("10^15") == 2
