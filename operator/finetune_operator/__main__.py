"""Entry point of the operator in a cluster: `python -m finetune_operator`."""

import argparse
import asyncio
import os
import resource
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from finetune_operator.api.defaults import Defaults
from finetune_operator.api.placement import PlacementDefaults
from finetune_operator.api.stages.pod import PodDefaults
from finetune_operator.controller.kopf_watch import silence_kopf_log
from finetune_operator.controller.logging_format import FORMATS, LEVELS, TEXT, configure
from finetune_operator.controller.manager import Options, run
from finetune_operator.core.settings import VLLM_IMAGE, Settings
from finetune_operator.errors import ClusterError
from finetune_operator.kubernetes.translate.api_errors import describe_first_error
from finetune_trainer.contract.environment import CLOUDS

M = TypeVar("M", bound=BaseModel)

POLL_SECONDS = 30.0
"""Interval between two reconciles of a pipeline with a running attempt, for what no event tells: a node may be lost."""
WRITE_DELAY_SECONDS = 2.0
"""Age at which a running attempt is worth a write of the status. A shorter attempt is written only when it ends."""
RECURSION_LIMIT = 25_000
"""Python's recursion limit while the operator runs.

An API server accepts JSON 10,000 levels deep, and one such object may be in any list. Decoding takes one call a level,
copying it (kopf does) takes two. More than 40,000 calls do not fit on a stack of 8 MiB.
"""


def main(arguments: list[str]) -> int:
    """Run until SIGTERM or SIGINT; return 1 if no API server can be used."""
    # Before anything is read: the first list may have an object that deep.
    sys.setrecursionlimit(RECURSION_LIMIT)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # There may be a connection to each pod whose progress is read.
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    chosen = _parser().parse_args(arguments)
    configure(chosen.log_level, chosen.log_format)
    # The watch logs each failure of kopf in a line of its own.
    silence_kopf_log()
    options = _options(chosen)
    try:
        asyncio.run(run(options))
    except ClusterError as error:
        print(f"finetune-operator: {error}", file=sys.stderr)
        return 1
    return 0


def _options(chosen: argparse.Namespace) -> Options:
    settings = Settings(
        placement_defaults=chosen.placement,
        defaults=chosen.defaults,
        job_defaults=chosen.job_metadata,
        trainer_image=chosen.trainer_image,
        trainer_cpu_image=chosen.trainer_cpu_image,
        engine_images={"VLLM": chosen.vllm_image},
        sets_user=chosen.set_user == "true",
        grace_period=timedelta(seconds=chosen.grace_seconds),
        poll_interval=timedelta(seconds=POLL_SECONDS),
        write_delay=timedelta(seconds=WRITE_DELAY_SECONDS),
        job_history=chosen.job_history,
        replace_lost_after=_time_or_never(chosen.replace_lost_after),
        troubleshooting_url=chosen.troubleshooting_url,
    )
    return Options(
        identity=chosen.identity,
        lease_namespace=chosen.lease_namespace,
        lease_name=chosen.lease_name,
        namespaces=tuple(chosen.namespace),
        scope_leases=chosen.scope_leases == "true",
        port=chosen.port,
        workers=chosen.workers,
        qps=chosen.qps,
        burst=chosen.burst,
        settings=settings,
        metadata_notices=chosen.metadata_notices,
        # A text: the chart writes its boolean value into the argument.
        node_notices=chosen.node_notices == "true",
        prices=chosen.prices,
    )


def _time_or_never(seconds: int) -> timedelta | None:
    return timedelta(seconds=seconds) if seconds else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m finetune_operator", description=__doc__
    )
    _add_images(parser)
    parser.add_argument(
        "--namespace",
        action="append",
        default=[],
        help="watch only this namespace; repeatable (default: all)",
    )
    _add_leases(parser)
    parser.add_argument(
        "--port",
        type=int,
        default=8080,
        help="port of /livez, /readyz and /metrics; 0 disables (default: %(default)s)",
    )
    _add_placement(parser)
    _add_pods(parser)
    parser.add_argument(
        "--troubleshooting-url",
        default=Settings.troubleshooting_url,
        help="address of your copy of docs/guides/troubleshooting.md, for messages (default: %(default)s)",
    )
    _add_notices(parser)
    _add_limits(parser)
    return parser


