"""The stages, one module each: `run` does the work, `still_holds` checks a result that is there."""
