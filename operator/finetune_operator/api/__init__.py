"""The custom resource: its spec, its status, its words."""
