"""Reading of manifests: YAML with line numbers, checked against the API; errors are reported as file:line: field."""
