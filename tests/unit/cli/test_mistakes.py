"""Values that would fail only in a run are refused with field, reason and fix; risky ones get a warning."""

import json
from pathlib import Path

import pytest

from finetune_cli.__main__ import main

HEAD = """\
apiVersion: finetune.dev/v1alpha1
kind: FineTunePipeline
metadata: {name: demo}
spec:
"""
GATE = (
    "evaluate: {{tasks: [{{name: exam{file}}}], gates: [{{task: exam, {gate}}}]{more}}}"
)


def a_gate(gate, file="", more=""):
    return GATE.format(gate=gate, file=file, more=more)


@pytest.fixture
def validate(tmp_path, monkeypatch, capsys):
    """A function that validates a manifest with these lines below spec, and returns exit code and printed lines."""
    monkeypatch.chdir(tmp_path)

    def validate(*lines, options=()):
        given = {line.partition(":")[0] for line in lines}
        least = {
            "model": "model: {uri: base}",
            "datasets": "datasets: [{uri: data.jsonl}]",
        }
        body = [*lines, *(text for name, text in least.items() if name not in given)]
        Path("p.yaml").write_text(HEAD + "".join(f"  {line}\n" for line in body))
        code = main(["validate", *options, "p.yaml"])
        return code, capsys.readouterr().out.splitlines()

    return validate


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "model: {uri: pvc://demo/../x}",
            "spec.model.uri: leaves the claim: remove .. from its path (got 'pvc://demo/../x')",
        ),
        (
            "model: {uri: hf://Qwen}",
            "spec.model.uri: must be hf://ORG/NAME, without spaces (got 'hf://Qwen')",
        ),
        (
            "model: {uri: pvc://demo/a b}",
            "spec.model.uri: must be pvc://CLAIM/PATH, without spaces (got 'pvc://demo/a b')",
        ),
        (
            "datasets: [{uri: hf://alpaca}]",
            "spec.datasets[0].uri: must be hf://ORG/NAME[/PATH], without spaces (got 'hf://alpaca')",
        ),
        (
            "model: {uri: Qwen/Qwen3-0.6B}",
            (
                "spec.model.uri: there is no folder Qwen beside the manifest;"
                " for the hub write hf://Qwen/Qwen3-0.6B, for a folder ./Qwen/Qwen3-0.6B"
            ),
        ),
        (
            "datasets: [{uri: tatsu-lab/alpaca}]",
            (
                "spec.datasets[0].uri: there is no folder tatsu-lab beside the manifest;"
                " for the hub write hf://tatsu-lab/alpaca, for a folder ./tatsu-lab/alpaca"
            ),
        ),
        (
            'train: {pod: {image: "a b"}}',
            (
                "spec.train.pod.image: must be an image as in [HOST/]NAME[:TAG][@DIGEST],"
                " in lower case but for the tag (got 'a b')"
            ),
        ),
        (
            "workspace: {size: 0}",
            (
                "spec.workspace.size: must be a size of at least a megabyte, such as 50Gi;"
                " a number alone counts bytes (got '0')"
            ),
        ),
        (
            "workspace: {size: 10}",
            (
                "spec.workspace.size: must be a size of at least a megabyte, such as 50Gi;"
                " a number alone counts bytes (got '10'); write 10Gi for gibibytes or 10G for gigabytes"
            ),
        ),
        (
            "train: {pod: {resources: {requests: {memory: 16}}}}",
            (
                "spec.train.pod.resources.requests.memory: is less than a megabyte;"
                " write 16Gi for gibibytes or 16G for gigabytes"
            ),
        ),
        (
            "prepare: {pod: {resources: {limits: {nvidia.com/gpu: 2}}}}",
            (
                "spec.prepare.pod.resources.limits: has more than one accelerator, and this stage uses one:"
                " set 1, or add a command that uses more"
            ),
        ),
        (
            "train: {processesPerNode: 2, pod: {resources: {limits: {nvidia.com/gpu: 4}}}}",
            (
                "spec.train.processesPerNode: is not the number of accelerators in pod.resources.limits:"
                " remove it, and each accelerator gets a process"
            ),
        ),
        (
            "train: {nodes: 2}",
            (
                "spec.train.nodes: all nodes mount the workspace: set workspace.accessMode to ReadWriteMany,"
                " or workspace.existingClaim to a claim that has it"
            ),
        ),
        (
            "train: {pod: {resources: {requests: {memory: 0Gi}}}}",
            (
                "spec.train.pod.resources.requests.memory: is less than a megabyte;"
                " write 16Gi for gibibytes or 16G for gigabytes"
            ),
        ),
        (
            "train: {pod: {resources: {limits: {example.com/fpga: '0.5'}}}}",
            "spec.train.pod.resources.limits: devices such as nvidia.com/gpu are counted in integers",
        ),
        *(
            (
                f"push: {{targets: [{{uri: '{uri}'}}]}}",
                f"spec.push.targets[0].uri: {message}, without spaces (got '{uri.replace('user:password', '…')}')",
            )
            for uri, message in {
                "pvc://claim": "must be pvc://CLAIM/PATH",
                "s3://bucket": "must be s3://BUCKET/PATH",
                "hf://org/model@v1": "must be hf://ORG/NAME",
                "oci://user:password@host/x": "must be oci://HOST/REPOSITORY[:TAG]",
            }.items()
        ),
        (
            "train: {pod: {env: [{name: A, valueFrom: {}}]}}",
            "spec.train.pod.env[0].valueFrom: set exactly one of secretKeyRef, configMapKeyRef, fieldRef",
        ),
        (
            "train: {pod: {envFrom: [{}]}}",
            "spec.train.pod.envFrom[0]: set exactly one of secretRef, configMapRef",
        ),
        (
            a_gate("value: 50"),
            "spec.evaluate.gates[0].value: no score is above 50: acc is between 0 and 1; for 50 % write 0.5",
        ),
        (
            a_gate("value: 1"),
            "spec.evaluate.gates[0].value: no score is above 1: acc is between 0 and 1",
        ),
        (
            a_gate("metric: 'exact_match,none', operator: LessThan, value: 0"),
            "spec.evaluate.gates[0].value: no score is below 0: exact_match is between 0 and 1",
        ),
        (
            a_gate("metric: acc_norm, against: Base, value: 2"),
            (
                "spec.evaluate.gates[0].value: no score is above 2: acc_norm minus the base model's is between -1"
                " and 1; for 2 % write 0.02"
            ),
        ),
    ],
)
def test_mistake_is_refused_with_line_field_reason_and_fix(validate, line, message):
    assert validate(line) == (2, [f"p.yaml:5: {message}"])


