"""`finetune ask` and `finetune chat` on a cluster: the API server's proxy leads to the pipeline's Service."""

import threading
from http.server import ThreadingHTTPServer

import pytest
from support.cli.fake_model_server import TALK, Handler

PROXY = "/api/v1/namespaces/team/services/demo-deploy:80/proxy"


@pytest.fixture
def served(cli, scenario):
    """A pipeline with a server, whose model was trained on conversations."""
    scenario.finish(prepare=TALK, deploy={"longRunning": True})
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    cli.api.service_port = server.server_address[1]
    yield
    server.shutdown()
    server.server_close()


def test_deployed_server_is_asked_through_the_api_server(cli, served):
    result = cli.run("ask", "demo", "Why not?")
    assert (result.code, result.err) == (0, "")
    assert result.out.strip() == "/v1/chat/completions Why not? []"
    assert cli.api.requests[-2:] == [
        f"GET {PROXY}/v1/models",
        f"POST {PROXY}/v1/chat/completions",
    ]


def test_chat_on_a_cluster_keeps_the_conversation(cli, served, type_lines):
    type_lines("Hi", "Bye")
    out = cli.run("chat", "demo", "-n", "team").out.splitlines()
    assert "/v1/chat/completions Bye ['Hi', '" in out[1]


def test_base_model_is_not_on_the_cluster(cli, served):
    result = cli.run("ask", "demo", "Why?", "--base")
    assert result.code == 2
    assert "--base is for a run on this machine" in result.err


def test_pipeline_without_a_server_names_the_fix(cli, scenario):
    result = cli.run("ask", "demo", "Why?")
    assert result.code == 2
    assert "team/demo serves no model: wait until its stage deploy" in result.err


def test_missing_right_to_the_proxy_names_the_role(cli, served):
    cli.api.forbidden.add(("get", "services/proxy"))
    result = cli.run("ask", "demo", "Why?")
    assert result.code == 1
    assert "may not get services/proxy in the namespace team" in result.err
    assert "ClusterRole edit allows it" in result.err


def test_get_names_the_command_that_asks(cli, served):
    assert "ask: finetune ask demo -n team Hello" in cli.run("get", "demo").out
