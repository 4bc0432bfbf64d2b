"""The objective DPO: its loss, its gradients and its metrics, compared with TRL's, and its reference."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.trainer.models import SENTENCES, write_jsonl
from support.trainer.prepared import prepare, prepare_config
from support.trainer.training import (
    document,
    environment,
    pairs,
    run_train,
    stage_folder,
    train_config,
    write_rows,
)

from finetune_trainer.contract.metric_rows import METRICS
from finetune_trainer.data.packing.rows import PackedRows
from finetune_trainer.models.base_model import BaseModel
from finetune_trainer.runtime.errors import ConfigInvalid
from finetune_trainer.training.batches import StepSampler, load_batch
from finetune_trainer.training.methods.registry import load_trainable
from finetune_trainer.training.model import loss
from finetune_trainer.training.model.model import TrainedModel
from finetune_trainer.training.objectives import reference
from finetune_trainer.training.objectives.dpo import log_probabilities, rows_of

torch.set_num_threads(1)
CPU = torch.device("cpu")
PLAIN = {
    "lora": {"rank": 4, "alpha": 8},
    "optimizer": {"learning_rate": 5e-3, "scheduler": "Constant", "warmup_fraction": 0},
}
DPO = PLAIN | {"objective": "DPO"}
STEPS = 5


@pytest.fixture
def workspace(tmp_path):
    write_rows(tmp_path, pairs(24), pairs(24)[:10], pairs=True)
    return tmp_path


def metric_rows(workspace, identity="a" * 16):
    path = stage_folder(workspace, identity) / METRICS
    rows: dict[int, dict[str, Any]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        rows.setdefault(row["step"], {}).update(row)
    return [rows[step] for step in sorted(rows)]


def preference_records():
    """Return pairs of texts; the completions have several tokens and different lengths."""
    return [
        {
            "prompt": f"{sentence}\nNext:",
            "chosen": f" {SENTENCES[i + 1]}",
            "rejected": f" {SENTENCES[-i][:20]}",
        }
        for i, sentence in enumerate(SENTENCES[:20])
    ]


def trl_steps(model_folder, config, records, output, loss_type):
    """Train with TRL's trainer on records in this order; return the logged metrics of each step, and the weights."""
    from datasets import Dataset  # noqa: PLC0415  the imports take seconds
    from torch.utils.data import SequentialSampler  # noqa: PLC0415
    from transformers import AutoTokenizer  # noqa: PLC0415
    from trl import DPOConfig, DPOTrainer  # noqa: PLC0415

    class InOrder(DPOTrainer):
        losses: list[float]

        def _get_train_sampler(self, *_):
            return SequentialSampler(self.train_dataset)

        def compute_loss(self, model, inputs, *args, **options):
            returned = super().compute_loss(model, inputs, *args, **options)
            self.losses.append(
                float((returned if torch.is_tensor(returned) else returned[0]).detach())
            )
            return returned

    recipe = config.recipe
    trainable = load_trainable(BaseModel("model", model_folder, ""), config, CPU)
    settings = DPOConfig(
        output_dir=str(output),
        max_steps=STEPS,
        per_device_train_batch_size=recipe.micro_batch_size,
        gradient_accumulation_steps=recipe.gradient_accumulation_steps,
        learning_rate=recipe.optimizer.learning_rate,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        max_grad_norm=1.0,
        beta=recipe.preference.beta,
        label_smoothing=recipe.preference.label_smoothing,
        loss_type=[loss_type],
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
    )
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    trainer = InOrder(
        trainable.module,
        args=settings,
        train_dataset=Dataset.from_list(records),
        processing_class=tokenizer,
    )
    trainer.losses = []
    trainer.train()
    accumulated = recipe.gradient_accumulation_steps
    losses = [
        sum(trainer.losses[i * accumulated : (i + 1) * accumulated]) / accumulated
        for i in range(STEPS)
    ]
    logged = [row for row in trainer.state.log_history if "grad_norm" in row]
    return losses, logged, trainer, trainable.weights


