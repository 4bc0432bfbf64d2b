"""Stores: S3 and an OCI registry always; STORES=all adds Azure, Google, xet and MLflow.

`STORES=all python -m e2e tests/integration/stores` runs them. Azurite needs npm and 365 MB; fake-gcs-server is built
from Go, which takes about a minute. The CAS server of xet needs cargo (Rust 1.85) and 5 to 10 minutes, once.
"""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.stores import servers
from support.stores.registry_proxy import RegistryProxy, serve_proxy
from support.stores.registry_server import RegistryServer, serve_registry
from support.stores.sealed_model import SealedModel, make_model

from finetune_trainer.stores.objects import bucket as buckets
from finetune_trainer.stores.objects.bucket import locate_objects
from finetune_trainer.stores.objects.open_bucket import open_bucket

STORES = ("s3", "az", "gs") if os.environ.get("STORES") == "all" else ("s3",)


@pytest.fixture(scope="session", params=STORES)
def running_server(request, tmp_path_factory):
    with servers.SERVERS[request.param](
        tmp_path_factory.mktemp(request.param)
    ) as server:
        yield server


@pytest.fixture
def server(running_server, monkeypatch):
    """A server that the environment of this process names."""
    for name, value in running_server.environment.items():
        monkeypatch.setenv(name, value)
    return running_server


@pytest.fixture
def prefix(server):
    """A URI below which there is nothing."""
    return server.uri(f"team/{uuid.uuid4().hex[:8]}")


@pytest.fixture
def bucket(server):
    return open_bucket(locate_objects(server.uri("any")))


@pytest.fixture
def impatient(monkeypatch):
    """Clients that give a server up after 2 seconds."""
    monkeypatch.setattr(buckets, "RETRY_SECONDS", 2.0)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[RegistryServer]:
    """An empty registry that anonymous clients may write to."""
    with serve_registry(tmp_path / "registry") as server:
        yield server


@pytest.fixture
def proxy(registry: RegistryServer) -> Iterator[RegistryProxy]:
    with serve_proxy(registry.host) as server:
        yield server


@pytest.fixture
def model(tmp_path: Path) -> SealedModel:
    return make_model(tmp_path / "model")


@pytest.fixture(autouse=True)
def no_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the credentials of the user that runs the tests."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "no-docker"))


@pytest.fixture
def short_outages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat requests for two seconds instead of a minute."""
    monkeypatch.setattr("finetune_trainer.stores.oci.client.RETRY_SECONDS", 2.0)
