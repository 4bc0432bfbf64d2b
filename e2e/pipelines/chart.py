"""Install, upgrade and inspect a release of the chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from e2e.pipelines.driver import evict
from testcluster import binaries
from testcluster.commands import run_command
from testcluster.kube import Kube
from testcluster.kube_namespace import RESTRICTED, KubeNamespace, until

CHART = Path(__file__).parents[2] / "charts" / "finetune-operator"
NAMESPACE = "finetune-system"
RELEASE = "finetune-operator"
VALUES = ("image.tag=dev", "trainer.image.tag=dev")


@dataclass(frozen=True)
class Operator:
    """A release of the chart."""

    kube: Kube
    namespace: str = NAMESPACE
    release: str = RELEASE

    @property
    def objects(self) -> KubeNamespace:
        """The release's namespace, for kubectl."""
        return KubeNamespace(self.kube, self.namespace)

    def install(self, *values: str, chart: Path = CHART, wait: bool = True) -> None:
        """Install or upgrade the release, and wait up to two minutes until it is ready; `values` are for --set."""
        self.kube.apply(
            [
                {
                    "apiVersion": "v1",
                    "kind": "Namespace",
                    "metadata": {"name": self.namespace, "labels": RESTRICTED},
                }
            ]
        )
        settings = [
            argument for value in (*VALUES, *values) for argument in ("--set", value)
        ]
        waiting = ["--wait", "--timeout", "2m"] if wait else []
        self.helm("upgrade", "--install", self.release, str(chart), *settings, *waiting)

    def roll_back(self) -> None:
        """Return to the chart and the values before the last upgrade, and wait up to two minutes until it is ready."""
        self.helm("rollback", self.release, "--wait", "--timeout", "2m")

    def wait_settled(self) -> None:
        """Wait up to a minute until the pods of earlier releases are gone, two replicas exist and one of them leads."""
        until(
            lambda: len(self.pods()) == 2 and self.leader() in self.pods(),  # noqa: PLR2004
            60,
            self.logs,
        )

    def uninstall(self) -> None:
        """Uninstall the release, and wait up to a minute until its objects are gone."""
        self.helm("uninstall", self.release, "--wait", "--timeout", "1m")

    def helm(self, *arguments: str, timeout: float = 150) -> str:
        """Run helm against the cluster, in the release's namespace."""
        options = [
            "--kubeconfig",
            str(self.kube.kubeconfig),
            "--namespace",
            self.namespace,
        ]
        return helm(*options, *arguments, timeout=timeout)

    def wait_ready(self) -> None:
        """Wait until the Eviction API may evict a replica, because both are ready."""
        until(
            lambda: self.objects.get("pdb", self.release)["status"].get(
                "disruptionsAllowed"
            ),
            90,
            self.logs,
        )

    def lose_leader(self, *, gracefully: bool) -> None:
        """Evict or kill the leader, and wait until the other replica leads: after 17 s, if it has just started."""
        self.wait_ready()
        lost = self.leader()
        if gracefully:
            evict(self.objects, lost)
        else:
            self.objects.run("delete", "pod", lost, "--grace-period=0", "--force")
        until(lambda: self.leader() not in {"", lost}, 90, self.logs)

    def leader(self) -> str:
        """Return the name of the pod that holds the Lease; empty if there is none."""
        holder = str(
            self.objects.get("lease", self.release)
            .get("spec", {})
            .get("holderIdentity", "")
        )
        return holder.partition("_")[0]  # the random suffix of the process follows

    def pods(self) -> list[str]:
        """Return the names of the operator's pods."""
        output = self.objects.run(
            "get",
            "pods",
            "-l",
            "app.kubernetes.io/name=finetune-operator",
            "-o",
            "name",
        )
        return [line.partition("/")[2] for line in output.split()]

    def logs(self) -> str:
        """Return the last 200 log lines of every replica."""
        return self.objects.run(
            "logs",
            "-l",
            "app.kubernetes.io/name=finetune-operator",
            "--tail=200",
            "--prefix",
        )


def helm(*arguments: str, given: str = "", timeout: float = 150) -> str:
    """Run helm and return its output; raises TimedOut with helm's error message."""
    command = [str(binaries.program("helm")), *arguments]
    return run_command(
        *command, called=f"helm {_verb(arguments)}", given=given, timeout=timeout
    )


def _verb(arguments: Sequence[str]) -> str:
    for word in arguments:
        if not word.startswith("-"):
            return word
    return ""
