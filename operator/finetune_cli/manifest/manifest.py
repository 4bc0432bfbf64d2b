"""A manifest file as a pipeline, or everything that is wrong with it."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, StringConstraints, ValidationError

from finetune_cli.diagnostics import Diagnostic, InvalidManifest, closest_match, quoted, sort_diagnostics
from finetune_cli.manifest import messages as words
from finetune_cli.manifest import yaml_reader as documents
from finetune_cli.manifest.schema_check import SchemaChecker, broken_rules, format_path
from finetune_cli.manifest.yaml_reader import YamlNode
from finetune_operator.api.group import API_VERSION, KIND
from finetune_operator.api.spec import PipelineSpec
from finetune_operator.api.stages.base import LabelKey, LabelValue
from finetune_trainer.contract import ContractModel

DnsSubdomain = Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=words.DNS_SUBDOMAIN)]
DnsLabel = Annotated[str, StringConstraints(min_length=1, max_length=63, pattern=words.DNS_LABEL)]


KEY_STEP = "[key]"
"""What pydantic adds to the place of an error that is in a mapping's key."""
RULE_ERROR = "rule"
"""Rules are judged apart, so that they are even when other fields are wrong."""


def _exactly(word: str) -> Callable[[str], str]:
    def check(value: str) -> str:
        if value != word:
            raise ValueError(f"must be {word}")
        return value

    return check


class Metadata(ContractModel):
    """Kubernetes' own part of the object; what the operator does not look at may be anything."""

    name: DnsSubdomain
    namespace: DnsLabel = "default"
    labels: dict[LabelKey, LabelValue] = Field(default_factory=dict)
    annotations: dict[LabelKey, str] = Field(default_factory=dict)
    creation_timestamp: Any = None
    deletion_grace_period_seconds: Any = None
    deletion_timestamp: Any = None
    finalizers: Any = None
    generate_name: Any = None
    generation: Any = None
    managed_fields: Any = None
    owner_references: Any = None
    resource_version: Any = None
    self_link: Any = None
    uid: Any = None


class Envelope(ContractModel):
    """The whole document."""

    api_version: Annotated[str, AfterValidator(_exactly(API_VERSION))]
    kind: Annotated[str, AfterValidator(_exactly(KIND))]
    metadata: Metadata
    spec: PipelineSpec
    status: Any = None


@dataclass(frozen=True)
class Manifest:
    """What one document asks for."""

    path: Path
    line: int
    """Where its document begins in the file."""
    name: str
    namespace: str
    annotations: dict[str, str]
    spec: PipelineSpec
    body: dict[str, Any]
    """The document as it was written, without its status."""


@dataclass
class ReadResult:
    """What a file holds: manifests that can be used, everything that is wrong, and what is worth knowing."""

    manifests: list[Manifest] = field(default_factory=list)
    diagnostics: list[Diagnostic] = field(default_factory=list)
    warnings: list[Diagnostic] = field(default_factory=list)


def read(path: Path) -> Manifest:
    """Give the one pipeline in a file; raises ManifestInvalid with every problem."""
    reading = read_all(path)
    for second in reading.manifests[1:]:
        message = "a second pipeline; this command takes one a file"
        reading.diagnostics.append(Diagnostic(path, second.line, "", message))
    if reading.diagnostics:
        raise InvalidManifest(sort_diagnostics(reading.diagnostics))
    return reading.manifests[0]


def read_all(path: Path) -> ReadResult:
    """Read every document of a file; nothing is raised."""
    text = documents.load(path)
    reading = ReadResult(diagnostics=text.diagnostics)
    for document in text.documents:
        _check(path, document, reading)
    reading.diagnostics = sort_diagnostics(reading.diagnostics)
    return reading


def _check(file: Path, document: YamlNode, reading: ReadResult) -> None:
    if not isinstance(document.data, dict):
        message = f"must be keys and values: apiVersion, kind, metadata, spec (got {quoted(document.plain())})"
        reading.diagnostics.append(Diagnostic(file, document.line, "", message))
        return
    status = document.data.pop("status", None)
    if status:
        reading.warnings.append(Diagnostic(file, status.line, "status", "is ignored, as kubectl apply ignores it"))
    stranger = _wrong_kind(file, document)
    if stranger:
        reading.diagnostics.append(stranger)
        return
    mending = SchemaChecker(file, document)
    mending.check(Envelope, document)
    envelope, wrong = _parsed(mending)
    problems = [*mending.problems, *wrong, *_broken_rules(mending)]
    reading.diagnostics += problems
    if envelope and not problems and not document.broken:
        about = envelope.metadata
        reading.manifests.append(
            Manifest(
                file, document.line, about.name, about.namespace, about.annotations, envelope.spec, document.plain()
            )
        )


def _wrong_kind(file: Path, document: YamlNode) -> Diagnostic | None:
    """Say that the document is of another kind, whose keys are none of our business."""
    kind = document.follow(("kind",))[1:]
    if not kind or not isinstance(kind[0].data, str) or closest_match(kind[0].data, [KIND]):
        return None
    return Diagnostic(file, kind[0].line, "kind", f"must be {KIND} (got {quoted(kind[0].data)})")


def _parsed(mending: SchemaChecker) -> tuple[Envelope | None, list[Diagnostic]]:
    # Strictly and as JSON: Kubernetes takes no "8" for 8, as pydantic would by itself.
    text = json.dumps(mending.document.plain())
    try:
        return Envelope.model_validate_json(text, strict=True), []
    except ValidationError as invalid:
        return None, list(_translated(mending, invalid))


def _translated(mending: SchemaChecker, invalid: ValidationError) -> Iterator[Diagnostic]:
    for error in invalid.errors(include_url=False):
        location = tuple(step for step in error["loc"] if step != KEY_STEP)
        if error["type"] == RULE_ERROR or location in mending.reported:
            continue
        value = mending.document.follow(location)[-1]
        path = format_path(mending.document, location)
        yield Diagnostic(mending.file, value.line, path, words.describe(error, value))


def _broken_rules(mending: SchemaChecker) -> Iterator[Diagnostic]:
    document = mending.document
    for location, rule in broken_rules(Envelope, document.plain()):
        place = (*location, *rule.field.split("."))
        yield Diagnostic(mending.file, document.follow(place)[-1].line, format_path(document, place), rule.message)
