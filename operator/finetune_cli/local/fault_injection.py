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
            # The reconcile loop gets the same error and reports it.
            with contextlib.suppress(ClusterError):
                self._inject_if_due()
            await asyncio.sleep(POLL_SECONDS)

    def report_missed(self) -> None:
        """Emit a warning for each fault that was not injected: the run does not prove that it survives the fault."""
        for fault in self.pending:
            message = f"{fault} was not injected: the stage was not observed running at that step or a later step"
            self.cluster.on_event(Event("Warning", "FaultNotInjected", message))

    def _inject_if_due(self) -> None:
        pipeline = self.cluster.pipeline_file.read()
        if pipeline is None:
            return
        for name, attempt in pipeline.status.running_attempts().items():
            if attempt.job in self.injected:
                continue
            fault = self._next_fault(name)
            if fault and self._has_reached(attempt.job, fault.step):
                self._inject(fault, attempt.job)

    def _next_fault(self, stage: str) -> Fault | None:
        for fault in self.pending:
            if fault.stage == stage:
                return fault
        return None

    def _has_reached(self, job: str, step: int) -> bool:
        # From the files of the process: the status is older by up to half a second.
        observed = self.cluster.job(job)
        if observed is None or observed.state is not JobState.RUNNING:
            return False
        return observed.progress is not None and observed.progress.step >= step

    def _inject(self, fault: Fault, job: str) -> None:
        self.pending.remove(fault)
        self.injected.add(job)
        match fault.kind:
            case "evict":
                self.cluster.evict(job, EVICTED)
            case "kill":
                self.cluster.kill(job, NODE_LOST)
