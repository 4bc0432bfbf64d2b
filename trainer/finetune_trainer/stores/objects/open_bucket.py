"""The choice of the client for a bucket, by the scheme of its URI."""

import os
from collections.abc import Mapping

from finetune_trainer.runtime.errors import ConfigInvalid
from finetune_trainer.stores.objects.bucket import Bucket, Location


def open_bucket(
    location: Location, environment: Mapping[str, str] = os.environ
) -> Bucket:
    """Return a client for the bucket of a URI; it reads its credentials from environment variables.

    Raise ConfigInvalid for another scheme, or if the library for it is not installed. Raise CredentialsRejected if
    there are no credentials.
    """
    # Imported here, because each library takes a part of a second and a process needs only one of them.
    match location.scheme:
        case "s3" | "az" | "https" | "http":
            from finetune_trainer.stores.objects.obstore_bucket import ObstoreBucket  # noqa: PLC0415

            return ObstoreBucket(location, environment)
        case "gs":
            from finetune_trainer.stores.objects.google_bucket import GoogleBucket  # noqa: PLC0415

            return GoogleBucket(location, environment)
        case _:
            raise ConfigInvalid(
                f"{location.shown}: {location.scheme}:// is no object store; use s3, gs, az or https"
            )
