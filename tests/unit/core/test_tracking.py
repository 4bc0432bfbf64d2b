"""Experiment trackers of the spec: in the configs of three stages, and in no identity."""

import pytest
from pydantic import ValidationError
from support.operator.scenario import Scenario

from finetune_operator.api.spec import PipelineSpec

TRACKING = {
    "mlflow": {"uri": "http://mlflow.ml:5000"},
    "tensorboard": {"uri": "pvc://runs/tb"},
}
SOURCES = {"model": {"uri": "hf://a/b"}, "datasets": [{"uri": "hf://a/b/c.jsonl"}]}


def test_added_trackers_rerun_no_stage():
    scenario = Scenario()
    scenario.finish()
    jobs = list(scenario.created_jobs)
    scenario.edit(tracking=TRACKING)
    scenario.reconcile_until_stable()
    assert scenario.created_jobs == jobs


def test_configs_name_the_run_after_the_pipeline():
    scenario = Scenario().edit(tracking=TRACKING)
    scenario.run_before("train")
    config = scenario.config("train")
    assert config.tracking.run_name == str(scenario.key)
    assert config.written_uris() == {"pvc://runs/tb"}


def test_name_of_the_user_is_the_name_of_the_run():
    scenario = Scenario().edit(tracking={**TRACKING, "runName": "june"})
    scenario.run_before("train")
    assert scenario.config("train").tracking.run_name == "june"


@pytest.mark.parametrize(
    ("mlflow", "problem"),
    [
        ({"alias": "champion"}, "add registeredModel"),
        ({"alias": "latest", "registeredModel": "bot"}, "MLflow reserves latest"),
        ({"alias": "V12", "registeredModel": "bot"}, "MLflow reserves latest"),
        ({"uri": "http://user:password@mlflow"}, "mlflow.uri"),
        ({"uri": "file:///runs"}, "mlflow.uri"),
    ],
)
def test_invalid_tracking_is_refused_with_the_fix(mlflow, problem):
    tracking = {"mlflow": {"uri": "http://mlflow", **mlflow}}
    with pytest.raises(ValidationError, match=problem):
        PipelineSpec.model_validate({**SOURCES, "tracking": tracking})
