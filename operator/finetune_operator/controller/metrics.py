"""What the operator says of itself to Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()
RECONCILED = Counter("finetune_reconcile", "Reconciles by outcome", ["outcome"], registry=REGISTRY)
RECONCILE_SECONDS = Histogram("finetune_reconcile_seconds", "Duration of a reconcile", registry=REGISTRY)
REQUESTS = Counter("finetune_api_requests", "Requests to the API server", ["verb", "code"], registry=REGISTRY)
WATCHES_RESTARTED = Counter("finetune_watches_restarted", "Times that watching was begun again", registry=REGISTRY)
QUEUE_DEPTH = Gauge("finetune_queue_depth", "Pipelines that wait for a free hand", registry=REGISTRY)
QUEUE_OLDEST_SECONDS = Gauge(
    "finetune_queue_oldest_seconds", "How long the first of them has waited", registry=REGISTRY
)
IS_LEADER = Gauge("finetune_leader", "1 for the replica that works", registry=REGISTRY)
PIPELINES = Gauge("finetune_pipelines", "Pipelines by phase", ["phase"], registry=REGISTRY)
