"""Reads a `PreviewRequest` as JSON from stdin, and writes a `PreviewReport` as JSON to stdout.

The process has a stage's environment variables. The workspace is a folder that exists for this process only.
"""

import contextlib
import io
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from finetune_trainer.contract import Environment
from finetune_trainer.contract.preview import PreviewReport, PreviewRequest
from finetune_trainer.preview.preview import preview


def main() -> None:
    """Answer the request of stdin."""
    request = PreviewRequest.model_validate_json(sys.stdin.read())
    log = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        environment = replace(Environment.read(os.environ), workspace=Path(folder))
        # The functions of prepare print what they notice, and stdout is for the report.
        with contextlib.redirect_stdout(log):
            report = preview(request, environment)
    print(with_log(report, log.getvalue()).model_dump_json(by_alias=True))


def _is_of_invalid_record(line: str, report: PreviewReport) -> bool:
    """Return whether a line names the first record with a reason, which the report counts."""
    _, _, reason = line.partition(": ")
    return bool(reason) and any(reason in known for known in report.invalid_records)


def with_log(report: PreviewReport, log: str) -> PreviewReport:
    """Return the report with the lines of the log that it does not have yet, as notes."""
    lines = [
        line.removeprefix("prepare: ")
        for line in log.splitlines()
        if line and not _is_of_invalid_record(line, report)
    ]
    return report.model_copy(update={"notes": (*report.notes, *lines)})


if __name__ == "__main__":
    main()
