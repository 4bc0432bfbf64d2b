"""Environment variables of a stage's process, and the paths that they name."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

CONFIG = "FINETUNE_CONFIG"
WORKSPACE = "FINETUNE_WORKSPACE"
CLAIMS = "FINETUNE_CLAIMS"
MANIFEST_DIR = "FINETUNE_MANIFEST_DIR"
TERMINATION_LOG = "FINETUNE_TERMINATION_LOG"
PROGRESS_FILE = "FINETUNE_PROGRESS_FILE"
METRICS_PORT = "FINETUNE_METRICS_PORT"
GPUS = "FINETUNE_GPUS"
KEEP = "FINETUNE_KEEP"
KEEP_UNUSED = "FINETUNE_KEEP_UNUSED"
WORKSPACE_SHARED = "FINETUNE_WORKSPACE_SHARED"
GIT_SHA = "FINETUNE_GIT_SHA"
"""Git commit of the manifest, for the model card."""
INSECURE_REGISTRIES = "FINETUNE_INSECURE_REGISTRIES"
"""Hosts of OCI registries, separated by commas and with their ports, that are asked by HTTP without TLS."""
DOWNLOADS = "FINETUNE_CACHE"
"""Another folder than ~/.cache for the downloads of local runs."""
CACHES = "XDG_CACHE_HOME"
"""Folder in which Hugging Face's and other libraries keep caches, by default ~/.cache."""
MAX_SILENCE_SECONDS = "FINETUNE_MAX_SILENCE_SECONDS"
INTERRUPTION_NOTICES = "FINETUNE_INTERRUPTION_NOTICES"
METADATA_ENDPOINT = "FINETUNE_METADATA_ENDPOINT"
# Uid and attempt decide which of two processes in a stage's folder is later.
PIPELINE_UID = "FINETUNE_PIPELINE_UID"
ATTEMPT = "FINETUNE_ATTEMPT"
NODE_RANK = "FINETUNE_NODE_RANK"
MASTER_ADDRESS = "FINETUNE_MASTER_ADDRESS"
LOCAL_RANK = "FINETUNE_LOCAL_RANK"
"""Number of a training process within its pod; the pod's first process sets it for the other processes."""
MASTER_PORT = "FINETUNE_MASTER_PORT"
"""Port of the first process of all; the pod's first process sets it for the other processes."""

RENDEZVOUS_PORT = 29500
"""Port of the pod with index 0 at which the processes of all nodes find each other; torchrun's default."""

CLOUDS = ("EC2", "GCE", "Azure")
"""Clouds whose machines announce their end at a metadata endpoint."""
LINK_LOCAL_ENDPOINT = "http://169.254.169.254"
"""Address at which the machines of all three clouds serve their metadata."""

PATTERN_CHARACTERS = frozenset("*?[")
"""Characters that make the last segment of a URI a pattern."""


class InvalidLocation(ValueError):
    """A URI that names no path in this environment."""


class NotMounted(InvalidLocation):
    """A URI of a claim that is not mounted in this process."""


@dataclass(frozen=True)
class Pruning:
    """The results that a stage's process leaves in the workspace when it starts; it deletes unused results."""

    keep: tuple[str, ...]
    """STAGE/IDENTITY of each result that is used. The process looks at no other stages."""
    keep_unused: int
    """Number of unused results of each stage that stay: the newest that are finished, and as many unfinished."""
    shared: bool = False
    """Whether the workspace may have results of other pipelines."""

    def variables(self) -> dict[str, str]:
        """Return the variables from which `read` restores this."""
        values = {KEEP: ",".join(self.keep), KEEP_UNUSED: str(self.keep_unused)}
        if self.shared:
            values[WORKSPACE_SHARED] = "1"
        return values

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> "Pruning | None":
        """Return what the variables say; None if they name no number of results to keep, so that nothing is deleted."""
        if not variables.get(KEEP_UNUSED):
            return None
        keep = tuple(name for name in variables.get(KEEP, "").split(",") if name)
        number = _number(variables, KEEP_UNUSED, "a number of results")
        return cls(keep, number, shared=bool(variables.get(WORKSPACE_SHARED)))


