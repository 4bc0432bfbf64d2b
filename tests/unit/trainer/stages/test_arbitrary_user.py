"""A stage as a user without an entry in /etc/passwd and with group 0, as OpenShift's restricted-v2 starts it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.trainer.models import make_tiny_model
from support.trainer.stages import start_stage
from support.trainer.training import (
    adapter_digest,
    documents,
    environment,
    train_config,
    write_rows,
)

UID = 1_000_650_000
"""In the range that OpenShift gives to a namespace."""
AS_USER = ("unshare", "--user", f"--map-user={UID}", "--map-group=0")
CACHES = """
import getpass, os
from torch._inductor.runtime.cache_dir_utils import cache_dir

assert (os.getuid(), os.getgid()) == (1000650000, 0)
print(cache_dir())
"""


def can_be_another_user() -> bool:
    """Return whether this machine lets a process be another user in a namespace of its own."""
    try:
        return subprocess.run([*AS_USER, "true"], check=False).returncode == 0
    except FileNotFoundError:
        return False


pytestmark = pytest.mark.skipif(
    not can_be_another_user(), reason="needs user namespaces"
)


def test_training_works_as_any_user(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    write_rows(tmp_path, documents(12), documents(2, seed=1))
    config = train_config(make_tiny_model(tmp_path / "model"), max_steps=2)
    with start_stage(
        config, environment(tmp_path), prefix=AS_USER, HOME=str(home)
    ) as process:
        output, _ = process.communicate()
    assert process.returncode == 0, output
    assert adapter_digest(tmp_path)


def test_compiler_has_a_cache_as_any_user(tmp_path: Path) -> None:
    """PyTorch names the folder of the cache after the user, who has no name."""
    result = subprocess.run(
        [*AS_USER, sys.executable, "-c", CACHES],
        env={
            "HOME": str(tmp_path),
            "TMPDIR": str(tmp_path),
            "PATH": "/usr/bin:/bin",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).is_relative_to(tmp_path)


REGISTRY = """
from finetune_trainer.stores.oci.credentials import read_credentials

print(read_credentials("registry.example/team"))
"""


def test_user_without_a_home_has_no_credentials_there() -> None:
    """A container without HOME starts as a user whom nothing gives a home."""
    result = subprocess.run(
        [*AS_USER, sys.executable, "-c", REGISTRY],
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "None\n"
