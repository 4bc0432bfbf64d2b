"""Evictions on purpose: `--evict train@100` takes the node away when training has done 100 steps."""

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
NODE_LOST = "its node was lost on purpose (--kill)"


@dataclass(frozen=True)
class Fault:
    """One eviction that is to happen."""

    kind: Literal["evict", "kill"]
    stage: str
    step: int

    @override
    def __str__(self) -> str:
        return f"--{self.kind} {self.stage}@{self.step}"


def fault(kind: Literal["evict", "kill"]) -> Callable[[str], Fault]:
    """Give the function that reads STAGE@STEP; it raises Refused with what is wrong."""

    def read(text: str) -> Fault:
        names = [stage.name for stage in STAGES]
        found = re.fullmatch(rf"({'|'.join(names)})@(\d+)", text)
        if not found:
            raise UsageError(f"{text!r} is not STAGE@STEP, for example train@100; stages are {', '.join(names)}")
        return Fault(kind, found[1], int(found[2]))

    return read


class FaultInjector:
    """Watches the running stages and strikes once for each drill, lowest step first."""

    def __init__(self, cluster: LocalCluster, planned: Sequence[Fault]) -> None:
        self.cluster = cluster
        self.left = sorted(planned, key=lambda drill: drill.step)
        self.injected: set[str] = set()
        """Jobs that were struck already: an attempt dies only once."""

    async def watch(self) -> None:
        """Look at progress until no drill is left."""
        while self.left:
            with contextlib.suppress(ClusterError):  # reconciling meets it too, and says so
                self._watch_fault()
            await asyncio.sleep(POLL_SECONDS)

    def report_missed(self) -> None:
        """Say which drills never struck, so that nobody takes the run for a proof that it survives them."""
        for drill in self.left:
            words = f"{drill} never struck: the stage was not seen to run and to reach that step"
            self.cluster.on_event(Event("Warning", "DrillMissed", words))

    def _watch_fault(self) -> None:
        pipeline = self.cluster.pipeline_file.read()
        for name, stage in pipeline.status.stages.items() if pipeline else ():
            attempt = stage.last_attempt
            due = next((drill for drill in self.left if drill.stage == name), None)
            if due is None or attempt is None or attempt.outcome is not Outcome.RUNNING or attempt.job in self.injected:
                continue
            job = self.cluster.job(attempt.job)
            if job and job.state is JobState.RUNNING and job.progress and job.progress.step >= due.step:
                self._inject(due, attempt.job)

    def _inject(self, due: Fault, job: str) -> None:
        self.left.remove(due)
        self.injected.add(job)
        match due.kind:
            case "evict":
                self.cluster.evict(job, EVICTED)
            case "kill":
                self.cluster.kill(job, NODE_LOST)
