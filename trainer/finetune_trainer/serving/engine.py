"""What an engine has to say."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Launch:
    """How a server is started that answers GET /health, and POST /v1/completions as OpenAI does."""

    arguments: list[str]
    model: str
    """The model's name in requests."""
    working_folder: Path
    variables: dict[str, str] = field(default_factory=dict)
    """Added to the environment."""


Engine = Callable[[Path, str, int], Launch]
"""From the model's folder, the address to listen on and the port."""
