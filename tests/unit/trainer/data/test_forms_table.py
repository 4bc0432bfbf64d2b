"""The table of forms agrees with the schema of the manifest."""

from finetune_operator.api.datasets import SHAPES as KINDS_OF_MANIFEST
from finetune_trainer.data.records.forms import FORMS


def test_columns_that_a_manifest_may_name_are_in_its_schema():
    named = [
        {*form.required, *form.named}
        for forms in FORMS.values()
        for form in forms
        if form.named is not None
    ]
    assert sorted(map(sorted, named)) == sorted(map(sorted, KINDS_OF_MANIFEST))
