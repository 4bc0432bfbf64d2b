"""A pipeline with a server, and its Deployment."""

from support.operator.pods import (
    Object,
)
from support.operator.scenario import Scenario, a_pipeline

from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.kubernetes.resources.server import (
    build_deployment,
)

PIPELINE = Pipeline(Key("team", "demo"), "uid-1", 1, a_pipeline())


def template_of(pod_defaults=None, **deploy):
    scenario = Scenario(a_pipeline(deploy=deploy, podDefaults=pod_defaults)).finish()
    [template] = [
        job.template
        for job in scenario.cluster.jobs.values()
        if job.template.stage == "deploy"
    ]
    return template


def deployment_of(**deploy) -> Object:
    template = template_of(**deploy)
    return build_deployment(PIPELINE, template, template.serving)
