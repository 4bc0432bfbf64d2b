"""A field that another field leaves without an effect is refused, and stops no pipeline that is stored."""

import json
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError
from support.operator.ignored_fields import IGNORED, USED, spec_with
from support.operator.scenario import ALL_STAGES, merged

from finetune_cli.__main__ import main
from finetune_operator.api.rules import STORED
from finetune_operator.api.spec import PipelineSpec
from finetune_operator.core.pipeline import Key
from finetune_operator.kubernetes.pipeline_object import parse_pipeline
from finetune_operator.kubernetes.resources.claim import build_claim
from finetune_operator.local.pipeline_file import PipelineFile

HEAD = {
    "apiVersion": "finetune.dev/v1alpha1",
    "kind": "FineTunePipeline",
    "metadata": {"name": "demo"},
}
FORMER_DEFAULTS = {
    "size": "50Gi",
    "accessMode": "ReadWriteOnce",
    "whenDeleted": "Retain",
}
"""Fields that the API server has stored in each workspace."""


def parsed(spec):
    """Return the pipeline that the operator reads from an API server."""
    meta = {"namespace": "team", "name": "demo", "uid": "u", "generation": 1}
    return parse_pipeline({"metadata": meta, "spec": spec})


@pytest.mark.parametrize("path", IGNORED)
def test_field_without_effect_is_refused_with_the_fix(
    path, tmp_path, monkeypatch, capsys
):
    fields, fix = IGNORED[path]
    spec = spec_with(fields)
    with pytest.raises(ValidationError) as refused:
        PipelineSpec.model_validate(spec)
    [error] = refused.value.errors()
    assert fix in error["msg"]
    monkeypatch.chdir(tmp_path)
    Path("p.yaml").write_text(yaml.safe_dump({**HEAD, "spec": spec}, sort_keys=False))
    assert main(["validate", "p.yaml"]) != 0
    output = capsys.readouterr().out
    assert f"spec.{path}" in output
    assert fix in output


@pytest.mark.parametrize("case", USED)
def test_field_with_an_effect_is_accepted(case):
    spec = spec_with(USED[case])
    accepted = PipelineSpec.model_validate_json(json.dumps(spec), strict=True)
    assert accepted.model.uri == "hf://org/base"


@pytest.mark.parametrize("path", IGNORED)
def test_stored_pipeline_with_such_a_field_goes_on(path, tmp_path):
    spec = spec_with(IGNORED[path][0])
    stored = parsed(spec).spec
    assert stored == PipelineSpec.model_validate(spec, context=STORED)
    file = PipelineFile(tmp_path)
    file.apply(Key("team", "demo"), PipelineSpec.model_validate(spec_with({})), {})
    content = json.loads(file.path.read_text())
    file.path.write_text(json.dumps({**content, "spec": spec}))
    read = file.read()
    assert read
    assert read.spec == stored


def test_other_mistakes_of_a_stored_pipeline_are_still_refused():
    spec = spec_with({"train": {"epochs": 1, "maxSteps": 1}})
    with pytest.raises(ValidationError, match="set epochs or maxSteps"):
        PipelineSpec.model_validate(spec, context=STORED)


def test_claim_without_fields_has_the_former_defaults():
    absent, stored = (
        build_claim(parsed(merged(ALL_STAGES, {"workspace": workspace})))
        for workspace in ({}, FORMER_DEFAULTS)
    )
    assert absent == stored
    assert absent["spec"]["resources"]["requests"]["storage"] == "50Gi"
    assert absent["spec"]["accessModes"] == ["ReadWriteOnce"]


def test_manifest_with_a_claim_replaces_a_stored_workspace(tmp_path):
    """An earlier version has stored defaults in the work folder."""
    file = PipelineFile(tmp_path)
    key = Key("team", "demo")
    file.apply(key, PipelineSpec.model_validate(spec_with({})), {})
    content = json.loads(file.path.read_text())
    content["spec"]["workspace"] = FORMER_DEFAULTS
    file.path.write_text(json.dumps(content))
    claim = {"workspace": {"existingClaim": "shared"}, "seed": 7}
    edited = file.apply(key, PipelineSpec.model_validate(spec_with(claim)), {})
    assert edited.spec.workspace.existing_claim == "shared"
    assert edited.spec.seed == 7
