"""`finetune card`, of a run on this machine and of a pipeline on a cluster."""

import json

import pytest
from support.cli.run_cards import PageReader, interrupted_scenario
from support.cli.session import TRAIN, interrupt_training

from finetune_operator.core.pipeline import Key
from finetune_operator.local.pipeline_file import PipelineFile

SAMPLES = [
    '{"step": 0, "prompt": "Name it:", "text": "before"}',
    '{"step": 900, "prompt": "Name it:", "text": "after"}',
]
METRICS = ['{"step": 1, "time": 1.5, "loss": 8}', '{"step": 2, "time": 2.5, "loss": 7}']
BASE = {"exam": {"alias": "exam", "acc,none": 0.4, "acc_stderr,none": 0.0321}}


@pytest.fixture
def mine(cli):
    """A finished run `mine` on this machine, with the files of its training and its evaluation."""
    scenario = interrupted_scenario()
    folder = cli.folder / ".finetune" / "mine"
    file = PipelineFile(folder)
    stored = file.apply(Key("default", "mine"), scenario.spec, {})
    file.write_status(stored, scenario.status)
    workspace = folder / "volumes" / "workspace"
    training = workspace / "train" / scenario.stage("train").identity
    training.mkdir(parents=True)
    (training / "metrics.jsonl").write_text("\n".join(METRICS))
    (training / "samples.jsonl").write_text("\n".join(SAMPLES))
    output = workspace / "evaluate" / scenario.stage("evaluate").identity / "output"
    output.mkdir(parents=True)
    (output / "base-results.json").write_text(json.dumps({"results": BASE}))
    models = cli.folder / "models"
    models.mkdir()
    (folder / "claims").mkdir()
    (folder / "claims" / "models").symlink_to(models)
    return folder


def read(file):
    return PageReader(file.read_text("utf-8")).text


def test_card_of_a_local_run_is_named_after_it(cli, mine):
    result = cli.run("card", "mine")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("mine.html: ")
    text = read(cli.folder / "mine.html")
    assert "went from 8 to 7 in 2 steps" in text
    assert "Before training before" in text
    assert "After training (step 900, the result) after" in text
    assert "0.4 ± 0.032 before" in text
    assert "place = 'models/demo'" in text
    assert "finetune run mine --keep-serving" in text


def test_only_run_needs_no_name_and_output_is_chosen(cli, mine):
    assert cli.run("card", "-o", "card.html").out.startswith("card.html: ")
    printed = cli.run("card", "mine", "-o", "-")
    assert printed.out == (cli.folder / "card.html").read_text("utf-8")


def test_card_is_replaced_and_another_file_is_not(cli, mine):
    file = cli.folder / "mine.html"
    assert cli.run("card", "mine").code == 0
    assert cli.run("card", "mine").code == 0
    file.write_text("<p>of another program</p>")
    result = cli.run("card", "mine")
    assert result.code == 2
    assert result.err == (
        "finetune: mine.html exists and is no card: choose another file with -o\n"
    )
    assert file.read_text() == "<p>of another program</p>"
    assert cli.run("card", "mine", "-o", "mine.html").code == 0


def test_card_without_files_has_the_curve_of_the_status(cli, mine):
    for name in ("train", "evaluate"):
        folder = mine / "volumes" / "workspace" / name
        folder.rename(folder.with_name(f"{name}-away"))
    assert cli.run("card", "mine").code == 0
    text = read(cli.folder / "mine.html")
    assert "went from 4 to 0.4 in 1,000 steps" in text
    assert "Before training" not in text


def test_card_of_a_cluster_has_the_samples_of_the_logs(cli, scenario):
    scenario.edit(train={"samples": {"prompts": ["Name it:"]}})
    interrupt_training(scenario)
    cli.api.logs = {f"{TRAIN}2": [f"sample {line}" for line in SAMPLES]}
    result = cli.run("card", "demo")
    assert result.code == 0, result.err
    text = read(cli.folder / "demo.html")
    assert "Before training before At step 900 after" in text
    assert "kubectl apply -n team -f pipeline.yaml" in text
    assert "train 1" in text


def test_card_of_a_cluster_needs_no_right_to_read_logs(cli, scenario):
    scenario.edit(train={"samples": {"prompts": ["Name it:"]}})
    interrupt_training(scenario)
    cli.api.forbidden = {("list", "pods"), ("get", "pods"), ("get", "pods/log")}
    result = cli.run("card", "demo")
    assert result.code == 0
    assert "the card has no samples: you may not read the logs" in result.err
    assert "Asked and got" in read(cli.folder / "demo.html")


def test_unknown_run_is_an_error(cli, mine):
    result = cli.run("card", "--workdir", "nowhere")
    assert result.code == 2
    assert "holds no run" in result.err
