"""Adopt the stages of another version of the operator: an upgrade or a rollback changes nothing that has begun.

Another version may compute other hashes of the same spec: it has more fields, other defaults, or a trainer with other
results. If the spec is the one that the status describes, the stages keep their identities, and only the hashes with
which a later edit is compared become this version's.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from pydantic import ValidationError

from finetune_operator.api.stages.base import StageSpec
from finetune_operator.api.status import Begun, StageStatus
from finetune_operator.core.identity import (
    contents_of,
    hashes_of,
    have_equal_values,
    program_of,
    release,
)
from finetune_operator.core.pipeline import Pipeline
from finetune_trainer.contract import RESULTS_VERSION, StageConfig

UNREAD = "unread"
"""The version in a status whose generation no operator has read: the stages describe an earlier spec."""


def is_from_other_version(pipeline: Pipeline) -> bool:
    """Return whether another version has written the status, and the spec has not changed since."""
    status = pipeline.status
    if status.observed_version == UNREAD:
        return False
    # Generations only grow, but an object restored from a backup begins at 1 again, with the status from before.
    same_spec = status.observed_generation >= pipeline.generation
    return same_spec and status.observed_version != release()


def adopt_stage(
    pipeline: Pipeline,
    status: StageStatus,
    spec: StageSpec,
    config: StageConfig,
    source_digests: Mapping[str, str],
) -> StageStatus:
    """Return a stage with the hashes of this version, if another version has begun it and no edit concerns it."""
    if pipeline.status.observed_version == release():
        return status
    if is_from_other_version(pipeline):
        return adopt(status, *hashes_of(spec, config, source_digests))
    return adopt_unedited(status, spec, config, source_digests)


def adopt(status: StageStatus, inputs: str, execution: str) -> StageStatus:
    """Return a stage of another version with the hashes of this version; itself if its contents have changed.

    Its running attempt gets the new hash, too, so that it is not stopped. A stage that has not begun keeps nothing: it
    may have other values in this version, which must not get the same name.
    """
    identities = {attempt.identity for attempt in status.attempts}
    if not status.result and status.identity not in identities:
        return status
    # A status from before the inputs were recorded says nothing about its contents.
    if status.inputs and contents_of(status.inputs) != contents_of(inputs):
        return status
    attempts = status.attempts
    running = status.running_attempt
    if running and running.execution == status.execution:
        running = running.model_copy(update={"execution": execution})
        attempts = (*attempts[:-1], running)
    return status.model_copy(
        update={"inputs": inputs, "execution": execution, "attempts": attempts}
    )


def adopt_unedited(
    status: StageStatus,
    spec: StageSpec,
    config: StageConfig,
    source_digests: Mapping[str, str],
) -> StageStatus:
    """Return a stage of another version with this version's hash of its inputs, if the edit since changed none of them.

    The values with which the stage began are compared with the values of the present spec. A field that the other
    version did not know counts with this version's default. A changed stage, or one that cannot be compared, is
    returned as it is. The execution is compared as usual: its hash leaves defaults out.
    """
    begun = status.begun
    if begun is None or begun.program != program_of(spec):
        return status
    try:
        recorded = _read(type(config), begun.config)
    except ValidationError:
        return status
    inputs, execution = hashes_of(spec, config, source_digests)
    if contents_of(status.inputs) != contents_of(inputs):
        return status
    if not have_equal_values(spec, config, recorded):
        return status
    # How a server runs is a part of its inputs.
    if spec.runs_server and status.execution != execution:
        return status
    return status.model_copy(update={"inputs": inputs})


def with_adopted(pipeline: Pipeline, stages: Mapping[str, StageStatus]) -> Pipeline:
    """Return the pipeline with these statuses of its stages, which this version has adopted."""
    status = pipeline.status.model_copy(
        update={"stages": dict(stages), "observed_version": release()}
    )
    return replace(pipeline, status=status)


def is_outdated(status: StageStatus, *, goes_on: bool) -> bool:
    """Return whether a stage must begin anew, because this version's trainer has other results.

    `goes_on` says whether a stage that has begun may go on with the trainer with which it began.
    """
    if status.result or status.results_version == RESULTS_VERSION:
        return False
    # A status from before versions were recorded is left alone. So is a running attempt.
    if not status.results_version or status.running_attempt:
        return False
    return not goes_on or status.begun is None


def go_on_with(begun: Begun, config: StageConfig) -> StageConfig:
    """Return the config with the values that the stage began with; the config itself if they cannot be read.

    Fields that do not affect the result come from the present spec.
    """
    try:
        values = _read(type(config), begun.config)
    except ValidationError:
        # A newer version has begun it, with a field that this version does not know, before a rollback.
        return config
    present = {name: getattr(config, name) for name in config.non_identity_fields}
    return values.model_copy(update=present)


@lru_cache(maxsize=512)
def _read(kind: type[StageConfig], text: str) -> StageConfig:
    return kind.model_validate_json(text)
