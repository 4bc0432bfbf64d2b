"""The stages, one module each: `run` executes the stage, `is_output_valid` checks the output of an earlier run."""
