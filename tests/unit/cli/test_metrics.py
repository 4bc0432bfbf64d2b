"""`finetune logs` with --metrics and --samples, of a local run and on a cluster."""

import json
import sys

import pytest
from support.cli.session import TRAIN, interrupt_training
from support.operator.scenario import Scenario

from finetune_cli.output.metrics import rows_of_curve
from finetune_operator.core.pipeline import Key
from finetune_operator.local.pipeline_file import PipelineFile
from finetune_trainer.contract import LossCurve, ValidationPoint

CURVE = LossCurve(
    every_steps=6,
    step=14,
    losses=(2.5, 2.25, 2.0),
    validations=(
        ValidationPoint(step=8, loss=2.5),
        ValidationPoint(step=12, loss=2.75),
    ),
)
LINES = (
    '{"step": 1, "time": 10.5, "loss": 2.5, "learning_rate": 0.0001, "gradient_norm": 1.5, "tokens_per_second": 99.0}\n'
    '{"step": 2, "time": 11.5, "loss": 2.25, "learning_rate": 0.0002, "gradient_norm": 1.25}\n'
    '{"step": 2, "time": 11.5, "validation_loss": 3.0}\n'
    '{"step": 3, "ti'
)


def rows(text):
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def training(scenario):
    """A pipeline on the cluster whose training has reported the curve."""
    scenario.run("prepare")
    scenario.cluster.progress(
        scenario.start("train"), step=14, start_step=0, total=342, loss_curve=CURVE
    )
    return scenario.reconcile_until_stable()


@pytest.fixture
def metrics_file(cli):
    """The file of a local run `mine`, with two steps and a torn line."""
    status = Scenario().run("prepare")
    status.start("train")
    file = PipelineFile(cli.folder / ".finetune" / "mine")
    file.write_status(
        file.apply(Key("default", "mine"), status.spec, {}), status.status
    )
    folder = (
        cli.folder
        / ".finetune/mine/volumes/workspace/train"
        / status.stage("train").identity
    )
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(LINES)
    return folder / "metrics.jsonl"


def test_local_metrics_are_json_lines_without_a_terminal(cli, metrics_file):
    result = cli.run("logs", "mine", "--metrics")
    assert (result.code, result.err) == (0, "")
    assert rows(result.out) == [
        {
            "step": 1, "time": 10.5, "loss": 2.5,
            "learning_rate": 0.0001, "gradient_norm": 1.5, "tokens_per_second": 99.0,
        },
        {
            "step": 2, "time": 11.5, "loss": 2.25,
            "learning_rate": 0.0002, "gradient_norm": 1.25, "validation_loss": 3.0,
        },
    ]  # fmt: skip


