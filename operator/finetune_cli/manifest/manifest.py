"""A manifest file as a pipeline, or everything that is wrong with it."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, StringConstraints, ValidationError

from finetune_cli.diagnostics import ManifestInvalid, Problem, in_order, likeliest, quoted
from finetune_cli.manifest import messages as words
from finetune_cli.manifest import yaml_reader as documents
from finetune_cli.manifest.schema_check import Mending, broken_rules, written
from finetune_cli.manifest.yaml_reader import Value
from finetune_operator.api.group import API_VERSION, KIND
from finetune_operator.api.spec import PipelineSpec
from finetune_operator.api.stages.base import LabelKey, LabelValue
from finetune_trainer.contract import Contract

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


class Metadata(Contract):
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


class Envelope(Contract):
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
class Reading:
    """What a file holds: manifests that can be used, everything that is wrong, and what is worth knowing."""

    manifests: list[Manifest] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)


def read(path: Path) -> Manifest:
    """Give the one pipeline in a file; raises ManifestInvalid with every problem."""
    reading = read_all(path)
    for second in reading.manifests[1:]:
        message = "a second pipeline; this command takes one a file"
        reading.problems.append(Problem(path, second.line, "", message))
    if reading.problems:
        raise ManifestInvalid(in_order(reading.problems))
    return reading.manifests[0]


def read_all(path: Path) -> Reading:
    """Read every document of a file; nothing is raised."""
    text = documents.load(path)
    reading = Reading(problems=text.problems)
    for document in text.documents:
        _check(path, document, reading)
    reading.problems = in_order(reading.problems)
    return reading


def _check(file: Path, document: Value, reading: Reading) -> None:
    if not isinstance(document.data, dict):
        message = f"must be keys and values: apiVersion, kind, metadata, spec (got {quoted(document.plain())})"
        reading.problems.append(Problem(file, document.line, "", message))
        return
    status = document.data.pop("status", None)
    if status:
        reading.notes.append(Problem(file, status.line, "status", "is ignored, as kubectl apply ignores it"))
    stranger = _stranger(file, document)
    if stranger:
        reading.problems.append(stranger)
        return
    mending = Mending(file, document)
    mending.mend(Envelope, document)
    envelope, wrong = _parsed(mending)
    problems = [*mending.problems, *wrong, *_broken_rules(mending)]
    reading.problems += problems
    if envelope and not problems and not document.broken:
        about = envelope.metadata
        reading.manifests.append(
            Manifest(
                file, document.line, about.name, about.namespace, about.annotations, envelope.spec, document.plain()
            )
        )


def _stranger(file: Path, document: Value) -> Problem | None:
    """Say that the document is of another kind, whose keys are none of our business."""
    kind = document.follow(("kind",))[1:]
    if not kind or not isinstance(kind[0].data, str) or likeliest(kind[0].data, [KIND]):
        return None
    return Problem(file, kind[0].line, "kind", f"must be {KIND} (got {quoted(kind[0].data)})")


def _parsed(mending: Mending) -> tuple[Envelope | None, list[Problem]]:
    # Strictly and as JSON: Kubernetes takes no "8" for 8, as pydantic would by itself.
    text = json.dumps(mending.document.plain())
    try:
        return Envelope.model_validate_json(text, strict=True), []
    except ValidationError as invalid:
        return None, list(_translated(mending, invalid))


def _translated(mending: Mending, invalid: ValidationError) -> Iterator[Problem]:
    for error in invalid.errors(include_url=False):
        location = tuple(step for step in error["loc"] if step != KEY_STEP)
        if error["type"] == RULE_ERROR or location in mending.said:
            continue
        value = mending.document.follow(location)[-1]
        path = written(mending.document, location)
        yield Problem(mending.file, value.line, path, words.in_words(error, value))


def _broken_rules(mending: Mending) -> Iterator[Problem]:
    document = mending.document
    for location, rule in broken_rules(Envelope, document.plain()):
        place = (*location, *rule.field.split("."))
        yield Problem(mending.file, document.follow(place)[-1].line, written(document, place), rule.message)
