"""The log: one line for each record, and the pipeline that a record is about."""

import asyncio
import json
import logging
import warnings
from datetime import UTC, datetime

import pytest

from finetune_operator.controller import logging_format
from finetune_operator.controller.logging_format import configure, pipeline_context
from finetune_operator.core.pipeline import Key

DEMO = Key("team", "demo")
log = logging.getLogger("finetune_operator.test")


@pytest.fixture
def configured(capsys):
    """Return two functions: the first sets up the log, the second returns the text written since."""
    root = logging.getLogger()
    own = logging.getLogger("finetune_operator")
    before = (root.level, root.handlers, own.level)
    root.handlers = []  # without the handlers of pytest, which `configure` would close
    yield (
        lambda level="info", log_format="json": configure(level, log_format),
        lambda: capsys.readouterr().err,
    )
    logging.captureWarnings(capture=False)
    root.level, root.handlers, own.level = before


def objects(text):
    """Return the JSON objects of these lines."""
    return [json.loads(line) for line in text.splitlines()]


def test_json_line_has_time_level_logger_and_message(configured):
    start, written = configured
    start()
    log.warning("cannot list %s", "team")
    [result] = objects(written())
    time = datetime.fromisoformat(result.pop("time"))
    assert abs((datetime.now(UTC) - time).total_seconds()) < 60
    assert result == {
        "level": "warning",
        "logger": "finetune_operator.test",
        "message": "cannot list team",
    }


def test_time_is_in_utc_with_milliseconds():
    record = logging.LogRecord("x", logging.INFO, "", 0, "", None, None)
    record.created = 1893456000.0
    assert (
        json.loads(logging_format.JsonFormatter().format(record))["time"]
        == "2030-01-01T00:00:00.000Z"
    )


def test_record_in_a_context_names_its_pipeline(configured):
    start, written = configured
    start()
    with pipeline_context(DEMO):
        log.info("one")
    log.info("two")
    first, two = objects(written())
    assert first["namespace"] == "team"
    assert first["name"] == "demo"
    assert "namespace" not in two


def test_extra_names_pipeline_stage_and_attempt(configured):
    start, written = configured
    start()
    with pipeline_context(Key("other", "outer")):
        log.info("done", extra={"pipeline": DEMO, "stage": "train", "attempt": 2})
    [result] = objects(written())
    assert {
        name: result.get(name) for name in ("namespace", "name", "stage", "attempt")
    } == {
        "namespace": "team",
        "name": "demo",
        "stage": "train",
        "attempt": 2,
    }


def test_contexts_of_concurrent_workers_are_separate(configured):
    start, written = configured
    start()

    async def work(name):
        with pipeline_context(Key("team", name)):
            await asyncio.sleep(0.01)
            log.info("from %s", name)
            await asyncio.create_task(background(name))

    async def background(name):
        log.info("from %s", name)

    async def scenario():
        await asyncio.gather(*(work(f"p{number}") for number in range(5)))

    asyncio.run(scenario())
    result = objects(written())
    assert len(result) == 10
    assert all(record["message"] == f"from {record['name']}" for record in result)


def test_traceback_is_one_field_of_the_same_line(configured):
    start, written = configured
    start()
    try:
        json.loads("{")
    except ValueError:
        log.exception("failed")
    [result] = objects(written())
    assert result["message"] == "failed"
    assert result["exception"].startswith("Traceback (most recent call last):\n")
    assert "JSONDecodeError" in result["exception"].splitlines()[-1]


@pytest.mark.parametrize("text", ['a "quoted" \n line', "\ud800", "ünïcödé\u2028"])
def test_any_message_is_one_ascii_line(configured, text):
    start, written = configured
    start()
    log.info("%s", text)
    line = written()
    assert line.isascii()
    assert line.count("\n") == 1
    assert json.loads(line)["message"] == text


def test_text_format_is_one_line_with_time_level_and_logger(configured):
    start, written = configured
    start(log_format="text")
    with pipeline_context(DEMO):
        log.warning("cannot list %s", "team")
    time, _, rest = written().partition(" WARNING ")
    datetime.strptime(time, "%Y-%m-%d %H:%M:%S,%f")  # noqa: DTZ007  local time
    assert rest == "finetune_operator.test cannot list team\n"


def test_debug_is_the_level_of_the_operator_only(configured):
    start, written = configured
    start("debug", "text")
    log.debug("ours")
    logging.getLogger("kubernetes.client.rest").debug("response body: a Secret")
    text = written()
    assert "ours" in text
    assert "Secret" not in text


def test_level_hides_records_below_it(configured):
    start, written = configured
    start("error", "json")
    log.warning("hidden")
    logging.getLogger("aiohttp").warning("hidden")
    assert written() == ""


def test_python_warnings_are_json_lines(configured):
    start, written = configured
    start()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("deprecated", stacklevel=1)
    [result] = objects(written())
    assert result["level"] == "warning"
    assert "deprecated" in result["message"]


def test_log_is_set_up_again_in_another_format(configured):
    start, written = configured
    start(log_format="text")
    start(log_format="json")
    log.info("once")
    assert len(written().splitlines()) == 1
