"""Model servers that start at once and misbehave as told."""

import sys
from dataclasses import replace
from pathlib import Path

from finetune_trainer.contract.engines import ENGINES, Engine, LaunchSpec

SCRIPT = """
import http.server, json, signal, sys, time
port, manner = int(sys.argv[1]), sys.argv[2]
if manner == "dies":
    sys.exit("the weights are made of stone")
if manner == "clings":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

class Handler(http.server.BaseHTTPRequestHandler):
    def say(self, value, status=200):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def do_GET(self):
        self.say({}, 503 if manner == "loads" else 200)

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if manner == "ponders":
            time.sleep(600)
        if manner == "refuses":
            return self.say({"detail": "no such words"}, 400)
        self.say({"choices": [{"text": " after " + request["prompt"] * request["max_tokens"]}]})

http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def server_that(manner: str) -> Engine:
    """Answers, and: dies at its start, loads for ever, ponders for ever, refuses the prompt, clings to its life."""

    def launch(model_folder: Path, _host: str, port: int) -> LaunchSpec:
        command = (sys.executable, "-S", "-c", SCRIPT, str(port), manner)
        return LaunchSpec(command, model_folder.name, working_dir=model_folder)

    return replace(ENGINES["transformers"], process=launch)