def _add_images(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trainer-image",
        default=os.environ.get("TRAINER_IMAGE", Settings.trainer_image),
        help="image of stages with accelerators that name none (default: $TRAINER_IMAGE)",
    )
    parser.add_argument(
        "--trainer-cpu-image",
        default=os.environ.get("TRAINER_CPU_IMAGE", Settings.trainer_cpu_image),
        help="image of stages without accelerators that name none (default: $TRAINER_CPU_IMAGE)",
    )
    parser.add_argument(
        "--vllm-image",
        default=VLLM_IMAGE,
        help="image of servers whose engine is VLLM (default: %(default)s)",
    )


def _add_leases(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lease-namespace",
        default=os.environ.get("POD_NAMESPACE", "default"),
        help="namespace of the Lease for leader election (default: $POD_NAMESPACE)",
    )
    parser.add_argument(
        "--lease-name",
        default="finetune-operator",
        help="name of that Lease (default: %(default)s)",
    )
    parser.add_argument(
        "--scope-leases",
        choices=("true", "false"),
        default="false",
        help="whether to start nothing while another release reconciles the same namespaces (default: %(default)s)",
    )
    parser.add_argument(
        "--identity",
        default=os.environ.get("POD_NAME", socket.gethostname()),
        help="name of this replica in the Lease (default: $POD_NAME, else the host name)",
    )


def _add_pods(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--grace-seconds",
        type=int,
        default=30,
        help="time from SIGTERM to SIGKILL for a pod (default: %(default)s)",
    )
    parser.add_argument(
        "--replace-lost-after",
        type=int,
        default=0,
        help="seconds after which an attempt on a lost node is replaced, if its old process can publish nothing; "
        "needs the right to delete pods; 0: never (default: %(default)s)",
    )
    parser.add_argument(
        "--set-user",
        choices=("true", "false"),
        default="true",
        help="whether pods run as user and group 65532; else as the cluster decides (default: %(default)s)",
    )


def _add_notices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--metadata-notices",
        choices=("", *CLOUDS),
        default="",
        help="cloud whose metadata endpoint training processes watch, to save before their node ends (default: none)",
    )
    parser.add_argument(
        "--node-notices",
        choices=("true", "false"),
        default="true",
        help="whether to watch nodes for taints that announce their end (default: %(default)s)",
    )


def _add_placement(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--defaults",
        type=_chart_value(Defaults, "defaults"),
        default="{}",
        help="JSON object: podDefaults and workspace of all pipelines, below a namespace's own (default: %(default)s)",
    )
    parser.add_argument(
        "--job-metadata",
        type=_chart_value(PodDefaults, "jobMetadata"),
        default="{}",
        help="JSON object: labels and annotations of pods of stages that end, below all others (default: %(default)s)",
    )
    parser.add_argument(
        "--placement",
        type=_chart_value(PlacementDefaults, "placement"),
        default="{}",
        help="JSON object: preset, pools, node classes and prices, as in the chart's values (default: %(default)s)",
    )
    parser.add_argument(
        "--prices",
        type=Path,
        metavar="FOLDER",
        help="folder of prices.yaml or prices.json, which is read again when it changes (default: none)",
    )


def _chart_value(model: type[M], name: str) -> Callable[[str], M]:
    """Return the parser of an option that the chart writes as JSON from one of its values."""

    def parse(text: str) -> M:
        try:
            return model.model_validate_json(text)
        except ValidationError as error:
            fix = f"correct `{name}` in the values of the chart"
            raise argparse.ArgumentTypeError(
                f"{describe_first_error(error, observed=True)}: {fix}"
            ) from error

    return parse


def _add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers",
        type=int,
        default=Options.workers,
        help="pipelines reconciled concurrently (default: %(default)s)",
    )
    parser.add_argument(
        "--qps",
        type=float,
        default=Options.qps,
        help="requests to the API server per second (default: %(default)g)",
    )
    parser.add_argument(
        "--burst",
        type=float,
        default=Options.burst,
        help="requests before that limit applies (default: %(default)g)",
    )
    parser.add_argument(
        "--job-history",
        type=int,
        default=Settings.job_history,
        help="ended Jobs kept of each stage; a finished pipeline keeps one at most (default: %(default)s)",
    )
    parser.add_argument(
        "--log-level",
        choices=LEVELS,
        default="info",
        help="lowest level logged (default: %(default)s)",
    )
    parser.add_argument(
        "--log-format",
        choices=FORMATS,
        default=TEXT,
        help="format of the log (default: %(default)s)",
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
