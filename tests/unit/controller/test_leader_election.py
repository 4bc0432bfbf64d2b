"""One replica works at a time, and the other takes over."""

import asyncio
from unittest.mock import patch

import pytest

from finetune_operator.controller import leader_election as leader
from finetune_operator.controller.leader_election import LeaderElector
from finetune_operator.errors import Conflict
from finetune_operator.kubernetes.client import AlreadyExists, ApiError


class OneLease:
    """An API server that has one Lease."""

    def __init__(self):
        self.lease, self.version, self.down = None, 0, False

    async def get(self, _path):
        self._answer()
        return self.lease and {**self.lease, "spec": dict(self.lease["spec"])}

    async def create(self, _path, body):
        self._answer()
        if self.lease:
            raise AlreadyExists(409, "there")
        self._keep(body)

    async def replace(self, _path, body):
        self._answer()
        if body["metadata"].get("resourceVersion") != str(self.version):
            raise Conflict("changed")
        self._keep(body)

    def _keep(self, body):
        self.version += 1
        self.lease = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self.version)}}

    def _answer(self):
        if self.down:
            raise ApiError(0, "down")


@pytest.fixture(autouse=True)
def _quick():
    with patch.multiple(leader, LEASE_DURATION=1, RENEW_DEADLINE=0.6, RETRY_PERIOD=0.05):
        yield


def replica(api, name):
    return LeaderElector(api, "sys", "lease", name)


def run(story):
    asyncio.run(asyncio.wait_for(story, 20))


def test_the_first_leads_and_the_second_stands_by():
    async def story():
        api = OneLease()
        first, second = replica(api, "one"), replica(api, "two")
        await first.acquire()
        keeping = asyncio.create_task(first.renew())
        waiting = asyncio.create_task(second.acquire())
        await asyncio.sleep(2)
        assert first.is_leader
        assert not second.is_leader
        assert not waiting.done()
        for task in (keeping, waiting):
            task.cancel()

    run(story())


def test_a_leader_that_gives_its_lease_back_is_followed_at_once():
    async def story():
        api = OneLease()
        first, second = replica(api, "one"), replica(api, "two")
        await first.acquire()
        waiting = asyncio.create_task(second.acquire())
        await asyncio.sleep(0.2)
        await first.release()
        assert not first.is_leader
        await asyncio.wait_for(waiting, 0.5)
        assert api.lease["spec"]["leaseTransitions"] == 1

    run(story())


def test_a_leader_that_is_dead_is_followed_when_its_time_is_up():
    async def story():
        api = OneLease()
        await replica(api, "one").acquire()
        second = replica(api, "two")
        await second.acquire()
        assert second.is_leader

    run(story())


def test_a_leader_without_an_api_server_stops_before_others_may_start():
    async def story():
        api = OneLease()
        first = replica(api, "one")
        await first.acquire()
        began = asyncio.get_running_loop().time()
        api.down = True
        await first.renew()
        assert not first.is_leader
        assert asyncio.get_running_loop().time() - began < leader.LEASE_DURATION

    run(story())


def test_clocks_of_other_machines_do_not_matter():
    async def story():
        api = OneLease()
        await replica(api, "one").acquire()
        api.lease["spec"]["renewTime"] = "1999-01-01T00:00:00.000000Z"
        second = replica(api, "two")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(second.acquire(), 0.5)

    run(story())
