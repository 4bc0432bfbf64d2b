"""Pushes to a repository of the hub: one commit, killed, repeated, and at the same time."""

import hashlib
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from support.stores.hub_environment import (
    process_environment,
)
from support.stores.hub_models import (
    CARD,
    LARGE,
    LARGE_NAME,
    NAME,
    URI,
    HubModel,
    make_model,
    repository,
    wait_until,
)
from support.stores.hub_state import Hub

from finetune_trainer.exit_codes import ExitCode
from finetune_trainer.runtime.artifacts import CorruptArtifact, digest_of
from finetune_trainer.runtime.errors import ServiceUnavailable
from finetune_trainer.stores.hub import target
from finetune_trainer.stores.port import Publication

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def model(tmp_path: Path) -> HubModel:
    return make_model(tmp_path / "model")


def test_push_makes_one_commit_with_all_files_and_a_tag(
    hub: Hub, model: HubModel
) -> None:
    published = model.publish()

    pushed = repository(hub)
    assert pushed.files() == model.contents()
    assert len(pushed.history()) == 2  # the hub's own and ours
    assert published == Publication(f"hf://{NAME}@{pushed.head}", model.size)
    assert pushed.refs["tags"] == {f"sha256-{model.digest[7:19]}": pushed.head}
    assert hub.received_bytes() == model.size


def test_second_push_of_a_model_sends_nothing(hub: Hub, model: HubModel) -> None:
    first = model.publish()
    hub.forget_requests()

    assert model.publish() == Publication(first.uri, 0)
    assert hub.received_bytes() == 0
    assert len(repository(hub).history()) == 2


def test_push_of_the_same_model_keeps_the_card_that_is_there(
    hub: Hub, model: HubModel, tmp_path: Path
) -> None:
    first = model.publish()
    other = make_model(
        tmp_path / "of-another-pipeline", **{"README.md": b"# Another card"}
    )

    assert other.digest == model.digest
    assert other.publish() == Publication(first.uri, 0)
    edited = repository(hub).push({"README.md": b"# Edited"})
    assert model.publish() == Publication(f"hf://{NAME}@{edited}", 0)


def test_digest_over_all_files_covers_the_card(hub: Hub, tmp_path: Path) -> None:
    for name, card in (("one", CARD), ("other", b"# Another card")):
        model = make_model(tmp_path / name, **{"README.md": card})
        whole = HubModel(model.folder, digest_of(model.folder), model.names)
        assert whole.publish().sent_bytes > 0
    assert repository(hub).files() == model.contents()


def test_folder_with_another_digest_or_files_is_refused(
    hub: Hub, model: HubModel
) -> None:
    for folder in (
        replace(model, digest="sha256:0"),
        replace(model, names=model.names[1:]),
    ):
        with pytest.raises(CorruptArtifact, match="manifest"):
            folder.publish()
    assert hub.repository(NAME) is None


def test_push_of_a_new_model_deletes_the_old_files(
    hub: Hub, model: HubModel, tmp_path: Path
) -> None:
    make_model(tmp_path / "old", **{"old/vocabulary.txt": b"words"}).publish()
    hub.forget_requests()

    published = model.publish()

    assert repository(hub).files() == model.contents()
    assert (
        published.sent_bytes
        == hub.received_bytes()
        == len(model.contents()["manifest.json"])
    )


def test_push_killed_in_an_upload_leaves_main_as_it_was(
    hub: Hub, model: HubModel, tmp_path: Path
) -> None:
    """The run after it makes exactly one commit and sends only what is missing."""
    make_model(
        tmp_path / "old", **{"a.safetensors": b"old", "b/c.safetensors": b"old"}
    ).publish()
    head = repository(hub).head
    history = repository(hub).history()
    hub.set_faults(bytes_per_second=300_000)
    process = start_push(hub, model)
    small = repository(hub).object_path(sha256_of(model, "a.safetensors"))
    wait_until(
        lambda: (
            small.exists()
            and any(
                (small.parents[1] / "parts").glob(f"{sha256_of(model, LARGE_NAME)}*")
            )
        )
    )
    process.kill()
    process.wait()

    assert repository(hub).head == head
    hub.set_faults()
    hub.forget_requests()
    published = model.publish()

    assert repository(hub).files() == model.contents()
    assert repository(hub).history()[1:] == history
    assert (
        published.sent_bytes
        == hub.received_bytes()
        == len(LARGE) + len(model.contents()["manifest.json"])
    )
    assert model.publish() == Publication(published.uri, 0)