@dataclass(frozen=True)
class Environment:
    """Mounts, output files and port of a stage's process."""

    workspace: Path
    """The pipeline's volume; holds <stage>/<identity>/ for every stage."""
    claims: Path | None = None
    """Folder with a subfolder for each mounted claim: pvc://NAME/path is <claims>/NAME/path."""
    manifest_dir: Path | None = None
    """Base folder of relative URIs and relative file:// URIs; None in a cluster, which allows neither of them."""
    # Kubernetes' default path.
    termination_log: Path = Path("/dev/termination-log")
    """File for the TerminationMessage."""
    progress_file: Path | None = None
    """File for Progress, read by the local runner; None if it is not written."""
    metrics_port: int = 0
    """Port of /metrics and /progress; 0 for no HTTP server."""
    gpus: int = 0
    """Accelerators that the pod asked for. 0: none, or a local run, which uses a GPU if the machine has it."""
    max_silence_seconds: int = 0
    """Time without a sign of work after which the process ends itself; 0: never."""
    interruption_notices: str = ""
    """The cloud whose metadata endpoint is watched for notices, an entry of CLOUDS; empty to watch no endpoint."""
    metadata_endpoint: str = LINK_LOCAL_ENDPOINT
    """Base URL of the metadata endpoint."""
    pipeline_uid: str = ""
    """uid of the pipeline that the attempt belongs to; empty if no operator started the process."""
    attempt: int = 0
    """Number of the attempt; a later attempt of the stage has a larger number. 0: unknown."""
    node_rank: int = 0
    """Index of this pod among the nodes of the attempt; 0 is the first, which alone writes the stage's folder."""
    master_address: str = ""
    """DNS name of the pod with index 0; empty if the processes of all nodes run in this pod or on this machine."""
    local_rank: int = 0
    """Number of this process among the training processes of its pod; 0 for the process that the pod has started."""
    master_port: int = 0
    """Port of the first process of all; 0 for RENDEZVOUS_PORT."""
    pruning: Pruning | None = None
    """Which results stay in the workspace; None: all."""

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> "Environment":
        """Read the variables of this module; raise ValueError naming the variable that is missing or not a number."""

        def path(name: str) -> Path | None:
            text = variables.get(name)
            return Path(text) if text else None

        workspace = path(WORKSPACE)
        if workspace is None:
            raise ValueError(
                f"{WORKSPACE} is not set; set it to the folder of the pipeline's workspace"
            )
        cloud = variables.get(INTERRUPTION_NOTICES) or ""
        if cloud and cloud not in CLOUDS:
            raise ValueError(
                f"{INTERRUPTION_NOTICES} must be one of {', '.join(CLOUDS)}, or empty (got {cloud!r})"
            )
        return cls(
            workspace=workspace,
            claims=path(CLAIMS),
            manifest_dir=path(MANIFEST_DIR),
            termination_log=path(TERMINATION_LOG) or Path("/dev/termination-log"),
            progress_file=path(PROGRESS_FILE),
            metrics_port=_number(variables, METRICS_PORT, "a port number or 0"),
            gpus=_number(variables, GPUS, "a number of accelerators"),
            max_silence_seconds=_number(
                variables, MAX_SILENCE_SECONDS, "a number of seconds"
            ),
            interruption_notices=cloud,
            metadata_endpoint=variables.get(METADATA_ENDPOINT) or LINK_LOCAL_ENDPOINT,
            pipeline_uid=variables.get(PIPELINE_UID) or "",
            attempt=_number(variables, ATTEMPT, "the number of an attempt"),
            node_rank=_number(variables, NODE_RANK, "the index of a pod"),
            master_address=variables.get(MASTER_ADDRESS) or "",
            local_rank=_number(variables, LOCAL_RANK, "the number of a process"),
            master_port=_number(variables, MASTER_PORT, "a port number or 0"),
            pruning=Pruning.read(variables),
        )

    def variables(self) -> dict[str, str]:
        """Return the variables from which `read` restores this environment.

        Without a metrics port, its variable is left out, so that it does not override a port that the user has set.
        """
        has_own_endpoint = self.metadata_endpoint != LINK_LOCAL_ENDPOINT
        values = {
            WORKSPACE: self.workspace,
            CLAIMS: self.claims,
            MANIFEST_DIR: self.manifest_dir,
            TERMINATION_LOG: self.termination_log,
            PROGRESS_FILE: self.progress_file,
            METRICS_PORT: self.metrics_port or None,
            GPUS: self.gpus or None,
            MAX_SILENCE_SECONDS: self.max_silence_seconds or None,
            INTERRUPTION_NOTICES: self.interruption_notices or None,
            METADATA_ENDPOINT: self.metadata_endpoint if has_own_endpoint else None,
            PIPELINE_UID: self.pipeline_uid or None,
            ATTEMPT: self.attempt or None,
            NODE_RANK: self.node_rank or None,
            MASTER_ADDRESS: self.master_address or None,
            LOCAL_RANK: self.local_rank or None,
            MASTER_PORT: self.master_port or None,
        }
        own = {name: str(value) for name, value in values.items() if value is not None}
        if self.pruning:
            own |= self.pruning.variables()
        return own

    @property
    def is_first(self) -> bool:
        """Whether this is the first process of all that run the stage together: it alone writes to the workspace."""
        return not self.node_rank and not self.local_rank

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
            case "file" if rest.startswith("/"):
                return Path(rest)
            case "file":
                return self._relative_to_manifest(rest)
            case "pvc":
                claim, _, path = rest.partition("/")
                return self._in_claim(uri, claim, path)
            case _:
                raise InvalidLocation(
                    f"{uri}: {scheme}:// cannot be used here; use pvc://CLAIM/PATH"
                )

    def matches(self, uri: str) -> list[str]:
        """Return the URIs of the files that a URI names, sorted: itself, or all URIs that match its last segment.

        Names that begin with a dot match no *. Raise like `locate`, and OSError if the folder cannot be read.
        """
        path = self.locate(uri)
        # A file may have a name with a wildcard. Its URI then names this file and is no pattern.
        if not is_pattern(uri) or path.exists():
            return [uri]
        _, _, pattern = uri.rpartition("/")
        folder = uri.removesuffix(pattern)
        # Sorted, because the order of the files is the order of the records.
        names = sorted(entry.name for entry in path.parent.iterdir() if entry.is_file())
        return [
            folder + name
            for name in names
            if fnmatchcase(name, pattern) and _is_shown(name, pattern)
        ]

    def _relative_to_manifest(self, path: str) -> Path:
        if self.manifest_dir is None:
            raise InvalidLocation(
                f"{path}: relative paths work in local runs only; use pvc://CLAIM/PATH"
            )
        return self.manifest_dir / path

    def _in_claim(self, uri: str, claim: str, path: str) -> Path:
        root = self.claims / claim if self.claims else None
        if root is None or not root.is_dir():
            raise NotMounted(
                f"{uri}: the claim {claim} is not mounted; in a local run add --claim {claim}=FOLDER"
            )
        # Symbolic links are followed before the check: a link in a claim must not lead to another pipeline's files.
        target = Path(os.path.realpath(root / path))
        if not target.is_relative_to(os.path.realpath(root)):
            raise InvalidLocation(
                f"{uri}: leaves the claim {claim}; use a path inside it"
            )
        return target


def shared_downloads(variables: Mapping[str, str]) -> Path | None:
    """Return the folder of downloads that all local runs of a user share; None without a home."""
    given = variables.get(DOWNLOADS)
    usual = variables.get(CACHES) or os.path.expanduser("~/.cache")  # noqa: PTH111
    caches = Path(given or usual)
    # An unknown home is no absolute path.
    if not caches.is_absolute():
        return None
    return caches / "finetune" / "sources"


def _number(variables: Mapping[str, str], name: str, meaning: str) -> int:
    text = variables.get(name) or "0"
    # isdigit alone accepts digits of other scripts.
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name} must be {meaning} (got {text!r})")
    return int(text)


def has_wildcard(text: str) -> bool:
    """Return whether a text has a character of a pattern."""
    return not PATTERN_CHARACTERS.isdisjoint(text)


def is_pattern(uri: str) -> bool:
    """Return whether the last segment of a URI is a pattern of file names."""
    _, _, last_segment = uri.rpartition("/")
    return has_wildcard(last_segment)


def _is_shown(name: str, pattern: str) -> bool:
    return pattern.startswith(".") or not name.startswith(".")
