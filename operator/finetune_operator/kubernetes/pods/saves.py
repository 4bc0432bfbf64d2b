"""Ask running stages to save before their node ends: one POST to the port of their progress."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from http import HTTPStatus

import aiohttp

from finetune_operator.core.pipeline import Key
from finetune_operator.kubernetes.cache.children import owner_key
from finetune_operator.kubernetes.pods.http import (
    BackgroundRequests,
    ignore,
    request,
    url_host,
)
from finetune_operator.kubernetes.pods.progress import metrics_port
from finetune_operator.kubernetes.translate.pod import ObservedPod

log = logging.getLogger(__name__)
# A cloud may announce the end of all nodes of a zone at once.
REQUESTS_PER_NAMESPACE = 64
"""Requests at once in a namespace."""
TIMEOUT_SECONDS = 2.0
PAUSE_SECONDS = 3.0
"""Pause between two requests to a pod that does not answer."""
# Two minutes after its notice a spot node is gone, on some clouds after 30 s.
PATIENCE_SECONDS = 30.0
"""Time for which a pod that does not answer is asked again."""
NOT_OFFERED = frozenset(
    {HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED}
)
"""Answers of a program that serves no /save."""


class SaveSender:
    """Sends each pod a request for each notice, in the background; `on_accepted` is called if the pod accepts."""

    def __init__(
        self, session: aiohttp.ClientSession, on_accepted: Callable[[ObservedPod], None]
    ) -> None:
        self.session = session
        self.on_accepted = on_accepted
        self.requests = BackgroundRequests(REQUESTS_PER_NAMESPACE, ignore)
        self.sent: set[tuple[str, str, str]] = set()
        """Pod's uid, node and notice of each request that was started."""

    def send(self, pod: ObservedPod, notice: str, node: str) -> None:
        """Ask a pod to save, unless it was asked because of this notice. A request under way stands for a new request.

        The notice may be on the node of another pod of the attempt, which ends with it.
        """
        if (pod.uid, node, notice) in self.sent or not metrics_port(pod):
            return
        self.sent.add((pod.uid, node, notice))
        key = owner_key(pod.raw)
        log.info(
            "%s: %s announces the end of node %s; pod %s is asked to save",
            key,
            notice,
            node,
            pod.name,
            extra={"pipeline": key},
        )
        self.requests.start(pod, partial(self._send, pod, key))

    def retain(self, uids: set[str]) -> None:
        """Forget all pods but these, which are the pods that exist."""
        self.requests.cancel(self.requests.tasks.keys() - uids)
        self.sent = {sent for sent in self.sent if sent[0] in uids}

    async def close(self) -> None:
        """Cancel all requests."""
        await self.requests.close()

    async def _send(self, pod: ObservedPod, key: Key | None) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE_SECONDS
        while True:
            answer = await self._post(pod)
            if answer == HTTPStatus.ACCEPTED:
                self.on_accepted(pod)
                return False
            if answer in NOT_OFFERED or loop.time() + PAUSE_SECONDS > deadline:
                log.warning(
                    "%s: pod %s was not asked to save: it answers %s",
                    key,
                    pod.name,
                    answer,
                )
                return False
            await asyncio.sleep(PAUSE_SECONDS)

    async def _post(self, pod: ObservedPod) -> int | str:
        """Return the status of the answer, or why there is none."""
        url = f"http://{url_host(pod)}:{metrics_port(pod)}/save"
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                # Only the status of the answer matters.
                status, _ = await request(self.session, url, method="POST", max_bytes=1)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            return f"nothing ({str(error) or type(error).__name__})"
        return status