def test_push_that_is_asked_to_stop_ends_in_an_upload(
    hub: Hub, model: HubModel
) -> None:
    """The stage only notes the signal; without a push that looks at the note, the upload would go on to its end."""
    hub.set_faults(bytes_per_second=20_000)
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "support.stores.hub_process",
        "push",
        URI,
        model.folder,
        model.digest,
    ]
    with subprocess.Popen(command, env=process_environment(hub), cwd=ROOT) as process:
        wait_until(
            lambda: (
                hub.repository(NAME)
                and any((repository(hub).folder / "parts").iterdir())
            )
        )
        process.terminate()
        assert process.wait(timeout=30) == ExitCode.INTERRUPTED

    assert repository(hub).files() == {}


def sha256_of(model: HubModel, name: str) -> str:
    return hashlib.sha256((model.folder / name).read_bytes()).hexdigest()


def start_push(hub: Hub, model: HubModel) -> subprocess.Popen[bytes]:
    code = (
        "import sys; from pathlib import Path; from finetune_trainer.stores.hub.target import HubTarget\n"
        f"HubTarget({URI!r}).publish(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])"
    )
    command: list[str | Path] = [
        sys.executable,
        "-c",
        code,
        model.folder,
        model.digest,
        *model.names,
    ]
    return subprocess.Popen(command, env=process_environment(hub), cwd=ROOT)


def test_push_whose_commit_had_no_answer_is_found_again(
    hub: Hub, model: HubModel
) -> None:
    hub.set_faults(lose_commit_answer=True)
    with pytest.raises(ServiceUnavailable, match=URI):
        model.publish()
    hub.set_faults()
    hub.forget_requests()

    published = model.publish()

    assert published == Publication(f"hf://{NAME}@{repository(hub).head}", 0)
    assert hub.received_bytes() == 0
    assert len(repository(hub).history()) == 2
    assert list(repository(hub).refs["tags"].values()) == [repository(hub).head]


def publish_together(*models: HubModel) -> list[Publication]:
    barrier = threading.Barrier(len(models))

    def publish(model: HubModel) -> Publication:
        barrier.wait()
        return model.publish()

    with ThreadPoolExecutor(len(models)) as pool:
        return list(pool.map(publish, models))


def test_two_pushes_of_one_model_at_once_make_one_commit(
    hub: Hub, model: HubModel
) -> None:
    hub.add_repository(NAME)
    hub.set_faults(bytes_per_second=2_000_000)

    first, second = publish_together(model, model)

    assert first.uri == second.uri == f"hf://{NAME}@{repository(hub).head}"
    assert len(repository(hub).history()) == 2
    assert repository(hub).files() == model.contents()


def test_two_pushes_of_two_models_at_once_are_both_whole(
    hub: Hub, model: HubModel, tmp_path: Path
) -> None:
    hub.add_repository(NAME)
    hub.set_faults(bytes_per_second=2_000_000)
    models = [
        model,
        make_model(
            tmp_path / "other", **{"a.safetensors": b"other", "extra.json": b"[]"}
        ),
    ]

    published = publish_together(*models)

    commits = [publication.uri.rpartition("@")[2] for publication in published]
    assert [repository(hub).files(commit) for commit in commits] == [
        pushed.contents() for pushed in models
    ]
    assert repository(hub).history()[2:] == repository(hub).history()[-1:]
    assert repository(hub).head in commits


def test_push_during_which_main_moves_commits_on_top(
    hub: Hub, model: HubModel, tmp_path: Path
) -> None:
    make_model(tmp_path / "old", **{"b/c.safetensors": b"old"}).publish()
    hub.set_faults(bytes_per_second=1_000_000)
    with ThreadPoolExecutor(1) as pool:
        publishing = pool.submit(model.publish)
        wait_until(lambda: any((repository(hub).folder / "parts").iterdir()))
        edited = repository(hub).push({"config.json": b"edited"})
        published = publishing.result()

    assert repository(hub).history()[:2] == [published.uri.rpartition("@")[2], edited]
    assert repository(hub).files() == model.contents()


def test_file_edited_on_the_hub_is_restored_by_the_next_push(
    hub: Hub, model: HubModel
) -> None:
    model.publish()
    repository(hub).push({"config.json": b"edited", "a.safetensors": b"spoilt"})
    hub.forget_requests()

    published = model.publish()

    assert repository(hub).files() == model.contents()
    assert (
        published.sent_bytes == hub.received_bytes() == len(b"{}")
    )  # the LFS object is still there


def test_push_that_always_finds_main_moved_ends(
    hub: Hub, model: HubModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "LOOKS", 1)
    hub.add_repository(NAME)
    hub.set_faults(bytes_per_second=1_000_000)
    with ThreadPoolExecutor(1) as pool:
        publishing = pool.submit(model.publish)
        wait_until(lambda: any((repository(hub).folder / "parts").iterdir()))
        moved = repository(hub).push({"notes.txt": b"moved"})
        with pytest.raises(
            ServiceUnavailable, match="main has moved 1 times meanwhile"
        ):
            publishing.result()

    assert repository(hub).head == moved
