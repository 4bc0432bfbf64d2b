"""Whatever happens to one pipeline, the hands go on."""

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


class Ward(MemoryCluster):
    """A memory cluster in which one pipeline's read goes wrong."""

    def __init__(self, error):
        super().__init__(datetime.now(UTC))
        self.error, self.refused, self.forgotten = error, [], []
        for key in (BAD, GOOD):
            self.submit(key, a_pipeline(), UID)

    async def read(self, key):
        if key == BAD:
            raise self.error
        return await super().read(key)

    async def mark_invalid(self, key, why):
        self.refused.append((key, why))

    def forget(self, key):
        self.forgotten.append(key)


ERRORS = [
    (Conflict("changed"), "conflict"),
    (ClusterError("the API server does not answer"), "error"),
    (TimeoutError(), "error"),
    (InvalidObject("spec.train: of another version"), "refused"),
    (ZeroDivisionError("a bug"), "bug"),
]


@pytest.mark.parametrize(("error", "outcome"), ERRORS)
def test_each_kind_of_trouble_has_a_name_and_ends_nothing(error, outcome):
    async def story():
        cluster, queue = Ward(error), WorkQueue()
        assert await process(BAD, queue, cluster, Settings()) == outcome
        assert await process(GOOD, queue, cluster, Settings()) == "done"
        assert len(cluster.jobs) == 1
        assert cluster.refused == ([(BAD, str(error))] if outcome == "refused" else [])

    asyncio.run(story())


@pytest.mark.parametrize(("error", "outcome"), [one for one in ERRORS if one[1] in {"conflict", "error", "bug"}])
def test_what_went_wrong_is_tried_again_by_itself(error, outcome):
    async def story():
        cluster, queue = Ward(error), WorkQueue()
        hand = asyncio.create_task(run_worker(queue, cluster, Settings()))
        queue.add(BAD)
        await asyncio.sleep(0.05)
        cluster.error = None
        cluster.read = lambda key: MemoryCluster.read(cluster, key)
        async with asyncio.timeout(10):
            while not cluster.jobs:  # noqa: ASYNC110  a memory cluster tells nobody
                await asyncio.sleep(0.01)
        hand.cancel()

    asyncio.run(story())


def test_a_pipeline_that_is_gone_is_forgotten():
    async def story():
        cluster, queue = Ward(None), WorkQueue()
        del cluster.pipelines[GOOD]
        assert await process(GOOD, queue, cluster, Settings()) == "done"
        assert cluster.forgotten == [GOOD]

    asyncio.run(story())


def test_something_that_is_called_off_under_its_hands_does_not_end_a_hand():
    async def story():
        cluster, queue = Ward(asyncio.CancelledError()), WorkQueue()
        hand = asyncio.create_task(run_worker(queue, cluster, Settings()))
        for key in (BAD, GOOD):
            queue.add(key)
        await asyncio.sleep(0.1)
        assert not hand.done()
        assert len(cluster.jobs) == 1
        hand.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hand

    asyncio.run(story())


def test_one_that_is_made_anew_while_the_old_one_is_buried_is_looked_at():
    async def story():
        cluster, queue = Ward(None), WorkQueue()
        stored = cluster.pipelines.pop(GOOD)
        queue.add(GOOD)
        assert await queue.get() == GOOD
        queue.add(GOOD)  # its watch speaks while the answer of the API server is under way
        await process(GOOD, queue, cluster, Settings())
        queue.done(GOOD)
        cluster.pipelines[GOOD] = stored
        assert queue.__len__ == 1
        assert cluster.forgotten == []

    asyncio.run(story())


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), TimeoutError(), asyncio.CancelledError()])
def test_a_refusal_that_cannot_be_written_does_not_end_a_hand_and_is_tried_again(error, caplog):
    async def story():
        cluster, queue = Ward(InvalidObject("of another version")), WorkQueue()

        async def mark_invalid(key, why):
            raise error

        cluster.mark_invalid = mark_invalid
        hand = asyncio.create_task(run_worker(queue, cluster, Settings()))
        for key in (BAD, GOOD):
            queue.add(key)
        await asyncio.sleep(0.1)
        assert not hand.done()
        assert len(cluster.jobs) == 1
        assert BAD in queue._delayed
        hand.cancel()

    asyncio.run(story())
    assert "team/bad is tried again in" in caplog.text
