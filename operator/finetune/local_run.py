"""A run on this machine. A run that this process has started works in one of its threads."""

import argparse
import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

from typing_extensions import override

from finetune.run import PipelineRun, RunState
from finetune.threads import in_thread
from finetune_cli.card.record import RunRecord
from finetune_cli.commands.logs import training_folder
from finetune_cli.comparison.compare import Run
from finetune_cli.diagnostics import UsageError
from finetune_cli.local import requests
from finetune_cli.local.card_file import record_of_run
from finetune_cli.local.generations import as_run, generations_of
from finetune_cli.local.look import look_at
from finetune_cli.local.run import LocalRun, local_settings
from finetune_cli.local.watch import POLL_SECONDS, summary, tree
from finetune_cli.output.metrics import Cells, rows_of_file
from finetune_operator.api.status import PipelineStatus
from finetune_trainer.contract.metric_rows import METRICS


class LocalPipelineRun(PipelineRun):
    """A run in a work folder of this machine."""

    poll_seconds = POLL_SECONDS

    def __init__(
        self, folder: Path, work: Future[PipelineStatus] | None = None
    ) -> None:
        super().__init__(folder.name, workdir=folder)
        self.folder = folder
        self._work = work
        """The end of a run that this process has started."""

    @override
    def state(self) -> RunState:
        if self._work and self._work.done():
            # Raises the error with which the work has ended.
            self._work.result()
        look = look_at(self.folder)
        code = look.exit_code("Finished")
        return RunState(look.pipeline.status, code, summary(look), tree(look))

    @override
    def metrics(self) -> list[Cells]:
        return rows_of_file(training_folder(self.folder) / METRICS)

    @override
    def stop(self) -> None:
        request = argparse.Namespace(command="stop", name=self.name, **self.selection)
        in_thread(lambda: requests.VERBS["stop"](self.folder, request))

    @override
    def stop_own(self) -> None:
        if self._work and not self._work.done():
            self.stop()

    @override
    def measured(self) -> Run:
        return as_run(self.name, generations_of(self.folder)[-1])

    @override
    def record(self) -> RunRecord:
        record = record_of_run(self.folder)
        if record is None:
            raise UsageError(f"{self.folder} holds no run any more: it was deleted")
        return record


def start(
    local_run: LocalRun, claims: Mapping[str, Path], until: str | None, *, retry: bool
) -> LocalPipelineRun:
    """Check the pipeline, then run it in a thread; raises InvalidManifest or UsageError if it cannot start.

    If this process ends, the pipes to the processes of the stages close, which evicts them: they save their work.
    """
    prepared: Future[list[str]] = Future()
    work: Future[PipelineStatus] = Future()

    def run() -> None:
        ending: Future[PipelineStatus] | Future[list[str]] = prepared
        try:
            with local_run.locked():
                notes = local_run.prepare(claims, until, retry=retry)
                ending = work
                prepared.set_result(notes)
                settings = local_settings(until)
                status = asyncio.run(local_run.run(settings, (), lambda _: None))
            work.set_result(status)
        except BaseException as error:  # noqa: BLE001  raised again in the caller's thread
            ending.set_exception(error)

    threading.Thread(target=run, name=f"finetune {local_run.key}", daemon=True).start()
    try:
        prepared.result()
    except KeyboardInterrupt:
        # The thread may still be checking; then it starts no stage.
        local_run.stop()
        raise
    return LocalPipelineRun(local_run.workdir, work)
