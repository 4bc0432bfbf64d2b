"""Exit codes of `finetune`; 0 is what everybody expects."""

FAILED = 1
INVALID = 2
"""Something that the user wrote."""
BELOW_GATE = 3
INTERRUPTED = 130
PIPE_CLOSED = 141
