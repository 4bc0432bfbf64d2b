"""The command line: `finetune`, and the same program as the kubectl plugin `kubectl-finetune`."""
