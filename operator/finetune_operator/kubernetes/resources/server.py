"""Build the objects that `deploy` leaves running: a Deployment for each attempt, and one Service: pure.

The Deployment of a new model runs in parallel with the old Deployment, until it has answered a probe. Then the Service
selects it.
"""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import PurePosixPath

from finetune_operator.api.conditions import Reason
from finetune_operator.api.stages.base import Serving
from finetune_operator.api.stages.pod import Resources
from finetune_operator.core.job_template import TRAINER, JobTemplate
from finetune_operator.core.metadata import (
    MANAGED_BY,
    MANAGED_BY_VALUE,
    PIPELINE,
    SERVER,
    STAGE,
    STAGE_CONTAINER,
    pipeline_label,
    service_name,
)
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.kubernetes.resources.job import (
    CLAIMS,
    PIPELINE_NAME,
    RESTRICTED_SECURITY_CONTEXT,
    common_pod_spec,
    environment_of,
    escape_expansion,
    image_of,
    resources_of,
    shared_memory_mounts,
    shared_memory_volumes,
    user_mounts,
    user_volumes,
)
from finetune_operator.kubernetes.resources.owner_references import owner_references
from finetune_operator.kubernetes.translate.api_errors import Blocked
from finetune_operator.kubernetes.translate.object import Object
from finetune_trainer.contract.engines import (
    ALL_ADDRESSES,
    ENGINES,
    LaunchSpec,
    model_name,
)

SERVING_ANNOTATION = "finetune.dev/serving"
"""Annotation: the served model and the probe of the Deployment, as JSON."""
VERIFY = "verify"
"""The init container."""
MODEL_VOLUME = "model"
MODELS = PurePosixPath("/models")
"""Folder of models that are not on a claim."""
IMAGE_FOLDER = "models"
"""Folder of the model in an image that push has published (`finetune_trainer.stores.oci.image`)."""
PORT = 8000
MODEL_VARIABLE = "FINETUNE_MODEL"
"""Environment variable: the folder of the model, for a server of the user's own image."""
HEALTH: Object = {"path": "/health", "port": "http"}
# With it, the probe restarts no container.
NEVER = 2**31 - 1
"""The largest failureThreshold."""
# Long, because a restart loads the model again, and a server under load may answer late.
HANG_SECONDS = 300
"""Time without an answer after which a server counts as hanging and is restarted."""
# Nodes learn only gradually that it leaves the Service.
DRAIN_SECONDS = 5
"""Time for which a stopping server still answers."""


def build_deployment(
    pipeline: Pipeline,
    template: JobTemplate,
    serving: Serving,
    *,
    image_volumes: bool = False,
) -> Object:
    """Build the Deployment of one attempt. Raises Blocked for a model that no pod can read.

    `image_volumes`: whether the cluster mounts an image as a volume, which Kubernetes 1.35 and later do.
    """
    labels = {**template.labels, SERVER: template.name}
    own = {
        PIPELINE_NAME: pipeline.key.name,
        SERVING_ANNOTATION: json.dumps(asdict(serving)),
    }
    annotations = template.pod.annotations | own
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
                "spec": _pod(
                    template,
                    serving,
                    model_volume(serving.model, image_volumes=image_volumes),
                ),
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
            "labels": {
                MANAGED_BY: MANAGED_BY_VALUE,
                PIPELINE: pipeline_label(pipeline.key.name),
                STAGE: stage,
            },
            "annotations": {PIPELINE_NAME: pipeline.key.name},
            "ownerReferences": owner_references(pipeline),
        },
        "spec": {
            "selector": {SERVER: job},
            "ports": [{"name": "http", "port": PORT, "targetPort": "http"}],
        },
    }


def url_of(pipeline: Pipeline) -> str:
    """Return the base URL for OpenAI clients, valid in the whole cluster."""
    return f"http://{service_name(pipeline.key.name)}.{pipeline.key.namespace}.svc:{PORT}/v1"


def serving_of(deployment: Object) -> Serving:
    """Parse a Deployment's serving annotation. Raises LookupError, TypeError or ValueError if it is invalid."""
    values = json.loads(deployment["metadata"]["annotations"][SERVING_ANNOTATION])
    # Another version of the operator may have written more fields.
    known = {field.name for field in fields(Serving)}
    return Serving(**{name: value for name, value in values.items() if name in known})


def launch_of(serving: Serving) -> LaunchSpec:
    """Return how the server is started. Raises Blocked for a model that no pod can read."""
    return ENGINES[serving.engine].container(
        folder_of(serving.model), ALL_ADDRESSES, PORT
    )


def folder_of(uri: str) -> PurePosixPath:
    """Return the model's folder in the container. Raises Blocked for a URI that names a path of another machine."""
    scheme, separator, rest = uri.partition("://")
    claim, _, path = rest.partition("/")
    if scheme == "pvc":
        return CLAIMS / claim / path.strip("/")
    if not separator or scheme == "file":
        message = f"{uri} is no place that a pod can read: add a target such as pvc://CLAIM/folder to push.targets"
        raise Blocked(Reason.SPEC_INVALID, message)
    return MODELS / model_name(uri)


@dataclass(frozen=True)
class ModelVolume:
    """The volume of a model that is not on a claim, and how the model gets there."""

    source: Object
    """The volume's source."""
    sub_path: str | None
    """Folder of the model in it."""
    is_fetched: bool
    """Whether the init container downloads the model. Else the kubelet pulls it."""


