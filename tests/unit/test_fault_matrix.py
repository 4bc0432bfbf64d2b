"""The fault matrix: the cost of a fault by the journal of the trainer, and the table."""

from types import SimpleNamespace
from typing import Any

from e2e.pipelines.faults.journal import cost_of, read_journal
from e2e.pipelines.faults.table import PROPERTY, Row, as_property, markdown, rows_of

JOBS = ("p-train-a1", "p-train-a2")
ROW = Row("drain", "Interrupted", "2", "75", "0 of at most 0", "9.5", "yes")


def journal(first: range, second: range, *, saves=(), unsaved=(), late=()) -> str:
    """Return a journal of two attempts, one step a second; a zombie makes the steps `late`."""
    lines = [f"p-train-a1-x step {step} {step}" for step in first]
    lines += [f"p-train-a1-x save {step} {step + 0.5}" for step in saves]
    lines += [f"p-train-a1-x unsaved {step} {step + 0.6}" for step in unsaved]
    lines += [f"p-train-a2-y step {step} {100 + step}" for step in second]
    lines += [f"p-train-a1-x step {step} {200 + step}" for step in late]
    return "".join(f"{line}\n" for line in lines)


def cost(text: str, struck_at: float = 24.0):
    return cost_of(read_journal(text), JOBS, struck_at)


def test_attempt_resumed_at_its_last_step_lost_none():
    costs = cost(journal(range(1, 25), range(25, 31), saves=(10, 20, 24)))
    assert costs.lost == 0
    assert costs.seconds == 101.0


def test_attempt_resumed_at_a_checkpoint_lost_the_rest():
    """The write of step 20 had begun, so step 10 was durable."""
    costs = cost(journal(range(1, 25), range(11, 31), saves=(10, 20)))
    assert costs.lost == 14
    assert costs.allowed == 14


def test_attempt_without_durable_checkpoint_may_lose_all():
    costs = cost(journal(range(1, 9), range(1, 31)))
    assert costs.lost == 8
    assert costs.allowed == 8


def test_checkpoint_that_could_not_be_written_is_not_durable():
    costs = cost(
        journal(
            range(1, 41), range(11, 61), saves=(10, 20, 30, 40), unsaved=(20, 30, 40)
        )
    )
    assert costs.lost == 30
    assert costs.allowed == 30


def test_steps_of_a_zombie_are_not_lost():
    assert (
        cost(journal(range(1, 25), range(21, 31), saves=(10, 20), late=(25, 26))).lost
        == 4
    )


def test_undisturbed_attempt_costs_seconds_to_its_next_step():
    costs = cost_of(read_journal(journal(range(1, 9), range(0))), JOBS[:1], 4.5)
    assert costs.lost == 0
    assert costs.allowed == 0
    assert costs.seconds == 0.5


def test_incomplete_last_line_is_not_read():
    assert [entry.value for entry in read_journal("a step 1 1.5\na step 2 2")] == [1]


def test_table_has_each_row_once_whatever_the_outcome():
    """Each phase of a test reports the row again."""

    def report(when: str, row: Row) -> SimpleNamespace:
        return SimpleNamespace(
            when=when, user_properties=[(PROPERTY, as_property(row))]
        )

    eviction = Row("eviction", "Failed", "1", "1", "0", "1", "no")
    stats: dict[str, list[Any]] = {
        "passed": [report("setup", ROW), report("call", ROW)],
        "failed": [report("call", eviction)],
        "": [report("teardown", ROW)],
        "warnings": [object()],
    }
    assert rows_of(stats) == [ROW, eviction]
    assert (
        markdown([ROW]).splitlines()[2]
        == "| drain | Interrupted | 2 | 75 | 0 of at most 0 | 9.5 | yes |"
    )
