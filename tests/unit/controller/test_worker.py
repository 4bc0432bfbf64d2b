"""Workers: the outcome of each kind of error; an error in one pipeline does not affect the others."""

import asyncio
import itertools
from datetime import UTC, datetime

import pytest
from support.operator.memory_cluster import MemoryCluster
from support.operator.scenario import UID, a_pipeline

from finetune_operator.api.conditions import Reason
from finetune_operator.controller.worker import process, run_worker
from finetune_operator.controller.workqueue import WorkQueue
from finetune_operator.core.observation import Blocker
from finetune_operator.core.pipeline import Key
from finetune_operator.core.settings import Settings
from finetune_operator.errors import ClusterError, Conflict, InvalidObject
from finetune_operator.kubernetes.translate.api_errors import ApiError

GOOD = Key("team", "good")
BAD = Key("team", "bad")


class FailingCluster(MemoryCluster):
    """A memory cluster with two pipelines, in which the read of one of them raises an error."""

    def __init__(self, error):
        super().__init__(datetime.now(UTC))
        self.error = error
        self.invalid = []
        self.forbidden = []
        self.lock = asyncio.Lock()
        for key in (BAD, GOOD):
            self.submit(key, a_pipeline(), UID)

    async def read(self, key):
        if key == BAD:
            raise self.error
        return await super().read(key)

    async def mark_invalid(self, key, error):
        self.invalid.append((key, error))

    def report_forbidden(self, key, error):
        self.forbidden.append((key, str(error)))

    def claim_lock(self, key):
        return self.lock


ERRORS = [
    (Conflict("changed"), "conflict"),
    (ClusterError("the API server does not respond"), "error"),
    (TimeoutError(), "error"),
    (InvalidObject("spec.train: of another version"), "invalid"),
    (ZeroDivisionError("a bug"), "bug"),
]


@pytest.mark.parametrize(("error", "outcome"), ERRORS)
def test_each_error_has_its_outcome_and_is_contained(error, outcome):
    async def scenario():
        cluster = FailingCluster(error)
        queue = WorkQueue()
        assert await process(BAD, queue, cluster, Settings()) == outcome
        assert await process(GOOD, queue, cluster, Settings()) == "done"
        assert len(cluster.jobs) == 1
        assert cluster.invalid == ([(BAD, error)] if outcome == "invalid" else [])

    asyncio.run(scenario())


@pytest.mark.parametrize("status", [403, 409, 500])
def test_forbidden_request_is_reported_to_the_pipelines_user(status):
    async def scenario():
        cluster = FailingCluster(ApiError(status, "jobs is forbidden"))
        assert await process(BAD, WorkQueue(), cluster, Settings()) == "error"
        reported = [(BAD, "jobs is forbidden")] if status == 403 else []
        assert cluster.forbidden == reported

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("error", "outcome"),
    [case for case in ERRORS if case[1] in {"conflict", "error", "bug"}],
)
def test_pipeline_is_retried_after_an_error(error, outcome):
    async def scenario():
        cluster = FailingCluster(error)
        queue = WorkQueue()
        worker = asyncio.create_task(run_worker(queue, cluster, Settings))
        queue.add(BAD)
        await asyncio.sleep(0.05)
        cluster.error = None
        cluster.read = lambda key: MemoryCluster.read(cluster, key)
        async with asyncio.timeout(10):
            while not cluster.jobs:  # noqa: ASYNC110  a memory cluster has no event to wait for
                await asyncio.sleep(0.01)
        worker.cancel()

    asyncio.run(scenario())


def test_worker_uses_the_settings_of_the_moment():
    """Prices may change while the operator runs."""

    async def scenario():
        cluster = FailingCluster(None)
        queue = WorkQueue()
        settings = [Settings(trainer_cpu_image="old")]
        worker = asyncio.create_task(run_worker(queue, cluster, lambda: settings[-1]))
        await asyncio.sleep(0)
        settings.append(Settings(trainer_cpu_image="new"))
        queue.add(GOOD)
        async with asyncio.timeout(10):
            while not cluster.jobs:  # noqa: ASYNC110  a memory cluster has no event to wait for
                await asyncio.sleep(0.01)
        worker.cancel()
        assert [job.template.image for job in cluster.jobs.values()] == ["new"]

    asyncio.run(scenario())


