"""The FineTunePipeline custom resource: its spec, status, conditions and annotations."""
