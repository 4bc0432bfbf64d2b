"""Copies of the models with changed fields: pydantic itself would take any name."""

import pytest

from finetune_operator.api.status import AttemptStatus, StageStatus


def test_copy_has_the_changed_field():
    assert StageStatus().model_copy(update={"failures": 2}).failures == 2


def test_copy_with_an_unknown_field_is_refused():
    with pytest.raises(
        TypeError, match="StageStatus has no field failure; use its name in Python"
    ):
        StageStatus().model_copy(update={"failure": 2})


def test_copy_with_the_name_in_json_is_refused():
    attempt = AttemptStatus(number=1, job="a", identity="b", execution="c")
    with pytest.raises(TypeError, match="no field lostSteps"):
        attempt.model_copy(update={"lostSteps": 1})


def test_unknown_fields_of_another_version_are_kept():
    newer = StageStatus.model_validate({"inventedLater": 7})
    assert StageStatus().with_unknown_fields_of(newer).model_extra == {
        "inventedLater": 7
    }
