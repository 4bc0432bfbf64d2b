import os
import subprocess
import sys

import pytest

from finetune_cli.__main__ import COMMANDS, main
from finetune_cli.manifest.manifest import read


def test_what_init_writes_is_valid_and_has_every_stage(tmp_path, capsys):
    file = tmp_path / "pipeline.yaml"
    assert main(["init", str(file)]) == 0
    assert f"finetune validate {file}" in capsys.readouterr().out
    spec = read(file).spec
    assert all(spec.stage(name) for name in ("prepare", "train", "evaluate", "push", "deploy"))
    assert spec.evaluate.gate is not None


def test_what_init_says_of_defaults_is_true(tmp_path):
    file = tmp_path / "pipeline.yaml"
    main(["init", str(file)])
    as_written = read(file).spec
    lines = file.read_text().splitlines()
    words = ("validationFraction", "maxInvalidFraction", "seed", "precision", "dropout", "targetModules", "schedule",
             "warmupFraction", "when: Always", "when: GatePassed")  # fmt: skip
    said = [line.replace("# ", "", 1) if any(f"# {word}" in line for word in words) else line for line in lines]
    assert said != lines
    file.write_text("\n".join(said))
    assert read(file).spec == as_written


def test_init_keeps_what_is_there_unless_forced(tmp_path, capsys):
    file = tmp_path / "pipeline.yaml"
    file.write_text("mine")
    assert main(["init", str(file)]) == 2
    assert file.read_text() == "mine"
    assert "--force" in capsys.readouterr().err
    assert main(["init", "--force", str(file)]) == 0
    assert read(file).name == "my-pipeline"


def test_init_says_where_it_cannot_write(tmp_path, capsys):
    assert main(["init", str(tmp_path / "no" / "folder.yaml")]) == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().err


def test_init_without_a_name_writes_pipeline_yaml(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["init"]) == 0
    assert (tmp_path / "pipeline.yaml").exists()


def test_the_program_without_a_command_shows_its_usage_and_exits_with_2(capsys):
    assert main([]) == 2
    assert "usage: finetune" in capsys.readouterr().err


def test_an_unknown_command_exits_with_2_and_names_those_there_are(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["trian"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert all(f"'{command}'" in said for command in COMMANDS)


def test_the_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("finetune ")


def test_ctrl_c_ends_with_130(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("finetune_cli.commands.validate.read_all", interrupted)
    assert main(["validate", str(tmp_path)]) == 130


def test_a_reader_that_goes_away_is_no_error_worth_a_traceback(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "finetune_cli", "init", str(tmp_path / "pipeline.yaml")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, env=environment, check=False)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, b"")
