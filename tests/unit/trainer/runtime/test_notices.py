"""Notices from metadata endpoints: local servers answer as the servers of the clouds."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path

import pytest
from support.trainer.metadata_servers import MetadataServer, metadata_server

from finetune_trainer.contract import Environment
from finetune_trainer.runtime.machine import notices
from finetune_trainer.runtime.machine.notices import Azure, Ec2, Gce, watch_notices

Served = tuple[MetadataServer, str]
TERMINATE = {"action": "terminate", "time": "2030-01-01T08:22:00Z"}
PREEMPT = {
    "EventId": "1",
    "EventType": "Preempt",
    "ResourceType": "VirtualMachine",
    "Resources": ["trainer_0"],
    "EventStatus": "Scheduled",
    "NotBefore": "Tue, 01 Jan 2030 08:22:00 GMT",
}
VALUES = {
    "EC2": (Ec2.ACTION, TERMINATE, "EC2 announces terminate at 2030-01-01T08:22:00Z"),
    "GCE": (Gce.PATH, "TRUE", "GCE announces preemption"),
    "Azure": (
        "/metadata/scheduledevents",
        {"Events": [PREEMPT]},
        "Azure announces Preempt at Tue, 01 Jan 2030 08:22:00 GMT",
    ),
}


@pytest.fixture
def ec2() -> Iterator[Served]:
    with metadata_server("EC2") as served:
        yield served


@pytest.fixture
def gce() -> Iterator[Served]:
    with metadata_server("GCE") as served:
        served[0].set(Gce.PATH, "FALSE")
        yield served


@pytest.fixture
def azure() -> Iterator[Served]:
    with metadata_server("Azure") as served:
        served[0].set(
            "/metadata/scheduledevents", {"DocumentIncarnation": 1, "Events": []}
        )
        served[0].set("/metadata/instance/compute/name", "trainer_0")
        yield served


def texts(endpoint: notices.Endpoint) -> list[str]:
    return [str(notice) for notice in endpoint.poll()]


def test_ec2_without_a_notice_gives_none(ec2: Served) -> None:
    assert texts(Ec2(ec2[1])) == []
    assert len(ec2[0].tokens) == 1


def test_ec2_gives_interruption_and_recommendation(ec2: Served) -> None:
    endpoint = Ec2(ec2[1])
    ec2[0].set(Ec2.REBALANCE, {"noticeTime": "2030-01-01T08:00:00Z"})
    assert texts(endpoint) == [
        "EC2 announces a rebalance recommendation at 2030-01-01T08:00:00Z"
    ]
    ec2[0].set(Ec2.ACTION, TERMINATE)
    assert texts(endpoint)[0] == "EC2 announces terminate at 2030-01-01T08:22:00Z"


def test_expired_ec2_token_is_replaced(ec2: Served) -> None:
    endpoint = Ec2(ec2[1])
    assert texts(endpoint) == []
    ec2[0].tokens.clear()
    ec2[0].set(Ec2.ACTION, TERMINATE)
    assert len(texts(endpoint)) == 1
    assert len(ec2[0].tokens) == 1


def test_gce_waits_until_the_preemption(gce: Served) -> None:
    endpoint = Gce(gce[1])
    assert texts(endpoint) == []
    began = time.monotonic()
    threading.Timer(0.3, gce[0].set, (Gce.PATH, "TRUE")).start()
    assert texts(endpoint) == ["GCE announces preemption"]
    assert 0.2 < time.monotonic() - began < 10
    assert len(gce[0].requests) == 2


def test_gce_answer_of_another_server_is_refused(gce: Served) -> None:
    gce[0].flavor = "Elsewhere"
    gce[0].set(Gce.PATH, "TRUE")
    with pytest.raises(ValueError, match="lacks the header Metadata-Flavor: Google"):
        texts(Gce(gce[1]))


def test_gce_wait_ends_without_a_change(
    gce: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gce, "WAIT_SECONDS", 0.2)
    endpoint = Gce(gce[1])
    assert texts(endpoint) == texts(endpoint) == []


@pytest.mark.parametrize("kind", sorted(Azure.EVENTS))
def test_azure_event_of_this_machine_is_a_notice(azure: Served, kind: str) -> None:
    azure[0].set(
        "/metadata/scheduledevents", {"Events": [{**PREEMPT, "EventType": kind}]}
    )
    assert texts(Azure(azure[1])) == [
        f"Azure announces {kind} at Tue, 01 Jan 2030 08:22:00 GMT"
    ]


@pytest.mark.parametrize(
    "change", [{"Resources": ["trainer_1"]}, {"EventType": "Other"}], ids=str
)
def test_azure_event_of_another_kind_or_machine_is_none(
    azure: Served, change: dict[str, object]
) -> None:
    azure[0].set("/metadata/scheduledevents", {"Events": [{**PREEMPT, **change}]})
    assert texts(Azure(azure[1])) == []


def test_azure_event_counts_if_the_own_name_is_unknown(azure: Served) -> None:
    azure[0].values.pop("/metadata/instance/compute/name")
    azure[0].set("/metadata/scheduledevents", {"Events": [PREEMPT, "nonsense"]})
    assert len(texts(Azure(azure[1]))) == 1


@contextmanager
def watched(
    cloud: str, base: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[str]]:
    """Watch an endpoint every 10 ms; yield the list to which its notices are appended."""
    monkeypatch.setattr(notices, "POLL_SECONDS", 0.01)
    environment = Environment(
        Path("/workspace"), interruption_notices=cloud, metadata_endpoint=base
    )
    passed_on: list[str] = []
    with watch_notices(environment, passed_on.append):
        yield passed_on
    # A thread that outlives its endpoint would log into the output of the next test.
    for thread in threading.enumerate():
        if thread.name == "notices":
            thread.join(10)


def until_polled(served: MetadataServer, times: int) -> None:
    """Wait until the endpoint got so many more requests."""
    wanted = len(served.requests) + times
    deadline = time.monotonic() + 20
    while len(served.requests) < wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(served.requests) >= wanted


@pytest.mark.parametrize("cloud", VALUES)
def test_each_notice_is_passed_on_once(
    cloud: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, value, text = VALUES[cloud]
    monkeypatch.setattr(Gce, "WAIT_SECONDS", 0.05)
    with (
        metadata_server(cloud) as (served, base),
        watched(cloud, base, monkeypatch) as passed_on,
    ):
        until_polled(served, 4)
        assert passed_on == []
        served.set(path, value)
        until_polled(served, 12)
        assert passed_on == [text]


@contextmanager
def answering(served: MetadataServer, status: int) -> Iterator[None]:
    """Set the status with which the endpoint answers everything."""
    served.status = status
    yield


@pytest.mark.parametrize("cloud", VALUES)
@pytest.mark.parametrize("status", [200, 403, 404, 500, 302])
def test_nonsense_is_logged_once_and_watching_goes_on(
    cloud: str,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, value, text = VALUES[cloud]
    monkeypatch.setattr(Gce, "WAIT_SECONDS", 0.05)
    with (
        metadata_server(cloud) as (served, base),
        answering(served, status),
        watched(cloud, base, monkeypatch) as passed_on,
    ):
        until_polled(served, 6)
        assert passed_on == []
        served.set(path, value)
        served.status = 0
        until_polled(served, 12)
        assert passed_on == [text]
        assert (
            capsys.readouterr().out.count("the metadata endpoint cannot be read") == 1
        )


def test_silent_endpoint_is_given_up_within_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        notices.fetch, "__kwdefaults__", {"method": "GET", "seconds": 0.1}
    )
    with socket.create_server(("127.0.0.1", 0)) as mute:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            Ec2(f"http://127.0.0.1:{mute.getsockname()[1]}").poll()
        assert time.monotonic() - began < 2


def test_absent_endpoint_raises_an_error_that_is_caught() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        base = f"http://127.0.0.1:{closed.getsockname()[1]}"
    for endpoint in (Ec2, Gce, Azure):
        with pytest.raises((OSError, HTTPException)):
            endpoint(base).poll()


def test_no_proxy_is_used(ec2: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert texts(Ec2(ec2[1])) == []


def test_hostile_text_becomes_one_short_line(ec2: Served) -> None:
    ec2[0].set(
        Ec2.ACTION,
        {
            "action": "stop\n\x1b[2J" + "x" * 500,
            "time": ["a"],
        },
    )
    (text,) = texts(Ec2(ec2[1]))
    assert text.startswith("EC2 announces stop[2Jxxx")
    assert text.endswith(" at ['a']")
    assert len(text) < 100


def test_no_cloud_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    with watched("", "http://127.0.0.1:1", monkeypatch) as passed_on:
        assert passed_on == []
        assert threading.active_count() == before


def test_unknown_cloud_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match="FINETUNE_INTERRUPTION_NOTICES must be one of EC2, GCE, Azure, or empty",
    ):
        Environment.read(
            {"FINETUNE_WORKSPACE": "/w", "FINETUNE_INTERRUPTION_NOTICES": "ec2"}
        )
