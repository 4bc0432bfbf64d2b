"""`finetune logs` on a cluster."""

import argparse
import asyncio
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from finetune_cli.cluster.pods import pod_of
from finetune_cli.cluster.session import (
    POLL_SECONDS,
    ClusterSession,
    connect,
    refresh,
    with_retries,
)
from finetune_cli.diagnostics import UsageError
from finetune_cli.exit_codes import FAILED
from finetune_cli.outcome import has_finished, is_up_to_date
from finetune_cli.output.metrics import TRAIN, print_rows, print_samples, rows_of_curve
from finetune_cli.output.status.text import (
    attempt_line,
    no_attempt,
    print_attempt,
    stage_summary,
    stage_with_log,
)
from finetune_operator.api.status import AttemptStatus, Outcome, StageState, StageStatus
from finetune_operator.core.metadata import STAGE_CONTAINER, workspace_name
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.translate.api_errors import ApiError
from finetune_operator.kubernetes.translate.pod import ObservedPod
from finetune_trainer.contract.metric_rows import METRICS
from finetune_trainer.contract.sample_rows import (
    LOG_PREFIX,
    SampleRow,
    parse_samples,
)

# A stage in another state may still get an attempt, whose log --follow prints.
ENDED_STATES = frozenset({StageState.SUCCEEDED, StageState.FAILED, StageState.SKIPPED})
TIMESTAMPED_LINE = re.compile(r"(\d{4}-\d\d-\d\dT\S+) ?(.*)", re.DOTALL)
"""A line of the pod log API with `timestamps=true`."""


def run(arguments: argparse.Namespace) -> int:
    """Print a log; return FAILED if there is none."""
    return asyncio.run(_run(arguments))


async def _run(arguments: argparse.Namespace) -> int:
    if not arguments.name:
        raise UsageError(
            "name the pipeline before the stage, as in: finetune logs NAME train"
        )
    async with connect(arguments) as session:
        pipeline = await session.get_pipeline()
        if arguments.metrics:
            return _print_metrics(pipeline, arguments.output)
        if arguments.samples:
            return await _print_samples(session, pipeline, arguments.output)
        if arguments.stage is None:
            arguments.stage = stage_with_log(pipeline.status)
        if arguments.stage is None:
            raise UsageError(f"{session.key} has no log yet: no stage has started")
        reader = _Reader(session, arguments.stage, arguments.attempt)
        if arguments.follow:
            return await reader.follow(pipeline)
        stage = _stage(pipeline, arguments.stage)
        chosen = _select(stage, arguments.attempt)
        if not chosen:
            raise no_attempt(arguments.stage, arguments.attempt, stage.attempts)
        if await reader.print_newest(chosen[-1], pipeline):
            return 0
        return FAILED


def _print_metrics(pipeline: Pipeline, output: str | None) -> int:
    """Print the points of the curve in the status; return FAILED if there is none."""
    stage = _stage(pipeline, TRAIN)
    if not stage.attempts:
        raise no_attempt(TRAIN, None, ())
    curve = stage.loss_curve
    if curve is None:
        summary = stage_summary(stage)
        print(
            f"train has reported no loss curve; its status: {summary}", file=sys.stderr
        )
        return FAILED
    points = f"{len(curve.losses)} points up to step {curve.step}"
    if curve.every_steps > 1:
        points += f", each the mean of {curve.every_steps} steps"
    claim = pipeline.spec.workspace.existing_claim or workspace_name(pipeline.key.name)
    file = f"{TRAIN}/{stage.identity}/{METRICS}"
    # On stderr: stdout holds rows alone, for another program.
    print(f"{points}; every step is in {file} on the claim {claim}", file=sys.stderr)
    print_rows(rows_of_curve(curve), output)
    return 0


async def _print_samples(
    session: ClusterSession, pipeline: Pipeline, output: str | None
) -> int:
    """Print the samples in the logs of all attempts whose pods exist; return FAILED if there is none."""
    stage = _stage(pipeline, TRAIN)
    if not stage.attempts:
        raise no_attempt(TRAIN, None, ())
    rows = await samples_in_logs(session, stage)
    if not rows:
        print(
            "no log has a sample: train.samples may not be set, or no validation has run yet",
            file=sys.stderr,
        )
        return FAILED
    print_samples(rows, output)
    return 0


async def samples_in_logs(
    session: ClusterSession, stage: StageStatus
) -> list[SampleRow]:
    """Return the samples of all attempts whose pods exist; print to stderr which logs are lost."""
    lines: list[str] = []
    for attempt in stage.attempts:
        pod = await pod_of(session, attempt)
        # The log is lost with its pod, and the other attempts may still have theirs.
        if pod is None or not pod.started_at:
            print(_no_log_message(attempt, pod, stage), file=sys.stderr)
        else:
            lines += [line async for line in _sample_lines(session, pod)]
    return parse_samples(lines)


async def _sample_lines(
    session: ClusterSession, pod: ObservedPod
) -> AsyncIterator[str]:
    path = paths.pod_log(session.context.namespace, pod.name)
    lines = session.api.stream_lines(path, container=STAGE_CONTAINER, timestamps="true")
    async for line in lines:
        match = TIMESTAMPED_LINE.fullmatch(line)
        if match and match[2].startswith(LOG_PREFIX):
            yield match[2].removeprefix(LOG_PREFIX)


