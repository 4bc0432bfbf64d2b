"""A new leader among thousands of finished pipelines: what still runs comes first, and kopf lists nothing."""

import asyncio
import gc
from typing import Any
from unittest.mock import patch

import pytest
from kopf._cogs.clients import watching
from kopf._cogs.configs.configuration import OperatorSettings
from kopf._cogs.structs.references import Resource
from support.operator.cluster_objects import job_of, pipeline_object
from support.operator.informer_scenario import PATHS, InformerScenario

from finetune_operator.controller import informers as module
from finetune_operator.controller.kopf_watch import _without_lists
from finetune_operator.core.pipeline import Key
from finetune_operator.errors import ClusterError
from finetune_operator.kubernetes.cache.cache import JOBS, PIPELINES
from finetune_operator.kubernetes.translate.api_errors import ApiError

DONE = {"finishedAt": "2030-01-01T00:00:00Z"}
DEMO = Key("team", "demo")
BEFORE = Key("team", "before")
KOPF_RESOURCE = Resource(
    "finetune.dev",
    "v1alpha1",
    "finetunepipelines",
    "FineTunePipeline",
    "finetunepipeline",
    namespaced=True,
)


class Leader(InformerScenario):
    """A new leader beside a pipeline that runs and a pipeline that has finished."""

    def __init__(self) -> None:
        super().__init__()
        self.create(PIPELINES, pipeline_object("before", status=DONE))
        self.create(JOBS, job_of("before") | {"status": {"succeeded": 1}})
        self.reflectors = self.informers.reflectors["team"]

    @property
    def known(self) -> set[str]:
        """The names of the pipelines in the cache."""
        return {name for _, name in self.cache.pipelines.entries}

    async def queued(self) -> list[Key]:
        """Return all pipelines of the queue in their order."""
        return [await self.queue.get() for _ in range(len(self.queue))]


def test_new_leader_acts_before_it_lists_what_has_finished() -> None:
    async def lead() -> None:
        leader = Leader()
        await leader.informers.list_first()
        assert leader.known == {"demo"}
        queueing = asyncio.create_task(leader.informers.requeue_all())
        await asyncio.sleep(0)
        assert await leader.queued() == [DEMO]
        for reflector in leader.reflectors:
            await reflector.list()
        await queueing
        assert leader.known == {"demo", "before"}
        assert await leader.queued() == [BEFORE]

    asyncio.run(lead())


def test_children_listed_before_their_pipeline_queue_nothing() -> None:
    async def lead() -> list[Key]:
        leader = Leader()
        await leader.informers.list_first()
        for reflector in leader.reflectors[1:]:
            await reflector.list()
        return await leader.queued()

    assert BEFORE not in asyncio.run(lead())


def test_leader_of_an_earlier_time_forgets_what_has_finished() -> None:
    """Another replica has led meanwhile: a pipeline that ran then is not taken as it was."""

    async def lead() -> None:
        leader = Leader()
        await leader.informers.list()
        path = f"{PATHS[PIPELINES].format('team')}/demo"
        leader.api.put(path, pipeline_object(status=DONE))
        await leader.informers.list_first()
        assert leader.known == set()
        await leader.informers.list()
        assert leader.known == {"demo", "before"}

    asyncio.run(lead())


def test_crd_without_the_field_is_listed_as_a_whole() -> None:
    """It is from before this version, and another tool installs it."""

    async def lead() -> set[str]:
        leader = Leader()
        pages = leader.api.pages

        async def refusing(path: str, **query: str) -> Any:
            if "finishedAt" in query.get("fieldSelector", ""):
                raise ApiError(400, "field label not supported: status.finishedAt")
            async for page in pages(path, **query):
                yield page

        leader.api.pages = refusing
        await leader.informers.list_first()
        return leader.known

    assert asyncio.run(lead()) == {"demo", "before"}


def test_kopf_watches_from_the_version_of_the_first_list() -> None:
    """It shows a pipeline that is created while the finished pipelines are still listed."""

    async def lead() -> list[str]:
        leader = Leader()
        await leader.informers.list_first()
        first = str(leader.api.version)
        leader.api.version += 7
        versions = [await leader.informers._version_to_watch("team") for _ in range(2)]
        assert versions == [first, str(leader.api.version)]
        return versions

    asyncio.run(lead())


def test_kopf_does_not_list_pipelines() -> None:
    """The installed kopf asks the operator for its list, and not the API server."""
    since = []

    async def watch_objs(**options: Any) -> Any:
        since.append(options["since"])
        yield {"type": "ERROR", "object": {"code": 410}}

    async def version(_namespace: str | None) -> str:
        return "77"

    async def watch() -> list[Any]:
        stream = watching.continuous_watch(
            settings=OperatorSettings(),
            resource=KOPF_RESOURCE,
            namespace=None,
            operator_pause_waiter=asyncio.Future(),
        )
        return [event async for event in stream]

    with (
        _without_lists(version),
        patch.object(watching, "watch_objs", watch_objs),
    ):
        events = asyncio.run(watch())
    assert events == [watching.Bookmark.LISTED]
    assert since == ["77"]


@pytest.mark.parametrize("failures", [0, 3])
def test_garbage_is_collected_while_lists_are_retried(failures: int) -> None:
    enabled = []
    errors = [ClusterError("no answer")] * failures

    async def lead() -> None:
        leader = Leader()

        def during_list() -> None:
            enabled.append(gc.isenabled())
            if errors:
                raise errors.pop()

        leader.api.during_list = during_list
        with patch.object(module, "BASE_RETRY_SECONDS", 0.001):
            await leader.informers.list_first()

    asyncio.run(lead())
    assert enabled == [True] * (failures + 1)


def test_later_lists_freeze_nothing() -> None:
    """What is alive in a list ten minutes later may become a cycle."""

    async def lead() -> None:
        leader = Leader()
        await leader.informers.list()
        frozen = gc.get_freeze_count()
        await leader.informers.list()
        assert gc.get_freeze_count() == frozen

    asyncio.run(lead())
