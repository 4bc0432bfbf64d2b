"""Workers: the outcome of each kind of error; an error in one pipeline does not affect the others."""

import asyncio
from datetime import UTC, datetime

import pytest
from support.scenario import UID, a_pipeline

from finetune_operator.controller.worker import process, run_worker
from finetune_operator.controller.workqueue import WorkQueue
from finetune_operator.core.pipeline import Key
from finetune_operator.core.settings import Settings
from finetune_operator.errors import ClusterError, Conflict, InvalidObject
from finetune_operator.memory import MemoryCluster

GOOD, BAD = Key("team", "good"), Key("team", "bad")


class FailingCluster(MemoryCluster):
    """A memory cluster with two pipelines, in which the read of one of them raises an error."""

    def __init__(self, error):
        super().__init__(datetime.now(UTC))
        self.error, self.invalid, self.forgotten = error, [], []
        for key in (BAD, GOOD):
            self.submit(key, a_pipeline(), UID)

    async def read(self, key):
        if key == BAD:
            raise self.error
        return await super().read(key)

    async def mark_invalid(self, key, message):
        self.invalid.append((key, message))

    def forget(self, key):
        self.forgotten.append(key)


ERRORS = [
    (Conflict("changed"), "conflict"),
    (ClusterError("the API server does not respond"), "error"),
    (TimeoutError(), "error"),
    (InvalidObject("spec.train: of another version"), "refused"),
    (ZeroDivisionError("a bug"), "bug"),
]


@pytest.mark.parametrize(("error", "outcome"), ERRORS)
def test_each_error_has_its_outcome_and_is_contained(error, outcome):
    async def scenario():
        cluster, queue = FailingCluster(error), WorkQueue()
        assert await process(BAD, queue, cluster, Settings()) == outcome
        assert await process(GOOD, queue, cluster, Settings()) == "done"
        assert len(cluster.jobs) == 1
        assert cluster.invalid == ([(BAD, str(error))] if outcome == "refused" else [])

    asyncio.run(scenario())


@pytest.mark.parametrize(("error", "outcome"), [case for case in ERRORS if case[1] in {"conflict", "error", "bug"}])
def test_pipeline_is_retried_after_an_error(error, outcome):
    async def scenario():
        cluster, queue = FailingCluster(error), WorkQueue()
        worker = asyncio.create_task(run_worker(queue, cluster, Settings()))
        queue.add(BAD)
        await asyncio.sleep(0.05)
        cluster.error = None
        cluster.read = lambda key: MemoryCluster.read(cluster, key)
        async with asyncio.timeout(10):
            while not cluster.jobs:  # noqa: ASYNC110  a memory cluster has no event to wait for
                await asyncio.sleep(0.01)
        worker.cancel()

    asyncio.run(scenario())


def test_deleted_pipeline_is_forgotten():
    async def scenario():
        cluster, queue = FailingCluster(None), WorkQueue()
        del cluster.pipelines[GOOD]
        assert await process(GOOD, queue, cluster, Settings()) == "done"
        assert cluster.forgotten == [GOOD]

    asyncio.run(scenario())


def test_worker_survives_cancellation_of_an_awaited_task():
    async def scenario():
        cluster, queue = FailingCluster(asyncio.CancelledError()), WorkQueue()
        worker = asyncio.create_task(run_worker(queue, cluster, Settings()))
        for key in (BAD, GOOD):
            queue.add(key)
        await asyncio.sleep(0.1)
        assert not worker.done()
        assert len(cluster.jobs) == 1
        worker.cancel()
        with pytest.raises(asyncio.CancelledError):
            await worker

    asyncio.run(scenario())


def test_pipeline_recreated_during_its_removal_is_reconciled():
    """A pipeline is created again under the same name while a worker still processes the deletion of the old one."""

    async def scenario():
        cluster, queue = FailingCluster(None), WorkQueue()
        stored = cluster.pipelines.pop(GOOD)
        queue.add(GOOD)
        assert await queue.get() == GOOD
        queue.add(GOOD)  # its watch event arrives before the API server's response to the read
        await process(GOOD, queue, cluster, Settings())
        queue.done(GOOD)
        cluster.pipelines[GOOD] = stored
        assert len(queue) == 1
        assert cluster.forgotten == []

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), TimeoutError(), asyncio.CancelledError()])
def test_worker_retries_when_invalid_status_is_not_written(error, caplog):
    async def scenario():
        cluster, queue = FailingCluster(InvalidObject("of another version")), WorkQueue()

        async def mark_invalid(key, message):
            raise error

        cluster.mark_invalid = mark_invalid
        worker = asyncio.create_task(run_worker(queue, cluster, Settings()))
        for key in (BAD, GOOD):
            queue.add(key)
        await asyncio.sleep(0.1)
        assert not worker.done()
        assert len(cluster.jobs) == 1
        assert BAD in queue._delayed
        worker.cancel()

    asyncio.run(scenario())
    assert "cannot reconcile team/bad, retrying in" in caplog.text
