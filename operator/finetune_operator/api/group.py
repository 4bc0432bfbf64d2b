"""The names under which Kubernetes knows the resource."""

GROUP = "finetune.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "FineTunePipeline"
PLURAL = "finetunepipelines"
SINGULAR = "finetunepipeline"
SHORT_NAME = "ftp"

RETRY_ANNOTATION = f"{GROUP}/retry"
"""A new value starts the failed stage again with fresh budgets."""

CANCEL_ANNOTATION = f"{GROUP}/cancel"
"""A new value stops the pipeline for good, until it is retried."""
