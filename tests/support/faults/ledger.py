"""What ran: which pods used which claim and when, and which stages succeeded how often."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from support.faults.pods import StagePod

Success = tuple[str, str, str]
"""Namespace, the Job's name without its attempt, and identity."""


@dataclass
class Ledger:
    """The record of the simulated kubelet."""

    users: dict[tuple[str, str], set[str]] = field(
        default_factory=lambda: defaultdict(set)
    )
    """Claim -> the pods that run on it now."""
    overlaps: list[str] = field(default_factory=list)
    """Descriptions of moments when two pods ran on one claim."""
    successes: Counter[Success] = field(default_factory=Counter)
    repetitions: list[str] = field(default_factory=list)
    """Successes of an identity that had succeeded before, while the result could still be read from the first pod."""
    runs: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Namespace, stage and identity -> number of processes that started."""
    versions: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    """Pod of a process that succeeded -> namespace, the Job's name without its attempt, and VERSION."""
    _readable: dict[Success, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Success -> its pods that still exist."""

    def start(self, pod: StagePod) -> None:
        """Record that the process of a pod starts."""
        self.runs[pod.namespace, pod.stage, pod.identity] += 1
        if pod.workspace is None:
            return
        users = self.users[pod.namespace, pod.workspace]
        if users:
            self.overlaps.append(
                f"{pod.namespace}/{pod.name} started on {pod.workspace} beside {', '.join(users)}"
            )
        if self._readable[_success(pod)]:
            self.repetitions.append(
                f"{pod.namespace}/{pod.name} runs although its identity has a result"
            )
        users.add(pod.name)

    def end(self, pod: StagePod, *, success: bool) -> None:
        """Record that the process of a pod has ended."""
        if pod.workspace is None:
            return
        self.users[pod.namespace, pod.workspace].discard(pod.name)
        if success:
            self.successes[_success(pod)] += 1
            self.versions[pod.name] = (
                pod.namespace,
                pod.job_stem,
                pod.environment("VERSION"),
            )

    def keep_result(self, pod: StagePod) -> None:
        """Record that the result of a pod can be read from its status."""
        self._readable[_success(pod)].add(pod.name)

    def drop_result(self, pod: StagePod) -> None:
        """Record that a pod is being deleted: its result may be lost, and its stage may run again."""
        self._readable[_success(pod)].discard(pod.name)

    def stages_of(self, namespace: str, job_prefix: str) -> Counter[str]:
        """Return how often each stage and identity succeeded, for Jobs whose names have the prefix."""
        return Counter(
            {
                f"{stem.rpartition('-')[2]} {identity}": count
                for (space, stem, identity), count in self.successes.items()
                if space == namespace and stem.startswith(job_prefix)
            }
        )

    def succeeded_in(self, namespace: str) -> set[tuple[str, str]]:
        """Return the Job, without its attempt, and VERSION of the processes that succeeded in a namespace."""
        return {
            (stem, version)
            for space, stem, version in self.versions.values()
            if space == namespace
        }

    def readable_in(self, namespace: str) -> set[tuple[str, str]]:
        """Return the successes of `succeeded_in` whose pod still exists and is not being deleted."""
        pods = {pod for readable in self._readable.values() for pod in readable}
        return {
            (stem, version)
            for pod, (space, stem, version) in self.versions.items()
            if space == namespace and pod in pods
        }

    def problems(self, namespace: str = "") -> list[str]:
        """Return all overlaps and repetitions in a namespace, or in all."""
        all_problems = [*self.overlaps, *self.repetitions]
        return [
            problem
            for problem in all_problems
            if not namespace or problem.startswith(f"{namespace}/")
        ]


def _success(pod: StagePod) -> Success:
    return pod.namespace, pod.job_stem, pod.identity
