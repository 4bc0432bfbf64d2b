"""The watches of the client: events, bookmarks, expired versions, and connections that break or are silent."""

import asyncio
import json
from unittest.mock import patch

import pytest
from aiohttp import web
from support.trainer.served_client import client_of, rejecting

from finetune_operator.errors import ClusterError
from finetune_operator.kubernetes import client as module
from finetune_operator.kubernetes.translate.api_errors import ApiError


def streaming(*pieces, silent=False, broken=False):
    """Return a handler that sends these pieces of text, then ends, stays silent, or breaks the connection."""

    async def respond(request):
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece.encode())
        if broken:
            request.transport.abort()
        if silent:
            await asyncio.sleep(5)
        return response

    return respond


def watched(handler, seconds=5, grace=4.0):
    """Return the events of a watch, and the error that it ended with."""
    events = []

    async def scenario():
        async with client_of(handler) as api:
            try:
                async for event in api.watch("/x", "7", seconds, labelSelector="a=b"):
                    events.append(event)  # noqa: PERF401  the watch may fail after some of them
            except ClusterError as error:
                return error

    with patch.object(module, "WATCH_GRACE_SECONDS", grace):
        return events, asyncio.run(asyncio.wait_for(scenario(), 20))


def event_line(kind, version):
    return (
        json.dumps(
            {
                "type": kind,
                "object": {"metadata": {"resourceVersion": version}},
            }
        )
        + "\n"
    )


def test_watch_yields_events_and_bookmarks_in_order():
    added = event_line("ADDED", "8")
    bookmark = event_line("BOOKMARK", "20")
    events, error = watched(streaming(added[:9], added[9:] + bookmark))
    assert [event["type"] for event in events] == ["ADDED", "BOOKMARK"]
    assert error is None


def test_watch_asks_for_bookmarks_from_its_version_on():
    queries = []

    def respond(request):
        queries.append(dict(request.query))
        return web.Response()

    assert watched(respond) == ([], None)
    expected = {
        "watch": "true",
        "resourceVersion": "7",
        "timeoutSeconds": "5",
        "allowWatchBookmarks": "true",
    }
    assert queries == [{**expected, "labelSelector": "a=b"}]


def test_expired_version_ends_the_watch_with_410():
    status = {
        "type": "ERROR",
        "object": {
            "code": 410,
            "reason": "Expired",
            "message": "too old resource version",
        },
    }
    events, error = watched(
        streaming(event_line("ADDED", "8"), json.dumps(status) + "\n")
    )
    assert (len(events), error.status, error.reason) == (1, 410, "Expired")


def test_rejected_watch_is_an_api_error():
    assert watched(rejecting(410, "Expired"))[1].status == 410


def test_silent_watch_is_an_error_within_its_limit():
    events, error = watched(
        streaming(event_line("ADDED", "8"), silent=True), seconds=0, grace=0.3
    )
    assert len(events) == 1
    assert "was silent and did not end" in str(error)


@pytest.mark.parametrize("broken", [False, True], ids=["closed", "reset"])
def test_watch_closed_within_a_line_yields_whole_events_only(broken):
    events, error = watched(
        streaming(
            event_line("ADDED", "8"), event_line("ADDED", "9")[:12], broken=broken
        )
    )
    assert len(events) <= 1
    assert isinstance(error, ApiError)


def test_watch_without_a_bookmark_is_dead_long_before_its_end():
    added = event_line("ADDED", "8")
    with patch.object(module, "SILENCE_SECONDS", 0.2):
        events, error = watched(streaming(added, silent=True), 300, grace=0.1)
    assert len(events) == 1
    assert "was silent" in str(error)


def test_watch_that_goes_on_with_bookmarks_is_alive():
    async def respond(request):
        response = web.StreamResponse()
        await response.prepare(request)
        for version in range(8, 14):
            await asyncio.sleep(0.1)
            await response.write(event_line("BOOKMARK", str(version)).encode())
        return response

    with patch.object(module, "SILENCE_SECONDS", 0.3):
        events, error = watched(respond, 300, grace=0.1)
    assert len(events) == 6
    assert error is None
