"""Leader election: one replica leads at a time, and another takes over."""

import asyncio
from typing import Any
from unittest.mock import patch

import pytest

from finetune_operator.controller import leader_election
from finetune_operator.controller.leader_election import LeaderElector
from finetune_operator.errors import Conflict
from finetune_operator.kubernetes.translate.api_errors import AlreadyExists, ApiError


class FakeLeaseApi:
    """An API server with one Lease; `down` makes every request fail."""

    def __init__(self):
        self.lease: Any = None
        self.version = 0
        self.down = False

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
        self.lease = {
            **body,
            "metadata": {**body["metadata"], "resourceVersion": str(self.version)},
        }

    def _raise_if_down(self):
        if self.down:
            raise ApiError(0, "down")


async def no_writes():
    """Return at once: no write is under way."""


@pytest.fixture(autouse=True)
def _short_timeouts():
    with patch.multiple(
        leader_election, LEASE_DURATION=1, RENEW_DEADLINE=0.6, RETRY_PERIOD=0.05
    ):
        yield


def replica(api, name):
    return LeaderElector(api, "sys", "lease", name)


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario, 20))


def test_first_replica_leads_and_second_stands_by():
    async def scenario():
        api = FakeLeaseApi()
        first = replica(api, "one")
        second = replica(api, "two")
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
        first = replica(api, "one")
        second = replica(api, "two")
        await first.acquire()
        acquiring = asyncio.create_task(second.acquire())
        await asyncio.sleep(0.2)
        await first.release(no_writes)
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
        assert (
            asyncio.get_running_loop().time() - began < leader_election.LEASE_DURATION
        )

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


def test_two_processes_with_one_name_do_not_both_lead():
    async def scenario():
        api = FakeLeaseApi()
        first = replica(api, "host")
        second = replica(api, "host")
        await first.acquire()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(second.acquire(), 0.5)
        assert first.is_leader
        assert api.lease["spec"]["holderIdentity"].startswith("host_")

    run(scenario())


def warnings_of(caplog):
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelname == "WARNING"
    ]


@pytest.mark.parametrize("changed_between_get_and_put", [False, True])
def test_lease_held_by_another_ends_the_leadership_at_once(
    changed_between_get_and_put, caplog
):
    class StolenLeaseApi(FakeLeaseApi):
        """Another replica takes the Lease over while the leader's request is under way."""

        stolen = False

        async def get(self, path):
            before = await super().get(path)
            if self.stolen and before["spec"]["holderIdentity"] != "other":
                self._store(
                    {
                        **self.lease,
                        "spec": {**self.lease["spec"], "holderIdentity": "other"},
                    }
                )
                return (
                    before if changed_between_get_and_put else await super().get(path)
                )
            return before

    async def scenario():
        api = StolenLeaseApi()
        first = replica(api, "one")
        with patch.multiple(leader_election, RENEW_DEADLINE=10.0, RETRY_PERIOD=0.7):
            await first.acquire()
            api.stolen = True
            await asyncio.wait_for(first.renew(), 1)
            assert first.is_leader is False
            assert first.seconds_left == 0.0
            assert api.lease["spec"]["holderIdentity"] == "other"

    run(scenario())
    assert warnings_of(caplog) == ["no longer the leader: the Lease is held by other"]


def test_edit_of_the_lease_by_a_user_does_not_end_leadership():
    class EditedLeaseApi(FakeLeaseApi):
        """A user edits the Lease once, between the leader's GET and its PUT."""

        edited = True

        async def get(self, path):
            before = await super().get(path)
            if not self.edited:
                self.edited = True
                self._store(
                    {
                        **self.lease,
                        "metadata": {**self.lease["metadata"], "labels": {"a": "b"}},
                    }
                )
            return before

    async def scenario():
        api = EditedLeaseApi()
        first = replica(api, "one")
        await first.acquire()
        renewing = asyncio.create_task(first.renew())
        api.edited = False
        await asyncio.sleep(1)
        assert first.is_leader is True
        assert api.edited is True
        renewing.cancel()

    run(scenario())


