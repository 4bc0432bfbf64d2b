"""The newest Warning event about each object. An event may be lost at any time, as in the API server."""

from collections import OrderedDict

from finetune_operator.kubernetes.translate.object import Object

# Any author of Events may choose the length.
WARNING_LENGTH = 1024
"""Characters kept of a Warning event's message."""
WARNINGS_KEPT = 4096
"""Warning events that are kept, the newest of each object."""
InvolvedObject = tuple[str, str, str]
"""Namespace, kind and name of the object that an event is about."""


class WarningEvents:
    """The newest Warning event of each object, for a limited number of objects."""

    def __init__(self) -> None:
        self._newest: OrderedDict[InvolvedObject, tuple[str, str]] = OrderedDict()
        """Object -> time and message of its newest event."""

    def __len__(self) -> int:
        """Return the number of objects with an event."""
        return len(self._newest)

    def message(self, namespace: str, kind: str, name: str) -> str:
        """Return the message of the newest event about an object; empty if there is none."""
        _, message = self._newest.get((namespace, kind, name), ("", ""))
        return message

    def update(self, event: Object) -> InvolvedObject | None:
        """Keep a Warning event and return its object; return None for an event of another type, or an older event."""
        involved = event.get("involvedObject") or {}
        about = (
            str(involved.get("namespace")),
            str(involved.get("kind")),
            str(involved.get("name")),
        )
        # Which of these fields is set depends on the version of the API that the event's author used.
        time = str(
            event.get("lastTimestamp")
            or event.get("eventTime")
            or event["metadata"].get("creationTimestamp")
        )
        known_time, _ = self._newest.get(about, ("", ""))
        if event.get("type") != "Warning" or known_time > time:
            return None
        self._newest[about] = (time, str(event.get("message") or "")[:WARNING_LENGTH])
        self._newest.move_to_end(about)
        if len(self._newest) > WARNINGS_KEPT:
            self._newest.popitem(last=False)
        return about
