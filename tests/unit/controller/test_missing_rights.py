"""A right that the operator's role lacks is an Event of the pipelines that wait for it."""

import asyncio
from typing import Any
from unittest.mock import patch

import pytest
from support.operator.cluster_objects import pipeline_object
from support.operator.informer_scenario import NAME, InformerScenario

from finetune_operator.controller import missing_rights
from finetune_operator.controller.missing_rights import MissingRights
from finetune_operator.kubernetes.cache.cache import PIPELINES
from finetune_operator.kubernetes.translate.api_errors import ApiError


class ForbiddenScenario(InformerScenario):
    """An operator whose role lacks the list of a kind."""

    def __init__(self, kind: str, status: int = 403) -> None:
        super().__init__()
        self.events: list[tuple[str, str, str]] = []
        rights = MissingRights(self.cache, self.record)
        self.informers.on_error = rights.report
        pages = self.api.pages

        async def refused(path: str, **query: Any) -> Any:
            if path.endswith(f"/{kind}"):
                raise ApiError(status, f"{kind} is forbidden")
            async for page in pages(path, **query):
                yield page

        self.api.pages = refused

    def record(self, about: Any, events: Any) -> None:
        """Keep what an Event would tell."""
        for event in events:
            self.events.append((about.key.name, event.reason, event.message))

    def list_twice(self) -> None:
        """List as a new leader does, which retries."""

        async def listing() -> None:
            for _ in range(2):
                with pytest.raises(ApiError):
                    await self.informers.list()

        asyncio.run(listing())


@pytest.mark.parametrize("kind", ["jobs", "deployments", "pods", "events"])
def test_missing_right_is_an_event_of_each_waiting_pipeline(kind: str) -> None:
    scenario = ForbiddenScenario(kind)
    scenario.create(PIPELINES, pipeline_object("other"))
    scenario.create(PIPELINES, pipeline_object("done", status=FINISHED))
    scenario.list_twice()
    names = {name for name, _, _ in scenario.events}
    assert names == {NAME.partition("-")[0], "other"}
    assert len(scenario.events) == 2
    for _, reason, message in scenario.events:
        assert reason == "OperatorForbidden"
        assert f"the operator may not read {kind}" in message
        assert message.endswith("ask the platform team to allow it")


FINISHED = {"phase": "Succeeded", "finishedAt": "2026-01-01T00:00:00Z"}


def test_pipeline_that_still_waits_gets_the_event_again() -> None:
    scenario = ForbiddenScenario("jobs")
    with patch.object(missing_rights, "REPEAT_SECONDS", 0.0):
        scenario.list_twice()
    assert len(scenario.events) == 2


def test_namespace_that_is_gone_is_no_missing_right() -> None:
    scenario = ForbiddenScenario("jobs", 404)
    scenario.list_twice()
    assert scenario.events == []


def test_right_to_watch_that_is_missing_is_an_event() -> None:
    scenario = ForbiddenScenario("nothing")

    async def refused(*_: Any, **__: Any) -> Any:
        raise ApiError(403, "jobs is forbidden")
        yield

    scenario.api.watch = refused

    async def watching() -> None:
        await scenario.informers.list()
        reflector = scenario.informers.reflectors["team"][2]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reflector.watch(), 0.2)

    asyncio.run(watching())
    assert "may not read jobs" in scenario.events[0][2]
