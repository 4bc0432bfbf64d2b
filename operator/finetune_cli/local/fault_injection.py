"""Fault injection: `--evict train@100` evicts the train stage after 100 steps, and `--kill` kills it."""

import asyncio
import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from typing_extensions import override

from finetune_cli.diagnostics import UsageError
from finetune_operator.api.spec import STAGES
from finetune_operator.api.status import Outcome
from finetune_operator.core.events import Event
from finetune_operator.core.observation import JobState
from finetune_operator.errors import ClusterError
from finetune_operator.local.cluster import POLL_SECONDS, LocalCluster

EVICTED = "evicted on purpose (--evict)"
NODE_LOST = "killed on purpose, as if its node was lost (--kill)"


@dataclass(frozen=True)
class Fault:
    """One planned eviction or kill of a stage at a step."""

    kind: Literal["evict", "kill"]
    stage: str
    step: int

    @override
    def __str__(self) -> str:
        return f"--{self.kind} {self.stage}@{self.step}"


def fault(kind: Literal["evict", "kill"]) -> Callable[[str], Fault]:
    """Return a parser for STAGE@STEP, which raises UsageError for any other text."""

    def parse(text: str) -> Fault:
        names = [stage.name for stage in STAGES]
        match = re.fullmatch(rf"({'|'.join(names)})@(\d+)", text)
        if not match:
            raise UsageError(
                f"{text!r} is not STAGE@STEP, for example train@100; stages are {', '.join(names)}"
            )
        return Fault(kind, match[1], int(match[2]))

    return parse


class FaultInjector:
    """Watches the running stages and injects each fault once, the one with the lowest step first."""

    def __init__(self, cluster: LocalCluster, planned: Sequence[Fault]) -> None:
        self.cluster = cluster
        self.pending = sorted(planned, key=lambda fault: fault.step)
        self.injected: set[str] = set()
        """Jobs with an injected fault: an attempt can end only once."""

    async def watch(self) -> None:
        """Poll the progress of the stages until no fault is pending."""
        while self.pending:
            with contextlib.suppress(
                ClusterError
            ):  # the reconcile loop gets the same error and reports it
                self._inject_if_due()
            await asyncio.sleep(POLL_SECONDS)

    def report_missed(self) -> None:
        """Emit a warning for each fault that was not injected: the run does not prove that it survives that fault."""
        for fault in self.pending:
            message = f"{fault} was not injected: the stage was not observed running at that step or a later one"
            self.cluster.on_event(Event("Warning", "FaultNotInjected", message))

    def _inject_if_due(self) -> None:
        pipeline = self.cluster.pipeline_file.read()
        for name, stage in pipeline.status.stages.items() if pipeline else ():
            attempt = stage.last_attempt
            due = next((fault for fault in self.pending if fault.stage == name), None)
            if (
                due is None
                or attempt is None
                or attempt.outcome is not Outcome.RUNNING
                or attempt.job in self.injected
            ):
                continue
            job = self.cluster.job(attempt.job)
            if (
                job
                and job.state is JobState.RUNNING
                and job.progress
                and job.progress.step >= due.step
            ):
                self._inject(due, attempt.job)

    def _inject(self, due: Fault, job: str) -> None:
        self.pending.remove(due)
        self.injected.add(job)
        match due.kind:
            case "evict":
                self.cluster.evict(job, EVICTED)
            case "kill":
                self.cluster.kill(job, NODE_LOST)
