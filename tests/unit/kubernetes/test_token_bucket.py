"""The limit on the rate of requests to the API server."""

import asyncio

from finetune_operator.kubernetes.token_bucket import TokenBucket


async def seconds_for(bucket, requests):
    started = asyncio.get_running_loop().time()
    await asyncio.gather(*(bucket.wait() for _ in range(requests)))
    return asyncio.get_running_loop().time() - started


def test_requests_beyond_the_burst_keep_to_the_rate():
    async def scenario():
        bucket = TokenBucket(rate=100.0, burst=20.0)
        assert await seconds_for(bucket, 20) < 0.15
        assert 0.15 < await seconds_for(bucket, 20) < 1
        await asyncio.sleep(0.25)
        assert await seconds_for(bucket, 20) < 0.15, "the burst is filled again"

    asyncio.run(scenario())


def test_pause_does_not_shorten_a_longer_one():
    async def scenario():
        bucket = TokenBucket()
        bucket.pause(0.3)
        bucket.pause(0.01)
        assert await seconds_for(bucket, 1) > 0.25

    asyncio.run(scenario())
