"""The log of the operator: one line of text, or one JSON object, for each record.

There are two ways to name a record's pipeline. A worker reconciles in `pipeline_context`, which every record of that
reconcile gets, whatever module writes it. Any other record names it itself: `extra={"pipeline": key}`. The keys `stage`
and `attempt` of `extra` name these.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime

from typing_extensions import override

from finetune_operator.core.pipeline import Key

TEXT = "text"
JSON = "json"
FORMATS = (TEXT, JSON)
LEVELS = ("debug", "info", "warning", "error")
TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
_current_pipeline: ContextVar[Key | None] = ContextVar("current_pipeline", default=None)


def configure(level: str, log_format: str) -> None:
    """Set up the log of this process on standard error: one of LEVELS, in one of FORMATS.

    The level debug is for the operator only: the client library would log the body of each response.
    """
    handler = logging.StreamHandler()
    handler.addFilter(_add_pipeline)
    handler.setFormatter(
        JsonFormatter() if log_format == JSON else logging.Formatter(TEXT_FORMAT)
    )
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(number, logging.INFO), handlers=[handler], force=True)
    logging.getLogger("finetune_operator").setLevel(number)
    # Python's own warnings get the same format.
    logging.captureWarnings(capture=True)


@contextmanager
def pipeline_context(key: Key) -> Iterator[None]:
    """Name this pipeline in each record that is written in the context, and in the tasks that are created in it."""
    token = _current_pipeline.set(key)
    try:
        yield
    finally:
        _current_pipeline.reset(token)


def _add_pipeline(record: logging.LogRecord) -> bool:
    """Add the context's pipeline to a record that names none; return True, so that no record is dropped."""
    if getattr(record, "pipeline", None) is None:
        record.pipeline = _current_pipeline.get()
    return True


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object in one line; all characters are ASCII, others are escaped."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(
            timespec="milliseconds"
        )
        fields: dict[str, object] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_pipeline_fields(record),
        }
        exception = self._exception(record)
        if exception:
            fields["exception"] = exception
        return json.dumps(fields, default=str)

    def _exception(self, record: logging.LogRecord) -> str:
        """Return traceback and stack as one text; empty if the record has neither."""
        parts: list[str] = []
        if record.exc_info:
            parts.append(self.formatException(record.exc_info))
        if record.stack_info:
            parts.append(record.stack_info)
        return "\n".join(parts)


def _pipeline_fields(record: logging.LogRecord) -> dict[str, object]:
    """Return namespace and name of the record's pipeline, its stage and its attempt, as far as it names them."""
    fields: dict[str, object] = {}
    pipeline = getattr(record, "pipeline", None)
    if isinstance(pipeline, Key):
        fields = {"namespace": pipeline.namespace, "name": pipeline.name}
    for name in ("stage", "attempt"):
        value = getattr(record, name, None)
        if value is not None:
            fields[name] = value
    return fields
