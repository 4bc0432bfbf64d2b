"""The model that push publishes: what it computes, its files and its card."""

from pathlib import Path
from typing import Any

import pytest
from support.operator.adapters import make_adapter
from support.trainer.pushes import (
    TARGET,
    push,
    push_config,
    push_environment,
    with_targets,
)

from finetune_trainer.contract import (
    Environment,
    EvaluateConfig,
    EvaluateRecipe,
    EvaluateResult,
    ModelSource,
    PrepareResult,
    PushConfig,
    PushTarget,
    Score,
    Task,
    TrainConfig,
    TrainRecipe,
    TrainResult,
)
from finetune_trainer.contract.recipes import Checkpoint
from finetune_trainer.runtime.artifacts import verify
from finetune_trainer.runtime.stage_folder import (
    read_config,
    write_config,
    write_result,
)

PROMPT = "The parser opens"


@pytest.fixture
def environment(tmp_path: Path, tiny_model: Path) -> Environment:
    return push_environment(tmp_path, tiny_model)


@pytest.fixture
def config(tiny_model: Path) -> PushConfig:
    return push_config(tiny_model)


@pytest.fixture
def latest(tmp_path: Path) -> Path:
    """The newest model of the target."""
    return tmp_path / "claims" / "models" / "names" / "latest"


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the contents of a model's files by name, without its card and its manifest, which are of the run."""
    of_the_run = {"README.md", "manifest.json"}
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.name not in of_the_run
    }


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
    environment: Environment, config: PushConfig, latest: Path, tiny_model: Path
) -> None:
    import torch  # noqa: PLC0415

    from finetune_trainer.models.trained.merge import with_adapter  # noqa: PLC0415

    result = push(with_targets(config, "pvc://models/names", dtype="FP32"), environment)
    assert result.published[0].size == sum(
        path.stat().st_size for path in latest.iterdir() if path.name != "manifest.json"
    )
    adapter = environment.stage_dir("train", "first") / "output"
    expected = logits(with_adapter(tiny_model, adapter, torch.float32), tiny_model)
    assert (logits(load_model(latest), latest) - expected).abs().max() < 1e-4
    assert (logits(load_model(tiny_model), latest) - expected).abs().max() > 0.1


@pytest.mark.parametrize(
    "variant",
    [{}, {"use_rslora": True}, {"use_dora": True}],
    ids=["lora", "rslora", "dora"],
)
def test_every_lora_variant_is_merged_correctly(
    tmp_path: Path, tiny_model: Path, variant: dict[str, bool]
) -> None:
    import torch  # noqa: PLC0415

    from finetune_trainer.models.trained.merge import load_merged, with_adapter  # noqa: PLC0415

    adapter = make_adapter(tmp_path / "adapter", tiny_model, **variant)
    expected = logits(with_adapter(tiny_model, adapter, torch.float32), tiny_model)
    assert (
        logits(load_merged(tiny_model, adapter, torch.float32), tiny_model) - expected
    ).abs().max() < 1e-4


def test_merged_model_in_memory_equals_the_pushed_model(
    environment: Environment, config: PushConfig, latest: Path, tiny_model: Path
) -> None:
    import torch  # noqa: PLC0415

    from finetune_trainer.models.trained.merge import load_merged  # noqa: PLC0415

    push(config, environment)
    in_memory = load_merged(
        tiny_model, environment.stage_dir("train", "first") / "output", torch.bfloat16
    )
    assert torch.equal(logits(in_memory, latest), logits(load_model(latest), latest))


