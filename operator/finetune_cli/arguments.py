"""Arguments that commands share: the pipeline, on this machine or on a cluster, and the folders of claims."""

import argparse
import importlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from finetune_cli.diagnostics import UsageError, closest_match
from finetune_cli.manifest.manifest import Manifest, read
from finetune_cli.manifest.overrides import Override, parse_overrides
from finetune_cli.runs import (
    RUNS,
    find_runs,
    manifest_of,
    run_named,
    run_of_manifest,
    runs_elsewhere,
)
from finetune_operator.api.names import DNS_SUBDOMAIN
from finetune_operator.core.durations import HOUR, MINUTE

MANIFEST_SUFFIXES = frozenset({".yaml", ".yml", ".json"})
LOCAL_FLAGS = {
    "workdir": "--workdir",
    "claim": "--claim",
    "until": "--until",
    "evict": "--evict",
    "kill": "--kill",
    "keep_serving": "--keep-serving",
    "port": "--port",
}
"""Attribute of the parsed arguments -> a flag that only a run on this machine has."""
CLIENT_PACKAGES = frozenset({"kubernetes", "aiohttp"})
"""Packages of the Kubernetes client: if another module is missing, that is a bug, not a missing extra."""
SHOWN_RUNS = 10
"""So many runs are named by an error: a machine may have hundreds."""
NAME_OR_FILE = "name of a run on this machine or of a pipeline on a cluster, or the manifest of a run on this machine"


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --context and --namespace."""
    parser.add_argument(
        "--context",
        help="kubeconfig context of the cluster (default: the current context)",
    )
    text = "namespace of the pipeline (default: the manifest's, else the context's)"
    parser.add_argument("-n", "--namespace", help=text)


def targets_cluster(target: str | None, arguments: argparse.Namespace) -> bool:
    """Return True for a pipeline on a cluster, False for a run on this machine.

    A run on this machine is preferred to a pipeline of the same name on a cluster, which needs -n or --context.
    Raises UsageError if flags of both are given.
    """
    all_namespaces = getattr(arguments, "all_namespaces", False)
    has_cluster_flag = bool(arguments.context or arguments.namespace or all_namespaces)
    local_flags = [
        flag for name, flag in LOCAL_FLAGS.items() if getattr(arguments, name, None)
    ]
    if has_cluster_flag and local_flags:
        raise UsageError(
            f"{local_flags[0]} is for a run on this machine: remove it, or remove --context, --namespace and -A"
        )
    if has_cluster_flag or local_flags:
        return has_cluster_flag
    # Without a flag, what exists on this machine decides.
    if not target:
        return not find_runs()
    return not is_manifest(target) and run_named(target) is None


def is_manifest(target: str) -> bool:
    """Return whether an argument is a file, rather than the name of a pipeline."""
    # By its suffix, too: a misspelled file must be reported as missing, and not be looked up on a cluster.
    return Path(target).suffix in MANIFEST_SUFFIXES or Path(target).is_file()


def run_on_cluster(command: str, arguments: argparse.Namespace) -> int:
    """Run the module of `finetune_cli.cluster` with this name and return its exit code."""
    code: int = client_module(f"finetune_cli.cluster.{command}").run(arguments)
    return code


def client_module(name: str) -> Any:
    """Import a module that needs the Kubernetes client; raises UsageError if the client is not installed.

    The client is imported only here: importing it takes longer than most commands on this machine.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in CLIENT_PACKAGES:
            raise
        raise UsageError(
            "a cluster needs the Kubernetes client library, which is not installed: "
            "pip install 'finetune-operator[operator]'; "
            "the runs on this machine: finetune list"
        ) from error


def add_local_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --workdir and --claim."""
    add_workdir(parser)
    text = "folder that replaces pvc://NAME on this machine; later runs in the work folder remember it"
    parser.add_argument(
        "--claim", action="append", default=[], metavar="NAME=FOLDER", help=text
    )


def add_set(parser: argparse.ArgumentParser) -> None:
    """Add --set."""
    text = "set a field for this command only, such as train.epochs=1 or datasets[0].uri=other.jsonl; may be repeated"
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help=text
    )


def overrides(arguments: argparse.Namespace) -> tuple[Override, ...]:
    """Return the fields that --set changes, none for a command without it; raises UsageError."""
    return parse_overrides(getattr(arguments, "set", ()))


def add_workdir(parser: argparse.ArgumentParser) -> None:
    """Add --workdir."""
    parser.add_argument(
        "--workdir",
        type=Path,
        help=f"work folder of the run on this machine (default: {RUNS}/NAME)",
    )


def workdir_for(manifest: Manifest, given: Path | None) -> Path:
    """Return the absolute work folder of a manifest's run: the given folder, the folder of its run, or RUNS/NAME."""
    folder = given or run_of_manifest(manifest.path, manifest.name)
    return (folder or RUNS / manifest.name).absolute()


