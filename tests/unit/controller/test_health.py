"""What a replica says of itself."""

import asyncio
from types import SimpleNamespace

from finetune_operator.controller.health import Health
from finetune_operator.controller.workqueue import WorkQueue
from finetune_operator.kubernetes.cache import ResourceCache


def asked(page, *, held=True, answered_ago=0.0, synced_ago=0.0, phases=()):
    """Give the status and the text of a page."""

    async def story():
        now = asyncio.get_running_loop().time()
        books = ResourceCache()
        for at, phase in enumerate(phases):
            books.update_pipeline({"metadata": {"namespace": "team", "name": f"p{at}"}, "status": {"phase": phase}})
        leadership = SimpleNamespace(is_leader=held, answered=now - answered_ago)
        synced = None if synced_ago is None else now - synced_ago
        health = Health(leadership, SimpleNamespace(synced_at=synced, cache=books), WorkQueue())
        found = await getattr(health, page)(None)
        return found.status, found.text if found.text is not None else found.body.decode()

    return asyncio.run(story())


def test_a_leader_that_sees_the_cluster_is_ready():
    assert asked("readyz") == (200, "leading\n")


def test_a_replica_that_stands_by_is_ready_without_any_books():
    assert asked("readyz", held=False, synced_ago=None) == (200, "standing by\n")


def test_a_leader_whose_books_are_not_in_sync_is_not_ready_but_live():
    status, words = asked("readyz", synced_ago=None)
    assert (status, "compared" in words) == (503, True)
    assert asked("readyz", synced_ago=4000.0)[0] == 503
    assert asked("livez", synced_ago=None)[0] == 200


def test_a_replica_that_hears_nothing_of_the_api_server_is_not_ready_and_says_why():
    status, words = asked("readyz", held=False, answered_ago=100.0)
    assert (status, "API server" in words) == (503, True)


def test_metrics_count_pipelines_by_phase():
    _, text = asked("metrics", phases=["Running", "Running", "Succeeded"])
    assert 'finetune_pipelines{phase="Running"} 2.0' in text
    assert 'finetune_pipelines{phase="Succeeded"} 1.0' in text
    assert "finetune_leader 1.0" in text
    assert 'phase="Running"' not in asked("metrics")[1]
