"""An upgrade to the next version with helm, and the way back: nothing is rerun, nothing lost, and no server down."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from e2e.pipelines import next_version
from e2e.pipelines.chart import Operator
from e2e.pipelines.driver import SCRIPT, Object, PipelineDriver, memory, pipeline
from e2e.pipelines.next_version import (
    CONDITION,
    IMAGE,
    LABEL,
    OWNER,
    STARTED_BY,
    WRITER,
    NextVersion,
)
from testcluster.kube_namespace import KubeNamespace, pod
from testcluster.provider import Provider

HELD = {"train": 9000}
"""Half an hour of training, which `finish` ends."""
PUBLISH = f'mkdir -p "$FINETUNE_CLAIMS/models/x" && echo weights > "$FINETUNE_CLAIMS/models/x/model"\n{SCRIPT}'
SERVER = """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Server(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(b"ok")
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(b'{"choices": [{"text": "hello"}]}')
    def answer(self, content):
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
ThreadingHTTPServer(("", 8000), Server).serve_forever()
"""
DEPLOY: Object = {
    "when": "Always",
    "smokeTest": {"prompt": "hello"},
    "pod": {
        "image": "finetune-operator:dev",
        "command": ["python", "-c", SERVER],
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "resources": memory("128Mi"),
    },
}
ASK = """
import pathlib, time, urllib.request
while not pathlib.Path("/tmp/finish").exists():
    try:
        urllib.request.urlopen("http://serving-deploy:8000/health", timeout=5).read()
        print("answered", flush=True)
    except OSError as error:
        print(error, flush=True)
    time.sleep(0.3)
"""
KEPT = "jobs,pods,deployments,services,pvc"


@pytest.fixture
def following(
    cluster: Provider, tmp_path_factory: pytest.TempPathFactory
) -> NextVersion:
    """The next version, whose image every node has."""
    created = next_version.create(tmp_path_factory.mktemp("next"))
    cluster.load([IMAGE])
    return created


def start_pipelines(namespace: KubeNamespace) -> list[PipelineDriver]:
    """Start three pipelines: the first will be finished, the second serves, the third trains until the test ends it."""
    namespace.claim("models")
    serving = pipeline(
        "serving",
        pushes=True,
        push={"pod": {"command": ["sh", "-c", PUBLISH]}},
        deploy=DEPLOY,
    )
    manifests = (pipeline("finished"), serving, pipeline("running", steps=HELD))
    drivers = [PipelineDriver.start(namespace, manifest) for manifest in manifests]
    for driver in drivers[:2]:
        driver.wait_finished(seconds=180)
    drivers[2].wait_state("train", "Running", seconds=90)
    return drivers


def objects(namespace: KubeNamespace) -> dict[str, str]:
    """Return the uid of every object that a pipeline owns or needs, by kind and name."""
    path = (
        "jsonpath={range .items[*]}{.kind}/{.metadata.name} {.metadata.uid}{'\\n'}{end}"
    )
    lines = namespace.run("get", KEPT, "-o", path).splitlines()
    return dict(line.split() for line in lines if not line.startswith("Pod/client"))


@contextmanager
def asking(namespace: KubeNamespace) -> Iterator[list[str]]:
    """Ask the server a few times a second; the list has an entry for every request after the end of the context."""
    answers: list[str] = []
    namespace.create(
        pod("client", "", image="finetune-operator:dev", command=["python", "-c", ASK])
    )
    namespace.wait_phase("client", "Running")
    yield answers
    namespace.run("exec", "client", "--", "touch", "/tmp/finish")
    namespace.wait_phase("client", "Succeeded")
    answers += namespace.run("logs", "client").splitlines()


def wait_written(*drivers: PipelineDriver, by: str | None) -> None:
    """Wait until the next version, or the version without a name, has written the status of each pipeline."""
    for driver in drivers:
        driver.until(lambda driver=driver: driver.status.get(WRITER) == by, 90)
        assert bool(driver.condition(CONDITION)) is bool(by)


def known_status(driver: PipelineDriver) -> Any:
    """Return the status without what the next version has added to the attempts: it stays, as they have no schema."""
    status = driver.object["status"]
    for stage in status["stages"]:
        for attempt in stage.get("attempts", ()):
            attempt.pop(STARTED_BY, None)
    return status


def label_of(driver: PipelineDriver, stage: str) -> str | None:
    return driver.jobs(stage)[0]["metadata"]["labels"].get(LABEL)


def test_upgrade_and_rollback_rerun_and_lose_nothing(
    release: Operator, namespace: KubeNamespace, following: NextVersion
):
    finished, serving, running = start_pipelines(namespace)
    before = objects(namespace)
    statuses = [known_status(driver) for driver in (finished, serving)]
    with asking(namespace) as answers:
        release.install("image.tag=next", chart=following.chart)
        release.wait_settled()
        wait_written(finished, serving, running, by="next")
        owner: dict[str, Any] = {OWNER: "team-a"}
        newer = PipelineDriver.start(namespace, pipeline("newer", steps=HELD, **owner))
        newer.wait_state("train", "Running", seconds=90)
        assert newer.object["spec"][OWNER] == "team-a"
        assert label_of(newer, "prepare") == "next"
        release.roll_back()
        release.wait_settled()
        wait_written(finished, serving, running, newer, by=None)
        for driver in (running, newer):
            driver.finish("train")
            driver.wait_finished()
    assert set(answers) == {"answered"}
    assert before.items() <= objects(namespace).items()
    assert [known_status(driver) for driver in (finished, serving)] == statuses
    assert OWNER not in newer.object["spec"]
    assert [label_of(newer, stage) for stage in ("prepare", "train", "evaluate")] == [
        "next",
        "next",
        None,
    ]
    for driver in (finished, serving, running, newer):
        for stage in driver.status["stages"].values():
            assert [attempt["outcome"] for attempt in stage.get("attempts", ())] in (
                [],
                ["Succeeded"],
            ), driver.describe()
