"""Whose turn it is."""

import asyncio

from finetune_operator.controller.workqueue import WorkQueue
from finetune_operator.core.pipeline import Key

A, B, C = (Key("team", name) for name in "abc")


def run(story):
    return asyncio.run(asyncio.wait_for(story, 10))


def test_a_pipeline_that_changed_ten_times_is_looked_at_once():
    async def story():
        queue = WorkQueue()
        for _ in range(10):
            queue.add(A)
        assert await queue.get() == A
        assert queue.__len__ == 0

    run(story())


def test_nobody_has_two_hands_on_one_pipeline_and_no_change_is_lost():
    async def story():
        queue = WorkQueue()
        queue.add(A)
        assert await queue.get() == A
        queue.add(A)
        queue.add(B)
        assert await queue.get() == B
        assert queue.__len__ == 0
        queue.done(A)
        assert await queue.get() == A

    run(story())


def test_a_noisy_pipeline_waits_behind_the_others():
    async def story():
        queue = WorkQueue()
        for key in (A, B, C):
            queue.add(key)
        assert await queue.get() == A
        queue.add(A)
        queue.done(A)
        assert [await queue.get() for _ in range(3)] == [B, C, A]

    run(story())


def test_of_several_wishes_the_earliest_counts():
    async def story():
        queue = WorkQueue()
        loop = asyncio.get_running_loop()
        began = loop.time()
        queue.add_after(A, 30)
        queue.add_after(A, 0.05)
        queue.add_after(A, 20)
        assert await queue.get() == A
        assert loop.time() - began < 5

    run(story())


def test_failures_wait_longer_and_longer_and_success_forgets_them():
    async def story():
        queue = WorkQueue()
        waits = [queue.add_rate_limited(A) for _ in range(12)]
        assert waits[0] < 1 < waits[3] < waits[5]
        assert all(wait <= 72 for wait in waits)
        queue.forget(A)
        assert queue.add_rate_limited(A) < 1

    run(story())


def test_one_that_is_gone_is_forgotten():
    async def story():
        queue = WorkQueue()
        queue.add_after(A, 0.01)
        queue.add(B)
        queue.remove(A)
        queue.remove(B)
        await asyncio.sleep(0.05)
        assert queue.__len__ == 0

    run(story())


def test_the_oldest_tells_how_long_it_has_waited():
    async def story():
        queue = WorkQueue()
        assert queue.oldest() == 0
        queue.add(A)
        await asyncio.sleep(0.05)
        assert queue.oldest() >= 0.05

    run(story())
