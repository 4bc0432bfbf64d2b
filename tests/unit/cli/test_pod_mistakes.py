"""Pods that an API server refuses are refused before they are sent to it: the table has the server's own verdicts."""

from pathlib import Path

import pytest

from finetune_cli.manifest.manifest import read_all

TABLE = Path(__file__).parents[3] / "tests/data/pods.txt"
HEAD = """\
apiVersion: finetune.dev/v1alpha1
kind: FineTunePipeline
metadata: {name: demo}
spec:
  model: {uri: base}
  datasets: [{uri: data.jsonl}]
"""


def accepted():
    """Return the pods that an API server accepts."""
    return TABLE.read_text().split("\n\n")[1].splitlines()


def refused():
    """Return the pods that an API server refuses, each with its error."""
    lines = TABLE.read_text().split("\n\n")[2].splitlines()
    errors = [line.removeprefix("=> ") for line in lines[1::2]]
    return list(zip(lines[::2], errors, strict=True))


@pytest.mark.parametrize("pod", accepted())
def test_pod_that_an_api_server_accepts_is_valid(pod, diagnose):
    assert diagnose(f"{HEAD}  train: {{pod: {pod}}}\n") == []


@pytest.mark.parametrize(("pod", "error"), refused())
def test_pod_that_an_api_server_refuses_has_one_error(pod, error, diagnose):
    [line] = diagnose(f"{HEAD}  train: {{pod: {pod}}}\n")
    assert line == f"7: spec.train.pod{error}"


@pytest.mark.parametrize(
    ("defaults", "own", "error"),
    [
        (
            "limits: {cpu: 2}",
            "requests: {cpu: 4}",
            "requests.cpu: with podDefaults, the request is above the limit of 2",
        ),
        (
            "requests: {memory: 8Gi}",
            "limits: {memory: 4Gi}",
            "limits.memory: with podDefaults, the request is above the limit of 4Gi",
        ),
        (
            "requests: {nvidia.com/gpu: 1}, limits: {nvidia.com/gpu: 1}",
            "limits: {nvidia.com/gpu: 0}",
            "limits[nvidia.com/gpu]: with podDefaults, the request is not the limit of 0",
        ),
    ],
)
def test_request_above_the_limit_of_the_defaults_is_refused(
    defaults, own, error, diagnose
):
    text = f"""{HEAD}  podDefaults: {{resources: {{{defaults}}}}}
  train: {{pod: {{resources: {{{own}}}}}}}
"""
    [line] = diagnose(text)
    assert line.startswith(f"8: spec.train.pod.resources.{error}")


def test_own_limit_and_request_replace_those_of_the_defaults(tmp_path):
    file = tmp_path / "pipeline.yaml"
    file.write_text(f"""{HEAD}  podDefaults: {{resources: {{limits: {{cpu: 2}}}}}}
  train: {{pod: {{resources: {{limits: {{cpu: 8}}, requests: {{cpu: 4}}}}}}}}
""")
    assert read_all(file).diagnostics == []


@pytest.mark.parametrize(("year", "warnings"), [(2020, 1), (2999, 0)])
def test_deadline_in_the_past_is_a_warning(tmp_path, year, warnings):
    """A finished pipeline stays valid in Git."""
    file = tmp_path / "pipeline.yaml"
    file.write_text(f"{HEAD}  deadline: {year}-01-31T08:00:00Z\n")
    result = read_all(file)
    assert len(result.manifests) == 1
    assert len(result.warnings) == warnings


VOLUME = "volumes: [{name: ca, configMap: {name: ca}}]"
MOUNT = "volumeMounts: [{name: ca, mountPath: /etc/ca}]"


@pytest.mark.parametrize(
    ("defaults", "own", "warned"),
    [
        ("", VOLUME, ["train.pod.volumes[0].name"]),
        (VOLUME, "", ["podDefaults.volumes[0].name"]),
        (VOLUME, MOUNT, []),
        (MOUNT, VOLUME, []),
        ("", f"{VOLUME}, {MOUNT}", []),
    ],
)
def test_volume_without_a_mount_is_a_warning(tmp_path, defaults, own, warned):
    """Kubernetes accepts it, and no container has it."""
    file = tmp_path / "pipeline.yaml"
    file.write_text(
        f"{HEAD}  podDefaults: {{{defaults}}}\n  train: {{pod: {{{own}}}}}\n"
    )
    result = read_all(file)
    assert [warning.path for warning in result.warnings] == [
        f"spec.{path}" for path in warned
    ]
