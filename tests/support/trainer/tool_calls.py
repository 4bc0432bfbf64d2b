"""Records with calls of tools."""

from typing import Any

DESCRIPTION = "Add two numbers."
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": DESCRIPTION,
        "parameters": {
            "type": "object",
            "properties": {
                name: {"type": "number", "description": "A number."}
                for name in ("a", "b")
            },
            "required": ["a", "b"],
        },
    },
}


def call(*, arguments: Any = None, name: str = "add") -> dict[str, Any]:
    return {
        "id": "call00001",
        "type": "function",
        "function": {
            "name": name,
            "arguments": {"a": 2, "b": 3} if arguments is None else arguments,
        },
    }


def record(
    *calls: dict[str, Any], answer: str = "5", **assistant: Any
) -> dict[str, Any]:
    """Return a conversation in which the assistant calls tools and then answers."""
    return {
        "messages": [
            {"role": "user", "content": "2 + 3?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": list(calls) or [call()],
                **assistant,
            },
            {
                "role": "tool",
                "content": answer,
                "tool_call_id": "call00001",
                "name": "add",
            },
            {"role": "assistant", "content": "It is 5."},
        ],
        "tools": [ADD],
    }
