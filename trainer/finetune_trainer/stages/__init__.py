"""The stages, one module each: `run` does the work, `is_output_valid` checks an existing result."""
