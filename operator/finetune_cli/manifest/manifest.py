"""Reads a manifest file into pipelines, or reports all its errors."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, StringConstraints, ValidationError

from finetune_cli.diagnostics import Diagnostic, InvalidManifest, closest_match, quoted, sort_diagnostics
from finetune_cli.manifest import yaml_reader
from finetune_cli.manifest.messages import DNS_LABEL, DNS_SUBDOMAIN, describe
from finetune_cli.manifest.schema_check import SchemaChecker, broken_rules, format_path
from finetune_cli.manifest.yaml_reader import YamlNode
from finetune_operator.api.group import API_VERSION, KIND
from finetune_operator.api.spec import PipelineSpec
from finetune_operator.api.stages.base import LabelKey, LabelValue
from finetune_trainer.contract import ContractModel

DnsSubdomain = Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=DNS_SUBDOMAIN)]
DnsLabel = Annotated[str, StringConstraints(min_length=1, max_length=63, pattern=DNS_LABEL)]

KEY_STEP = "[key]"
"""Pydantic appends this step to the location of an error in a mapping's key."""
RULE_ERROR = "rule"
"""Pydantic's type of a broken rule.

These errors are dropped: rules are checked separately, so that they are reported even where other fields are wrong.
"""


def _exactly(expected: str) -> Callable[[str], str]:
    def check(value: str) -> str:
        if value != expected:
            raise ValueError(f"must be {expected}")
        return value

    return check


class Metadata(ContractModel):
    """Object metadata as Kubernetes defines it. Fields that the operator does not use may hold anything."""

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
    """One document of a manifest file."""

    api_version: Annotated[str, AfterValidator(_exactly(API_VERSION))]
    kind: Annotated[str, AfterValidator(_exactly(KIND))]
    metadata: Metadata
    spec: PipelineSpec
    status: Any = None


@dataclass(frozen=True)
class Manifest:
    """The pipeline of one valid document."""

    path: Path
    line: int
    """First line of the document in the file."""
    name: str
    namespace: str
    annotations: dict[str, str]
    spec: PipelineSpec
    body: dict[str, Any]
    """The document as parsed from YAML, without its status."""


@dataclass
class ReadResult:
    """The valid manifests of a file, its errors, and its warnings."""

    manifests: list[Manifest] = field(default_factory=list)
    diagnostics: list[Diagnostic] = field(default_factory=list)
    warnings: list[Diagnostic] = field(default_factory=list)


def read(path: Path) -> Manifest:
    """Return the only pipeline of a file; raises InvalidManifest with all errors."""
    result = read_all(path)
    for extra in result.manifests[1:]:
        message = "a second pipeline; this command accepts one pipeline per file"
        result.diagnostics.append(Diagnostic(path, extra.line, "", message))
    if result.diagnostics:
        raise InvalidManifest(sort_diagnostics(result.diagnostics))
    return result.manifests[0]


def read_all(path: Path) -> ReadResult:
    """Return all manifests, errors and warnings of a file; raises nothing."""
    file = yaml_reader.load(path)
    result = ReadResult(diagnostics=file.diagnostics)
    for document in file.documents:
        _check(path, document, result)
    result.diagnostics = sort_diagnostics(result.diagnostics)
    return result


def _check(file: Path, document: YamlNode, result: ReadResult) -> None:
    if not isinstance(document.data, dict):
        message = f"must be a mapping with apiVersion, kind, metadata and spec (got {quoted(document.plain())})"
        result.diagnostics.append(Diagnostic(file, document.line, "", message))
        return
    status = document.data.pop("status", None)
    if status:
        result.warnings.append(Diagnostic(file, status.line, "status", "is ignored, as kubectl apply ignores it"))
    if wrong_kind := _wrong_kind(file, document):
        result.diagnostics.append(wrong_kind)
        return
    checker = SchemaChecker(file, document)
    checker.check(Envelope, document)
    envelope, invalid = _parse(checker)
    diagnostics = [*checker.diagnostics, *invalid, *_broken_rules(checker)]
    result.diagnostics += diagnostics
    if envelope and not diagnostics and not document.broken:
        meta = envelope.metadata
        result.manifests.append(
            Manifest(file, document.line, meta.name, meta.namespace, meta.annotations, envelope.spec, document.plain())
        )


def _wrong_kind(file: Path, document: YamlNode) -> Diagnostic | None:
    """Return an error for a document of another kind, whose keys are then not checked.

    A misspelled FineTunePipeline is not another kind.
    """
    kind = document.follow(("kind",))[1:]
    if not kind or not isinstance(kind[0].data, str) or closest_match(kind[0].data, [KIND]):
        return None
    return Diagnostic(file, kind[0].line, "kind", f"must be {KIND} (got {quoted(kind[0].data)})")


def _parse(checker: SchemaChecker) -> tuple[Envelope | None, list[Diagnostic]]:
    # Strict and from JSON: Kubernetes rejects "8" for 8, and pydantic's default mode accepts it.
    text = json.dumps(checker.document.plain())
    try:
        return Envelope.model_validate_json(text, strict=True), []
    except ValidationError as invalid:
        return None, list(_diagnostics_of(checker, invalid))


def _diagnostics_of(checker: SchemaChecker, invalid: ValidationError) -> Iterator[Diagnostic]:
    for error in invalid.errors(include_url=False):
        location = tuple(step for step in error["loc"] if step != KEY_STEP)
        if error["type"] == RULE_ERROR or location in checker.reported:
            continue
        value = checker.document.follow(location)[-1]
        path = format_path(checker.document, location)
        yield Diagnostic(checker.file, value.line, path, describe(error, value))


def _broken_rules(checker: SchemaChecker) -> Iterator[Diagnostic]:
    document = checker.document
    for location, rule in broken_rules(Envelope, document.plain()):
        field_location = (*location, *rule.field.split("."))
        line = document.follow(field_location)[-1].line
        yield Diagnostic(checker.file, line, format_path(document, field_location), rule.message)
