"""The hub over xet, with STORES=all: the double of the hub before Hugging Face's own CAS server.

Every push and every fetch is a process with an empty home, as in a new pod: what it skips, it knows from the servers.
The large file fills one xorb, which has at most 64 MiB, and a part of a second one.
"""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.stores import hub_api
from support.stores.hub_environment import TOKEN
from support.stores.hub_server import serve_hub
from support.stores.hub_state import Hub, Refused
from support.stores.models import MIB, contents
from support.stores.registry_proxy import Fault
from support.stores.servers import free_port
from support.stores.xet_processes import (
    LARGE,
    NAME,
    OVERHEAD,
    SECONDS,
    SMALLER,
    URI,
    XetModel,
    begun,
    error_of,
    fetch,
    kill_when,
    make_model,
    output_of,
    repository,
    start,
)
from support.stores.xet_server import XetProxy, serve_xet, size_of_fetch

from finetune_trainer.exit_codes import ExitCode
from finetune_trainer.files import write_durably
from finetune_trainer.runtime.artifacts import seal

pytestmark = pytest.mark.skipif(
    os.environ.get("STORES") != "all", reason="runs with STORES=all"
)
ONE_BY_ONE = {"HF_XET_DATA_MAX_CONCURRENT_FILE_INGESTION": "1"}
WITHOUT_GRANTS = {"HF_XET_CLIENT_LEGACY_DIRECT_XORB_UPLOAD": "1"}


@pytest.fixture
def xet(tmp_path: Path) -> Iterator[XetProxy]:
    with serve_xet(tmp_path / "cas") as proxy:
        yield proxy
    shutil.rmtree(
        tmp_path
    )  # 150 MB for each test, which pytest would keep for three runs


@pytest.fixture
def hub(tmp_path: Path, xet: XetProxy) -> Iterator[Hub]:
    hub = Hub(tmp_path / "hub", xet=xet.storage)
    hub.add_token(TOKEN, "ann", ("people",))
    with serve_hub(hub):
        yield hub


@pytest.fixture
def model(tmp_path: Path) -> XetModel:
    return make_model(tmp_path / "model")


@pytest.fixture
def small(tmp_path: Path) -> XetModel:
    return make_model(tmp_path / "small", **{"a.safetensors": os.urandom(MIB)})


def is_upload(path: str) -> bool:
    return path.startswith("/simulation/xorb-uploads/")


def test_push_is_one_commit_and_is_fetched_from_xet(
    hub: Hub, xet: XetProxy, model: XetModel, tmp_path: Path
) -> None:
    uri, sent = model.push(hub)

    pushed = repository(hub)
    assert uri == f"hf://{NAME}@{pushed.head}"
    assert len(pushed.history()) == 2
    assert pushed.files() == contents(model.folder)
    small = sum(
        len(content)
        for name, content in pushed.files().items()
        if name.endswith("json")
    )
    assert sent == LARGE + SMALLER + small
    assert LARGE + SMALLER <= xet.uploaded_bytes() <= OVERHEAD * (LARGE + SMALLER)
    assert hub.received_bytes() == small  # the rest came by xet, nothing by LFS

    assert fetch(hub, tmp_path / "cache") == contents(model.folder)
    assert LARGE + SMALLER <= sum(xet.fetched) <= OVERHEAD * (LARGE + SMALLER)
    assert not [name for name in hub.downloads() if name.endswith("safetensors")]


def test_second_push_sends_nothing_and_commits_nothing(
    hub: Hub, xet: XetProxy, model: XetModel
) -> None:
    uri, _ = model.push(hub)
    history = repository(hub).history()
    hub.forget_requests()
    xet.forget()

    assert model.push(hub) == (uri, 0)
    assert xet.received == []
    assert hub.received_bytes() == 0
    assert repository(hub).history() == history


