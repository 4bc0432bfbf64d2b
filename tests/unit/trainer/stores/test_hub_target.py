"""Pushes to a repository of the hub: one commit, killed, repeated, at the same time, and refused."""

import hashlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from support.stores.hub_environment import (
    hub_in,
    process_environment,
    sealed_model,
    set_token,
    use_hub,
)
from support.stores.hub_server import serve_hub
from support.stores.hub_state import Hub, Repository

from finetune_trainer.exit_codes import ExitCode
from finetune_trainer.runtime.artifacts import CorruptArtifact, digest_of
from finetune_trainer.runtime.errors import ConfigInvalid, CredentialsRejected, ServiceUnavailable
from finetune_trainer.stores import hub_target
from finetune_trainer.stores.hub_target import HubTarget
from finetune_trainer.stores.port import Publication

URI, NAME, LARGE_NAME = "hf://people/bot", "people/bot", "b/c.safetensors"
SMALL, LARGE = b"s" * 100_000, bytes(range(256)) * 4096
CARD = b"---\nlicense: mit\n---\n# A model\n"
ROOT = Path(__file__).resolve().parents[4]


@dataclass
class Model:
    folder: Path
    digest: str
    names: list[str]

    def publish(self, **options: bool) -> Publication:
        return HubTarget(URI, **options).publish(self.folder, self.digest, self.names)

    def contents(self) -> dict[str, bytes]:
        return {name: (self.folder / name).read_bytes() for name in [*self.names, "manifest.json"]}

    @property
    def size(self) -> int:
        return sum(len(content) for content in self.contents().values())


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_in(tmp_path / "hub", monkeypatch, "people") as hub:
        yield hub


def make_model(folder: Path, **more: bytes) -> Model:
    files = {
        "README.md": CARD,
        "a.safetensors": SMALL,
        "b/c.safetensors": LARGE,
        "config.json": b"{}",
        "empty": b"",
    }
    return Model(folder, *sealed_model(folder, files | more))


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return make_model(tmp_path / "model")


def repository(hub: Hub) -> Repository:
    found = hub.repository(NAME)
    assert found
    return found


def test_push_makes_one_commit_with_all_files_and_a_tag(hub: Hub, model: Model) -> None:
    published = model.publish()

    found = repository(hub)
    assert found.files() == model.contents()
    assert len(found.history()) == 2  # the hub's own and ours
    assert published == Publication(f"hf://{NAME}@{found.head}", model.size)
    assert found.refs["tags"] == {f"sha256-{model.digest[7:19]}": found.head}
    assert hub.received_bytes() == model.size


def test_second_push_of_a_model_sends_nothing(hub: Hub, model: Model) -> None:
    first = model.publish()
    hub.forget_requests()

    assert model.publish() == Publication(first.uri, 0)
    assert hub.received_bytes() == 0
    assert len(repository(hub).history()) == 2


def test_push_of_the_same_model_keeps_the_card_that_is_there(
    hub: Hub, model: Model, tmp_path: Path
) -> None:
    first = model.publish()
    other = make_model(tmp_path / "of-another-pipeline", **{"README.md": b"# Another card"})

    assert other.digest == model.digest
    assert other.publish() == Publication(first.uri, 0)
    edited = repository(hub).push({"README.md": b"# Edited"})
    assert model.publish() == Publication(f"hf://{NAME}@{edited}", 0)


def test_digest_over_all_files_covers_the_card(hub: Hub, tmp_path: Path) -> None:
    for name, card in (("one", CARD), ("other", b"# Another card")):
        model = make_model(tmp_path / name, **{"README.md": card})
        whole = Model(model.folder, digest_of(model.folder), model.names)
        assert whole.publish().sent_bytes > 0
    assert repository(hub).files() == model.contents()


def test_folder_with_another_digest_or_files_is_refused(hub: Hub, model: Model) -> None:
    for folder in (replace(model, digest="sha256:0"), replace(model, names=model.names[1:])):
        with pytest.raises(CorruptArtifact, match="manifest"):
            folder.publish()
    assert hub.repository(NAME) is None


def test_push_of_a_new_model_deletes_the_old_files(hub: Hub, model: Model, tmp_path: Path) -> None:
    make_model(tmp_path / "old", **{"old/vocabulary.txt": b"words"}).publish()
    hub.forget_requests()

    published = model.publish()

    assert repository(hub).files() == model.contents()
    assert published.sent_bytes == hub.received_bytes() == len(model.contents()["manifest.json"])


