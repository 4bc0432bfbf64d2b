"""The CustomResourceDefinition, generated from the models in `api`."""
