"""A run of a pipeline, on this machine or on a cluster: wait for it, read it, compare it, show it."""

import asyncio
import html
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from rich.console import RenderableType
from typing_extensions import override

from finetune.screen import Show, screen
from finetune.threads import in_thread
from finetune_cli.card.page import page
from finetune_cli.card.record import RunRecord
from finetune_cli.chat import ask
from finetune_cli.comparison.best import Ranking, rank
from finetune_cli.comparison.compare import Run, measurements
from finetune_cli.conversation import MAX_TOKENS
from finetune_cli.exit_codes import FAILED
from finetune_cli.local.generations import local_run
from finetune_cli.output.comparison_lines import comparison_json, comparison_lines
from finetune_cli.output.metrics import Cells
from finetune_operator.api.status import PipelineStatus
from finetune_operator.errors import ClusterError
from finetune_trainer.contract import Score

FRAME = (
    '<iframe sandbox srcdoc="{}" style="width: 100%; height: 80vh; border: 0"></iframe>'
)
"""A page inside a notebook: its style and its policy stay its own, and nothing in it can run."""


class RunFailed(Exception):
    """The run has failed or was stopped; the message says where and how to go on."""


@dataclass(frozen=True)
class RunState:
    """A run at one moment."""

    status: PipelineStatus
    exit_code: int | None
    """Exit code of `finetune wait`; None while the run goes on."""
    summary: str
    """The state in a line."""
    tree: RenderableType
    """The stages and attempts, as `finetune get` prints them."""


@dataclass(frozen=True)
class Comparison:
    """Runs beside each other; as a text, the table of `finetune compare`."""

    runs: Sequence[Run]
    best: Ranking | None

    def to_json(self) -> dict[str, Any]:
        """Return the fields, losses, scores and differences, as `finetune compare -o json` prints them."""
        return comparison_json(self.runs, self.best)

    @override
    def __repr__(self) -> str:
        lines = comparison_lines(self.runs, self.best, None, plain=False)
        return "\n".join(lines)


class PipelineRun(ABC):
    """A run of a pipeline. As the last expression of a cell, it shows the run card in a notebook."""

    poll_seconds: ClassVar[float]
    """Time between two looks at a run that is waited for."""

    def __init__(self, name: str, **selection: Any) -> None:
        self.name = name
        self.selection = selection
        """The work folder, or context and namespace, by which commands select the run."""

    @abstractmethod
    def state(self) -> RunState:
        """Return the present state; raises ClusterError if it cannot be read."""

    @abstractmethod
    def metrics(self) -> list[Cells]:
        """Return a row for each step of the training, such as {"step": 10, "loss": 1.5}.

        A cluster has at most 64 points. For a data frame: pandas.DataFrame(run.metrics()).
        """

    @abstractmethod
    def stop(self) -> None:
        """Stop the running stage as an eviction does; running the pipeline again goes on where it stopped."""

    @abstractmethod
    def measured(self) -> Run:
        """Return the spec and the measurements of the run, for a comparison."""

    @abstractmethod
    def record(self) -> RunRecord:
        """Return what the run card shows."""

    @abstractmethod
    def stop_own(self) -> None:
        """Stop the run if this process has started it: waiting for it was interrupted."""

    @property
    def status(self) -> PipelineStatus:
        """The status of the pipeline."""
        return self.state().status

    @property
    def scores(self) -> Mapping[str, Mapping[str, Score]]:
        """The scores of evaluate by task and metric; empty before."""
        return measurements(self.measured()).scores

    def wait(self, timeout: float | None = None) -> Self:
        """Wait until the run has ended, and return it; raises RunFailed.

        Raises ClusterError after `timeout` seconds. Ctrl-C stops a run that this process has started.
        """
        return self._wait(timeout, lambda _: None)

    def watch(self, timeout: float | None = None) -> Self:
        """Wait, and show the stages meanwhile."""
        with screen() as show:
            return self._wait(timeout, show)

    def _wait(self, timeout: float | None, show: Show) -> Self:
        started = time.monotonic()
        try:
            while not self._has_ended(self.state(), started, timeout, show):
                time.sleep(self.poll_seconds)
        except KeyboardInterrupt:
            self.stop_own()
            raise
        return self

    async def wait_async(self, timeout: float | None = None) -> Self:  # noqa: ASYNC109  as `wait`
        """Wait as `wait` does; if it is cancelled, a run that this process has started is stopped."""
        started = time.monotonic()
        try:
            while True:
                state = await asyncio.to_thread(self.state)
                if self._has_ended(state, started, timeout, lambda _: None):
                    return self
                await asyncio.sleep(self.poll_seconds)
        except asyncio.CancelledError:
            await asyncio.to_thread(self.stop_own)
            raise

    def _has_ended(
        self, state: RunState, started: float, timeout: float | None, show: Show
    ) -> bool:
        show(state.tree)
        if state.exit_code == FAILED:
            raise RunFailed(state.summary)
        if state.exit_code is not None:
            return True
        if timeout is not None and time.monotonic() - started > timeout:
            raise ClusterError(f"{state.summary} (not finished after {timeout:g} s)")
        return False

    def compare(
        self, *others: "PipelineRun | str", best: str | None = None
    ) -> Comparison:
        """Compare with other runs; a text is a run on this machine, or a generation such as docstrings@1.

        `best` is the metric of `finetune compare --best`.
        """
        runs = [self.measured()]
        for other in others:
            run = local_run(other) if isinstance(other, str) else other.measured()
            runs.append(run)
        return Comparison(runs, rank(runs, best) if best else None)

    def ask(
        self, question: str, *, base: bool = False, max_tokens: int = MAX_TOKENS
    ) -> str:
        """Return the answer of the published model, or of its base model, as `finetune ask` prints it."""
        pieces = ask(
            self.name, question, base=base, max_tokens=max_tokens, **self.selection
        )
        return in_thread(lambda: "".join(pieces))

    def card(self) -> str:
        """Return the run card: one page of HTML without scripts."""
        return page(self.record())

    def _repr_html_(self) -> str:
        return FRAME.format(html.escape(self.card()))

    @override
    def __repr__(self) -> str:
        return f"<PipelineRun {self.state().summary}>"
