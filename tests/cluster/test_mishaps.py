"""`finetune run` where something is not as it should be: the manifest, the disk, the terminal."""

import json
from pathlib import Path

import pytest
from support.desk import Desk


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"model": {"uri": "."}}, "the work folder, "),
        ({"push": {"target": "pvc://demo/base/tuned"}}, "push.target, "),
        ({"workspace": {"existingClaim": "demo"}, "model": {"uri": "pvc://demo/"}}, "the workspace, "),
    ],
)
def test_a_run_that_would_write_into_what_it_reads_is_refused(desk: Desk, spec: dict[str, object], words: str) -> None:
    (desk.folder / "material" / "base").mkdir()
    desk.manifest["spec"].update(spec)
    for verb in ("plan", "run"):
        refused = desk.do(verb)
        assert refused.returncode == 2, verb
        assert words in refused.stderr
        assert "lies in it" in refused.stderr


def test_a_suspended_pipeline_starts_nothing_and_the_command_ends(desk: Desk) -> None:
    assert desk.do("run", "--until", "prepare").returncode == 0
    desk.manifest["spec"]["suspend"] = True
    foretold = {s["stage"]: s["doing"] for s in json.loads(desk.do("plan", "--json").stdout)["stages"]}
    assert foretold == {"prepare": "reuse", "train": "stay", "evaluate": "stay", "push": "stay", "deploy": "stay"}
    suspended = desk.do("run")
    assert suspended.returncode == 130
    assert "spec.suspend is true" in suspended.stdout
    assert [desk.starts(stage) for stage in ("prepare", "train")] == [["work"], []]
    desk.manifest["spec"]["suspend"] = False
    assert desk.do("run").returncode == 0
