"""Kubernetes Events: created once, in the background, and dropped when too many wait."""

import asyncio
import logging
from dataclasses import replace
from unittest.mock import patch

import pytest
from support.operator.cluster_objects import pipeline_object
from support.operator.fake_api import FakeApi

from finetune_operator.core.events import ATTEMPT_STARTED, Event
from finetune_operator.core.pipeline import Key
from finetune_operator.kubernetes import event_recorder as module
from finetune_operator.kubernetes.event_recorder import EventRecorder
from finetune_operator.kubernetes.pipeline_object import parse_pipeline
from finetune_operator.kubernetes.translate.api_errors import ApiError

PIPELINE = parse_pipeline(pipeline_object(version=7))
OTHER = replace(PIPELINE, key=Key("other", "demo"))
FAILED = Event("Warning", "AttemptFailed", "train attempt 1: no space")
FINISHED = Event("Normal", "PipelineSucceeded", "all requested stages are done")


def recorded(*batches, api=None):
    """Return the messages of the Events that exist after the batches were recorded."""
    api = api or FakeApi()

    async def scenario():
        recorder = EventRecorder(api)
        running = asyncio.create_task(recorder.run())
        for batch in batches:
            recorder.record(PIPELINE, batch)
        while recorder.waiting:  # noqa: ASYNC110  a dictionary has no event for empty
            await asyncio.sleep(0.005)
        running.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 10))
    return [
        result["message"] for path, result in api.objects.items() if "/events/" in path
    ]


def test_event_names_its_pipeline_by_uid():
    api = FakeApi()
    recorded([FAILED], api=api)
    [result] = [
        event
        for path, event in api.objects.items()
        if "/namespaces/team/events/" in path
    ]
    assert result["involvedObject"]["uid"] == PIPELINE.uid
    assert (result["type"], result["reason"], result["message"]) == (
        FAILED.type,
        FAILED.reason,
        FAILED.message,
    )


def test_event_that_is_recorded_twice_is_created_once(caplog):
    assert recorded([FAILED], [FAILED, FINISHED]) == [FAILED.message, FINISHED.message]
    assert "cannot create" not in caplog.text


def test_ordinary_stage_is_a_line_in_the_log(caplog):
    caplog.set_level(logging.INFO)
    start = Event("Normal", ATTEMPT_STARTED, "train attempt 1", ordinary=True)
    end = Event("Normal", "StageSucceeded", "train attempt 1", ordinary=True)
    assert recorded([start], [end]) == []
    lines = [line for line in caplog.messages if "train attempt 1" in line]
    assert lines == [f"{PIPELINE.key}: StageSucceeded train attempt 1"]


def test_failed_event_is_logged_and_the_next_is_created(caplog):
    api = FakeApi()
    create = api.create
    errors = [ApiError(503, "not now")]

    async def create_after_an_error(path, body, **query):
        if errors:
            raise errors.pop()
        return await create(path, body, **query)

    api.create = create_after_an_error
    assert recorded([FAILED, FINISHED], api=api) == [FINISHED.message]
    assert "not now" in caplog.text


def test_slow_namespace_delays_its_own_events_only():
    class SlowApi(FakeApi):
        """An API server with an admission webhook in the namespace team that does not answer."""

        async def create(self, path, body, **query):
            if "/team/" in path:
                await asyncio.Event().wait()
            return await super().create(path, body, **query)

    async def scenario():
        recorder = EventRecorder(SlowApi())
        running = asyncio.create_task(recorder.run())
        recorder.record(PIPELINE, [FAILED])
        await asyncio.sleep(0.01)
        recorder.record(OTHER, [FAILED])
        await asyncio.sleep(0.01)
        recorder.record(OTHER, [FINISHED])
        while "other" in recorder.waiting:  # noqa: ASYNC110  a dictionary has no event for empty
            await asyncio.sleep(0.005)
        running.cancel()
        return recorder

    recorder = asyncio.run(asyncio.wait_for(scenario(), 10))
    assert [path.split("/")[4] for path in recorder.api.objects] == ["other", "other"]
    assert [result["message"] for result in recorder.waiting["team"]] == [
        FAILED.message
    ]


def test_event_interrupted_by_lost_leadership_is_created_later():
    api = FakeApi()
    started = asyncio.Event()
    create = api.create

    async def hang(path, body, **query):
        started.set()
        await asyncio.Event().wait()

    async def scenario():
        recorder = EventRecorder(api)
        api.create = hang
        running = asyncio.create_task(recorder.run())
        recorder.record(PIPELINE, [FAILED])
        await started.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        api.create = create
        running = asyncio.create_task(recorder.run())
        while recorder.waiting:  # noqa: ASYNC110  a dictionary has no event for empty
            await asyncio.sleep(0.005)
        running.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 10))
    assert [result["message"] for result in api.objects.values()] == [FAILED.message]


def test_events_beyond_the_limit_are_dropped(caplog):
    with patch.object(module, "MAX_WAITING", 3):
        many = [Event("Normal", "AttemptStopped", str(number)) for number in range(5)]
        assert recorded(many) == ["0", "1", "2"]
    assert caplog.text.count("is dropped") == 2


@pytest.mark.parametrize(
    "link", ["", " (see docs/guides/troubleshooting.md#datainvalid)"]
)
@pytest.mark.parametrize("character", ["x", "±"])
def test_long_message_is_cut_and_keeps_its_link(character, link):
    [message] = recorded([Event("Warning", "AttemptFailed", character * 5000, link)])
    assert message.endswith(f"{character} …{link}")
    assert 1022 <= len(message.encode()) <= 1024


def test_message_that_fits_with_its_link_is_whole():
    link = " (see page#anchor)"
    for length in (10, 1024 - len(link)):
        assert recorded([Event("Warning", "AttemptFailed", "x" * length, link)]) == [
            "x" * length + link
        ]
