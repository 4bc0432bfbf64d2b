"""Looks at the cluster of the kubeconfig: whether it answers, has the CRD, and lets the user create pipelines."""

import argparse
import asyncio

from finetune_cli.cluster.session import ClusterSession, connect
from finetune_cli.diagnostics import UsageError
from finetune_cli.local.machine import MachineCheck, Verdict
from finetune_operator.api.group import GROUP, PLURAL
from finetune_operator.errors import ClusterError
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.translate.api_errors import ApiError

SECONDS = 20.0
"""Time in which the API server must answer all questions."""


async def finding(arguments: argparse.Namespace, problem: Verdict) -> MachineCheck:
    """Return what the cluster is good for; `problem` is the verdict if it is good for nothing."""
    arguments.name = None
    try:
        async with asyncio.timeout(SECONDS), connect(arguments) as session:
            return await _looked_at(session, problem)
    except (UsageError, ClusterError, OSError) as error:
        return MachineCheck(problem, "cluster", str(error))
    except TimeoutError:
        text = f"the API server has not answered for {SECONDS:.0f} s: check the network and KUBECONFIG"
        return MachineCheck(problem, "cluster", text)


async def _looked_at(session: ClusterSession, problem: Verdict) -> MachineCheck:
    server = await session.api.get(paths.SERVER_VERSION) or {}
    context = session.context
    text = f"Kubernetes {server.get('gitVersion', 'of an unknown version')}, namespace {context.namespace}"
    if not await _has_crd(session):
        fix = "the operator is not installed: helm install finetune-operator (docs/guides/quickstart.md)"
        return MachineCheck(problem, "cluster", f"{text}; {fix}")
    if not await _may_create(session):
        fix = f"you may not create {PLURAL} there: ask for a Role with that right, or choose -n NAMESPACE"
        return MachineCheck(problem, "cluster", f"{text}; {fix}")
    return MachineCheck(Verdict.OK, "cluster", f"{text}; you may create {PLURAL}")


async def _has_crd(session: ClusterSession) -> bool:
    # The discovery of the group, which every account may read.
    return await session.api.get(f"/apis/{GROUP}") is not None


async def _may_create(session: ClusterSession) -> bool:
    """Return whether the user may create a pipeline, as far as the API server tells."""
    attributes = {
        "group": GROUP,
        "resource": PLURAL,
        "verb": "create",
        "namespace": session.context.namespace,
    }
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    try:
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        answer = await session.api.create(path, review)
    except ApiError:
        return True
    return bool(answer["status"]["allowed"])
