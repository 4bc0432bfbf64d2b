"""A Git repository of the tests, which commit in its folder."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testcluster.commands import run_command

BRANCH = "main"
AUTHOR = ("-c", "user.name=test", "-c", "user.email=test@example.org")


@dataclass(frozen=True)
class GitRepository:
    """A repository with a branch `main`."""

    folder: Path
    url: str
    """The address at which programs of this machine fetch it."""

    @classmethod
    def create(cls, folder: Path, url: str) -> "GitRepository":
        """Create a repository in a new folder, which is served at a URL."""
        folder.mkdir(parents=True)
        repository = cls(folder, url)
        repository.git("init", "--quiet", f"--initial-branch={BRANCH}")
        return repository

    def commit(self, files: Mapping[str, Any]) -> str:
        """Write objects as JSON, which is YAML, and text as it is; None deletes a file. Return the commit."""
        for name, content in files.items():
            path = self.folder / name
            if content is None:
                path.unlink()
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(
                content if isinstance(content, str) else json.dumps(content, indent=1)
            )
        self.git("add", "--all")
        self.git(*AUTHOR, "commit", "--quiet", "--allow-empty", "--message=test")
        return self.git("rev-parse", "HEAD").strip()

    def revert(self) -> str:
        """Revert the last commit, and return the new commit."""
        self.git(*AUTHOR, "revert", "--no-edit", "HEAD")
        return self.git("rev-parse", "HEAD").strip()

    def git(self, *arguments: str) -> str:
        """Run git in the folder and return its output; raises TimedOut with git's error message."""
        return run_command("git", "-C", str(self.folder), *arguments)
