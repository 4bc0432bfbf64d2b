"""`python -m testcluster VERB`: create, change and delete a Kubernetes cluster on this machine."""

from __future__ import annotations

import argparse
import re
import signal
import sys
import time
from collections.abc import Callable
from typing import get_args

from testcluster import binaries, providers
from testcluster.cluster_report import report
from testcluster.errors import TimedOut, UsageError
from testcluster.linux_namespaces.programs import NEEDED
from testcluster.nodes import parse
from testcluster.provider import ClusterSpec, Pressure
from testcluster.reclaim import Notice, reclaim

Verb = Callable[[argparse.Namespace], None]


def main() -> int:
    """Run one verb and return its exit code: 0 done, 1 failed or not reached in time, 2 refused, 130 interrupted."""
    arguments = _parser().parse_args()
    # A shell starts background jobs with SIGINT ignored, but `up` needs it to undo what it started.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        arguments.verb(arguments)
    except UsageError as problem:
        return _fail(problem, 2)
    except PermissionError as problem:
        return _fail(
            f"{problem}; run the command as the user who created the cluster, or with sudo",
            2,
        )
    except (TimedOut, OSError) as problem:
        return _fail(problem, 1)
    except KeyboardInterrupt:
        return 130
    return 0


def _fail(problem: Exception | str, exit_code: int) -> int:
    print(f"cluster: {problem}", file=sys.stderr)
    return exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m testcluster", description=__doc__)
    parser.add_argument(
        "--name", default="dev", help="name of the cluster (default: dev)"
    )
    parser.add_argument(
        "--provider",
        choices=sorted(providers.PROVIDERS),
        help="default for a new cluster: kind where a Docker engine answers, else linux-namespaces",
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    _add_up_options(
        _add_verb(
            verbs, "up", up, "create a cluster and wait until its nodes are Ready"
        )
    )
    _add_verb(verbs, "down", down, "delete a cluster, whatever state it is in")
    _add_verb(
        verbs, "status", status, "print the state of a cluster and the KUBECONFIG line"
    )
    _add_verb(verbs, "build", build, "build the programs of a cluster and cache them")
    _add_images(_add_verb(verbs, "load", load, "load images onto every node"))
    reclaiming = _add_node(
        _add_verb(
            verbs,
            "reclaim",
            reclaim_node,
            "give notice, then delete the node, as a cloud does",
        )
    )
    reclaiming.add_argument(
        "--notice",
        type=duration,
        default=30.0,
        help="notice period, as in 30s (default) or 2m",
    )
    reclaiming.add_argument(
        "--by", choices=get_args(Notice), default="taint", help="how pods are notified"
    )
    nodes = verbs.add_parser(
        "node",
        help="add, kill, revive, delete, pause, resume, partition, heal, pressure, clear-pressure",
    )
    _add_node_verbs(nodes.add_subparsers(required=True, metavar="VERB"))
    return parser


def _add_verb(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Verb,
    summary: str,
) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=summary, description=summary)
    parser.set_defaults(verb=run)
    return parser


def _add_up_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nodes",
        default="ondemand,spot:2",
        help="classes and counts, as in ondemand,spot:3,gpu:1",
    )
    parser.add_argument(
        "--kwok", type=count, default=0, metavar="N", help="number of KWOK nodes to add"
    )
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        help="image to load onto every node; repeatable",
    )
    parser.add_argument(
        "--node-image", help="kind only: the image of a node, for example a local one"
    )


def _add_images(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "images",
        nargs="+",
        metavar="IMAGE",
        help="a name that docker or buildah knows, or a .tar",
    )


def _add_node(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("node", metavar="NODE")
    return parser


def _add_node_verbs(verbs: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    adding = _add_verb(verbs, "add", add, "create more nodes")
    adding.add_argument("classes", metavar="CLASSES", help="as in spot:2")
    summaries = {
        "kill": "power a node off; its Node object stays",
        "revive": "power a node on",
        "delete": "kill a node and delete its Node object",
        "pause": "freeze every process of a node",
        "resume": "thaw a paused node",
        "partition": "disconnect a node from the network",
        "heal": "connect a partitioned node again",
        "clear-pressure": "restore the default eviction thresholds",
    }
    for verb, summary in summaries.items():
        _add_node(_add_verb(verbs, verb, _node_verb(verb), summary))
    pressing = _add_node(
        _add_verb(verbs, "pressure", pressure, "make the kubelet detect a shortage")
    )
    pressing.add_argument("of", choices=get_args(Pressure))


def count(text: str) -> int:
    """Parse a number of KWOK nodes."""
    if not re.fullmatch(r"\d{1,4}", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of nodes; write 0 to 9999"
        )
    return int(text)


def duration(text: str) -> float:
    """Parse 30s, 2m or 30 into seconds."""
    match = re.fullmatch(r"(\d{1,5}(?:\.\d+)?)(s|m)?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration; write 30s or 2m")
    return float(match[1]) * (60 if match[2] == "m" else 1)


def up(arguments: argparse.Namespace) -> None:
    """Create a cluster."""
    nodes = parse(arguments.nodes)
    cluster = providers.choose(
        arguments.name, arguments.provider, node_image=arguments.node_image
    )
    started = time.monotonic()
    cluster.up(ClusterSpec(nodes, arguments.kwok, arguments.image))
    print(f"{len(nodes)} nodes Ready in {time.monotonic() - started:.1f} s")
    print(report(cluster))


def down(arguments: argparse.Namespace) -> None:
    """Delete a cluster."""
    for cluster in providers.existing(arguments.name, arguments.provider):
        cluster.down()


def status(arguments: argparse.Namespace) -> None:
    """Print the state of a cluster."""
    print(report(providers.find(arguments.name, arguments.provider)))


def build(_: argparse.Namespace) -> None:
    """Build all programs and print their folder."""
    print(binaries.build_missing(NEEDED))


def load(arguments: argparse.Namespace) -> None:
    """Load images onto every node."""
    providers.find(arguments.name, arguments.provider).load(arguments.images)


def add(arguments: argparse.Namespace) -> None:
    """Create more nodes."""
    cluster = providers.find(arguments.name, arguments.provider)
    for node in parse(
        arguments.classes, frozenset(existing.name for existing in cluster.nodes())
    ):
        cluster.add(node)
        print(f"{node.name} is Ready")


def reclaim_node(arguments: argparse.Namespace) -> None:
    """Reclaim a node."""
    cluster = providers.find(arguments.name, arguments.provider)
    providers.require_node(cluster, arguments.node)
    reclaim(cluster, arguments.node, arguments.notice, arguments.by)


def pressure(arguments: argparse.Namespace) -> None:
    """Put a node under pressure."""
    cluster = providers.find(arguments.name, arguments.provider)
    cluster.apply_pressure(arguments.node, arguments.of)


def _node_verb(verb: str) -> Verb:
    def run(arguments: argparse.Namespace) -> None:
        cluster = providers.find(arguments.name, arguments.provider)
        getattr(cluster, verb.replace("-", "_"))(arguments.node)

    return run


if __name__ == "__main__":
    sys.exit(main())
