"""The base model: fetched once, and every stage refuses another one than the stages before it used."""

import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.operator.adapters import make_adapter
from support.stores.hub_environment import model_files
from support.stores.hub_server import serve_hub
from support.stores.hub_state import Hub
from support.trainer.evaluation import VERBS
from support.trainer.lm_eval_tasks import write_verbs_task
from support.trainer.models import prompt_records, write_jsonl
from support.trainer.prepared import prepare_config
from support.trainer.stages import (
    environment_in,
    run_to_failure,
    run_to_result,
    start_stage,
)
from support.trainer.training import (
    adapter_digest,
    documents,
    run_train,
    stage_folder,
    train_config,
    write_rows,
)
from support.trainer.training import (
    environment as training_environment,
)

from finetune_trainer.contract import (
    EvaluateConfig,
    ExitCode,
    ModelSource,
    PrepareResult,
    PushConfig,
)
from finetune_trainer.models.base_model import model_digest, open_base_model
from finetune_trainer.runtime.artifacts import seal
from finetune_trainer.runtime.errors import ConfigInvalid, Interrupted
from finetune_trainer.runtime.stage_folder import read_result


@pytest.fixture
def model(tiny_model, tmp_path):
    """A copy of the tiny model that a test may change."""
    return shutil.copytree(tiny_model, tmp_path / "model")


def replace_weights(model: Path) -> None:
    """Replace the weights by others of the same size and with the same modification time."""
    file = model / "model.safetensors"
    before = file.stat()
    save_file(
        {name: -tensor for name, tensor in load_file(file).items()},
        file,
        metadata={"format": "pt"},
    )
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size


def test_digest_changes_with_weights_config_and_tokenizer(model, tmp_path):
    record = tmp_path / "record.json"
    digests = [model_digest(model, record)]
    for name in ("README.md", "LICENSE.txt", "notes.json"):
        (model / name).write_text("no part of the model")
    assert model_digest(model, record) == digests[0]
    replace_weights(model)
    digests.append(model_digest(model, record))
    for name in ("config.json", "tokenizer_config.json"):
        (model / name).write_text((model / name).read_text() + "\n")
        digests.append(model_digest(model, record))
    assert len(set(digests)) == 4
    record.write_text("[torn")
    assert model_digest(model, record) == digests[-1]


def test_digest_of_unchanged_files_is_not_computed_again(model, tmp_path):
    record = tmp_path / "record.json"
    digest = model_digest(model, record)
    entries = json.loads(record.read_text())
    entries["model.safetensors"]["sha256"] = "0" * 64
    record.write_text(json.dumps(entries))
    assert (
        model_digest(model, record) != digest
    )  # it believes the record: the file was not read
    os.utime(model / "model.safetensors")
    assert model_digest(model, record) == digest


@pytest.fixture
def workspace(tmp_path):
    workspace = tmp_path / "workspace"
    write_rows(workspace, documents(40))
    return workspace


def test_resume_on_replaced_weights_is_refused_with_both_digests(model, workspace):
    config = train_config(model, checkpoint={"every_steps": 5})
    before = open_base_model(config.model, training_environment(workspace)).digest
    with pytest.raises(Interrupted):
        run_train(config, workspace, stop_at=10)
    replace_weights(model)
    after = open_base_model(config.model, training_environment(workspace)).digest
    with pytest.raises(ConfigInvalid) as refused:
        run_train(config, workspace)
    assert before != after
    assert (
        f"has the digest {after}, but checkpoint step-00000010 was made with {before}"
        in str(refused.value)
    )
    assert not (stage_folder(workspace) / "output").exists()


def test_resume_with_restored_weights_gives_the_same_adapter(
    tiny_model, model, workspace
):
    config = train_config(model)
    with pytest.raises(Interrupted):
        run_train(config, workspace, stop_at=10)
    replace_weights(model)
    with pytest.raises(ConfigInvalid):
        run_train(config, workspace)
    shutil.copy(tiny_model / "model.safetensors", model)
    run_train(config, workspace)
    run_train(config.model_copy(update={"identity": "u" * 16}), workspace)
    assert adapter_digest(workspace) == adapter_digest(workspace, "u" * 16)


