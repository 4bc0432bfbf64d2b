"""The next version of the operator: a copy of this checkout with what a next version may add, and its image."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from finetune_trainer.contract import RESULTS_VERSION
from testcluster.errors import UsageError
from testcluster.images import image_builders
from testcluster.images.image_builders import Build

ROOT = Path(__file__).parents[2]
API = "operator/finetune_operator/api"
CORE = "operator/finetune_operator/core"
JOB = "operator/finetune_operator/kubernetes/resources/job.py"
IMAGE = "finetune-operator:next"
OWNER = "owner"
WRITER = "writtenBy"
STARTED_BY = "startedBy"
CONDITION = "Healthy"
"""What the next version has beside the fields and conditions of this version."""
LABEL = "finetune.dev/release"
"""A label of every object of the next version's chart, and of every Job, Deployment and pod that it creates."""
CHANGES: tuple[tuple[str, str, str], ...] = (
    (
        f"{API}/spec.py",
        '    owner: str = ""\n    """Team to which the pipeline belongs."""\n\n',
        "    workspace: Workspace = Workspace()\n",
    ),
    (
        f"{API}/status.py",
        '    written_by: str = ""\n    """Version of the operator that wrote this status."""\n',
        '    phase: str = "Pending"\n',
    ),
    (
        f"{API}/status.py",
        '    started_by: str = "next"\n    """Version of the operator that started the attempt."""\n',
        "    outcome: Outcome = Outcome.RUNNING\n",
    ),
    (
        f"{API}/stages/pod.py",
        '    host_users: bool = True\n    """Whether the pod uses the user namespace of its node."""\n\n',
        "    def literal_env(self)",
    ),
    (
        f"{CORE}/report.py",
        '        written_by="next",\n',
        "        phase=summary.phase,\n",
    ),
    (
        f"{CORE}/report.py",
        f'    yield "{CONDITION}", "True", Reason("AllWell"), "a condition of the next version"\n',
        "    if summary.reconciling:\n",
    ),
    (
        f"{CORE}/metadata.py",
        f'        "{LABEL}": "next",\n',
        "        IDENTITY: identity,\n",
    ),
    (
        JOB,
        '        "shareProcessNamespace": False,\n',
        '        "enableServiceLinks": False,\n',
    ),
    (
        "charts/finetune-operator/templates/_built_fields.tpl",
        "'shareProcessNamespace', ",
        "'enableServiceLinks', ",
    ),
    (
        "charts/finetune-operator/templates/_names.tpl",
        f"{LABEL}: next\n",
        "helm.sh/chart: {{",
    ),
)
"""File, what the next version adds to it, and the text before which that is."""
CONTRACT = "trainer/finetune_trainer/contract"
REPLACED: tuple[tuple[str, str, str], ...] = (
    (
        f"{CONTRACT}/configs.py",
        f"RESULTS_VERSION = {RESULTS_VERSION}\n",
        f"RESULTS_VERSION = {RESULTS_VERSION + 1}\n",
    ),
    (
        f"{CONTRACT}/recipes.py",
        "learning_rate: float = Field(default=2e-4",
        "learning_rate: float = Field(default=1e-4",
    ),
)
"""File, a text in it, and what the next version has in its place: other results of the trainer, and another default."""
DOCKERFILE = """\
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
USER 0
COPY operator/finetune_operator /opt/app/finetune_operator
COPY trainer/finetune_trainer /opt/app/finetune_trainer
RUN /opt/venv/bin/python -m compileall -qf --invalidation-mode unchecked-hash /opt/app
USER 65532:65532
"""


@dataclass(frozen=True)
class NextVersion:
    """A checkout of the next version, whose image an engine of this machine has."""

    checkout: Path

    @property
    def chart(self) -> Path:
        """The chart, with the CRD of the next version."""
        return self.checkout / "charts" / "finetune-operator"


def create(checkout: Path) -> NextVersion:
    """Write the next version to a folder and build its image. Raises UsageError if a change has no place."""
    added = tuple((name, text, new + text) for name, new, text in CHANGES)
    write(checkout, *added, *REPLACED)
    _build_image(checkout)
    return NextVersion(checkout)


def write(checkout: Path, *replaced: tuple[str, str, str]) -> None:
    """Write this checkout with some texts replaced to a folder. Raises UsageError if a change has no place.

    A change is a file, a text in it, and the text in its place.
    """
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("operator", "trainer", "charts", "crds"):
        shutil.copytree(ROOT / name, checkout / name, ignore=ignored)
    for name, text, replacement in replaced:
        _replace(checkout / name, text, replacement)
    paths = os.pathsep.join(str(checkout / name) for name in ("operator", "trainer"))
    generate = [sys.executable, "-m", "finetune_operator.crd.generate"]
    subprocess.run(
        generate,
        env=os.environ | {"PYTHONPATH": paths},
        check=True,
        stdout=subprocess.PIPE,
    )


def _replace(file: Path, text: str, replacement: str) -> None:
    content = file.read_text()
    if content.count(text) != 1:
        raise UsageError(
            f"{file.name} has the following {content.count(text)} times, not once: change CHANGES or REPLACED: {text}"
        )
    file.write_text(content.replace(text, replacement))


def _build_image(checkout: Path) -> None:
    (checkout / "Dockerfile").write_text(DOCKERFILE)
    engine = image_builders.choose()
    base = {"BASE_IMAGE": "finetune-operator:dev"}
    command = engine.build_command(
        Build(IMAGE, checkout / "Dockerfile", checkout, base, {}, timestamp=0)
    )
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise UsageError(
            f"{engine.name} could not build {IMAGE}:\n{done.stdout[-3000:]}"
        )
