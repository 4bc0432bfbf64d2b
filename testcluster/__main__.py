"""`python -m testcluster VERB`: a Kubernetes cluster on this machine, for people and for tests."""

from __future__ import annotations

import argparse
import re
import signal
import sys
import time
from collections.abc import Callable
from typing import get_args

from testcluster import binaries, providers
from testcluster.errors import TimedOut, UsageError
from testcluster.linux_namespaces.provider import NEEDED
from testcluster.nodes import parse
from testcluster.provider import ClusterSpec, Pressure
from testcluster.reclaim import Notice, reclaim
from testcluster.report import report

Verb = Callable[[argparse.Namespace], None]


def main() -> int:
    """Do what was asked; 0 done, 1 not reached in time, 2 refused."""
    arguments = _parser().parse_args()
    # A shell starts what runs in the background deaf to it, and `up` has to undo what it began.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        arguments.verb(arguments)
    except UsageError as problem:
        return _tell(problem, 2)
    except PermissionError as problem:
        return _tell(f"{problem}; run it as whoever made it, or with sudo", 2)
    except (TimedOut, OSError) as problem:
        return _tell(problem, 1)
    except KeyboardInterrupt:
        return 130
    return 0


def _tell(problem: Exception | str, status: int) -> int:
    print(f"cluster: {problem}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m testcluster", description=__doc__)
    parser.add_argument("--name", default="dev", help="which cluster (default: dev)")
    parser.add_argument("--provider", choices=["bare", "kind"], help="default: kind where a Docker engine answers")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    _up(_verb(verbs, "up", up, "make a cluster; Ready when it returns"))
    _verb(verbs, "down", down, "take it away, whatever state it is in")
    _verb(verbs, "status", status, "say what runs, and print the KUBECONFIG line")
    _verb(verbs, "build", build, "build the programs that a cluster is made of, and keep them")
    _images(_verb(verbs, "load", load, "bring images to every node"))
    reclaiming = _node(_verb(verbs, "reclaim", take, "notice, then the machine is gone, as on a cloud"))
    reclaiming.add_argument("--notice", type=seconds, default=30.0, help="how long before, as in 30s (default) or 2m")
    reclaiming.add_argument("--by", choices=get_args(Notice), default="taint", help="how pods learn of it")
    nodes = verbs.add_parser(
        "node", help="add, kill, revive, delete, pause, resume, partition, heal, pressure, clear-pressure"
    )
    _nodes(nodes.add_subparsers(required=True, metavar="VERB"))
    return parser


def _verb(verbs: argparse._SubParsersAction, name: str, does: Verb, meaning: str) -> argparse.ArgumentParser:  # type: ignore[type-arg]
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=meaning, description=meaning)
    parser.set_defaults(verb=does)
    return parser


def _up(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", default="ondemand,spot:2", help="classes and counts, as in ondemand,spot:3,gpu:1")
    parser.add_argument("--kwok", type=count, default=0, metavar="N", help="nodes on paper beside the real ones")
    parser.add_argument("--image", action="append", default=[], help="an image that every node shall have; repeatable")
    parser.add_argument("--node-image", help="kind only: the image of a node, for example a local one")


def _images(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="a name that docker or buildah knows, or a .tar")


def _node(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("node", metavar="NODE")
    return parser


def _nodes(verbs: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    adding = _verb(verbs, "add", add, "make more nodes")
    adding.add_argument("classes", metavar="CLASSES", help="as in spot:2")
    meanings = {
        "kill": "turn its power off; the Node object stays",
        "revive": "turn it on again",
        "delete": "kill it and take its Node object away",
        "pause": "stop every process on it: a node that hangs",
        "resume": "let it go on",
        "partition": "take its network away",
        "heal": "give its network back",
        "clear-pressure": "end all pressure",
    }
    for verb, meaning in meanings.items():
        _node(_verb(verbs, verb, _on_node(verb), meaning))
    pressing = _node(_verb(verbs, "pressure", press, "let its kubelet see too little of something"))
    pressing.add_argument("of", choices=get_args(Pressure))


def count(text: str) -> int:
    """Read a number of nodes on paper."""
    if not re.fullmatch(r"\d{1,4}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of nodes; write 0 to 9999")
    return int(text)


def seconds(text: str) -> float:
    """Read 30s, 2m or 30."""
    found = re.fullmatch(r"(\d{1,5}(?:\.\d+)?)(s|m)?", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; write 30s or 2m")
    return float(found[1]) * (60 if found[2] == "m" else 1)


def up(arguments: argparse.Namespace) -> None:
    """Make a cluster."""
    nodes = parse(arguments.nodes)
    cluster = providers.choose(arguments.name, arguments.provider, node_image=arguments.node_image)
    begun = time.monotonic()
    cluster.up(ClusterSpec(nodes, arguments.kwok, arguments.image))
    print(f"{len(nodes)} nodes Ready in {time.monotonic() - begun:.1f} s")
    print(report(cluster))


def down(arguments: argparse.Namespace) -> None:
    """Take it away."""
    for cluster in providers.existing(arguments.name, arguments.provider):
        cluster.down()


def status(arguments: argparse.Namespace) -> None:
    """Say what runs."""
    print(report(providers.find(arguments.name, arguments.provider)))


def build(_: argparse.Namespace) -> None:
    """Build all programs."""
    print(binaries.build_missing(NEEDED))


def load(arguments: argparse.Namespace) -> None:
    """Bring images."""
    providers.find(arguments.name, arguments.provider).load(arguments.images)


def add(arguments: argparse.Namespace) -> None:
    """Make more nodes."""
    cluster = providers.find(arguments.name, arguments.provider)
    for node in parse(arguments.classes, frozenset(known.name for known in cluster.nodes())):
        cluster.add(node)
        print(f"{node.name} is Ready")


def take(arguments: argparse.Namespace) -> None:
    """Reclaim a node."""
    cluster = providers.find(arguments.name, arguments.provider)
    providers.known(cluster, arguments.node)
    reclaim(cluster, arguments.node, arguments.notice, arguments.by)


def press(arguments: argparse.Namespace) -> None:
    """Put a node under pressure."""
    cluster = providers.find(arguments.name, arguments.provider)
    cluster.apply_pressure(arguments.node, arguments.of)


def _on_node(verb: str) -> Verb:
    def act(arguments: argparse.Namespace) -> None:
        cluster = providers.find(arguments.name, arguments.provider)
        getattr(cluster, verb.replace("-", "_"))(arguments.node)

    return act


if __name__ == "__main__":
    sys.exit(main())
