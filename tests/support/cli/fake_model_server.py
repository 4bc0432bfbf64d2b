"""A model server with OpenAI's API, without a model: `fake_model_server.py MODEL [--pin PIN] --port N`.

Its answers repeat what it was asked. A model whose path has the word `text` has no chat template.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from finetune_trainer.contract.engines import NO_TEMPLATE

TALK = {"conversations": True}
"""Result of prepare of a model that was trained on conversations."""
HOSTILE = "\x1b]0;title\x07\x1b[31mred\u202e"


def words(question: str, seen: str) -> Iterator[str]:
    """Yield the pieces of an answer."""
    if question == "be hostile":
        yield HOSTILE
    elif question == "be slow":
        yield "one"
        time.sleep(60)
    else:
        yield from seen.split(" ")


class Handler(BaseHTTPRequestHandler):
    model = ""

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "fake"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] == "fake"
        messages = body.get("messages", [])
        question = messages[-1]["content"] if messages else body["prompt"]
        if messages and "text" in self.model:
            self._send(400, {"error": {"message": NO_TEMPLATE}})
            return
        if question == "be too long":
            self._send(400, {"error": {"message": "4096 tokens are too many"}})
            return
        self.send_response(200)
        self.end_headers()
        earlier = [message["content"] for message in messages[:-1]]
        seen = f"{self.model} {self.path} {question} {earlier}"
        for word in words(question, seen):
            if question == "die":
                os._exit(1)
            content = f"{word} "
            piece = {"delta": {"content": content}} if messages else {"text": content}
            self._event({"choices": [piece]})
        limit = "length" if body["max_tokens"] < 9 else "stop"
        self._event({"choices": [{"delta": {}, "finish_reason": limit}]})
        self._event({"choices": [], "usage": {"total_tokens": 9}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: Any) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def _send(self, status: int, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--pin")
    parser.add_argument("--port", type=int)
    options = parser.parse_args()
    if "broken" in options.model:
        sys.exit("the weights are damaged")
    Handler.model = " ".join(filter(None, (options.model, options.pin)))
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
