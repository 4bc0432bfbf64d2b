"""Watch Jobs, pods and pipelines, and write when each event was first seen: a process of its own.

    python -m operator_bench.observer KUBECONFIG COUNT FILE [--pipelines]

Prints `ready` when it watches. It writes FILE when the last Job of COUNT pipelines is Complete and, with --pipelines,
each pipeline is finished. It exits at the end of its input. All times are seconds of CLOCK_MONOTONIC, which all
processes of a machine share.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from operator_bench.api import (
    JOBS,
    PIPELINE,
    PIPELINES,
    PODS,
    STAGE,
    STAGES,
    Api,
    Object,
    condition,
    open_api,
)

Times = dict[str, dict[str, float]]


class Observer:
    """The first time of each event, by pipeline and stage."""

    def __init__(self, count: int, *, watches_pipelines: bool) -> None:
        self.count = count
        self.watches_pipelines = watches_pipelines
        self.created: Times = {}
        self.complete: Times = {}
        self.pod_succeeded: Times = {}
        self.finished: dict[str, float] = {}
        self.succeeded: set[str] = set()
        self.failed_jobs: set[str] = set()
        self.done = asyncio.Event()

    def job(self, job: Object) -> None:
        """Note a new or a complete Job."""
        self._note(self.created, job)
        if condition(job, "Complete"):
            self._note(self.complete, job)
        if condition(job, "Failed"):
            self.failed_jobs.add(job["metadata"]["name"])
        self._check_done()

    def pod(self, pod: Object) -> None:
        """Note a pod that has succeeded."""
        if (pod.get("status") or {}).get("phase") == "Succeeded":
            self._note(self.pod_succeeded, pod)

    def pipeline(self, pipeline: Object) -> None:
        """Note a finished pipeline."""
        if condition(pipeline, "Finished"):
            name = pipeline["metadata"]["name"]
            self.finished.setdefault(name, time.monotonic())
            if condition(pipeline, "Ready"):
                self.succeeded.add(name)
            self._check_done()

    def _note(self, times: Times, job: Object) -> None:
        labels = job["metadata"]["labels"]
        times.setdefault(labels[PIPELINE], {}).setdefault(
            labels[STAGE], time.monotonic()
        )

    def _check_done(self) -> None:
        complete = (
            sum(STAGES[-1] in stages for stages in self.complete.values()) >= self.count
        )
        if complete and (
            not self.watches_pipelines or len(self.finished) >= self.count
        ):
            self.done.set()

    def result(self) -> Object:
        """Return all times, as JSON."""
        return {
            "created": self.created,
            "complete": self.complete,
            "podSucceeded": self.pod_succeeded,
            "finished": self.finished,
            "succeeded": len(self.succeeded),
            "failedJobs": sorted(self.failed_jobs),
        }


async def follow(
    api: Api, path: str, note: Callable[[Object], None], version: str, **query: str
) -> None:
    """Call `note` with each object that changes."""
    async for event in api.watch(path, version, **query):
        if event["type"] != "DELETED":
            note(event["object"])


async def observe(observer: Observer, kubeconfig: Path) -> None:
    """Watch until all pipelines are done."""
    watched = [
        (JOBS, observer.job, {"labelSelector": STAGE}),
        (PODS, observer.pod, {"labelSelector": STAGE}),
    ]
    if observer.watches_pipelines:
        watched.append((PIPELINES, observer.pipeline, {}))
    async with (
        open_api(kubeconfig, "bench-observer") as api,
        asyncio.TaskGroup() as tasks,
    ):
        versions = [(await api.list(path, **query))[1] for path, _, query in watched]
        watches = [
            tasks.create_task(follow(api, path, note, version, **query))
            for (path, note, query), version in zip(watched, versions, strict=True)
        ]
        print("ready", flush=True)
        await observer.done.wait()
        for task in watches:
            task.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kubeconfig", type=Path)
    parser.add_argument("count", type=int)
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--pipelines",
        action="store_true",
        help="wait for the pipelines' own condition Finished",
    )
    options = parser.parse_args()
    observer = Observer(options.count, watches_pipelines=options.pipelines)
    asyncio.run(observe(observer, options.kubeconfig))
    fresh = options.file.with_suffix(".new")
    fresh.write_text(json.dumps(observer.result()))
    fresh.replace(options.file)
    sys.stdin.read()


if __name__ == "__main__":
    main()