@pytest.mark.parametrize(
    "line",
    [
        "model: {uri: hf://Qwen/Qwen3-0.6B}",
        "model: {uri: ./Qwen/Qwen3-0.6B}",
        "datasets: [{uri: hf://tatsu-lab/alpaca}]",
        "datasets: [{uri: hf://tatsu-lab/alpaca, config: default, split: train}]",
        "datasets: [{uri: data/train.jsonl}, {uri: data/train-*}, {uri: data/more.csv}]",
        "workspace: {size: 10Gi}",
        "train: {pod: {resources: {requests: {memory: 16Gi}, limits: {nvidia.com/gpu: 1}}}}",
        "podDefaults: {resources: {limits: {nvidia.com/gpu: 1}}}",
        a_gate("value: 0.5"),
        a_gate("operator: GreaterThanOrEqual, value: 1"),
        a_gate("against: Base, value: -0.5"),
        a_gate("metric: perplexity, operator: LessThan, value: 50"),
        a_gate("value: 50", more=", pod: {command: [my-scores]}"),
        "train: {pod: {env: [{name: TOKENIZERS_PARALLELISM, value: 'false'}, {name: MAX_TOKENS, value: '40960'}]}}",
        "train: {pod: {env: [{name: HF_TOKEN_PATH, value: /run/token}, {name: HF_TOKEN, value: ''}]}}",
        "train: {pod: {env: [{name: HF_HUB_DISABLE_IMPLICIT_TOKEN, value: '1'}, {name: MONKEY, value: business}]}}",
        "train: {pod: {env: [{name: HF_TOKEN, valueFrom: {secretKeyRef: {name: hub, key: token}}}]}}",
    ],
)
def test_what_is_no_mistake_is_valid_without_a_note(validate, line):
    assert validate(line) == (0, ["p.yaml: valid"])


def test_local_path_with_its_folder_is_no_repository(validate, tmp_path):
    (tmp_path / "Qwen").mkdir()
    assert validate("model: {uri: Qwen/Qwen3-0.6B}")[0] == 0


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MLFLOW_PASSWORD", "apiKey"],
)
@pytest.mark.parametrize(
    ("line", "path"),
    [
        ("train: {{pod: {{env: [{0}]}}}}", "spec.train.pod.env[0].value"),
        ("podDefaults: {{env: [{0}]}}", "spec.podDefaults.env[0].value"),
    ],
)
def test_secret_in_clear_text_is_a_warning(validate, name, line, path):
    code, out = validate(line.format(f"{{name: {name}, value: hf_abcdef}}"))
    fix = (
        f"use envFrom: [{{secretRef: …}}], or valueFrom: {{secretKeyRef: …}} for {name}"
    )
    expected = (
        f"p.yaml:5: {path}: {name} seems to be a secret in clear text; {fix} (note)"
    )
    assert (code, out) == (0, [expected, "p.yaml: valid"])


def test_warning_does_not_print_the_secret(validate):
    line = "train: {pod: {env: [{name: HF_TOKEN, value: hf_abcdef}]}}"
    code, out = validate(line, options=["--json"])
    (note,) = json.loads("\n".join(out))["files"][0]["notes"]
    assert (code, note["path"], "hf_abcdef" in "".join(out)) == (
        0,
        "spec.train.pod.env[0].value",
        False,
    )


def test_gate_on_a_task_file_in_percent_is_a_warning(validate):
    """Its functions may compute acc in percent."""
    code, out = validate(a_gate("value: 50", file=", file: exam.yaml"))
    assert (code, out[1:]) == (0, ["p.yaml: valid"])
    assert "spec.evaluate.gates[0].value: no score is above 50" in out[0]
