"""Arguments that commands share: the pipeline, on this machine or on a cluster, and the folders of claims."""

import argparse
import importlib
import re
from collections.abc import Iterable
from pathlib import Path

from finetune_cli.diagnostics import UsageError
from finetune_cli.manifest.manifest import Manifest, read
from finetune_cli.manifest.messages import DNS_SUBDOMAIN

RUNS = Path(".finetune")
"""Folder of the runs on this machine, relative to the current folder."""
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
NAME_OR_FILE = "name of a pipeline on a cluster, or manifest of a run on this machine"


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --context and --namespace."""
    parser.add_argument("--context", help="kubeconfig context of the cluster (default: the current context)")
    text = "namespace of the pipeline (default: that of the manifest, else that of the context)"
    parser.add_argument("-n", "--namespace", help=text)


def targets_cluster(target: str | None, arguments: argparse.Namespace) -> bool:
    """Return True for a pipeline on a cluster, False for a run on this machine.

    Raises UsageError where flags of both are given.
    """
    has_cluster_flag = arguments.context or arguments.namespace or getattr(arguments, "all_namespaces", False)
    local_flags = [flag for name, flag in LOCAL_FLAGS.items() if getattr(arguments, name, None)]
    if has_cluster_flag and local_flags:
        raise UsageError(
            f"{local_flags[0]} is for a run on this machine: remove it, or remove --context, --namespace and -A"
        )
    if has_cluster_flag or local_flags:
        return bool(has_cluster_flag)
    return not is_manifest(target) if target else not _runs()


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
    text = "folder that replaces pvc://NAME on this machine; later runs in the work folder remember it"
    parser.add_argument("--claim", action="append", default=[], metavar="NAME=FOLDER", help=text)


def add_workdir(parser: argparse.ArgumentParser) -> None:
    """Add --workdir."""
    parser.add_argument("--workdir", type=Path, help=f"work folder of the run on this machine (default: {RUNS}/NAME)")


def workdir_for(manifest: Manifest, given: Path | None) -> Path:
    """Return the absolute work folder of a manifest's run: the given one, or RUNS/NAME."""
    return (given or RUNS / manifest.name).absolute()


def find_workdir(name: str | None, given: Path | None) -> Path:
    """Return the work folder of an earlier run: the given one, that of a manifest, or the only one.

    Raises UsageError where there is no such run, or where several could be meant.
    """
    if given or name:
        chosen = given or workdir_for(read(Path(str(name))), None)
        if not (chosen / "pipeline.json").is_file():
            raise UsageError(
                f"{chosen} holds no run; choose its folder with --workdir, or start one: finetune run FILE"
            )
        return chosen.absolute()
    runs = _runs()
    if not runs:
        raise UsageError(f"there is no run in {RUNS}; choose its folder with --workdir")
    if len(runs) > 1:
        names = ", ".join(run.name for run in runs)
        raise UsageError(f"there are several runs in {RUNS} ({names}); choose one with --workdir {RUNS}/NAME")
    return runs[0].absolute()


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


def _runs() -> list[Path]:
    return sorted(path.parent for path in RUNS.glob("*/pipeline.json"))


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
    if not targets_cluster(arguments.name, arguments):
        raise UsageError(
            f"{arguments.command} works on clusters only: add -n or --context for the pipeline of {arguments.name} "
            f"there; on this machine, {local_equivalent}"
        )
