"""Rejections of the API server as blockers that name the fix."""

import pytest

from finetune_operator.api.conditions import Reason
from finetune_operator.kubernetes.translate.api_errors import (
    ApiError,
    classify_api_error,
)

REJECTIONS = {
    "etcd": (
        500,
        "etcdserver: request is too large",
        Reason.SPEC_INVALID,
        "shorten env",
    ),
    "client of etcd": (
        500,
        "rpc error: code = ResourceExhausted desc = trying to send message larger than max (2097200 vs. 2097152)",
        Reason.SPEC_INVALID,
        "shorten env",
    ),
    "API server": (
        413,
        "Request entity too large: limit is 3145728",
        Reason.SPEC_INVALID,
        "affinity of the stage's pod",
    ),
    "webhook is down": (
        500,
        'Internal error occurred: failed calling webhook "check.example": connect: connection refused',
        Reason.DEPENDENCY_NOT_READY,
        "the platform team must repair this admission webhook",
    ),
    "webhook denies": (
        403,
        'admission webhook "check.example" denied the request: no',
        Reason.POD_REFUSED,
        "policy",
    ),
    "quota": (
        403,
        "jobs is forbidden: exceeded quota: team",
        Reason.WAITING_FOR_QUOTA,
        "quota is raised",
    ),
    "invalid": (
        422,
        "spec.template: Invalid value",
        Reason.SPEC_INVALID,
        "Invalid value",
    ),
}


@pytest.mark.parametrize(
    ("status", "message", "reason", "fix"), REJECTIONS.values(), ids=REJECTIONS.keys()
)
def test_rejection_is_a_blocker_with_its_fix(status, message, reason, fix):
    blocker = classify_api_error(ApiError(status, message))
    assert blocker
    assert blocker.reason is reason
    assert message in blocker.message
    assert fix in blocker.message


@pytest.mark.parametrize("status", [0, 429, 500, 503, 504])
def test_busy_api_server_is_no_blocker(status):
    assert classify_api_error(ApiError(status, "etcdserver: request timed out")) is None
