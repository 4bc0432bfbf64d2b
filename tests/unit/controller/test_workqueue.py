"""The work queue: order, duplicates, delays and backoff."""

import asyncio

from finetune_operator.controller.workqueue import WorkQueue
from finetune_operator.core.pipeline import Key

A, B, C = (Key("team", name) for name in "abc")


def run(scenario):
    return asyncio.run(asyncio.wait_for(scenario, 10))


def test_pipeline_added_ten_times_is_queued_once():
    async def scenario():
        queue = WorkQueue()
        for _ in range(10):
            queue.add(A)
        assert await queue.get() == A
        assert len(queue) == 0

    run(scenario())


def test_pipeline_added_while_processing_is_queued_when_done():
    """No two workers process one pipeline at a time, and no change is lost."""

    async def scenario():
        queue = WorkQueue()
        queue.add(A)
        assert await queue.get() == A
        queue.add(A)
        queue.add(B)
        assert await queue.get() == B
        assert len(queue) == 0
        queue.done(A)
        assert await queue.get() == A

    run(scenario())


def test_busy_pipeline_waits_behind_the_others():
    async def scenario():
        queue = WorkQueue()
        for key in (A, B, C):
            queue.add(key)
        assert await queue.get() == A
        queue.add(A)
        queue.done(A)
        assert [await queue.get() for _ in range(3)] == [B, C, A]

    run(scenario())


def test_of_several_delays_the_shortest_counts():
    async def scenario():
        queue = WorkQueue()
        loop = asyncio.get_running_loop()
        began = loop.time()
        queue.add_after(A, 30)
        queue.add_after(A, 0.05)
        queue.add_after(A, 20)
        assert await queue.get() == A
        assert loop.time() - began < 5

    run(scenario())


def test_delay_grows_with_failures_and_forget_resets_it():
    async def scenario():
        queue = WorkQueue()
        delays = [queue.add_rate_limited(A) for _ in range(12)]
        assert delays[0] < 1 < delays[3] < delays[5]
        assert all(delay <= 72 for delay in delays)
        queue.forget(A)
        assert queue.add_rate_limited(A) < 1

    run(scenario())


def test_removed_pipeline_leaves_queue_and_delays():
    async def scenario():
        queue = WorkQueue()
        queue.add_after(A, 0.01)
        queue.add(B)
        queue.remove(A)
        queue.remove(B)
        await asyncio.sleep(0.05)
        assert len(queue) == 0

    run(scenario())


def test_oldest_is_the_wait_of_the_first_pipeline():
    async def scenario():
        queue = WorkQueue()
        assert queue.oldest() == 0
        queue.add(A)
        await asyncio.sleep(0.05)
        assert queue.oldest() >= 0.05

    run(scenario())
