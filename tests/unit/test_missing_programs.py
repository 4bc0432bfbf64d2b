"""Tests on a machine that cannot run them: a line and success, or a failure if CI=true."""

from typing import NoReturn

import pytest
from support.programs import missing

from e2e import __main__ as cluster_tests
from testcluster.errors import UsageError

REASON = "needs root"


def refuse(_: object) -> NoReturn:
    raise UsageError(REASON)


@pytest.mark.parametrize(("ci", "code"), [("", 0), ("false", 0), ("true", 1), ("1", 1)])
def test_machine_without_clusters_says_so_in_one_line(
    monkeypatch, capsys, ci: str, code: int
):
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(cluster_tests, "prepare", refuse)
    assert cluster_tests.main([]) == code
    output = capsys.readouterr()
    [line] = (output.out + output.err).strip().splitlines()
    assert line.startswith("*** SKIPPED: ")
    assert line.endswith(REASON)


@pytest.mark.parametrize(
    ("ci", "outcome"),
    [
        ("", pytest.skip.Exception),
        ("true", pytest.fail.Exception),
        ("1", pytest.fail.Exception),
    ],
)
def test_test_without_its_program_is_skipped_or_fails(
    monkeypatch, ci: str, outcome: type[BaseException]
):
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match=REASON):
        missing(REASON)
