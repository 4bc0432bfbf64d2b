import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.stores.models import MIB, contents, make_model, names_in

from finetune_trainer.publishing.published_model import describe
from finetune_trainer.runtime.artifacts import digest_file, seal
from finetune_trainer.runtime.errors import (
    ConfigInvalid,
    CredentialsRejected,
    DataInvalid,
    ServiceUnavailable,
    SourceNotFound,
)
from finetune_trainer.stores.download import fetch
from finetune_trainer.stores.objects.bucket import locate_objects
from finetune_trainer.stores.objects.store import ObjectSource, ObjectTarget


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    return folder, make_model(
        folder,
        {"config.json": 100, "sub/a.safetensors": 2 * MIB, "z.safetensors": 3 * MIB},
    )


SIZE = 5 * MIB + 100


def publish(uri, model):
    folder, digest = model
    return ObjectTarget(uri).publish(folder, digest, names_in(folder))


def command(uri, model, *call):
    return [sys.executable, "-m", "support.stores.publish", uri, *model, *call]


def start(uri, model, *call):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        command(uri, model, *call), env=environment, stdout=subprocess.PIPE, text=True
    )


def keys_below(bucket, uri):
    key = locate_objects(uri).key
    return {remote.key.removeprefix(f"{key}/") for remote in bucket.list_below(key)}


def read(bucket, uri):
    return b"".join(bucket.read(bucket.find(locate_objects(uri).key))).decode()


def overwrite(bucket, uri, data):
    key = locate_objects(uri).key
    remote = bucket.find(key)
    assert bucket.replace(key, data, remote.version if remote else None)


def test_published_model_is_read_back(prefix, bucket, model, tmp_path):
    publication = publish(prefix, model)
    name = model[1].replace(":", "-")
    assert publication.uri == f"{prefix}/{name}"
    assert publication.sent_bytes == SIZE
    assert read(bucket, f"{prefix}/latest").strip() == name
    folder, _ = fetch(ObjectSource(publication.uri), None, tmp_path / "cache")
    assert contents(folder) == contents(model[0])


def test_publishing_again_sends_nothing(prefix, bucket, model):
    first = publish(prefix, model)
    before = bucket.list_below(locate_objects(prefix).key)
    again = publish(prefix, model)
    assert again.uri == first.uri
    assert again.sent_bytes == 0
    assert bucket.list_below(locate_objects(prefix).key) == before


def test_second_model_is_latest_and_the_first_stays(prefix, bucket, model, tmp_path):
    first = publish(prefix, model)
    second = publish(prefix, (tmp_path / "second", make_model(tmp_path / "second")))
    assert read(bucket, f"{prefix}/latest").strip() == second.uri.rpartition("/")[2]
    folder, _ = fetch(ObjectSource(first.uri), None, tmp_path / "cache")
    assert contents(folder) == contents(model[0])


@pytest.mark.parametrize(
    ("call", "left"), [(1, SIZE - 100), (2, 3 * MIB), (3, 0), (4, 0)]
)
def test_kill_before_a_write_leaves_nothing_visible(prefix, bucket, model, call, left):
    """The calls are: three files, the manifest, latest."""
    assert start(prefix, model, str(call)).wait() == -signal.SIGKILL
    present = keys_below(bucket, prefix)
    assert "latest" not in present
    assert any(key.endswith("/manifest.json") for key in present) == (call > 3)
    assert publish(prefix, model).sent_bytes == left
    assert publish(prefix, model).sent_bytes == 0


def test_kill_inside_of_an_upload_leaves_no_object(server, prefix, bucket, tmp_path):
    if server.folder is None:
        pytest.skip("this server does not show unfinished uploads")
    sizes = {"config.json": 100, "weights.safetensors": 100 * MIB}
    model = tmp_path / "large", make_model(tmp_path / "large", sizes)
    process = start(prefix, model)
    while not any(
        path.stat().st_size for path in server.folder.rglob("*") if path.is_file()
    ):
        assert process.poll() is None
        time.sleep(0.001)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert keys_below(bucket, prefix) == {f"{model[1].replace(':', '-')}/config.json"}
    assert publish(prefix, model).sent_bytes == 100 * MIB
    assert publish(prefix, model).sent_bytes == 0


