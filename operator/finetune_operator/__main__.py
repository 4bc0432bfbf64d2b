"""`python -m finetune_operator`: the operator's process in a cluster."""

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
"""Between two looks at a pipeline with running work: how often its progress is asked for."""
RECURSION_LIMIT = 25_000
"""An API server takes JSON 10,000 levels deep, and lists it among everybody's: reading it costs one call a level, and
copying it, as kopf does, two. More than 40,000 do not fit on a stack of 8 MiB."""


def main(arguments: list[str]) -> int:
    """Run until told to stop; 1 where there is no cluster to speak of."""
    sys.setrecursionlimit(RECURSION_LIMIT)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("kopf").setLevel(logging.CRITICAL)  # `watches` says it in one line
    options = _options(arguments)
    try:
        asyncio.run(run(options))
    except ClusterError as error:
        print(f"finetune-operator: {error}", file=sys.stderr)
        return 1
    return 0


def _options(arguments: list[str]) -> Options:
    given = os.environ
    parser = argparse.ArgumentParser(prog="python -m finetune_operator", description=__doc__)
    parser.add_argument("--trainer-image", default=given.get("TRAINER_IMAGE", Settings.trainer_image))
    parser.add_argument("--namespace", action="append", default=[], help="look after this one only; may be repeated")
    parser.add_argument("--lease-namespace", default=given.get("POD_NAMESPACE", "default"))
    parser.add_argument("--lease-name", default="finetune-operator")
    parser.add_argument("--identity", default=given.get("POD_NAME", socket.gethostname()))
    parser.add_argument("--port", type=int, default=8080, help="/livez, /readyz, /metrics; 0: none")
    parser.add_argument(
        "--placement", default="{}", help="JSON: pools, onDemand and spot, with nodeSelector, tolerations"
    )
    parser.add_argument("--vllm-image", default=VLLM_IMAGE, help="of a server whose engine is vllm")
    parser.add_argument("--grace-seconds", type=int, default=30, help="from SIGTERM to SIGKILL")
    parser.add_argument("--workers", type=int, default=10)
    chosen = parser.parse_args(arguments)
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