def model_volume(uri: str, *, image_volumes: bool) -> ModelVolume | None:
    """Return the volume of a model, or None for a model on a claim."""
    scheme, _, reference = uri.partition("://")
    if scheme == "pvc":
        return None
    # Only with a digest: a tag may point to another image by now.
    if scheme == "oci" and image_volumes and "@sha256:" in reference:
        return ModelVolume(
            {"image": {"reference": reference, "pullPolicy": "IfNotPresent"}},
            IMAGE_FOLDER,
            False,
        )
    return ModelVolume({"emptyDir": {}}, None, is_fetched=True)


def _pod(template: JobTemplate, serving: Serving, model: ModelVolume | None) -> Object:
    pod = common_pod_spec(template)
    volumes = [
        {
            "name": f"claim-{number}",
            "persistentVolumeClaim": {"claimName": claim, "readOnly": True},
        }
        for number, claim in enumerate(template.claims)
    ]
    if model:
        volumes.append({"name": MODEL_VOLUME, **model.source})
    return {
        **pod,
        "initContainers": [_init_container(template, serving, model)],
        "containers": [_server_container(template, serving, model)],
        "volumes": [
            *volumes,
            {"name": "tmp", "emptyDir": {}},
            *shared_memory_volumes(template),
            *user_volumes(template),
        ],
    }


def _model_mounts(
    serving: Serving, model: ModelVolume | None, *, read_only: bool
) -> list[Object]:
    if model is None:
        return []
    mount: Object = {"name": MODEL_VOLUME, "mountPath": str(folder_of(serving.model))}
    if model.sub_path:
        mount["subPath"] = model.sub_path
    if read_only:
        mount["readOnly"] = True
    return [mount]


def _server_container(
    template: JobTemplate, serving: Serving, model: ModelVolume | None
) -> Object:
    launch = launch_of(serving)
    folder = folder_of(serving.model)
    command = template.command
    if _is_trainer(template):
        # The trainer's command stands for the engine's own, with the user's arguments.
        command = (*launch.command, *template.args)
    defaults = _container_defaults(template)
    shared_memory = shared_memory_mounts(template)
    variables = {"PYTHONUNBUFFERED": "1", "HOME": "/tmp", **launch.env}  # noqa: S108
    return {
        **defaults,
        "name": STAGE_CONTAINER,
        **image_of(template),
        "command": [escape_expansion(word) for word in command],
        **environment_of(template, variables, {MODEL_VARIABLE: str(folder)}),
        "resources": resources_of(template.pod.resources),
        "volumeMounts": [
            *defaults["volumeMounts"],
            *_model_mounts(serving, model, read_only=True),
            *shared_memory,
        ],
        "ports": [{"name": "http", "containerPort": PORT}],
        **_probes(),
        "lifecycle": {"preStop": {"sleep": {"seconds": DRAIN_SECONDS}}},
    }


def _probes() -> Object:
    """Build the probes of a server.

    The startup probe only delays the others until the first answer. It never restarts the server: how long a model
    loads depends on its size and on the volume, and a restart would begin from the start. The user limits the time
    with deploy.maxRuntimeSeconds.
    """
    period = 20
    return {
        "startupProbe": {
            "httpGet": HEALTH,
            "periodSeconds": 2,
            "timeoutSeconds": 5,
            "failureThreshold": NEVER,
        },
        "readinessProbe": {"httpGet": HEALTH, "periodSeconds": 2, "timeoutSeconds": 5},
        "livenessProbe": {
            "httpGet": HEALTH,
            "periodSeconds": period,
            "timeoutSeconds": period,
            "failureThreshold": HANG_SECONDS // period,
        },
    }


def _init_container(
    template: JobTemplate, serving: Serving, model: ModelVolume | None
) -> Object:
    """Build the init container: it downloads the model if needed, and verifies every byte before the server starts."""
    is_fetched = model is not None and model.is_fetched
    # -P: no file in the working folder shadows a library.
    command = ["python", "-P", "-m", "finetune_trainer.serving.verify"]
    command.append(str(folder_of(serving.model)))
    if serving.digest:
        command += ["--digest", serving.digest]
    if is_fetched:
        command += ["--fetch", serving.model]
    defaults = _container_defaults(template)
    # Credentials of a store are in the stage's variables. Without a download, the container needs none of them.
    variables = {"PYTHONUNBUFFERED": "1", "HOME": "/tmp"}  # noqa: S108
    return {
        **defaults,
        "name": VERIFY,
        "image": template.verifier_image,
        "command": [escape_expansion(word) for word in command],
        **(environment_of(template, variables, {}) if is_fetched else {}),
        "resources": resources_of(without_devices(template.pod.resources)),
        "volumeMounts": [
            *defaults["volumeMounts"],
            *_model_mounts(serving, model, read_only=not is_fetched),
        ],
    }


def without_devices(resources: Resources) -> Resources:
    """Return the resources for a container that needs no device, and no share of one."""

    def kept(amounts: dict[str, str]) -> dict[str, str]:
        return {name: amount for name, amount in amounts.items() if "/" not in name}

    return Resources(requests=kept(resources.requests), limits=kept(resources.limits))


def _container_defaults(template: JobTemplate) -> Object:
    mounts: list[Object] = [
        {"name": f"claim-{number}", "mountPath": str(CLAIMS / claim), "readOnly": True}
        for number, claim in enumerate(template.claims)
    ]
    return {
        "securityContext": RESTRICTED_SECURITY_CONTEXT,
        # Servers write no termination message: the end of the log explains a crash.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            *mounts,
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
            *user_mounts(template),
        ],
    }


def _is_trainer(template: JobTemplate) -> bool:
    """Return whether the stage runs the trainer's command and not a command of the user."""
    return template.command[: len(TRAINER)] == TRAINER
