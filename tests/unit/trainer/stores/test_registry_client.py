"""Requests to a registry that is unavailable, and credentials that belong to one host."""

import time

import pytest
import requests

from finetune_trainer.runtime.errors import Interrupted, ServiceUnavailable
from finetune_trainer.stop_signal import stop
from finetune_trainer.stores.oci import client as registry_client
from finetune_trainer.stores.oci.client import Outage, RegistryClient, Unavailable
from finetune_trainer.stores.oci.image import parse_name

URI = "oci://registry.test/model"
DATE = "Sun, 22 Nov 2026 16:00:00 GMT"


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7),
        ("Sun, 22 Nov 2026 16:00:05 GMT", 5),
        ("Sun, 22 Nov 2026 15:00:00 GMT", 0),
        ("soon", None),
        ("", None),
    ],
)
def test_retry_after_is_a_number_or_a_date(value: str, seconds: float | None):
    response = requests.Response()
    response.headers.update({"Retry-After": value, "Date": DATE})
    assert registry_client._retry_after(response) == seconds


def test_pause_beyond_the_limit_is_an_outage_at_once():
    started = time.monotonic()
    with pytest.raises(ServiceUnavailable, match=rf"{URI}: .*: busy; retry later"):
        Outage(URI).wait(Unavailable("busy", 3600))
    assert time.monotonic() - started < 1


def test_stop_ends_a_pause(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stop, "requested", True)
    started = time.monotonic()
    with pytest.raises(Interrupted):
        Outage(URI).wait(Unavailable("busy", 30))
    assert time.monotonic() - started < 1


@pytest.mark.parametrize(
    ("url", "header"),
    [
        ("https://registry.test/v2/model/blobs/uploads/1", "Bearer token"),
        ("http://registry.test/v2/", None),
        ("https://registry.test:444/v2/", None),
        ("https://storage.test/upload", None),
    ],
)
def test_credentials_are_sent_to_their_registry_only(url: str, header: str | None):
    client = RegistryClient(URI, parse_name(URI))
    client._authorization.header = "Bearer token"
    request = requests.Request(
        "PUT", url, headers={"Authorization": "of a .netrc file"}
    ).prepare()
    assert client._authorize(request).headers.get("Authorization") == header
