"""`finetune compare` and `finetune list --history`: which runs they read, and their errors."""

import json

import pytest
from support.cli.recorded_runs import write_run
from support.operator.scenario import Scenario, a_pipeline, scores


def finished(value, **train):
    evaluate = scores(value, 0.02)
    return Scenario().finish(evaluate=evaluate, train=train).status


@pytest.fixture
def runs(cli):
    """Two runs, of which the second has two generations."""
    write_run("slow", finished(0.7, loss=0.9), a_pipeline(seed=1))
    write_run("fast", finished(0.6, loss=0.8), a_pipeline(seed=2))
    write_run("fast", finished(0.8, loss=0.4), a_pipeline(seed=3))
    return cli


def compared(cli, *arguments):
    result = cli.run("compare", "-o", "json", *arguments)
    assert result.code == 0, result.err
    return json.loads(result.out)


def test_runs_of_this_machine_are_compared(runs):
    shown = compared(runs, "slow", "fast")
    assert [run["trainingLoss"] for run in shown["runs"]] == [0.9, 0.4]
    assert shown["fields"] == [{"path": "seed", "values": [1, 3]}]


def test_run_that_has_ended_early_is_stopped_as_in_the_list(runs):
    write_run("half", Scenario().run("prepare").status)
    lines = runs.run("compare", "slow", "half").out.splitlines()
    [phases] = [line.split()[1:] for line in lines if line.startswith("phase")]
    assert phases == ["Succeeded", "Stopped"]
    [row] = [line for line in runs.run("list").out.splitlines() if "half" in line]
    assert row.split()[1] == "Stopped"


def test_generation_of_a_run_is_named_with_its_number(runs):
    shown = compared(runs, "fast@1", "fast@2", "fast")
    assert [run["trainingLoss"] for run in shown["runs"]] == [0.8, 0.4, 0.4]


def test_run_in_another_folder_is_named_by_its_folder(runs, monkeypatch, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    shown = compared(runs, "../.finetune/slow", "../.finetune/fast@1")
    assert [run["trainingLoss"] for run in shown["runs"]] == [0.9, 0.8]


def test_best_comes_first_in_the_table(runs):
    result = runs.run("compare", "slow", "fast", "--best", "loss")
    assert result.out.splitlines()[0].split() == ["fast", "slow"]
    assert result.out.splitlines()[-1] == "best loss: fast (0.4)"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["slow"], "finetune compare slow@1 slow"),
        (["slow", "slow"], "slow is named twice"),
        (["slow", "fats"], "there is no run fats on this machine; did you mean fast?"),
        (["slow", "xyz"], "runs of this machine: fast, slow"),
        (["slow", "fast@7"], "fast has no generation 7; its generations are 1, 2"),
        (["slow", "no.yaml"], "no.yaml"),
    ],
)
def test_wrong_name_is_an_error_that_says_the_fix(runs, names, message):
    result = runs.run("compare", *names)
    assert result.code == 2
    assert message in result.err


def test_damaged_generation_is_left_out(runs):
    (runs.folder / ".finetune/fast/history/1.json").write_text("{")
    result = runs.run("compare", "slow", "fast@1")
    assert (result.code, "its generations are 2" in result.err) == (2, True)


def test_history_lists_what_each_edit_changed(runs):
    result = runs.run("list", "--history", "fast")
    lines = result.out.splitlines()
    assert [line.split()[:4] for line in lines[1:3]] == [
        ["fast@1", "BelowThreshold", "0.8", "0.6"],
        ["fast@2", "Succeeded", "0.4", "0.6"],
    ]
    assert lines[3] == "  seed: 2 → 3"
    assert "slow" not in result.out
    assert "slow@1" in runs.run("list", "--history").out


def test_history_in_json_has_the_objects(runs):
    items = json.loads(runs.run("list", "--history", "--json", "fast").out)["items"]
    assert [(item["history"], item["spec"]["seed"]) for item in items] == [
        (1, 2),
        (2, 3),
    ]


def test_pipelines_of_a_cluster_are_compared(cli):
    cli.api.add(Scenario(name="slow").finish(evaluate=scores(0.7, 0.02)))
    fast = cli.api.add(Scenario(name="fast"))
    fast.edit(seed=4)
    fast.finish(evaluate=scores(0.8, 0.02))
    for flags in ((), ("-n", "team")):
        shown = compared(cli, *flags, "slow", "fast", "--best", "acc")
        assert shown["fields"] == [{"path": "seed", "values": [0, 4]}]
        (difference,) = [row for row in shown["differences"] if row["metric"] == "acc"]
        assert difference["paired"] is False
        assert shown["best"]["name"] == "fast"
    out = cli.run("compare", "slow", "fast").out
    assert "* not paired question by question: fast: on a cluster, the values" in out


def test_cluster_has_the_newest_generation_only(cli):
    cli.api.add(Scenario(name="slow").finish())
    cli.api.add(Scenario(name="fast").finish())
    assert cli.run("compare", "slow@1", "fast").code == 0
    result = cli.run("compare", "slow@9", "fast")
    assert result.code == 2
    assert "slow@9: a cluster keeps what was measured of the newest" in result.err
    result = cli.run("compare", "slow", "fats")
    assert (result.code, "did you mean fast?" in result.err) == (2, True)


def test_history_on_a_cluster_says_what_it_does_not_keep(cli):
    cli.api.add(Scenario(name="slow").finish(evaluate=scores(0.7, 0.02)))
    result = cli.run("list", "--history", "-n", "team")
    assert "slow@1  Succeeded  0.5   0.6" in result.out
    assert "a cluster keeps what was measured of the newest" in result.out
