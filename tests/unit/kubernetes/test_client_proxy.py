"""The proxy between the client and the API server."""

import pytest
from kubernetes.aio.client import Configuration

from finetune_operator.kubernetes.configuration import environment_proxy, set_proxy


def test_password_of_a_proxy_is_not_in_its_url():
    settings = Configuration()
    set_proxy(settings, "http://user:p%40ss@proxy:3128")
    assert settings.proxy == "http://proxy:3128"
    assert settings.proxy_headers == {"Proxy-Authorization": "Basic dXNlcjpwQHNz"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"HTTPS_PROXY": "http://proxy:3128"}, "http://proxy:3128"),
        ({"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "api.example"}, None),
        ({"HTTP_PROXY": "http://proxy:3128"}, None),
    ],
)
def test_proxy_of_the_environment_is_used(environment, expected, monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert environment_proxy("https://api.example:6443") == expected
