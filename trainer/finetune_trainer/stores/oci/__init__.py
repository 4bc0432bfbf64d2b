"""OCI registries: models as artifacts and images."""
