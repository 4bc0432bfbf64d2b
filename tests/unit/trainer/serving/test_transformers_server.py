"""The server of the engine Transformers lists its model and refuses conversations that it cannot write."""

import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.trainer.evaluation import make_chat_model

from finetune_cli.conversation import ModelConversation
from finetune_cli.local.serving.model_server import LocalEndpoint
from finetune_trainer.contract.engines import ALL_ADDRESSES, ENGINES
from finetune_trainer.serving.server import Server, serving
from finetune_trainer.stop_signal import stop

STRICT = (
    "{% if messages[0].role != 'user' %}{{ raise_exception('begin with the user') }}{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
)


def serve(folder: Path, name: str) -> Iterator[Server]:
    with (
        pytest.MonkeyPatch.context() as patch,
        stop.deferred(),
    ):
        # As in a pod, where no cache of the hub exists.
        patch.setenv("HF_HOME", str(folder / "no-cache"))
        log = folder.parent / f"{name}.log"
        engine = ENGINES["Transformers"]
        with serving(engine, folder, stop, log, name=name) as server:
            yield server


@pytest.fixture(scope="module")
def plain(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A served model without a chat template."""
    folder = tmp_path_factory.mktemp("plain") / "tiny"
    folder.symlink_to(tiny_model)
    yield from serve(folder, "answers")


@pytest.fixture(scope="module")
def chat(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A served model with a chat template that refuses a conversation without a question."""
    folder = tmp_path_factory.mktemp("chat") / "tiny"
    yield from serve(make_chat_model(folder, tiny_model, STRICT), "support-bot")


def request(
    server: Server, path: str, body: dict[str, Any] | None = None
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    content = None if body is None else json.dumps(body)
    headers = {"Content-Type": "application/json"}
    connection.request("GET" if body is None else "POST", path, content, headers)
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def conversation_of(server: Server, *roles: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": role, "content": "Is it?"} for role in roles]
    return {"model": server.model, "messages": messages, "max_tokens": 2, **more}


def test_served_model_is_the_only_listed_model(plain: Server):
    status, models = request(plain, "/v1/models")
    assert (status, models["object"]) == (200, "list")
    assert [model["id"] for model in models["data"]] == ["answers"]
    assert request(plain, "/v1/models/answers") == (200, models["data"][0])
    assert request(plain, "/v1/models/another")[0] == 404


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_conversation_without_a_template_is_a_bad_request(plain: Server, path: str):
    status, answer = request(plain, path, conversation_of(plain, "user"))
    assert status == 400
    assert "has no chat template; send a text to /v1/completions" in str(answer)


def test_conversation_with_a_template_is_answered(chat: Server):
    path = "/v1/chat/completions"
    status, answer = request(chat, path, conversation_of(chat, "user"))
    assert status == 200
    assert isinstance(answer["choices"][0]["message"]["content"], str)


def test_streamed_answer_of_finetune_ask_is_the_whole_answer(chat: Server):
    conversation = ModelConversation("trained", LocalEndpoint(chat.port), True, 5)
    pieces = list(conversation.ask("Is it?"))
    body = conversation_of(chat, "user", max_tokens=5, temperature=0)
    _, answer = request(chat, "/v1/chat/completions", body)
    assert "".join(pieces) == answer["choices"][0]["message"]["content"]
    assert conversation.finish_reason in {"length", "stop"}


def test_finetune_ask_lets_a_model_without_template_continue(plain: Server):
    conversation = ModelConversation("base", LocalEndpoint(plain.port), True, 5)
    pieces = list(conversation.ask("Is it?"))
    body = {"model": plain.model, "prompt": "Is it?", "max_tokens": 5}
    _, answer = request(plain, "/v1/completions", {**body, "temperature": 0})
    assert "".join(pieces) == answer["choices"][0]["text"]


@pytest.mark.parametrize(
    ("roles", "changes", "expected"),
    [
        (["assistant"], {}, "refuses these messages: begin with the user"),
        ([], {}, "the request needs messages"),
        (["user"], {"messages": [{"content": "Is it?"}]}, "the request needs messages"),
        (["user"], {"messages": "Is it?"}, "the request needs messages"),
    ],
)
def test_messages_that_cannot_be_written_are_refused(
    chat: Server, roles: list[str], changes: dict[str, Any], expected: str
):
    body = conversation_of(chat, *roles, **changes)
    status, answer = request(chat, "/v1/chat/completions", body)
    assert status == 400
    assert expected in answer["error"]["message"]


def test_server_of_a_pod_listens_by_both_protocols(tiny_model: Path, tmp_path: Path):
    engine = ENGINES["Transformers"]
    folder = tmp_path / "tiny"
    folder.symlink_to(tiny_model)
    log = tmp_path / "log"
    addresses = ["127.0.0.1"]
    if socket.has_dualstack_ipv6():
        addresses.append("::1")
    with (
        stop.deferred(),
        serving(engine, folder, stop, log, host=ALL_ADDRESSES) as server,
    ):
        for address in addresses:
            with socket.create_connection((address, server.port), timeout=5):
                pass
