"""The names of `import finetune`: models of the API, pipelines, runs and errors."""

import argparse
from pathlib import Path

from finetune.local_run import LocalPipelineRun
from finetune.pipeline import CLUSTER, Pipeline
from finetune.run import Comparison, PipelineRun, RunFailed
from finetune_cli.arguments import client_module, find_workdir, targets_cluster
from finetune_cli.diagnostics import InvalidManifest, UsageError
from finetune_cli.output.forecast_lines import PlanReport
from finetune_operator.api.datasets import Dataset, ValidationSet
from finetune_operator.api.gates import Gate
from finetune_operator.api.spec import PipelineSpec, Workspace
from finetune_operator.api.stages.deploy import Deploy
from finetune_operator.api.stages.evaluate import Evaluate
from finetune_operator.api.stages.prepare import Prepare
from finetune_operator.api.stages.push import Push
from finetune_operator.api.stages.train import Train
from finetune_operator.errors import ClusterError
from finetune_trainer.contract import (
    Lora,
    ModelSource,
    Optimizer,
    PushTarget,
    Task,
    Tracking,
)

__all__ = [
    "ClusterError",
    "Comparison",
    "Dataset",
    "Deploy",
    "Evaluate",
    "Gate",
    "InvalidManifest",
    "Lora",
    "ModelSource",
    "Optimizer",
    "Pipeline",
    "PipelineRun",
    "PipelineSpec",
    "PlanReport",
    "Prepare",
    "Push",
    "PushTarget",
    "RunFailed",
    "Task",
    "Tracking",
    "Train",
    "UsageError",
    "ValidationSet",
    "Workspace",
    "get",
]


def get(
    name: str,
    *,
    workdir: Path | None = None,
    context: str | None = None,
    namespace: str | None = None,
) -> PipelineRun:
    """Return a run of this machine by its name or manifest, or a pipeline of a cluster, as `finetune get` selects it.

    Raises UsageError if there is none.
    """
    selection = argparse.Namespace(
        workdir=workdir, context=context, namespace=namespace
    )
    if not targets_cluster(name, selection):
        return LocalPipelineRun(find_workdir(name, workdir))
    run: PipelineRun = client_module(CLUSTER).ClusterPipelineRun(
        name, context, namespace
    )
    # The error of a name that does not exist comes now, and not later.
    run.state()
    return run