def _stage(pipeline: Pipeline, name: str) -> StageStatus:
    return pipeline.status.stages.get(name, StageStatus())


def _select(stage: StageStatus, number: int | None) -> list[AttemptStatus]:
    return [attempt for attempt in stage.attempts if number in {None, attempt.number}]


@dataclass
class _Reader:
    """A printer of the logs of a stage's pods: logs go to standard output, messages to standard error."""

    session: ClusterSession
    stage: str
    number: int | None
    """The only attempt to print; None for all."""
    last_message: str = ""
    printed: set[int] = field(default_factory=set)
    """Numbers of the attempts whose log is completely printed or not requested."""
    last_timestamps: dict[str, str] = field(default_factory=dict)
    """Pod -> the timestamp of its last printed line."""

    async def print_newest(self, attempt: AttemptStatus, pipeline: Pipeline) -> bool:
        """Print the current log of an attempt; return False if there is none."""
        pod = await pod_of(self.session, attempt)
        if pod is None or not pod.started_at:
            self._report(_no_log_message(attempt, pod, _stage(pipeline, self.stage)))
            return False
        print_attempt(attempt)
        await self._print(pod, follow=False)
        return True

    async def follow(self, pipeline: Pipeline) -> int:
        """Print the newest attempt and all later attempts, until the stage has ended."""
        older = _select(_stage(pipeline, self.stage), self.number)[:-1]
        self.printed = {attempt.number for attempt in older}
        while True:
            stage = _stage(pipeline, self.stage)
            selected = _select(stage, self.number)
            new = [
                attempt for attempt in selected if attempt.number not in self.printed
            ]
            # The oldest first: several attempts may have begun since the last look.
            if new and await self._print_completely(new[0], stage):
                self.printed.add(new[0].number)
            elif not new and self._has_ended(pipeline):
                return 0
            else:
                await asyncio.sleep(POLL_SECONDS)
            pipeline = await refresh(self.session)

    def _has_ended(self, pipeline: Pipeline) -> bool:
        """Return whether no further attempt can start; raises UsageError if the selected attempt does not exist."""
        stage = _stage(pipeline, self.stage)
        if self.number is not None:
            if self.number not in self.printed:
                raise no_attempt(self.stage, self.number, stage.attempts)
            return True
        if has_finished(pipeline):
            return True
        # A retry that the operator has not seen yet starts an ended stage again.
        return stage.state in ENDED_STATES and is_up_to_date(pipeline)

    async def _print_completely(
        self, attempt: AttemptStatus, stage: StageStatus
    ) -> bool:
        """Print the log until the pod ends; return False if the attempt may still start."""
        pod = await with_retries(lambda: pod_of(self.session, attempt))
        if pod is None or not pod.started_at:
            self._report(_no_log_message(attempt, pod, stage))
            return attempt.outcome is not Outcome.RUNNING
        print_attempt(attempt)
        await self._print_until_finished(attempt, pod)
        return True

    async def _print_until_finished(
        self, attempt: AttemptStatus, pod: ObservedPod
    ) -> None:
        """Print the log until the pod has finished; after a lost connection, continue after the last printed line."""
        while True:
            try:
                await self._print(pod, follow=True)
            except ApiError as error:
                self._report(f"the connection to the log was lost: {error}")
            current = await with_retries(lambda: pod_of(self.session, attempt))
            if current is None or current.finished:
                return
            await asyncio.sleep(POLL_SECONDS)

    async def _print(self, pod: ObservedPod, *, follow: bool) -> None:
        """Print the lines that are not printed yet."""
        last = self.last_timestamps.get(pod.name, "")
        query = {"container": STAGE_CONTAINER, "timestamps": "true"}
        if follow:
            query["follow"] = "true"
        if last:
            query["sinceTime"] = last
        path = paths.pod_log(self.session.context.namespace, pod.name)
        async for line in self.session.api.stream_lines(path, **query):
            match = TIMESTAMPED_LINE.fullmatch(line)
            if match is None:
                # The kubelet's own words, such as "unable to retrieve container logs".
                self._report(line)
                continue
            timestamp, text = match.groups()
            if timestamp <= last:
                # sinceTime has a resolution of one second, so printed lines may come again.
                continue
            last = timestamp
            self.last_timestamps[pod.name] = timestamp
            print(text, flush=follow)

    def _report(self, message: str) -> None:
        """Print a message to standard error, unless it was the last one."""
        if message != self.last_message:
            print(message, file=sys.stderr, flush=True)
        self.last_message = message


def _no_log_message(
    attempt: AttemptStatus, pod: ObservedPod | None, stage: StageStatus
) -> str:
    if attempt.outcome is Outcome.RUNNING:
        reason = "its pod is not running yet"
        if stage.message:
            reason = f"{stage.reason}: {stage.message}"
        return f"attempt {attempt.number} has not started: {reason}"
    problem = "no longer exists, and its log is lost"
    if pod:
        problem = "never started"
    return f"the pod of attempt {attempt.number} {problem}; its status: {attempt_line(attempt)}"
