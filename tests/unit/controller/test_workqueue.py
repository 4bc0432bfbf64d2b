"""The work queue: order, duplicates, delays and backoff."""

import asyncio
from collections import Counter

import pytest

from finetune_operator.controller.workqueue import LOW_WORKERS, TURNS, WorkQueue
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


async def get_all(queue, limit=100):
    """Get pipelines, as idle workers do, until none is left for them; return how many of each namespace."""
    taken: Counter[str] = Counter()
    while taken.total() < limit:
        try:
            taken[(await asyncio.wait_for(queue.get(), 0.02)).namespace] += 1
        except TimeoutError:
            return taken
    return taken


@pytest.mark.parametrize(
    ("workers", "namespaces", "expected"),
    [
        (20, 1, [10]),
        (20, 2, [7, 7]),
        (20, 3, [5, 5, 5]),
        (4, 1, [2]),
        (4, 2, [2, 1]),
        (2, 1, [1]),
        (1, 1, [1]),
    ],
)
def test_busy_namespaces_leave_workers_to_the_others(workers, namespaces, expected):
    async def scenario():
        queue = WorkQueue(workers)
        for number in range(50):
            for namespace in range(namespaces):
                queue.add(Key(f"busy-{namespace}", str(number)))
        taken = await get_all(queue)
        assert sorted(taken.values(), reverse=True) == expected
        if workers > taken.total():
            queue.add(Key("good", "demo"))
            assert await get_all(queue) == {"good": 1}

    run(scenario())


def test_ended_reconcile_gives_a_full_namespace_its_turn():
    async def scenario():
        queue = WorkQueue(workers=2)
        queue.add(A)
        queue.add(B)
        assert await queue.get() == A
        waiting = asyncio.create_task(queue.get())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        queue.done(A)
        assert await waiting == B

    run(scenario())


def test_full_namespace_does_not_delay_low_priority_of_another():
    async def scenario():
        queue = WorkQueue(workers=2)
        queue.add(A)
        assert await queue.get() == A
        queue.add(B)
        other = Key("other", "a")
        queue.add(other, low=True)
        assert await queue.get() == other

    run(scenario())


def test_cancelled_worker_passes_its_wake_up_on():
    async def scenario():
        queue = WorkQueue()
        first, second = (asyncio.create_task(queue.get()) for _ in range(2))
        await asyncio.sleep(0.01)
        queue.add(A)
        first.cancel()
        assert await second == A

    run(scenario())


def test_every_pipeline_reaches_one_of_many_idle_workers():
    async def scenario():
        queue = WorkQueue(workers=8)
        seen = []
        keys = [Key(f"team-{number % 5}", str(number)) for number in range(200)]

        async def work():
            while True:
                key = await queue.get()
                await asyncio.sleep(0.0005)
                seen.append(key)
                queue.done(key)

        workers = [asyncio.create_task(work()) for _ in range(8)]
        for key in keys:
            queue.add(key)
            await asyncio.sleep(0)
        while len(seen) < len(keys):  # noqa: ASYNC110  the workers append to a list
            await asyncio.sleep(0.005)
        for worker in workers:
            worker.cancel()
        assert sorted(seen) == sorted(keys)

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


async def drained(queue, count):
    return [await queue.get() for _ in range(count)]


def test_namespaces_take_turns():
    async def scenario():
        queue = WorkQueue()
        busy = [Key("busy", str(number)) for number in range(4)]
        for key in (*busy, Key("small", "x"), Key("other", "y")):
            queue.add(key)
        order = await drained(queue, 6)
        assert [key.namespace for key in order] == [
            "busy",
            "small",
            "other",
            "busy",
            "busy",
            "busy",
        ]
        assert [key for key in order if key.namespace == "busy"] == busy

    run(scenario())


def test_low_priority_has_one_of_eight_turns():
    async def scenario():
        queue = WorkQueue()
        low = [Key("team", f"low-{number}") for number in range(2)]
        for key in low:
            queue.add(key, low=True)
        for number in range(20):
            queue.add(Key("team", f"urgent-{number}"))
        order = await drained(queue, 22)
        assert [number for number, key in enumerate(order, 1) if key in low] == [
            TURNS,
            2 * TURNS,
        ]

    run(scenario())


def test_running_attempts_go_before_pipelines_that_begin():
    async def scenario():
        running = [Key("team", f"running-{number}") for number in range(12)]
        new = [Key("team", f"new-{number}") for number in range(3)]
        queue = WorkQueue(has_running_attempt=lambda key: key in running)
        for key in (*new, *running):
            queue.add(key)
        order = await drained(queue, 15)
        places = [number for number, key in enumerate(order, 1) if key in new]
        assert places == [TURNS // 2, TURNS // 2 + TURNS, 15]

    run(scenario())


def test_pipeline_goes_ahead_when_its_attempt_runs():
    async def scenario():
        running = set()
        queue = WorkQueue(has_running_attempt=lambda key: key in running)
        for key in (A, B):
            queue.add(key)
        running.add(B)
        queue.add(B)
        assert len(queue) == 2
        assert await drained(queue, 2) == [B, A]

    run(scenario())


def test_low_priority_gets_two_workers_at_a_time():
    async def scenario():
        queue = WorkQueue()
        low = [Key("team", f"low-{number}") for number in range(LOW_WORKERS + 1)]
        for key in low:
            queue.add(key, low=True)
        assert await drained(queue, LOW_WORKERS) == low[:-1]
        third = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        assert not third.done()
        queue.add(A)
        assert await third == A
        queue.done(low[0])
        assert await queue.get() == low[-1]

    run(scenario())


def test_low_priority_waits_for_nobody_when_alone():
    async def scenario():
        queue = WorkQueue()
        queue.add(A, low=True)
        assert await drained(queue, 1) == [A]

    run(scenario())


def test_change_raises_the_priority_and_never_lowers_it():
    async def scenario():
        queue = WorkQueue()
        queue.add(A, low=True)
        queue.add(B, low=True)
        queue.add(C)
        queue.add(B)
        queue.add(C, low=True)
        assert len(queue) == 3
        assert await drained(queue, 3) == [C, B, A]

    run(scenario())


def test_change_cancels_a_pending_delay():
    async def scenario():
        queue = WorkQueue()
        queue.add_after(A, 0.05)
        queue.add(A)
        assert await drained(queue, 1) == [A]
        queue.done(A)
        await asyncio.sleep(0.1)
        assert len(queue) == 0

    run(scenario())
