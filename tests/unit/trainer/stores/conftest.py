from collections.abc import Iterator
from pathlib import Path

import pytest
from support.stores.hub_environment import hub_in
from support.stores.hub_state import Hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A double of the hub in which the user may write to the organisation people."""
    with hub_in(tmp_path / "hub", monkeypatch, "people") as hub:
        yield hub
