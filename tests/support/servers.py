"""Fake model servers that start at once, with a chosen misbehavior."""

import sys
from dataclasses import replace
from pathlib import Path

from finetune_trainer.contract.engines import ENGINES, Engine, LaunchSpec

SCRIPT = """
import http.server, json, signal, sys, time
port, behavior, model = int(sys.argv[1]), sys.argv[2], sys.argv[3]
if behavior == "exits":
    sys.exit("the weights cannot be loaded")
if behavior == "ignores SIGTERM":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

class Handler(http.server.BaseHTTPRequestHandler):
    def reply(self, value, status=200):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def do_GET(self):
        if self.path == "/v1/models":
            listed = "another" if behavior == "lists another model" else model
            return self.reply({"data": [{"id": listed}]})
        self.reply({}, 503 if behavior == "never ready" else 200)

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if behavior == "hangs":
            time.sleep(600)
        if behavior == "rejects":
            return self.reply({"detail": "unknown model"}, 400)
        if self.path == "/v1/chat/completions":
            [message] = request["messages"]
            content = "" if behavior == "thinks" else "said after " + message["content"]
            reply = {"content": content, "reasoning_content": "it is"}
            return self.reply({"choices": [{"message": reply}]})
        text = " after " + request["prompt"] * request["max_tokens"]
        if behavior == "is empty":
            text = " \\n"
        self.reply({"choices": [{"text": text}]})

http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def fake_engine(behavior: str) -> Engine:
    """Return an engine whose server behaves as named.

    answers: completes prompts. exits: fails at its start. never ready: fails every health check. hangs: never
    completes a prompt. rejects: responds to prompts with status 400. ignores SIGTERM: answers, but must be killed.
    is empty: completes prompts with blanks. thinks: answers conversations with reasoning only. lists another model:
    does not list its own.
    """

    def launch(model_folder: Path, _host: str, port: int) -> LaunchSpec:
        command = (
            sys.executable,
            "-S",
            "-c",
            SCRIPT,
            str(port),
            behavior,
            model_folder.name,
        )
        return LaunchSpec(command, model_folder.name, working_dir=model_folder)

    return replace(ENGINES["Transformers"], process=launch)
