import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.trainer.forkserver import ForkServer
from support.trainer.stages import environment_in

from finetune_trainer.contract import Environment


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return environment_in(tmp_path)


@pytest.fixture
def manifest_dir(environment: Environment) -> Path:
    """The folder to which relative URIs refer."""
    assert environment.manifest_dir
    return environment.manifest_dir


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer without model weights, enough for prepare. Tests share it and must not write to it."""
    from support.trainer.prepared import make_tokenizer  # noqa: PLC0415  the import takes seconds

    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Starts stages as processes; all tests share it, because its imports take many seconds."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def new_training(
    fork_server: ForkServer, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    """Returns a training of several processes, with options of the fork server and changes of its recipe."""
    from support.trainer.rank_trainings import Training, config_of, write_all_rows  # noqa: PLC0415  the import takes seconds

    prepared = write_all_rows(tmp_path_factory.mktemp("rows")) / "prepare"

    def new(options: dict[str, Any] | None = None, **changes: Any) -> Training:
        workspace = tmp_path_factory.mktemp("ranks")
        (workspace / "prepare").symlink_to(prepared)
        return Training(
            fork_server, config_of(tiny_model, **changes), workspace, options or {}
        )

    return new


@pytest.fixture
def datasets_cache(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A cache of the library `datasets` for this session; torch uses one thread."""
    import datasets  # noqa: PLC0415  datasets reads its cache folder at import
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)
    cache = tmp_path_factory.getbasetemp() / "datasets"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(cache))
    return cache


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with the output of prepare, in which a module trains its run to compare with."""
    from support.trainer.training import documents, write_rows  # noqa: PLC0415  the import takes seconds

    workspace = tmp_path_factory.mktemp("packed")
    write_rows(workspace, documents(60), documents(8, seed=5))
    return workspace


@pytest.fixture
def workspace(packed: Path, tmp_path: Path) -> Path:
    """A workspace of its own with the same rows."""
    shutil.copytree(packed / "prepare", tmp_path / "prepare")
    return tmp_path
