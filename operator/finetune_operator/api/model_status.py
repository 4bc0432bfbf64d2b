"""The published model and its server in the status of a pipeline."""

from finetune_trainer.contract import ExtensibleModel


class ModelStatus(ExtensibleModel):
    """The published model."""

    uri: str
    """URI of the model."""
    digest: str
    """Digest of the model's files."""
    endpoint: str | None = None
    """URL of the OpenAI-compatible API inside the cluster. Absent until the server has answered the prompt."""


class ServerStatus(ExtensibleModel):
    """The server that gets the requests, for the subresource scale."""

    replicas: int
    """Number of its pods."""
    selector: str
    """Selector of its pods, in the form of a query. It changes with each new server."""
