"""Runs of the stage evaluate on tiny models, and a tiny model with a chat template."""

import json
from pathlib import Path
from typing import Any

from support.operator.adapters import make_adapter
from support.trainer.lm_eval_tasks import write_verbs_task
from support.trainer.stages import environment_in, run_to_result

from finetune_trainer.contract import (
    Environment,
    EvaluateConfig,
    EvaluateRecipe,
    EvaluateResult,
    ModelSource,
    PrepareResult,
    Task,
)
from finetune_trainer.runtime.stage_folder import write_result

VERBS = (Task(name="verbs", file="tasks/verbs.yaml"),)

CHATML = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
"""A template whose turns end with a token that is not EOS, as in the template of Qwen."""


def evaluate_environment(folder: Path, model: Path) -> Environment:
    """Return an environment with two trained adapters, and a task file in the manifest's folder."""
    environment = environment_in(folder)
    for seed, name in enumerate(("first", "second")):
        make_adapter(environment.stage_dir("train", name) / "output", model, seed=seed)
    write_verbs_task(folder / "manifest" / "tasks")
    return environment


def evaluate_config(base: Path, **recipe: Any) -> EvaluateConfig:
    return EvaluateConfig(
        identity="e1",
        prepare="p1",
        train="first",
        model=ModelSource(uri=f"file://{base}"),
        recipe=EvaluateRecipe(
            **{"tasks": VERBS, "weights": "Adapter", "batch_size": 4, **recipe}
        ),
    )


def with_recipe(config: EvaluateConfig, **changes: object) -> EvaluateConfig:
    recipe = config.recipe.model_copy(update=changes)
    return config.model_copy(
        update={"recipe": recipe, "identity": f"e{abs(hash(str(changes)))}"}
    )


def run_evaluate(config: EvaluateConfig, environment: Environment) -> EvaluateResult:
    return run_to_result(config, environment, EvaluateResult)


def read_samples(
    config: EvaluateConfig,
    environment: Environment,
    task: str = "verbs",
    prefix: str = "",
) -> list[dict[str, Any]]:
    """Return what lm-eval recorded for each question of a task."""
    output = environment.stage_dir("evaluate", config.identity) / "output"
    return [
        json.loads(line) for line in (output / f"{prefix}samples-{task}.jsonl").open()
    ]


def write_prepare_result(environment: Environment, *, conversations: bool) -> None:
    """Write the result of the prepare stage that `evaluate_config` names."""
    folder = environment.stage_dir("prepare", "p1")
    folder.mkdir(parents=True, exist_ok=True)
    counts = dict.fromkeys(
        (
            "records",
            "invalid",
            "truncated",
            "dropped",
            "train_rows",
            "validation_rows",
            "train_tokens",
        ),
        1,
    )
    result = PrepareResult(
        identity="p1",
        digest="sha256:0",
        data_digest="sha256:0",
        conversations=conversations,
        **counts,
    )
    write_result(folder, result)


def load_tiny_lm(
    folder: Path,
    adapter: Path | None = None,
    *,
    batch_size: int = 1,
    apply_chat_template: bool = False,
) -> Any:
    """Load a tiny model on the CPU as an lm-eval model whose answers end at EOS."""
    import torch  # noqa: PLC0415  tests without a model must not wait for torch

    from finetune_trainer.evaluation.language_model import EvaluatedModel, load_lm  # noqa: PLC0415
    from finetune_trainer.models.base_model import BaseModel  # noqa: PLC0415

    model = EvaluatedModel(BaseModel("m", folder, ""), adapter, torch.float32)
    tokenizer = model.load_tokenizer(apply_chat_template=apply_chat_template)
    return load_lm(
        model,
        tokenizer,
        (2,),
        torch.device("cpu"),
        batch_size=batch_size,
        apply_chat_template=apply_chat_template,
    )


def make_chat_model(
    folder: Path, tiny_model: Path, template: str | None = CHATML
) -> Path:
    """Write the tiny model with a chat template, the two tokens of its turns, and weights of varied answers."""
    import torch  # noqa: PLC0415  tests without a model must not wait for torch
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    )
    tokenizer.chat_template = template
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.4)
        model.get_input_embeddings().weight[
            tokenizer.convert_tokens_to_ids("<|im_end|>")
        ] *= 2  # a frequent answer
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
