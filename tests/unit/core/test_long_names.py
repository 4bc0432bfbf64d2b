"""Names of pipelines that are longer than a label."""

from finetune_operator.core.metadata import pipeline_label


def test_labels_of_long_names_are_different():
    first, second = (pipeline_label("a" * 70 + tail) for tail in ("-one", "-two"))
    assert first != second
    assert {len(first), len(second)} == {63}


def test_label_of_a_name_that_fits_is_the_name():
    assert pipeline_label("a" * 63) == "a" * 63