@pytest.mark.parametrize("last", ["second xorb", "last shard"])
def test_push_killed_in_an_upload_is_finished_by_the_next(
    last: str, hub: Hub, xet: XetProxy, model: XetModel
) -> None:
    """After the kill main is what it was. The next push sends what the CAS server lacks.

    Files are read one after the other, so that the second push divides them into the same xorbs.
    """
    small = make_model(
        model.folder.with_name("old"),
        **{"a.safetensors": b"old", "b.safetensors": b"old"},
    )
    small.push(hub)
    history = repository(hub).history()
    before = repository(hub).files()
    xet.forget()

    def hang(_method: str, path: str) -> Fault | None:
        if last == "last shard":
            is_last = "/shards" in path and xet.count("POST", "/shards") > 1
        else:
            is_last = is_upload(path) and xet.count("PUT") > 1
        return Fault(hangs=True) if is_last else None

    xet.fault = hang
    process = model.start_push(hub, **ONE_BY_ONE)
    stored = 3 if last == "last shard" else 1
    kill_when(
        lambda: xet.hanging.is_set() and xet.count("POST", "/xorb-commits/") == stored,
        process,
    )
    kept = xet.uploaded_bytes()

    assert repository(hub).history() == history
    assert repository(hub).files() == before
    xet.fault = lambda _method, _path: None
    xet.forget()
    uri, _ = model.push(hub, **ONE_BY_ONE)

    assert uri == f"hf://{NAME}@{repository(hub).head}"
    assert repository(hub).history()[1:] == history
    assert repository(hub).files() == contents(model.folder)
    assert kept > 0
    assert (
        LARGE + SMALLER <= kept + xet.uploaded_bytes() <= OVERHEAD * (LARGE + SMALLER)
    )
    assert bool(xet.uploaded_bytes()) == (last == "second xorb")


def test_push_to_a_server_without_grants_keeps_whole_files(
    hub: Hub, xet: XetProxy, model: XetModel
) -> None:
    """Grants tell a client which xorbs are there. Without them the shards do, and a file's comes when it is whole."""
    write_durably(model.folder / "b.safetensors", os.urandom(LARGE))
    model = XetModel(model.folder, seal(model.folder, {"stage": "push"}))

    def hang(_method: str, path: str) -> Fault | None:
        if path.startswith("/v1/xorbs/") and xet.count("POST", "/shards"):
            return Fault(hangs=True)
        return None

    xet.fault = hang
    kill_when(xet.hanging.is_set, model.start_push(hub, **WITHOUT_GRANTS))
    kept = xet.uploaded_bytes()
    xet.fault = lambda _method, _path: None
    xet.forget()

    model.push(hub, **WITHOUT_GRANTS)

    assert LARGE <= kept <= OVERHEAD * LARGE
    assert LARGE <= xet.uploaded_bytes() <= OVERHEAD * LARGE
    assert repository(hub).files() == contents(model.folder)


def test_weights_of_another_repository_are_not_sent_again(
    hub: Hub, xet: XetProxy, model: XetModel
) -> None:
    model.push(hub)
    xet.forget()
    write_durably(model.folder / "b.safetensors", os.urandom(SMALLER))
    changed = XetModel(model.folder, seal(model.folder, {"stage": "push"}))

    changed.push(hub, "hf://people/other")

    assert SMALLER <= xet.uploaded_bytes() <= OVERHEAD * SMALLER
    assert repository(hub, "people/other").files() == contents(model.folder)


def test_two_pushes_of_one_model_at_once_make_one_commit(
    hub: Hub, model: XetModel
) -> None:
    hub.add_repository(NAME)

    first, second = [
        output_of(push).split()[0]
        for push in [model.start_push(hub), model.start_push(hub)]
    ]

    assert first == second == f"hf://{NAME}@{repository(hub).head}"
    assert len(repository(hub).history()) == 2
    assert repository(hub).files() == contents(model.folder)


def test_two_pushes_of_two_models_at_once_are_both_whole(
    hub: Hub, model: XetModel, tmp_path: Path
) -> None:
    hub.add_repository(NAME)
    models = [
        model,
        make_model(
            tmp_path / "other", **{"a.safetensors": b"other", "extra.json": b"[]"}
        ),
    ]

    pushes = [pushed.start_push(hub) for pushed in models]
    published = [output_of(push).split()[0] for push in pushes]

    commits = [uri.rpartition("@")[2] for uri in published]
    assert [repository(hub).files(commit) for commit in commits] == [
        contents(pushed.folder) for pushed in models
    ]
    assert repository(hub).head in commits
    assert len(repository(hub).history()) == 3


def test_killed_fetch_goes_on_behind_its_bytes(
    hub: Hub, xet: XetProxy, model: XetModel, tmp_path: Path
) -> None:
    """The rest of a file that xet has begun comes over plain HTTPS. The second of its two xorbs is held back."""
    (model.folder / "b.safetensors").unlink()
    XetModel(model.folder, seal(model.folder, {"stage": "push"})).push(hub)
    xet.fault = lambda _method, path: (
        Fault(hangs=True) if 0 < size_of_fetch(path) < LARGE // 2 else None
    )
    cache = tmp_path / "cache"
    part = begun(cache, "a.safetensors")
    kill_when(
        lambda: xet.hanging.is_set() and part() > 0,
        start(hub, "fetch", URI, str(cache)),
    )
    kept = part()
    xet.forget()
    hub.forget_requests()

    assert fetch(hub, cache) == contents(model.folder)
    assert 0 < kept < LARGE
    sent = {entry["file"]: entry["sent"] for entry in hub.requests() if entry["sent"]}
    assert sent["a.safetensors"] == LARGE - kept
    assert xet.fetched == []


