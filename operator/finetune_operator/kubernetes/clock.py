"""The operator's clock, by which the adapter times what it observes."""

from datetime import UTC, datetime


def utc_now() -> datetime:
    """Return the time by the operator's clock."""
    return datetime.now(UTC)  # noqa: TID251  an edge
