"""`finetune validate --check`, and the same check before `run` and `plan`: what a manifest refers to is looked at."""

import gzip
import json
import sys

import pytest
import yaml
from support.cli.checked_sources import LOCAL, TASK
from support.operator.scenario import ALL_STAGES, merged

from finetune_cli.__main__ import main
from finetune_cli.checks.built_in_tasks import read_built_in_tasks
from finetune_cli.checks.task_file import task_metrics

pytestmark = pytest.mark.usefixtures("unread_data", "unloaded_tasks")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with a model, records and a task file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text("{}")
    (tmp_path / "data.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n')
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(TASK))
    return tmp_path


@pytest.fixture
def check(folder, capsys):
    """A function that checks the manifest p.yaml with these changes to its spec, and returns exit code and output."""

    def check(*options, command=("validate", "--check"), **changes):
        spec = merged(merged(ALL_STAGES, LOCAL), changes)
        kind = {
            "apiVersion": "finetune.dev/v1alpha1",
            "kind": "FineTunePipeline",
            "metadata": {"name": "demo"},
        }
        (folder / "p.yaml").write_text(yaml.safe_dump({**kind, "spec": spec}))
        code = main([*command, *options, "p.yaml"])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return check


def test_manifest_whose_sources_exist_is_valid(check):
    assert check() == (0, "p.yaml: valid\n")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda here: (here / "data.jsonl").rename(here / "data.json"),
            "data.jsonl does not exist; did you mean ",
        ),
        (
            lambda here: (here / "data.jsonl").unlink(),
            "data.jsonl does not exist; correct the URI or create it",
        ),
        (lambda here: (here / "data.jsonl").write_text(""), "data.jsonl is empty"),
        (lambda here: (here / "base/config.json").unlink(), "has no config.json"),
    ],
)
@pytest.mark.parametrize("command", [("validate", "--check"), ("plan",), ("run",)])
def test_unusable_source_is_reported_before_anything_starts(
    check, folder, damage, message, command
):
    damage(folder)
    code, out = check(command=command)
    assert code == 2
    assert message in out
    assert out.startswith("p.yaml:")
    assert not list(folder.glob(".finetune/*/jobs"))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (
            "published/notes.txt",
            "notes.txt was not written by a push; move it or choose another target",
        ),
        ("published", "is no folder; choose another target"),
    ],
)
@pytest.mark.parametrize("command", [("validate", "--check"), ("plan",), ("run",)])
def test_target_with_files_of_others_is_refused_at_once(
    check, folder, place, message, command
):
    """Push would refuse it only after the training."""
    (folder / place).parent.mkdir(exist_ok=True)
    (folder / place).write_text("mine")
    code, out = check(command=command)
    assert code == 2
    assert out.startswith("p.yaml:")
    assert "spec.push.targets[0].uri: " in out
    assert message in out
    assert not list(folder.glob(".finetune/*/jobs"))


def test_target_on_a_claim_is_looked_at_when_it_is_mounted(check, folder):
    (folder / "claim/models").mkdir(parents=True)
    (folder / "claim/models/notes.txt").touch()
    there = {"targets": [{"uri": "pvc://team/models"}]}
    assert "pvc://team/models: the claim team is not mounted" in check(push=there)[1]
    code, out = check("--claim", "team=claim", push=there)
    assert (code, "notes.txt was not written by a push" in out) == (2, True)


def test_target_with_models_of_earlier_pushes_is_valid(check, folder):
    (folder / f"published/sha256-{64 * 'a'}").mkdir(parents=True)
    (folder / "published/latest").symlink_to(f"sha256-{64 * 'a'}")
    assert check() == (0, "p.yaml: valid\n")


def test_source_without_permission_is_reported(check, monkeypatch):
    monkeypatch.setattr("finetune_cli.checks.sources.os.access", lambda *_: False)
    code, out = check()
    assert code == 2
    assert out.count("cannot be read by this user; change its permissions") == 3


def test_bare_repository_of_the_hub_gets_its_scheme_suggested(check, folder):
    code, out = check(model={"uri": "Qwen/Qwen3-0.6B"})
    assert (code, out.count("spec.model.uri: ")) == (2, 1)
    assert "for the hub write hf://Qwen/Qwen3-0.6B" in out
    (folder / "Qwen").mkdir()
    code, out = check(model={"uri": "Qwen/Qwen3-0.6B"})
    assert (code, out.count("spec.model.uri: ")) == (2, 1)
    assert out.rstrip().endswith(
        "for the repository of the Hugging Face hub, write hf://Qwen/Qwen3-0.6B"
    )


def test_target_like_a_repository_needs_its_scheme(check):
    code, out = check(
        command=("validate",), push={"targets": [{"uri": "my-org/my-model"}]}
    )
    assert code == 2
    assert (
        "spec.push.targets[0].uri: there is no folder my-org beside the manifest" in out
    )
    assert (
        "for the hub write hf://my-org/my-model, for a folder ./my-org/my-model" in out
    )
    assert check(push={"targets": [{"uri": "./my-org/my-model"}]})[0] == 0


