"""Where a run lives and which folders stand for claims: arguments that several commands share."""

import argparse
import re
from collections.abc import Iterable
from pathlib import Path

from finetune_cli.manifest import Manifest
from finetune_cli.problems import Refused
from finetune_cli.words import DNS_SUBDOMAIN

RUNS = Path(".finetune")


def add_places(parser: argparse.ArgumentParser) -> None:
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


def existing_workdir(name: str | None, given: Path | None) -> Path:
    """Give the folder of an earlier run: the one named, or the only one; raises Refused."""
    if given or name:
        chosen = given or RUNS / str(name)
        if not (chosen / "pipeline.json").is_file():
            raise Refused(f"{chosen} holds no run; name one with --workdir")
        return chosen.absolute()
    runs = sorted(path.parent for path in RUNS.glob("*/pipeline.json"))
    if len(runs) != 1:
        found = f"there are {', '.join(run.name for run in runs)}" if runs else f"there is none in {RUNS}"
        raise Refused(f"which run? {found}; name one, or use --workdir")
    return runs[0].absolute()


def claims(given: Iterable[str]) -> dict[str, Path]:
    """Read NAME=FOLDER arguments; raises Refused."""
    return dict(_claim(text) for text in given)


def _claim(text: str) -> tuple[str, Path]:
    name, separator, folder = text.partition("=")
    if not separator or not re.fullmatch(DNS_SUBDOMAIN, name):
        raise Refused(f"--claim {text}: must be NAME=FOLDER, the name as a cluster takes it: a-z, 0-9, - and .")
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise Refused(f"--claim {text}: {path} is no folder")
    return name, path


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add what names an earlier run."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="the pipeline, where there are several")
    add_workdir(parser)
