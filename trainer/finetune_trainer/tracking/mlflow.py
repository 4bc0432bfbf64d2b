"""MLflow: a run on a tracking server, and a version of a registered model."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar
from urllib.parse import urlsplit

from typing_extensions import override

from finetune_trainer.contract import Environment, Mlflow
from finetune_trainer.contract.metric_rows import Row
from finetune_trainer.tracking.port import (
    MODEL_CARD,
    RUN_CARD,
    PageTracker,
    ReportEnd,
    TrackedRun,
)

IDENTITY_TAG = "finetune.identity"
DIGEST_TAG = "finetune.digest"
# A server refuses more than 1,000 metrics in a request, which is ten metrics a row.
ROWS_PER_BATCH = 100
PARAMS_PER_BATCH = 100
# A server refuses more.
MAX_PARAM = 6000
"""Characters of a parameter's value."""
# A server may store a part of a batch. A run that has this metric at a step has the whole row, since it is sent last.
LAST_METRIC = "loss"
# An interrupted run has no status here: it goes on in the next attempt.
STATUS = {ReportEnd.FINISHED: "FINISHED", ReportEnd.FAILED: "FAILED"}
CLIENT_DEFAULTS = {
    # By default 120 s and 7 retries: a process would end before it learns that the server is down.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


class MlflowTracker(PageTracker):
    """A run that is looked up by its identity, which is one of its tags."""

    name: ClassVar[str] = "mlflow"
    package: ClassVar[str] = "mlflow"

    def __init__(
        self, settings: Mlflow, run: TrackedRun, _environment: Environment
    ) -> None:
        self._settings = settings
        self._run = run
        self._client: Any = None
        self._run_id = ""
        self._last_step = -1
        """The step of the newest row that the run has."""
        # The client reads these from the environment only. Values of the user win.
        for name, value in CLIENT_DEFAULTS.items():
            os.environ.setdefault(name, value)

    @override
    def log_rows(self, rows: Sequence[Row]) -> None:
        client, run_id = self._connect()
        missing = [row for row in rows if row.step > self._last_step]
        for start in range(0, len(missing), ROWS_PER_BATCH):
            batch = missing[start : start + ROWS_PER_BATCH]
            metrics: list[Any] = []
            for row in batch:
                metrics += _metrics(row)
            client.log_batch(run_id, metrics=metrics)
            # After the call: a batch that failed is sent again.
            self._last_step = batch[-1].step

    @override
    def log_scores(self, scores: Mapping[str, float]) -> None:
        client, run_id = self._connect()
        known = client.get_run(run_id).data.metrics
        step = max(0, self._last_step)
        for name, value in scores.items():
            # Each call adds a point to the metric's history, also with the same value.
            if known.get(name) != value:
                client.log_metric(run_id, name, value, step=step)

    @override
    def register_model(self, uri: str, digest: str) -> None:
        client, run_id = self._connect()
        client.set_tag(run_id, "finetune.model", uri)
        client.set_tag(run_id, DIGEST_TAG, digest)
        name = self._settings.registered_model
        if name is None:
            return
        version = self._version_of(name, uri, digest)
        if self._settings.alias:
            client.set_registered_model_alias(name, self._settings.alias, version)

    @override
    def log_card(self, card: str) -> None:
        if self._takes_files():
            client, run_id = self._connect()
            client.log_text(run_id, card, MODEL_CARD)

    @override
    def log_page(self, page: str) -> str:
        if not self._takes_files():
            raise NotImplementedError(
                "the server keeps artifacts in a folder of its machine; start it with --serve-artifacts"
            )
        client, run_id = self._connect()
        client.log_text(run_id, page, RUN_CARD)
        return f"the artifacts of MLflow's run {run_id} at {self._settings.uri}"

    def _takes_files(self) -> bool:
        client, run_id = self._connect()
        artifacts = client.get_run(run_id).info.artifact_uri or ""
        # A folder is one of the server's machine, and the client would write to it on this machine.
        return urlsplit(artifacts).scheme not in {"", "file"}

    @override
    def close(self, end: ReportEnd) -> None:
        if end in STATUS:
            client, run_id = self._connect()
            client.set_terminated(run_id, STATUS[end])

    def _connect(self) -> tuple[Any, str]:
        """Return the client and the run's id; on the first call find or create the run."""
        if self._run_id:
            return self._client, self._run_id
        from mlflow import MlflowClient  # noqa: PLC0415  takes seconds, and only this thread waits for it

        self._client = MlflowClient(self._settings.uri, self._settings.uri)
        run = self._find_or_create()
        run_id = run.info.run_id
        known = run.data.params
        params = self._run.params.items()
        missing = {name: value for name, value in params if name not in known}
        for batch in _params(missing):
            self._client.log_batch(run_id, params=batch)
        # An earlier attempt, or another stage, may have sent rows already.
        history = self._client.get_metric_history(run_id, LAST_METRIC)
        for metric in history:
            self._last_step = max(self._last_step, metric.step)
        # Set last: a call that failed before is made again from the beginning.
        self._run_id = run_id
        return self._client, self._run_id

    def _find_or_create(self) -> Any:
        experiment = self._experiment()
        query = f"tags.`{IDENTITY_TAG}` = '{self._run.identity}'"
        # The oldest: if two processes created a run at once, all later ones use the same.
        runs = self._client.search_runs(
            [experiment], query, max_results=1, order_by=["attributes.start_time ASC"]
        )
        if runs:
            return runs[0]
        tags = {IDENTITY_TAG: self._run.identity}
        return self._client.create_run(experiment, run_name=self._run.name, tags=tags)

    def _experiment(self) -> str:
        from mlflow.exceptions import MlflowException  # noqa: PLC0415

        name = self._settings.experiment
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException as error:
                # Another run may have created it meanwhile.
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            experiment = self._client.get_experiment_by_name(name)
        return str(experiment.experiment_id)

    def _version_of(self, name: str, uri: str, digest: str) -> str:
        """Return the version with this digest; create it, and the registered model, if there is none."""
        from mlflow.exceptions import MlflowException  # noqa: PLC0415

        try:
            self._client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        # A push that was killed after this call comes here again.
        for version in self._client.search_model_versions(f"name = '{name}'"):
            if version.tags.get(DIGEST_TAG) == digest:
                return str(version.version)
        tags = {DIGEST_TAG: digest}
        created = self._client.create_model_version(
            name, uri, self._run_id, tags, await_creation_for=None
        )
        return str(created.version)


def _metrics(row: Row) -> Iterator[Any]:
    from mlflow.entities import Metric  # noqa: PLC0415

    milliseconds = int(row.time * 1000)
    names = sorted(row.values)
    if LAST_METRIC in names:
        names.remove(LAST_METRIC)
        names.append(LAST_METRIC)
    for name in names:
        yield Metric(name, row.values[name], milliseconds, row.step)


def _params(params: Mapping[str, str]) -> Iterator[list[Any]]:
    from mlflow.entities import Param  # noqa: PLC0415

    entities = [Param(name, value[:MAX_PARAM]) for name, value in params.items()]
    for start in range(0, len(entities), PARAMS_PER_BATCH):
        yield entities[start : start + PARAMS_PER_BATCH]