@pytest.mark.parametrize(
    "changes", [{"model": {"uri": "gpt2"}}, {"datasets": [{"uri": "alpaca"}]}]
)
def test_single_name_that_is_no_path_is_hinted_at_the_hub(check, changes):
    code, out = check(**changes)
    name = "gpt2" if "model" in changes else "alpaca"
    assert code == 2
    assert (
        f"{name} does not exist; correct the URI or create it; for a repository of the Hugging Face hub"
        in out
    )
    assert f"write hf://ORG/{name}" in out


def test_what_was_not_looked_at_is_named(check):
    task = {"tasks": [{"name": "exam", "file": "pvc://team/task.yaml"}]}
    code, out = check(evaluate=task)
    assert code == 0
    note = "pvc://team/task.yaml: the claim team is not mounted; in a local run add --claim team=FOLDER"
    assert f"{note} (note)" in out
    assert json.loads(check("--json", evaluate=task)[1])["files"][0]["notLookedAt"] == [
        note
    ]


def test_files_of_a_claim_are_looked_at(check, folder):
    (folder / "material").mkdir()
    code, out = check(
        "--claim", "demo=material", datasets=[{"uri": "pvc://demo/data.jsonl"}]
    )
    assert (code, "material/data.jsonl does not exist" in out) == (2, True)
    (folder / "material/data.jsonl").write_text("{}\n")
    assert (
        check("--claim", "demo=material", datasets=[{"uri": "pvc://demo/data.jsonl"}])[
            0
        ]
        == 0
    )


def test_sources_that_only_the_users_program_reads_are_ignored(check):
    code, _ = check(
        datasets=[{"uri": "nowhere.csv"}],
        prepare={"pod": {"command": ["my-tokenizer"]}},
    )
    assert code == 0


def test_metric_that_the_task_file_does_not_list_is_an_error(check):
    def evaluate(metric):
        gate = {"task": "exam", "metric": metric, "value": 0.6}
        return {
            "tasks": [{"name": "exam", "file": "task.yaml"}],
            "gates": [gate],
        }

    code, out = check(evaluate=evaluate("accuracy"))
    assert code == 2
    assert (
        "accuracy is not measured by the task exam: task.yaml lists acc, acc_norm"
        in out
    )
    assert check(evaluate=evaluate("acc_norm,none"))[0] == 0


@pytest.fixture
def tasks_of_lm_eval(tmp_path, monkeypatch):
    """An installed lm-eval with a task, a group, a tag in an included file, and a Python module that cannot be run."""
    tasks = tmp_path / "site/lm_eval/tasks"
    tasks.mkdir(parents=True)
    (tasks.parent / "__init__.py").write_text("raise SystemExit('imported')")
    (tasks / "_exam_yaml").write_text(
        yaml.safe_dump(TASK | {"task": "template", "tag": ["exams"]})
    )
    (tasks / "exam_easy.yaml").write_text(
        "include: _exam_yaml\n'task': exam_easy # the easy one\n"
    )
    (tasks / "all.yaml").write_text(
        "group: exam_all\ntask: [exam_easy]\naggregate_metric_list:\n- {metric: acc, weight_by_size: true}\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "lm_eval", raising=False)


def evaluation(task, metric="acc"):
    return {
        "tasks": [{"name": task}],
        "gates": [{"task": task, "metric": metric, "value": 0.6}],
    }


@pytest.mark.parametrize("task", ["exam_easy", "exam_all"])
def test_metric_that_a_built_in_task_lacks_is_an_error(check, tasks_of_lm_eval, task):
    assert check(evaluate=evaluation(task, "acc,none"))[0] == 0
    code, out = check(evaluate=evaluation(task, "accuracy"))
    assert code == 2
    assert f"accuracy is not measured by the task {task}: " in out


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("exam_esay", "lm-eval has no task exam_esay; did you mean exam_easy"),
        ("zzz", "lm-eval has no task zzz; set file: to use a task of your own"),
        (
            "exams",
            "exams is a tag for several lm-eval tasks and has no score; name the tasks instead",
        ),
    ],
)
@pytest.mark.parametrize("command", [("validate", "--check"), ("run",)])
def test_task_that_lm_eval_lacks_is_an_error(
    check, tasks_of_lm_eval, command, task, message
):
    code, out = check(command=command, evaluate=evaluation(task))
    assert code == 2
    assert f"spec.evaluate.tasks[0].name: {message}" in out


