"""Credentials for OCI registries, from Docker's config.json."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import requests

from finetune_trainer.runtime.errors import CredentialsRejected
from finetune_trainer.stores.oci.credentials import (
    Authorization,
    is_plain,
    read_credentials,
)


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


YES = encoded("user:yes")
NO = encoded("user:no")
TOKEN = requests.Response()
TOKEN.status_code = 200
TOKEN._content = b'{"token": "abc"}'


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file config.json, which does not exist yet."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    return tmp_path / "config.json"


def test_missing_file_has_no_credentials(config: Path):
    assert read_credentials("host/team/model") is None


@pytest.mark.parametrize(
    "name",
    [
        "host:5000",
        "https://host:5000",
        "https://host:5000/v1/",
        "host:5000/",
        "host:5000/team",
        "host:5000/team/model",
    ],
)
def test_entry_of_a_host_or_path_is_found(config: Path, name: str):
    config.write_text(
        json.dumps(
            {
                "auths": {
                    "host": {"auth": NO},
                    name: {"auth": YES},
                }
            }
        )
    )
    assert read_credentials("host:5000/team/model") == YES


@pytest.mark.parametrize(
    "name", ["host", "host:50", "host:5000/team/mod", "other/host:5000"]
)
def test_entry_of_another_place_is_not_used(config: Path, name: str):
    config.write_text(json.dumps({"auths": {name: {"auth": NO}}}))
    assert read_credentials("host:5000/team/model") is None


def test_longest_entry_wins(config: Path):
    config.write_text(
        json.dumps(
            {
                "auths": {
                    "host/team": {"auth": YES},
                    "https://host/v1/": {"auth": NO},
                }
            }
        )
    )
    assert read_credentials("host/team/model") == YES
    assert read_credentials("host/other/model") == NO


def test_entry_of_docker_hub_is_found(config: Path):
    config.write_text(
        json.dumps({"auths": {"https://index.docker.io/v1/": {"auth": YES}}})
    )
    assert read_credentials("docker.io/team/model") == YES


def test_user_and_password_are_encoded(config: Path):
    config.write_text(
        json.dumps({"auths": {"host": {"username": "user", "password": "pass:word"}}})
    )
    assert read_credentials("host/model") == encoded("user:pass:word")


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"auths": {"host": "text"}}', '{"auths": 3}']
)
def test_file_that_cannot_be_read_is_named(config: Path, content: str):
    config.write_text(content)
    with pytest.raises(
        CredentialsRejected, match=rf"{config} is not a \.dockerconfigjson"
    ):
        read_credentials("host/model")


def test_plain_http_is_for_this_machine_and_named_hosts(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("FINETUNE_INSECURE_REGISTRIES", "zot.test:5000, other.test")
    plain = [
        "localhost",
        "localhost:5000",
        "127.0.0.1:80",
        "[::1]:5000",
        "zot.test:5000",
        "other.test",
    ]
    assert [host for host in plain if not is_plain(host)] == []
    tls = ["zot.test", "other.test:5000", "localhost.test", "host", ""]
    assert [host for host in tls if is_plain(host)] == []


def no_token(*_arguments: object) -> requests.Response:
    raise AssertionError("asked for a token")


@pytest.mark.parametrize("realm", ["http://tokens.test/", "", "ftp://tokens.test"])
def test_credentials_are_not_sent_without_tls(config: Path, realm: str):
    config.write_text(json.dumps({"auths": {"host.test": {"auth": YES}}}))
    authorization = Authorization("host.test", "model")
    with pytest.raises(CredentialsRejected, match="is not https"):
        authorization.answer(f'Bearer realm="{realm}",service="s"', None, no_token)
    assert authorization.header is None


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b"<html>"])
def test_answer_without_a_token_is_a_refusal(config: Path, body: bytes):
    response = requests.Response()
    response.status_code = 200
    response._content = body
    with pytest.raises(
        CredentialsRejected, match=r"https://tokens\.test/ refuses a token: status 200"
    ):
        Authorization("host.test", "model").answer(
            'Bearer realm="https://tokens.test/"', None, lambda *_: response
        )


def test_anonymous_token_needs_no_credentials(config: Path):
    response = requests.Response()
    response.status_code = 200
    response._content = b'{"access_token": "abc"}'
    authorization = Authorization("host.test", "model")
    challenge = 'Bearer realm="https://tokens.test/",service="s",scope="repository:model:pull",error="x"'
    asked = []

    def answer(*request: object) -> requests.Response:
        asked.append(request)
        return response

    authorization.answer(challenge, None, answer)
    assert authorization.header == "Bearer abc"
    assert asked == [
        (
            "https://tokens.test/",
            {"service": "s", "scope": "repository:model:pull"},
            None,
        )
    ]


@pytest.mark.parametrize(
    "auth", [f"{YES[:4]}\n{YES[4:]}", f"{YES}\n", f" {YES[:8]}\r\n {YES[8:]}"]
)
def test_wrapped_base64_is_accepted(config: Path, auth: str):
    config.write_text(json.dumps({"auths": {"host": {"auth": auth}}}))
    assert read_credentials("host/model") == YES


@pytest.mark.parametrize(
    "auth", ["user:password", YES.rstrip("=") + "é", YES[:-1], f"{YES}\0"]
)
def test_auth_that_is_not_base64_is_refused_unseen(config: Path, auth: str):
    config.write_text(json.dumps({"auths": {"host": {"auth": auth}}}))
    with pytest.raises(
        CredentialsRejected, match="the entry host has an auth that is not base64"
    ) as error:
        read_credentials("host/model")
    assert auth[:6] not in str(error.value)


def asked_with(registry: str, realm: str) -> list[str | None]:
    """Return the headers that a server of tokens has got from a registry's client."""
    headers: list[str | None] = []
    authorization = Authorization(registry, "model")

    def answer(*request: Any) -> requests.Response:
        headers.append(request[2])
        return TOKEN

    authorization.answer(f'Bearer realm="{realm}"', None, answer)
    return headers


