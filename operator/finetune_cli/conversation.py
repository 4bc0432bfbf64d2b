"""A conversation with a model by OpenAI's API: questions, and answers piece by piece."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from finetune_operator.errors import ClusterError
from finetune_trainer.contract.engines import NO_TEMPLATE
from finetune_trainer.contract.smoke_test import text_of

MAX_TOKENS = 256
"""Tokens of an answer, unless the user asks for another number."""
TRAINED = "trained"
BASE = "base"
SHOWN_CHARACTERS = 300
"""Characters of a server's response in an error."""


class RequestRefused(ClusterError):
    """The server refuses this request, for example because it is too long. Another request may succeed."""


class ModelEndpoint(Protocol):
    """The server of one model; both methods raise ClusterError."""

    def get(self, path: str) -> Any:
        """Return the JSON at a path."""

    def post(self, path: str, body: Mapping[str, Any]) -> Iterator[str]:
        """Yield the lines of the response as they arrive."""


@dataclass
class ModelConversation:
    """Questions to one model, with its answers."""

    label: str
    """TRAINED or BASE."""
    endpoint: ModelEndpoint
    has_turns: bool
    """Whether the model answers messages by its chat template. If not, it continues each question as a text."""
    max_tokens: int
    messages: Sequence[Mapping[str, str]] = ()
    finish_reason: str = field(default="", init=False)
    """Why the last answer ended; `length` at the limit of tokens, empty if it was stopped."""

    @cached_property
    def model(self) -> str:
        """The model's name in requests."""
        models = self.endpoint.get("/v1/models")
        return str(models["data"][0]["id"])

    def ask(self, question: str) -> Iterator[str]:
        """Yield the answer piece by piece; the messages then have both. Raise ClusterError."""
        if not self.has_turns:
            for message in self._messages("/v1/completions", {"prompt": question}):
                yield text_of(message)
            return
        messages = [*self.messages, {"role": "user", "content": question}]
        answer = ""
        try:
            for message in self._messages(
                "/v1/chat/completions", {"messages": messages}
            ):
                # The reasoning is shown, and is no part of the next request.
                answer += str(message.get("content") or "")
                yield text_of(message)
        except RequestRefused as error:
            # The base model of a manifest with a template of its own.
            if NO_TEMPLATE not in str(error):
                raise
            self.has_turns = False
            yield from self.ask(question)
        finally:
            # After Ctrl-C, too: the model must know what the user has read.
            if answer:
                self.messages = [*messages, {"role": "assistant", "content": answer}]

    def _messages(
        self, path: str, question: Mapping[str, Any]
    ) -> Iterator[Mapping[str, Any]]:
        """Yield the pieces of the answer as messages."""
        self.finish_reason = ""
        # Greedy decoding, as in the smoke test: the same model gives the same answer.
        body = {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "stream": True,
        }
        for line in self.endpoint.post(path, body | dict(question)):
            choice = _choice(line)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            if "text" in choice:
                yield {"content": choice["text"]}
            elif choice.get("delta"):
                yield choice["delta"]
        if not self.finish_reason:
            raise ClusterError(
                "the model's server ended before the end of its answer; it may be out of memory"
            )


def _choice(line: str) -> Mapping[str, Any]:
    """Return the answer's piece in a line of server-sent events; empty for a line without."""
    name, _, data = line.partition(":")
    if name != "data" or data.strip() == "[DONE]":
        return {}
    try:
        choices: list[dict[str, Any]] = json.loads(data)["choices"]
    except (ValueError, LookupError, TypeError) as error:
        # An error after the first piece is an event without choices.
        text = data.strip()[:SHOWN_CHARACTERS]
        raise ClusterError(
            f"the model's server ended its answer with: {text}"
        ) from error
    # vLLM sends the number of tokens without a choice.
    return choices[0] if choices else {}
