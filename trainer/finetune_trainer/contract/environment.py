"""Environment variables of a stage's process, and the paths that they name."""

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
GPUS = "FINETUNE_GPUS"
GIT_SHA = "FINETUNE_GIT_SHA"
"""Git commit of the manifest, for the model card."""


class InvalidLocation(ValueError):
    """A URI that names no path in this environment."""


class NotMounted(InvalidLocation):
    """A URI of a claim that is not mounted in this process."""


@dataclass(frozen=True)
class Environment:
    """Mounts, output files and port of one stage's process."""

    workspace: Path
    """The pipeline's volume; holds <stage>/<identity>/ for every stage."""
    claims: Path | None = None
    """Folder with one subfolder per mounted claim: pvc://NAME/path is <claims>/NAME/path."""
    manifest_dir: Path | None = None
    """Base folder of relative URIs and relative file:// URIs; None in a cluster, where neither is allowed."""
    termination_log: Path = Path("/dev/termination-log")
    """File for the TerminationMessage."""
    progress_file: Path | None = None
    """File for Progress, read by the local runner; None: not written."""
    metrics_port: int = 0
    """Port of /metrics and /progress; 0: no HTTP server."""
    gpus: int = 0
    """Accelerators that the pod asked for; 0: none, or a local run, which uses a GPU if there is one."""

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> "Environment":
        """Read the variables of this module; raise ValueError naming the variable that is missing or not a number."""

        def path(name: str) -> Path | None:
            return Path(variables[name]) if variables.get(name) else None

        workspace = path(WORKSPACE)
        if workspace is None:
            raise ValueError(f"{WORKSPACE} is not set; set it to the folder of the pipeline's workspace")
        port, gpus = variables.get(METRICS_PORT) or "0", variables.get(GPUS) or "0"
        if not port.isdigit():
            raise ValueError(f"{METRICS_PORT} must be a port number or 0 (got {port!r})")
        if not gpus.isdigit():
            raise ValueError(f"{GPUS} must be a number of accelerators (got {gpus!r})")
        return cls(
            workspace=workspace,
            claims=path(CLAIMS),
            manifest_dir=path(MANIFEST_DIR),
            termination_log=path(TERMINATION_LOG) or Path("/dev/termination-log"),
            progress_file=path(PROGRESS_FILE),
            metrics_port=int(port),
            gpus=int(gpus),
        )

    def variables(self) -> dict[str, str]:
        """Return the variables from which `read` restores this environment.

        Without a metrics port the variable is left out, so that it does not override a port set by the user.
        """
        values = {
            WORKSPACE: self.workspace,
            CLAIMS: self.claims,
            MANIFEST_DIR: self.manifest_dir,
            TERMINATION_LOG: self.termination_log,
            PROGRESS_FILE: self.progress_file,
            METRICS_PORT: self.metrics_port or None,
            GPUS: self.gpus or None,
        }
        return {name: str(value) for name, value in values.items() if value is not None}

    def stage_dir(self, stage: str, identity: str) -> Path:
        """Return the folder that belongs to the stage with this identity."""
        return self.workspace / stage / identity

    def locate(self, uri: str) -> Path:
        """Return the path of a pvc://, file:// or relative URI; the path need not exist.

        Raise NotMounted if the claim is not mounted. Raise InvalidLocation for other schemes, for relative URIs
        without a manifest folder, and for paths that leave their claim, also through a symbolic link.
        """
        scheme, separator, rest = uri.partition("://")
        if not separator:
            return self._relative_to_manifest(uri)
        match scheme:
            case "file":
                return Path(rest) if rest.startswith("/") else self._relative_to_manifest(rest)
            case "pvc":
                claim, _, path = rest.partition("/")
                return self._in_claim(uri, claim, path)
            case _:
                raise InvalidLocation(f"{uri}: {scheme}:// cannot be used here; use pvc://CLAIM/PATH")

    def _relative_to_manifest(self, path: str) -> Path:
        if self.manifest_dir is None:
            raise InvalidLocation(f"{path}: relative paths work in local runs only; use pvc://CLAIM/PATH")
        return self.manifest_dir / path

    def _in_claim(self, uri: str, claim: str, path: str) -> Path:
        root = self.claims / claim if self.claims else None
        if root is None or not root.is_dir():
            raise NotMounted(f"{uri}: the claim {claim} is not mounted; in a local run add --claim {claim}=FOLDER")
        target = Path(os.path.realpath(root / path))
        if not target.is_relative_to(os.path.realpath(root)):
            raise InvalidLocation(f"{uri}: leaves the claim {claim}; use a path inside it")
        return target