def test_two_writers_at_once_publish_one_model(prefix, bucket, model, tmp_path):
    writers = [start(prefix, model) for _ in range(2)]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert keys_below(bucket, prefix) == {"latest"} | {
        f"{model[1].replace(':', '-')}/{name}"
        for name in [*names_in(model[0]), "manifest.json"]
    }
    assert publish(prefix, model).sent_bytes == 0


def test_two_models_at_once_leave_both_and_one_latest(prefix, bucket, tmp_path):
    models = [
        (tmp_path / str(number), make_model(tmp_path / str(number)))
        for number in range(4)
    ]
    uris = []
    threads = [
        threading.Thread(
            target=lambda model=model: uris.append(publish(prefix, model).uri)
        )
        for model in models
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(uris)) == 4
    assert f"{prefix}/{read(bucket, f'{prefix}/latest').strip()}" in uris


@pytest.mark.parametrize("data", [b"s" * 100, b"short"])
def test_spoilt_object_is_refused_by_name_and_mended(
    prefix, bucket, model, tmp_path, data
):
    uri = publish(prefix, model).uri
    overwrite(bucket, f"{uri}/config.json", data)
    with pytest.raises(DataInvalid, match=r"config\.json has"):
        fetch(ObjectSource(uri), None, tmp_path / "cache")
    assert publish(prefix, model).sent_bytes == 100
    folder, _ = fetch(ObjectSource(uri), None, tmp_path / "cache")
    assert contents(folder) == contents(model[0])


def test_spoilt_manifest_is_mended(prefix, bucket, model, tmp_path):
    uri = publish(prefix, model).uri
    overwrite(bucket, f"{uri}/manifest.json", b"{}")
    assert publish(prefix, model).sent_bytes == 0
    folder, _ = fetch(ObjectSource(uri), None, tmp_path / "cache")
    assert contents(folder) == contents(model[0])


def test_missing_object_is_refused_by_name(prefix, bucket, model, tmp_path):
    name = model[1].replace(":", "-")
    manifest = (model[0] / "manifest.json").read_bytes()
    overwrite(bucket, f"{prefix}/{name}/manifest.json", manifest)
    with pytest.raises(DataInvalid, match=r"config\.json is missing"):
        fetch(ObjectSource(f"{prefix}/{name}"), None, tmp_path / "cache")


def with_card(model, folder, text):
    """Return a copy of a model with a model card, over which its digest is not."""
    shutil.copytree(model[0], folder)
    (folder / "README.md").write_text(text)
    seal(folder)
    return folder, describe(folder).digest


def test_other_model_card_leaves_the_published_one(prefix, bucket, model, tmp_path):
    first = with_card(model, tmp_path / "first", "the first run")
    uri = publish(prefix, first).uri
    other = with_card(model, tmp_path / "other", "another run of the same training")
    assert publish(prefix, other).sent_bytes == 0
    assert (
        read(bucket, f"{uri}/manifest.json").encode()
        == (first[0] / "manifest.json").read_bytes()
    )
    folder, _ = fetch(ObjectSource(uri), None, tmp_path / "cache")
    assert contents(folder) == contents(first[0])


def test_two_writers_with_two_cards_leave_a_readable_model(
    prefix, bucket, model, tmp_path
):
    """The second writer looks for a card before the first writes one, and comes first with the manifest."""
    models = [
        with_card(model, tmp_path / name, f"card of {name}")
        for name in ("first", "second")
    ]
    looked = threading.Event()
    written = threading.Event()

    class Delegate:
        def __getattr__(self, name):
            return getattr(bucket, name)

    class Second(Delegate):
        def find(self, key):
            remote = bucket.find(key)
            if key.endswith("README.md") and not looked.is_set():
                looked.set()
                assert written.wait(30)
            return remote

    class First(Delegate):
        def replace(self, key, data, version):
            is_written = bucket.replace(key, data, version)
            if key.endswith("README.md"):
                written.set()
            return is_written

    second = threading.Thread(target=lambda: publish_by(Second(), prefix, models[1]))
    second.start()
    assert looked.wait(30)
    uri = publish_by(First(), prefix, models[0]).uri
    second.join()
    folder, _ = fetch(ObjectSource(uri), None, tmp_path / "cache")
    assert (folder / "README.md").read_text() == "card of first"


