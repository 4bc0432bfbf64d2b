import os
import subprocess
import sys

import pytest

from finetune_cli.__main__ import main
from finetune_cli.manifest.manifest import read
from finetune_operator.api.spec import STAGES


def test_template_is_valid_and_has_a_gate_on_these_data(tmp_path, capsys):
    file = tmp_path / "pipeline.yaml"
    assert main(["init", str(file)]) == 0
    assert f"finetune validate --check {file}" in capsys.readouterr().out
    spec = read(file).spec
    assert all(spec.stage(kind.name) for kind in STAGES)
    assert spec.evaluate
    assert spec.deploy
    [gate] = spec.evaluate.gates
    assert gate.task == "held_out"
    assert gate.metric == "validation_loss"
    assert gate.operator == "LessThan"
    assert gate.against == "Base"
    assert gate.value == 0
    assert spec.deploy.when == "GatesPassed"
    assert "arc_easy" not in file.read_text()


def test_template_comments_show_the_true_defaults(tmp_path):
    """Uncommenting the defaults does not change the parsed spec."""
    file = tmp_path / "pipeline.yaml"
    main(["init", str(file)])
    spec = read(file).spec
    lines = file.read_text().splitlines()
    defaults = ("weight", "validation:", "  fraction", "maxInvalidFraction", "seed", "dtype", "dropout",
                "targetModules", "scheduler", "warmupFraction", "operator", "against", "format",
                "when: Always", "when: GatePassed")  # fmt: skip
    uncommented = [
        line.replace("# ", "", 1)
        if any(f"# {default}" in line for default in defaults)
        else line
        for line in lines
    ]
    assert uncommented != lines
    file.write_text("\n".join(uncommented))
    assert read(file).spec == spec


def test_init_keeps_an_existing_file_unless_forced(tmp_path, capsys):
    file = tmp_path / "pipeline.yaml"
    file.write_text("mine")
    assert main(["init", str(file)]) == 2
    assert file.read_text() == "mine"
    assert "--force" in capsys.readouterr().err
    assert main(["init", "--force", str(file)]) == 0
    assert read(file).name == "my-pipeline"


def test_init_reports_a_file_that_it_cannot_write(tmp_path, capsys):
    assert main(["init", str(tmp_path / "no" / "folder.yaml")]) == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().err


