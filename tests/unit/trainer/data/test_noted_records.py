"""Records that are used, and of which the log and the counts say what may be a mistake."""

import pytest
from support.trainer.models import write_jsonl
from support.trainer.prepared import make_tokenizer, prepare, prepare_config
from transformers import AutoTokenizer

from finetune_trainer.data.tokenizing.encoder import is_glued


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "model"
    make_tokenizer(folder)
    return folder


@pytest.fixture
def prepared(model, environment, manifest_dir):
    """A function that prepares records, and returns the result."""

    def prepared(records, **changes):
        write_jsonl(manifest_dir / "data.jsonl", records)
        return prepare(prepare_config(model, **changes), environment)

    return prepared


@pytest.mark.parametrize(
    ("prompt", "completion", "glued"),
    [
        ("What opens the file?", "A reader", True),
        ("Answer:", "A reader", True),
        ("the reader", "opens", True),
        ("Answer: ", "A reader", False),
        ("Answer:", " A reader", False),
        ("Answer:\n", "A reader", False),
        ("[INST] the file [/INST]", "A reader", False),
        ("<|assistant|>", "A reader", False),
        ("x = (", "1)", False),
        ("谁打开文件", "读者", False),
        ("", "A reader", False),
    ],
)
def test_completion_behind_a_word_without_a_space_is_glued(prompt, completion, glued):
    assert is_glued(prompt, completion) is glued


def test_glued_records_are_counted_in_the_log(prepared, capsys):
    glued = {"prompt": "the file?", "completion": "a socket"}
    spaced = {"prompt": "the file?", "completion": " a socket"}
    assert prepared([glued, glued, spaced]).invalid == 0
    log = capsys.readouterr().out
    assert (
        "in 2 records a word of the completion follows the prompt without a space"
        in log
    )


def test_glued_pairs_are_counted_in_the_log(prepared, capsys):
    pair = {"prompt": "the file?", "chosen": "a socket", "rejected": "a lock"}
    prepared([pair], objective="DPO")
    assert "in 1 records a word of the completion" in capsys.readouterr().out


def test_single_words_in_unread_columns_are_counted(prepared, capsys):
    record = {"prompt": "the file?", "completion": " a socket"}
    result = prepared(
        [
            {**record, "id": "a-1", "answer": "Paris"},
            {**record, "id": "a-2", "answer": "Bern"},
            {**record, "id": "a-3", "answer": "socket"},
            {**record, "id": "a-4", "answer": "17"},
        ]
    )
    # Not the word that the record's fields have, and no number.
    assert result.unread_words == 2
    assert result.invalid == 0
    assert (
        "columns that are not read: id, answer (a word in 2 records)"
        in capsys.readouterr().out
    )


def test_special_tokens_in_texts_are_counted_with_the_first_line(
    model, prepared, capsys
):
    end = AutoTokenizer.from_pretrained(model).eos_token
    question = {"role": "user", "content": "the file?"}
    answers = ("a socket", f"a socket{end}", "a lock", f"write {end} here")
    records = [
        {"messages": [question, {"role": "assistant", "content": answer}]}
        for answer in answers
    ]
    assert prepared(records).invalid == 0
    log = capsys.readouterr().out
    assert (
        f"2 records have the text of a special token ({end}; first data.jsonl:2)" in log
    )


def test_special_tokens_of_the_template_are_not_counted(prepared, capsys):
    turns = (("user", "the file?"), ("assistant", "a socket"))
    messages = [{"role": role, "content": content} for role, content in turns]
    prepared([{"messages": messages}])
    assert "special token" not in capsys.readouterr().out


@pytest.mark.parametrize("objective", ["SFT", "DPO"])
def test_special_token_in_any_field_is_counted(model, prepared, capsys, objective):
    end = AutoTokenizer.from_pretrained(model).eos_token
    fields = ("completion",) if objective == "SFT" else ("chosen", "rejected")
    record = {name: f" a {name}" for name in fields} | {"prompt": f"the file{end}?"}
    prepared([record], objective=objective)
    log = capsys.readouterr().out
    assert (
        f"1 record has the text of a special token ({end}; first data.jsonl:1)" in log
    )


def test_columns_that_judge_a_record_are_named(prepared, capsys):
    record = {"prompt": "the file?", "completion": " a socket"}
    prepared([{**record, "is_good": False, "Quality": 1, "id": 5}])
    log = capsys.readouterr().out
    assert "columns that are not read: is_good, Quality, id" in log
    assert (
        "is_good, Quality may say which records are good, but every record is learned"
        in log
    )


@pytest.mark.parametrize("column", ["use", "thumbs_up", "is_toxic"])
def test_columns_of_true_or_false_may_judge_a_record(prepared, capsys, column):
    record = {"prompt": "the file?", "completion": " a socket"}
    prepared([{**record, column: False}])
    assert f"{column} may say which records are good" in capsys.readouterr().out


ALPACA = {"instruction": "the file?", "output": "a socket"}


@pytest.mark.parametrize(
    ("record", "column"),
    [
        ({"prompt": "the file?", "completion": " a socket"}, "label"),
        (ALPACA, "label"),
        (ALPACA, "kto_tag"),
    ],
)
def test_unknown_label_is_counted_and_named(prepared, capsys, record, column):
    """Only words for good and bad say whether an answer is to be learned."""
    labels = ["meh", "so-so", "good", "True", True, 1, None]
    result = prepared([record | {column: label} for label in labels])
    assert (result.unread_words, result.invalid) == (2, 0)
    log = capsys.readouterr().out
    assert f"columns that are not read: {column} (a word in 2 records)" in log
    assert f"{column} may say which records are good, but every record is" in log


def test_known_labels_are_not_named(prepared, capsys):
    record = {"prompt": "the file?", "completion": " a socket"}
    assert prepared([{**record, "label": label} for label in ("yes", True, "1")])
    assert "label" not in capsys.readouterr().out


def test_role_that_no_server_gets_is_named(prepared, capsys):
    messages = [
        {"role": "customer", "content": "the file?"},
        {"role": "assistant", "content": "a socket"},
    ]
    assert prepared([{"messages": messages}] * 2).invalid == 0
    log = capsys.readouterr().out
    assert log.count("the role customer is none of system, user, assistant") == 1


def test_ignored_column_is_not_counted(prepared):
    record = {"prompt": "the file?", "completion": " a socket", "answer": "Paris"}
    assert prepared([record], columns={"ignored": ["answer"]}).unread_words == 0
