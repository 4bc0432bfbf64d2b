"""Names that follow from what they name, so that making a thing twice makes it once."""

import hashlib

LONGEST = 63


def job_name(pipeline: str, uid: str, stage: str, attempt: int) -> str:
    """Give <pipeline>-<uid8>-<stage>-a<attempt>; a long pipeline's name is cut and gains a hash of the whole."""
    tail = f"-{uid.replace('-', '')[:8]}-{stage}-a{attempt}"
    return _shortened(pipeline, LONGEST - len(tail)) + tail


def _shortened(name: str, room: int) -> str:
    name = name.replace(".", "-")
    if len(name) <= room:
        return name
    hashed = hashlib.sha256(name.encode()).hexdigest()[:6]
    return f"{name[: room - 7].rstrip('-')}-{hashed}"
