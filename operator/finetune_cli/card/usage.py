"""The section about use: how to load the model, to serve it and to make it again."""

from typing import Any

import yaml

from finetune_cli.card.markup import (
    Markup,
    code_block,
    details,
    element,
    join,
    section,
)
from finetune_cli.card.record import RunRecord
from finetune_operator.api.group import API_VERSION, KIND
from finetune_trainer.contract import PrepareResult, PublishedTarget, PushResult
from finetune_trainer.contract.uris import hub_id, without_secrets
from finetune_trainer.contract.usage import load_code

# A manifest is to be copied, so the usual ones are shown in full.
LONG_MANIFEST = 8_000
"""Characters of a manifest; a chat template in it may have more."""
NOT_SHOWN = frozenset({"pod", "podDefaults", "tracking"})
"""Fields that the manifest of a card leaves out: they change no result, and may hold tokens."""


def usage_section(record: RunRecord) -> Markup:
    """Return the section."""
    return section("use", "Use it", _load(record), _serve(record), _reproduce(record))


def _load(record: RunRecord) -> Markup:
    result = record.stage("push").result
    if not isinstance(result, PushResult):
        return Markup()
    blocks = []
    for form in ("Merged", "Adapter"):
        target = result.first(form)
        if target:
            title = "Load the model" if form == "Merged" else "Load the adapter"
            text = _code_of(record, target)
            heading = element("h3", title)
            blocks.append(join((heading, code_block(text, title))))
    return join(blocks)


def _code_of(record: RunRecord, target: PublishedTarget) -> str:
    prepared = record.stage("prepare").result
    conversations = isinstance(prepared, PrepareResult) and prepared.conversations
    uri = without_secrets(target.uri)
    place = hub_id(uri) or record.folders.get(target.uri)
    comment = ""
    # A store that is no hub, and no folder here: the code cannot load from it.
    if place is None:
        place = "FOLDER"
        comment = f"# FOLDER: a copy of the files at {uri!r}\n"
    base = None
    # An adapter is loaded onto its base model, a merged model by itself.
    if target.format == "Adapter":
        base = _base(record)
    return comment + load_code(place, base, conversations=conversations)


def _base(record: RunRecord) -> str:
    uri = record.pipeline.spec.model.uri
    return hub_id(uri) or record.folders.get(uri) or without_secrets(uri)


def _serve(record: RunRecord) -> Markup:
    if not record.status.model or not record.serve_commands:
        return Markup()
    text = "\n".join(record.serve_commands)
    return join((element("h3", "Serve it"), code_block(text, "Serve it")))


def _reproduce(record: RunRecord) -> Markup:
    text = (
        "The same manifest, data and versions give the same adapter, byte for byte, "
        "on a machine with the same processor."
    )
    manifest = code_block(manifest_text(record), "Manifest", LONG_MANIFEST)
    command = Markup()
    if record.reproduce_command:
        command = code_block(record.reproduce_command, "Make it again")
    summary = "The manifest, without pods and trackers"
    return join(
        (
            element("h3", "Make it again"),
            element("p", text),
            command,
            details(summary, manifest),
        )
    )


def manifest_text(record: RunRecord) -> str:
    """Return a manifest of the same results as YAML: what is not a default, without what may be secret."""
    spec = record.pipeline.spec.model_dump(
        mode="json", by_alias=True, exclude_defaults=True
    )
    manifest = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": record.name},
        "spec": _without(spec),
    }
    return yaml.safe_dump(manifest, sort_keys=False, allow_unicode=True)


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _without(inner)
            for name, inner in value.items()
            if name not in NOT_SHOWN
        }
    if isinstance(value, list):
        return [_without(inner) for inner in value]
    if isinstance(value, str):
        return without_secrets(value)
    return value