def test_training_on_another_model_than_prepare_is_refused(model, workspace):
    config = train_config(model).model_copy(update={"model_digest": "sha256:prepared"})
    with pytest.raises(
        ConfigInvalid,
        match=r"but prepare/p+ was made with sha256:prepared: restore that model",
    ):
        run_train(config, workspace)


@pytest.mark.parametrize("stage", ["evaluate", "push"])
def test_adapter_of_another_model_is_refused(stage, model, tmp_path):
    environment = environment_in(tmp_path)
    adapter = make_adapter(environment.stage_dir("train", "first") / "output", model)
    seal(adapter, {"model": "sha256:trained"})
    common = {
        "identity": "i",
        "train": "first",
        "prepare": "p",
        "model": {"uri": f"file://{model}"},
    }
    if stage == "push":
        more = {
            "datasets": [{"uri": "d"}],
            "recipe": {"targets": [{"uri": "published"}]},
            "lineage": {"pipeline": "a/b"},
        }
        message, code = run_to_failure(
            PushConfig.model_validate(common | more), environment
        )
    else:
        names = common.keys() & EvaluateConfig.model_fields.keys()
        # Tasks are loaded before the adapter.
        write_verbs_task(tmp_path / "manifest" / "tasks")
        more = {"recipe": {"tasks": list(VERBS)}}
        config = EvaluateConfig.model_validate(
            {name: common[name] for name in names} | more
        )
        message, code = run_to_failure(config, environment)
    assert "the adapter of train/first was made with sha256:trained" in message
    assert code == ExitCode.CONFIG


def test_prepare_reports_the_digest_of_the_model(model, tmp_path):
    environment = environment_in(tmp_path)
    assert environment.manifest_dir
    write_jsonl(environment.manifest_dir / "data.jsonl", prompt_records(8))
    config = prepare_config(model)
    result = run_to_result(config, environment, PrepareResult)
    assert result.model_digest == open_base_model(config.model, environment).digest


def test_hub_model_is_downloaded_once_and_stays_at_its_commit(tiny_model, tmp_path):
    environment = environment_in(tmp_path)
    assert environment.manifest_dir
    write_jsonl(environment.manifest_dir / "data.jsonl", prompt_records(40))
    source = ModelSource(uri="hf://people/tiny")
    prepare = prepare_config(tiny_model).model_copy(update={"model": source})
    train = train_config(
        tiny_model, max_steps=2, micro_batch_size=1, gradient_accumulation_steps=1
    ).model_copy(update={"model": source, "prepare": prepare.identity})
    hub = Hub(tmp_path / "hub")
    repository = hub.add_repository("people/tiny", model_files(tiny_model))
    with serve_hub(hub):
        variables = {
            "HF_ENDPOINT": hub.url,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
        }
        for config in (prepare, train, train.model_copy(update={"identity": "s" * 16})):
            prepared = read_result(environment.stage_dir("prepare", prepare.identity))
            # As the operator does.
            pinned = {}
            if isinstance(prepared, PrepareResult):
                pinned["model_pin"] = prepared.model_pin
            process = start_stage(
                config.model_copy(update=pinned), environment, **variables
            )
            output, _ = process.communicate(timeout=120)
            assert process.returncode == ExitCode.DONE, output
            repository.push(
                {"config.json": repository.files()["config.json"] + b"\n"}
            )  # main moves
        assert set(hub.downloads().values()) == {1}
        assert hub.downloads().keys() == {path.name for path in tiny_model.iterdir()}
    assert not list(environment.workspace.rglob("*.bin.incomplete"))


def test_missing_shard_is_a_permanent_error(model, tmp_path):
    (model / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'
    )
    with pytest.raises(
        ConfigInvalid,
        match=r"names model-00001-of-00002.safetensors, which does not exist",
    ):
        model_digest(model, tmp_path / "record.json")
