"""Entry point of the operator in a cluster: `python -m finetune_operator`."""

import argparse
import asyncio
import logging
import os
import socket
import sys
from datetime import timedelta

from finetune_operator.api.placement import PlacementDefaults
from finetune_operator.controller.manager import Options, run
from finetune_operator.core.settings import VLLM_IMAGE, Settings
from finetune_operator.errors import ClusterError

PROGRESS_POLL_SECONDS = 15.0
"""Interval between two reconciles of a pipeline with a running attempt; each polls the pod for its progress."""
RECURSION_LIMIT = 25_000
"""Python's recursion limit while the operator runs.

An API server accepts JSON 10,000 levels deep, and one such object may be in any list. Decoding takes one call a level,
copying it (kopf does) takes two. More than 40,000 calls do not fit on a stack of 8 MiB.
"""


def main(arguments: list[str]) -> int:
    """Run until SIGTERM or SIGINT; return 1 if no API server can be used."""
    sys.setrecursionlimit(RECURSION_LIMIT)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("kopf").setLevel(logging.CRITICAL)  # `controller.informers` logs its failures in one line each
    options = _options(arguments)
    try:
        asyncio.run(run(options))
    except ClusterError as error:
        print(f"finetune-operator: {error}", file=sys.stderr)
        return 1
    return 0


def _options(arguments: list[str]) -> Options:
    chosen = _parser().parse_args(arguments)
    settings = Settings(
        placement_defaults=PlacementDefaults.model_validate_json(chosen.placement),
        trainer_image=chosen.trainer_image,
        engine_images={"vllm": chosen.vllm_image},
        grace_period=timedelta(seconds=chosen.grace_seconds),
        poll_interval=timedelta(seconds=PROGRESS_POLL_SECONDS),
    )
    return Options(
        identity=chosen.identity,
        lease_namespace=chosen.lease_namespace,
        lease_name=chosen.lease_name,
        namespaces=tuple(chosen.namespace),
        port=chosen.port,
        workers=chosen.workers,
        settings=settings,
    )


def _parser() -> argparse.ArgumentParser:
    variables = os.environ
    parser = argparse.ArgumentParser(prog="python -m finetune_operator", description=__doc__)
    parser.add_argument(
        "--trainer-image",
        default=variables.get("TRAINER_IMAGE", Settings.trainer_image),
        help="image of stages that name none (default: $TRAINER_IMAGE)",
    )
    parser.add_argument(
        "--namespace", action="append", default=[], help="watch only this namespace; repeatable (default: all)"
    )
    parser.add_argument(
        "--lease-namespace",
        default=variables.get("POD_NAMESPACE", "default"),
        help="namespace of the Lease for leader election (default: $POD_NAMESPACE)",
    )
    parser.add_argument("--lease-name", default="finetune-operator", help="name of that Lease (default: %(default)s)")
    parser.add_argument(
        "--identity",
        default=variables.get("POD_NAME", socket.gethostname()),
        help="name of this replica in the Lease (default: $POD_NAME, else the host name)",
    )
    parser.add_argument(
        "--port", type=int, default=8080, help="port of /livez, /readyz and /metrics; 0 disables (default: %(default)s)"
    )
    parser.add_argument(
        "--placement",
        default="{}",
        help="JSON object: node selectors and tolerations of pools, onDemand and spot (default: %(default)s)",
    )
    parser.add_argument(
        "--vllm-image", default=VLLM_IMAGE, help="image of servers whose engine is vllm (default: %(default)s)"
    )
    parser.add_argument(
        "--grace-seconds", type=int, default=30, help="time from SIGTERM to SIGKILL for a pod (default: %(default)s)"
    )
    parser.add_argument(
        "--workers", type=int, default=10, help="pipelines reconciled concurrently (default: %(default)s)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
