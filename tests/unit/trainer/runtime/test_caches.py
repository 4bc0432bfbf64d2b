"""Where libraries keep their caches if the user may not write to the home."""

import os
from pathlib import Path

import pytest

from finetune_trainer.contract.environment import CACHES
from finetune_trainer.runtime.machine import caches


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def provided(monkeypatch: pytest.MonkeyPatch, home: Path) -> dict[str, str]:
    """Return the variables that are set in a process with this home."""
    names = (CACHES, caches.TRITON)
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    before = dict(os.environ)
    caches.provide_cache_folder()
    changed = {name: os.environ[name] for name in names if name in os.environ}
    assert {**before, **changed} == dict(os.environ)
    return changed


@pytest.mark.usefixtures("temporary")
def test_home_that_can_be_written_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert provided(monkeypatch, tmp_path) == {}


@pytest.mark.parametrize("home", ["/dev/null", "/dev/null/home", "~"])
def test_home_that_cannot_be_written_is_replaced_for_caches(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    """Not even root may write to these."""
    own = str(temporary / f"finetune-cache-{os.geteuid()}")
    assert provided(monkeypatch, Path(home)) == dict.fromkeys(
        (CACHES, caches.TRITON), own
    )
    assert provided(monkeypatch, Path(home))[CACHES] == own


def test_folder_that_others_may_write_is_not_used(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = temporary / f"finetune-cache-{os.geteuid()}"
    planted.mkdir(mode=0o777)
    planted.chmod(0o777)
    folder = Path(provided(monkeypatch, Path("/dev/null"))[CACHES])
    assert folder != planted
    assert folder.stat().st_mode & 0o777 == 0o700


def test_link_of_that_name_is_not_followed(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    link = temporary / f"finetune-cache-{os.geteuid()}"
    link.symlink_to(elsewhere)
    folder = Path(provided(monkeypatch, Path("/dev/null"))[CACHES])
    assert folder.parent == temporary
    assert folder != link
