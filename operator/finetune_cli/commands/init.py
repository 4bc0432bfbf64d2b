"""`finetune init`: write a manifest to start from."""

import argparse
import os
import re
import shlex
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Literal

import yaml

from finetune_cli.commands import Commands
from finetune_cli.diagnostics import UsageError
from finetune_cli.exit_codes import INVALID
from finetune_cli.fields import Source, sources, targets
from finetune_cli.manifest import yaml_reader
from finetune_cli.manifest.manifest import read_text
from finetune_cli.manifest.messages import DNS_SUBDOMAIN, PATTERNS
from finetune_cli.manifest.value_check import resembles_repository
from finetune_operator.api.datasets import REPOSITORY
from finetune_operator.api.spec import PipelineSpec

DESCRIPTION = """\
Write a valid manifest with comments. On a terminal, the base model and the training data are asked for where --model or
--data is not given; elsewhere the manifest then has the placeholders base-model and data.jsonl. ORG/NAME that is no
path on this machine means the repository of the Hugging Face hub. With --cluster, every source must be one that a pod
can read.
"""
DEFAULT_NAME, DEFAULT_MODEL, DEFAULT_DATA, DEFAULT_TARGET = (
    "my-pipeline",
    "base-model",
    "data.jsonl",
    "published",
)
QUESTIONS = {
    "model": "Base model, a folder or hf://ORG/NAME",
    "data": "Training records, a file or hf://ORG/NAME/PATH",
}
PATH_START = re.compile(r"[A-Za-z0-9_.]")
Kind = Literal["model", "data", "target"]
FILE_HELP = "manifest to write (default: pipeline.yaml)"


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "init", help="write a manifest with comments to start from", description=DESCRIPTION
    )
    parser.add_argument(
        "file", nargs="?", type=Path, metavar="FILE", default=Path("pipeline.yaml"), help=FILE_HELP
    )
    parser.add_argument(
        "--model",
        metavar="PATH|URI",
        help="base model: a folder, hf://ORG/NAME or pvc://CLAIM/PATH",
    )
    parser.add_argument(
        "--data", metavar="PATH|URI", help="training records: a file, or a URI as for --model"
    )
    parser.add_argument(
        "--name", default=DEFAULT_NAME, help=f"name of the pipeline (default: {DEFAULT_NAME})"
    )
    parser.add_argument(
        "--cluster", action="store_true", help="write a manifest that runs on a cluster as it is"
    )
    parser.add_argument(
        "--target",
        metavar="URI",
        help="where the model is published (default: published beside FILE)",
    )
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the manifest; return INVALID where the file exists or cannot be written."""
    file: Path = arguments.file
    if file.exists() and not arguments.force:
        print(f"{file}: already exists; --force overwrites it", file=sys.stderr)
        return INVALID
    text = manifest_text(arguments)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"{file}: cannot be written: {error.strerror}", file=sys.stderr)
        return INVALID
    for missing in (
        _missing_on_cluster(read_text(file, text).manifests[0].spec) if arguments.cluster else ()
    ):
        print(f"{file}: may still need {missing}")
    print(f"{file}: written; next: {_next_command(arguments)}")
    return 0


def manifest_text(arguments: argparse.Namespace) -> str:
    """Return the manifest for the arguments and the answers; raises UsageError for values that cannot be in it."""
    if not re.fullmatch(DNS_SUBDOMAIN, arguments.name):
        raise UsageError(f"--name {arguments.name!r}: {PATTERNS[DNS_SUBDOMAIN]}")
    model = _source(arguments, "model", DEFAULT_MODEL)
    data = _source(arguments, "data", DEFAULT_DATA)
    if arguments.target:
        target = _uri(arguments, "target", arguments.target)
    else:
        target = _target_on_cluster(arguments, model, data) if arguments.cluster else DEFAULT_TARGET
    template = Template((files("finetune_cli") / "template.yaml").read_text("utf-8"))
    text = template.substitute(
        name=_scalar(arguments.name),
        model=_scalar(model),
        data=_scalar(data),
        target=f"{_scalar(target):<24}",  # keeps the column of comments
        on_cluster="" if arguments.cluster else ", once every path below is an hf:// or pvc:// URI",
    )
    if found := read_text(arguments.file, text).diagnostics:
        raise UsageError("; ".join(f"{one.path}: {one.message}" for one in found))
    return text


def _scalar(value: str) -> str:
    """Return a string as YAML: in quotes where the manifest would otherwise hold something else."""
    documents = yaml_reader.parse(Path(), value.encode()).documents
    if [one.data for one in documents] == [value]:
        return value
    return str(yaml.safe_dump(value, default_style="'", allow_unicode=True)).strip()


def _missing_on_cluster(spec: PipelineSpec) -> Iterator[str]:
    """Yield what a manifest that a cluster accepts may still need to succeed there."""
    found = [*sources(spec), *targets(spec)]
    if any(source.uri.startswith("hf://") for source in found):
        yield "spec.podDefaults.envFrom, a Secret with HF_TOKEN: for what is not public on the hub, and to push there"
    if any(source.kind == "data" and REPOSITORY.fullmatch(source.uri) for source in found):
        yield "split in spec.datasets: for a data set on the hub that has several"
    yield "spec.train.pod.resources.limits, and the same in evaluate and deploy: for a GPU"


def _next_command(arguments: argparse.Namespace) -> str:
    file = shlex.quote(str(arguments.file))
    return f"kubectl apply -f {file}" if arguments.cluster else f"finetune validate --check {file}"


def _source(arguments: argparse.Namespace, kind: Kind, default: str) -> str:
    """Return the URI of a source as the manifest needs it: given, asked for, or a placeholder."""
    given = getattr(arguments, kind)
    if given is None and sys.stdin.isatty() and sys.stdout.isatty():
        given = _ask(kind, default)
    if given is None:
        if arguments.cluster:
            raise UsageError(
                f"--cluster needs --{kind}: hf://ORG/NAME, or pvc://CLAIM/PATH of a claim with its files"
            )
        return default
    return _uri(arguments, kind, given)


def _ask(kind: str, default: str) -> str | None:
    """Return the user's answer; None for the default. Raises UsageError where the input ends instead."""
    try:
        return input(f"{QUESTIONS[kind]} [{default}]: ").strip() or None
    except EOFError:
        print()
        raise UsageError("the input has ended without an answer; nothing was written") from None