def test_push_killed_in_an_upload_leaves_main_as_it_was(
    hub: Hub, model: Model, tmp_path: Path
) -> None:
    """The run after it makes exactly one commit and sends only what is missing."""
    make_model(tmp_path / "old", **{"a.safetensors": b"old", "b/c.safetensors": b"old"}).publish()
    head, history = repository(hub).head, repository(hub).history()
    hub.set_faults(bytes_per_second=300_000)
    process = start_push(hub, model)
    small = repository(hub).object_path(sha256_of(model, "a.safetensors"))
    wait_until(
        lambda: (
            small.exists()
            and any((small.parents[1] / "parts").glob(f"{sha256_of(model, LARGE_NAME)}*"))
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


def test_push_that_is_asked_to_stop_ends_in_an_upload(hub: Hub, model: Model) -> None:
    """The stage only notes the signal; without a push that looks at the note, the upload would go on to its end."""
    hub.set_faults(bytes_per_second=20_000)
    command = [
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
            lambda: hub.repository(NAME) and any((repository(hub).folder / "parts").iterdir())
        )
        process.terminate()
        assert process.wait(timeout=30) == ExitCode.INTERRUPTED

    assert repository(hub).files() == {}


def sha256_of(model: Model, name: str) -> str:
    return hashlib.sha256((model.folder / name).read_bytes()).hexdigest()


def start_push(hub: Hub, model: Model) -> subprocess.Popen[bytes]:
    code = (
        "import sys; from pathlib import Path; from finetune_trainer.stores.hub_target import HubTarget\n"
        f"HubTarget({URI!r}).publish(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])"
    )
    command = [sys.executable, "-c", code, model.folder, model.digest, *model.names]
    return subprocess.Popen(command, env=process_environment(hub), cwd=ROOT)


def wait_until(condition: object, seconds: float = 60) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_push_whose_commit_had_no_answer_is_found_again(hub: Hub, model: Model) -> None:
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


def publish_together(*models: Model) -> list[Publication]:
    barrier = threading.Barrier(len(models))

    def publish(model: Model) -> Publication:
        barrier.wait()
        return model.publish()

    with ThreadPoolExecutor(len(models)) as pool:
        return list(pool.map(publish, models))


def test_two_pushes_of_one_model_at_once_make_one_commit(hub: Hub, model: Model) -> None:
    hub.add_repository(NAME)
    hub.set_faults(bytes_per_second=2_000_000)

    one, other = publish_together(model, model)

    assert one.uri == other.uri == f"hf://{NAME}@{repository(hub).head}"
    assert len(repository(hub).history()) == 2
    assert repository(hub).files() == model.contents()


def test_two_pushes_of_two_models_at_once_are_both_whole(
    hub: Hub, model: Model, tmp_path: Path
) -> None:
    hub.add_repository(NAME)
    hub.set_faults(bytes_per_second=2_000_000)
    models = [
        model,
        make_model(tmp_path / "other", **{"a.safetensors": b"other", "extra.json": b"[]"}),
    ]

    published = publish_together(*models)

    commits = [each.uri.rpartition("@")[2] for each in published]
    assert [repository(hub).files(commit) for commit in commits] == [
        each.contents() for each in models
    ]
    assert repository(hub).history()[2:] == repository(hub).history()[-1:]
    assert repository(hub).head in commits


def test_push_during_which_main_moves_commits_on_top(
    hub: Hub, model: Model, tmp_path: Path
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


def test_file_edited_on_the_hub_is_restored_by_the_next_push(hub: Hub, model: Model) -> None:
    model.publish()
    repository(hub).push({"config.json": b"edited", "a.safetensors": b"spoilt"})
    hub.forget_requests()

    published = model.publish()

    assert repository(hub).files() == model.contents()
    assert (
        published.sent_bytes == hub.received_bytes() == len(b"{}")
    )  # the LFS object is still there


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"pytorch_model.bin": b"weights"}, "pytorch_model.bin"),
        ({"README.md": b"# A model of ours"}, "README.md"),
        ({"manifest.json": b"{}"}, "manifest.json"),
        (
            {"manifest.json": b'{"about": {"stage": "train"}, "files": {}, "digest": "d"}'},
            "manifest.json",
        ),
    ],
)
def test_push_to_a_repository_with_other_files_is_refused(
    files: dict[str, bytes], named: str, hub: Hub, model: Model
) -> None:
    hub.add_repository(NAME, files)
    head = repository(hub).head

    with pytest.raises(ConfigInvalid, match=f"{URI}: {named} was not written by a push; move it"):
        model.publish()
    assert repository(hub).head == head
    assert hub.received_bytes() == 0


