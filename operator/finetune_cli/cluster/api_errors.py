"""Translates errors of the API server into one line with the fix; pure."""

import re
from http import HTTPStatus

from finetune_cli.cluster.kubeconfig import KubeContext
from finetune_cli.diagnostics import UsageError
from finetune_operator.api.group import PLURAL
from finetune_operator.errors import ClusterError
from finetune_operator.kubernetes.translate.api_errors import ApiError

INSTALL = "helm install finetune-operator charts/finetune-operator --namespace finetune-system --create-namespace"
FORBIDDEN = re.compile(
    r'User "([^"]*)" cannot (\w+) resource "([^"]*)".*?(?:in the namespace "([^"]*)"|$)'
)
"""User, verb, resource and namespace in the message of a 403 of RBAC."""
WRITE_VERBS = frozenset({"create", "patch", "update", "delete"})


def describe_api_error(error: ApiError, context: KubeContext) -> Exception:
    """Return a UsageError for what other arguments or another manifest fix, and a ClusterError for other errors."""
    cluster = "this cluster"
    if context.name:
        cluster = f"context {context.name}"
    message = " ".join(str(error).split())
    match error.status:
        # There was no response.
        case 0:
            return ClusterError(f"{cluster}: {message}")
        case HTTPStatus.UNAUTHORIZED:
            return ClusterError(
                f"{cluster}: the API server rejects these credentials; log in again ({message})"
            )
        case HTTPStatus.FORBIDDEN:
            return ClusterError(_describe_forbidden(message))
        # A 404 without a Status object: the CRD is not installed.
        case HTTPStatus.NOT_FOUND if not error.reason:
            return ClusterError(
                f"{cluster}: the operator is not installed; install it with: {INSTALL}"
            )
        case (
            HTTPStatus.NOT_FOUND
            | HTTPStatus.BAD_REQUEST
            | HTTPStatus.UNPROCESSABLE_ENTITY
        ):
            return UsageError(str(error))
        case _:
            return ClusterError(f"{cluster}: {message} (HTTP {error.status})")


def _describe_forbidden(message: str) -> str:
    match = FORBIDDEN.search(message)
    # An admission webhook refuses with a message of its own.
    if match is None:
        return message
    user, verb, resource, namespace = match.groups()
    role = _role(verb, resource)
    fix = f"a binding to the ClusterRole {role} allows it"
    return f"{user} may not {verb} {resource} {scope_of(namespace)}; {fix}"


def scope_of(namespace: str | None) -> str:
    """Return the place in which a right is missing; without a namespace, the request was for all of them."""
    if namespace is None:
        return "in all namespaces"
    return f"in the namespace {namespace}"


def _role(verb: str, resource: str) -> str:
    """Return the default ClusterRole with this permission; the chart adds pipelines to `view` and `edit`."""
    if resource == "services/proxy":
        return "edit"
    if verb in WRITE_VERBS and resource.startswith(PLURAL):
        return "edit"
    return "view"
