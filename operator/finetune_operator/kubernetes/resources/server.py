"""Build the objects that `deploy` leaves running: a Deployment for each attempt, and one Service: pure.

The Deployment of a new model runs in parallel with the old one. The Service selects it once it has answered a probe.
"""

import json
from dataclasses import asdict, fields
from pathlib import PurePosixPath
from typing import Any

from finetune_operator.api.conditions import Reason
from finetune_operator.api.stages.base import Serving
from finetune_operator.core.job_template import TRAINER, JobTemplate
from finetune_operator.core.metadata import (
    MANAGED_BY,
    MANAGED_BY_VALUE,
    PIPELINE,
    SERVER,
    STAGE,
    STAGE_CONTAINER,
    service_name,
)
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.kubernetes.resources.job import (
    CLAIMS,
    PIPELINE_NAME,
    RESTRICTED_SECURITY_CONTEXT,
    common_pod_spec,
    escape_expansion,
    resources_of,
)
from finetune_operator.kubernetes.resources.owner_references import owner_references
from finetune_operator.kubernetes.translate.api_errors import Blocked
from finetune_trainer.contract.engines import ENGINES, LaunchSpec

Object = dict[str, Any]
SERVING_ANNOTATION = "finetune.dev/serving"
"""Annotation: what the Deployment serves and how it is probed, as JSON."""
VERIFY = "verify"
"""The init container."""
PORT = 8000
ALL_ADDRESSES = "0.0.0.0"  # noqa: S104  inside the pod
MODEL_VARIABLE = "FINETUNE_MODEL"
"""Environment variable: the folder of the model, for a server of the user's own image."""
DRAIN_SECONDS = 5
"""Time for which a stopping server still answers: nodes learn only gradually that it leaves the Service."""


def build_deployment(pipeline: Pipeline, template: JobTemplate, serving: Serving) -> Object:
    """Build the Deployment of one attempt. Raises Blocked for a model that no pod can read."""
    labels = {**template.labels, SERVER: template.name}
    annotations = {PIPELINE_NAME: pipeline.key.name, SERVING_ANNOTATION: json.dumps(asdict(serving))}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": template.name,
            "namespace": pipeline.key.namespace,
            "labels": labels,
            "annotations": annotations,
            "ownerReferences": owner_references(pipeline),
        },
        "spec": {
            "replicas": serving.replicas,
            "selector": {"matchLabels": {SERVER: template.name}},
            "template": {
                "metadata": {"labels": labels, "annotations": annotations},
                "spec": _pod(template, serving),
            },
        },
    }


def build_service(pipeline: Pipeline, stage: str, job: str) -> Object:
    """Build the Service; `job` is the attempt whose servers get the requests."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": service_name(pipeline.key.name),
            "namespace": pipeline.key.namespace,
            "labels": {MANAGED_BY: MANAGED_BY_VALUE, PIPELINE: pipeline.key.name[:63].rstrip("-."), STAGE: stage},
            "annotations": {PIPELINE_NAME: pipeline.key.name},
            "ownerReferences": owner_references(pipeline),
        },
        "spec": {"selector": {SERVER: job}, "ports": [{"name": "http", "port": PORT, "targetPort": "http"}]},
    }


def url_of(pipeline: Pipeline) -> str:
    """Return the base URL for OpenAI clients, valid in the whole cluster."""
    return f"http://{service_name(pipeline.key.name)}.{pipeline.key.namespace}.svc:{PORT}/v1"


def serving_of(found: Object) -> Serving:
    """Parse a Deployment's serving annotation. Raises LookupError, TypeError or ValueError where it is invalid."""
    values = json.loads(found["metadata"]["annotations"][SERVING_ANNOTATION])
    known = {field.name for field in fields(Serving)}  # another version of the operator may have written more
    return Serving(**{name: value for name, value in values.items() if name in known})


def launch_of(serving: Serving) -> LaunchSpec:
    """Return how the server is started. Raises Blocked for a model that no pod can read."""
    return ENGINES[serving.engine].container(folder_of(serving.model), ALL_ADDRESSES, PORT)


def folder_of(uri: str) -> PurePosixPath:
    """Return the model's folder in the container. Raises Blocked for a URI that is not on a claim."""
    scheme, _, rest = uri.partition("://")
    claim, _, path = rest.partition("/")
    if scheme != "pvc":
        message = f"{uri} is not on a volume that a server can mount: set push.target to pvc://CLAIM/folder"
        raise Blocked(Reason.SPEC_INVALID, message)
    return CLAIMS / claim / path.strip("/")


def _pod(template: JobTemplate, serving: Serving) -> Object:
    pod = common_pod_spec(template)
    volumes = [
        {"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}}
        for number, claim in enumerate(template.claims)
    ]
    return {
        **pod,
        "initContainers": [_verify_container(template, serving)],
        "containers": [_server_container(template, serving)],
        "volumes": [*volumes, {"name": "tmp", "emptyDir": {}}],
    }


def _server_container(template: JobTemplate, serving: Serving) -> Object:
    launch, folder = launch_of(serving), folder_of(serving.model)
    command = (*launch.command, *template.args) if _is_trainer(template) else template.command
    env = {"PYTHONUNBUFFERED": "1", "HOME": "/tmp", **launch.env, **template.env, MODEL_VARIABLE: str(folder)}  # noqa: S108
    return {
        **_container_defaults(template),
        "name": STAGE_CONTAINER,
        "image": template.image,
        "command": [escape_expansion(word) for word in command],
        "env": [{"name": name, "value": escape_expansion(value)} for name, value in sorted(env.items())],
        "envFrom": [{"secretRef": {"name": name}} for name in template.secrets],
        "resources": resources_of(template.resources),
        "ports": [{"name": "http", "containerPort": PORT}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 2, "timeoutSeconds": 5},
        "lifecycle": {"preStop": {"sleep": {"seconds": DRAIN_SECONDS}}},
    }


def _verify_container(template: JobTemplate, serving: Serving) -> Object:
    """Build the init container that verifies every byte of the model before the server starts."""
    digest = ["--digest", serving.digest] if serving.digest else []
    command = ["python", "-P", "-m", "finetune_trainer.serving.verify", str(folder_of(serving.model)), *digest]
    return {
        **_container_defaults(template),
        "name": VERIFY,
        "image": template.trainer_image,
        "command": [escape_expansion(word) for word in command],
        "resources": resources_of(template.resources.model_copy(update={"gpu": None})),
    }


def _container_defaults(template: JobTemplate) -> Object:
    mounts: list[Object] = [
        {"name": f"claim-{number}", "mountPath": str(CLAIMS / claim), "readOnly": True}
        for number, claim in enumerate(template.claims)
    ]
    return {
        "securityContext": RESTRICTED_SECURITY_CONTEXT,
        # Servers write no termination message: the end of the log explains a crash.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [*mounts, {"name": "tmp", "mountPath": "/tmp"}],  # noqa: S108
    }


def _is_trainer(template: JobTemplate) -> bool:
    """Return whether the stage runs the trainer's command and not one of the user's."""
    return template.command[: len(TRAINER)] == TRAINER