@pytest.mark.parametrize(
    ("registry", "realm"),
    [
        ("registry.example.com", "https://registry.example.com/token"),
        ("registry.example.com:5000", "https://registry.example.com/token"),
        ("registry.example.com", "https://auth.example.com/token"),
        ("registry.example.com", "https://example.com/token"),
        ("docker.io", "https://auth.docker.io/token"),
        ("127.0.0.1:5000", "http://127.0.0.1:5001/token"),
        ("[::1]:5000", "http://[::1]:5001/token"),
        ("localhost:5000", "http://localhost/token"),
    ],
)
def test_server_of_the_registrys_domain_gets_credentials(
    config: Path, registry: str, realm: str
):
    config.write_text(json.dumps({"auths": {registry: {"auth": YES}}}))
    assert asked_with(registry, realm) == [f"Basic {YES}"]


FOREIGN = [
    ("registry.example.com", "https://evil.example/token"),
    ("registry.example.com", "https://notexample.com/token"),
    ("registry.example.com", "https://registry.example.com.evil.example/token"),
    ("docker.io", "https://evil.io/token"),
    ("registry", "https://evil.registry/token"),
    ("10.0.0.1", "https://9.0.0.1/token"),
    ("10.0.0.1", "https://evil.10.0.0.1/token"),
    ("localhost:5000", "http://evil.example/token"),
]


@pytest.mark.parametrize(("registry", "realm"), FOREIGN)
def test_server_of_another_domain_gets_no_credentials(
    config: Path, registry: str, realm: str
):
    config.write_text(json.dumps({"auths": {registry: {"auth": YES}}}))
    authorization = Authorization(registry, "model")
    with pytest.raises(
        CredentialsRejected,
        match=rf"which is of another domain; .* add an entry for .* to {config}",
    ):
        authorization.answer(f'Bearer realm="{realm}"', None, no_token)


@pytest.mark.parametrize("between", ["\\@", "@", "\\"])
def test_server_with_an_ambiguous_host_is_refused(config: Path, between: str):
    """For `evil\\@host`, urllib finds the host behind the sign, and urllib3 the one before it."""
    config.write_text(json.dumps({"auths": {"host.test": {"auth": YES}}}))
    for realm in (
        f"https://host.test{between}evil.test/",
        f"https://evil.test{between}host.test/",
    ):
        with pytest.raises(CredentialsRejected, match="is not https"):
            Authorization("host.test", "model").answer(
                f'Bearer realm="{realm}"', None, no_token
            )


def test_server_of_another_domain_gets_its_own_credentials(config: Path):
    own = {
        "registry.example.com": {"auth": NO},
        "evil.example": {"auth": YES},
    }
    config.write_text(json.dumps({"auths": own}))
    assert asked_with("registry.example.com", "https://evil.example/token") == [
        f"Basic {YES}"
    ]


def test_anonymous_token_is_asked_of_any_domain(config: Path):
    assert asked_with("registry.example.com", "https://evil.example/token") == [None]
