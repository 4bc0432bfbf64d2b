"""`finetune explain`: every field of the schema and every reason has an explanation."""

import pytest

from finetune_cli.__main__ import main
from finetune_cli.commands import explain
from finetune_cli.output.notes import NoteReason
from finetune_operator.api.conditions import Reason
from finetune_operator.crd.generate import spec_schema, status_schema


def paths(schema, path):
    """Yield the path of every field."""
    yield path
    for name, field in schema.get("items", schema).get("properties", {}).items():
        yield from paths(field, f"{path}.{name}")


@pytest.mark.parametrize(
    ("root", "schema"), [("spec", spec_schema()), ("status", status_schema())]
)
def test_all_fields_of_two_levels_are_explained(capsys, root, schema):
    for path in paths(schema, root):
        if path.count(".") > 2:
            continue
        assert main(["explain", path]) == 0
        assert capsys.readouterr().out.startswith(f"{path} <")


def test_reason_in_small_letters_is_explained(capsys):
    assert main(["explain", "datainvalid"]) == 0
    assert capsys.readouterr().out.startswith("DataInvalid\n")


@pytest.mark.parametrize(
    ("topic", "reads"), [("datainvalid", 1), ("DataInvalid", 1), ("train", 0)]
)
def test_page_is_read_once_for_a_reason(topic, reads, monkeypatch):
    """A field that the schema has needs no page."""
    page = explain._page()
    pages = []

    def read():
        pages.append(page)
        return page

    monkeypatch.setattr(explain, "_page", read)
    assert main(["explain", topic]) == 0
    assert len(pages) == reads


@pytest.mark.parametrize("reason", [*Reason, *NoteReason, "PipelineFailed"])
def test_every_reason_is_explained(capsys, reason):
    assert main(["explain", reason]) == 0
    title, _, text = capsys.readouterr().out.partition("\n\n")
    assert title == reason
    assert len(text.split()) > 5
    assert "](" not in text


def test_field_shows_type_default_and_fields(capsys):
    assert main(["explain", "train.lora"]) == 0
    output = capsys.readouterr().out
    assert "spec.train.lora <object>" in output
    assert "  rank <integer>, default 16\n" in output


def test_index_of_a_list_is_left_out(capsys):
    assert main(["explain", "spec.datasets[0].uri"]) == 0
    assert capsys.readouterr().out.startswith("spec.datasets.uri <string>")


@pytest.mark.parametrize(
    ("topic", "hint"),
    [
        ("train.optimizer.learningRat", "did you mean learningRate?"),
        ("trian", "did you mean train?"),
        ("DataInvlid", "did you mean DataInvalid?"),
        ("seed.value", "spec.seed has no fields"),
    ],
)
def test_unknown_topic_has_the_closest(capsys, topic, hint):
    assert main(["explain", topic]) == 2
    assert hint in capsys.readouterr().err
