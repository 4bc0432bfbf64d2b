"""Evaluation with a chat template: the prompts have the form used in training, and answers end where a turn does."""

from pathlib import Path
from typing import Any

import pytest
from support.trainer.evaluation import (
    CHATML,
    evaluate_config,
    evaluate_environment,
    load_tiny_lm,
    make_chat_model,
    read_samples,
    run_evaluate,
    with_recipe,
    write_prepare_result,
)
from support.trainer.stages import run_to_failure

from finetune_trainer.contract import (
    Environment,
    EvaluateConfig,
    ExitCode,
    Task,
    TrainResult,
)
from finetune_trainer.runtime.stage_folder import write_result

pytestmark = pytest.mark.usefixtures("datasets_cache")

FEW = (Task(name="verbs", file="tasks/verbs.yaml", limit=3, few_shot=2),)
TOKENS = 12


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("chat"), tiny_model)


@pytest.fixture
def environment(tmp_path: Path, chat_model: Path) -> Environment:
    return evaluate_environment(tmp_path, chat_model)


@pytest.fixture
def config(chat_model: Path) -> EvaluateConfig:
    return evaluate_config(chat_model, tasks=FEW)


def first_prompt(config: EvaluateConfig, environment: Environment) -> str:
    run_evaluate(config, environment)
    prompt: str = read_samples(config, environment)[0]["arguments"][0][0]
    return prompt


def write_foreign_result(environment: Environment) -> None:
    folder = environment.stage_dir("prepare", "p1")
    folder.mkdir(parents=True)
    write_result(
        folder,
        TrainResult(
            identity="p1", digest="sha256:0", steps=1, loss=1.0, best_step=1, tokens=1
        ),
    )


@pytest.mark.parametrize(
    ("prepared", "template", "is_chat"),
    [
        ("conversations", None, True),
        ("conversations", False, False),
        ("texts", None, False),
        ("texts", True, True),
        ("missing", None, False),
        ("foreign", None, False),
    ],
)
def test_template_is_applied_if_the_records_are_conversations(
    environment: Environment,
    config: EvaluateConfig,
    *,
    prepared: str,
    template: bool | None,
    is_chat: bool,
) -> None:
    if prepared == "foreign":
        write_foreign_result(environment)
    elif prepared != "missing":
        write_prepare_result(environment, conversations=prepared == "conversations")
    prompt = first_prompt(
        with_recipe(config, apply_chat_template=template), environment
    )
    # The examples are turns by default: two of them, and the one to be answered.
    assert prompt.count("<|im_start|>assistant") == (3 if is_chat else 0)
    assert prompt.count("Verb:") == 3


def test_examples_in_one_turn_leave_one_answer(
    environment: Environment, config: EvaluateConfig
) -> None:
    one_turn = with_recipe(config, apply_chat_template=True, fewshot_as_multiturn=False)
    prompt = first_prompt(one_turn, environment)
    assert prompt.count("<|im_start|>assistant") == 1
    assert prompt.count("Verb:") == 3


@pytest.mark.parametrize("template", [True, False])
def test_system_instruction_starts_the_prompt(
    environment: Environment, config: EvaluateConfig, *, template: bool
) -> None:
    instructed = with_recipe(
        config, apply_chat_template=template, system_instruction="Answer with a verb.\n"
    )
    start = (
        "<|im_start|>system\nAnswer with a verb.\n<|im_end|>"
        if template
        else "Answer with a verb.\n"
    )
    assert first_prompt(instructed, environment).startswith(start)


def test_turns_without_a_template_are_a_config_error(
    environment: Environment, config: EvaluateConfig
) -> None:
    message, code = run_to_failure(
        with_recipe(config, fewshot_as_multiturn=True), environment
    )
    assert message.startswith("evaluate.fewshotAsMultiturn is true")
    assert "evaluate.applyChatTemplate: true" in message
    assert code == ExitCode.CONFIG


