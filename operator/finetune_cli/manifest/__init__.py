"""The manifest: YAML with positions, checked against the API, every problem reported as file:line: field."""
