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
from support.stages import environment_in, made, refusal, start

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
    here = environment_in(tmp_path)
    for seed, name in enumerate(("first", "second")):
        make_adapter(here.stage_dir("train", name) / "output", tiny_model, seed=seed)
    (tmp_path / "claims" / "models").mkdir()
    return here


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


def pushed(config: PushConfig, environment: Environment) -> PushResult:
    return made(config, environment, PushResult)


def to(config: PushConfig, target: str, **changes: object) -> PushConfig:
    recipe = config.recipe.model_copy(update={"target": target, **changes})
    return config.model_copy(update={"recipe": recipe, "identity": target.replace("/", "-")})


def bytes_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix != ".md"}


def logits(model: Any, folder: Path) -> Any:
    import torch  # noqa: PLC0415
    from transformers import AutoTokenizer  # noqa: PLC0415

    torch.set_num_threads(1)
    tokens = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt")
    with torch.no_grad():
        return model.eval()(**tokens).logits.float()


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    return AutoModelForCausalLM.from_pretrained(folder)


def test_the_pushed_model_says_what_the_base_model_says_with_its_adapter(
    environment: Environment, config: PushConfig, target: Path, tiny_model: Path
) -> None:
    import torch  # noqa: PLC0415

    from finetune_trainer.models.merge import with_adapter  # noqa: PLC0415

    result = pushed(to(config, "pvc://models/names", dtype="fp32"), environment)
    assert result.size == sum(path.stat().st_size for path in target.iterdir() if path.name != "manifest.json")
    adapter = environment.stage_dir("train", "first") / "output"
    beside = logits(with_adapter(tiny_model, adapter, torch.float32), tiny_model)
    assert (logits(loaded(target), target) - beside).abs().max() < 1e-4
    assert (logits(loaded(tiny_model), target) - beside).abs().max() > 0.1


@pytest.mark.parametrize("variant", [{}, {"use_rslora": True}, {"use_dora": True}], ids=["lora", "rslora", "dora"])
def test_every_variant_of_lora_is_merged_rightly(tmp_path: Path, tiny_model: Path, variant: dict[str, bool]) -> None:
    import torch  # noqa: PLC0415

    from finetune_trainer.models.merge import merge_adapter, with_adapter  # noqa: PLC0415

    adapter = make_adapter(tmp_path / "adapter", tiny_model, **variant)
    beside = logits(with_adapter(tiny_model, adapter, torch.float32), tiny_model)
    assert (logits(merge_adapter(tiny_model, adapter, torch.float32), tiny_model) - beside).abs().max() < 1e-4


def test_what_is_merged_in_memory_is_what_a_reader_of_the_pushed_model_loads(
    environment: Environment, config: PushConfig, target: Path, tiny_model: Path
) -> None:
    import torch  # noqa: PLC0415

    from finetune_trainer.models.merge import merge_adapter  # noqa: PLC0415

    pushed(config, environment)
    in_memory = merge_adapter(tiny_model, environment.stage_dir("train", "first") / "output", torch.bfloat16)
    assert torch.equal(logits(in_memory, target), logits(loaded(target), target))


def test_the_same_adapter_gives_the_same_bytes(environment: Environment, config: PushConfig, target: Path) -> None:
    one = pushed(config, environment)
    two = pushed(to(config, "pvc://models/again"), environment)
    assert one.digest == two.digest
    files = bytes_in(target)
    files.pop("manifest.json")
    assert files.items() <= bytes_in(target.with_name("again")).items()


