"""The section about lineage: the versions and digests of all that the model was made from."""

from collections.abc import Iterator
from itertools import zip_longest

from finetune_cli.card.markup import (
    Content,
    Markup,
    code,
    facts,
    join,
    section,
    shortened,
    table,
)
from finetune_cli.card.record import RunRecord
from finetune_operator.api.spec import STAGES
from finetune_trainer.contract import PrepareResult, TrainResult
from finetune_trainer.contract.uris import without_secrets


def lineage_section(record: RunRecord) -> Markup:
    """Return the section."""
    rows = []
    for kind in STAGES:
        stage = record.stage(kind.name)
        # A stage that has not begun has no identity yet.
        if not stage.identity:
            continue
        digest = ""
        if stage.result:
            digest = stage.result.digest
        row = (
            kind.name,
            code(stage.identity),
            code(digest),
            str(stage.results_version),
        )
        rows.append(row)
    head = (
        "Stage",
        "Identity of its inputs",
        "Digest of its result",
        "Results version",
    )
    return section(
        "lineage",
        "Lineage",
        facts([*_sources(record), *_model(record)]),
        table("Results of the stages", head, rows, "texts"),
    )


def _sources(record: RunRecord) -> Iterator[tuple[str, Content]]:
    spec = record.pipeline.spec
    model = spec.model
    prepared = record.stage("prepare").result
    pins: tuple[str | None, ...] = ()
    model_pin = None
    if isinstance(prepared, PrepareResult):
        pins = prepared.data_pins
        model_pin = prepared.model_pin
    yield "Base model", _place(model.uri, model.revision, model_pin)
    if isinstance(prepared, PrepareResult):
        yield "Digest of the base model", _code(prepared.model_digest)
    start = spec.train.start_from
    if start:
        stage = record.stage("prepare")
        place = _place(start.uri, start.revision, stage.start_pin)
        yield "Adapter to start from", place
        yield "Digest of that adapter", _code(stage.start_digest)
    sources = [(dataset.uri, dataset.revision) for dataset in spec.datasets]
    if spec.validation.uri:
        sources.append((spec.validation.uri, spec.validation.revision))
    # The pins are in the order of the manifest, and none before prepare is done.
    for (uri, revision), pin in zip_longest(sources, pins[: len(sources)]):
        yield "Data set", _place(uri, revision, pin)
    if isinstance(prepared, PrepareResult):
        yield "Digest of the data", _code(prepared.data_digest)


def _model(record: RunRecord) -> Iterator[tuple[str, Content]]:
    trained = record.stage("train").result
    if isinstance(trained, TrainResult):
        yield "Digest of the trained weights", _code(trained.digest)
    model = record.status.model
    if model:
        yield "Published model", _code(without_secrets(model.uri))
        yield "Digest of the published model", _code(model.digest)
        yield "Endpoint", _code(model.endpoint)
    pipeline = record.pipeline
    # The uid tells this pipeline from an earlier pipeline of the same name.
    yield "Pipeline", _code(f"{pipeline.key}, uid {pipeline.uid}")
    yield "Generation of the manifest", str(pipeline.generation)
    yield "Version of finetune", shortened(record.version)


def _place(uri: str, revision: str | None, pin: str | None) -> Markup:
    """Return a source with the revision of the manifest and the version that was read."""
    parts: list[Content] = [_code(without_secrets(uri))]
    if revision:
        parts += ["at", _code(revision)]
    if pin and pin != revision:
        parts += ["read as", _code(pin)]
    return join(parts, " ")


def _code(text: str | None) -> Markup:
    if not text:
        return Markup()
    return code(text)