def test_metrics_are_a_table_on_a_terminal(cli, metrics_file, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert [
        line.split() for line in cli.run("logs", "mine", "--metrics").out.splitlines()
    ] == [
        [
            "STEP",
            "LOSS",
            "VALIDATION_LOSS",
            "LEARNING_RATE",
            "GRADIENT_NORM",
            "TOKENS_PER_SECOND",
        ],
        ["1", "2.5", "0.0001", "1.5", "99"],
        ["2", "2.25", "3", "0.0002", "1.25"],
    ]
    assert rows(cli.run("logs", "mine", "--metrics", "-o", "json").out)[0]["step"] == 1


def test_output_may_be_chosen_and_the_stage_named(cli, metrics_file):
    assert cli.run("logs", "mine", "train", "--metrics", "-o", "table").out.startswith(
        "STEP  LOSS"
    )
    assert rows(cli.run("logs", "train", "--metrics").out) == rows(
        cli.run("logs", "mine", "--metrics").out
    )


def test_missing_local_metrics_are_reported_with_the_path(cli, metrics_file):
    metrics_file.unlink()
    result = cli.run("logs", "mine", "--metrics")
    assert (result.code, result.out) == (1, "")
    assert f"{metrics_file} has no rows" in result.err


def test_metrics_of_a_cluster_are_the_points_of_the_status(cli, training):
    result = cli.run("logs", "demo", "--metrics")
    assert result.code == 0
    assert rows(result.out) == [
        {"step": 6, "loss": 2.5},
        {"step": 8, "validation_loss": 2.5},
        {"step": 12, "loss": 2.25, "validation_loss": 2.75},
        {"step": 14, "loss": 2.0},
    ]
    identity = training.stage("train").identity
    assert result.err == (
        "3 points up to step 14, each the mean of 6 steps; "
        f"every step is in train/{identity}/metrics.jsonl on the claim demo-workspace\n"
    )


def test_metrics_of_a_cluster_stay_after_the_pod(cli, training):
    training.lose_node(training.attempt("train").job)
    training.reconcile_until_stable()
    cli.api.deleted_pods |= set(training.cluster.jobs)
    assert len(rows(cli.run("logs", "demo", "--metrics").out)) == 4


def test_metrics_of_a_cluster_need_only_the_pipeline(cli, training):
    cli.api.forbidden = {
        ("list", "pods"),
        ("get", "pods"),
        ("get", "pods/log"),
        ("get", "pods/proxy"),
    }
    assert cli.run("logs", "demo", "--metrics").code == 0


def test_missing_curve_is_reported_with_the_stages_status(cli, scenario):
    none = cli.run("logs", "demo", "--metrics")
    assert (none.code, none.err) == (2, "finetune: train has no attempts yet\n")
    scenario.run("prepare").start("train")
    result = cli.run("logs", "demo", "--metrics")
    assert (result.code, result.out) == (1, "")
    assert result.err == "train has reported no loss curve; its status: starting\n"


def test_get_draws_the_curve_of_a_cluster(cli, training):
    assert (
        "      loss 2.5 █▅▁ 2\n      validation loss 2.75 at step 12, best 2.5 at step 8\n"
        in cli.run("get", "demo").out
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["mine", "evaluate", "--metrics"],
            "--metrics prints the metrics of train: leave out evaluate",
        ),
        (
            ["mine", "--metrics", "-f"],
            "--metrics prints what all attempts have recorded so far",
        ),
        (["mine", "--metrics", "--attempt", "1"], "leave out -f and --attempt"),
        (["mine", "train", "-o", "json"], "-o is the form of metrics"),
    ],
)
def test_arguments_that_contradict_are_refused(cli, metrics_file, arguments, message):
    result = cli.run("logs", *arguments)
    assert (result.code, result.out) == (2, "")
    assert message in result.err


def test_points_end_at_the_newest_step():
    assert [
        row["step"]
        for row in rows_of_curve(CURVE.model_copy(update={"validations": ()}))
    ] == [
        6,
        12,
        14,
    ]


# --samples

SAMPLE_LINES = [
    '{"step": 100, "prompt": "Name it:", "text": " a\\nb"}',
    '{"step": 200, "prompt": "Name it:", "text": " c"}',
]


def test_local_samples_are_read_from_their_file(cli, metrics_file):
    metrics_file.with_name("samples.jsonl").write_text(
        "\n".join([*SAMPLE_LINES, '{"st'])
    )
    result = cli.run("logs", "mine", "--samples")
    assert (result.code, result.out.splitlines()) == (0, SAMPLE_LINES)
    table = cli.run("logs", "mine", "--samples", "-o", "table").out.splitlines()
    assert table == [
        "STEP  PROMPT      TEXT",
        r"100   'Name it:'  ' a\nb'",
        "200   'Name it:'  ' c'",
    ]


def test_missing_local_samples_are_reported_with_the_path(cli, metrics_file):
    result = cli.run("logs", "mine", "--samples")
    assert (result.code, result.out) == (1, "")
    assert "samples.jsonl has no rows: train.samples may not be set" in result.err


def test_samples_of_a_cluster_are_in_the_logs_of_all_attempts(cli, scenario):
    """A step that was repeated is there once; an attempt without a log is named."""
    interrupt_training(scenario)
    cli.api.logs = {
        f"{TRAIN}1": [
            "train 41/100",
            f"sample {SAMPLE_LINES[0]}",
            "sample text of another program",
        ],
        f"{TRAIN}2": [f"sample {line}" for line in SAMPLE_LINES],
    }
    result = cli.run("logs", "demo", "--samples")
    assert (result.code, result.out.splitlines(), result.err) == (0, SAMPLE_LINES, "")
    cli.api.deleted_pods.add(f"{TRAIN}1")
    assert cli.run("logs", "demo", "--samples").err.startswith(
        "the pod of attempt 1 no longer exists"
    )
    cli.api.logs = {}
    none = cli.run("logs", "demo", "--samples")
    assert (none.code, none.out) == (1, "")
    assert "no log has a sample" in none.err
