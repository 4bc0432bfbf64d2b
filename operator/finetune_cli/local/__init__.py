"""Local runs: the reconcile loop on this machine, with processes as Jobs and folders as volumes."""