@pytest.mark.parametrize(
    ("recipe", "loss_type"),
    [
        ({"micro_batch_size": 2, "gradient_accumulation_steps": 2}, "sigmoid"),
        (
            {
                "micro_batch_size": 4,
                "gradient_accumulation_steps": 1,
                "dpo": {"beta": 0.6},
            },
            "sigmoid",
        ),
        (
            {
                "micro_batch_size": 1,
                "gradient_accumulation_steps": 4,
                "dpo": {"beta": 0.3, "label_smoothing": 0.2},
            },
            "aot",
        ),
    ],
    ids=["defaults", "beta", "label smoothing"],
)
def test_steps_are_those_of_trl(
    tiny_model, tmp_path, datasets_cache, recipe, loss_type
):
    """With one pair in a batch, which leaves nothing to sort, TRL's loss aot is DPO's with label smoothing."""
    records = preference_records()
    write_jsonl(tmp_path / "data.jsonl", records)
    variables = environment(tmp_path)
    result = prepare(
        prepare_config(tiny_model, objective="DPO", context_length=96), variables
    )
    assert (result.invalid, result.dropped, result.truncated, result.train_rows) == (
        0,
        0,
        0,
        40,
    )
    config = train_config(
        tiny_model, max_steps=STEPS, eval_steps=None, **recipe, **DPO
    ).model_copy(update={"prepare": result.identity})
    run_train(config, tmp_path)

    sampler = StepSampler.of(config.recipe, len(records), config.seed)
    order = [
        int(index) for step in range(STEPS) for index in sampler.rows_for_step(step)
    ]
    losses, logged, trainer, weights = trl_steps(
        tiny_model,
        config,
        [records[index] for index in order],
        tmp_path / "trl",
        loss_type,
    )
    rows = PackedRows(
        variables.stage_dir("prepare", result.identity) / "output", "train"
    )
    for pair, index in zip(trainer.train_dataset, order, strict=True):
        read = rows.read([2 * index, 2 * index + 1])
        for tokens, length, name in zip(
            read.tokens, read.lengths, ("chosen_ids", "rejected_ids"), strict=True
        ):
            assert tokens[:length].tolist() == pair["prompt_ids"] + pair[name]
    ours = metric_rows(tmp_path)
    assert len(ours) == len(logged) == STEPS
    for row, expected, theirs in zip(ours, losses, logged, strict=True):
        assert row["loss"] == pytest.approx(expected, abs=1e-5)
        assert row["gradient_norm"] == pytest.approx(theirs["grad_norm"], abs=1e-5)
        for name in (
            "rewards/chosen",
            "rewards/rejected",
            "rewards/margins",
            "rewards/accuracies",
        ):
            assert row[name] == pytest.approx(theirs[name], abs=1e-5)
        for name in ("logps/chosen", "logps/rejected"):
            assert row[name] == pytest.approx(theirs[name], rel=1e-5)
    assert ours[-1]["loss"] < ours[0]["loss"] - 0.01
    saved = load_file(stage_folder(tmp_path) / "output" / "adapter_model.safetensors")
    for name, tensor in weights.items():
        assert torch.allclose(saved[name], tensor, atol=1e-5), name


def test_loss_before_training_is_that_of_equal_rewards(tiny_model, workspace):
    run_train(train_config(tiny_model, max_steps=1, **DPO), workspace)
    first = metric_rows(workspace)[0]
    assert first["loss"] == pytest.approx(0.6931472, abs=1e-5)
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize(
    "method",
    [
        {},
        {"method": "QLoRA", "dtype": "BF16"},
        {"method": "Full", "lora": None},
        {"neftune_noise_alpha": 1.0},
    ],
    ids=["LoRA", "QLoRA", "Full", "noise"],
)
def test_every_method_learns_the_preference(tiny_model, workspace, method):
    recipe = {"max_steps": 30, "eval_steps": 10, "dpo": {"beta": 1.0}} | DPO | method
    result = run_train(train_config(tiny_model, **recipe), workspace)
    assert result.validation_loss
    assert result.validation_loss < 0.5
    best = metric_rows(workspace)[result.best_step - 1]
    assert best["validation_loss"] == result.validation_loss
    assert best["validation_rewards/accuracies"] > 0.7
    assert best["validation_rewards/margins"] > 0


def test_gradient_accumulation_does_not_change_the_loss_of_pairs(tiny_model, workspace):
    recipe = {"max_steps": 4, "eval_steps": None} | DPO
    whole = run_train(
        train_config(
            tiny_model,
            **recipe,
            micro_batch_size=4,
            gradient_accumulation_steps=1,
            identity="b" * 16,
        ),
        workspace,
    )
    accumulated = run_train(
        train_config(
            tiny_model, **recipe, micro_batch_size=1, gradient_accumulation_steps=4
        ),
        workspace,
    )
    assert accumulated.loss == pytest.approx(whole.loss, abs=1e-5)
    assert accumulated.validation_loss == pytest.approx(whole.validation_loss, abs=1e-5)


def test_an_epoch_is_every_pair_once(tiny_model, workspace):
    result = run_train(
        train_config(tiny_model, max_steps=None, epochs=1, **DPO), workspace
    )
    assert result.steps == 6  # 24 pairs, 4 in a step


def test_progress_has_margin_and_accuracy(tiny_model, workspace):
    run_train(train_config(tiny_model, max_steps=3, **DPO), workspace)
    last = metric_rows(workspace)[-1]
    progress = json.loads((workspace / "progress.json").read_text())
    assert {"rewardMargin", "rewardAccuracy"} <= progress.keys()
    assert 0 <= last["rewards/accuracies"] <= 1