def find_workdir(name: str | None, given: Path | None) -> Path:
    """Return the work folder of an earlier run: the given folder, the folder of a name or manifest, or the only run's.

    Raises UsageError if there is no such run, or if several could be meant.
    """
    if given is not None:
        return _with_run(given)
    if name:
        return _with_run(run_named(name) or workdir_for(read(Path(name)), None))
    runs = find_runs()
    if not runs:
        raise UsageError(f"there is no run in {RUNS}; choose its folder with --workdir")
    if len(runs) > 1:
        names = ", ".join(run.name for run in runs)
        raise UsageError(f"there are several runs in {RUNS}: {names}; name one")
    return runs[0].absolute()


def _with_run(folder: Path) -> Path:
    """Return the absolute path of a folder; raises UsageError if no run has begun in it."""
    if not (folder / "pipeline.json").is_file():
        raise UsageError(
            f"{folder} holds no run; choose its folder with --workdir, or start a run: finetune run FILE"
        )
    return folder.absolute()


def manifest_path(target: str | Path) -> Path:
    """Return the manifest that an argument means: a file, or the last manifest of the run of this name.

    Raises UsageError if the run was started by a version that recorded no manifest.
    """
    # A file comes first: a run may have the name of a file in this folder.
    if is_manifest(str(target)):
        return Path(target)
    run = run_named(str(target))
    if run is None:
        return Path(target)
    recorded = manifest_of(run)
    if recorded is None:
        raise UsageError(
            f"{run} has no recorded manifest; pass the manifest FILE instead of {target}"
        )
    return recorded


def local_runs_hint(name: str = "") -> str:
    """Return which runs there are on this machine, for the error of an unknown name."""
    here = [run.name for run in find_runs()]
    runs = [*here, *(str(run) for run in runs_elsewhere())]
    if not runs:
        return "this machine has no runs; start one with: finetune run FILE"
    match = closest_match(name, here) if name else None
    if match:
        return f"did you mean {match}?"
    return f"runs of this machine: {', '.join(runs[:SHOWN_RUNS])}"


def claims(given: Iterable[str]) -> dict[str, Path]:
    """Parse NAME=FOLDER arguments into claim name -> folder; raises UsageError."""
    return dict(_claim(text) for text in given)


def _claim(text: str) -> tuple[str, Path]:
    name, separator, folder = text.partition("=")
    # The name becomes the name of a link in the work folder, so it must not hold a slash.
    if not separator or not re.fullmatch(DNS_SUBDOMAIN, name):
        raise UsageError(
            f"--claim {text}: must be NAME=FOLDER; NAME has only lower-case letters, digits, - and ."
        )
    path = path_of(folder)
    if not path.is_dir():
        raise UsageError(f"--claim {text}: {path} is not a folder")
    return name, path


def path_of(text: str) -> Path:
    """Return a path with ~ or ~USER replaced by the home folder; raises UsageError for an unknown user."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        user = text.partition("/")[0]
        raise UsageError(
            f"{text}: {user} is no user of this machine: write the whole path, or ./{text} for a folder of this name"
        ) from error


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select a pipeline on a cluster or an earlier run on this machine."""
    parser.add_argument("name", nargs="?", metavar="NAME|FILE", help=NAME_OR_FILE)
    add_workdir(parser)
    add_cluster_arguments(parser)


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select a pipeline on a cluster or a run on this machine, whose name is required."""
    parser.add_argument("name", metavar="NAME|FILE", help=NAME_OR_FILE)
    add_workdir(parser)
    add_cluster_arguments(parser)


def parse_timeout(text: str | None) -> float | None:
    """Return the seconds of a --timeout such as 90s, 30m or 1h30m, or None without a text; raises UsageError."""
    if text is None:
        return None
    match = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text)
    # The pattern also matches the empty text, which is no duration.
    if not text or match is None:
        raise UsageError(
            f"--timeout {text!r}: must be a duration such as 90s, 30m or 1h30m"
        )
    hours, minutes, seconds = match.groups("0")
    return int(hours) * HOUR + int(minutes) * MINUTE + int(seconds)