def test_tasks_are_not_judged_without_lm_eval(check, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert check(evaluate=evaluation("exam_esay", "accuracy"))[0] == 0


def test_names_of_installed_tasks_are_those_of_lm_eval():
    """A task, a group and a tag of each form in which the package writes them."""
    tasks = read_built_in_tasks()
    assert tasks
    assert {"arc_easy", "mmlu", "gsm8k", "hellaswag"} <= set(tasks.files)
    assert {"glue", "ai2_arc", "african_flores_tasks", "acp_gen_2shot"} <= tasks.tags
    assert not tasks.tags & {"arc_easy", "mmlu"}
    assert task_metrics(tasks.files["arc_easy"]) == ["acc", "acc_norm"]


@pytest.mark.parametrize(
    ("text", "metrics"),
    [
        ("task: exam\noutput_type: multiple_choice\n", ["acc", "acc_norm"]),
        ("include: task.yaml\ntask: other\n", ["acc", "acc_norm"]),
        ("include: self.yaml\n", None),
        ("task: exam\nmetric_list: [{metric: !function metrics.own}]\n", None),
        ("task: exam\nprocess_results: !function metrics.own\n", None),
        ("group: exams\ntask: [one, two]\n", []),
        (
            "group: exams\ntask: [one]\naggregate_metric_list: [{metric: acc}]\n",
            ["acc"],
        ),
        ("task: exam\nmetric_list: acc\n", None),
        ("task: exam\noutput_type: unheard_of\n", None),
        ("[1, 2", None),
        ("just text", None),
    ],
)
def test_metrics_of_a_task_file_are_known_or_none(folder, text, metrics):
    (folder / "self.yaml").write_text(text)
    assert task_metrics(folder / "self.yaml") == metrics


def test_plan_counts_records_and_steps_that_are_known(check):
    assert (
        "data: 2 records in data.jsonl\nrows, tokens and steps: known when prepare is done"
        in check(command=("plan",))[1]
    )
    assert (
        "train: 7 steps of 1 row\n"
        in check(command=("plan",), train={"maxSteps": 7})[1]
    )
    assert (
        "records not counted: hf://org/data/train.jsonl is not on this machine"
        in check(command=("plan",), datasets=[{"uri": "hf://org/data/train.jsonl"}])[1]
    )


def test_plan_says_how_many_processes_start_here(check):
    """A run on this machine starts the processes of all nodes, and its pod's resources say how many."""
    train = {
        "maxSteps": 7,
        "microBatchSize": 2,
        "nodes": 2,
        "pod": {"resources": {"limits": {"nvidia.com/gpu": 4}}},
    }
    output = check(
        command=("plan",), train=train, workspace={"accessMode": "ReadWriteMany"}
    )[1]
    assert (
        "train: 7 steps of 16 rows\ntrain: 8 processes on this machine, a step has 16 rows\n"
        in output
    )
    assert "spec.train.pod.resources" not in output
    single = check(
        command=("plan",),
        train={"pod": {"resources": {"limits": {"nvidia.com/gpu": 1}}}},
    )[1]
    assert (
        "processes" in single,
        "without effect on this machine: spec.train.pod.resources" in single,
    ) == (False, True)


@pytest.mark.parametrize(
    ("name", "content", "counted"),
    [
        ("data.csv", 'prompt,completion\n"two\nlines",b\nc,d\n', "2 records"),
        ("data.json", "[1, 2, 3]", "3 records"),
        ("data.json", "{}", "records not counted: data.json: no list of records"),
        ("data.ndjson", '{"text": "one"}\n', "1 record in"),
        ("data.csv", f"text\n{200_000 * 'x'}\n", "1 record in"),
        (
            "data.csv",
            "text\n\ud800",
            "records not counted: data.csv: 'utf-8' codec can't decode",
        ),
        (
            "data.json",
            100_000 * "[",
            "records not counted: data.json: its JSON is nested too deeply",
        ),
        (
            "data.jsonl.gz",
            "not gzip",
            "records not counted: data.jsonl.gz: Not a gzipped file",
        ),
        ("data.gz", "x", "records not counted: data.gz: only the trainer reads .gz"),
        (
            "data.parquet",
            "PAR1",
            "records not counted: data.parquet: only the trainer reads .parquet",
        ),
    ],
)
def test_records_are_counted_by_format(check, folder, name, content, counted):
    (folder / name).write_bytes(content.encode("utf-8", "surrogatepass"))
    assert f"data: {counted}" in check(command=("plan",), datasets=[{"uri": name}])[1]


def test_records_of_compressed_files_and_patterns_are_counted(check, folder):
    (folder / "more-1.csv.gz").write_bytes(gzip.compress(b"text\none\ntwo\n"))
    (folder / "more-2.csv.gz").write_bytes(gzip.compress(b"text\nthree\n"))
    assert (
        "data: 3 records in more-*.csv.gz"
        in check(command=("plan",), datasets=[{"uri": "more-*.csv.gz"}])[1]
    )


def test_records_of_a_truncated_file_are_not_counted(check, folder):
    (folder / "data.jsonl.gz").write_bytes(gzip.compress(b"{}\n" * 99)[:-9])
    out = check(command=("plan",), datasets=[{"uri": "data.jsonl.gz"}])[1]
    assert "records not counted: data.jsonl.gz: Compressed file ended before" in out
