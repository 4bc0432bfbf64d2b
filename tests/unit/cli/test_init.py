import os
import subprocess
import sys

import pytest

from finetune_cli.__main__ import COMMANDS, main
from finetune_cli.manifest.manifest import read


def test_template_is_valid_and_has_every_stage(tmp_path, capsys):
    file = tmp_path / "pipeline.yaml"
    assert main(["init", str(file)]) == 0
    assert f"finetune validate {file}" in capsys.readouterr().out
    spec = read(file).spec
    assert all(spec.stage(name) for name in ("prepare", "train", "evaluate", "push", "deploy"))
    assert spec.evaluate.gate is not None


def test_template_comments_show_the_true_defaults(tmp_path):
    """Uncommenting the defaults does not change the parsed spec."""
    file = tmp_path / "pipeline.yaml"
    main(["init", str(file)])
    spec = read(file).spec
    lines = file.read_text().splitlines()
    defaults = ("validationFraction", "maxInvalidFraction", "seed", "precision", "dropout", "targetModules", "schedule",
                "warmupFraction", "when: Always", "when: GatePassed")  # fmt: skip
    uncommented = [
        line.replace("# ", "", 1) if any(f"# {default}" in line for default in defaults) else line for line in lines
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


def test_init_without_a_file_writes_pipeline_yaml(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["init"]) == 0
    assert (tmp_path / "pipeline.yaml").exists()


def test_missing_command_prints_usage_and_exits_with_2(capsys):
    assert main([]) == 2
    assert "usage: finetune" in capsys.readouterr().err


def test_unknown_command_exits_with_2_and_lists_the_commands(capsys):
    with pytest.raises(SystemExit) as exited:
        main(["trian"])
    assert exited.value.code == 2
    message = capsys.readouterr().err
    assert all(f"'{command}'" in message for command in COMMANDS)


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
    command = [sys.executable, "-m", "finetune_cli", "init", str(tmp_path / "pipeline.yaml")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, env=environment, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, b"")