def model_for(folder, **changes):
    config = train_config(folder, **DPO | changes)
    return TrainedModel(
        load_trainable(BaseModel("m", folder, ""), config, CPU), CPU, config.recipe
    )


@pytest.mark.parametrize(
    "chunk", [loss.CHUNK_BYTES, 4 * 320 * 7], ids=["whole", "in chunks"]
)
def test_log_probability_is_the_sum_over_the_completion(
    tiny_model, workspace, monkeypatch, chunk
):
    monkeypatch.setattr(loss, "CHUNK_BYTES", chunk)
    model = model_for(tiny_model)
    rows = PackedRows(workspace / "prepare" / ("p" * 16) / "output", "train")
    batch = load_batch(rows, rows_of(torch.arange(3).numpy()))
    model.model.eval()
    computed = log_probabilities(model, batch).detach()
    assert len(computed) == 6
    for index, value in enumerate(computed):
        read = rows.read([index])
        tokens = torch.from_numpy(read.tokens[:, : read.lengths[0]].astype("int64"))
        logits = model.logits(tokens, torch.arange(tokens.shape[1])[None]).log_softmax(
            -1
        )
        targets = logits[0, :-1].gather(-1, tokens[0, 1:, None])[:, 0]
        assert value == pytest.approx(
            float(targets[2:].sum()), abs=1e-4
        )  # the prompt has three tokens


def test_flat_batch_has_the_targets_of_each_row(workspace):
    rows = PackedRows(workspace / "prepare" / ("p" * 16) / "output", "train")
    lengths = rows.read(range(8)).lengths - 3
    for flat in (False, True):
        assert load_batch(rows, range(8), flat=flat).targets_per_row == lengths.tolist()


def counted_computations(monkeypatch):
    """Return a list that gets the rows of each part that is computed."""
    compute = reference._computed
    computed = []

    def counting(model, rows, indices, *more):
        computed.append((rows.split, indices.tolist()))
        return compute(model, rows, indices, *more)

    monkeypatch.setattr(reference, "_computed", counting)
    monkeypatch.setattr(reference, "PART_ROWS", 16)
    return computed


def part_bytes(workspace):
    return {
        path.name: path.read_bytes()
        for path in (stage_folder(workspace) / "reference").iterdir()
    }


def test_reference_is_computed_once_and_a_lost_part_again(
    tiny_model, workspace, monkeypatch
):
    computed = counted_computations(monkeypatch)
    config = train_config(tiny_model, max_steps=3, **DPO)
    first = run_train(config, workspace)
    assert [split for split, _ in computed] == ["train"] * 3 + ["validation"]
    assert sorted(
        row for split, rows in computed if split == "train" for row in rows
    ) == list(range(48))
    parts = part_bytes(workspace)
    computed.clear()
    assert run_train(config, workspace) == first
    assert computed == []

    folder = stage_folder(workspace) / "reference"
    (folder / "train-00000.json").unlink()
    broken = json.loads((folder / "train-00001.json").read_text())
    broken["log_probabilities"][3] += 0.001
    (folder / "train-00001.json").write_text(json.dumps(broken))
    (folder / "train-00002.json").write_bytes(parts["train-00002.json"][:-40])
    assert run_train(config, workspace) == first
    assert [rows[0] for _, rows in computed] == [0, 16, 32]
    assert part_bytes(workspace) == parts


def test_reference_of_another_model_or_of_other_rows_is_not_used(
    tiny_model, workspace, monkeypatch
):
    computed = counted_computations(monkeypatch)
    run_train(train_config(tiny_model, max_steps=3, **DPO), workspace)
    computed.clear()
    write_rows(workspace, pairs(24, seed=9), pairs(5, seed=9), pairs=True)
    checkpoints = stage_folder(workspace) / "checkpoints"
    checkpoints.rename(checkpoints.with_name("old"))
    run_train(train_config(tiny_model, max_steps=3, **DPO), workspace)
    assert len(computed) == 4


def test_reference_that_is_not_finite_ends_training(tiny_model, workspace, monkeypatch):
    def broken(*_):
        return torch.full((4,), float("nan")).numpy()

    monkeypatch.setattr(reference, "_computed", broken)
    with pytest.raises(
        Exception, match="before the first step: the reference's log-probability is nan"
    ):
        run_train(train_config(tiny_model, max_steps=3, **DPO), workspace)


@pytest.mark.parametrize(("objective", "kind"), [("DPO", "no pairs"), ("SFT", "pairs")])
def test_rows_of_another_objective_are_refused(tiny_model, tmp_path, objective, kind):
    write_rows(tmp_path, [document(1, 9), document(2, 8)], pairs=kind == "pairs")
    with pytest.raises(
        ConfigInvalid,
        match=f"objective is {objective}, but the rows of prepare are {kind}",
    ):
        run_train(train_config(tiny_model, objective=objective), tmp_path)
