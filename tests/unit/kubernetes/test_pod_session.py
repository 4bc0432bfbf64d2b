"""The session for requests to pods keeps nothing of a response."""

import asyncio
import gzip

from aiohttp import web
from support.http_server import serve_http

from finetune_operator.kubernetes.pods.http import open_session, request


def test_session_keeps_no_cookie_and_no_connection():
    """Another tenant's pod may get the address of a pod that is gone."""
    seen = []

    async def respond(request):
        seen.append(
            (
                request.headers.get("Cookie"),
                request.transport.get_extra_info("peername"),
            )
        )
        response = web.Response(text="{}")
        response.set_cookie("token", "1")
        return response

    async def scenario():
        async with serve_http(respond) as port, open_session() as session:
            for _ in range(2):
                await request(session, f"http://localhost:{port}/")

    asyncio.run(asyncio.wait_for(scenario(), 20))
    assert [cookie for cookie, _ in seen] == [None, None]
    assert len({peer for _, peer in seen}) == 2


def test_response_is_not_decompressed():
    bomb = gzip.compress(b"x" * (10 << 20))

    async def respond(_request):
        return web.Response(body=bomb, headers={"Content-Encoding": "gzip"})

    async def scenario():
        async with serve_http(respond) as port, open_session() as session:
            return await request(session, f"http://127.0.0.1:{port}/")

    assert asyncio.run(asyncio.wait_for(scenario(), 20)) == (200, bomb)
