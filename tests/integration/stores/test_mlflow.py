"""The MLflow adapter against a real server, with STORES=all.

The server needs 620 MB and does not fit the project's constraints, so it has an environment of its own in the cache.
"""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from support.programs import installed

from finetune_trainer.contract import Environment, Mlflow
from finetune_trainer.contract.metric_rows import Row
from finetune_trainer.tracking.mlflow import MlflowTracker
from finetune_trainer.tracking.port import ReportEnd, TrackedRun

pytestmark = pytest.mark.skipif(
    os.environ.get("STORES") != "all", reason="runs with STORES=all"
)
VERSION = "3.17.2"
UV = (sys.executable, "-m", "uv")
START_SECONDS = 120


@pytest.fixture(scope="module")
def uri(tmp_path_factory):
    python = installed(f"mlflow-{VERSION}", install) / "bin" / "python"
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    store = [
        "--backend-store-uri",
        f"sqlite:///{folder}/mlflow.db",
        "--artifacts-destination",
        str(folder),
    ]
    command: list[str | Path] = [
        python,
        "-m",
        "mlflow",
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--workers",
        "1",
        *store,
    ]
    variables = {
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    variables = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    } | variables
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(command, env=variables, stdout=log, stderr=log) as server,
    ):
        try:
            wait_until_healthy(f"http://127.0.0.1:{port}", folder / "log")
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def install(folder: Path) -> None:
    subprocess.run([*UV, "venv", "--quiet", "--allow-existing", folder], check=True)
    subprocess.run(
        [*UV, "pip", "install", "--quiet", f"--python={folder}", f"mlflow=={VERSION}"],
        check=True,
    )


def wait_until_healthy(uri, log):
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{uri}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    pytest.fail(log.read_text()[-2000:])


def test_run_of_five_processes_has_everything_once(uri, tmp_path):
    from mlflow import MlflowClient  # noqa: PLC0415  takes seconds

    def process(stage):
        run = TrackedRun(
            "a" * 16, "team/support", {"lora.rank": "16"}, stage, tmp_path, tmp_path
        )
        settings = Mlflow(
            uri=uri, experiment="support", registered_model="bot", alias="champion"
        )
        return MlflowTracker(settings, run, Environment(tmp_path))

    for attempt, count in enumerate((40, 130, 250)):
        times = [
            Row(step, 1e9 + step + attempt, {"loss": 1 / step})
            for step in range(1, count + 1)
        ]
        process("train").log_rows(times)
    for _ in range(2):
        last = process("push")
        last.log_rows(times)
        last.log_scores({"support/acc": 0.75})
        last.register_model("pvc://models/bot", "sha256:1")
        last.log_card("# card")
        last.close(ReportEnd.FINISHED)

    client = MlflowClient(uri, uri)
    experiment = client.get_experiment_by_name("support")
    [run] = client.search_runs([experiment.experiment_id])
    losses = sorted(
        (point.step, point.value)
        for point in client.get_metric_history(run.info.run_id, "loss")
    )
    assert losses == [(step, 1 / step) for step in range(1, 251)]
    assert len(client.get_metric_history(run.info.run_id, "support/acc")) == 1
    [card] = client.list_artifacts(run.info.run_id)
    assert (card.path, card.file_size) == ("model_card.md", len("# card"))
    assert (run.info.run_name, run.info.status, run.data.params) == (
        "team/support",
        "FINISHED",
        {"lora.rank": "16"},
    )
    [version] = client.search_model_versions("name = 'bot'")
    assert (version.source, version.run_id, version.tags["finetune.digest"]) == (
        "pvc://models/bot",
        run.info.run_id,
        "sha256:1",
    )
    assert (
        client.get_model_version_by_alias("bot", "champion").version == version.version
    )