def _uri(arguments: argparse.Namespace, kind: Kind, given: str) -> str:
    """Return a path or URI as the manifest needs it; raises UsageError where the manifest cannot have it."""
    uri = _as_uri(kind, given, arguments.file)
    if not re.fullmatch(r"\S+", uri):
        raise UsageError(
            f"--{kind} {given!r}: must be without spaces, as URIs in manifests are; use a link to it"
        )
    if arguments.cluster and ("://" not in uri or uri.startswith("file://")):
        raise UsageError(
            f"--{kind} {given}: a pod cannot read this machine; use hf://ORG/NAME or pvc://CLAIM/PATH"
        )
    return uri


def _as_uri(kind: Kind, given: str, manifest: Path) -> str:
    """Return a path as a URI relative to the manifest; ORG/NAME that is no path as the repository of the hub."""
    if "://" in given:
        return given
    path = Path(given).expanduser()
    if not path.exists() and resembles_repository(Source((), given, kind, "")):
        return f"hf://{given}"
    if path.is_absolute():
        return f"file://{path}"
    relative = os.path.relpath(path, manifest.parent)
    # Without ./ it is no path for the manifest: because of its first character, or as it could be on the hub.
    needs_dot = not PATH_START.match(relative) or (not path.exists() and "/" in relative)
    return f"./{relative}" if needs_dot and not relative.startswith(".") else relative


def _target_on_cluster(arguments: argparse.Namespace, *uris: str) -> str:
    """Return a folder on a claim that the manifest names already; raises UsageError where it names none."""
    claim = next(
        (uri.removeprefix("pvc://").partition("/")[0] for uri in uris if uri.startswith("pvc://")),
        None,
    )
    if claim is None:
        raise UsageError(
            "--cluster needs --target pvc://CLAIM/PATH: no source is on a claim that could hold the model"
        )
    return f"pvc://{claim}/published/{arguments.name}"
