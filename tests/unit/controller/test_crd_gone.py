"""The CRD is deleted while the operator runs, and installed again: few requests, few lines, no restart."""

import asyncio
import logging
from typing import Any
from unittest.mock import patch

import kopf
import pytest

from finetune_operator.controller import kopf_watch
from finetune_operator.controller.kopf_watch import KopfWatch
from finetune_operator.controller.signals import ShutdownSignal
from finetune_operator.kubernetes.translate.api_errors import ApiError

GONE = ApiError(404, "404 page not found")


async def version(_namespace: str | None) -> str:
    return "1"


class Scenario:
    """A watch whose lists raise an error, with pauses that are a hundred times shorter."""

    def __init__(self, error: Exception) -> None:
        self.error: Exception | None = error
        self.lists: list[float] = []
        self.watch = KopfWatch(ShutdownSignal(), self.list, lambda *_: None, version)
        self.runs = 0

    async def list(self) -> None:
        """List the pipelines, or raise the error."""
        self.lists.append(asyncio.get_running_loop().time())
        if self.error:
            raise self.error

    async def operator(self, **_: Any) -> None:
        """Run kopf, which ends if it cannot watch."""
        self.runs += 1
        if self.error:
            raise self.error
        await asyncio.Event().wait()

    async def run(self, seconds: float) -> None:
        """Run the watch for some seconds with the error, and then without."""
        watching = asyncio.create_task(self.watch.run([None], asyncio.Event()))
        await asyncio.sleep(seconds)
        assert self.watch.lost_at is not None
        self.error = None
        runs = self.runs
        while self.runs == runs:  # noqa: ASYNC110  the fake operator counts
            await asyncio.sleep(0.01)
        assert self.watch.lost_at is None
        watching.cancel()


def requests_with(error: Exception) -> int:
    """Return the number of lists in 1.2 s, as long as two minutes without shorter pauses."""
    scenario = Scenario(error)
    with (
        patch.object(kopf, "operator", scenario.operator),
        patch.object(kopf_watch, "BASE_RETRY_SECONDS", 0.005),
        patch.object(kopf_watch, "MAX_PAUSE_SECONDS", 0.3),
    ):
        asyncio.run(asyncio.wait_for(scenario.run(1.2), 10))
    return len(scenario.lists)


def test_pauses_grow_while_the_crd_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    assert requests_with(GONE) <= 16
    lines = [line for line in caplog.messages if "install the CRD" in line]
    assert 5 <= len(lines) <= 15
    assert "the API server has no finetunepipelines.finetune.dev" in lines[0]


def test_other_errors_are_retried_as_soon_as_before() -> None:
    assert requests_with(ApiError(503, "busy")) > 30
