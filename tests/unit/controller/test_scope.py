"""One release of the operator for each namespace: the second starts nothing, and names the first."""

import asyncio
import logging
from typing import Any
from unittest.mock import patch

import pytest

from finetune_operator.controller import leader_election, scope
from finetune_operator.controller.scope import EVERYWHERE, Scope
from finetune_operator.errors import Conflict
from finetune_operator.kubernetes.translate.api_errors import AlreadyExists, ApiError


class Leases:
    """An API server with Leases, which refuses all requests for some namespaces."""

    def __init__(self, *forbidden: str) -> None:
        self.leases: dict[str, Any] = {}
        self.forbidden = forbidden
        self.version = 0

    async def get(self, path: str) -> Any:
        self._check(path)
        lease = self.leases.get(path)
        return lease and {**lease, "spec": dict(lease["spec"])}

    async def create(self, path: str, body: Any) -> None:
        self._check(path)
        path += "/" + body["metadata"]["name"]
        if path in self.leases:
            raise AlreadyExists(409, "there")
        self._store(path, body)

    async def replace(self, path: str, body: Any) -> None:
        self._check(path)
        present = self.leases[path]["metadata"]["resourceVersion"]
        if body["metadata"]["resourceVersion"] != present:
            raise Conflict("changed")
        self._store(path, body)

    async def list(self, _path: str, **_query: str) -> Any:
        for lease in self.leases.values():
            yield lease

    def _store(self, path: str, body: Any) -> None:
        self.version += 1
        metadata = {**body["metadata"], "resourceVersion": str(self.version)}
        self.leases[path] = {**body, "metadata": metadata}

    def _check(self, path: str) -> None:
        for namespace in self.forbidden:
            if f"/namespaces/{namespace}/" in path:
                raise ApiError(403, "forbidden")


@pytest.fixture(autouse=True)
def _short_timeouts():
    with (
        patch.multiple(
            leader_election, LEASE_DURATION=1, RENEW_DEADLINE=0.6, RETRY_PERIOD=0.05
        ),
        patch.object(scope, "HAND_OVER_SECONDS", 1),
    ):
        yield


def release(api: Leases, name: str, *namespaces: str) -> Scope:
    created: Any = api
    return Scope.create(created, f"{name}/finetune-operator", namespaces)


def run(scenario: Any) -> None:
    asyncio.run(asyncio.wait_for(scenario, 20))


async def held(waiting: Scope, seconds: float = 2.0) -> bool:
    """Return whether a release gets its namespaces in time."""
    try:
        await asyncio.wait_for(waiting.acquire(), seconds)
    except TimeoutError:
        return False
    return waiting.is_held


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((), ()),
        ((), ("a",)),
        (("a",), ("a",)),
        (("a", "b"), ("b", "c")),
        (("b", "c"), ("a", "b")),
    ],
)
def test_second_release_of_a_namespace_starts_nothing(
    first: tuple[str, ...], second: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        api = Leases()
        leading = release(api, "one", *first)
        assert await held(leading)
        renewing = asyncio.create_task(leading.renew())
        refused = release(api, "two", *second)
        assert not await held(refused)
        assert refused.other == "one/finetune-operator"
        assert leading.is_held
        renewing.cancel()

    run(scenario())
    assert "another release of the operator, one/finetune-operator" in caplog.text


def test_releases_of_different_namespaces_both_lead() -> None:
    async def scenario() -> None:
        api = Leases(EVERYWHERE)
        assert await held(release(api, "one", "a", "b"))
        assert await held(release(api, "two", "c"))

    run(scenario())


def test_release_for_some_namespaces_gives_way_and_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)

    async def scenario() -> None:
        api = Leases()
        small = release(api, "small", "a")
        assert await held(small)
        renewing = asyncio.create_task(small.renew())
        large = release(api, "large")
        assert await held(large)
        assert "namespace a had the release small/finetune-operator" in caplog.text
        large_renewing = asyncio.create_task(large.renew())
        await asyncio.wait_for(renewing, 2)
        assert not small.is_held
        assert not await held(small, 1)
        assert small.other == "large/finetune-operator"
        large_renewing.cancel()

    run(scenario())


def test_next_replica_of_a_release_leads_at_once() -> None:
    async def scenario() -> None:
        api = Leases()
        old = release(api, "one")
        assert await held(old)
        await old.release()
        assert not old.is_held
        assert not await held(release(api, "two"), 0.3)
        assert await held(release(api, "one"), 0.3)

    run(scenario())


def test_other_release_leads_after_the_end_of_the_first() -> None:
    async def scenario() -> None:
        api = Leases()
        gone = release(api, "one")
        assert await held(gone)
        await gone.release()
        assert await held(release(api, "two"), 5)

    run(scenario())


def test_release_without_the_right_leads(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        assert await held(release(Leases("b", EVERYWHERE), "one", "a", "b"))

    run(scenario())
    assert "cannot see whether another release reconciles" in caplog.text


def test_without_leases_everything_is_held() -> None:
    async def scenario() -> None:
        alone = Scope([], None)
        assert await held(alone)
        renewing = asyncio.create_task(alone.renew())
        await asyncio.sleep(0.2)
        assert alone.is_held
        assert alone.seconds_left == float("inf")
        assert not renewing.done()
        renewing.cancel()

    run(scenario())
