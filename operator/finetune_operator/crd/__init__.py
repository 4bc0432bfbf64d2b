"""The CustomResourceDefinition, generated from the models."""