def test_template_that_rejects_questions_is_a_config_error(
    tmp_path: Path, tiny_model: Path
) -> None:
    strict = (
        "{{ raise_exception('only one exchange') if messages | length > 2 }}" + CHATML
    )
    model = make_chat_model(tmp_path / "strict", tiny_model, strict)
    environment = evaluate_environment(tmp_path, model)
    message, code = run_to_failure(
        evaluate_config(model, tasks=FEW, apply_chat_template=True), environment
    )
    assert "only one exchange" in message
    assert "evaluate.fewshotAsMultiturn to false" in message
    assert code == ExitCode.CONFIG


def test_tokenizer_without_template_gets_the_one_of_training(
    tmp_path: Path, tiny_model: Path
) -> None:
    environment = evaluate_environment(tmp_path, tiny_model)
    prompt = first_prompt(
        evaluate_config(tiny_model, tasks=FEW, apply_chat_template=True), environment
    )
    assert prompt.startswith("user: ")
    assert prompt.endswith("\n\nassistant:")
    assert prompt.count("<eos>") == 2


def test_prompt_has_the_date_of_training_on_any_day(
    tmp_path: Path, tiny_model: Path
) -> None:
    model = make_chat_model(
        tmp_path / "dated", tiny_model, "{{ strftime_now('%d %B %Y') }}" + CHATML
    )
    environment = evaluate_environment(tmp_path, model)
    prompt = first_prompt(
        evaluate_config(model, tasks=FEW, apply_chat_template=True), environment
    )
    assert prompt.startswith("26 July 2024<|im_start|>")


def write_writing_task(environment: Environment) -> Task:
    """Write a task whose answers are generated and end after 12 tokens at the latest."""
    tasks = Path(str(environment.manifest_dir)) / "tasks"
    verbs = (tasks / "verbs.yaml").read_text()
    (tasks / "writing.yaml").write_text(
        verbs[: verbs.index("output_type")].replace("task: verbs", "task: writing")
        + 'output_type: generate_until\ndoc_to_text: "{{sentence}}"\ndoc_to_target: "opens"\n'
        f"generation_kwargs: {{until: [], max_gen_toks: {TOKENS}}}\nmetric_list:\n  - metric: exact_match\n"
    )
    return Task(name="writing", file="tasks/writing.yaml")


def greedy_answers(
    model_folder: Path, adapter: Path, prompts: list[str], ends: list[int]
) -> list[str]:
    """Return the greedy answers to the prompts, one at a time, up to the first of these tokens."""
    import torch  # noqa: PLC0415
    from peft import PeftModel  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model: Any = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model_folder), str(adapter)
    ).eval()
    answers = []
    for prompt in prompts:
        tokens = tokenizer(prompt, add_special_tokens=False).input_ids
        start = len(tokens)
        with torch.no_grad():
            while (
                len(tokens) < start + TOKENS
                and tokens[-1] not in ends[: None if len(tokens) > start else 0]
            ):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        answers.append(tokenizer.decode(tokens[start:], skip_special_tokens=True))
    return answers


def test_answer_ends_with_the_turn(
    environment: Environment, config: EvaluateConfig, chat_model: Path
) -> None:
    from transformers import AutoTokenizer  # noqa: PLC0415

    writing = with_recipe(
        config, tasks=(write_writing_task(environment),), apply_chat_template=True
    )
    run_evaluate(writing, environment)
    samples = read_samples(writing, environment, "writing")
    prompts = [sample["arguments"][0][0] for sample in samples]
    adapter = environment.stage_dir("train", "first") / "output"
    turn_end = AutoTokenizer.from_pretrained(chat_model).convert_tokens_to_ids(
        "<|im_end|>"
    )
    until_turn_end = greedy_answers(chat_model, adapter, prompts, [2, turn_end])
    assert [sample["resps"][0][0] for sample in samples] == until_turn_end
    assert until_turn_end != greedy_answers(
        chat_model, adapter, prompts, [2]
    )  # some answer goes on without it


