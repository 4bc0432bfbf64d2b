"""Reads a manifest file into pipelines, or reports all its errors."""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, StringConstraints, ValidationError
from pydantic_core import ErrorDetails

from finetune_cli.diagnostics import (
    Diagnostic,
    InvalidManifest,
    quoted,
    sort_diagnostics,
)
from finetune_cli.manifest import value_check
from finetune_cli.manifest.affinity import Affinity
from finetune_cli.manifest.annotations import annotation_at
from finetune_cli.manifest.messages.messages import describe
from finetune_cli.manifest.other_files import is_other_file, other_file
from finetune_cli.manifest.overrides import Override, apply_overrides
from finetune_cli.manifest.schema_check import SchemaChecker, broken_rules, error_at
from finetune_cli.manifest.yaml import reader as yaml_reader
from finetune_cli.manifest.yaml.reader import Location, YamlFile, YamlNode
from finetune_operator.api.group import API_VERSIONS, KIND
from finetune_operator.api.names import (
    DNS_LABEL,
    DNS_SUBDOMAIN,
    AnnotationKey,
    LabelKey,
    LabelValue,
)
from finetune_operator.api.rules import Rule
from finetune_operator.api.spec import STAGES, PipelineSpec
from finetune_trainer.contract import ContractModel

DnsSubdomain = Annotated[
    str, StringConstraints(min_length=1, max_length=253, pattern=DNS_SUBDOMAIN)
]
DnsLabel = Annotated[
    str, StringConstraints(min_length=1, max_length=63, pattern=DNS_LABEL)
]

M = TypeVar("M", bound=ContractModel)
KEY_STEP = "[key]"
"""Pydantic appends this step to the location of an error in a mapping's key."""
RULE_ERROR = "rule"
"""Pydantic's type of a broken rule.

These errors are dropped: rules are checked separately, so that they are reported even if other fields are wrong.
"""


def _one_of(expected: tuple[str, ...]) -> Callable[[str], str]:
    def check(value: str) -> str:
        if value not in expected:
            raise ValueError(f"must be {expected[0]}")
        return value

    return check


class Metadata(ContractModel):
    """Object metadata as Kubernetes defines it. Fields that the operator does not use may hold anything."""

    name: DnsSubdomain
    namespace: DnsLabel = "default"
    labels: dict[LabelKey, LabelValue] = Field(default_factory=dict)
    annotations: dict[AnnotationKey, str] = Field(default_factory=dict)
    # What `kubectl get --output yaml` prints, so that its output can be checked and applied.
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

    api_version: Annotated[str, AfterValidator(_one_of(API_VERSIONS))]
    kind: Annotated[str, AfterValidator(_one_of((KIND,)))]
    metadata: Metadata
    spec: PipelineSpec
    # `kubectl get` prints it. It is taken out before this check.
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
    document: YamlNode
    """The document with the lines of the file."""

    def diagnostic(self, location: Location, message: str) -> Diagnostic:
        """Return an error in the field at this location below `spec`; an absent field has its parent's line."""
        full = ("spec", *location)
        return error_at(self.path, self.document, full, message)

    @staticmethod
    def location_of(field: str) -> tuple[str | int, ...]:
        """Return the location of a field that a message names, such as datasets[0].uri."""
        parts = re.findall(r"[^.\[\]]+", field)
        return tuple(int(part) if part.isdigit() else part for part in parts)


@dataclass
class ReadResult:
    """The valid manifests of a file, its errors, and its warnings."""

    manifests: list[Manifest] = field(default_factory=list)
    diagnostics: list[Diagnostic] = field(default_factory=list)
    warnings: list[Diagnostic] = field(default_factory=list)

    def only(self) -> Manifest:
        """Return the only pipeline; raises InvalidManifest with all errors."""
        for extra in self.manifests[1:]:
            message = "a second pipeline; this command accepts one pipeline per file"
            error = Diagnostic(extra.path, extra.line, "", message)
            self.diagnostics.append(error)
        if self.diagnostics:
            raise InvalidManifest(sort_diagnostics(self.diagnostics))
        return self.manifests[0]