def test_push_over_a_file_that_no_push_wrote_is_refused(hub: Hub, model: Model) -> None:
    model.publish()
    head = repository(hub).push({"notes.txt": b"mine"})

    with pytest.raises(ConfigInvalid, match=r"notes\.txt was not written by a push"):
        model.publish()
    assert repository(hub).head == head


def test_push_to_a_new_repository_with_an_empty_card_works(hub: Hub, model: Model) -> None:
    hub.add_repository(NAME, {"README.md": b"---\nlicense: mit\n---\n\n"})

    model.publish()

    assert repository(hub).files() == model.contents()


def test_file_that_differs_from_its_manifest_is_not_committed(hub: Hub, model: Model) -> None:
    hub.add_repository(NAME)
    (model.folder / "a.safetensors").write_bytes(SMALL[:-1] + b"x")

    with pytest.raises(CorruptArtifact, match=r"a\.safetensors does not match the digest"):
        model.publish()
    assert len(repository(hub).history()) == 1


def test_private_is_the_visibility_of_a_new_repository(hub: Hub, model: Model) -> None:
    model.publish(private=True)
    make_model(model.folder.with_name("other"), **{"config.json": b"[]"}).publish(private=False)

    assert repository(hub).settings["private"]


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("hf_wrong", "401.*HF_TOKEN is wrong or missing"),
        (None, "401.*HF_TOKEN is wrong or missing"),
        ("hf_reader", "403.*HF_TOKEN lacks a permission"),
        ("hf_stranger", "403.*HF_TOKEN lacks a permission"),
    ],
)
def test_push_without_the_right_token_is_refused(
    token: str | None, message: str, hub: Hub, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is created, and nothing is written to what exists."""
    hub.add_token("hf_reader", "bob", ("people",), write=False)
    hub.add_token("hf_stranger", "eve")
    set_token(monkeypatch, token)

    with pytest.raises(CredentialsRejected, match=message):
        model.publish()
    assert hub.repository(NAME) is None
    hub.add_repository(NAME)
    with pytest.raises(CredentialsRejected, match=message):
        model.publish()
    assert repository(hub).files() == {}


def test_push_whose_upload_breaks_commits_nothing(
    hub: Hub, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add_repository(NAME)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _seconds: None)
    hub.set_faults(cut_after=50_000)

    with pytest.raises(ServiceUnavailable, match=f"{URI}: {hub.url} does not respond"):
        model.publish()
    assert len(repository(hub).history()) == 1


def test_push_that_always_finds_main_moved_ends(
    hub: Hub, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_target, "LOOKS", 1)
    hub.add_repository(NAME)
    hub.set_faults(bytes_per_second=1_000_000)
    with ThreadPoolExecutor(1) as pool:
        publishing = pool.submit(model.publish)
        wait_until(lambda: any((repository(hub).folder / "parts").iterdir()))
        moved = repository(hub).push({"notes.txt": b"moved"})
        with pytest.raises(ServiceUnavailable, match="main has moved 1 times meanwhile"):
            publishing.result()

    assert repository(hub).head == moved


def test_card_that_the_hub_refuses_is_reported(hub: Hub, tmp_path: Path) -> None:
    model = make_model(tmp_path / "invalid", **{"README.md": b"---\n[\n---\n"})

    with pytest.raises(ConfigInvalid, match=f"{URI}: the hub answers 400"):
        model.publish()
    assert repository(hub).files() == {}


def test_push_to_a_hub_that_is_down_is_a_temporary_failure(hub: Hub, model: Model) -> None:
    hub.set_faults(down=True)

    with pytest.raises(
        ServiceUnavailable, match=f"{URI}: the hub answers 503: Service Unavailable; retry later"
    ):
        model.publish()


def test_push_to_a_hub_that_is_gone_is_a_temporary_failure(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_hub(Hub(tmp_path / "gone")) as gone:
        use_hub(gone, monkeypatch)

    with pytest.raises(
        ServiceUnavailable, match=f"{URI}: {gone.url} does not respond.*retry later"
    ):
        model.publish()


@pytest.mark.parametrize(
    "uri", ["hf://people/bot/path", "hf://people/bot@main", "hf://bot", "hf://", "hf://a/../b"]
)
def test_push_target_must_be_a_whole_repository(uri: str) -> None:
    with pytest.raises(ConfigInvalid, match="use hf://ORG/NAME"):
        HubTarget(uri)
