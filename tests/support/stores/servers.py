"""Object stores on this machine: versitygw for S3; Azurite and fake-gcs-server in the slow lane."""

import base64
import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path

import requests
from support.programs import installed, missing, program

BUCKET = "bucket"
AZURITE = "azurite@3.37.0"
LOOPBACK = "127.0.0.1"
START_SECONDS = 60


@dataclass(frozen=True)
class ObjectServer:
    """A running server with an empty bucket."""

    scheme: str
    environment: Mapping[str, str]
    """Variables with which a client reaches it."""
    wrong_keys: tuple[Mapping[str, str], ...]
    """Variables of which each makes the credentials wrong; none if the server accepts all."""
    gone: Mapping[str, str]
    """Variables with which a client finds no server."""
    folder: Path | None = None
    """The server's own folder of unfinished uploads, if it has one."""

    def uri(self, key: str) -> str:
        """Return the URI of a key in the bucket."""
        return f"{self.scheme}://{BUCKET}/{key}"


@contextmanager
def s3(folder: Path, address: str = LOOPBACK) -> Iterator[ObjectServer]:
    """Run versitygw with its objects in a folder, on an address of this machine."""
    port = free_port()
    (folder / BUCKET).mkdir()
    keys = {"ROOT_ACCESS_KEY": "test-key", "ROOT_SECRET_KEY": "test-secret"}
    command = [
        program("versitygw"),
        "--quiet",
        "--port",
        f"{address}:{port}",
        "posix",
        str(folder),
    ]
    environment = {
        "AWS_ACCESS_KEY_ID": keys["ROOT_ACCESS_KEY"],
        "AWS_SECRET_ACCESS_KEY": keys["ROOT_SECRET_KEY"],
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{address}:{port}",
    }
    wrong = (
        {"AWS_SECRET_ACCESS_KEY": "other"},
        {"AWS_ACCESS_KEY_ID": "other"},
        {"AWS_ACCESS_KEY_ID": ""},
    )
    gone = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}"}
    with running(command, port, keys, address):
        yield ObjectServer("s3", environment, wrong, gone, folder / BUCKET / ".sgwtmp")


@contextmanager
def azure(folder: Path) -> Iterator[ObjectServer]:
    """Run Azurite with its blobs in a folder."""
    port = free_port()
    secret = base64.b64encode(b"test-secret").decode()
    command = [
        azurite(),
        "--silent",
        "--skipApiVersionCheck",
        "--blobPort",
        str(port),
        "--location",
        str(folder),
    ]
    environment = {
        "AZURE_STORAGE_ACCOUNT_NAME": "test",
        "AZURE_STORAGE_ACCOUNT_KEY": secret,
        "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/test",
    }
    wrong = ({"AZURE_STORAGE_ACCOUNT_KEY": base64.b64encode(b"other").decode()},)
    gone = {"AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{free_port()}/test"}
    with running(command, port, {"AZURITE_ACCOUNTS": f"test:{secret}"}):
        create_container(environment["AZURE_STORAGE_ENDPOINT"], secret)
        yield ObjectServer("az", environment, wrong, gone)


@contextmanager
def google(_folder: Path) -> Iterator[ObjectServer]:
    """Run fake-gcs-server with its objects in memory; it accepts all credentials."""
    port = free_port()
    environment = {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}"}
    gone = {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{free_port()}"}
    with running([program("fake-gcs-server"), str(port), BUCKET], port, {}):
        yield ObjectServer("gs", environment, (), gone)


SERVERS = {"s3": s3, "az": azure, "gs": google}


@contextmanager
def running(
    command: list[str],
    port: int,
    environment: Mapping[str, str],
    address: str = LOOPBACK,
    log: Path | None = None,
) -> Iterator[None]:
    """Run a server until the end of the block; wait until it accepts connections. Its output may go to a file."""
    with (
        log.open("wb") if log else nullcontext() as output,
        subprocess.Popen(
            command, env=os.environ | environment, stdout=output, stderr=output
        ) as process,
    ):
        try:
            deadline = time.monotonic() + START_SECONDS
            while not accepts(port, address):
                assert process.poll() is None, (
                    f"{command[0]} has ended with {process.returncode}"
                )
                assert time.monotonic() < deadline, (
                    f"{command[0]} does not accept connections"
                )
                time.sleep(0.05)
            yield
        finally:
            process.kill()


def accepts(port: int, address: str = LOOPBACK) -> bool:
    """Return whether a server accepts connections on the port."""
    with socket.socket() as client:
        return client.connect_ex((address, port)) == 0


def free_port() -> int:
    """Return a port on which no server listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def azurite() -> str:
    """Return the path of Azurite; install it with npm if it is missing."""
    return str(
        installed(AZURITE, _install_azurite) / "node_modules" / ".bin" / "azurite-blob"
    )


def _install_azurite(folder: Path) -> None:
    if not shutil.which("npm"):
        missing(
            f"{AZURITE} needs npm: install it, on Debian with `apt-get install npm`"
        )
    subprocess.run(
        [
            "npm",
            "install",
            "--silent",
            "--no-audit",
            "--no-fund",
            "--prefix",
            folder,
            AZURITE,
        ],
        check=True,
    )


def create_container(endpoint: str, secret: str) -> None:
    """Create the bucket of an Azure account, with a request that is signed by hand: obstore creates none."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    lines = [f"{name}:{value}" for name, value in sorted(headers.items())]
    text = "\n".join(
        ["PUT", *[""] * 11, *lines, f"/test/test/{BUCKET}", "restype:container"]
    )
    signature = base64.b64encode(
        hmac.new(base64.b64decode(secret), text.encode(), hashlib.sha256).digest()
    ).decode()
    headers["Authorization"] = f"SharedKey test:{signature}"
    url = f"{endpoint}/{BUCKET}?restype=container"
    requests.put(url, headers=headers, timeout=START_SECONDS).raise_for_status()
