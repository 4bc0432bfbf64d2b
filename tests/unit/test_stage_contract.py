"""docs/reference/stage-contract.md describes everything that the contract contains."""

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

PAGE = (
    Path(__file__).parents[2] / "docs" / "reference" / "stage-contract.md"
).read_text()
COMMON = {*StageResult.model_fields, "stage"}


def own_fields(result: type[StageResult]) -> dict[str, bool]:
    """Return the JSON names of the fields of a stage's result, and whether each is required."""
    own = {
        name: field for name, field in result.model_fields.items() if name not in COMMON
    }
    return {field.alias or name: field.is_required() for name, field in own.items()}


def result_row(stage: str) -> str:
    """Return the row of a stage in the table of results."""
    _, _, table = PAGE.partition("| stage | fields |")
    return next(row for row in table.splitlines() if row.startswith(f"| {stage} |"))


@pytest.mark.parametrize(
    "result", [PrepareResult, TrainResult, EvaluateResult, PushResult, DeployResult]
)
def test_page_lists_every_result_field(result):
    """Required fields come first, optional fields in parentheses."""
    needed, _, optional = result_row(result.model_fields["stage"].default).partition(
        "("
    )
    for name, required in own_fields(result).items():
        assert f"`{name}`" in (needed if required else optional), name


def test_page_lists_every_environment_variable():
    names = [
        value
        for value in vars(environment).values()
        if str(value).startswith("FINETUNE_")
    ]
    assert len(names) == 23
    assert [name for name in names if f"| `{name}` |" not in PAGE] == []


def test_page_lists_every_exit_code():
    table = PAGE.partition("| code | meaning |")[2]
    assert [code for code in ExitCode if str(int(code)) not in table] == []


def test_page_lists_every_progress_field():
    assert [
        field.alias
        for field in Progress.model_fields.values()
        if f'"{field.alias}"' not in PAGE
    ] == []


def test_page_names_paths_and_limits_of_the_job():
    for fact in (
        job.WORKSPACE,
        job.CLAIMS,
        job.TERMINATION_LOG,
        job.METRICS_PORT,
        f"{job.USER}:{job.USER}",
    ):
        assert str(fact) in PAGE
    assert f"{TERMINATION_MESSAGE_BYTES:,} bytes" in PAGE
    assert f"at most {PROGRESS_BYTES >> 10} KiB" in PAGE
    assert f"cut to {MAX_TEXT_CHARACTERS} characters" in PAGE
    assert MAX_NUMBER == 10**15
    assert PAGE.count("10^15") == 2
