"""Code that a task file names runs only with allowCode: its folder may be writable for other users."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from support.trainer.lm_eval_tasks import CHOICE
from support.trainer.models import write_jsonl
from support.trainer.stages import environment_in

from finetune_trainer.contract import Environment, Task
from finetune_trainer.evaluation.tasks import LoadedTasks, load_tasks
from finetune_trainer.runtime.errors import ConfigInvalid

pytestmark = pytest.mark.usefixtures("datasets_cache")

CODE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
def docs(data): return data
def score(items): return 1.0
def number(items): return 1.0
class Quiz: pass
"""
PLACES = (
    "process_docs: !function code.docs\n",
    "doc_to_text: !function code.docs\n",
    "class: !function code.Quiz\n",
    "custom_dataset: !function code.docs\n",
    "metric_list: [{metric: !function code.score, aggregation: mean}]\n",
    "metric_list: [{metric: acc, aggregation: !function code.number}]\n",
    "filter_list: [{name: a, filter: [{function: !function code.docs}]}]\n",
    "fewshot_config: {samples: !function code.docs}\n",
    "metadata: {deep: [{inside: !function code.docs}]}\n",
    "include: other.inc\n",
    "include: [other.inc]\n",
    "include: folder/other.inc\n",
    # Modules that are installed are code, too.
    "process_docs: !function os.system\n",
    "metric_list: [{metric: ./script, hf_evaluate: true}]\n",
    "metric_list: [{metric: ./script}]\n",
    "metric_list: [{metric: org/script, hf_evaluate: true}]\n",
)


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    environment = environment_in(tmp_path)
    folder = Path(str(environment.manifest_dir))
    answers = ["yes", "no"]
    questions = [{"q": "Is it", "label": n % 2, "choices": answers} for n in range(6)]
    write_jsonl(folder / "quiz.jsonl", questions)
    for name in ("folder", "script"):
        (folder / name).mkdir()
    for module in ("code.py", "folder/code.py", "script/script.py"):
        (folder / module).write_text(CODE)
    for included in ("other.inc", "folder/other.inc"):
        (folder / included).write_text("process_docs: !function code.docs\n")
    return environment


def write_task(environment: Environment, text: str) -> None:
    key = text.partition(":")[0]
    rest = {name: value for name, value in CHOICE.items() if name != key}
    folder = Path(str(environment.manifest_dir))
    (folder / "quiz.yaml").write_text(text + yaml.safe_dump(rest))


def load(environment: Environment, **fields: Any) -> LoadedTasks:
    task = Task(name="quiz", file="quiz.yaml", **fields)
    return load_tasks([task], environment, seed=0)


def has_run(environment: Environment) -> bool:
    return any(Path(str(environment.manifest_dir)).rglob("ran"))


@pytest.mark.parametrize("text", PLACES)
@pytest.mark.parametrize("allow_code", [None, False])
def test_code_of_a_task_file_is_refused_before_it_runs(
    environment: Environment, text: str, *, allow_code: bool | None
) -> None:
    write_task(environment, text)
    with pytest.raises(ConfigInvalid) as caught:
        load(environment, allow_code=allow_code)
    assert str(caught.value).startswith("evaluate.tasks[quiz]: quiz.yaml: ")
    assert "allowCode: true" in str(caught.value)
    assert not has_run(environment)


@pytest.mark.parametrize("in_group", ["task: [quiz]", "task: [{task: quiz}]"])
def test_code_of_a_member_of_a_group_is_refused(
    environment: Environment, in_group: str
) -> None:
    write_task(environment, PLACES[0])
    folder = Path(str(environment.manifest_dir))
    (folder / "all.yaml").write_text(f"group: all\n{in_group}\n")
    task = Task(name="all", file="all.yaml")
    with pytest.raises(ConfigInvalid, match=r"!function code\.docs"):
        load_tasks([task], environment, seed=0)
    assert not has_run(environment)


def test_code_of_a_task_runs_if_the_pipeline_allows_it(
    environment: Environment,
) -> None:
    write_task(environment, PLACES[0])
    loaded = load(environment, allow_code=True)
    assert loaded.metrics["quiz"] == ("acc",)
    assert has_run(environment)


def test_permission_of_a_task_is_no_permission_of_the_next(
    environment: Environment,
) -> None:
    write_task(environment, PLACES[0])
    folder = Path(str(environment.manifest_dir))
    text = (folder / "quiz.yaml").read_text().replace("task: quiz", "task: exam")
    (folder / "exam.yaml").write_text(text)
    trusted = Task(name="quiz", file="quiz.yaml", allow_code=True)
    other = Task(name="exam", file="exam.yaml")
    with pytest.raises(ConfigInvalid, match=r"tasks\[exam\]: exam\.yaml: it runs code"):
        load_tasks([trusted, other], environment, seed=0)
