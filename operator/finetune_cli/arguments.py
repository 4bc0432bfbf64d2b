"""Arguments that commands share: the pipeline, on this machine or on a cluster, and the folders of claims."""

import argparse
import importlib
import re
from collections.abc import Iterable
from pathlib import Path

from finetune_cli.diagnostics import UsageError
from finetune_cli.manifest.manifest import Manifest, read
from finetune_cli.manifest.messages import DNS_SUBDOMAIN
from finetune_cli.runs import RUNS, find_runs, manifest_of, run_named
from finetune_operator.core.durations import HOUR, MINUTE

MANIFEST_SUFFIXES = frozenset({".yaml", ".yml", ".json"})
LOCAL_FLAGS = {
    "workdir": "--workdir",
    "claim": "--claim",
    "until": "--until",
    "evict": "--evict",
    "kill": "--kill",
    "keep_serving": "--keep-serving",
}
"""Attribute of the parsed arguments -> a flag that only a run on this machine has."""
CLIENT_PACKAGES = frozenset({"kubernetes", "aiohttp"})
NAME_OR_FILE = "name of a run on this machine or of a pipeline on a cluster, or the manifest of a run on this machine"


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --context and --namespace."""
    parser.add_argument(
        "--context", help="kubeconfig context of the cluster (default: the current context)"
    )
    text = "namespace of the pipeline (default: that of the manifest, else that of the context)"
    parser.add_argument("-n", "--namespace", help=text)


def targets_cluster(target: str | None, arguments: argparse.Namespace) -> bool:
    """Return True for a pipeline on a cluster, False for a run on this machine.

    A run on this machine is preferred to a pipeline of the same name on a cluster, which needs -n or --context.
    Raises UsageError where flags of both are given.
    """
    has_cluster_flag = (
        arguments.context or arguments.namespace or getattr(arguments, "all_namespaces", False)
    )
    local_flags = [flag for name, flag in LOCAL_FLAGS.items() if getattr(arguments, name, None)]
    if has_cluster_flag and local_flags:
        raise UsageError(
            f"{local_flags[0]} is for a run on this machine: remove it, or remove --context, --namespace and -A"
        )
    if has_cluster_flag or local_flags:
        return bool(has_cluster_flag)
    return not (is_manifest(target) or run_named(target)) if target else not find_runs()


def is_manifest(target: str) -> bool:
    """Whether an argument is a file, rather than the name of a pipeline."""
    return Path(target).suffix in MANIFEST_SUFFIXES or Path(target).is_file()


def run_on_cluster(command: str, arguments: argparse.Namespace) -> int:
    """Run the module of `finetune_cli.cluster` with this name and return its exit code.

    The Kubernetes client is imported only here: importing it takes longer than most commands on this machine.
    Raises UsageError where it is not installed.
    """
    try:
        module = importlib.import_module(f"finetune_cli.cluster.{command}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in CLIENT_PACKAGES:
            raise
        raise UsageError(
            "a cluster needs the Kubernetes client library, which is not installed; "
            "run .ci/install operator in a clone of the project"
        ) from error
    code: int = module.run(arguments)
    return code


def add_local_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --workdir and --claim."""
    add_workdir(parser)
    text = (
        "folder that replaces pvc://NAME on this machine; later runs in the work folder remember it"
    )
    parser.add_argument("--claim", action="append", default=[], metavar="NAME=FOLDER", help=text)


def add_workdir(parser: argparse.ArgumentParser) -> None:
    """Add --workdir."""
    parser.add_argument(
        "--workdir",
        type=Path,
        help=f"work folder of the run on this machine (default: {RUNS}/NAME)",
    )


def workdir_for(manifest: Manifest, given: Path | None) -> Path:
    """Return the absolute work folder of a manifest's run: the given one, or RUNS/NAME."""
    return (given or RUNS / manifest.name).absolute()


def find_workdir(name: str | None, given: Path | None) -> Path:
    """Return the work folder of an earlier run: the given one, that of a name or manifest, or the only one.

    Raises UsageError where there is no such run, or where several could be meant.
    """
    if given or name:
        chosen = given or run_named(str(name)) or workdir_for(read(Path(str(name))), None)
        if not (chosen / "pipeline.json").is_file():
            raise UsageError(
                f"{chosen} holds no run; choose its folder with --workdir, or start one: finetune run FILE"
            )
        return chosen.absolute()
    runs = find_runs()
    if not runs:
        raise UsageError(f"there is no run in {RUNS}; choose its folder with --workdir")
    if len(runs) > 1:
        names = ", ".join(run.name for run in runs)
        raise UsageError(f"there are several runs in {RUNS}: {names}; name one")
    return runs[0].absolute()


def manifest_path(target: str | Path) -> Path:
    """Return the manifest that an argument means: a file, or the last manifest of the run of this name.

    Raises UsageError where the run was started by a version that recorded no manifest.
    """
    run = None if is_manifest(str(target)) else run_named(str(target))
    if run is None:
        return Path(target)
    recorded = manifest_of(run)
    if recorded is None:
        raise UsageError(
            f"{run} does not tell its manifest; give the manifest FILE instead of {target}"
        )
    return recorded


def local_runs_hint() -> str:
    """Return which runs there are on this machine, for the error of a name that is none of them."""
    names = ", ".join(run.name for run in find_runs())
    return (
        f"the runs on this machine are {names}"
        if names
        else f"there is no run on this machine in {RUNS}"
    )


def claims(given: Iterable[str]) -> dict[str, Path]:
    """Parse NAME=FOLDER arguments into claim name -> folder; raises UsageError."""
    return dict(_claim(text) for text in given)


def _claim(text: str) -> tuple[str, Path]:
    name, separator, folder = text.partition("=")
    if not separator or not re.fullmatch(DNS_SUBDOMAIN, name):
        raise UsageError(
            f"--claim {text}: must be NAME=FOLDER, where NAME has only lower-case letters, digits, - and ."
        )
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise UsageError(f"--claim {text}: {path} is not a folder")
    return name, path


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select a pipeline on a cluster or an earlier run on this machine."""
    parser.add_argument("name", nargs="?", metavar="NAME|FILE", help=NAME_OR_FILE)
    add_workdir(parser)
    add_cluster_arguments(parser)


def add_name(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select a pipeline on a cluster."""
    parser.add_argument("name", metavar="NAME|FILE", help="name of the pipeline, or its manifest")
    add_cluster_arguments(parser)


def require_cluster(arguments: argparse.Namespace, local_equivalent: str) -> None:
    """Raise UsageError for a run on this machine; the message recommends `local_equivalent` instead."""
    # A bare name is that of a pipeline on a cluster, also where a run on this machine has the same one.
    if is_manifest(arguments.name) and not targets_cluster(arguments.name, arguments):
        raise UsageError(
            f"{arguments.command} works on clusters only: add -n or --context for the pipeline of {arguments.name} "
            f"there; on this machine, {local_equivalent}"
        )


def parse_timeout(text: str | None) -> float | None:
    """Return the seconds of a --timeout such as 90s, 30m or 1h30m, or None without one; raises UsageError."""
    if text is None:
        return None
    found = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text)
    if not text or not found:
        raise UsageError(f"--timeout {text!r}: must be a duration such as 90s, 30m or 1h30m")
    return sum(
        int(number) * unit
        for number, unit in zip(found.groups("0"), (HOUR, MINUTE, 1), strict=True)
    )
