import hashlib

import pytest


@pytest.fixture(autouse=True)
def own_machine(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Set a folder for the index of runs and the downloads of each test, apart from the user's own.

    Not for the tests with clusters: FINETUNE_CACHE has their programs, too, which take half an hour to build.
    """
    digest = hashlib.sha256(request.node.nodeid.encode()).hexdigest()
    folder = tmp_path_factory.getbasetemp() / "machines" / digest
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    monkeypatch.setenv("FINETUNE_CACHE", str(folder / "cache"))
