"""Leader election: one replica leads at a time, and another takes over."""

import asyncio
from unittest.mock import patch

import pytest

from finetune_operator.controller import leader_election
from finetune_operator.controller.leader_election import LeaderElector
from finetune_operator.errors import Conflict
from finetune_operator.kubernetes.translate.api_errors import AlreadyExists, ApiError


class FakeLeaseApi:
    """An API server with one Lease; `down` makes every request fail."""

    def __init__(self):
        self.lease, self.version, self.down = None, 0, False

    async def get(self, _path):
        self._raise_if_down()
        return self.lease and {**self.lease, "spec": dict(self.lease["spec"])}

    async def create(self, _path, body):
        self._raise_if_down()
        if self.lease:
            raise AlreadyExists(409, "there")
        self._store(body)

    async def replace(self, _path, body):
        self._raise_if_down()
        if body["metadata"].get("resourceVersion") != str(self.version):
            raise Conflict("changed")
        self._store(body)

    def _store(self, body):
        self.version += 1
        self.lease = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self.version)}}

    def _raise_if_down(self):
        if self.down:
            raise ApiError(0, "down")


@pytest.fixture(autouse=True)
def _short_timeouts():
    with patch.multiple(leader_election, LEASE_DURATION=1, RENEW_DEADLINE=0.6, RETRY_PERIOD=0.05):
        yield


def replica(api, name):
    return LeaderElector(api, "sys", "lease", name)


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario, 20))


def test_first_replica_leads_and_second_stands_by():
    async def scenario():
        api = FakeLeaseApi()
        first, second = replica(api, "one"), replica(api, "two")
        await first.acquire()
        renewing = asyncio.create_task(first.renew())
        acquiring = asyncio.create_task(second.acquire())
        await asyncio.sleep(2)
        assert first.is_leader
        assert not second.is_leader
        assert not acquiring.done()
        for task in (renewing, acquiring):
            task.cancel()

    run(scenario())


def test_released_lease_is_acquired_at_once():
    async def scenario():
        api = FakeLeaseApi()
        first, second = replica(api, "one"), replica(api, "two")
        await first.acquire()
        acquiring = asyncio.create_task(second.acquire())
        await asyncio.sleep(0.2)
        await first.release()
        assert not first.is_leader
        await asyncio.wait_for(acquiring, 0.5)
        assert api.lease["spec"]["leaseTransitions"] == 1

    run(scenario())


def test_expired_lease_is_acquired():
    async def scenario():
        api = FakeLeaseApi()
        await replica(api, "one").acquire()
        second = replica(api, "two")
        await second.acquire()
        assert second.is_leader

    run(scenario())


def test_leader_without_api_server_stops_before_lease_expires():
    async def scenario():
        api = FakeLeaseApi()
        first = replica(api, "one")
        await first.acquire()
        began = asyncio.get_running_loop().time()
        api.down = True
        await first.renew()
        assert not first.is_leader
        assert asyncio.get_running_loop().time() - began < leader_election.LEASE_DURATION

    run(scenario())


def test_renew_time_of_another_clock_is_ignored():
    async def scenario():
        api = FakeLeaseApi()
        await replica(api, "one").acquire()
        api.lease["spec"]["renewTime"] = "1999-01-01T00:00:00.000000Z"
        second = replica(api, "two")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(second.acquire(), 0.5)

    run(scenario())
