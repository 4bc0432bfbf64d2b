"""Series with which each alert of the chart fires, and series with which it must not."""

from dataclasses import dataclass

from e2e.pipelines.chart import NAMESPACE

LEADER = 'finetune_leader{job="op", instance="a", namespace="sys"}'
STANDBY = 'finetune_leader{job="op", instance="b", namespace="sys"}'
OURS = (
    f'finetune_leader{{job="ours", instance="c", namespace="{NAMESPACE}"}}',
    "1x400",
)
"""The leader of the release whose alerts these are; the other series are of an operator in another namespace."""
LEADS = (LEADER, "1x400")
READY = 'finetune_ready{{job="op", instance="{}", namespace="sys"}}'
RECONCILED = (
    'finetune_reconcile_total{{job="op", instance="a", namespace="sys", outcome="{}"}}'
)
ATTEMPTS = 'finetune_attempts_total{{job="op", instance="a", stage="{}", outcome="{}", reason="Interrupted"}}'
FINISHED = 'finetune_pipelines_finished_total{{job="op", instance="a", phase="{}"}}'
GPU = 'DCGM_FI_DEV_GPU_UTIL{{gpu="{}", namespace="gpus", pod="dcgm", exported_namespace="team", exported_pod="p"}}'
HONORED = 'DCGM_FI_DEV_GPU_UTIL{gpu="0", namespace="team", pod="p"}'
THROUGHPUT = 'finetune_stage_tokens_per_second{stage="train", namespace="team", pod="p", pipeline="demo", attempt="2"}'
TRAINS = (THROUGHPUT, "900x400")
WAITS = 'finetune_waiting_oldest_seconds{job="op", instance="a", stage="train", reason="WaitingForCapacity"}'
LOST = (
    'finetune_waiting_stages{job="op", instance="a", stage="train", reason="NodeLost"}'
)
QUEUED = 'finetune_queue_oldest_seconds{{job="op", instance="{}", namespace="sys"}}'
UNREADABLE = 'finetune_unreadable_pipelines{job="op", instance="a"}'
DOWN = 'finetune_servers_down{job="op", instance="a"}'
TRAINING = {"namespace": "team", "pod": "p", "pipeline": "demo", "attempt": "2"}
LITTLE_USE = "Training of team/demo uses little of its GPUs."


@dataclass(frozen=True)
class Case:
    """Series, and whether the alert fires some minutes after their first sample."""

    name: str
    alert: str
    series: tuple[tuple[str, str], ...]
    minutes: int
    labels: dict[str, str] | None = None
    """Of the alert that fires, without its severity; None: it does not fire."""
    summary: str = ""
    description: str = ""


