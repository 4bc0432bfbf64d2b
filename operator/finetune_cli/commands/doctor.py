"""`finetune doctor`: look at this machine and at the cluster, and print what is missing with its fix."""

import argparse
import asyncio
import importlib
import json
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from finetune_cli.arguments import CLIENT_PACKAGES, add_cluster_arguments
from finetune_cli.checks.extras import is_installed
from finetune_cli.commands import Commands
from finetune_cli.exit_codes import FAILED
from finetune_cli.local.machine import MachineCheck, Verdict, machine_findings

DESCRIPTION = """\
Look at Python, the packages, GPU and driver, memory, disk and the hub's settings on this machine, and at the cluster of
the kubeconfig: whether it answers, has the CRD, and lets you create pipelines. Each line that is not ok has the fix. A
cluster is needed for pipelines on a cluster only, so it is an error only with --context or -n. Exit code: 0, or 1 if
there is an error.
"""


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "doctor",
        help="look at this machine and the cluster, and say what is missing",
        description=DESCRIPTION,
    )
    add_cluster_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print one line for each finding; return FAILED if one is an error."""
    findings = []
    for finding in _findings(arguments):
        findings.append(finding)
        if not arguments.json:
            # At once: the checks of PyTorch and of the cluster take seconds.
            print(
                f"{finding.verdict:<5}  {finding.subject:<8}  {finding.message}",
                flush=True,
            )
    if arguments.json:
        print(
            json.dumps({"findings": [vars(finding) for finding in findings]}, indent=1)
        )
    is_broken = any(finding.verdict is Verdict.ERROR for finding in findings)
    return FAILED if is_broken else 0


def _findings(arguments: argparse.Namespace) -> Iterator[MachineCheck]:
    yield MachineCheck(Verdict.OK, "finetune", version("finetune-operator"))
    yield from machine_findings(Path(), os.environ)
    is_asked = bool(arguments.context or arguments.namespace)
    problem = Verdict.ERROR if is_asked else Verdict.NOTE
    missing = [package for package in CLIENT_PACKAGES if not is_installed(package)]
    if missing:
        text = "the client library is not installed: pip install 'finetune-operator[operator]'"
        yield MachineCheck(problem, "cluster", text)
        return
    # Imported only here: the client takes longer to import than most commands take.
    cluster = importlib.import_module("finetune_cli.cluster.doctor")
    yield asyncio.run(cluster.finding(arguments, problem))
