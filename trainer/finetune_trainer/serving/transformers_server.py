"""Serve a model as `transformers serve` does: `python -m finetune_trainer.serving.transformers_server MODEL …`.

`transformers serve` lists the models of the hub's cache, which does not exist in a pod and holds other models on a
laptop. This program lists the served model. A conversation for a model without a chat template is an error of the
client.
"""

import argparse
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import transformers.cli.serving.server as transformers_server
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from transformers.cli.serve import Serve

from finetune_trainer.contract.engines import ALL_ADDRESSES, NO_TEMPLATE

MODELS = "/v1/models"
CONVERSATIONS = ("/v1/chat/completions", "/v1/responses")
"""Paths whose requests are written with the chat template."""
NO_MESSAGES = (
    "the request needs messages: a list of objects, each with role and content"
)

Next = Callable[[Request], Awaitable[Response]]
BuildServer = Callable[..., FastAPI]


def with_own_answers(build_server: BuildServer, model: str) -> BuildServer:
    """Return `build_server` of transformers with this program's answers added to its application."""

    def build(model_manager: Any, *arguments: Any, **options: Any) -> FastAPI:
        app = build_server(model_manager, *arguments, **options)
        add_answers(app, model, has_template=_has_template(model_manager))
        return app

    return build


def _has_template(model_manager: Any) -> bool:
    # The model is loaded before the application is built, and no other model is ever loaded.
    loaded = model_manager.loaded_models.values()
    return any(getattr(entry.processor, "chat_template", None) for entry in loaded)


def add_answers(app: FastAPI, model: str, *, has_template: bool) -> None:
    """Answer requests for the list of models, and requests that the chat template cannot write."""
    entry = {
        "id": model,
        "object": "model",
        "created": int((Path(model) / "config.json").stat().st_mtime),
        "owned_by": "finetune",
    }

    @app.middleware("http")
    async def answer(request: Request, call_next: Next) -> Response:
        path = request.url.path.rstrip("/")
        if path == MODELS:
            return JSONResponse({"object": "list", "data": [entry]})
        if path == f"{MODELS}/{model}":
            return JSONResponse(entry)
        if path in CONVERSATIONS and not has_template:
            return _rejected(NO_TEMPLATE)
        if path == CONVERSATIONS[0] and not _has_messages(await request.body()):
            return _rejected(NO_MESSAGES)
        return await call_next(request)

    @app.exception_handler(TemplateError)
    async def reject(_request: Request, error: TemplateError) -> Response:
        return _rejected(f"the chat template refuses these messages: {error}")


def _has_messages(content: bytes) -> bool:
    """Return whether a request has a list of messages, each with a role. transformers takes it for granted."""
    try:
        messages = json.loads(content)["messages"]
        return bool(messages) and all(message["role"] for message in messages)
    except (ValueError, LookupError, TypeError):
        return False


def _rejected(message: str) -> Response:
    """Return an error in the form of OpenAI's API."""
    error = {"message": message, "type": "invalid_request_error", "code": None}
    return JSONResponse({"error": error}, status_code=400)


def main(arguments: list[str]) -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(
        prog="python -m finetune_trainer.serving.transformers_server"
    )
    parser.add_argument("model", help="folder of the model, and its name in requests")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args(arguments)
    build_server = transformers_server.build_server
    # `Serve` looks the function up in this module when it starts.
    transformers_server.build_server = with_own_answers(build_server, options.model)
    Serve(
        options.model,
        # asyncio binds :: for IPv6 alone, and an empty host for all addresses that the machine has.
        host="" if options.host == ALL_ADDRESSES else options.host,
        port=options.port,
        device="auto",
        default_seed=0,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
