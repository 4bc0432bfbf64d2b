"""Registries that ask for credentials, use an own authority, refuse or are gone."""

import json
import time
from pathlib import Path

import pytest
from support.stores.registry_images import REPOSITORY, publish, unpacked
from support.stores.registry_login import login, require_password, require_tokens
from support.stores.registry_proxy import Fault, RegistryProxy, serve_proxy
from support.stores.registry_server import RegistryServer, serve_registry
from support.stores.sealed_model import SealedModel

from finetune_trainer.runtime.errors import (
    ConfigInvalid,
    CredentialsRejected,
    ServiceUnavailable,
    SourceNotFound,
)
from finetune_trainer.stores.oci.store import RegistryTarget
from testcluster.linux_namespaces.certificates import Authority


def test_password_is_needed_and_accepted(
    registry: RegistryServer,
    proxy: RegistryProxy,
    model: SealedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    require_password(proxy)
    with pytest.raises(CredentialsRejected, match="requires credentials"):
        publish(proxy.host, model)
    monkeypatch.setenv(
        "DOCKER_CONFIG", str(login(tmp_path / "wrong", proxy.host, "wrong"))
    )
    with pytest.raises(
        CredentialsRejected, match="refuses GET: status 401: UNAUTHORIZED"
    ):
        publish(proxy.host, model)
    assert registry.tags(REPOSITORY) == []
    monkeypatch.setenv("DOCKER_CONFIG", str(login(tmp_path / "right", proxy.host)))
    assert publish(proxy.host, model).sent_bytes == model.size
    assert unpacked(registry)["models/a/b.txt"] == model.contents["a/b.txt"]


def test_tokens_are_needed_and_accepted(
    registry: RegistryServer,
    proxy: RegistryProxy,
    model: SealedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    tokens = require_tokens(proxy)
    monkeypatch.setenv(
        "DOCKER_CONFIG", str(login(tmp_path / "wrong", proxy.host, "wrong"))
    )
    with pytest.raises(CredentialsRejected, match="refuses a token: status 401"):
        publish(proxy.host, model)
    monkeypatch.setenv("DOCKER_CONFIG", str(login(tmp_path / "right", proxy.host)))
    assert publish(proxy.host, model).sent_bytes == model.size
    assert tokens.scopes == [
        f"repository:{REPOSITORY}:{actions}" for actions in ("pull", "pull,push")
    ]
    assert unpacked(registry)["models/a/b.txt"] == model.contents["a/b.txt"]


def test_expired_token_is_renewed(
    proxy: RegistryProxy,
    model: SealedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    tokens = require_tokens(proxy)
    monkeypatch.setenv("DOCKER_CONFIG", str(login(tmp_path / "right", proxy.host)))
    target = RegistryTarget(f"oci://{proxy.host}/{REPOSITORY}")
    target.publish(model.folder, model.digest, model.names)
    tokens.expired = {"0", "1"}
    assert target.publish(model.folder, model.digest, model.names).sent_bytes == 0
    assert len(tokens.scopes) == 3


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"])
def test_authority_of_the_registry_is_configurable(
    model: SealedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
):
    monkeypatch.setattr("finetune_trainer.stores.oci.credentials.LOOPBACK", frozenset())
    for other in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(other, raising=False)
    authority = Authority(tmp_path / "ca")
    with serve_registry(
        tmp_path / "registry",
        authority.issue("registry", "test", serves=("127.0.0.1",)),
    ) as registry:
        with pytest.raises(
            ConfigInvalid, match=r"CERTIFICATE_VERIFY_FAILED.*set SSL_CERT_FILE"
        ):
            publish(registry.host, model)
        monkeypatch.setenv(variable, str(authority.pair.certificate))
        assert publish(registry.host, model).sent_bytes == model.size


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (403, CredentialsRejected),
        (404, SourceNotFound),
        (400, ConfigInvalid),
        (405, ConfigInvalid),
    ],
)
def test_refused_upload_ends_with_its_error(
    registry: RegistryServer,
    proxy: RegistryProxy,
    model: SealedModel,
    status: int,
    error: type[Exception],
):
    body = json.dumps(
        {"errors": [{"code": "THE_CODE", "message": "the message"}]}
    ).encode()
    proxy.fault = lambda method, _: (
        Fault(status, body=body) if method == "POST" else None
    )
    with pytest.raises(
        error, match=rf"oci://{proxy.host}.*{status}: THE_CODE the message"
    ):
        publish(proxy.host, model)
    assert registry.tags(REPOSITORY) == []


@pytest.mark.usefixtures("short_outages")
def test_registry_that_is_gone_is_unavailable(
    registry: RegistryServer, model: SealedModel
):
    registry.stop()
    started = time.monotonic()
    with pytest.raises(
        ServiceUnavailable, match=rf"oci://{registry.host}/.*Connection refused"
    ):
        publish(registry.host, model)
    assert time.monotonic() - started < 10


def test_short_outage_is_survived(registry: RegistryServer, model: SealedModel):
    with serve_proxy(registry.host) as proxy:
        proxy.fault = lambda method, _: (
            Fault(503)
            if method in {"PUT", "HEAD"} and proxy.count(method) in {1, 2, 9}
            else None
        )
        assert publish(proxy.host, model).sent_bytes == model.size
    assert unpacked(registry)["models/config.json"] == model.contents["config.json"]


def test_busy_registry_is_asked_again_when_it_says(
    proxy: RegistryProxy, model: SealedModel
):
    moments = []

    def fault(method: str, _path: str) -> Fault | None:
        moments.append(time.monotonic())
        return Fault(429, {"Retry-After": "2"}) if len(moments) == 1 else None

    proxy.fault = fault
    publish(proxy.host, model)
    assert moments[1] - moments[0] >= 2
