"""The question of the smoke test to a model server, by the deploy stage and by the operator: pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SHOWN_CHARACTERS = 200
"""Characters of the answer in a message."""


@dataclass(frozen=True)
class Question:
    """A prompt, and the condition on its answer."""

    prompt: str
    max_tokens: int
    is_conversation: bool
    """Whether the prompt is the first message of a conversation, and not a text to be continued."""
    expect: str | None = None
    """Text that the answer must contain."""

    @property
    def path(self) -> str:
        """The path of OpenAI's API that takes the question."""
        if self.is_conversation:
            return "/v1/chat/completions"
        return "/v1/completions"

    def body(self, model: str) -> dict[str, Any]:
        """Return the request to the model of this name. Decoding is greedy: the same model gives the same answer."""
        body = {"model": model, "max_tokens": self.max_tokens, "temperature": 0}
        if self.is_conversation:
            return body | {"messages": [{"role": "user", "content": self.prompt}]}
        return body | {"prompt": self.prompt}

    def answer(self, response: Any) -> str:
        """Return the answer in a response; raise LookupError or TypeError if the response has another form."""
        choice = response["choices"][0]
        if not self.is_conversation:
            return str(choice["text"])
        return text_of(choice["message"])

    def problem(self, answer: str) -> str:
        """Return why an answer does not pass, with the fix; empty if it passes."""
        if not answer.strip():
            return (
                f"deploy.smokeTest: the model answered {_shown(self.prompt)} with no text; "
                "train longer, or change the prompt or maxTokens"
            )
        if self.expect is not None and self.expect not in answer:
            return (
                f"deploy.smokeTest: the answer {_shown(answer)} does not contain {_shown(self.expect)}; "
                "train longer, or change prompt, maxTokens or expect"
            )
        return ""


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message or a piece of it, else its reasoning, else its calls of tools: all are answers."""
    # The token limit may end an answer within its reasoning. vLLM has used both names.
    for key in ("content", "reasoning_content", "reasoning"):
        if str(message.get(key) or "").strip():
            return str(message[key])
    calls = message.get("tool_calls")
    if calls:
        return json.dumps(calls)
    return str(message.get("content") or "")


def _shown(text: str) -> str:
    if len(text) > SHOWN_CHARACTERS:
        text = text[:SHOWN_CHARACTERS] + " …"
    return repr(text)
