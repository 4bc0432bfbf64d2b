"""The FineTunePipeline operator."""
