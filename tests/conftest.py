import os
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples every time where a machine judges a change; other ones each time on a person's.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random Llama with its tokenizer; shared, so never written to."""
    from support.models import make_tiny_model  # noqa: PLC0415  torch only where a test asks for a model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
