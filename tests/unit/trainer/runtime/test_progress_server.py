"""Clients that are idle, slow, many or gone do not mute the progress of a stage."""

import http.client
import json
import socket
import time
from contextlib import ExitStack

import pytest
from support.stores.servers import free_port

from finetune_trainer.contract import Environment
from finetune_trainer.runtime.progress import server as progress_server
from finetune_trainer.runtime.progress.progress import ProgressReporter

ADDRESSES = ["127.0.0.1"]
if socket.has_dualstack_ipv6():
    ADDRESSES.append("::1")
SOON = 2.0
"""Seconds for which the operator waits for an answer."""


@pytest.fixture
def port():
    return free_port()


@pytest.fixture(autouse=True)
def reporter(tmp_path, port):
    return ProgressReporter("train", Environment(tmp_path, metrics_port=port))


def answer(port, method, path, address="127.0.0.1"):
    connection = http.client.HTTPConnection(address, port, timeout=SOON)
    connection.request(method, path)
    response = connection.getresponse()
    return response.status, response.read()


def assert_answers(reporter, port):
    status, body = answer(port, "GET", "/progress")
    assert (status, json.loads(body)["stage"]) == (200, "train")
    status, body = answer(port, "GET", "/metrics")
    assert status == 200
    assert b"finetune_stage_step" in body
    assert answer(port, "POST", "/save")[0] == 202
    assert reporter.now.notice


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=5)


def test_idle_connection_keeps_nobody_waiting(reporter, port):
    with connect(port):
        assert_answers(reporter, port)


def test_client_that_sends_a_byte_at_a_time_keeps_nobody_waiting(reporter, port):
    with connect(port) as slow:
        for byte in b"GET /progress":
            slow.send(bytes([byte]))
        assert_answers(reporter, port)


def test_two_hundred_connections_keep_nobody_waiting(reporter, port):
    with ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(connect(port))
        assert_answers(reporter, port)


def test_connection_is_closed_when_it_is_old(port, monkeypatch):
    """So is a connection whose other side is gone: nothing ever comes from there."""
    monkeypatch.setattr(progress_server, "CONNECTION_SECONDS", 0.2)
    with connect(port) as idle:
        started = time.monotonic()
        idle.send(b"GET /progress")
        assert idle.recv(1) == b""
        assert time.monotonic() - started < 3


def test_client_that_breaks_off_logs_nothing(reporter, port, capfd):
    for _ in range(3):
        with connect(port) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            client.send(b"GET /metrics HTTP/1.1\r\n\r\n")
    assert_answers(reporter, port)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("address", ADDRESSES)
def test_progress_is_served_by_both_protocols(port, address):
    assert answer(port, "GET", "/progress", address)[0] == 200
