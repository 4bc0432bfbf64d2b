"""`finetune logs` on a cluster."""

import argparse
import asyncio
import re
import sys
from dataclasses import dataclass, field

from finetune_cli.cluster.pods import pod_of
from finetune_cli.cluster.session import POLL_SECONDS, ClusterSession, connect, refresh, with_retries
from finetune_cli.commands.logs import no_attempt, print_attempt
from finetune_cli.diagnostics import UsageError
from finetune_cli.display import attempt_line
from finetune_cli.pipeline_status import has_finished, is_up_to_date
from finetune_operator.api.status import AttemptStatus, Outcome, StageState, StageStatus
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.client import ApiError
from finetune_operator.kubernetes.resources.job import STAGE_CONTAINER
from finetune_operator.kubernetes.translate.pod import Pod

OVER = frozenset({StageState.SUCCEEDED, StageState.FAILED, StageState.SKIPPED})
STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\S+) ?(.*)", re.DOTALL)
"""What the kubelet writes before each line when it is asked to."""


def run(arguments: argparse.Namespace) -> int:
    """Print a log; 1 where there is none."""
    return asyncio.run(_run(arguments))


async def _run(arguments: argparse.Namespace) -> int:
    if not arguments.name:
        raise UsageError("name the pipeline before the stage, as in: finetune logs NAME train")
    async with connect(arguments) as reach:
        pipeline = await reach.pipeline()
        reader = _Reader(reach, arguments.stage, arguments.attempt)
        if arguments.follow:
            return await reader.follow(pipeline)
        chosen = _wanted(_stage(pipeline, arguments.stage), arguments.attempt)
        if not chosen:
            raise no_attempt(arguments.stage, arguments.attempt, _stage(pipeline, arguments.stage).attempts)
        return 0 if await reader.print_newest(chosen[-1], pipeline) else 1


def _stage(pipeline: Pipeline, name: str) -> StageStatus:
    return pipeline.status.stages.get(name, StageStatus())


def _wanted(stage: StageStatus, number: int | None) -> list[AttemptStatus]:
    return [attempt for attempt in stage.attempts if number in {None, attempt.number}]


@dataclass
class _Reader:
    """Prints what a stage's pods have written: the log to standard output, all else to standard error."""

    reach: ClusterSession
    stage: str
    number: int | None
    said: str = ""
    told: set[int] = field(default_factory=set)
    """Attempts whose log has been printed to its end."""
    last: dict[str, str] = field(default_factory=dict)
    """Pod -> the stamp of its line that was printed last."""

    async def print_newest(self, attempt: AttemptStatus, pipeline: Pipeline) -> bool:
        """Print what there is of one attempt; False where there is nothing."""
        pod = await pod_of(self.reach, attempt)
        if pod is None or not pod.started_at:
            self._say(_no_log(attempt, pod, _stage(pipeline, self.stage)))
            return False
        print_attempt(attempt)
        await self._print(pod, follow=False)
        return True

    async def follow(self, pipeline: Pipeline) -> int:
        """Print the newest attempt and all that come after it, until the stage is over."""
        older = _wanted(_stage(pipeline, self.stage), self.number)[:-1]
        self.told = {attempt.number for attempt in older}
        while True:
            stage = _stage(pipeline, self.stage)
            new = [attempt for attempt in _wanted(stage, self.number) if attempt.number not in self.told]
            if new and await self._told_to_its_end(new[0], stage):
                self.told.add(new[0].number)
            elif not new and self._is_over(pipeline):
                return 0
            else:
                await asyncio.sleep(POLL_SECONDS)
            pipeline = await refresh(self.reach)

    def _is_over(self, pipeline: Pipeline) -> bool:
        """Whether no further attempt is to be expected."""
        stage = _stage(pipeline, self.stage)
        if self.number is not None:
            if self.number not in self.told:
                raise no_attempt(self.stage, self.number, stage.attempts)
            return True
        return has_finished(pipeline) or (stage.state in OVER and is_up_to_date(pipeline))

    async def _told_to_its_end(self, attempt: AttemptStatus, stage: StageStatus) -> bool:
        pod = await with_retries(lambda: pod_of(self.reach, attempt))
        if pod is None or not pod.started_at:
            self._say(_no_log(attempt, pod, stage))
            return attempt.outcome is not Outcome.RUNNING
        print_attempt(attempt)
        await self._print_to_the_end(attempt, pod)
        return True

    async def _print_to_the_end(self, attempt: AttemptStatus, pod: Pod) -> None:
        """Go on after whatever cuts the connection, from the line that was printed last."""
        while True:
            try:
                await self._print(pod, follow=True)
            except ApiError as error:
                self._say(f"the log is cut: {error}")
            now = await with_retries(lambda: pod_of(self.reach, attempt))
            if now is None or now.finished:
                return
            await asyncio.sleep(POLL_SECONDS)

    async def _print(self, pod: Pod, *, follow: bool) -> None:
        """Print the lines that have not been printed yet."""
        last = self.last.get(pod.name, "")
        query = {"container": STAGE_CONTAINER, "timestamps": "true"} | ({"follow": "true"} if follow else {})
        query |= {"sinceTime": last} if last else {}
        async for line in self.reach.api.stream_lines(paths.pod_log(self.reach.context.namespace, pod.name), **query):
            found = STAMP.fullmatch(line)
            stamp, text = found.groups() if found else ("", line)
            if stamp and stamp <= last:
                continue  # sinceTime is good to the second only
            self.last[pod.name] = last = stamp or last
            print(text, flush=follow)

    def _say(self, words: str) -> None:
        if words != self.said:
            print(words, file=sys.stderr, flush=True)
        self.said = words


def _no_log(attempt: AttemptStatus, pod: Pod | None, stage: StageStatus) -> str:
    if attempt.outcome is Outcome.RUNNING:
        why = f"{stage.reason}: {stage.message}" if stage.message else "its pod is on its way"
        return f"attempt {attempt.number} has not started: {why}"
    what = "never started" if pod else "is gone, and its log with it"
    return f"the pod of attempt {attempt.number} {what}; what is known of it: {attempt_line(attempt)}"
