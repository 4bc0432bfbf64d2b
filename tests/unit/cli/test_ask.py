"""`finetune ask` and `finetune chat` on runs of this machine, with a server that has no model."""

import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.cli import fake_model_server
from support.cli.fake_model_server import TALK
from support.cli.recorded_runs import write_run
from support.operator.scenario import Scenario, a_pipeline, scores

from finetune_cli.chat import ask
from finetune_cli.local.serving import model_server, serving
from finetune_trainer.listening import free_port, listen_on_loopback

PROGRAM = (sys.executable, fake_model_server.__file__)
WITH_FAKE_SERVER = f"""
import signal, sys
from finetune_cli.local.serving import model_server, serving
# nohup and a shell's background ignore them for the tests, and for all processes of the tests.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
model_server.PROGRAM = serving.PROGRAM = {PROGRAM!r}
from finetune_cli.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def fake_server(monkeypatch):
    for module in (model_server, serving):
        monkeypatch.setattr(module, "PROGRAM", PROGRAM)


@pytest.fixture
def talker(cli):
    """A run `demo` whose model was trained on conversations; pvc://models is the folder models."""
    return record(cli, TALK)


def record(cli, prepare, **changes):
    scenario = Scenario(a_pipeline(**changes)).finish(prepare=prepare)
    run = write_run("demo", scenario.status, scenario.spec)
    (run / "claims").mkdir()
    (cli.folder / "models").mkdir()
    (run / "claims" / "models").symlink_to(cli.folder / "models")
    return run


def servers(folder):
    """Return the processes that serve a model below the folder."""
    processes = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = file.read_bytes()
        except OSError:
            continue
        if all(part.encode() in command for part in (PROGRAM[1], str(folder))):
            processes.append(file.parent.name)
    return processes


