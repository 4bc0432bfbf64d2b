"""Reasons why records are invalid: equal reasons are one line, with their number and the first places."""

from pydantic import BaseModel

MAX_REASONS = 10
"""Number of reasons that are reported."""
MAX_PLACES = 3
"""Number of places that a reason names."""
MAX_REASON_CHARACTERS = 320
# The kubelet cuts a termination message at 4,096 bytes, and it has other fields, too.
MAX_BYTES = 1800
"""Limit of all reasons together."""


class InvalidReason(BaseModel):
    """A reason, and the records that are invalid for it."""

    reason: str
    count: int
    places: list[str]
    """The first records: FILE:LINE."""

    def text(self) -> str:
        """Return a line with the place and the reason, or with the count, the reason and the first places."""
        first, *others = self.places
        if not others:
            return f"{first}: {self.reason}"
        shown = ", ".join(self.places)
        return f"{self.count:,} \N{MULTIPLICATION SIGN}: {self.reason}; first {shown}"


def add_reason(reasons: list[InvalidReason], place: str, reason: str) -> bool:
    """Count an invalid record; return whether its reason is new and was added."""
    reason = reason[:MAX_REASON_CHARACTERS]
    for known in reasons:
        if known.reason == reason:
            known.count += 1
            if len(known.places) < MAX_PLACES:
                known.places.append(place)
            return False
    if len(reasons) == MAX_REASONS:
        return False
    reasons.append(InvalidReason(reason=reason, count=1, places=[place]))
    return True


def reasons_text(reasons: list[InvalidReason]) -> str:
    """Return a line for each reason, the most frequent first, as many as fit into MAX_BYTES."""
    lines: list[str] = []
    size = 0
    for reason in sorted(reasons, key=lambda reason: -reason.count):
        line = reason.text()
        size += len(line.encode()) + 1
        if lines and size > MAX_BYTES:
            break
        lines.append(line)
    return "\n".join(lines)
