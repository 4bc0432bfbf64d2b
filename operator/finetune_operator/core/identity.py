"""Hashes of each stage: its inputs (what determines the result), its identity, and its execution (how it runs).

The identity names the result: folders and labels carry it. It is the hash of the inputs at the time when the stage was
first asked for them, and stays as long as the inputs do.

Same inputs and a result: the result is reused. Same inputs, other execution: a new attempt resumes in the same folder.
Other inputs: a new attempt starts from the beginning in another folder.
"""

import hashlib
import json
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from finetune_operator import api
from finetune_operator.api.spec import STAGES
from finetune_operator.api.stages.base import StageSpec
from finetune_trainer import contract
from finetune_trainer.contract import RESULTS_VERSION, StageConfig

# Folders and labels carry it. 64 bits are enough for the runs of one pipeline.
IDENTITY_DIGITS = 16
EXECUTION_FIELDS = ("pod", "placement")
PROGRAM_FIELDS = ("image", "command", "args", "env")
POD_METADATA = frozenset({"labels", "annotations"})
PINS = ("model_pin", "model_digest", "start_pin", "start_digest")
"""Fields of a config that come from the result of prepare."""
CONTENT_FIELDS = frozenset({*PINS, *(kind.name for kind in STAGES)})
"""Fields of a config that come from earlier stages, and not from the spec."""


@cache
def release() -> str:
    """Return the hash of the code on which the inputs and the execution of a stage depend.

    Two programs with the same value compute the same hashes of the same spec.
    """
    folders = [Path(package.__path__[0]) for package in (api, contract)]
    files = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    return _hash([file.read_text("utf-8") for file in (*files, Path(__file__))])


@dataclass(frozen=True)
class _Hashed:
    """The hashes of a stage, and what they were made of."""

    spec: "weakref.ref[StageSpec]"
    config: StageConfig
    source_digests: Mapping[str, str]
    inputs: str
    execution: str


_hashed: dict[int, _Hashed] = {}
"""id of a spec -> its last hashes, for as long as the spec is in memory."""


def hashes_of(
    spec: StageSpec, config: StageConfig, source_digests: Mapping[str, str]
) -> tuple[str, str]:
    """Return the hashes of a stage's inputs and of its execution.

    A pipeline is reconciled several times a stage with the same spec, and nearly always with the same config.
    """
    key = id(spec)
    known = _hashed.get(key)
    if (
        known
        and known.spec() is spec
        and known.config == config
        and known.source_digests == source_digests
    ):
        return known.inputs, known.execution
    hashed = _Hashed(
        # Without the callback the entry would outlive the spec, and another spec may get its id.
        spec=weakref.ref(spec, lambda _: _hashed.pop(key, None)),
        config=config,
        source_digests=dict(source_digests),
        inputs=inputs_of(spec, config, source_digests),
        execution=execution_of(spec),
    )
    _hashed[key] = hashed
    return hashed.inputs, hashed.execution


def inputs_of(
    spec: StageSpec, config: StageConfig, source_digests: Mapping[str, str]
) -> str:
    """Return two hashes of everything that determines the stage's result: the values of the spec, and all contents.

    The values are hashed as they are, defaults included: a version with another default is asked for another result.
    That this version has more fields than the version before is no other result: `core/adoption.py`.

    Contents are the results of earlier stages, and `source_digests`: URI -> content digest, for sources that the
    cluster can read. So data that was edited in place counts as other data. If the user replaces the program, the
    program is part of the values. If the result is a running server, its execution is, too.
    """
    # Without contents that are absent: a later version may know more of them.
    fields = config.model_dump(
        mode="json",
        exclude={"identity", *config.non_identity_fields},
        exclude_none=True,
    )
    earlier = {name: fields.pop(name) for name in CONTENT_FIELDS & fields.keys()}
    values = {"stage": spec.name, "config": fields, "program": _program(spec)}
    if spec.runs_server:
        values["runs"] = execution_of(spec)
    digests = {
        uri: source_digests[uri] for uri in config.strings() if uri in source_digests
    }
    return f"{_hash(values)}-{_hash([digests, earlier])}"


def have_equal_values(spec: StageSpec, config: StageConfig, other: StageConfig) -> bool:
    """Return whether two configs of a stage ask for the same result, apart from their contents."""
    inputs = inputs_of(spec, config, {})
    other_inputs = inputs_of(spec, other, {})
    return inputs.partition("-")[0] == other_inputs.partition("-")[0]


def contents_of(inputs: str) -> str:
    """Return the part of the inputs that no version of the operator computes in another way."""
    return inputs.partition("-")[2]


def identity_of(inputs: str) -> str:
    """Return the name of the result of these inputs, as this version of the trainer makes it."""
    return _hash([RESULTS_VERSION, inputs])


def program_of(spec: StageSpec) -> str:
    """Return the hash of the program that the user runs in place of the trainer; empty without one."""
    program = _program(spec)
    return _hash(program) if program else ""


def _program(spec: StageSpec) -> dict[str, object]:
    """Return the program that the user runs in place of the trainer, whose image decides nothing about the result."""
    if not spec.pod.command:
        return {}
    return spec.pod.model_dump(
        mode="json", include={*PROGRAM_FIELDS}, exclude_defaults=True
    )


def execution_of(spec: StageSpec) -> str:
    """Return the hash of how the stage runs: its nodes, resources, image and environment.

    Fields at their default are left out, so that a later version with more fields stops no running Job.
    """
    fields = {*EXECUTION_FIELDS, *spec.non_identity_fields} - spec.in_place_fields
    content = spec.model_dump(mode="json", include=fields, exclude_defaults=True)
    if spec.runs_server:
        _drop_metadata(content)
    placement = content.pop("placement", {})
    # The other fields of the placement concern the next attempt only.
    if "capacity" in placement:
        content["placement"] = placement["capacity"]
    checks = spec.early_checks()
    if checks:
        content["checks"] = checks
    return _hash(content)


def _drop_metadata(content: dict[str, Any]) -> None:
    """Remove labels and annotations of the pod: they change no answer, and another server would need all its GPUs."""
    pod = content.pop("pod", {})
    kept = {name: value for name, value in pod.items() if name not in POD_METADATA}
    if kept:
        content["pod"] = kept


def _hash(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:IDENTITY_DIGITS]
