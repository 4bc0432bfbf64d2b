from pathlib import Path

import pytest
from support.stages import environment_in

from finetune_trainer.contract import Environment


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return environment_in(tmp_path)


@pytest.fixture
def here(environment: Environment) -> Path:
    """The folder that the manifest is said to lie in."""
    assert environment.manifest_dir
    return environment.manifest_dir


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer without a model, which is all that prepare needs; shared, so never written to."""
    from support.prepared import make_tokenizer  # noqa: PLC0415  seconds of imports

    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return folder