def test_a_large_model_is_written_in_shards(
    environment: Environment, config: PushConfig, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = pushed(config, environment)
    expected = logits(loaded(target), target)
    monkeypatch.setattr("finetune_trainer.stages.push.SHARD", "50KB")
    assert pushed(to(config, "pvc://models/shards"), environment).digest != whole.digest
    shards = target.with_name("shards")
    assert len(list(shards.glob("*.safetensors"))) > 1
    assert (logits(loaded(shards), shards) == expected).all()


def test_everybody_may_read_the_files(environment: Environment, config: PushConfig, target: Path) -> None:
    pushed(config, environment)
    assert {path.stat().st_mode & 0o044 for path in target.iterdir()} == {0o044}


def test_the_same_model_is_not_written_twice(
    environment: Environment, config: PushConfig, target: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = pushed(config, environment)
    written = target.stat().st_ino
    (environment.stage_dir("push", "p1") / "result.json").unlink()  # killed before it was written
    assert pushed(config, environment) == first
    run_differently = config.model_copy(
        update={"identity": "p2", "lineage": Lineage(pipeline="default/names", interruptions=9)}
    )
    assert pushed(run_differently, environment).digest == first.digest
    assert target.stat().st_ino == written
    assert capfd.readouterr().out.count("already contains this model") == 2


def test_a_result_is_repeated_while_the_target_is_whole_and_made_again_when_it_is_not(
    environment: Environment, config: PushConfig, target: Path
) -> None:
    first = pushed(config, environment)
    before = bytes_in(target)
    weights = target / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert pushed(config, environment) == first
    assert bytes_in(target) == before
    shutil.rmtree(target)
    assert pushed(config, environment) == first
    assert bytes_in(target) == before


@pytest.fixture
def slow_renames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rename is followed by a pause long enough to see what is missing in it."""
    rename = Path.rename

    def slow(self: Path, target: Path) -> Path:
        new = rename(self, target)
        time.sleep(0.1)
        return new

    monkeypatch.setattr(Path, "rename", slow)


@pytest.mark.usefixtures("slow_renames")
def test_a_reader_never_misses_the_model_while_another_takes_its_place(
    environment: Environment, config: PushConfig, target: Path
) -> None:
    first = pushed(config, environment)
    seen: set[bool] = set()
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            seen.add((target / "model.safetensors").exists())
            time.sleep(0.001)

    reader = threading.Thread(target=read)
    reader.start()
    second = pushed(config.model_copy(update={"identity": "p2", "train": "second"}), environment)
    stop.set()
    reader.join()
    assert second.digest != first.digest
    assert seen == {True}
    assert [path.name for path in target.parent.iterdir()] == ["names"]


@pytest.mark.parametrize(
    ("name", "words"), [("names/notes.txt", "was not written by a push"), ("names", "was not written by a push")]
)
def test_what_others_put_at_the_target_is_left_alone(
    environment: Environment, config: PushConfig, target: Path, name: str, words: str
) -> None:
    theirs = target.parent / name
    theirs.parent.mkdir(exist_ok=True)
    theirs.write_text("mine")
    message, code = refusal(config, environment)
    assert "push.target pvc://models/names" in message
    assert words in message
    assert code == ExitCode.CONFIG
    assert theirs.read_text() == "mine"


def test_a_file_that_others_put_beside_the_pushed_one_is_left_alone(
    environment: Environment, config: PushConfig, target: Path
) -> None:
    pushed(config, environment)
    (target / "notes.txt").write_text("mine")
    message, code = refusal(config.model_copy(update={"identity": "p2", "train": "second"}), environment)
    assert "notes.txt" in message
    assert code == ExitCode.CONFIG
    assert (target / "notes.txt").read_text() == "mine"


def test_a_trained_adapter_is_not_taken_for_a_pushed_model(environment: Environment, config: PushConfig) -> None:
    adapter = environment.stage_dir("train", "second") / "output"
    _, code = refusal(to(config, f"file://{adapter}"), environment)
    assert code == ExitCode.CONFIG
    verify(adapter)


def test_the_root_of_a_claim_is_no_target(environment: Environment, config: PushConfig) -> None:
    message, code = refusal(to(config, "pvc://models/"), environment)
    assert "pvc://CLAIM/PATH" in message
    assert code == ExitCode.CONFIG


def test_an_empty_folder_may_be_the_target(environment: Environment, config: PushConfig, target: Path) -> None:
    target.mkdir()
    pushed(config, environment)
    verify(target)


@pytest.fixture
def small_files_only() -> Iterator[None]:
    """Whoever writes a file of more than 20 kB is told that it is too large: as good as a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    full = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr("finetune_trainer.stages.push.shutil.disk_usage", lambda _path: full)


@pytest.mark.parametrize(("disk", "words"), [("small_files_only", "cannot write"), ("full_disk", "1,000 are free")])
def test_a_full_disk_is_said_and_the_target_is_as_it_was(
    environment: Environment, config: PushConfig, request: pytest.FixtureRequest, disk: str, words: str
) -> None:
    pushed(config, environment)
    target = environment.locate(config.recipe.target)
    before = bytes_in(target)
    request.getfixturevalue(disk)
    message, code = refusal(config.model_copy(update={"identity": "p2", "train": "second"}), environment)
    assert words in message
    assert "free some space" in message
    assert code == ExitCode.UNAVAILABLE
    assert bytes_in(target) == before
    assert [path.name for path in target.parent.iterdir()] == ["names"]


def test_a_push_that_was_killed_while_it_wrote_leaves_nothing_that_stays(
    environment: Environment, config: PushConfig, target: Path
) -> None:
    process = start(config, environment, PYTHONHASHSEED="7")
    for _ in range(6000):
        if any(target.parent.iterdir()):
            break
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)
    if target.exists():
        verify(target)
    pushed(config, environment)
    verify(target)
    assert [path.name for path in target.parent.iterdir()] == ["names"]


def test_the_card_tells_where_the_model_comes_from_and_what_it_scores(
    environment: Environment, config: PushConfig, target: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    from huggingface_hub import ModelCard  # noqa: PLC0415

    tell_of_a_run(environment, tiny_model)
    monkeypatch.setenv("FINETUNE_GIT_SHA", "0123abc")
    pushed(config, environment)
    card = ModelCard.load(target / "README.md")
    assert card.data.base_model == f"file://{tiny_model}"
    assert card.data.datasets == ["people/names"]
    (score,) = card.data.eval_results
    assert (score.dataset_name, score.metric_type, score.metric_value) == ("verbs", "acc", 0.75)
    assert score.metric_args == {"stderr": 0.043}
    for words in (
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
        assert words in card.text


def tell_of_a_run(environment: Environment, model: Path) -> None:
    """Leave what prepare, train and evaluate leave: results and configs."""
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
    write_config(evaluate, EvaluateConfig(identity="e1", train="first", model=source, recipe=recipe))
    scores = {"verbs": {"acc": Score(value=0.75, stderr=0.043)}}
    write_result(evaluate, EvaluateResult(identity="e1", digest="sha256:2", scores=scores))