@pytest.mark.usefixtures("unread_data", "any_base")
def test_given_sources_are_written_relative_to_the_manifest(tmp_path, monkeypatch):
    """The manifest then passes the check of its sources as it is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text("{}")
    (tmp_path / "data.jsonl").write_text("{}\n")
    (tmp_path / "runs").mkdir()
    assert (
        main(
            [
                "init",
                "runs/p.yaml",
                "--model",
                "base",
                "--data",
                "data.jsonl",
                "--name",
                "mine",
            ]
        )
        == 0
    )
    spec = read(tmp_path / "runs/p.yaml").spec
    assert read(tmp_path / "runs/p.yaml").name == "mine"
    assert spec.model.uri == "../base"
    assert main(["validate", "--check", "runs/p.yaml"]) == 0


def test_repository_of_the_hub_gets_its_scheme(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text("{}\n")
    assert (
        main(
            [
                "init",
                "--model",
                "Qwen/Qwen3-0.6B",
                "--data",
                str(tmp_path / "data.jsonl"),
            ]
        )
        == 0
    )
    spec = read(tmp_path / "pipeline.yaml").spec
    assert spec.model.uri == "hf://Qwen/Qwen3-0.6B"
    assert (
        next(uri for uri in spec.source_uris() if "data" in uri)
        == f"file://{tmp_path}/data.jsonl"
    )


def test_cluster_manifest_has_only_uris_that_pods_can_read(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert (
        main(
            [
                "init",
                "--cluster",
                "--model",
                "hf://org/base",
                "--data",
                "pvc://team/data.jsonl",
            ]
        )
        == 0
    )
    assert "kubectl apply -f pipeline.yaml" in capsys.readouterr().out
    manifest = read(tmp_path / "pipeline.yaml")
    assert manifest.spec.push
    uris = (
        *manifest.spec.source_uris(),
        *(target.uri for target in manifest.spec.push.targets),
    )
    assert uris == (
        "hf://org/base",
        "pvc://team/data.jsonl",
        "pvc://team/published/data",
    )
    assert "once every path" not in (tmp_path / "pipeline.yaml").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--cluster", "--model", "base", "--data", "pvc://team/d"],
            "--model base: a pod cannot read this machine",
        ),
        (["--cluster", "--model", "hf://org/base"], "--cluster needs --data"),
        (
            ["--cluster", "--model", "hf://o/b", "--data", "hf://o/d/f"],
            "--cluster needs --target pvc://CLAIM/PATH",
        ),
        (
            [
                "--cluster",
                "--model",
                "hf://o/b",
                "--data",
                "pvc://c/d",
                "--target",
                "out",
            ],
            "--target out: a pod cannot",
        ),
        (["--model", "two words"], "must be without spaces"),
        (["--name", "My Pipeline"], "must consist of lower-case letters"),
    ],
)
def test_init_refuses_what_would_not_run(
    tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    assert main(["init", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "pipeline.yaml").exists()


def test_init_asks_on_a_terminal_for_what_is_not_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    answers = iter(["org/base", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(answers))
    assert main(["init"]) == 0
    spec = read(tmp_path / "pipeline.yaml").spec
    assert (spec.model.uri, next(answers, "asked twice")) == (
        "hf://org/base",
        "asked twice",
    )


def test_input_that_ends_at_a_question_is_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)

    def end(_):
        raise EOFError

    monkeypatch.setattr("builtins.input", end)
    assert main(["init"]) == 2
    assert "the input has ended without an answer" in capsys.readouterr().err
    assert not (tmp_path / "pipeline.yaml").exists()


@pytest.mark.parametrize(
    ("given", "uri"),
    [
        ("*.jsonl", "./*.jsonl"),
        ("{a}.jsonl", "./{a}.jsonl"),
        ("[a].jsonl", "./[a].jsonl"),
        ("@x", "./@x"),
        ("%x", "./%x"),
        ("y", "y"),
        ("12", "12"),
        ("new/data.jsonl", "new/data.jsonl"),
        ("./new/data", "new/data"),
        ("records#1.jsonl", "records#1.jsonl"),
    ],
)
def test_any_path_is_written_so_that_the_manifest_holds_it(
    tmp_path, monkeypatch, given, uri
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new").mkdir()
    (tmp_path / given).write_text("{}\n")
    assert main(["init", "--data", given, "--name", "12"]) == 0
    manifest = read(tmp_path / "pipeline.yaml")
    assert manifest.name == "12"
    assert manifest.spec.datasets[0].uri == uri


def test_value_that_no_manifest_can_have_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--model", "ftp://host/model"]) == 2
    assert "spec.model.uri: must be hf://ORG/NAME" in capsys.readouterr().err
    assert not (tmp_path / "pipeline.yaml").exists()


def test_target_like_a_repository_gets_the_scheme_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--target", "me/out"]) == 0
    push = read(tmp_path / "pipeline.yaml").spec.push
    assert push
    assert push.targets[0].uri == "hf://me/out"


def test_cluster_manifest_is_told_what_it_may_still_need(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert (
        main(
            [
                "init",
                "--cluster",
                "--model",
                "hf://o/b",
                "--data",
                "hf://o/d",
                "--target",
                "hf://me/out",
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    needs = (
        "spec.podDefaults.envFrom, a Secret with HF_TOKEN",
        "split in spec.datasets",
        "spec.train.pod.resources",
    )
    assert all(
        f"may still need {need}" in printed.partition("next: ")[0] for need in needs
    )
    assert (
        main(
            [
                "init",
                "--cluster",
                "--force",
                "--model",
                "pvc://team/b",
                "--data",
                "pvc://team/d",
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert "HF_TOKEN" not in printed
    assert "split" not in printed
    assert "for a GPU" in printed


def test_init_without_a_file_writes_pipeline_yaml(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["init"]) == 0
    assert (tmp_path / "pipeline.yaml").exists()


def test_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("finetune ")


def test_ctrl_c_exits_with_130(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("finetune_cli.commands.validate.read_all", interrupt)
    assert main(["validate", str(tmp_path)]) == 130


def test_closed_stdout_exits_with_141_and_no_traceback(tmp_path):
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [
        sys.executable,
        "-m",
        "finetune_cli",
        "init",
        str(tmp_path / "pipeline.yaml"),
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        command, stdout=write_end, stderr=subprocess.PIPE, env=environment, check=False
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, b"")
