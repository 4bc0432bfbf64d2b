"""Exit codes of `finetune`. Success is 0. Nothing is imported here: completion in a shell has no time for it."""

FAILED = 1
INVALID = 2
"""Wrong arguments or an invalid manifest."""
BELOW_GATE = 3
"""The pipeline has finished, and its score is below the gate's threshold."""
INTERRUPTED = 130
"""128 + SIGINT, as in a shell."""
PIPE_CLOSED = 141
"""128 + SIGPIPE, as in a shell: the process that read stdout has closed it."""

SUCCEEDED = "Succeeded"
DONE = (SUCCEEDED, "BelowThreshold")
"""Phases of a pipeline that has finished without a failure."""