def read(path: Path, overrides: Sequence[Override] = ()) -> Manifest:
    """Return the only pipeline of a file; raises InvalidManifest with all errors."""
    return read_all(path, overrides).only()


def read_all(path: Path, overrides: Sequence[Override] = ()) -> ReadResult:
    """Return all manifests, errors and warnings of a file, after the overrides of its fields.

    Raises UsageError for an override of a list's entry that is not there, and nothing else.
    """
    return _checked(path, yaml_reader.load(path), overrides)


def read_text(path: Path, text: str, overrides: Sequence[Override] = ()) -> ReadResult:
    """Return the manifests, errors and warnings of a text that is not in the file yet."""
    return _checked(path, yaml_reader.parse(path, text.encode()), overrides)


def _checked(
    path: Path, file: YamlFile, overrides: Sequence[Override] = ()
) -> ReadResult:
    result = ReadResult(diagnostics=file.diagnostics)
    if file.documents and is_other_file(file.documents[0]):
        # All other errors would be about a manifest that it is not.
        result.diagnostics = []
        file.documents[1:] = []
    for document in file.documents:
        if isinstance(document.data, dict):
            apply_overrides(document, overrides)
        _check(path, document, result)
    result.diagnostics = sort_diagnostics(result.diagnostics)
    return result


def _check(file: Path, document: YamlNode, result: ReadResult) -> None:
    other = other_file(file, document)
    if other:
        result.diagnostics.append(other)
        return
    if not isinstance(document.data, dict):
        got = quoted(document.plain())
        message = (
            f"must be a mapping with apiVersion, kind, metadata and spec (got {got})"
        )
        result.diagnostics.append(Diagnostic(file, document.line, "", message))
        return
    # A manifest from `kubectl get` has a status.
    status = document.data.pop("status", None)
    if status:
        message = "is ignored, as kubectl apply ignores it"
        result.warnings.append(Diagnostic(file, status.line, "status", message))
    checker = SchemaChecker(file, document)
    envelope, diagnostics = _checked_part(checker, Envelope, ())
    for location in _affinities(document):
        # The schema passes an affinity on as it is, so that it is checked alone.
        part = SchemaChecker(file, document)
        _, errors = _checked_part(part, Affinity, location)
        diagnostics += errors
    result.diagnostics += diagnostics
    if envelope is None or diagnostics or document.broken:
        return
    manifest = _manifest(file, document, envelope)
    result.manifests.append(manifest)
    for location, message in value_check.errors(manifest.spec, file.parent):
        result.diagnostics.append(manifest.diagnostic(location, message))
    for location, message in value_check.warnings(manifest.spec):
        result.warnings.append(manifest.diagnostic(location, message))


def _affinities(document: YamlNode) -> Iterator[Location]:
    """Yield the locations of the affinities of pods."""
    pods: list[Location] = [("spec", "podDefaults")]
    pods += [("spec", stage.name, "pod") for stage in STAGES]
    for pod in pods:
        location = (*pod, "affinity")
        # The root and a value for each step, if the affinity is there.
        nodes = document.follow(location)
        is_there = len(nodes) > len(location)
        if is_there and isinstance(nodes[-1].data, dict):
            yield location


def _checked_part(
    checker: SchemaChecker, kind: type[M], root: Location
) -> tuple[M | None, list[Diagnostic]]:
    """Return the part of a document at a location as a model, or None, and its errors."""
    # First the keys: the check renames misspelled keys, so that the values below them are checked, too.
    checker.check(kind, checker.document.nearest(root), root)
    part, invalid = _parse(checker, kind, root)
    broken = dict(_broken_rules(checker, kind, root, invalid))
    errors = list(checker.diagnostics)
    errors += _without_devices(invalid, broken)
    errors += broken.values()
    return part, errors


