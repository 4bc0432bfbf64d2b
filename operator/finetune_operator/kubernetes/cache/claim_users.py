"""The pipelines that share a claim, and which of them may go next."""

from collections.abc import Iterator

from finetune_operator.core.pipeline import Key
from finetune_operator.kubernetes.cache.pipeline import CachedPipeline
from finetune_operator.kubernetes.cache.store import Store


def users_of(pipelines: Store[CachedPipeline], namespace: str, claim: str) -> list[Key]:
    """Return all pipelines with a claim."""
    return [user.key for user in pipelines.select("claim", (namespace, claim))]


def next_users(
    pipelines: Store[CachedPipeline], namespace: str, claim: str
) -> Iterator[Key]:
    """Yield the pipelines that may go next: the oldest, and all with a recorded attempt (core/workspace.py).

    The others wait for the oldest.
    """
    users = pipelines.select("claim", (namespace, claim))
    waiting = [user for user in users if not user.lets_others_go_first]
    oldest = min((user.seniority for user in waiting), default=None)
    for user in users:
        if user.writing or user.seniority == oldest:
            yield user.key
