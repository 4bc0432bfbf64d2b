"""What an engine has to say."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePosixPath

PORT = 8000


@dataclass(frozen=True)
class Launch:
    """How a container is started that answers on PORT: GET /health, and POST /v1/completions as OpenAI does."""

    command: tuple[str, ...]
    model: str
    """The model's name in requests."""
    env: dict[str, str] = field(default_factory=dict)


Engine = Callable[[PurePosixPath], Launch]
"""From the model's folder in the container."""
