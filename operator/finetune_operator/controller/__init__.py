"""The process that runs the operator in a cluster. It decides nothing: the decisions are in `core`, which is pure.

`leader_election` decides which replica may write, `informers` notice changes, and `workqueue` orders the pipelines to
reconcile. A `worker` calls `reconcile`. `manager` starts them all.
"""
