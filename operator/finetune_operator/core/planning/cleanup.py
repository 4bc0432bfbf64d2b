"""What a plan removes: Jobs that no attempt has, Jobs that are not kept, and a Service without a server. Pure."""

from collections.abc import Iterator, Mapping

from finetune_operator.api.conditions import Reason
from finetune_operator.api.status import StageStatus
from finetune_operator.core.assessment import PipelineAssessment
from finetune_operator.core.planning.actions import (
    Action,
    DeleteJob,
    DeleteService,
    StopJob,
)


def stray_actions(assessment: PipelineAssessment) -> Iterator[Action]:
    """Yield the removal of live Jobs without a running attempt, and of a Service that no stage needs.

    A late request of an earlier leader may have created such a Job after its attempt had been recorded as ended.
    """
    running = running_jobs(assessment)
    for name, job in assessment.observation.jobs.items():
        if job.live and name not in running:
            yield StopJob(name, Reason.SPEC_CHANGED)
    specs = [stage.spec for stage in assessment.stages.values() if stage.spec]
    has_server = any(spec.runs_server for spec in specs)
    if assessment.observation.has_service and not has_server:
        yield DeleteService()


def ended_job_actions(
    assessment: PipelineAssessment, planned: Mapping[str, StageStatus], jobs_kept: int
) -> Iterator[Action]:
    """Yield the deletion of ended Jobs, except the newest `jobs_kept` of each stage.

    The planned statuses are written before, so the end of these Jobs is recorded.
    """
    kept = running_jobs(assessment)
    for status in planned.values():
        ended = [attempt.job for attempt in status.attempts if attempt.finished_at]
        # A slice from -0 would be all of them.
        if jobs_kept > 0:
            kept.update(ended[-jobs_kept:])
    for name, job in assessment.observation.jobs.items():
        if not job.live and name not in kept:
            yield DeleteJob(name)


def running_jobs(assessment: PipelineAssessment) -> set[str]:
    """Return the Jobs of running attempts."""
    attempts = [stage.status.running_attempt for stage in assessment.stages.values()]
    return {attempt.job for attempt in attempts if attempt}
