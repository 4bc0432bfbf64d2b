"""Docstrings of a model's fields become descriptions when a schema is asked for."""

from finetune_trainer.contract.field_docs import field_docs
from finetune_trainer.contract.models import ContractModel


class Base(ContractModel):
    kept: int = 1
    """Of the base."""

    declared_again: int = 2
    """Of the base, too."""

    replaced: int = 3
    """Of the base, at first."""


class Derived(Base):
    declared_again: int = 4

    replaced: int = 5
    """Of the derived class,
    in two lines."""

    without: int = 6


def test_docstring_is_the_one_of_the_last_declaration():
    docs = field_docs(Derived)
    assert docs == {
        "kept": "Of the base.",
        "declared_again": "Of the base, too.",
        "replaced": "Of the derived class,\nin two lines.",
    }


def test_schema_has_the_docstrings_by_the_names_in_json():
    properties = Derived.model_json_schema()["properties"]
    shown = {name: about.get("description") for name, about in properties.items()}
    assert shown == {
        "kept": "Of the base.",
        "declaredAgain": "Of the base, too.",
        "replaced": "Of the derived class,\nin two lines.",
        "without": None,
    }


def test_class_without_a_source_has_no_docstrings():
    made = type("Made", (ContractModel,), {"__annotations__": {"size": int}})
    assert field_docs(made) == {}
