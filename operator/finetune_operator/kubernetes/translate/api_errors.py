"""What the API server did not let us do, in words that tell how to mend it: pure."""

import re
from http import HTTPStatus

from pydantic import ValidationError

from finetune_operator.api.conditions import Reason
from finetune_operator.core.observation import Blocker
from finetune_operator.kubernetes.client import ApiError


class Blocked(Exception):
    """Something that we do not do ourselves, for now."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.blocker = Blocker(reason, message)


def classify_api_error(error: ApiError) -> Blocker | None:
    """Tell a refusal that people can mend from a server that is merely busy (None)."""
    words = str(error)
    if "exceeded quota" in words:
        return Blocker(Reason.WAITING_FOR_QUOTA, f"{words}; it goes on when others have finished or the quota grows")
    if error.status == HTTPStatus.FORBIDDEN and "being terminated" in words:
        return Blocker(Reason.POD_REFUSED, "the namespace is being deleted")
    if error.status == HTTPStatus.FORBIDDEN:
        return Blocker(Reason.POD_REFUSED, f"{words}; the operator's role or an admission policy does not allow it")
    if error.status in {HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY}:
        return Blocker(Reason.SPEC_INVALID, words)
    return None


def describe_validation_error(error: ValidationError) -> str:
    """Say what in an object is beyond this version of the operator."""
    first = error.errors()[0]
    where = re.sub(r"\.(\d+)", r"[\1]", ".".join(str(part) for part in first["loc"]))
    more = f", and {error.error_count() - 1} more" if error.error_count() > 1 else ""
    return (
        f"{where}: {first['msg']}{more}; the object was written for another version of the operator, or around its CRD"
    )