def test_file_in_xet_is_fetched_without_xet_too(
    hub: Hub, xet: XetProxy, small: XetModel, tmp_path: Path
) -> None:
    small.push(hub)
    xet.forget()

    assert fetch(hub, tmp_path / "cache", HF_HUB_DISABLE_XET="1") == contents(
        small.folder
    )
    assert xet.requests == []


def test_spoilt_xorb_is_refused_by_the_name_of_the_file(
    hub: Hub, xet: XetProxy, model: XetModel, tmp_path: Path
) -> None:
    model.push(hub)
    largest = max(
        (xet.storage.folder / "xorbs").iterdir(), key=lambda path: path.stat().st_size
    )
    largest.chmod(0o600)
    with largest.open("r+b") as xorb:
        xorb.seek(MIB)
        xorb.write(b"spoilt" * 100)

    error = error_of(start(hub, "fetch", URI, str(tmp_path / "cache")), ExitCode.DATA)

    assert f"{URI}: a.safetensors has the digest" in error
    assert not list((tmp_path / "cache").rglob("files/a.safetensors"))


def test_push_and_fetch_with_a_wrong_token_are_refused(
    hub: Hub, xet: XetProxy, small: XetModel, tmp_path: Path
) -> None:
    hub.add_repository(NAME, {"a.safetensors": b"old"}, private=True)
    head = repository(hub).head

    for process in (
        small.start_push(hub, HF_TOKEN="hf_wrong"),
        start(hub, "fetch", URI, str(tmp_path / "cache"), HF_TOKEN="hf_wrong"),
    ):
        assert "HF_TOKEN is wrong or missing" in error_of(process, ExitCode.CREDENTIALS)
    assert repository(hub).head == head
    assert xet.received == []


@pytest.mark.parametrize("status", [401, 403])
def test_hub_that_refuses_a_token_for_xet_is_reported(
    status: int,
    hub: Hub,
    small: XetModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small.push(hub)
    monkeypatch.setattr(hub_api, "xet_token", Mock(side_effect=Refused(status)))

    check_token_is_refused(hub, tmp_path)


@pytest.mark.parametrize("status", [401, 403])
def test_cas_server_that_refuses_a_token_is_reported(
    status: int, hub: Hub, xet: XetProxy, small: XetModel, tmp_path: Path
) -> None:
    small.push(hub)
    xet.gate = lambda _method, _path, _header: Fault(status)

    check_token_is_refused(hub, tmp_path)


def check_token_is_refused(hub: Hub, folder: Path) -> None:
    """Check what a push and a fetch report of a token that is refused."""
    head = repository(hub).head
    changed = make_model(
        folder / "changed", **{"a.safetensors": b"new", "b.safetensors": b"new"}
    )
    for process in (
        changed.start_push(hub),
        start(hub, "fetch", URI, str(folder / "cache")),
    ):
        assert "HF_TOKEN" in error_of(process, ExitCode.CREDENTIALS)
    assert repository(hub).head == head


def test_cas_server_that_is_gone_is_a_temporary_failure(
    hub: Hub, small: XetModel, tmp_path: Path
) -> None:
    """Neither falls back to plain HTTPS, which HF_HUB_DISABLE_XET=1 chooses."""
    small.push(hub)
    head = repository(hub).head
    hub.cas_url = f"http://127.0.0.1:{free_port()}"

    for process in (
        make_model(tmp_path / "other").start_push(hub),
        start(hub, "fetch", URI, str(tmp_path / "cache")),
    ):
        assert f"{URI}: the transfer with {hub.url} failed" in error_of(
            process, ExitCode.UNAVAILABLE
        )
    assert repository(hub).head == head


def test_push_that_is_asked_to_stop_ends_in_an_upload(
    hub: Hub, xet: XetProxy, model: XetModel
) -> None:
    xet.fault = lambda _method, path: Fault(hangs=True) if is_upload(path) else None
    process = model.start_push(hub)
    assert xet.hanging.wait(SECONDS)
    process.terminate()
    asked = time.monotonic()

    error_of(process, ExitCode.INTERRUPTED)
    assert time.monotonic() - asked < 15
    assert len(repository(hub).history()) == 1
