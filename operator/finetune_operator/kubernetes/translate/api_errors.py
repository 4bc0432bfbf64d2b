"""Errors of the API server, and its rejections as blockers that name the fix: pure."""

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError

from finetune_operator.api.conditions import Reason
from finetune_operator.core.observation import Blocker
from finetune_operator.errors import ClusterError


class ApiError(ClusterError):
    """The API server rejected the request, or did not answer (status 0)."""

    def __init__(
        self,
        status: int,
        message: str,
        reason: str = "",
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.details = details or {}


class AlreadyExists(ApiError):
    """An object of this name exists."""


class Blocked(Exception):
    """An action that the operator does not take while the blocker lasts."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.blocker = Blocker(reason, message)


WEBHOOK_FIX = "the platform team must repair this admission webhook, or the network to it; the operator retries"
# A policy's own text may name anything, such as a quota or a PriorityClass.
DENIED = re.compile("denied (the )?request")
"""Words of the API server about the answer of a webhook or a ValidatingAdmissionPolicy."""
DENIED_FIX = (
    "change the field that the message names, or ask the platform team to admit it"
)
QUOTA = "exceeded quota: "
"""Words of the API server before the name of the quota."""
TOO_LARGE = re.compile("request is too large|message larger than max", re.IGNORECASE)
"""Errors of etcd and of the API server's client of etcd, which come with status 500."""


def classify_api_error(error: ApiError) -> Blocker | None:
    """Return the blocker for a rejection that people can fix; None if the API server is only busy."""
    message = str(error)
    # First: a quota's refusal is a 403 as well.
    if QUOTA in message and not DENIED.search(message):
        fix = "the operator retries until other workloads have finished or the quota is raised"
        return Blocker(Reason.WAITING_FOR_QUOTA, f"{message}; {fix}")
    if error.status == HTTPStatus.FORBIDDEN and "being terminated" in message:
        return Blocker(
            Reason.POD_REFUSED,
            "the namespace is being deleted and accepts no new objects",
        )
    if error.status == HTTPStatus.FORBIDDEN:
        fix = "the operator's role or an admission policy may forbid it: ask the platform team to allow it"
        return Blocker(Reason.POD_REFUSED, f"{message}; {fix}")
    if error.status in {HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY}:
        return Blocker(Reason.SPEC_INVALID, message)
    return _classify_lasting_failure(error.status, message)


def _classify_lasting_failure(status: int, message: str) -> Blocker | None:
    """Return the blocker for a failure of the API server, or of a webhook, that does not pass by itself."""
    if status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE or TOO_LARGE.search(message):
        fix = "the object is too large to be stored: shorten env, command, args or affinity of the stage's pod"
        return Blocker(Reason.SPEC_INVALID, f"{message}; {fix}")
    if (
        status >= HTTPStatus.INTERNAL_SERVER_ERROR
        and "failed calling webhook" in message
    ):
        return Blocker(Reason.DEPENDENCY_NOT_READY, f"{message}; {WEBHOOK_FIX}")
    if DENIED.search(message):
        return Blocker(Reason.POD_REFUSED, f"{message}; {DENIED_FIX}")
    return None


def describe_validation_error(error: ValidationError) -> str:
    """Return the first field of an object that this version of the operator cannot read, and how many more."""
    cause = "the object may have been written for another version of the operator, or without validation by its CRD"
    return f"{describe_first_error(error)}; {cause}"


def describe_unknown_fields(error: ValidationError) -> str:
    """Return the first field of an object that only a newer version of the operator knows, and how many more."""
    return f"{describe_first_error(error)}; the CRD is newer than this operator: upgrade it, or remove the field"


def describe_first_error(error: ValidationError, *, observed: bool = False) -> str:
    """Return the first invalid field, what is wrong with it, and how many more there are.

    `observed` adds the field's value, which in a user's object may be a secret.
    """
    first = error.errors(include_url=False)[0]
    field = re.sub(r"\.(\d+)", r"[\1]", ".".join(str(part) for part in first["loc"]))
    value = first["input"]
    shown = ""
    if observed and isinstance(value, str | int | float):
        shown = f", not {value!r:.80}"
    more = ""
    if error.error_count() > 1:
        more = f", and {error.error_count() - 1} more"
    # An error of the whole object has no field.
    prefix = f"{field}: " if field else ""
    # Pydantic puts this before the message of a validator's ValueError.
    problem = first["msg"].removeprefix("Value error, ")
    return f"{prefix}{problem}{shown}{more}"
