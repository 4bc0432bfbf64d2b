"""A published model that a pipeline adopts as its result, so that a new cluster does not train it again. Pure."""

import re
from collections.abc import Mapping

from finetune_operator.api.spec import PipelineSpec
from finetune_operator.api.stages.push import Push
from finetune_operator.api.status import StageStatus
from finetune_trainer.contract import PublishedTarget, PushResult

MODEL = re.compile(r"(?P<uri>\S+://\S+)@(?P<digest>sha256:[0-9a-f]{64})")
FORM = "finetune.dev/adopt must be URI@sha256:DIGEST of a model that push has published, as in status.model"


def adoption_error(spec: PipelineSpec, text: str) -> str | None:
    """Return why the annotation names no model that the pipeline could have published; None if it does."""
    match = MODEL.fullmatch(text)
    if match is None:
        return f"{text!r}: {FORM}"
    push = spec.stage(Push.name)
    if not isinstance(push, Push):
        return "finetune.dev/adopt needs spec.push, whose result it is: add push, or remove the annotation"
    if _target(push, match["uri"]) is None:
        targets = ", ".join(target.uri for target in push.targets)
        return f"finetune.dev/adopt: {match['uri']} lies in none of push.targets ({targets}): correct either"
    return None


def adopted_result(push: Push, text: str, identity: str) -> PushResult | None:
    """Return the result of push as if it had published this model; None if the annotation names none."""
    match = MODEL.fullmatch(text)
    target = _target(push, match["uri"]) if match else None
    if match is None or target is None:
        return None
    uri, form = target
    model = PublishedTarget(
        target=uri, uri=match["uri"], format=form, digest=match["digest"], size=0
    )
    return PushResult(identity=identity, digest=match["digest"], published=(model,))


def _target(push: Push, uri: str) -> tuple[str, str] | None:
    """Return the URI and the format of the target that the model was published to, or None."""
    for target in push.targets:
        rest = uri.removeprefix(target.uri)
        if uri.startswith(target.uri) and rest[:1] in {"", "/", "@", ":"}:
            return target.uri, target.format
    return None


def may_adopt(stages: Mapping[str, StageStatus]) -> bool:
    """Return whether nothing of the pipeline has begun: a model that it has made itself is never replaced."""
    return not any(stage.attempts or stage.result for stage in stages.values())


def is_adopted(stages: Mapping[str, StageStatus]) -> bool:
    """Return whether the published model comes from no attempt of this pipeline."""
    push = stages.get(Push.name, StageStatus())
    identities = {attempt.identity for attempt in push.attempts}
    return push.result is not None and push.identity not in identities
