"""Weights & Biases: a run on its servers, or a folder that `wandb sync` sends to them."""

import glob
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from finetune_trainer.contract import Environment, Wandb
from finetune_trainer.contract.metric_rows import Row
from finetune_trainer.tracking.port import (
    MODEL_CARD,
    RUN_CARD,
    PageTracker,
    ReportEnd,
    TrackedRun,
)

INIT_SECONDS = 10.0
"""Time to wait for the server when a run is opened."""


class WandbTracker(PageTracker):
    """A run with its identity as its id.

    An offline run becomes durable only when it is finished. Each attempt therefore replaces the folder of the attempt
    before and writes every row again.
    """

    name: ClassVar[str] = "wandb"
    package: ClassVar[str] = "wandb"

    def __init__(
        self, settings: Wandb, run: TrackedRun, _environment: Environment
    ) -> None:
        self._settings = settings
        self._run = run
        self._opened: Any = None
        self._next_step = 0
        # By default, the library sends its own errors to its vendor.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")

    @override
    def log_rows(self, rows: Sequence[Row]) -> None:
        # The folder of the train stage has the rows.
        if self._is_offline() and self._run.stage != "train":
            return
        opened = self._open()
        for row in rows:
            if row.step >= self._next_step:
                opened.log({**row.values, "_timestamp": row.time}, step=row.step)
                self._next_step = row.step + 1

    @override
    def log_scores(self, scores: Mapping[str, float]) -> None:
        self._open().summary.update(dict(scores))

    @override
    def register_model(self, uri: str, digest: str) -> None:
        self._open().summary.update({"model_uri": uri, "model_digest": digest})

    @override
    def log_card(self, card: str) -> None:
        self._save(MODEL_CARD, card)

    @override
    def log_page(self, page: str) -> str:
        self._save(RUN_CARD, page)
        return f"the files of W&B's run {self._opened.url or self._opened.dir}"

    def _save(self, name: str, text: str) -> None:
        opened = self._open()
        # A file of the run and no artifact: the library copies artifacts to the user's home, which a pod may not write.
        file = Path(opened.dir, name)
        file.write_text(text, "utf-8")
        opened.save(glob.escape(str(file)), base_path=opened.dir, policy="now")

    @override
    def close(self, end: ReportEnd) -> None:
        if self._opened is None:
            return
        if end is ReportEnd.INTERRUPTED:
            self._opened.mark_preempting()
        exit_code = 0 if end is ReportEnd.FINISHED else 1
        self._opened.finish(exit_code=exit_code)

    def _is_offline(self) -> bool:
        return self._settings.mode == "Offline"

    def _open(self) -> Any:
        if self._opened is not None:
            return self._opened
        if not (self._is_offline() or os.environ.get("WANDB_API_KEY")):
            raise PermissionError(
                "WANDB_API_KEY is not set; set it, or set mode to Offline"
            )
        if "wandb" not in sys.modules:
            # The service of another process, such as a notebook that started this process: it would keep the run of a
            # killed attempt open, and refuse it to the next attempt as in use.
            os.environ.pop("WANDB_SERVICE", None)
        import wandb  # noqa: PLC0415  takes seconds, and only this thread waits for it

        # A killed process left the folder. The server, or metrics.jsonl, has more rows than it.
        shutil.rmtree(self._run.folder / "wandb", ignore_errors=True)
        settings = wandb.Settings(
            # The log of a pod stays in the pod.
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            save_code=False,
            x_disable_stats=True,
            # The names of the host, the user and the program.
            x_disable_meta=True,
            init_timeout=INIT_SECONDS,
        )
        self._opened = wandb.init(
            entity=self._settings.entity,
            project=self._settings.project,
            id=self._run.identity,
            name=self._run.name,
            config=dict(self._run.params),
            resume="allow",
            mode="offline" if self._is_offline() else "online",
            dir=self._run.folder,
            settings=settings,
        )
        # The server's step is the step after the last row that it has.
        self._next_step = int(self._opened.step)
        return self._opened