CASES = (
    Case(
        "no replica leads",
        "FineTuneOperatorNotLeading",
        (OURS, (LEADER, "1x9 0x20"), (STANDBY, "0x30")),
        15,
        {"job": "op", "namespace": "sys"},
        "No replica of the operator leads.",
        "No pipeline is reconciled. Stages that run go on, and none starts.",
    ),
    Case(
        "nothing is scraped",
        "FineTuneOperatorNotLeading",
        (TRAINS,),
        15,
        {"namespace": NAMESPACE},
        "No replica of the operator leads.",
        "No pipeline is reconciled. Stages that run go on, and none starts.",
    ),
    Case(
        "another operator leads and this one is not scraped",
        "FineTuneOperatorNotLeading",
        ((LEADER, "1x400"),),
        15,
        {"namespace": NAMESPACE},
        "No replica of the operator leads.",
        "No pipeline is reconciled. Stages that run go on, and none starts.",
    ),
    Case(
        "another replica leads",
        "FineTuneOperatorNotLeading",
        (OURS, (LEADER, "1x9 0x20"), (STANDBY, "0x9 1x20")),
        15,
    ),
    Case(
        "a minute without a leader",
        "FineTuneOperatorNotLeading",
        (OURS, (LEADER, "1x9 0 1x20")),
        11,
    ),
    Case(
        "two leaders in turn and none of them is ready",
        "FineTuneOperatorNotReady",
        (
            (LEADER, "1x2 0x20"),
            (READY.format("a"), "0x2 1x20"),
            (STANDBY, "0x2 1x20"),
            (READY.format("b"), "1x2 0x20"),
        ),
        6,
        {"job": "op", "namespace": "sys"},
        "The leader of the operator is not ready.",
        "It cannot read all that it watches. Pipelines wait, and stages that run go on.",
    ),
    Case(
        "a leader lists for minutes",
        "FineTuneOperatorNotReady",
        (LEADS, (READY.format("a"), "0x3 1x20")),
        6,
    ),
    Case(
        "a standby is not ready",
        "FineTuneOperatorNotReady",
        (
            LEADS,
            (READY.format("a"), "1x20"),
            (STANDBY, "0x20"),
            (READY.format("b"), "0x20"),
        ),
        15,
    ),
    Case(
        "a bug in every attempt to reconcile a pipeline",
        "FineTuneReconcileFailing",
        ((RECONCILED.format("bug"), "0+1x60"), (RECONCILED.format("done"), "0+9x60")),
        25,
        {"job": "op", "namespace": "sys", "outcome": "bug"},
        "The operator fails to reconcile pipelines: bug.",
        "A pipeline may not go on. The operator retries it once a minute.",
    ),
    Case(
        "minutes without an API server",
        "FineTuneReconcileFailing",
        ((RECONCILED.format("error"), "0x9 50x3 99x30"),),
        22,
    ),
    Case(
        "conflicts all the time",
        "FineTuneReconcileFailing",
        ((RECONCILED.format("conflict"), "0+5x60"),),
        25,
    ),
    Case(
        "a pipeline waits for a worker",
        "FineTuneQueueStuck",
        (LEADS, (QUEUED.format("a"), "100x20")),
        6,
        {"job": "op", "namespace": "sys"},
        "A pipeline waits for a worker of the operator.",
        "The first pipeline in the work queue has waited for 1m 40s.",
    ),
    Case(
        "a short queue", "FineTuneQueueStuck", (LEADS, (QUEUED.format("a"), "20x20")), 6
    ),
    Case(
        "a queue of an earlier leader",
        "FineTuneQueueStuck",
        ((STANDBY, "0x20"), (QUEUED.format("b"), "100x20")),
        6,
    ),
    Case(
        "no node takes a pod",
        "FineTuneStageWaiting",
        (LEADS, (WAITS, "3700x20")),
        6,
        {"job": "op", "stage": "train", "reason": "WaitingForCapacity"},
        "A stage train cannot start: WaitingForCapacity.",
        "The first of these stages has waited for 1h 1m 40s.",
    ),
    Case(
        "half an hour for capacity",
        "FineTuneStageWaiting",
        (LEADS, (WAITS, "1800x20")),
        6,
    ),
    Case(
        "a wait that an earlier leader saw",
        "FineTuneStageWaiting",
        ((LEADER, "0x20"), (WAITS, "3700x20")),
        6,
    ),
    Case(
        "a node does not come back",
        "FineTuneNodeLost",
        (LEADS, (LOST, "0x4 2x20")),
        16,
        {"job": "op", "stage": "train"},
        "A stage train waits for a node that does not answer.",
        "2 of these stages go on when the Node object is deleted.",
    ),
    Case(
        "a node that comes back",
        "FineTuneNodeLost",
        (LEADS, (LOST, "0x4 1x8 0x20")),
        16,
    ),
    Case(
        "a lost node that an earlier leader saw",
        "FineTuneNodeLost",
        ((LEADER, "0x20"), (LOST, "1x20")),
        16,
    ),
    Case(
        "interruptions of two stages",
        "FineTuneInterruptionStorm",
        tuple(
            (ATTEMPTS.format(stage, "Interrupted"), "0+0.25x120")
            for stage in ("train", "evaluate")
        ),
        90,
        {"job": "op"},
        "Many attempts are interrupted.",
        "30 attempts were interrupted within an hour.",
    ),
    Case(
        "some interruptions",
        "FineTuneInterruptionStorm",
        ((ATTEMPTS.format("train", "Interrupted"), "0+0.25x120"),),
        90,
    ),
    Case(
        "many failures",
        "FineTuneInterruptionStorm",
        ((ATTEMPTS.format("train", "Failed"), "0+1x120"),),
        90,
    ),
    Case(
        "a pipeline fails",
        "FineTunePipelineFailed",
        ((FINISHED.format("Failed"), "0x60 1x60"),),
        90,
        {"job": "op"},
        "A pipeline has failed.",
        "1 pipelines have failed within an hour.",
    ),
    Case(
        "a failure two hours ago",
        "FineTunePipelineFailed",
        ((FINISHED.format("Failed"), "0x60 1x200"),),
        200,
    ),
    Case(
        "an object is malformed",
        "FineTunePipelineUnreadable",
        (LEADS, (UNREADABLE, "0x4 2x20")),
        16,
        {"job": "op"},
        "The operator cannot read a pipeline.",
        "2 pipelines are left alone until they or the operator change.",
    ),
    Case(
        "an upgrade replaces the CRD first",
        "FineTunePipelineUnreadable",
        (LEADS, (UNREADABLE, "0x4 2x8 0x20")),
        16,
    ),
    Case(
        "an object that an earlier leader saw",
        "FineTunePipelineUnreadable",
        ((LEADER, "0x20"), (UNREADABLE, "1x20")),
        16,
    ),
    Case(
        "a gate closes",
        "FineTuneGateClosed",
        ((FINISHED.format("BelowThreshold"), "0x60 2x60"),),
        90,
        {"job": "op"},
        "A model is below its gate.",
        "2 pipelines have ended below their gate within an hour.",
    ),
    Case(
        "pipelines succeed",
        "FineTuneGateClosed",
        ((FINISHED.format("Succeeded"), "0x60 2x60"),),
        90,
    ),
    Case(
        "a server is down",
        "FineTuneServerDown",
        (LEADS, (DOWN, "0x9 1x20")),
        16,
        {"job": "op"},
        "The server of a pipeline is down.",
        "1 pipelines have no ready server.",
    ),
    Case(
        "a server restarts", "FineTuneServerDown", (LEADS, (DOWN, "0x9 1x2 0x20")), 16
    ),
    Case(
        "an outage that an earlier leader saw",
        "FineTuneServerDown",
        ((LEADER, "0x30"), (DOWN, "1x30")),
        16,
    ),
    Case(
        "one of two GPUs is idle",
        "FineTuneGpuIdle",
        (TRAINS, (GPU.format(0), "90x30"), (GPU.format(1), "20x30")),
        15,
        TRAINING,
        LITTLE_USE,
        "The GPUs of pod p are used to 55 %.",
    ),
    Case(
        "an exporter whose labels are honored",
        "FineTuneGpuIdle",
        (TRAINS, (HONORED, "40x30")),
        15,
        TRAINING,
        LITTLE_USE,
        "The GPUs of pod p are used to 40 %.",
    ),
    Case("busy GPUs", "FineTuneGpuIdle", (TRAINS, (GPU.format(0), "75x30")), 15),
    Case(
        "a short pause",
        "FineTuneGpuIdle",
        (TRAINS, (GPU.format(0), "75x9 0x4 75x20")),
        18,
    ),
    Case(
        "an idle GPU without training",
        "FineTuneGpuIdle",
        ((GPU.format(0), "0x30"),),
        15,
    ),
)
