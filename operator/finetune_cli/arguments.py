"""Where a pipeline lives, here or on a cluster, and which folders stand for claims: arguments that commands share."""

import argparse
import importlib
import re
from collections.abc import Iterable
from pathlib import Path

from finetune_cli.diagnostics import UsageError
from finetune_cli.manifest.manifest import Manifest, read
from finetune_cli.manifest.messages import DNS_SUBDOMAIN

RUNS = Path(".finetune")
MANIFESTS = frozenset({".yaml", ".yml", ".json"})
LOCAL_FLAGS = {
    "workdir": "--workdir",
    "claim": "--claim",
    "until": "--until",
    "evict": "--evict",
    "kill": "--kill",
    "keep_serving": "--keep-serving",
}
CLIENT = frozenset({"kubernetes", "aiohttp"})
NAME_OR_FILE = "a pipeline on a cluster, or the manifest of a run on this machine"


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --context and --namespace."""
    words = "the cluster, as the kubeconfig calls it (default: its current context)"
    parser.add_argument("--context", help=words)
    words = "the pipeline's namespace (default: the manifest's, else the context's)"
    parser.add_argument("-n", "--namespace", help=words)


def targets_cluster(target: str | None, arguments: argparse.Namespace) -> bool:
    """Tell a pipeline on a cluster from a run on this machine; raises Refused where the arguments mean both."""
    there = arguments.context or arguments.namespace or getattr(arguments, "all_namespaces", False)
    here = [flag for name, flag in LOCAL_FLAGS.items() if getattr(arguments, name, None)]
    if there and here:
        raise UsageError(f"{here[0]} is for a run on this machine, and --context and --namespace are for a cluster")
    if there or here:
        return bool(there)
    return not is_manifest(target) if target else not _runs()


def is_manifest(target: str) -> bool:
    """Tell a file from a pipeline's name."""
    return Path(target).suffix in MANIFESTS or Path(target).is_file()


def run_on_cluster(work: str, arguments: argparse.Namespace) -> int:
    """Do the work on a cluster; its client is imported only here, for that takes longer than most work on a laptop."""
    try:
        module = importlib.import_module(f"finetune_cli.cluster.{work}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in CLIENT:
            raise
        raise UsageError("a cluster needs one more library: .ci/install operator, in a clone of the project") from error
    code: int = module.run(arguments)
    return code


def add_local_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --workdir and --claim."""
    add_workdir(parser)
    words = "the folder that stands for pvc://NAME; remembered in the work folder"
    parser.add_argument("--claim", action="append", default=[], metavar="NAME=FOLDER", help=words)


def add_workdir(parser: argparse.ArgumentParser) -> None:
    """Add --workdir."""
    parser.add_argument("--workdir", type=Path, help=f"where the run is kept (default: {RUNS}/NAME)")


def workdir_for(manifest: Manifest, given: Path | None) -> Path:
    """Give the folder of a manifest's run."""
    return (given or RUNS / manifest.name).absolute()


def find_workdir(name: str | None, given: Path | None) -> Path:
    """Give the folder of an earlier run: the one given, a manifest's, or the only one; raises Refused."""
    if given or name:
        chosen = given or workdir_for(read(Path(str(name))), None)
        if not (chosen / "pipeline.json").is_file():
            raise UsageError(f"{chosen} holds no run; name one with --workdir")
        return chosen.absolute()
    runs = _runs()
    if len(runs) != 1:
        found = f"there are {', '.join(run.name for run in runs)}" if runs else f"there is none in {RUNS}"
        raise UsageError(f"which run? {found}; name one, or use --workdir")
    return runs[0].absolute()


def claims(given: Iterable[str]) -> dict[str, Path]:
    """Read NAME=FOLDER arguments; raises Refused."""
    return dict(_claim(text) for text in given)


def _claim(text: str) -> tuple[str, Path]:
    name, separator, folder = text.partition("=")
    if not separator or not re.fullmatch(DNS_SUBDOMAIN, name):
        raise UsageError(f"--claim {text}: must be NAME=FOLDER, the name as a cluster takes it: a-z, 0-9, - and .")
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise UsageError(f"--claim {text}: {path} is no folder")
    return name, path


def _runs() -> list[Path]:
    return sorted(path.parent for path in RUNS.glob("*/pipeline.json"))


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what names a pipeline on a cluster, or an earlier run on this machine."""
    parser.add_argument("name", nargs="?", metavar="NAME|FILE", help=NAME_OR_FILE)
    add_workdir(parser)
    add_cluster_arguments(parser)


def add_name(parser: argparse.ArgumentParser) -> None:
    """Add what names a pipeline on a cluster."""
    parser.add_argument("name", metavar="NAME|FILE", help="the pipeline, or its manifest")
    add_cluster_arguments(parser)


def require_cluster(arguments: argparse.Namespace, here: str) -> None:
    """Raise Refused for a run on this machine, and say what is done `here` instead."""
    if not targets_cluster(arguments.name, arguments):
        command = arguments.command
        raise UsageError(
            f"{command} is for a cluster: add -n or --context for the pipeline of {arguments.name} there; "
            f"on this machine {here}"
        )