def test_deleted_pipeline_leaves_the_queue():
    async def scenario():
        cluster = FailingCluster(None)
        queue = WorkQueue()
        del cluster.pipelines[GOOD]
        queue.add_rate_limited(GOOD)
        assert await process(GOOD, queue, cluster, Settings()) == "done"
        assert queue._delayed == {}
        assert queue._failures == {}

    asyncio.run(scenario())


def test_worker_survives_cancellation_of_an_awaited_task():
    async def scenario():
        cluster = FailingCluster(asyncio.CancelledError())
        queue = WorkQueue()
        worker = asyncio.create_task(run_worker(queue, cluster, Settings))
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
    """A worker still processes the deletion of the old pipeline when a pipeline with the same name is created."""

    async def scenario():
        cluster = FailingCluster(None)
        queue = WorkQueue()
        stored = cluster.pipelines.pop(GOOD)
        queue.add(GOOD)
        assert await queue.get() == GOOD
        queue.add(
            GOOD
        )  # its watch event arrives before the API server's response to the read
        await process(GOOD, queue, cluster, Settings())
        queue.done(GOOD)
        cluster.pipelines[GOOD] = stored
        assert len(queue) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("a bug"), TimeoutError(), asyncio.CancelledError()]
)
def test_worker_retries_when_invalid_status_is_not_written(error, caplog):
    async def scenario():
        cluster = FailingCluster(InvalidObject("of another version"))
        queue = WorkQueue()

        async def mark_invalid(key, reason):
            raise error

        cluster.mark_invalid = mark_invalid
        worker = asyncio.create_task(run_worker(queue, cluster, Settings))
        for key in (BAD, GOOD):
            queue.add(key)
        async with asyncio.timeout(10):
            while not (cluster.jobs and BAD in queue._delayed):  # noqa: ASYNC110  the worker changes both
                await asyncio.sleep(0.01)
        assert not worker.done()
        worker.cancel()

    asyncio.run(scenario())
    assert "cannot reconcile team/bad, retrying in" in caplog.text


def test_refused_pipeline_is_retried_with_a_growing_delay():
    async def scenario():
        cluster = FailingCluster(None)
        queue = WorkQueue()
        cluster.refusals["workspace"] = Blocker(
            Reason.WAITING_FOR_QUOTA, "exceeded quota"
        )
        for _ in range(4):
            assert await process(GOOD, queue, cluster, Settings()) == "refused"
        assert queue._failures[GOOD] == 4
        assert cluster.jobs == {}
        cluster.refusals.clear()
        assert await process(GOOD, queue, cluster, Settings()) == "done"
        assert GOOD not in queue._failures
        assert len(cluster.jobs) == 1

    asyncio.run(scenario())


def test_pipelines_with_one_claim_are_reconciled_in_turn():
    """Two that are reconciled at once would each find that the other has no attempt yet."""
    active = []

    class SlowCluster(FailingCluster):
        async def observe(self, pipeline):
            active.append(pipeline.key)
            assert len(active) == 1
            await asyncio.sleep(0.02)
            active.remove(pipeline.key)
            return await super().observe(pipeline)

    async def scenario():
        cluster = SlowCluster(None)
        queue = WorkQueue()
        cluster.read = lambda key: MemoryCluster.read(cluster, key)
        outcomes = [process(key, queue, cluster, Settings()) for key in (GOOD, BAD)]
        assert await asyncio.gather(*outcomes) == ["done", "done"]

    asyncio.run(scenario())


def test_reconciles_without_requests_do_not_hold_up_other_tasks():
    """The Lease is renewed by another task of the same event loop: 5,000 finished pipelines take half a minute."""
    finished: list[Key] = []
    turns = [0]

    async def renew():
        while True:
            turns.append(len(finished))
            await asyncio.sleep(0)

    class FinishedCluster(FailingCluster):
        async def read(self, key):
            finished.append(key)

    async def scenario():
        cluster = FinishedCluster(None)
        queue = WorkQueue()
        for number in range(100):
            queue.add(Key("team", f"done-{number}"), low=True)
        worker = asyncio.create_task(run_worker(queue, cluster, Settings))
        renewing = asyncio.create_task(renew())
        while len(finished) < 100:  # noqa: ASYNC110  the cluster appends to a list
            await asyncio.sleep(0.001)
        worker.cancel()
        renewing.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 10))
    assert max(after - before for before, after in itertools.pairwise(turns)) <= 1
