"""An operator of some checkout on an API server with stored pipelines: run it, and read what it has written."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from support.faults.api import Api, Endpoint
from support.operator.charts import CLUSTER_WIDE, render
from support.operator.operator_process import running_operator

from finetune_operator.api.group import VERSION
from finetune_operator.crd.policy import without_rules
from testcluster.kube import Kube
from testcluster.kube_namespace import KubeNamespace, until, wait_until_established
from testcluster.provider import AUDIT_LOG, Provider

Object = dict[str, Any]
Write = tuple[str, str, str]
"""Verb, resource with its subresource, and name."""
T = TypeVar("T")
CRD = "finetunepipelines.finetune.dev"
WRITES = frozenset({"create", "update", "patch", "delete", "deletecollection"})
SETTLED_SECONDS = 4.0
"""Longer than the delay of a reconcile that no change asks for."""


def definition(checkout: Path) -> Object:
    """Return the CRD of a checkout."""
    text = (checkout / "crds" / "finetunepipelines.yaml").read_text()
    content: Object = yaml.safe_load(text)
    return content


def without_schema_rules(crd: Object) -> Object:
    """Return the CRD as the chart installs it beside the policy with its rules."""
    changed: Object = json.loads(json.dumps(crd))
    for version in changed["spec"]["versions"]:
        schema = version["schema"]
        schema["openAPIV3Schema"] = without_rules(schema["openAPIV3Schema"])
    return changed


def install(kube: Kube, crd: Object) -> None:
    """Create or replace the CRD, and wait until the API server serves its versions."""
    kube.apply([crd])
    wait_until_established(kube, CRD)
    versions = [version["name"] for version in crd["spec"]["versions"]]
    until(lambda: all(_is_served(kube, version) for version in versions), 30)


def _is_served(kube: Kube, version: str) -> bool:
    served = kube.run("api-versions").splitlines()
    return f"finetune.dev/{version}" in served


def with_api(cluster: Provider, work: Callable[[Api], Awaitable[T]]) -> T:
    """Call `work` with a client of the API server, and return its result."""
    endpoint = Endpoint.read(cluster.kubeconfig)

    async def run() -> T:
        async with endpoint.session() as session:
            return await work(Api(endpoint, session))

    return asyncio.run(run())


def pipelines_of(
    cluster: Provider, namespace: str, version: str = VERSION
) -> dict[str, Object]:
    """Return all pipelines of a namespace by name."""
    path = f"/apis/finetune.dev/{version}/namespaces/{namespace}/finetunepipelines"
    items = with_api(cluster, lambda api: api.list(path))
    return {item["metadata"]["name"]: item for item in items}


def run_until_settled(
    cluster: Provider,
    namespace: str,
    own: KubeNamespace,
    folder: Path,
    checkout: Path,
) -> None:
    """Run the operator of a checkout until it has written all pipelines, and some seconds longer."""
    before = _operators(cluster, namespace)
    run_until(
        lambda: before.isdisjoint(_operators(cluster, namespace)), own, folder, checkout
    )


def _operators(cluster: Provider, namespace: str) -> set[str]:
    """Return the versions of the operator that have written the pipelines last."""
    items = pipelines_of(cluster, namespace).values()
    return {str(item["status"].get("observedVersion")) for item in items}


def run_until(
    is_done: Callable[[], bool], own: KubeNamespace, folder: Path, checkout: Path
) -> None:
    """Run the operator of a checkout until the condition holds, and some seconds longer."""
    objects = render(CLUSTER_WIDE, namespace=own.name)
    with running_operator(own, objects, folder, checkout=checkout) as log:
        try:
            until(is_done, 120)
            time.sleep(SETTLED_SECONDS)
        finally:
            # pytest shows it only if the test fails.
            print(log.read_text()[-20_000:])


def writes_of(cluster: Provider, namespace: str, first: int = 0) -> list[Write]:
    """Return what the operator in this namespace has written, but its Leases, from this write on."""
    account = f"system:serviceaccount:{namespace}:finetune-operator"
    events = map(json.loads, (cluster.folder / AUDIT_LOG).read_text().splitlines())
    writes = [
        _write_of(event)
        for event in events
        if event["verb"] in WRITES and event["user"]["username"] == account
    ]
    return [write for write in writes if write[1] != "leases"][first:]


def _write_of(event: Object) -> Write:
    reference = event.get("objectRef") or {}
    parts = (reference.get("resource"), reference.get("subresource"))
    resource = "/".join(part for part in parts if part)
    return event["verb"], resource, str(reference.get("name"))