@pytest.mark.parametrize("special", [True, False])
def test_tokens_that_end_an_answer_are_those_of_the_template(
    tiny_model: Path, *, special: bool
) -> None:
    from transformers import AddedToken, AutoTokenizer  # noqa: PLC0415

    from finetune_trainer.data.records.chat_template import end_tokens  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert end_tokens(tokenizer, conversations=True) == (
        2,
    )  # the default template writes EOS
    tokenizer.add_tokens(
        [
            AddedToken("<|im_end|>", special=special),
            AddedToken("<|im_start|>", special=special),
        ]
    )
    tokenizer.chat_template = CHATML
    assert end_tokens(tokenizer, conversations=True) == (
        tokenizer.convert_tokens_to_ids("<|im_end|>"),
        2,
    )
    assert end_tokens(tokenizer, conversations=False) == (2,)


def test_answer_without_template_ends_with_the_turn_too(
    environment: Environment, config: EvaluateConfig
) -> None:
    """The published model stops there, whatever the prompt is."""
    write_prepare_result(environment, conversations=True)
    plain = with_recipe(
        config, tasks=(write_writing_task(environment),), apply_chat_template=False
    )
    run_evaluate(plain, environment)
    (_, arguments), *_ = read_samples(plain, environment, "writing")[0]["arguments"]
    assert arguments["until"] == ["<|im_end|>", "<eos>"]


@pytest.mark.parametrize(
    ("writes_bos", "template", "starts_with_bos"),
    [
        (True, CHATML, False),
        (True, "{{ bos_token }}" + CHATML, True),
        (True, None, True),  # the default template writes BOS where the tokenizer does
        (False, CHATML, False),
    ],
)
def test_prompt_has_the_special_tokens_of_training(
    tmp_path: Path, *, writes_bos: bool, template: str | None, starts_with_bos: bool
) -> None:
    from support.trainer.prepared import make_tokenizer  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    from finetune_trainer.data.records.chat_template import ChatTemplate  # noqa: PLC0415
    from finetune_trainer.data.records.conversations import Conversation  # noqa: PLC0415
    from finetune_trainer.data.records.rendering import render  # noqa: PLC0415

    make_tokenizer(tmp_path, chat_template=template, writes_bos=writes_bos)
    shape = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    LlamaForCausalLM(
        LlamaConfig(vocab_size=320, eos_token_id=2, **shape)
    ).save_pretrained(tmp_path)
    lm = load_tiny_lm(tmp_path, apply_chat_template=True)
    tokenizer = lm.tokenizer
    prompt = lm.apply_chat_template([{"role": "user", "content": "A reader opens"}])
    tokens = lm.tok_encode(prompt)
    messages = [
        {"role": "user", "content": "A reader opens"},
        {"role": "assistant", "content": "the file"},
    ]
    [example] = render(ChatTemplate(tokenizer), Conversation(messages)).examples
    start, _ = example.loss_spans[0]
    prompt_text = example.text[:start]
    assert tokens == tokenizer(prompt_text, add_special_tokens=False).input_ids
    assert tokens == lm.tok_batch_encode([prompt])[0][0].tolist()
    assert (tokens[0] == tokenizer.bos_token_id) is starts_with_bos


def test_question_is_rendered_with_the_template_of_prepare(
    environment: Environment, config: EvaluateConfig
) -> None:
    from finetune_trainer.data.chat_templates import ChatTemplates  # noqa: PLC0415  imports transformers

    write_prepare_result(environment, conversations=True)
    output = environment.stage_dir("prepare", "p1") / "output"
    output.mkdir()
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    ChatTemplates({"default": template}, "Manifest").write(output, conversations=True)
    prompt = first_prompt(config, environment)
    assert prompt.count("[user]") == prompt.count("[assistant]") + 1 == 3
