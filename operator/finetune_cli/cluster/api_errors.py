"""Translates errors of the API server into one line with the fix; pure."""

import re
from http import HTTPStatus

from finetune_cli.cluster.kubeconfig import Context
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


def describe_api_error(error: ApiError, context: Context) -> Exception:
    """Return a UsageError for what other arguments or another manifest fix, and a ClusterError for the rest."""
    cluster = f"context {context.name}" if context.name else "this cluster"
    message = " ".join(str(error).split())
    match error.status:
        case 0:  # no response
            return ClusterError(f"{cluster}: {message}")
        case HTTPStatus.UNAUTHORIZED:
            return ClusterError(
                f"{cluster}: the API server rejects these credentials; log in again ({message})"
            )
        case HTTPStatus.FORBIDDEN:
            return ClusterError(_describe_forbidden(message))
        case HTTPStatus.NOT_FOUND if (
            not error.reason
        ):  # a 404 without a Status object: the CRD is not installed
            return ClusterError(
                f"{cluster}: the operator is not installed; install it with: {INSTALL}"
            )
        case HTTPStatus.NOT_FOUND | HTTPStatus.BAD_REQUEST | HTTPStatus.UNPROCESSABLE_ENTITY:
            return UsageError(str(error))
        case _:
            return ClusterError(f"{cluster}: {message} (HTTP {error.status})")


def _describe_forbidden(message: str) -> str:
    found = FORBIDDEN.search(message)
    if not found:
        return message
    user, verb, resource, namespace = found.groups()
    scope = f"in the namespace {namespace}" if namespace else "in all namespaces"
    return f"{user} may not {verb} {resource} {scope}; a binding to the ClusterRole {_role(verb, resource)} allows it"


def _role(verb: str, resource: str) -> str:
    """Return the default ClusterRole with this permission; the chart adds pipelines to `view` and `edit`."""
    return "edit" if verb in WRITE_VERBS and resource.startswith(PLURAL) else "view"