def _manifest(file: Path, document: YamlNode, envelope: Envelope) -> Manifest:
    meta = envelope.metadata
    return Manifest(
        path=file,
        line=document.line,
        name=meta.name,
        namespace=meta.namespace,
        annotations=meta.annotations,
        spec=envelope.spec,
        body=document.plain(),
        document=document,
    )


def _parse(
    checker: SchemaChecker, kind: type[M], root: Location
) -> tuple[M | None, dict[Location, Diagnostic]]:
    """Return the model, or the errors by their locations."""
    # Strict and from JSON: Kubernetes rejects "8" for 8, and pydantic's default mode accepts it.
    data = checker.document.nearest(root).plain()
    text = json.dumps(data)
    try:
        return kind.model_validate_json(text, strict=True), {}
    except ValidationError as invalid:
        return None, dict(_diagnostics_of(checker, kind, root, invalid))


def _diagnostics_of(
    checker: SchemaChecker,
    kind: type[ContractModel],
    root: Location,
    invalid: ValidationError,
) -> Iterator[tuple[Location, Diagnostic]]:
    for error in invalid.errors(include_url=False):
        below = tuple(step for step in error["loc"] if step != KEY_STEP)
        location = (*root, *below)
        if error["type"] == RULE_ERROR or location in checker.reported:
            continue
        if _counts_valid_entries_only(error):
            continue
        # The value is there under another name, which is reported already.
        if error["type"] == "missing" and location in checker.replaced:
            continue
        value = checker.document.nearest(location)
        message = describe(error, value, annotation_at(kind, below))
        yield location, error_at(checker.file, checker.document, location, message)


def _counts_valid_entries_only(error: ErrorDetails) -> bool:
    """Return whether a list is too short only because pydantic does not count its invalid entries."""
    if error["type"] != "too_short":
        return False
    needed: int = error["ctx"]["min_length"]
    return len(error["input"]) >= needed


def _broken_rules(
    checker: SchemaChecker,
    kind: type[ContractModel],
    root: Location,
    invalid: Collection[Location],
) -> Iterator[tuple[Location, Diagnostic]]:
    """Yield location and error of the rules that are broken.

    A rule about a field with an error of its own adds nothing.
    """
    document = checker.document
    renamed = {location[-1] for location in checker.replaced}
    part = document.nearest(root)
    for location, rule in broken_rules(kind, part.plain(), root):
        # CEL reads a field as self.name, or as self.?name if it may be absent.
        fields = set(re.findall(r"[.][?]?(\w+)", rule.cel))
        # The rule may hold, once the name of its field is corrected.
        if not fields.isdisjoint(renamed):
            continue
        field_location = (*location, *rule.field.split("."))
        if field_location in checker.incomplete or field_location in invalid:
            continue
        for place, message in _places(document, location, rule):
            yield place, error_at(checker.file, document, place, message)


def _places(
    document: YamlNode, location: Location, rule: Rule
) -> Iterator[tuple[Location, str]]:
    """Yield the places at which a document breaks a rule, each with what is wrong."""
    if rule.details is not None:
        data = document.nearest(location).plain()
        for path, message in rule.details(data):
            yield (*location, *path), message
    elif _is_about(location, rule):
        yield location, rule.message
    else:
        steps = rule.field.split(".")
        yield (*location, *steps), rule.message


def _without_devices(
    invalid: Mapping[Location, Diagnostic], broken: Collection[Location]
) -> Iterator[Diagnostic]:
    """Yield the errors but for fractions of devices, which no quotes can mend: a rule about all devices says so."""
    for location, diagnostic in invalid.items():
        *parents, resource = location
        is_device = "/" in str(resource)
        if is_device and tuple(parents) in broken:
            continue
        yield diagnostic


def _is_about(location: Location, rule: Rule) -> bool:
    """Return whether the object at the location is itself the field of the rule: envFrom of an entry of envFrom."""
    keys = [step for step in location if isinstance(step, str)]
    return keys[-1:] == [rule.field]