def publish_by(bucket, prefix, model):
    return ObjectTarget(prefix, bucket).publish(model[0], model[1], names_in(model[0]))


def test_other_model_under_the_digest_is_replaced(prefix, bucket, model, tmp_path):
    other = (
        tmp_path / "other",
        make_model(tmp_path / "other", {"config.json": 100, "z.safetensors": MIB}),
    )
    publish(prefix, other)
    uri = f"{prefix}/{model[1].replace(':', '-')}"
    for path in [*names_in(other[0]), "manifest.json"]:
        key = locate_objects(f"{uri}/{path}").key
        bucket.upload(other[0] / path, key, digest_file(other[0] / path))
    assert publish(prefix, model).sent_bytes == SIZE
    folder, _ = fetch(ObjectSource(uri), None, tmp_path / "cache")
    assert contents(folder) == contents(model[0])


def test_write_with_a_condition_that_fails_changes_nothing(prefix, bucket):
    key = locate_objects(f"{prefix}/small").key
    assert bucket.replace(key, b"first", None)
    assert not bucket.replace(key, b"second", None)
    old = bucket.find(key).version
    assert bucket.replace(key, b"third", old)
    assert not bucket.replace(key, b"fourth", old)
    assert read(bucket, f"{prefix}/small") == "third"


@pytest.mark.parametrize("name", ["notes.txt", "v1/weights", "sha256-12/config.json"])
def test_what_no_push_wrote_is_refused(prefix, bucket, model, name):
    overwrite(bucket, f"{prefix}/{name}", b"mine")
    for use in (lambda: publish(prefix, model), ObjectTarget(prefix).check):
        with pytest.raises(ConfigInvalid, match="was not written by a push"):
            use()
    assert keys_below(bucket, prefix) == {name}


def test_strange_latest_is_refused_and_stays(prefix, bucket, model):
    overwrite(bucket, f"{prefix}/latest", b"mine")
    with pytest.raises(ConfigInvalid, match="latest was not written by a push"):
        publish(prefix, model)
    assert read(bucket, f"{prefix}/latest") == "mine"


def test_strange_object_in_the_folder_is_refused(prefix, bucket, model):
    uri = publish(prefix, model).uri
    overwrite(bucket, f"{uri}/notes.txt", b"mine")
    with pytest.raises(ConfigInvalid, match=r"notes\.txt was not written by a push"):
        publish(prefix, model)


def test_prefix_that_begins_like_another_is_its_own(prefix, bucket, model):
    overwrite(bucket, f"{prefix}-other/notes.txt", b"mine")
    assert publish(prefix, model).sent_bytes == SIZE


def test_wrong_key_is_rejected(server, prefix, model, monkeypatch):
    if not server.wrong_keys:
        pytest.skip("this server accepts all credentials")
    for wrong in server.wrong_keys:
        with monkeypatch.context() as patched:
            for name, value in wrong.items():
                patched.setenv(name, value)
            with pytest.raises(CredentialsRejected, match=prefix):
                publish(prefix, model)


def test_missing_bucket_is_not_found(server, prefix, model):
    with pytest.raises(SourceNotFound, match="bucket"):
        publish(prefix.replace("bucket", "nobucket"), model)


def test_server_that_is_gone_is_unavailable(
    server, prefix, model, monkeypatch, impatient
):
    for name, value in server.gone.items():
        monkeypatch.setenv(name, value)
    started = time.monotonic()
    with pytest.raises(ServiceUnavailable, match=prefix):
        publish(prefix, model)
    assert time.monotonic() - started < 30


def test_files_that_were_not_sealed_are_refused(prefix, bucket, model):
    with pytest.raises(ValueError, match="not sealed with exactly"):
        ObjectTarget(prefix).publish(Path(model[0]), model[1], ["config.json"])
    assert keys_below(bucket, prefix) == set()
