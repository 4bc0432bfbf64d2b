"""The operator's own Prometheus metrics."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()
RECONCILED = Counter(
    "finetune_reconcile",
    "Reconciles of pipelines, by outcome: done, conflict, error, refused (invalid object) or bug",
    ["outcome"],
    registry=REGISTRY,
)
RECONCILE_SECONDS = Histogram(
    "finetune_reconcile_seconds", "Duration of one reconcile of one pipeline, in seconds", registry=REGISTRY
)
REQUESTS = Counter(
    "finetune_api_requests",
    "Requests to the API server, by HTTP verb and status code (0: no response)",
    ["verb", "code"],
    registry=REGISTRY,
)
WATCHES_RESTARTED = Counter(
    "finetune_watches_restarted", "Restarts of the watches after they ended or failed", registry=REGISTRY
)
QUEUE_DEPTH = Gauge(
    "finetune_queue_depth", "Pipelines in the work queue that wait for a free worker", registry=REGISTRY
)
QUEUE_OLDEST_SECONDS = Gauge(
    "finetune_queue_oldest_seconds",
    "How long the first pipeline in the work queue has waited for a worker, in seconds",
    registry=REGISTRY,
)
IS_LEADER = Gauge("finetune_leader", "1 if this replica is the leader, else 0", registry=REGISTRY)
PIPELINES = Gauge(
    "finetune_pipelines", "Pipelines in the cache of this replica, by phase", ["phase"], registry=REGISTRY
)
