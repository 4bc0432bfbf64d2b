"""Watch nodes for notices of their end, and ask the stages that run there to save."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from typing import Any

from finetune_operator.controller.reflector import (
    BASE_RETRY_SECONDS,
    MAX_RETRY_SECONDS,
    Reflector,
    Resource,
)
from finetune_operator.errors import ClusterError
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.cache.change import NO_CHANGE, Change
from finetune_operator.kubernetes.cache.store import NamespacedName
from finetune_operator.kubernetes.cache.trim import JOB_NAME
from finetune_operator.kubernetes.client import KubernetesClient
from finetune_operator.kubernetes.pods.saves import SaveSender
from finetune_operator.kubernetes.translate.api_errors import ApiError
from finetune_operator.kubernetes.translate.node import notices_of
from finetune_operator.kubernetes.translate.object import Object
from finetune_operator.kubernetes.translate.pod import ObservedPod

NODES = "nodes"
log = logging.getLogger(__name__)


class NodeNotices:
    """The notices of nodes. Nothing is kept of other nodes, so that memory does not grow with the cluster."""

    def __init__(self, on_notice: Callable[[str, str], None]) -> None:
        self.on_notice = on_notice
        """Called with a node and a notice that it did not have before."""
        self.notices: dict[str, frozenset[str]] = {}
        """Node -> its notices."""
        self.stores: dict[str, Any] = {NODES: self.notices}

    def update(self, kind: str, node: Object) -> Change:  # noqa: ARG002  ResourceCache's signature
        """Keep the notices of a node, and pass on the new notices."""
        name = str(node["metadata"]["name"])
        before = self.notices.pop(name, frozenset())
        now = notices_of(node)
        if now:
            self.notices[name] = now
        for notice in sorted(now - before):
            self.on_notice(name, notice)
        return NO_CHANGE

    def remove(self, kind: str, node: Object) -> Change:  # noqa: ARG002  ResourceCache's signature
        """Forget a node."""
        self.notices.pop(str(node["metadata"]["name"]), None)
        return NO_CHANGE

    def sweep(
        self,
        kind: str,  # noqa: ARG002  ResourceCache's signature
        listed: set[NamespacedName],
        version: int,  # noqa: ARG002
        namespace: str | None,  # noqa: ARG002
    ) -> Iterator[Change]:
        """Forget the nodes that a complete list no longer has."""
        for name in self.notices.keys() - {name for _, name in listed}:
            del self.notices[name]
        return iter(())


class NodeWatch:
    """Watches nodes if the operator has the right; without it, a line is logged and no pod is asked to save."""

    def __init__(
        self,
        api: KubernetesClient,
        pods: Callable[[], Iterable[ObservedPod]],
        saves: SaveSender,
    ) -> None:
        self.pods = pods
        self.saves = saves
        self.cache = NodeNotices(self._ask_to_save)
        resource = Resource(NODES, paths.nodes())
        self.reflector = Reflector(api, self.cache, resource, _ignore, _ignore)

    async def run(self) -> None:
        """Watch until cancelled; return at once if nodes cannot be listed."""
        # A new leadership lists again: notices may have come and gone since the last.
        self.reflector.version = ""
        try:
            if await self._is_listed():
                await self.reflector.watch()
        finally:
            self.saves.requests.cancel_all()

    async def _is_listed(self) -> bool:
        """List the nodes, and retry after any error; return False if the operator has no right to list them."""
        delay = BASE_RETRY_SECONDS
        while True:
            try:
                await self.reflector.list()
            except ClusterError as error:
                if isinstance(error, ApiError) and error.status == HTTPStatus.FORBIDDEN:
                    log.info(
                        "nodes are not watched for notices of their end: %s", error
                    )
                    return False
                log.warning(
                    "the list of nodes failed and is retried in %g s: %s", delay, error
                )
                await asyncio.sleep(delay)
                delay = min(delay * 2, MAX_RETRY_SECONDS)
            else:
                return True

    def _ask_to_save(self, node: str, notice: str) -> None:
        pods = list(self.pods())
        self.saves.retain({pod.uid for pod in pods})
        running = [pod for pod in pods if _runs_stage(pod)]
        # Of several pods of an attempt, the first saves: they end together, whichever of their nodes ends.
        first = {_job_of(pod): pod for pod in running if pod.index == 0}
        for pod in running:
            saving = first.get(_job_of(pod)) if pod.index else pod
            if pod.node == node and saving:
                self.saves.send(saving, notice, node)


def _job_of(pod: ObservedPod) -> tuple[str, str]:
    return pod.raw["metadata"]["namespace"], pod.raw["metadata"]["labels"].get(
        JOB_NAME, ""
    )


def _runs_stage(pod: ObservedPod) -> bool:
    """Return whether the process of an attempt runs in the pod; a model server has nothing to save."""
    return (
        not pod.finished
        and bool(pod.address and pod.started_at)
        and JOB_NAME in pod.raw["metadata"]["labels"]
    )


def _ignore(_change: Change) -> None:
    """Wake no pipeline: the progress that the pod reports after its save does."""
