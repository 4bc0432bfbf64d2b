"""MLflow: a run on a tracking server, and a version of a registered model."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from typing_extensions import override

from finetune_trainer.contract import Environment, Mlflow
from finetune_trainer.contract.metric_rows import Row
from finetune_trainer.tracking.port import ReportEnd, TrackedRun, Tracker

IDENTITY_TAG, DIGEST_TAG = "finetune.identity", "finetune.digest"
ROWS_PER_BATCH = 100
"""A server refuses more than 1,000 metrics in a request."""
PARAMS_PER_BATCH = 100
MAX_PARAM = 6000
"""Characters of a parameter's value; a server refuses more."""
LAST_METRIC = "loss"
"""Sent last of a row: a run that has it at a step has the whole row, also where a batch is not atomic."""
STATUS = {ReportEnd.FINISHED: "FINISHED", ReportEnd.FAILED: "FAILED"}
CLIENT_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",  # 120 s and 7 retries by default: a process would end before the first answer
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


class MlflowTracker(Tracker):
    """A run that is found by its identity, which is a tag of it."""

    name: ClassVar[str] = "mlflow"
    package: ClassVar[str] = "mlflow"

    def __init__(self, settings: Mlflow, run: TrackedRun, _environment: Environment) -> None:
        self._settings, self._run = settings, run
        self._client: Any = None
        self._run_id = ""
        self._last_step = -1
        """The last step whose row the run has."""
        for name, value in CLIENT_DEFAULTS.items():
            os.environ.setdefault(name, value)

    @override
    def log_rows(self, rows: Sequence[Row]) -> None:
        client, run_id = self._connect()
        missing = [row for row in rows if row.step > self._last_step]
        for start in range(0, len(missing), ROWS_PER_BATCH):
            batch = missing[start : start + ROWS_PER_BATCH]
            client.log_batch(run_id, metrics=[metric for row in batch for metric in _metrics(row)])
            self._last_step = batch[-1].step

    @override
    def log_scores(self, scores: Mapping[str, float]) -> None:
        client, run_id = self._connect()
        known = client.get_run(run_id).data.metrics
        for name, value in scores.items():
            if known.get(name) != value:  # each call would add a point to the metric's history
                client.log_metric(run_id, name, value, step=max(0, self._last_step))

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
    def close(self, outcome: ReportEnd) -> None:
        if outcome in STATUS:  # an interrupted run goes on in the next attempt
            client, run_id = self._connect()
            client.set_terminated(run_id, STATUS[outcome])

    def _connect(self) -> tuple[Any, str]:
        """Return the client and the run's id; on the first call find or create the run."""
        if not self._run_id:
            from mlflow import MlflowClient  # noqa: PLC0415  takes seconds, and only this thread waits for it

            self._client = MlflowClient(self._settings.uri, self._settings.uri)
            run = self._find_or_create()
            missing = {
                name: value
                for name, value in self._run.params.items()
                if name not in run.data.params
            }
            for batch in _params(missing):
                self._client.log_batch(run.info.run_id, params=batch)
            history = self._client.get_metric_history(run.info.run_id, LAST_METRIC)
            self._last_step = max((metric.step for metric in history), default=-1)
            self._run_id = run.info.run_id
        return self._client, self._run_id

    def _find_or_create(self) -> Any:
        experiment = self._experiment()
        query = f"tags.`{IDENTITY_TAG}` = '{self._run.identity}'"
        found = self._client.search_runs(
            [experiment], query, max_results=1, order_by=["attributes.start_time ASC"]
        )
        if found:
            return found[0]
        return self._client.create_run(
            experiment, run_name=self._run.name, tags={IDENTITY_TAG: self._run.identity}
        )

    def _experiment(self) -> str:
        from mlflow.exceptions import MlflowException  # noqa: PLC0415

        name = self._settings.experiment
        if (found := self._client.get_experiment_by_name(name)) is not None:
            return str(found.experiment_id)
        try:
            return str(self._client.create_experiment(name))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another run created it meanwhile
                raise
            return str(self._client.get_experiment_by_name(name).experiment_id)

    def _version_of(self, name: str, uri: str, digest: str) -> str:
        """Return the version with this digest; create it, and the registered model, if there is none."""
        from mlflow.exceptions import MlflowException  # noqa: PLC0415

        try:
            self._client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
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

    for name in sorted(row.values, key=lambda name: (name == LAST_METRIC, name)):
        yield Metric(name, row.values[name], int(row.time * 1000), row.step)


def _params(params: Mapping[str, str]) -> Iterator[list[Any]]:
    from mlflow.entities import Param  # noqa: PLC0415

    entities = [Param(name, value[:MAX_PARAM]) for name, value in params.items()]
    for start in range(0, len(entities), PARAMS_PER_BATCH):
        yield entities[start : start + PARAMS_PER_BATCH]
