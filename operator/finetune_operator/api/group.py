"""API group, version, kind and annotations of the custom resource."""

GROUP = "finetune.dev"
VERSION = "v1alpha1"
"""The version that the operator reads and writes, and that the API server stores."""
OLDER_VERSIONS: tuple[str, ...] = ()
"""Earlier versions that the API server still serves, with the same fields (ADR 37)."""
API_VERSION = f"{GROUP}/{VERSION}"
API_VERSIONS = (API_VERSION, *(f"{GROUP}/{version}" for version in OLDER_VERSIONS))
"""What a manifest may have as its apiVersion: the first is to be written."""
KIND = "FineTunePipeline"
PLURAL = "finetunepipelines"
SINGULAR = "finetunepipeline"
SHORT_NAME = "ft"

RETRY_ANNOTATION = f"{GROUP}/retry"
"""A new value retries the failed stage with fresh retry budgets."""

ADOPT_ANNOTATION = f"{GROUP}/adopt"
"""URI@sha256:… of a published model that is the result of a pipeline that has not run yet."""

# It stays cancelled until it is retried, whatever the annotation says later.
CANCEL_ANNOTATION = f"{GROUP}/cancel"
"""A new value cancels the pipeline."""
