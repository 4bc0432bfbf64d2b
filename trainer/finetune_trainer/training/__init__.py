"""The parts of the train stage: which rows, which model, which step, what is kept."""
