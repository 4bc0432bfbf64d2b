"""Settings of experiment trackers. They never change a result, so they are part of no identity.

Credentials are not among them: the trackers' libraries read credentials from the environment.
"""

from typing import Annotated, Literal, Self

from pydantic import StringConstraints

from finetune_trainer.contract.models import ContractModel
from finetune_trainer.contract.uris import FolderUri

TrackerName = Annotated[
    str,
    StringConstraints(
        min_length=1, max_length=250, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_. -]*$"
    ),
]
"""A name that MLflow and W&B accept and that needs no quoting in their queries."""
# No @: credentials come from the environment, never from the manifest.
ServerUri = Annotated[
    str, StringConstraints(max_length=1024, pattern=r"^https?://[^\s/@]+(/\S*)?$")
]


Alias = Annotated[
    str, StringConstraints(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9_-]+$")
]


class Mlflow(ContractModel):
    """A run on an MLflow tracking server. Credentials are MLFLOW_TRACKING_TOKEN, or _USERNAME and _PASSWORD."""

    uri: ServerUri
    """Address of the tracking server: http://HOST:PORT or https://HOST. It has no user name and no password."""

    experiment: TrackerName = "Default"
    """Name of the experiment; created if it does not exist."""

    registered_model: TrackerName | None = None
    """Name of the registered model of which push makes a version. Absent: none. Created if it does not exist."""

    alias: Alias | None = None
    """Alias that push sets on the version, such as champion; it moves from the version before. MLflow reserves latest,
    and v with a number."""


class Wandb(ContractModel):
    """A run of Weights & Biases. The credential is WANDB_API_KEY; WANDB_BASE_URL names another server."""

    project: TrackerName
    """Name of the project."""

    entity: TrackerName | None = None
    """User or team that owns the project. Absent: the default entity of the key."""

    mode: Literal["Online", "Offline"] = "Online"
    """Offline writes the run to the folder wandb of each stage in the workspace, for `wandb sync`."""


class TensorBoard(ContractModel):
    """Event files for TensorBoard."""

    uri: FolderUri | None = None
    """pvc://CLAIM/PATH; in a local run also file:///PATH or a path relative to the manifest. Each run has a subfolder
    in it, named by its identity. Absent: the folder tensorboard of the train stage in the workspace."""


class Tracking(ContractModel):
    """Experiment trackers. A tracker that is down costs a warning, never the stage."""

    run_name: Annotated[str, StringConstraints(min_length=1, max_length=250)] | None = (
        None
    )
    """Name of the run in every tracker. Absent: namespace/name of the pipeline."""

    mlflow: Mlflow | None = None
    """MLflow. Absent: not used."""

    wandb: Wandb | None = None
    """Weights & Biases. Absent: not used."""

    tensorboard: TensorBoard | None = None
    """TensorBoard. Absent: not used."""

    def named(self, name: str) -> Self:
        """Return these settings with a name for the run, unless the user has named it."""
        if self.run_name:
            return self
        return self.model_copy(update={"run_name": name})

    def written_uris(self) -> frozenset[str]:
        """Return the URIs that the trackers write to."""
        # MLflow and W&B are servers; only TensorBoard writes files.
        if self.tensorboard is None or self.tensorboard.uri is None:
            return frozenset()
        return frozenset({self.tensorboard.uri})


def tracked_uris(tracking: Tracking | None) -> frozenset[str]:
    """Return the URIs that the trackers write to, if there are trackers."""
    if tracking is None:
        return frozenset()
    return tracking.written_uris()
