"""The states of a pipeline, and how kubectl, Flux, Argo CD and `finetune wait` show each.

This table is the only source of the examples in deploy/argocd and of the table in docs/reference/conditions.md.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from support.operator.pipeline_objects import Object, stored_object
from support.operator.scenario import START, Scenario, a_pipeline, merged, scores

from finetune_operator.api.conditions import READY, TROUBLESHOOTING_URL, Reason
from finetune_operator.api.group import CANCEL_ANNOTATION, RETRY_ANNOTATION
from finetune_operator.core.observation import Blocker
from finetune_operator.core.report import unreadable_status

IN_PROGRESS = "InProgress"
CURRENT = "Current"
FAILED = "Failed"
PROGRESSING = "Progressing"
SUSPENDED = "Suspended"
HEALTHY = "Healthy"
DEGRADED = "Degraded"
VERSION = "0123456789abcdef"
RUNNING = ("cancel", "suspend")


@dataclass(frozen=True)
class PipelineState:
    """A state, an example of it, and how programs show it."""

    build: Callable[[], Scenario | Object]
    kstatus: str
    health: str
    """Of Argo CD."""
    actions: tuple[str, ...] = ()
    """That Argo CD offers, sorted."""
    message: str = ""
    """Of Argo CD; empty: reason and message of the condition Ready."""

    def object(self) -> Object:
        """Return the example as the API server stores it."""
        built = self.build()
        stored = stored_object(built) if isinstance(built, Scenario) else built
        if "observedVersion" in stored["status"]:
            # The hash of the code would change the examples with each edit of the API.
            stored["status"]["observedVersion"] = VERSION
        return stored

    def health_message(self) -> str:
        """Return the message that Argo CD shows."""
        if self.message:
            return self.message
        conditions = self.object()["status"]["conditions"]
        [ready] = [condition for condition in conditions if condition["type"] == READY]
        return f"{ready['reason']}: {ready['message']}"


def _waiting(reason: Reason, message: str) -> Callable[[], Scenario]:
    def build() -> Scenario:
        scenario = Scenario().reconcile_until_stable()
        scenario.cluster.update_job(
            scenario.attempt("prepare").job, blocker=Blocker(reason, message)
        )
        return scenario.reconcile_until_stable()

    return build


def _running() -> Scenario:
    scenario = Scenario()
    scenario.start("prepare")
    return scenario


def _between_attempts() -> Scenario:
    scenario = Scenario().run("prepare")
    scenario.cluster.evict(scenario.start("train"))
    scenario.reconcile_until_stable()
    scenario.cluster.evict(scenario.start("train"))
    return scenario.reconcile_until_stable()


def _failed() -> Scenario:
    scenario = Scenario()
    scenario.cluster.fail(
        scenario.start("prepare"), 65, "line 3 of train.jsonl is not JSON"
    )
    return scenario.reconcile_until_stable()


def _unmeasured() -> Scenario:
    """Return a pipeline whose evaluate has a result, which a retry keeps, without the metric of its gate."""
    gate = {"task": "exam", "metric": "f1", "value": 0.6}
    return Scenario(a_pipeline(evaluate={"gates": [gate]})).finish()


def _stopping(scenario: Scenario) -> Scenario:
    scenario.cluster.evict(scenario.attempt("prepare").job, disruption=None)
    return scenario.reconcile_until_stable()


def _asked(scenario: Scenario, annotation: str) -> Scenario:
    scenario.cluster.annotate(scenario.key, annotation, "2030-01-01T00:05:00Z")
    return scenario


def _edited() -> Scenario:
    scenario = Scenario().finish()
    scenario.cluster.edit(scenario.key, a_pipeline(seed=7))
    return scenario


def _serving() -> Scenario:
    scenario = Scenario().run_before("deploy")
    scenario.start("deploy")
    return scenario.complete("deploy", long_running=True)


def _server_down() -> Scenario:
    scenario = _serving()
    down = Blocker(Reason.SERVER_NOT_READY, "the server's pod is not ready")
    job = scenario.attempt("deploy").job
    scenario.cluster.servers[job] = replace(scenario.cluster.servers[job], problem=down)
    return scenario.reconcile_until_stable()


def _unreadable(message: str, *, stalled: bool) -> Object:
    pipeline = stored_object(_running())
    status = unreadable_status(
        message,
        pipeline["metadata"]["generation"],
        START,
        TROUBLESHOOTING_URL,
        stalled=stalled,
    )
    return merged(pipeline, {"status": status})


def _suspended() -> Scenario:
    return _stopping(_running().edit(suspend=True))


UNREAD = "the operator has not read this generation yet"

STATES: dict[str, PipelineState] = {
    "new": PipelineState(Scenario, IN_PROGRESS, PROGRESSING, RUNNING, UNREAD),
    "queued": PipelineState(
        lambda: Scenario().reconcile_until_stable(), IN_PROGRESS, PROGRESSING, RUNNING
    ),
    "waiting for capacity": PipelineState(
        _waiting(
            Reason.WAITING_FOR_CAPACITY,
            "0/3 nodes are available: 3 Insufficient nvidia.com/gpu",
        ),
        IN_PROGRESS,
        PROGRESSING,
        RUNNING,
    ),
    "waiting for a Secret": PipelineState(
        _waiting(Reason.SECRET_NOT_FOUND, 'secret "hub" not found'),
        IN_PROGRESS,
        PROGRESSING,
        RUNNING,
    ),
    "waiting for an image": PipelineState(
        _waiting(Reason.IMAGE_PULL_FAILED, "trainer:none: not found"),
        IN_PROGRESS,
        PROGRESSING,
        RUNNING,
    ),
    "waiting for quota": PipelineState(
        _waiting(Reason.WAITING_FOR_QUOTA, "exceeded quota: gpus"),
        IN_PROGRESS,
        PROGRESSING,
        RUNNING,
    ),
    "running": PipelineState(_running, IN_PROGRESS, PROGRESSING, RUNNING),
    "between two attempts": PipelineState(
        _between_attempts, IN_PROGRESS, PROGRESSING, ("cancel", "retry", "suspend")
    ),
    "edited": PipelineState(_edited, IN_PROGRESS, PROGRESSING, RUNNING, UNREAD),
    "being suspended": PipelineState(
        lambda: _running().edit(suspend=True),
        IN_PROGRESS,
        PROGRESSING,
        ("cancel", "resume"),
    ),
    "suspended": PipelineState(
        _suspended, IN_PROGRESS, SUSPENDED, ("cancel", "resume")
    ),
    "asked to cancel": PipelineState(
        lambda: _asked(_running(), CANCEL_ANNOTATION),
        IN_PROGRESS,
        PROGRESSING,
        (),
        "cancel was requested",
    ),
    "being cancelled": PipelineState(
        lambda: _running().cancel("now"), IN_PROGRESS, PROGRESSING
    ),
    "suspended while being cancelled": PipelineState(
        lambda: _running().cancel("now").edit(suspend=True), IN_PROGRESS, PROGRESSING
    ),
    "cancelled while being suspended": PipelineState(
        lambda: _running().edit(suspend=True).cancel("now"), IN_PROGRESS, PROGRESSING
    ),
    "asked to retry while being cancelled": PipelineState(
        lambda: _asked(_running().cancel("now"), RETRY_ANNOTATION),
        IN_PROGRESS,
        PROGRESSING,
        RUNNING,
        "retry was requested",
    ),
    "cancelled": PipelineState(
        lambda: _stopping(_running().cancel("now")), FAILED, DEGRADED, ("retry",)
    ),
    "failed": PipelineState(_failed, FAILED, DEGRADED, ("retry",)),
    "asked to retry": PipelineState(
        lambda: _asked(_failed(), RETRY_ANNOTATION),
        FAILED,
        PROGRESSING,
        (),
        "retry was requested",
    ),
    "with a gate that was not measured": PipelineState(_unmeasured, FAILED, DEGRADED),
    "below its gate": PipelineState(
        lambda: Scenario().finish(evaluate=scores(0.1)), FAILED, DEGRADED
    ),
    "below a gate that no stage needs": PipelineState(
        lambda: Scenario(a_pipeline(deploy={"when": "Always"})).finish(
            evaluate=scores(0.1)
        ),
        FAILED,
        DEGRADED,
    ),
    "succeeded": PipelineState(lambda: Scenario().finish(), CURRENT, HEALTHY),
    "suspended after its end": PipelineState(
        lambda: Scenario().finish().edit(suspend=True), CURRENT, HEALTHY
    ),
    "serving": PipelineState(_serving, CURRENT, HEALTHY),
    "with a server that is down": PipelineState(_server_down, IN_PROGRESS, DEGRADED),
    "of a newer CRD": PipelineState(
        lambda: _unreadable(
            "train.compileMode: Extra inputs are not permitted", stalled=False
        ),
        IN_PROGRESS,
        PROGRESSING,
    ),
    "unreadable": PipelineState(
        lambda: _unreadable(
            "train.lora.rank: Input should be greater than or equal to 1", stalled=True
        ),
        FAILED,
        DEGRADED,
    ),
}
"""By name, in the order of a pipeline's life."""
