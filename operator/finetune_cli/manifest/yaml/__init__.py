"""YAML as Kubernetes reads it: a tree of values with their lines, messages for its errors, and a writer."""