def test_adapter_target_computes_like_the_trained_adapter(
    environment: Environment, config: PushConfig, latest: Path, tiny_model: Path
) -> None:
    import torch  # noqa: PLC0415
    from huggingface_hub import ModelCard  # noqa: PLC0415
    from peft import PeftModel  # noqa: PLC0415

    from finetune_trainer.models.trained.merge import with_adapter  # noqa: PLC0415

    as_adapter = PushTarget(uri="pvc://models/adapter", format="Adapter")
    merged, adapter = push(
        with_targets(config, TARGET, as_adapter), environment
    ).published
    folder = latest.parents[1] / "adapter" / "latest"
    assert merged.format == "Merged"
    assert adapter.format == "Adapter"
    assert merged.uri == f"pvc://models/names/{latest.resolve().name}"
    assert adapter.uri == f"pvc://models/adapter/{folder.resolve().name}"
    verify(latest.resolve())
    verify(folder.resolve())
    expected = logits(
        with_adapter(
            tiny_model,
            environment.stage_dir("train", "first") / "output",
            torch.float32,
        ),
        tiny_model,
    )
    loaded = PeftModel.from_pretrained(load_model(tiny_model), str(folder))
    assert torch.equal(logits(loaded, folder), expected)
    card = ModelCard.load(folder / "README.md")
    assert card.data.library_name == "peft"
    assert card.data.base_model is None
    assert "A LoRA adapter for its base model." in card.text


def test_same_adapter_yields_the_same_files(
    environment: Environment, config: PushConfig, latest: Path
) -> None:
    first = push(config, environment)
    second = push(with_targets(config, "pvc://models/again"), environment)
    assert first.digest == second.digest
    assert read_files(latest) == read_files(latest.parents[1] / "again" / "latest")


