"""Output of a run: each error once, durations, what is loading and for how long."""

import io
from datetime import UTC, datetime, timedelta

import pytest
from rich.console import Console
from support.operator.scenario import Scenario, a_pipeline

from finetune_cli.output.status import display
from finetune_cli.output.status.display import LineOutput, LiveTable
from finetune_cli.output.status.tree import live_table
from finetune_operator.core.events import Event

ERROR = "out of patience"


def failed_scenario(times):
    """Return a pipeline whose prepare has failed so many times with the same error, and for good."""
    scenario = Scenario(a_pipeline(prepare={"maxFailures": times - 1}))
    for _ in range(times):
        job = scenario.start("prepare")
        scenario.cluster.fail(job, 70, ERROR)
        scenario.reconcile_until_stable().after(1200).reconcile_until_stable()
    return scenario


def shown(renderable, width=200):
    """Return what a console prints."""
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return written(console)


def written(console):
    """Return what was written to the console's file."""
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("times", [1, 3])
def test_error_of_a_stage_is_shown_once_with_a_count(times):
    scenario = failed_scenario(times)
    assert scenario.status.phase == "Failed"
    text = shown(live_table("demo", scenario.status))
    assert text.count(ERROR) == 1, text
    assert ("attempts 1 to 3, failed 3 times" in text) == (times == 3)


def test_attempts_with_different_errors_are_separate_lines():
    scenario = failed_scenario(3)
    stage = scenario.status.stages["prepare"]
    other = stage.attempts[1].model_copy(update={"message": "no luck"})
    attempts = (stage.attempts[0], other, stage.attempts[2])
    status = scenario.status.model_copy(
        update={"stages": {"prepare": stage.model_copy(update={"attempts": attempts})}}
    )
    text = shown(live_table("demo", status))
    assert "attempt 2, failed; exit code 70; no luck" in text
    assert "attempts" not in text


def failing(output, status=None):
    """Report three failed attempts, the last of which fails stage and pipeline."""
    with output:
        for attempt in (1, 2, 3):
            output.event(
                Event("Warning", "AttemptFailed", f"train attempt {attempt}: {ERROR}")
            )
            if attempt < 3:
                output.update(status)
        output.event(Event("Warning", "StageFailed", f"train: {ERROR}"))
        output.event(Event("Warning", "PipelineFailed", f"train: {ERROR}"))


def test_events_repeat_no_error():
    output = LineOutput(Console(file=io.StringIO(), width=200))
    failing(output, Scenario().status)
    lines = [line.partition("] ")[2] for line in written(output.console).splitlines()]
    assert lines == [
        f"AttemptFailed: train attempt 1: {ERROR}",
        "AttemptFailed: train attempt 2: the same error, 2 times now",
        "AttemptFailed: train attempt 3",
        "StageFailed: train",
        "PipelineFailed: train",
    ]


def test_error_is_an_event_where_no_status_follows():
    output = LineOutput(Console(file=io.StringIO(), width=200), status_follows=False)
    failing(output, Scenario().status)
    assert f"StageFailed: train: {ERROR}" in written(output.console)


def test_terminal_shows_the_error_of_a_stage_in_its_table_only():
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    failing(LiveTable(console, "demo"), Scenario().status)
    assert written(console).count(ERROR) == 1  # the line of the first attempt


def test_held_error_is_printed_when_the_run_ends():
    output = LineOutput(Console(file=io.StringIO(), width=200))
    with output:
        output.event(Event("Warning", "AttemptFailed", f"train attempt 1: {ERROR}"))
    assert ERROR in written(output.console)


def test_stage_that_loads_has_its_elapsed_time():
    scenario = Scenario()
    job = scenario.start("prepare")
    now = scenario.cluster.now + timedelta(seconds=25)
    assert "prepare   starting  25s" in shown(
        live_table("demo", scenario.status, now=now)
    )
    scenario.cluster.progress(job, 3, total=10, eta_seconds=47133.0)
    scenario.reconcile_until_stable()
    assert "3/10  13h5m left" in shown(live_table("demo", scenario.status, now=now))


def test_running_training_fits_a_terminal_of_80_columns():
    scenario = Scenario().run("prepare")
    job = scenario.start("train")
    scenario.cluster.progress(
        job,
        12345,
        total=34200,
        loss=0.259,
        tokens_per_second=12653.0,
        eta_seconds=3900.0,
    )
    lines = shown(
        live_table("demo", scenario.reconcile_until_stable().status), width=80
    ).splitlines()
    assert [
        line.rstrip()
        for line in lines
        if line.rstrip().endswith(" 12,653 tok/s  1h5m left")
    ], lines


def test_line_output_reports_now_and_then_what_loads(monkeypatch):
    scenario = Scenario()
    scenario.start("prepare")
    monkeypatch.setattr(display, "LOADING_SECONDS", 0.0)
    monkeypatch.setattr(
        display, "_now", lambda: scenario.cluster.now + timedelta(seconds=25)
    )
    output = LineOutput(Console(file=io.StringIO(), width=200))
    output.update(scenario.status)
    assert "prepare  starting, 25s" in written(output.console)


def test_title_has_the_duration_of_the_whole_run():
    status = Scenario().finish().status
    assert status.finished_at
    status = status.model_copy(
        update={"started_at": status.finished_at - timedelta(minutes=83)}
    )
    assert shown(live_table("demo", status, now=datetime.now(UTC))).startswith(
        "demo  Succeeded  1h23m"
    )