def start(folder, *arguments, **options):
    """Start a command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", WITH_FAKE_SERVER, *arguments],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_question_is_a_message_to_a_model_of_conversations(cli, talker):
    result = cli.run("ask", "demo", "Why not?")
    model = cli.folder / "models" / "demo"
    assert result.out.strip() == f"{model} /v1/chat/completions Why not? []"
    assert result.code == 0
    assert servers(cli.folder) == []


def test_question_is_continued_by_a_model_of_texts(cli):
    record(cli, {})
    out = cli.run("ask", "demo", "Why").out
    assert "/v1/completions Why []" in out


def test_base_model_answers_beside_the_trained_model(cli):
    record(cli, {**TALK, "modelPin": "abc123"})
    trained, base = cli.run("ask", "demo", "Why?", "--base").out.splitlines()
    assert trained.startswith(f"trained: {cli.folder}/models/demo /v1/chat")
    assert base.startswith("base: hf://org/base abc123 /v1/chat")
    assert servers(cli.folder) == []


def test_base_model_without_a_template_continues_the_question(cli):
    record(cli, TALK, model={"uri": "pvc://models/text"})
    base = cli.run("ask", "demo", "Why?", "--base").out.splitlines()[1]
    assert base.startswith(f"base: {cli.folder}/models/text /v1/completions Why?")


def test_answer_cannot_control_the_terminal(cli, talker):
    out = cli.run("ask", "demo", "be hostile").out
    assert out.strip() == r"\u001b]0;title\u0007\u001b[31mred\u202e"


def test_function_yields_the_answer_in_pieces(cli, talker):
    pieces = list(ask("demo", "Why not?"))
    assert len(pieces) > 3
    assert "Why not? []" in "".join(pieces)
    base = "".join(ask("demo", "Why not?", base=True))
    assert base.startswith("hf://org/base ")


def test_answer_at_the_limit_of_tokens_is_marked(cli, talker):
    result = cli.run("ask", "demo", "Why?", "--max-tokens", "8")
    assert result.err.strip() == "(trained: ended at --max-tokens 8)"
    assert cli.run("ask", "demo", "Why?", "--max-tokens", "0").code == 2


def test_server_that_ends_is_reported(cli):
    record(cli, {}, push={"targets": [{"uri": "pvc://models/demo"}]})
    broken = cli.folder / ".finetune/demo/claims/models"
    broken.unlink()
    (cli.folder / "broken").mkdir()
    broken.symlink_to(cli.folder / "broken")
    result = cli.run("ask", "demo", "Why?")
    assert result.code == 1
    assert "server has ended:\nthe weights are damaged" in result.err


def test_answer_that_breaks_off_is_an_error(cli, talker):
    result = cli.run("ask", "demo", "die")
    assert result.code == 1
    assert "ended before the end of its answer" in result.err


def test_refusal_of_the_server_is_reported(cli, talker):
    result = cli.run("ask", "demo", "be too long")
    assert result.code == 1
    assert "refuses the request: 4096 tokens are too many (HTTP 400)" in result.err


def test_run_without_a_merged_model_names_the_fix(cli):
    write_run("demo", Scenario().run("prepare").status)
    result = cli.run("ask", "demo", "Why?")
    assert result.code == 2
    assert "add a target of format Merged" in result.err


def test_chat_keeps_what_was_said_until_reset(cli, talker, type_lines):
    type_lines("Hi", "two\\", "lines", "/reset", " ", "Bye")
    result = cli.run("chat", "demo")
    first, second, third, last = result.out.strip().split("\n")
    assert first.endswith("/v1/chat/completions Hi [] ")
    assert second.endswith(" two")
    assert third.startswith("lines ['Hi', '")
    assert last.endswith("Bye []")
    assert result.code == 0


def test_ctrl_c_stops_an_answer_and_not_the_chat(cli, talker):
    chat = start(cli.folder, "chat", "demo")
    assert chat.stdin
    assert chat.stdout
    chat.stdin.write("be slow\n")
    chat.stdin.flush()
    assert chat.stdout.readline().startswith("loading the model")
    assert chat.stdout.read(4) == "one "
    chat.send_signal(signal.SIGINT)
    out, _ = chat.communicate("again\n", timeout=60)
    assert out.rstrip().endswith("again ['be slow', 'one ']")
    assert chat.returncode == 0
    assert servers(cli.folder) == []


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL]
)
def test_no_server_outlives_its_command(cli, talker, number):
    asked = start(cli.folder, "ask", "demo", "be slow")
    assert asked.stdout
    assert asked.stdout.read(4) == "one "
    assert servers(cli.folder)
    asked.send_signal(number)
    asked.communicate(timeout=60)
    wait_for(lambda: not servers(cli.folder))


def test_kept_server_answers_and_stays(cli, talker):
    port = free_port()
    kept = subprocess.Popen([*PROGRAM, "kept", "--port", str(port)])
    try:
        with serving._recorded(talker, port, "pvc://models/demo"):
            wait_for(lambda: serving.kept_server(talker, "pvc://models/demo"))
            assert cli.run("ask", "demo", "Why?").out.startswith("kept /v1/chat")
            assert serving.kept_server(talker, "pvc://models/other") is None
        assert cli.run("ask", "demo", "Why?").out.startswith(str(cli.folder))
    finally:
        kept.kill()
        kept.wait()


def test_port_is_checked_before_anything_starts(cli):
    manifest = cli.write()
    with listen_on_loopback() as taken:
        port = str(taken.getsockname()[1])
        result = cli.run("run", manifest, "--keep-serving", "--port", port)
    assert result.code == 2
    assert "Address already in use; choose another port" in result.err
    result = cli.run("run", manifest, "--keep-serving", "--port", "65536")
    assert "must be from 1 to 65535" in result.err
    result = cli.run("run", manifest, "--port", "8000")
    assert "--port is for --keep-serving" in result.err
    assert not (cli.folder / ".finetune").exists()


def test_finished_run_names_commands_that_work(cli, talker):
    out = cli.run("get", "demo").out
    commands = dict(line.split(":", 1) for line in out.splitlines() if line[:5] in NEXT)
    assert list(commands) == ["ask", "serve", "load"]
    program, *arguments = shlex.split(commands["ask"])
    assert program == "finetune"
    assert cli.run(*arguments).code == 0
    code = shlex.split(commands["load"])[-1]
    compile(code, "load", "exec")
    assert '"models/demo")' in code


def test_model_below_its_gate_is_asked_and_not_served(cli):
    scenario = Scenario().finish(evaluate=scores(0.1))
    write_run("demo", scenario.status, scenario.spec)
    out = cli.run("get", "demo").out
    assert "ask:   finetune ask demo Hello" in out
    assert "--keep-serving" not in out


def test_unfinished_run_names_no_commands(cli):
    write_run("demo", Scenario().run("prepare").status)
    assert not any(word in cli.run("get", "demo").out for word in NEXT)


NEXT = ("ask: ", "serve", "load:")
