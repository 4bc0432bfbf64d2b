"""The Job of an attempt: name, labels, config, environment and placement."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from support.operator.scenario import ORDER, UID, Scenario, a_pipeline

from finetune_operator.api.placement import PlacementDefaults
from finetune_operator.core.metadata import ATTEMPT, IDENTITY, PIPELINE, STAGE, job_name
from finetune_operator.core.settings import Settings
from finetune_trainer.contract import parse_config
from finetune_trainer.contract.environment import CONFIG

JOB_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")

names = st.from_regex(
    r"[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,60}[a-z0-9])?){0,5}",
    fullmatch=True,
)


def templates(scenario: Scenario):
    return {
        job.template.stage: job.template
        for job in scenario.finish().cluster.jobs.values()
    }


@given(names, st.integers(1, 10**6), st.sampled_from(ORDER))
def test_job_name_is_valid_for_every_pipeline_name(pipeline, attempt, stage):
    name = job_name(pipeline, UID, stage, attempt)
    assert len(name) <= 63
    assert JOB_NAME.fullmatch(name)


def test_job_names_of_long_pipeline_names_differ():
    long = [f"{'a' * 200}.{n}.{'b' * 40}" for n in range(50)]
    names = {
        job_name(name, UID, stage, n)
        for name in long
        for stage in ORDER
        for n in (1, 2, 11)
    }
    assert len(names) == 50 * len(ORDER) * 3


def test_job_name_contains_short_pipeline_name():
    assert job_name("demo", UID, "train", 3) == "demo-0f1e2d3c-train-a3"


def test_pipeline_with_longest_name_succeeds():
    scenario = Scenario(name=f"{'a.' * 126}b").finish()
    assert scenario.status.phase == "Succeeded"
    for name, job in scenario.cluster.jobs.items():
        assert len(name) <= 63
        assert LABEL_VALUE.fullmatch(job.template.labels[PIPELINE])
        assert all(len(value) <= 63 for value in job.template.labels.values())


def test_labels_name_stage_attempt_and_identity():
    train = templates(Scenario())["train"]
    assert (train.labels[STAGE], train.labels[ATTEMPT], train.labels[IDENTITY]) == (
        "train",
        "1",
        train.identity,
    )


@pytest.mark.parametrize(
    "spec",
    [a_pipeline(), a_pipeline(evaluate=None, deploy=None)],
    ids=["all", "without evaluate"],
)
def test_config_of_every_stage_is_readable(spec):
    for stage, template in templates(Scenario(spec)).items():
        config = parse_config(template.env[CONFIG])
        assert config.stage == stage
        assert config.identity == template.identity
        assert template.command[-3:] == ("-m", "finetune_trainer", stage)


def test_same_pipeline_has_same_jobs():
    assert templates(Scenario()) == templates(Scenario())


def test_config_holds_uris_and_no_mount_paths():
    spec = a_pipeline(
        datasets=[{"uri": "pvc://data/train.jsonl"}],
        workspace={"existingClaim": "scratch"},
    )
    jobs = templates(Scenario(spec))
    assert all("scratch" not in str(template.env) for template in jobs.values())
    assert jobs["prepare"].claims == ("data",)
    assert jobs["train"].claims == ()
    assert jobs["push"].claims == ("data", "models")
    assert {
        stage: job.written_claims for stage, job in jobs.items() if job.written_claims
    } == {"push": ("models",)}


def test_claims_of_all_data_sets_are_mounted_for_prepare():
    datasets = [
        {"uri": "pvc://one/train-*.jsonl"},
        {"uri": "pvc://two/a.csv.gz"},
        {"uri": "hf://org/data/x.json"},
    ]
    jobs = templates(
        Scenario(
            a_pipeline(
                datasets=datasets, validation={"uri": "pvc://three/held-out.jsonl"}
            )
        )
    )
    assert jobs["prepare"].claims == ("one", "three", "two")
    assert jobs["push"].claims == ("models", "one", "two")


@pytest.mark.parametrize(
    ("template", "claims"),
    [("pvc://team/chat.jinja", ("team",)), ("pvc://team/{{ messages }}\n", ())],
)
def test_claim_of_the_chat_template_is_mounted_for_prepare(template, claims):
    datasets = [{"uri": "hf://org/data/x.json"}]
    spec = a_pipeline(prepare={"chatTemplate": template}, datasets=datasets)
    jobs = templates(Scenario(spec))
    assert jobs["prepare"].claims == claims
    assert jobs["train"].claims == ()


@pytest.mark.parametrize(
    "prompt",
    ["pvc://[", "pvc://[::1", "pvc://", "pvc://a b", "pvc://Demo/x", "pvc://demo\n"],
)
def test_text_that_only_starts_like_a_uri_names_no_claim(prompt):
    assert templates(Scenario(a_pipeline(deploy={"smokeTest": {"prompt": prompt}})))[
        "deploy"
    ].claims == ("models",)


def test_same_spec_in_another_pipeline_has_same_identities():
    first = Scenario()
    other = Scenario(name="other")
    assert {s: t.identity for s, t in templates(first).items()} == {
        s: t.identity for s, t in templates(other).items()
    }


def test_custom_command_is_part_of_the_identity():
    custom = Scenario(
        a_pipeline(
            train={
                "pod": {
                    "image": "mine:1",
                    "command": ["/run", "--fast"],
                    "args": ["x"],
                }
            }
        )
    )
    train = templates(custom)["train"]
    default = templates(Scenario())["train"]
    assert train.image == "mine:1"
    assert train.command == ("/run", "--fast", "x")
    assert train.identity != default.identity
    own = {
        "image": "mine:2",
        "command": ["/run", "--fast"],
        "args": ["x"],
    }
    newer = templates(Scenario(a_pipeline(train={"pod": own})))
    assert newer["train"].identity != train.identity


@pytest.mark.parametrize("stage", ["prepare", "train", "evaluate", "push"])
def test_args_without_command_are_rejected(stage):
    with pytest.raises(ValidationError, match=r"args: has no effect without command"):
        a_pipeline(**{stage: {"pod": {"args": ["--fast"]}}})


@pytest.mark.parametrize("stage", ["prepare", "evaluate", "push"])
@pytest.mark.parametrize(
    "name", ["nvidia.com/gpu", "nvidia.com/mig-3g.40gb", "amd.com/gpu"]
)
def test_more_gpus_than_the_trainer_uses_are_rejected(stage, name):
    several = {"resources": {"limits": {name: 2}}}
    with pytest.raises(
        ValidationError,
        match=r"pod.resources.limits: has more than one accelerator, .* set 1, or add",
    ):
        a_pipeline(**{stage: {"pod": several}})
    own = a_pipeline(**{stage: {"pod": several | {"command": ["torchrun"]}}}).stage(
        stage
    )
    deploy = a_pipeline(deploy={"pod": several}).stage("deploy")
    assert own
    assert deploy
    assert own.pod.resources.accelerators == 2
    assert deploy.pod.resources.accelerators == 2


def test_several_gpus_for_all_stages_are_rejected():
    with pytest.raises(
        ValidationError,
        match=r"podDefaults.resources.limits: has more than one accelerator",
    ):
        a_pipeline(podDefaults={"resources": {"limits": {"nvidia.com/gpu": 2}}})
    single_gpu = a_pipeline(
        podDefaults={"resources": {"limits": {"nvidia.com/gpu": 1}}}
    )
    assert {
        stage.pod.resources.accelerators for stage in single_gpu.stages().values()
    } == {1}


def test_deploy_args_are_not_passed_to_the_trainer():
    """They are for the engine on a cluster. In a local run the trainer serves the model and takes no arguments."""
    scenario = Scenario(a_pipeline(deploy={"pod": {"args": ["--fast"]}}))
    deploy = templates(scenario)["deploy"]
    assert deploy.args == ("--fast",)
    assert "--fast" not in deploy.command


def test_trainer_image_is_not_part_of_the_identity():
    settings = Settings(trainer_image="trainer:1", trainer_cpu_image="trainer-cpu:1")
    jobs = templates(
        Scenario(a_pipeline(train={"pod": {"image": "trainer:2"}}), settings=settings)
    )
    assert (jobs["train"].image, jobs["evaluate"].image) == (
        "trainer:2",
        "trainer-cpu:1",
    )
    assert jobs["train"].identity == templates(Scenario())["train"].identity


def test_stages_with_an_accelerator_have_the_image_for_it():
    slice_of_a_gpu = {"resources": {"limits": {"vendor.example/slice": 1}}}
    no_gpu = {"resources": {"limits": {"nvidia.com/gpu": 0, "memory": "1Gi"}}}
    settings = Settings(trainer_image="gpu", trainer_cpu_image="cpu")
    stages = {
        "train": slice_of_a_gpu,
        "evaluate": {"runtimeClassName": "nvidia"},
        "push": no_gpu,
    }
    jobs = templates(
        Scenario(
            a_pipeline(**{name: {"pod": pod} for name, pod in stages.items()}),
            settings=settings,
        )
    )
    assert {name: template.image for name, template in jobs.items()} == {
        "prepare": "cpu",
        "train": "gpu",
        "evaluate": "gpu",
        "push": "cpu",
        "deploy": "cpu",
    }


@pytest.mark.parametrize(
    ("image", "verifier"), [({}, "gpu"), ({"image": "mine"}, "cpu")]
)
def test_model_is_verified_by_the_image_of_its_server(image, verifier):
    """A server with an image of the user's is verified by the smaller one of the trainer's."""
    pod = {"resources": {"limits": {"nvidia.com/gpu": 1}}} | image
    settings = Settings(trainer_image="gpu", trainer_cpu_image="cpu")
    job = templates(Scenario(a_pipeline(deploy={"pod": pod}), settings=settings))[
        "deploy"
    ]
    assert job.image == image.get("image", "gpu")
    assert job.verifier_image == verifier


def test_env_reaches_the_process_but_cannot_set_its_config():
    train = templates(
        Scenario(a_pipeline(train={"pod": {"env": [{"name": "A", "value": "1"}]}}))
    )["train"]
    assert train.env["A"] == "1"
    assert parse_config(train.env[CONFIG]).identity == train.identity
    with pytest.raises(
        ValidationError,
        match=r"env: names with the prefix FINETUNE_ are reserved for the stage contract",
    ):
        a_pipeline(train={"pod": {"env": [{"name": CONFIG, "value": "{}"}]}})


def test_capacity_and_gpu_determine_placement():
    changes = {
        "placement": {"capacity": "Spot"},
        "pod": {"resources": {"limits": {"nvidia.com/gpu": 1}}},
    }
    spot = templates(Scenario(a_pipeline(train=changes)))["train"].placement
    assert spot.capacity == "Spot"
    assert spot.node_selector == {}
    assert {toleration.key for toleration in spot.tolerations} == {
        "spot",
        "nvidia.com/gpu",
    }
    plain = templates(Scenario())["prepare"].placement
    assert plain.capacity == "OnDemand"
    assert plain.tolerations == ()


def test_operator_settings_define_capacity_and_pools():
    defaults = PlacementDefaults.model_validate(
        {
            "pools": {"training": {"nodeSelector": {"workload": "training"}}},
            "spot": {
                "nodeSelector": {"lifecycle": "spot"},
                "tolerations": [{"key": "cheap", "operator": "Exists"}],
            },
        }
    )
    settings = Settings(placement_defaults=defaults)
    changes: dict[str, Any] = {"train": {"placement": {"capacity": "Spot"}}}
    spot = templates(Scenario(a_pipeline(**changes), settings=settings))[
        "train"
    ].placement
    assert spot.node_selector == {"workload": "training", "lifecycle": "spot"}
    assert [toleration.key for toleration in spot.tolerations] == ["cheap"]
    changes["train"]["pod"] = {"nodeSelector": {"mine": "yes"}}
    chosen = templates(Scenario(a_pipeline(**changes), settings=settings))[
        "train"
    ].placement
    assert chosen.node_selector == {"mine": "yes", "lifecycle": "spot"}
    assert (
        templates(Scenario(a_pipeline(**changes), settings=settings))[
            "prepare"
        ].placement.node_selector
        == {}
    )


ZONE = "topology.kubernetes.io/zone"


@pytest.mark.parametrize(
    ("prepare", "zone"), [({}, "a"), ({"pod": {"nodeSelector": {ZONE: "b"}}}, "b")]
)
def test_prepare_binds_the_volume_in_the_zone_of_train(prepare, zone):
    """Its pod comes first, and a volume that waits for it is created in its zone."""
    selector = {ZONE: "a", "gpu": "h100"}
    spec = a_pipeline(prepare=prepare, train={"pod": {"nodeSelector": selector}})
    settings = Settings(placement_defaults=PlacementDefaults())
    jobs = templates(Scenario(spec, settings=settings))
    assert jobs["prepare"].placement.node_selector == {ZONE: zone}
    assert jobs["train"].placement.node_selector.items() >= selector.items()


def test_zone_of_the_pool_or_of_the_affinity_counts_too():
    pool = PlacementDefaults.model_validate(
        {"pools": {"training": {"nodeSelector": {ZONE: "c"}}}}
    )
    jobs = templates(Scenario(settings=Settings(placement_defaults=pool)))
    assert jobs["prepare"].placement.node_selector == {ZONE: "c"}
    term = {"matchExpressions": [{"key": ZONE, "operator": "In", "values": ["d"]}]}
    required = {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}
    }
    pod = {"affinity": {"nodeAffinity": required}}
    settings = Settings(placement_defaults=PlacementDefaults())
    jobs = templates(Scenario(a_pipeline(train={"pod": pod}), settings=settings))
    assert jobs["prepare"].placement.node_selector == {ZONE: "d"}
