import os
from pathlib import Path

import pytest
from hypothesis import settings

# In CI the same examples in every run, so that a failure is caused by the change; locally new examples in each run.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny random Llama with its tokenizer. It is shared, so tests must not write to it."""
    from support.models import make_tiny_model  # noqa: PLC0415  imports torch, which is slow

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
