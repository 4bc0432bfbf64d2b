import os
from pathlib import Path

import pytest
from hypothesis import settings

# In CI the same examples in every run, so that a failure is caused by the change; locally new examples in each run.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

SLOW_FILES = (
    "test_ranks",
    "test_resume",
    "test_local_run",
    "test_tracked_training",
    "test_several_pods",
    "test_lm_eval_cli",
    "test_push_kills",
    "test_compile",
    "test_failing_steps",
    "test_samples",
    "test_allocator",
    "test_preview_command",
    "test_round_trip",
    "test_prepare_processes",
    "test_prepare_kills",
    "test_model_check",
    "test_base_model",
    "test_data_files",
    "test_evaluate_base",
    "test_groups",
    "test_task_check",
    "test_local_failures",
    "test_local_drill",
    "test_local_verbs",
    "test_deploy",
)
"""Test files that take half a minute or more. They run first, so that all workers end at about the same time.

`make unit` leaves them out, and `make test` runs them.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of SLOW_FILES, and sort them before all others."""
    for item in items:
        if item.path.stem in SLOW_FILES:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.path.stem not in SLOW_FILES)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny random Llama with its tokenizer. It is shared, so tests must not write to it."""
    from support.trainer.models import make_tiny_model  # noqa: PLC0415  imports torch, which is slow

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
