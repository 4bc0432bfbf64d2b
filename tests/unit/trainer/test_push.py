import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.adapters import make_adapter
from support.stages import environment_in, run_to_failure, run_to_result, start_stage

from finetune_trainer.contract import (
    DatasetSource,
    Environment,
    EvaluateConfig,
    EvaluateRecipe,
    EvaluateResult,
    ExitCode,
    Lineage,
    ModelSource,
    PrepareResult,
    PushConfig,
    PushRecipe,
    PushResult,
    Score,
    Task,
    TrainConfig,
    TrainRecipe,
    TrainResult,
)
from finetune_trainer.contract.recipes import Checkpoint
from finetune_trainer.runtime.artifacts import verify
from finetune_trainer.runtime.stage_folder import write_config, write_result

PROMPT = "The parser opens"


@pytest.fixture
def environment(tmp_path: Path, tiny_model: Path) -> Environment:
    """Two trained adapters and a claim named models."""
    environment = environment_in(tmp_path)
    for seed, name in enumerate(("first", "second")):
        make_adapter(environment.stage_dir("train", name) / "output", tiny_model, seed=seed)
    (tmp_path / "claims" / "models").mkdir()
    return environment


@pytest.fixture
def config(tiny_model: Path) -> PushConfig:
    return PushConfig(
        identity="p1",
        prepare="d1",
        train="first",
        evaluate="e1",
        model=ModelSource(uri=f"file://{tiny_model}", revision="v1"),
        dataset=DatasetSource(uri="hf://people/names/train.jsonl"),
        recipe=PushRecipe(target="pvc://models/names"),
        lineage=Lineage(pipeline="default/names", interruptions=2, lost_steps=7, lost_seconds=3.5),
    )


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "claims" / "models" / "names"


def push(config: PushConfig, environment: Environment) -> PushResult:
    return run_to_result(config, environment, PushResult)


def with_target(config: PushConfig, target: str, **changes: object) -> PushConfig:
    recipe = config.recipe.model_copy(update={"target": target, **changes})
    return config.model_copy(update={"recipe": recipe, "identity": target.replace("/", "-")})


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the contents of a model's files by name, without the model card."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix != ".md"}


def names_beside(target: Path) -> list[str]:
    return sorted(path.name for path in target.parent.iterdir())


def logits(model: Any, folder: Path) -> Any:
    import torch  # noqa: PLC0415
    from transformers import AutoTokenizer  # noqa: PLC0415

    torch.set_num_threads(1)
    tokens = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt")
    with torch.no_grad():
        return model.eval()(**tokens).logits.float()


def load_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    return AutoModelForCausalLM.from_pretrained(folder)


def test_pushed_model_computes_like_base_model_with_adapter(
    environment: Environment, config: PushConfig, target: Path, tiny_model: Path
) -> None:
    import torch  # noqa: PLC0415

    from finetune_trainer.models.merge import with_adapter  # noqa: PLC0415

    result = push(with_target(config, "pvc://models/names", dtype="fp32"), environment)
    assert result.size == sum(path.stat().st_size for path in target.iterdir() if path.name != "manifest.json")
    adapter = environment.stage_dir("train", "first") / "output"
    expected = logits(with_adapter(tiny_model, adapter, torch.float32), tiny_model)
    assert (logits(load_model(target), target) - expected).abs().max() < 1e-4
    assert (logits(load_model(tiny_model), target) - expected).abs().max() > 0.1


@pytest.mark.parametrize("variant", [{}, {"use_rslora": True}, {"use_dora": True}], ids=["lora", "rslora", "dora"])
def test_every_lora_variant_is_merged_correctly(tmp_path: Path, tiny_model: Path, variant: dict[str, bool]) -> None:
    import torch  # noqa: PLC0415

    from finetune_trainer.models.merge import load_merged, with_adapter  # noqa: PLC0415

    adapter = make_adapter(tmp_path / "adapter", tiny_model, **variant)
    expected = logits(with_adapter(tiny_model, adapter, torch.float32), tiny_model)
    assert (logits(load_merged(tiny_model, adapter, torch.float32), tiny_model) - expected).abs().max() < 1e-4


def test_merged_model_in_memory_equals_the_pushed_model(
    environment: Environment, config: PushConfig, target: Path, tiny_model: Path
) -> None:
    import torch  # noqa: PLC0415

    from finetune_trainer.models.merge import load_merged  # noqa: PLC0415

    push(config, environment)
    in_memory = load_merged(tiny_model, environment.stage_dir("train", "first") / "output", torch.bfloat16)
    assert torch.equal(logits(in_memory, target), logits(load_model(target), target))


def test_same_adapter_yields_the_same_files(environment: Environment, config: PushConfig, target: Path) -> None:
    one = push(config, environment)
    two = push(with_target(config, "pvc://models/again"), environment)
    assert one.digest == two.digest
    files = read_files(target)
    files.pop("manifest.json")
    assert files.items() <= read_files(target.with_name("again")).items()


