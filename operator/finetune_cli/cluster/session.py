"""A connection to a cluster, and one pipeline in it."""

import argparse
import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

from finetune_cli.arguments import is_manifest
from finetune_cli.cluster.api_errors import describe_api_error
from finetune_cli.cluster.kubeconfig import Context, read_context
from finetune_cli.diagnostics import UsageError, closest_match
from finetune_cli.manifest.manifest import Manifest, read
from finetune_cli.manifest.messages import DNS_LABEL, DNS_SUBDOMAIN, PATTERNS
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.errors import ClusterError
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.client import ApiError, KubernetesClient, load_configuration, open_client
from finetune_operator.kubernetes.cluster import parse_pipeline

Object = dict[str, Any]
T = TypeVar("T")
API_RETRY_SECONDS = 60.0
"""How long an API server may be away while something is followed."""
POLL_SECONDS = 1.0


@dataclass(frozen=True)
class ClusterSession:
    """A cluster within reach, and what is meant in it."""

    api: KubernetesClient
    context: Context
    name: str = ""
    manifest: Manifest | None = None
    """Where the pipeline was named by its file."""

    @property
    def key(self) -> Key:
        """Which pipeline."""
        return Key(self.context.namespace, self.name)

    async def found(self) -> Object:
        """Give the object as the API server has it; raises Refused where there is none of this name."""
        found = await self.api.get(paths.pipeline(self.key))
        if found is None:
            raise UsageError(await self._no_such())
        return found

    async def pipeline(self) -> Pipeline:
        """Give it as it was read."""
        return parse_pipeline(await self.found())

    async def _no_such(self) -> str:
        namespace = self.context.namespace
        names = [one["metadata"]["name"] async for one in self.api.list(paths.pipelines(namespace))]
        words = f"there is no pipeline {self.name} in the namespace {namespace}"
        if not names:
            return f"{words}, nor any other: choose the namespace with -n; `finetune get -A` lists all"
        meant = closest_match(self.name, names)
        return f"{words}; did you mean {meant}?" if meant else f"{words}; there are {', '.join(sorted(names)[:10])}"


@asynccontextmanager
async def connect(arguments: argparse.Namespace) -> AsyncIterator[ClusterSession]:
    """Connect to the cluster that the arguments mean; what it refuses is raised as Refused or ClusterError."""
    manifest = read(Path(arguments.name)) if arguments.name and is_manifest(arguments.name) else None
    name = manifest.name if manifest else arguments.name or ""
    if name and not re.fullmatch(DNS_SUBDOMAIN, name):
        raise UsageError(f"{name!r} is no file and no pipeline's name, which {PATTERNS[DNS_SUBDOMAIN]}")
    where = read_context(arguments.context)
    where = Context(where.context, _namespace(arguments.namespace, manifest) or where.namespace)
    try:
        async with open_client(await load_configuration(where.context)) as api:
            yield ClusterSession(api, where, name, manifest)
    except ApiError as error:
        raise describe_api_error(error, where) from error


def _namespace(given: str | None, manifest: Manifest | None) -> str | None:
    if given and not re.fullmatch(DNS_LABEL, given):
        raise UsageError(f"--namespace {given!r}: {PATTERNS[DNS_LABEL]}")
    written = manifest.body["metadata"].get("namespace") if manifest else None
    if given and written and given != written:
        raise UsageError(f"{manifest.path if manifest else ''} is for the namespace {written}, and -n says {given}")
    return given or written


async def with_retries(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask again for a while where the API server does not answer or has no time; a refusal is raised at once."""
    loop = asyncio.get_running_loop()
    until = loop.time() + API_RETRY_SECONDS
    while True:
        try:
            return await ask()
        except ApiError as error:
            busy = error.status == HTTPStatus.TOO_MANY_REQUESTS or error.status >= HTTPStatus.INTERNAL_SERVER_ERROR
            if not (error.status == 0 or busy) or loop.time() > until:
                raise
        await asyncio.sleep(POLL_SECONDS)


async def refresh(reach: ClusterSession) -> Pipeline:
    """Look again at a pipeline that was there; raises ClusterError where it is gone."""
    found = await with_retries(lambda: reach.api.get(paths.pipeline(reach.key)))
    if found is None:
        raise ClusterError(f"{reach.name} is gone: somebody deleted it, or spec.ttlSecondsAfterFinished did")
    return parse_pipeline(found)
