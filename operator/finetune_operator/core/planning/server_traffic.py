"""Which server of a stage is to get the requests, and which servers are to be scaled: pure."""

from collections.abc import Iterator

from finetune_operator.api.status import Outcome
from finetune_operator.core.assessment import StageAssessment
from finetune_operator.core.attempts.history import server_job
from finetune_operator.core.planning.actions import Action, ScaleServer


def scaling(stage: StageAssessment) -> Iterator[Action]:
    """Yield the change of replicas of each server that stays: the server with the traffic, and a starting server."""
    if stage.spec is None or stage.config is None:
        return
    serving = stage.spec.serving(stage.config)
    if serving is None:
        return
    attempt = stage.status.running_attempt
    starting = attempt.job if attempt and not attempt.stopping else None
    for job, server in stage.servers.items():
        stays = server.current or job == starting
        if stays and server.replicas not in {None, serving.replicas}:
            yield ScaleServer(job, serving.replicas)


def traffic_target(stage: StageAssessment) -> str | None:
    """Return the Job of the server that is to get the traffic; None if it has the traffic, or there is no server."""
    target = server_job(stage.status)
    # No current server: none has answered yet, or the Service was deleted and needs the last server that answered.
    if not any(server.current for server in stage.servers.values()):
        target = target or last_answering_server(stage)
    server = stage.servers.get(target) if target else None
    if server is None or server.current:
        return None
    return target


def last_answering_server(stage: StageAssessment) -> str | None:
    """Return the Job of the newest successful attempt whose server still exists, or None."""
    for attempt in reversed(stage.status.attempts):
        if attempt.outcome is Outcome.SUCCEEDED and attempt.job in stage.servers:
            return attempt.job
    return None
