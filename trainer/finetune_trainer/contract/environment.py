"""Where a stage's process finds things: environment variables, and the folders they name."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

CONFIG = "FINETUNE_CONFIG"
WORKSPACE = "FINETUNE_WORKSPACE"
CLAIMS = "FINETUNE_CLAIMS"
MANIFEST_DIR = "FINETUNE_MANIFEST_DIR"
TERMINATION_LOG = "FINETUNE_TERMINATION_LOG"
PROGRESS_FILE = "FINETUNE_PROGRESS_FILE"
METRICS_PORT = "FINETUNE_METRICS_PORT"
GIT_SHA = "FINETUNE_GIT_SHA"
"""The commit that the manifest is from, for the model card."""


class InvalidLocation(ValueError):
    """A URI that cannot mean a path here."""


class NotMounted(InvalidLocation):
    """A URI of a claim that this process does not have."""


@dataclass(frozen=True)
class Environment:
    """The mounts and side channels of one stage's process."""

    workspace: Path
    """The pipeline's volume; holds <stage>/<identity>/ for every stage."""
    claims: Path | None = None
    """A folder with one folder per mounted claim: pvc://NAME/path is <claims>/NAME/path."""
    manifest_dir: Path | None = None
    """Relative URIs and file:// are looked up from here; None where there is no local disk to speak of."""
    termination_log: Path = Path("/dev/termination-log")
    """Where the TerminationMessage goes."""
    progress_file: Path | None = None
    """Where Progress is also written, for those who do not speak HTTP to the process."""
    metrics_port: int = 0
    """/metrics and /progress; 0: none."""

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> "Environment":
        """Raise ValueError naming the variable that is missing or no number."""

        def path(name: str) -> Path | None:
            return Path(variables[name]) if variables.get(name) else None

        workspace = path(WORKSPACE)
        if workspace is None:
            raise ValueError(f"{WORKSPACE} is not set: it names the folder where the stage keeps its work")
        port = variables.get(METRICS_PORT) or "0"
        if not port.isdigit():
            raise ValueError(f"{METRICS_PORT} must be a port number or 0 (got {port!r})")
        return cls(
            workspace=workspace,
            claims=path(CLAIMS),
            manifest_dir=path(MANIFEST_DIR),
            termination_log=path(TERMINATION_LOG) or Path("/dev/termination-log"),
            progress_file=path(PROGRESS_FILE),
            metrics_port=int(port),
        )

    def variables(self) -> dict[str, str]:
        """Give the environment that `read` reads back; without a port, the user's own word on it stands."""
        said = {
            WORKSPACE: self.workspace,
            CLAIMS: self.claims,
            MANIFEST_DIR: self.manifest_dir,
            TERMINATION_LOG: self.termination_log,
            PROGRESS_FILE: self.progress_file,
            METRICS_PORT: self.metrics_port or None,
        }
        return {name: str(value) for name, value in said.items() if value is not None}

    def stage_dir(self, stage: str, identity: str) -> Path:
        """Give the one folder that a stage with this identity writes to."""
        return self.workspace / stage / identity

    def locate(self, uri: str) -> Path:
        """Give the path that a pvc://, file:// or relative URI names, whether or not something is there.

        Raises NotMounted or Unlocatable; a path never leaves its claim, not even over a link.
        """
        scheme, separator, rest = uri.partition("://")
        if not separator:
            return self._beside_manifest(uri)
        match scheme:
            case "file":
                return Path(rest) if rest.startswith("/") else self._beside_manifest(rest)
            case "pvc":
                claim, _, path = rest.partition("/")
                return self._in_claim(uri, claim, path)
            case _:
                raise InvalidLocation(f"{uri}: {scheme}:// names no folder; use pvc://CLAIM/PATH")

    def _beside_manifest(self, path: str) -> Path:
        if self.manifest_dir is None:
            raise InvalidLocation(f"{path}: paths beside the manifest exist on a laptop only; use pvc://CLAIM/PATH")
        return self.manifest_dir / path

    def _in_claim(self, uri: str, claim: str, path: str) -> Path:
        root = self.claims / claim if self.claims else None
        if root is None or not root.is_dir():
            raise NotMounted(f"{uri}: the claim {claim} is not mounted; on a laptop add --claim {claim}=FOLDER")
        target = Path(os.path.realpath(root / path))
        if not target.is_relative_to(os.path.realpath(root)):
            raise InvalidLocation(f"{uri}: leaves the claim {claim}")
        return target