def test_large_model_is_written_in_shards(
    environment: Environment,
    config: PushConfig,
    latest: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = push(config, environment)
    expected = logits(load_model(latest), latest)
    monkeypatch.setattr("finetune_trainer.models.trained.merge.SHARD", "50KB")
    assert (
        push(with_targets(config, "pvc://models/shards"), environment).digest
        != whole.digest
    )
    shards = latest.parents[1] / "shards" / "latest"
    assert len(list(shards.glob("*.safetensors"))) > 1
    assert (logits(load_model(shards), shards) == expected).all()


def test_files_are_readable_by_all_users(
    environment: Environment, config: PushConfig, latest: Path
) -> None:
    push(config, environment)
    assert {path.stat().st_mode & 0o044 for path in latest.iterdir()} == {0o044}


def test_model_card_has_the_base_model_where_it_was_measured(
    environment: Environment, config: PushConfig, latest: Path, tiny_model: Path
) -> None:
    write_results_and_configs(environment, tiny_model)
    scores = {
        "verbs": {
            "acc": Score(value=0.75, stderr=0.043, base=0.4, difference_stderr=0.031),
            "mcc": Score(value=0.5, stderr=0.1, base=0.25),
        }
    }
    folder = environment.stage_dir("evaluate", "e1")
    write_result(
        folder, EvaluateResult(identity="e1", digest="sha256:2", scores=scores)
    )
    push(config, environment)
    card = (latest / "README.md").read_text()
    assert "| Standard error | Base model | Standard error of the difference |" in card
    assert "| verbs | acc | 0.7500 | 0.0430 | 0.4000 | 0.0310 |" in card
    assert "| verbs | mcc | 0.5000 | 0.1000 | 0.2500 |  |" in card


def test_model_card_contains_origin_scores_and_hyperparameters(
    environment: Environment,
    config: PushConfig,
    latest: Path,
    monkeypatch: pytest.MonkeyPatch,
    tiny_model: Path,
) -> None:
    from huggingface_hub import ModelCard  # noqa: PLC0415

    write_results_and_configs(environment, tiny_model)
    monkeypatch.setenv("FINETUNE_GIT_SHA", "0123abc")
    push(config, environment)
    card = ModelCard.load(latest / "README.md")
    assert card.data.base_model is None
    assert card.data.datasets == ["people/names", "people/verbs"]
    (score,) = card.data.eval_results
    assert (score.dataset_name, score.metric_type, score.metric_value) == (
        "verbs",
        "acc",
        0.75,
    )
    assert score.metric_args == {"stderr": 0.043}
    for expected in (
        f"`file://{tiny_model}` at `v1`",
        "`sha256:da7a`",
        "| Data set | `hf://people/names/more.jsonl` at `4711abc` (`4711abcdef`) |",
        "| Data set | `hf://people/verbs` (`c0ffee`), config `en`, split `test`, weight 0.3 |",
        "| verbs | acc | 0.7500 | 0.0430 |",
        "| Optimizer steps | 120; the weights are from step 100 |",
        "| Interruptions | 2; 7 steps repeated, 4 s lost |",
        "| lora.rank | 4 |",
        "| optimizer.learningRate | 0.0002 |",
        "| seed | 5 |",
        "0123abc",
        "| transformers | ",
    ):
        assert expected in card.text


def test_model_card_has_the_objective_and_where_training_started(
    environment: Environment, config: PushConfig, latest: Path, tiny_model: Path
) -> None:
    write_results_and_configs(environment, tiny_model)
    train = environment.stage_dir("train", "first")
    trained = read_config(train)
    assert isinstance(trained, TrainConfig)
    recipe = {
        "objective": "DPO",
        "start_from": {"uri": "hf://people/sft", "revision": "v2"},
    }
    changes = {
        "recipe": TrainRecipe.model_validate(recipe),
        "start_pin": "4711",
        "start_digest": "sha256:ada",
    }
    write_config(train, trained.model_copy(update=changes))
    push(config, environment)
    card = (latest / "README.md").read_text()
    assert "\n- dpo\n" in card
    assert (
        "| Objective | DPO: [Direct Preference Optimization](https://arxiv.org/abs/2305.18290), loss per pair"
        in card
    )
    assert "| dpo.beta | 0.1 |" in card
    assert (
        "| Adapter that training started from | `hf://people/sft` at `v2` (`4711`), digest `sha256:ada` |"
        in card
    )


def write_results_and_configs(environment: Environment, model: Path) -> None:
    """Write the results and configs of prepare, train and evaluate."""
    source = ModelSource(uri=f"file://{model}")
    write_result(
        environment.stage_dir("prepare", "d1"),
        PrepareResult(
            identity="d1", digest="sha256:0", records=50, invalid=1, truncated=0, dropped=2, train_rows=9,
            validation_rows=1, train_tokens=900, data_digest="sha256:da7a",
            data_pins=("0dd5", "4711abcdef", "c0ffee", "the one to validate with"),
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
            identity="first",
            digest="sha256:1",
            steps=120,
            loss=0.5,
            validation_loss=0.6,
            best_step=100,
            tokens=900,
        ),
    )
    evaluate = environment.stage_dir("evaluate", "e1")
    recipe = EvaluateRecipe(tasks=(Task(name="verbs", file="verbs.yaml"),))
    write_config(
        evaluate,
        EvaluateConfig(
            identity="e1", prepare="d1", train="first", model=source, recipe=recipe
        ),
    )
    scores = {"verbs": {"acc": Score(value=0.75, stderr=0.043)}}
    write_result(
        evaluate, EvaluateResult(identity="e1", digest="sha256:2", scores=scores)
    )


def test_templates_of_prepare_are_published(
    environment: Environment, config: PushConfig, latest: Path
) -> None:
    """The template for tools, which trained the records with tools, was missing in the published model."""
    from transformers import AutoTokenizer  # noqa: PLC0415  the import is slow

    from finetune_trainer.data.chat_templates import ChatTemplates  # noqa: PLC0415

    output = environment.stage_dir("prepare", "d1") / "output"
    output.mkdir(parents=True)
    templates = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools }}"}
    ChatTemplates(templates, "Manifest").write(output, conversations=True)
    push(config, environment)
    tokenizer = AutoTokenizer.from_pretrained(latest)
    assert tokenizer.chat_template == templates
    question = [{"role": "user", "content": "2+3?"}]
    assert tokenizer.apply_chat_template(question, tokenize=False) == "2+3?"
