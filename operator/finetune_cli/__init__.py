"""The command line `finetune`. The kubectl plugin `kubectl-finetune` is the same program."""
