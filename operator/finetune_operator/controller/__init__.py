"""The operator's process; the decisions are elsewhere, in the pure core.

`leader` says who may write, `watches` what has changed, `queue` whose turn it is; `worker` calls `reconcile`.
`process` starts them all.
"""
