"""The hashes of a stage are computed again if, and only if, its spec or its config is another."""

import gc

import pytest
from support.operator.scenario import a_pipeline

from finetune_operator.core import identity
from finetune_operator.core.identity import execution_of, hashes_of, inputs_of
from finetune_trainer.contract import PrepareConfig


def stage_of(pipeline_spec):
    spec = pipeline_spec.prepare
    fields = {
        "identity": "",
        "model": pipeline_spec.model,
        "datasets": pipeline_spec.datasets,
        "recipe": {},
    }
    return spec, PrepareConfig(**fields)


@pytest.fixture
def stage():
    return stage_of(a_pipeline())


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 7},
        {"objective": "DPO"},
        {"held_out": True},
    ],
    ids=str,
)
def test_other_config_of_the_same_spec_has_its_own_hashes(stage, change):
    spec, config = stage
    hashes_of(spec, config, {})
    other = config.model_copy(update=change)
    expected = (inputs_of(spec, other, {}), execution_of(spec))
    assert hashes_of(spec, other, {}) == expected


def test_content_that_was_edited_in_place_has_its_own_hashes(stage):
    spec, config = stage
    uri = config.datasets[0].uri
    digests = {uri: "old"}
    before = hashes_of(spec, config, digests)
    # The caller may change its mapping.
    digests[uri] = "new"
    assert hashes_of(spec, config, digests)[0] == inputs_of(spec, config, digests)
    assert hashes_of(spec, config, digests) != before


def test_other_spec_with_the_same_config_has_its_own_hashes(stage):
    spec, config = stage
    hashes_of(spec, config, {})
    pod = spec.pod.model_copy(update={"image": "registry.example/other:1"})
    other = spec.model_copy(update={"pod": pod})
    assert hashes_of(other, config, {})[1] == execution_of(other)
    assert execution_of(other) != execution_of(spec)


def test_hashes_are_forgotten_with_their_spec(stage):
    spec, config = stage
    before = len(identity._hashed)
    copies = [spec.model_copy() for _ in range(100)]
    for copied in copies:
        hashes_of(copied, config, {})
    assert len(identity._hashed) >= before + 100
    del copies, copied
    gc.collect()
    assert len(identity._hashed) <= before + 1
