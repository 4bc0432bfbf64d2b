"""What an API server refuses, in a line that says how to mend it: pure."""

import re
from http import HTTPStatus

from finetune_cli.cluster.kubeconfig import Context
from finetune_cli.diagnostics import UsageError
from finetune_operator.api.group import PLURAL
from finetune_operator.errors import ClusterError
from finetune_operator.kubernetes.client import ApiError

INSTALL = "helm install finetune-operator charts/finetune-operator --namespace finetune-system --create-namespace"
WRITING = frozenset({"create", "patch", "update", "delete"})


def describe_api_error(error: ApiError, where: Context) -> Exception:
    """Give Refused for what the user can mend by other words, and ClusterError for the rest."""
    cluster = f"context {where.context}" if where.context else "this cluster"
    said = " ".join(str(error).split())
    match error.status:
        case 0:
            return ClusterError(f"{cluster}: {said}")
        case HTTPStatus.UNAUTHORIZED:
            return ClusterError(f"{cluster}: the API server does not accept these credentials; log in again ({said})")
        case HTTPStatus.FORBIDDEN:
            return ClusterError(_forbidden(said))
        case HTTPStatus.NOT_FOUND if not error.reason:  # the server's own page: it knows no such kind of object
            return ClusterError(f"{cluster}: the operator is not installed: {INSTALL}")
        case HTTPStatus.NOT_FOUND | HTTPStatus.BAD_REQUEST | HTTPStatus.UNPROCESSABLE_ENTITY:
            return UsageError(str(error))
        case _:
            return ClusterError(f"{cluster}: {said} (HTTP {error.status})")


def _forbidden(said: str) -> str:
    found = re.search(r'User "([^"]*)" cannot (\w+) resource "([^"]*)".*?(?:in the namespace "([^"]*)"|$)', said)
    if not found:
        return said
    user, verb, resource, namespace = found.groups()
    where = f"in the namespace {namespace}" if namespace else "in all namespaces"
    return f"{user} may not {verb} {resource} {where}; a binding to the ClusterRole {_role(verb, resource)} allows it"


def _role(verb: str, resource: str) -> str:
    """Name a role of every cluster; the chart adds pipelines to them."""
    return "edit" if verb in WRITING and resource.startswith(PLURAL) else "view"