def test_large_model_is_written_in_shards(
    environment: Environment, config: PushConfig, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = push(config, environment)
    expected = logits(load_model(target), target)
    monkeypatch.setattr("finetune_trainer.models.merge.SHARD", "50KB")
    assert push(with_target(config, "pvc://models/shards"), environment).digest != whole.digest
    shards = target.with_name("shards")
    assert len(list(shards.glob("*.safetensors"))) > 1
    assert (logits(load_model(shards), shards) == expected).all()


def test_files_are_readable_by_all_users(environment: Environment, config: PushConfig, target: Path) -> None:
    push(config, environment)
    assert {path.stat().st_mode & 0o044 for path in target.iterdir()} == {0o044}


def test_same_model_is_not_written_twice(
    environment: Environment, config: PushConfig, target: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = push(config, environment)
    inode = target.stat().st_ino
    (environment.stage_dir("push", "p1") / "result.json").unlink()  # as if killed before writing the result
    assert push(config, environment) == first
    other_lineage = config.model_copy(
        update={"identity": "p2", "lineage": Lineage(pipeline="default/names", interruptions=9)}
    )
    assert push(other_lineage, environment).digest == first.digest
    assert target.stat().st_ino == inode
    assert capfd.readouterr().out.count("already contains this model") == 2


def test_corrupt_or_missing_model_is_pushed_again(environment: Environment, config: PushConfig, target: Path) -> None:
    first = push(config, environment)
    before = read_files(target)
    weights = target / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert push(config, environment) == first
    assert read_files(target) == before
    shutil.rmtree(target)
    assert push(config, environment) == first
    assert read_files(target) == before


@pytest.fixture
def slow_renames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pause after each rename, long enough for a reader to notice a missing name."""
    rename = Path.rename

    def slow(self: Path, target: Path) -> Path:
        new = rename(self, target)
        time.sleep(0.1)
        return new

    monkeypatch.setattr(Path, "rename", slow)


@pytest.mark.usefixtures("slow_renames")
def test_target_exists_at_all_times_while_it_is_replaced(
    environment: Environment, config: PushConfig, target: Path
) -> None:
    first = push(config, environment)
    observed: set[bool] = set()
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            observed.add((target / "model.safetensors").exists())
            time.sleep(0.001)

    reader = threading.Thread(target=read)
    reader.start()
    second = push(config.model_copy(update={"identity": "p2", "train": "second"}), environment)
    stop.set()
    reader.join()
    assert second.digest != first.digest
    assert observed == {True}
    assert names_beside(target) == [".names.lock", "names"]


@pytest.mark.parametrize(
    ("name", "expected"), [("names/notes.txt", "was not written by a push"), ("names", "was not written by a push")]
)
def test_foreign_files_at_the_target_are_not_replaced(
    environment: Environment, config: PushConfig, target: Path, name: str, expected: str
) -> None:
    foreign_file = target.parent / name
    foreign_file.parent.mkdir(exist_ok=True)
    foreign_file.write_text("mine")
    message, code = run_to_failure(config, environment)
    assert "push.target pvc://models/names" in message
    assert expected in message
    assert code == ExitCode.CONFIG
    assert foreign_file.read_text() == "mine"


def test_foreign_file_in_a_pushed_model_is_not_deleted(
    environment: Environment, config: PushConfig, target: Path
) -> None:
    push(config, environment)
    (target / "notes.txt").write_text("mine")
    message, code = run_to_failure(config.model_copy(update={"identity": "p2", "train": "second"}), environment)
    assert "notes.txt" in message
    assert code == ExitCode.CONFIG
    assert (target / "notes.txt").read_text() == "mine"


def test_trained_adapter_is_not_replaced_by_a_push(environment: Environment, config: PushConfig) -> None:
    adapter = environment.stage_dir("train", "second") / "output"
    _, code = run_to_failure(with_target(config, f"file://{adapter}"), environment)
    assert code == ExitCode.CONFIG
    verify(adapter)


def test_root_of_a_claim_is_rejected_as_a_target(environment: Environment, config: PushConfig) -> None:
    message, code = run_to_failure(with_target(config, "pvc://models/"), environment)
    assert "pvc://CLAIM/PATH" in message
    assert code == ExitCode.CONFIG


def test_empty_folder_is_accepted_as_a_target(environment: Environment, config: PushConfig, target: Path) -> None:
    target.mkdir()
    push(config, environment)
    verify(target)


@pytest.fixture
def small_files_only() -> Iterator[None]:
    """Limit files to 20 kB: a larger write fails with EFBIG, like a write to a full disk with ENOSPC."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    full = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr("finetune_trainer.stages.push.shutil.disk_usage", lambda _path: full)


@pytest.mark.parametrize(("disk", "expected"), [("small_files_only", "cannot write"), ("full_disk", "1,000 are free")])
def test_full_disk_is_reported_and_leaves_the_target_unchanged(
    environment: Environment, config: PushConfig, request: pytest.FixtureRequest, disk: str, expected: str
) -> None:
    push(config, environment)
    target = environment.locate(config.recipe.target)
    before = read_files(target)
    request.getfixturevalue(disk)
    message, code = run_to_failure(config.model_copy(update={"identity": "p2", "train": "second"}), environment)
    assert expected in message
    assert "free some space" in message
    assert code == ExitCode.UNAVAILABLE
    assert read_files(target) == before
    assert names_beside(target) == [".names.lock", "names"]


def test_leftovers_of_a_killed_push_are_removed(environment: Environment, config: PushConfig, target: Path) -> None:
    process = start_stage(config, environment, PYTHONHASHSEED="7")
    for _ in range(6000):
        if any(target.parent.iterdir()):
            break
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)
    if target.exists():
        verify(target)
    push(config, environment)
    verify(target)
    assert names_beside(target) == [".names.lock", "names"]


def test_model_card_has_the_base_model_where_it_was_measured(
    environment: Environment, config: PushConfig, target: Path, tiny_model: Path
) -> None:
    write_results_and_configs(environment, tiny_model)
    scores = {
        "verbs": {
            "acc": Score(value=0.75, stderr=0.043, base=0.4, difference_stderr=0.031),
            "mcc": Score(value=0.5, stderr=0.1, base=0.25),
        }
    }
    folder = environment.stage_dir("evaluate", "e1")
    write_result(folder, EvaluateResult(identity="e1", digest="sha256:2", scores=scores))
    push(config, environment)
    card = (target / "README.md").read_text()
    assert "| Standard error | Base model | Standard error of the difference |" in card
    assert "| verbs | acc | 0.7500 | 0.0430 | 0.4000 | 0.0310 |" in card
    assert "| verbs | mcc | 0.5000 | 0.1000 | 0.2500 |  |" in card


def test_model_card_contains_origin_scores_and_hyperparameters(
    environment: Environment, config: PushConfig, target: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    from huggingface_hub import ModelCard  # noqa: PLC0415

    write_results_and_configs(environment, tiny_model)
    monkeypatch.setenv("FINETUNE_GIT_SHA", "0123abc")
    push(config, environment)
    card = ModelCard.load(target / "README.md")
    assert card.data.base_model == f"file://{tiny_model}"
    assert card.data.datasets == ["people/names"]
    (score,) = card.data.eval_results
    assert (score.dataset_name, score.metric_type, score.metric_value) == ("verbs", "acc", 0.75)
    assert score.metric_args == {"stderr": 0.043}
    for expected in (
        f"`file://{tiny_model}` at `v1`",
        "`sha256:da7a`",
        "| verbs | acc | 0.7500 | 0.0430 |",
        "| Optimizer steps | 120; the adapter is that of step 100 |",
        "| Interruptions | 2; 7 steps repeated, 4 s lost |",
        "| lora.rank | 4 |",
        "| optimizer.learningRate | 0.0002 |",
        "| seed | 5 |",
        "0123abc",
        "| transformers | ",
    ):
        assert expected in card.text


def write_results_and_configs(environment: Environment, model: Path) -> None:
    """Write the results and configs of prepare, train and evaluate."""
    source = ModelSource(uri=f"file://{model}")
    write_result(
        environment.stage_dir("prepare", "d1"),
        PrepareResult(
            identity="d1", digest="sha256:0", records=50, invalid=1, truncated=0, dropped=2, train_rows=9,
            validation_rows=1, train_tokens=900, data_digest="sha256:da7a",
        ),
    )  # fmt: skip
    train = environment.stage_dir("train", "first")
    write_config(
        train,
        TrainConfig(
            identity="first", seed=5, prepare="d1", model=source, checkpoint=Checkpoint(),
            recipe=TrainRecipe.model_validate({"lora": {"rank": 4}}),
        ),
    )  # fmt: skip
    write_result(
        train,
        TrainResult(
            identity="first", digest="sha256:1", steps=120, loss=0.5, validation_loss=0.6, best_step=100, tokens=900
        ),
    )
    evaluate = environment.stage_dir("evaluate", "e1")
    recipe = EvaluateRecipe(tasks={"verbs": Task(file="verbs.yaml")})
    write_config(evaluate, EvaluateConfig(identity="e1", prepare="d1", train="first", model=source, recipe=recipe))
    scores = {"verbs": {"acc": Score(value=0.75, stderr=0.043)}}
    write_result(evaluate, EvaluateResult(identity="e1", digest="sha256:2", scores=scores))
