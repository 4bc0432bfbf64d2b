"""The published model in a line that fits a terminal: its place, and a short digest."""

from finetune_operator.api.model_status import ModelStatus

DIGEST_CHARACTERS = 19
"""sha256: and twelve digits."""
LATEST = "latest"
"""Link in a target that is a folder; it names the newest model."""
FOLDERS = frozenset({"", "file", "pvc"})
"""Schemes of targets that are folders. In an object store, `latest` is no folder but an object."""


def model_text(model: ModelStatus) -> str:
    """Return the place of a model, as in pvc://demo/published/latest (sha256:28d2bc6c4e23…)."""
    digest = short_digest(model.digest)
    folder = target_of(model)
    if folder is None:
        return f"{model.uri} ({digest})"
    scheme, separator, _ = model.uri.partition("://")
    if not separator or scheme in FOLDERS:
        return f"{folder}/{LATEST} ({digest})"
    return f"{folder}/{digest.replace(':', '-', 1)}"


def short_digest(digest: str) -> str:
    """Return the beginning of a digest."""
    if len(digest) <= DIGEST_CHARACTERS:
        return digest
    return f"{digest[:DIGEST_CHARACTERS]}…"


def target_of(model: ModelStatus) -> str | None:
    """Return the URI of the target, if the model's URI is the target with a folder for its digest; else None."""
    target, _, name = model.uri.rpartition("/")
    if target and name == model.digest.replace(":", "-", 1):
        return target
    return None
