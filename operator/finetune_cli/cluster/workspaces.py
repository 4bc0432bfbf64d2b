"""`finetune workspaces` on a cluster: the claims, what uses them, and how to delete the unused claims."""

import argparse
import asyncio
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from finetune_cli.cluster.session import ClusterSession, Object, connect
from finetune_cli.output.table import aligned
from finetune_operator.api.group import KIND
from finetune_operator.core.durations import format_duration
from finetune_operator.core.metadata import (
    MANAGED_BY,
    MANAGED_BY_VALUE,
    workspace_name,
)
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.resources.claim import WORKSPACE_OF

COLUMNS = ("CLAIM", "SIZE", "AGE", "WHENDELETED", "PIPELINE", "USED BY")


@dataclass(frozen=True)
class ListedClaim:
    """A claim that is the workspace of a pipeline, or was."""

    namespace: str
    name: str
    size: str
    """Capacity of its volume; of a claim that is not bound, the size that it asks for."""
    created_at: str
    when_deleted: str
    """Delete: the pipeline owns it. Retain: it has no owner. Empty: a user has created it."""
    pipeline: str
    """The pipeline that it was created for. Empty: a user has created it."""
    used_by: tuple[str, ...]
    """Pipelines and pods that use it."""

    @property
    def is_unused(self) -> bool:
        """Whether the operator has created it and neither an owner nor a user is left."""
        return self.when_deleted == "Retain" and not self.used_by


def run(arguments: argparse.Namespace) -> int:
    """Print the list, and the commands that delete unused claims."""
    return asyncio.run(_run(arguments))


async def _run(arguments: argparse.Namespace) -> int:
    async with connect(arguments) as session:
        claims = await _claims(session, all_namespaces=arguments.all_namespaces)
    if arguments.json:
        print(json.dumps([asdict(claim) for claim in claims], indent=1))
        return 0
    if not claims:
        print("no workspaces")
        return 0
    now = datetime.now(UTC)  # noqa: TID251  an edge
    rows = [("NAMESPACE", *COLUMNS), *(_row(claim, now) for claim in claims)]
    for line in aligned(rows):
        print(line)
    for line in _hints(claims, arguments.context):
        print(line)
    return 0


async def _claims(
    session: ClusterSession, *, all_namespaces: bool
) -> list[ListedClaim]:
    """Return the claims of workspaces, which the operator has created or a pipeline names."""
    namespace = None if all_namespaces else session.context.namespace
    api = session.api
    pipelines = [item async for item in api.list(paths.pipelines(namespace))]
    pods = [item async for item in api.list(paths.pods(namespace))]
    claims = []
    async for claim in api.list(paths.claims(namespace)):
        listed = _listed(claim, pipelines, pods)
        if listed and session.name in {"", listed.pipeline, *_names(listed.used_by)}:
            claims.append(listed)
    return claims


def _names(users: tuple[str, ...]) -> Iterator[str]:
    """Yield the names of the pipelines among the users."""
    for user in users:
        kind, _, name = user.partition(" ")
        if kind == "pipeline":
            yield name


def _listed(
    claim: Object, pipelines: list[Object], pods: list[Object]
) -> ListedClaim | None:
    """Return a claim with its users; None if it is no workspace."""
    meta = claim["metadata"]
    is_managed = (meta.get("labels") or {}).get(MANAGED_BY) == MANAGED_BY_VALUE
    workers = [item for item in pipelines if _workspace_of(item) == _key(claim)]
    if not is_managed and not workers:
        return None
    readers = [item for item in pipelines if _reads(item, claim)]
    mounters = [pod for pod in pods if _mounts(pod, claim)]
    users = [*_named("pipeline", workers + readers), *_named("pod", mounters)]
    return ListedClaim(
        namespace=meta["namespace"],
        name=meta["name"],
        size=_size(claim),
        created_at=str(meta.get("creationTimestamp") or ""),
        when_deleted=_when_deleted(meta) if is_managed else "",
        pipeline=(meta.get("annotations") or {}).get(WORKSPACE_OF, ""),
        used_by=tuple(dict.fromkeys(users)),
    )


def _named(kind: str, items: list[Object]) -> list[str]:
    return [f"{kind} {item['metadata']['name']}" for item in items]


def _when_deleted(meta: Object) -> str:
    owners = [owner.get("kind") for owner in meta.get("ownerReferences") or []]
    return "Delete" if KIND in owners else "Retain"


def _key(item: Object) -> tuple[str, str]:
    return item["metadata"]["namespace"], item["metadata"]["name"]


def _workspace_of(pipeline: Object) -> tuple[str, str]:
    """Return the namespace and name of the claim that is the pipeline's workspace."""
    namespace, name = _key(pipeline)
    workspace = (pipeline.get("spec") or {}).get("workspace") or {}
    return namespace, str(workspace.get("existingClaim") or workspace_name(name))


def _reads(pipeline: Object, claim: Object) -> bool:
    """Return whether a URI of the pipeline names a path of the claim."""
    namespace, name = _key(claim)
    spec = json.dumps(pipeline.get("spec"))
    reference = rf'"pvc://{re.escape(name)}[/"]'
    return _key(pipeline)[0] == namespace and bool(re.search(reference, spec))


def _mounts(pod: Object, claim: Object) -> bool:
    namespace, name = _key(claim)
    volumes = (pod.get("spec") or {}).get("volumes") or []
    sources = [volume.get("persistentVolumeClaim") or {} for volume in volumes]
    names = [source.get("claimName") for source in sources]
    return _key(pod)[0] == namespace and name in names


def _size(claim: Object) -> str:
    capacity = (claim.get("status") or {}).get("capacity") or {}
    requests = ((claim.get("spec") or {}).get("resources") or {}).get("requests") or {}
    return str(capacity.get("storage") or requests.get("storage") or "")


def _row(claim: ListedClaim, now: datetime) -> tuple[str, ...]:
    age = ""
    if claim.created_at:
        created = datetime.fromisoformat(claim.created_at)
        age = format_duration((now - created).total_seconds())
    users = ", ".join(claim.used_by) or "nothing"
    return (
        claim.namespace,
        claim.name,
        claim.size,
        age,
        claim.when_deleted or "-",
        claim.pipeline or "-",
        users,
    )


def _hints(claims: list[ListedClaim], context: str | None) -> Iterator[str]:
    """Yield the commands that delete the unused claims."""
    unused = [claim for claim in claims if claim.is_unused]
    if not unused:
        return
    yield "nothing uses these claims or deletes them; to delete each with all its results:"
    for claim in unused:
        command = ["kubectl", "delete", "pvc", "-n", claim.namespace, claim.name]
        if context:
            command[1:1] = ["--context", context]
        yield f"  {shlex.join(command)}"
