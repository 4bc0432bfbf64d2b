"""`finetune init`: write a manifest to start from."""

import argparse
import json
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

from finetune_cli.arguments import path_of
from finetune_cli.checks.proposal import look_at_base, propose
from finetune_cli.checks.sample import MAX_BYTES, SAMPLED, Sample, read_sample
from finetune_cli.checks.sources import path_problems
from finetune_cli.commands import Commands
from finetune_cli.diagnostics import UsageError
from finetune_cli.exit_codes import INVALID
from finetune_cli.forecast.learning_rate import start_rate
from finetune_cli.manifest.fields import UriField, sources, targets
from finetune_cli.manifest.json_schema import write_schema
from finetune_cli.manifest.manifest import read_text
from finetune_cli.manifest.messages.messages import PATTERNS
from finetune_cli.manifest.pipeline_name import pipeline_name
from finetune_cli.manifest.value_check import resembles_repository
from finetune_cli.manifest.yaml import reader as yaml_reader
from finetune_operator.api.datasets import REPOSITORY
from finetune_operator.api.names import DNS_SUBDOMAIN
from finetune_operator.api.spec import PipelineSpec
from finetune_trainer.contract.environment import is_pattern

DESCRIPTION = """\
Write a valid manifest with comments, and beside it .finetune/schema.json for editors. A model and records on this
machine are read: they decide the name, the context length, the batch and the columns. On a terminal, the command asks
for the base model and the training data if --model or --data is not given; elsewhere the manifest then has the
placeholders base-model and data.jsonl. ORG/NAME that is no path on this machine means the repository of the Hugging
Face hub. With --cluster, a pod must be able to read every source.
"""
DEFAULT_NAME = "my-pipeline"
DEFAULT_MODEL = "base-model"
DEFAULT_DATA = "data.jsonl"
DEFAULT_TARGET = "published"
DEFAULT_PROMPT = "Hello"
MAX_PROMPT = 200
"""Longest prompt of a record that the manifest repeats."""
QUESTIONS = {
    "model": "Base model, a folder or hf://ORG/NAME",
    "data": "Training records, a file or hf://ORG/NAME/PATH",
}
PATH_START = re.compile(r"[A-Za-z0-9_.]")
PACKING_LINE = (
    "    packing: false                # this model would mix the records of a row\n"
)
OBJECTIVE_LINE = (
    "    objective: DPO                # the records are pairs: chosen and rejected\n"
)
Kind = Literal["model", "data", "target"]
FILE_HELP = "manifest to write (default: pipeline.yaml)"


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "init",
        help="write a manifest with comments to start from",
        description=DESCRIPTION,
    )
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        metavar="FILE",
        default=Path("pipeline.yaml"),
        help=FILE_HELP,
    )
    parser.add_argument(
        "--model",
        metavar="PATH|URI",
        help="base model: a folder, hf://ORG/NAME or pvc://CLAIM/PATH",
    )
    parser.add_argument(
        "--data",
        metavar="PATH|URI",
        help="training records: a file, or a URI as for --model",
    )
    parser.add_argument(
        "--name",
        help=f"name of the pipeline (default: the name of the data, or {DEFAULT_NAME})",
    )
    parser.add_argument(
        "--cluster",
        action="store_true",
        help="write a manifest that runs on a cluster as it is",
    )
    parser.add_argument(
        "--target",
        metavar="URI",
        help="where the model is published (default: published beside FILE)",
    )
    parser.add_argument(
        "--force", action="store_true", help="overwrite an existing file"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the manifest; return INVALID if the file exists or cannot be written."""
    file: Path = arguments.file
    # Before the questions: the answers would be lost.
    if file.exists() and not arguments.force:
        print(f"{file}: already exists; --force overwrites it", file=sys.stderr)
        return INVALID
    text = manifest_text(arguments)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"{file}: cannot be written: {error.strerror}", file=sys.stderr)
        return INVALID
    write_schema(file)
    if arguments.cluster:
        spec = read_text(file, text).manifests[0].spec
        for missing in _missing_on_cluster(spec):
            print(f"{file}: may still need {missing}")
    doubt = _doubt(file, read_text(file, text).manifests[0].spec.datasets[0].uri)
    if doubt:
        print(f"{file}: {doubt}", file=sys.stderr)
    print(f"{file}: written; next: {_next_command(arguments)}")
    return 0


def manifest_text(arguments: argparse.Namespace) -> str:
    """Return the manifest for the arguments and the answers; raises UsageError for values that cannot be in it."""
    if arguments.name and not re.fullmatch(DNS_SUBDOMAIN, arguments.name):
        raise UsageError(f"--name {arguments.name!r}: {PATTERNS[DNS_SUBDOMAIN]}")
    model = _source(arguments, "model", DEFAULT_MODEL)
    data = _source(arguments, "data", DEFAULT_DATA)
    if arguments.name is None:
        arguments.name = _name_of(data)
    sample = _sample(arguments.file, data)
    folder = _on_this_machine(arguments.file, model)
    base = look_at_base(model, folder)
    if base.problem:
        raise UsageError(f"--model {model}: {base.problem}")
    proposal = propose(folder, sample)
    target = _target(arguments, model, data)
    has_pairs = sample is not None and sample.has_preferences
    # As YAML 1.2 reads a number, without the zero that Python writes into an exponent.
    rate = f"{start_rate('DPO' if has_pairs else 'SFT'):.0e}".replace("e-0", "e-")
    condition = ", once every path below is an hf:// or pvc:// URI"
    if arguments.cluster:
        condition = ""
    template = Template((files("finetune_cli") / "template.yaml").read_text("utf-8"))
    text = template.substitute(
        name=_scalar(arguments.name),
        model=_scalar(model),
        data=_scalar(data),
        # Padded, so that the comments behind it stay in one column.
        target=f"{_scalar(target):<24}",
        on_cluster=condition,
        columns=_columns_line(sample),
        packing="" if base.packs or has_pairs else PACKING_LINE,
        objective=OBJECTIVE_LINE if has_pairs else "",
        rate=rate,
        fraction=f"{proposal.validation_fraction:<20g}",
        context=f"{proposal.context_length:<15}",
        micro=proposal.micro_batch_size,
        accumulated=proposal.gradient_accumulation_steps,
        batch=proposal.micro_batch_size * proposal.gradient_accumulation_steps,
        prompt=_prompt(sample),
    )
    # The same check as of any manifest: the schema knows best which values are wrong.
    diagnostics = read_text(arguments.file, text).diagnostics
    if diagnostics:
        errors = [
            f"{diagnostic.path}: {diagnostic.message}" for diagnostic in diagnostics
        ]
        raise UsageError("; ".join(errors))
    return text


def _name_of(data: str) -> str:
    """Return the name of a pipeline for a data set: the name of its file or repository, as Kubernetes allows it."""
    if data == DEFAULT_DATA:
        return DEFAULT_NAME
    last = data.rstrip("/").rpartition("/")[2].partition(".")[0]
    return pipeline_name(last) or DEFAULT_NAME


def _on_this_machine(manifest: Path, uri: str) -> Path | None:
    """Return the path of a URI as the manifest has it; None if it is not on this machine."""
    path = manifest.parent / uri.removeprefix("file://")
    if "://" in uri.removeprefix("file://") or not path.exists():
        return None
    return path


def _sample(manifest: Path, data: str) -> Sample | None:
    """Return the first records; None if they are not in a file on this machine."""
    path = _on_this_machine(manifest, data)
    if path is None and "://" not in data and is_pattern(data):
        paths = sorted(manifest.parent.glob(data))
        path = paths[0] if paths else None
    if path is None or not path.is_file():
        return None
    return read_sample(path)


def _doubt(manifest: Path, data: str) -> str:
    """Return why the manifest may not fit the data; empty if it fits, or if the data is not read here."""
    # Parquet and text are not read here, which says nothing about the data.
    if not data.removesuffix(".gz").endswith(SAMPLED):
        return ""
    path = _on_this_machine(manifest, data)
    if path is None or not path.is_file() or path.stat().st_size > MAX_BYTES:
        return ""
    sample = read_sample(path)
    if sample is None:
        return f"{data} cannot be read: finetune validate --check says where"
    return f"{data}: {sample.problem}" if sample.problem else ""


def _columns_line(sample: Sample | None) -> str:
    if sample is None or not sample.columns:
        return ""
    columns = [f"{field}: {_scalar(name)}" for field, name in sample.columns.items()]
    return f"    columns: {{{', '.join(columns)}}}\n"


def _prompt(sample: Sample | None) -> str:
    """Return the prompt of the smoke test as YAML: a prompt of the data, if it is short."""
    prompt = sample.prompt if sample else None
    if prompt is None or len(prompt) > MAX_PROMPT:
        prompt = DEFAULT_PROMPT
    # JSON is YAML, whatever characters a prompt has.
    return json.dumps(prompt, ensure_ascii=False)


def _target(arguments: argparse.Namespace, model: str, data: str) -> str:
    if arguments.target:
        return _uri(arguments, "target", arguments.target)
    if arguments.cluster:
        return _target_on_cluster(arguments, model, data)
    return DEFAULT_TARGET


def _scalar(value: str) -> str:
    """Return a string as YAML: in quotes if the manifest would otherwise hold something else, such as a number."""
    documents = yaml_reader.parse(Path(), value.encode()).documents
    if [document.data for document in documents] == [value]:
        return value
    return str(yaml.safe_dump(value, default_style="'", allow_unicode=True)).strip()


def _missing_on_cluster(spec: PipelineSpec) -> Iterator[str]:
    """Yield additions without which a manifest that a cluster accepts may fail there."""
    uris = [*sources(spec), *targets(spec)]
    if any(field.uri.startswith("hf://") for field in uris):
        yield "spec.podDefaults.envFrom, a Secret with HF_TOKEN: for what is not public on the hub, and to push there"
    if any(field.kind == "data" and REPOSITORY.fullmatch(field.uri) for field in uris):
        yield "split in spec.datasets: for a data set on the hub that has several"
    yield "spec.train.pod.resources.limits, and the same in evaluate and deploy: for a GPU"


def _next_command(arguments: argparse.Namespace) -> str:
    file = shlex.quote(str(arguments.file))
    if arguments.cluster:
        return f"kubectl apply -f {file}"
    return f"finetune validate --check {file}"


def _source(arguments: argparse.Namespace, kind: Kind, default: str) -> str:
    """Return the URI of a source as the manifest needs it: given, asked for, or a placeholder."""
    given = getattr(arguments, kind)
    # In a script there is no user to answer, and in a pipe the question would become a part of the output.
    if given is None and sys.stdin.isatty() and sys.stdout.isatty():
        given = _ask(kind, default)
    if given is not None:
        return _uri(arguments, kind, given)
    if arguments.cluster:
        raise UsageError(
            f"--cluster needs --{kind}: hf://ORG/NAME, or pvc://CLAIM/PATH of a claim with its files"
        )
    return default


def _ask(kind: str, default: str) -> str | None:
    """Return the user's answer; None for the default. Raises UsageError if the input ends instead."""
    try:
        return input(f"{QUESTIONS[kind]} [{default}]: ").strip() or None
    except EOFError:
        # The error begins on a line of its own, not behind the question.
        print()
        raise UsageError(
            "the input has ended without an answer; nothing was written"
        ) from None


def _uri(arguments: argparse.Namespace, kind: Kind, given: str) -> str:
    """Return a path or URI as the manifest needs it; raises UsageError if the manifest cannot have it."""
    uri = _as_uri(kind, given, arguments.file)
    if not re.fullmatch(r"\S+", uri):
        raise UsageError(
            f"--{kind} {given!r}: must be without spaces, as URIs in manifests are; use a link to it"
        )
    is_path = "://" not in uri or uri.startswith("file://")
    if arguments.cluster and is_path:
        raise UsageError(
            f"--{kind} {given}: a pod cannot read this machine; use hf://ORG/NAME or pvc://CLAIM/PATH"
        )
    if is_path and kind != "target":
        _check_exists(kind, given)
    return uri


def _check_exists(kind: Literal["model", "data"], given: str) -> None:
    """Raise UsageError if a path cannot be used as a source."""
    path = path_of(given.removeprefix("file://"))
    for problem in path_problems(UriField((), given, kind, ""), path):
        raise UsageError(f"--{kind} {given}: {problem}")


def _as_uri(kind: Kind, given: str, manifest: Path) -> str:
    """Return a path as a URI relative to the manifest; ORG/NAME that is no path as the repository of the hub."""
    if "://" in given:
        return given
    path = path_of(given)
    if not path.exists() and resembles_repository(UriField((), given, kind, "")):
        return f"hf://{given}"
    if path.is_absolute():
        return f"file://{path}"
    relative = os.path.relpath(path, manifest.parent)
    if relative.startswith("."):
        return relative
    # Without ./ it is no path for the manifest: because of its first character, or as it could be on the hub.
    could_be_repository = not path.exists() and "/" in relative
    if could_be_repository or not PATH_START.match(relative):
        return f"./{relative}"
    return relative


def _target_on_cluster(arguments: argparse.Namespace, *uris: str) -> str:
    """Return a folder on a claim that the manifest names already; raises UsageError if it names none."""
    for uri in uris:
        if uri.startswith("pvc://"):
            claim = uri.removeprefix("pvc://").partition("/")[0]
            return f"pvc://{claim}/published/{arguments.name}"
    raise UsageError(
        "--cluster needs --target pvc://CLAIM/PATH: no source is on a claim that could hold the model"
    )
