"""A published model that a pipeline adopts as its result, so that a new cluster does not train it again. Pure."""

import re
from collections.abc import Mapping

from finetune_operator.api.spec import STAGES, PipelineSpec
from finetune_operator.api.stages.base import StageSpec
from finetune_operator.api.status import StageStatus
from finetune_trainer.contract import AnyResult

MODEL = re.compile(r"(?P<uri>\S+://\S+)@(?P<digest>sha256:[0-9a-f]{64})")
FORM = "finetune.dev/adopt must be URI@sha256:DIGEST of a model that push has published, as in status.model"
PUBLISHERS = tuple(kind.name for kind in STAGES if kind.publishes)
"""Stages whose result a pipeline may adopt."""


def adoption_error(spec: PipelineSpec, text: str) -> str | None:
    """Return why the annotation names no model that the pipeline could have published; None if it does."""
    match = MODEL.fullmatch(text)
    if match is None:
        return f"{text!r}: {FORM}"
    publishers = [stage for stage in spec.stages().values() if stage.publishes]
    if not publishers:
        names = " or ".join(PUBLISHERS)
        return f"finetune.dev/adopt needs spec.{names}, whose result it is: add {names}, or remove the annotation"
    for publisher in publishers:
        result = adopted_result(publisher, text, "")
        if result:
            return _refusal(spec, result)
    if _leaves_folder(match["uri"]):
        return f"finetune.dev/adopt: {match['uri']} leaves the folder of its target: remove . and .. from its path"
    [stage, *_] = publishers
    targets = ", ".join(stage.published_uris())
    return f"finetune.dev/adopt: {match['uri']} lies in none of {stage.name}.targets ({targets}): correct either"


def _refusal(spec: PipelineSpec, result: AnyResult) -> str | None:
    """Return why a stage of the pipeline cannot go on with an adopted result; None if all can."""
    for stage in spec.stages().values():
        problem = stage.adoption_problem(result)
        if problem:
            return f"finetune.dev/adopt: {problem}"
    return None


def _leaves_folder(uri: str) -> bool:
    return not {".", ".."}.isdisjoint(uri.split("/"))


def adopted_result(stage: StageSpec, text: str, identity: str) -> AnyResult | None:
    """Return the result of a stage as if it had published this model; None if the annotation names none of its."""
    match = MODEL.fullmatch(text)
    if match is None or _leaves_folder(match["uri"]):
        return None
    return stage.adopted_result(match["uri"], match["digest"], identity)


def may_adopt(stages: Mapping[str, StageStatus]) -> bool:
    """Return whether nothing of the pipeline has begun: a model that it has made itself is never replaced."""
    return not any(stage.attempts or stage.result for stage in stages.values())


def is_adopted(stages: Mapping[str, StageStatus]) -> bool:
    """Return whether the published model comes from no attempt of this pipeline."""
    return any(
        _has_foreign_result(stages[name]) for name in PUBLISHERS if name in stages
    )


def _has_foreign_result(status: StageStatus) -> bool:
    identities = {attempt.identity for attempt in status.attempts}
    return status.result is not None and status.identity not in identities
