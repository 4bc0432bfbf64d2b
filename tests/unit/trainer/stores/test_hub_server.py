"""The double of the hub: it does what the hub's own library asks, and refuses what the hub would."""

import hashlib
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd, HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, RevisionNotFoundError
from support.stores.hub_api import PART_BYTES, signature
from support.stores.hub_environment import TOKEN, process_environment, use_hub
from support.stores.hub_state import Hub, git_oid

from testcluster.kube_namespace import until

NAME = "people/tiny"
LARGE = b"0123456789abcdef" * (PART_BYTES // 10)
FILES = {"config.json": b"{}", "large.safetensors": LARGE, "one.bin": b"1"} | {
    f"{n}.txt": b"%d" % n for n in range(9)
}
ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def api(hub: Hub) -> HfApi:
    return HfApi(endpoint=hub.url)


def write(folder: Path) -> Path:
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("kind", ["model", "dataset"])
def test_library_uploads_and_downloads_a_folder(
    kind: str, hub: Hub, api: HfApi, tmp_path: Path
) -> None:
    api.create_repo(NAME, repo_type=kind, private=True)
    api.upload_folder(
        repo_id=NAME, repo_type=kind, folder_path=write(tmp_path / "model")
    )
    cache = tmp_path / "cache"
    downloaded = snapshot_download(
        NAME, repo_type=kind, endpoint=hub.url, cache_dir=cache
    )
    folder = Path(downloaded)

    assert {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.name != ".gitattributes"
    } == FILES
    repository = hub.repository(NAME, "models" if kind == "model" else "datasets")
    assert repository
    assert repository.files() == FILES


def test_library_reads_user_refs_and_paths(hub: Hub, api: HfApi) -> None:
    repository = hub.add_repository(NAME, FILES)
    first = repository.head
    api.create_branch(NAME, branch="a/branch")
    repository.push({"config.json": b"[]"})
    api.create_tag(NAME, tag="v1")

    refs = api.list_repo_refs(NAME)
    assert api.whoami()["name"] == "ann"
    assert {ref.name: ref.target_commit for ref in refs.branches} == {
        "main": repository.head,
        "a/branch": first,
    }
    assert {ref.name: ref.target_commit for ref in refs.tags} == {"v1": repository.head}
    assert api.repo_info(NAME, revision="a/branch").sha == first
    assert [
        info.path for info in api.get_paths_info(NAME, ["config.json", "none"])
    ] == ["config.json"]


def test_server_runs_as_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(tmp_path / "hub")
    hub.add_repository(NAME, FILES)
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "support.stores.hub_server",
        "--folder",
        hub.folder,
        "--port",
        "0",
    ]
    process = subprocess.Popen(
        command,
        env=process_environment(hub),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    with process, process.stdout as output:
        hub.url = output.readline().strip()
        use_hub(hub, monkeypatch, token=None)
        sha = HfApi(endpoint=hub.url).model_info(NAME).sha
        until(hub.requests, 10)  # the server writes its log after it has answered
        process.terminate()

    assert sha == hub.add_repository(NAME, FILES).head
    assert [request["status"] for request in hub.requests()] == [200]


def commit(api: HfApi, *files: str, parent: str | None = None) -> None:
    operations = [CommitOperationAdd(name, b"content") for name in files]
    api.create_commit(NAME, operations, commit_message="m", parent_commit=parent)


def test_commit_with_a_stale_parent_is_refused(hub: Hub, api: HfApi) -> None:
    repository = hub.add_repository(NAME, FILES)
    stale = repository.head
    repository.push({"config.json": b"[]"})
    history = repository.history()

    with pytest.raises(HfHubHTTPError) as refused:
        commit(api, "new.txt", parent=stale)
    assert refused.value.response.status_code == 412
    assert repository.history() == history


def test_commit_to_an_unknown_branch_is_refused(hub: Hub, api: HfApi) -> None:
    hub.add_repository(NAME)

    with pytest.raises(RevisionNotFoundError):
        api.create_commit(
            NAME, [CommitOperationAdd("a", b"a")], commit_message="m", revision="none"
        )


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (
            '{"key": "lfsFile", "value": {"path": "a.bin", "algo": "sha256", "oid": "none", "size": 1}}',
            400,
        ),
        ('{"key": "deletedFile", "value": {"path": "none"}}', 404),
        (
            '{"key": "file", "value": {"path": "../a", "content": "YQ==", "encoding": "base64"}}',
            400,
        ),
        (
            '{"key": "file", "value": {"path": "a.bin", "content": "YQ==", "encoding": "base64"}}',
            400,
        ),
        ("", 400),
    ],
)
def test_commit_that_git_or_the_hub_would_refuse_is_refused(
    lines: str, status: int, hub: Hub
) -> None:
    head = hub.add_repository(NAME).head
    body = f'{{"key": "header", "value": {{"summary": "m", "description": ""}}}}\n{lines}'.strip()
    headers = {
        "Authorization": f"Bearer {TOKEN}",
        "Content-Type": "application/x-ndjson",
    }

    assert (
        send(f"{hub.url}/api/models/{NAME}/commit/main", body.encode(), headers)
        == status
    )
    repository = hub.repository(NAME)
    assert repository
    assert repository.head == head


def send(url: str, body: bytes, headers: dict[str, str], method: str = "POST") -> int:
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, body, headers, method=method)
        ) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def test_storage_takes_the_right_bytes_from_a_signed_url_only(hub: Hub) -> None:
    repository = hub.add_repository(NAME)
    oid = hashlib.sha256(LARGE).hexdigest()
    storage = f"{hub.url}/storage/models/{NAME}/{oid}?signature=".replace(
        "127.0.0.1", "localhost"
    )
    signed = storage + signature(oid)

    assert send(signed, LARGE, {"Authorization": f"Bearer {TOKEN}"}, "PUT") == 400
    assert send(storage + "none", LARGE, {}, "PUT") == 400
    assert send(signed.replace("localhost", "127.0.0.1"), LARGE, {}, "PUT") == 400
    assert send(signed, LARGE[:-1], {}, "PUT") == 400
    assert not repository.object_path(oid).exists()
    assert send(signed, LARGE, {}, "PUT") == 200
    assert repository.object_path(oid).read_bytes() == LARGE


def test_git_object_id_is_that_of_git(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(LARGE)
    completed = subprocess.run(
        ["git", "hash-object", tmp_path / "file"],
        check=True,
        capture_output=True,
        text=True,
    )

    assert git_oid(LARGE) == completed.stdout.strip()