def test_deleted_lease_is_created_again_by_the_leader():
    async def scenario():
        api = FakeLeaseApi()
        first = replica(api, "one")
        await first.acquire()
        renewing = asyncio.create_task(first.renew())
        api.lease = None
        await asyncio.sleep(0.2)
        assert first.is_leader
        assert api.lease["spec"]["holderIdentity"] == first.identity
        renewing.cancel()

    run(scenario())


def test_time_left_ends_before_another_replica_takes_over():
    async def scenario():
        api = FakeLeaseApi()
        first = replica(api, "one")
        second = replica(api, "two")
        assert first.seconds_left == 0.0
        await first.acquire()
        assert 0.5 < first.seconds_left <= leader_election.LEASE_DURATION
        deadline = asyncio.get_running_loop().time() + first.seconds_left
        await asyncio.sleep(leader_election.RENEW_DEADLINE)
        assert not first.is_leader
        assert (
            0
            < first.seconds_left
            <= leader_election.LEASE_DURATION - leader_election.RENEW_DEADLINE
        )
        await second.acquire()
        assert asyncio.get_running_loop().time() >= deadline
        assert first.seconds_left == 0.0

    run(scenario())


def test_leader_whose_requests_hang_stops_at_the_deadline(caplog):
    class HangingLeaseApi(FakeLeaseApi):
        hangs = False

        async def get(self, path):
            if self.hangs:
                await asyncio.sleep(60)
            return await super().get(path)

    async def scenario():
        api = HangingLeaseApi()
        first = replica(api, "one")
        await first.acquire()
        left = first.seconds_left
        api.hangs = True
        began = asyncio.get_running_loop().time()
        await first.renew()
        stopped_after = asyncio.get_running_loop().time() - began
        assert (
            stopped_after
            < left
            - (leader_election.LEASE_DURATION - leader_election.RENEW_DEADLINE)
            + 0.1
        )

    run(scenario())
    assert "no longer the leader: the Lease was not renewed for 0.6 s" in warnings_of(
        caplog
    )


def test_orderly_release_warns_of_nothing(caplog):
    async def scenario():
        api = FakeLeaseApi()
        first = replica(api, "one")
        await first.acquire()
        renewing = asyncio.create_task(first.renew())
        await asyncio.sleep(0.2)
        await first.release(no_writes)
        await asyncio.wait_for(renewing, 1)
        assert first.seconds_left == 0.0
        assert api.lease["spec"]["holderIdentity"] == ""

    run(scenario())
    assert warnings_of(caplog) == []


def test_lease_is_released_after_the_writes_under_way():
    async def scenario():
        api = FakeLeaseApi()
        written = asyncio.Event()
        first = replica(api, "one")
        await first.acquire()
        releasing = asyncio.create_task(first.release(written.wait))
        await asyncio.sleep(0.05)
        assert not first.is_leader
        assert api.lease["spec"]["holderIdentity"] == first.identity
        written.set()
        await releasing
        assert api.lease["spec"]["holderIdentity"] == ""

    run(scenario())


def test_work_as_the_leader_goes_on_until_the_release_has_ended():
    """Its caller cancels it when `renew` returns: that would cut the writes that the release waits for."""

    async def scenario():
        api = FakeLeaseApi()
        written = asyncio.Event()
        first = replica(api, "one")
        await first.acquire()
        renewing = asyncio.create_task(first.renew())
        releasing = asyncio.create_task(first.release(written.wait))
        await asyncio.sleep(0.3)
        assert not renewing.done()
        written.set()
        await asyncio.wait_for(renewing, 1)
        assert releasing.done()
        assert api.lease["spec"]["holderIdentity"] == ""

    run(scenario())


def test_release_during_a_renewal_still_clears_the_holder():
    class SlowLeaseApi(FakeLeaseApi):
        """An API server that processes each replace 0.05 s after it has arrived."""

        async def replace(self, path, body):
            await asyncio.sleep(0.05)
            await super().replace(path, body)

    async def scenario():
        api = SlowLeaseApi()
        first = replica(api, "one")
        await first.acquire()
        renewing = asyncio.create_task(first._try_acquire_or_renew())
        await asyncio.sleep(0.02)
        await first.release(no_writes)
        await renewing
        assert not first.is_leader
        assert api.lease["spec"]["holderIdentity"] == ""

    run(scenario())
