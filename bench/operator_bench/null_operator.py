"""The null operator: it creates the next Job of a pipeline when the last one is done, and does nothing else.

    python -m operator_bench.null_operator KUBECONFIG BODIES COUNT --on complete|pod

It has no custom resource, writes no status, and keeps nothing but the names it saw. Its bodies are the bodies
of the operator's own objects: one Job for each stage, and a claim if it creates one. Only the owner
references are left out.
`complete` acts on the Job's condition Complete. `pod` acts on the pod's phase Succeeded, about a second earlier. Field
selectors of both watches leave out all other events.

Prints `ready`, starts with the next line of its input, prints one JSON object at the end, and exits at the end of its
input.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

from operator_bench.api import (
    CLAIMS,
    JOBS,
    PIPELINE,
    PODS,
    STAGE,
    STAGES,
    Api,
    condition,
    open_api,
)
from operator_bench.pipelines import pipeline_name

TRIGGERS = {
    "complete": (
        JOBS,
        {"labelSelector": STAGE, "fieldSelector": "status.successful=1"},
    ),
    "pod": (PODS, {"labelSelector": STAGE, "fieldSelector": "status.phase=Succeeded"}),
}


class NullOperator:
    """Creates COUNT pipelines' claims and Jobs."""

    def __init__(self, api: Api, bodies: list[str], trigger: str) -> None:
        self.api = api
        self.trigger = trigger
        self.claims = bodies[: -len(STAGES)]
        self.jobs = bodies[-len(STAGES) :]
        """JSON in which `pipeline_name(0)` stands for the pipeline's name."""
        self.seen: set[tuple[str, str]] = set()
        self.tasks: set[asyncio.Task[None]] = set()

    async def run(self, count: int) -> dict[str, float]:
        """Create everything; return when it began, and when the last pipeline was done."""
        path, query = TRIGGERS[self.trigger]
        _, version = await self.api.list(path, **query)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        started = time.monotonic()
        remaining = count
        for number in range(count):
            self._spawn(self._begin(pipeline_name(number)))
        async for name, stage in self._finished_stages(path, version, query):
            following = STAGES.index(stage) + 1
            if following < len(STAGES):
                self._spawn(self._create(JOBS, self.jobs[following], name))
            else:
                remaining -= 1
            if not remaining:
                break
        return {"started": started, "ended": time.monotonic()}

    async def _finished_stages(
        self, path: str, version: str, query: dict[str, str]
    ) -> AsyncIterator[tuple[str, str]]:
        async for event in self.api.watch(path, version, **query):
            item = event["object"]
            if self.trigger == "complete" and not condition(item, "Complete"):
                continue
            key = (
                item["metadata"]["labels"][PIPELINE],
                item["metadata"]["labels"][STAGE],
            )
            if event["type"] != "DELETED" and key not in self.seen:
                self.seen.add(key)
                yield key

    def _spawn(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]  # a coroutine without a result
        self.tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self.tasks.discard(task)
        error = task.exception()
        if error:
            sys.exit(f"null operator: {error}")

    async def _begin(self, name: str) -> None:
        for claim in self.claims:
            await self._create(CLAIMS, claim, name)
        await self._create(JOBS, self.jobs[0], name)

    async def _create(self, path: str, body: str, name: str) -> None:
        await self.api.discard(
            "POST", path, body.replace(pipeline_name(0), name).encode()
        )


async def run(
    kubeconfig: Path, bodies: list[str], count: int, trigger: str
) -> dict[str, float]:
    async with open_api(kubeconfig, "null-operator") as api:
        return await NullOperator(api, bodies, trigger).run(count)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kubeconfig", type=Path)
    parser.add_argument(
        "bodies",
        type=Path,
        help="JSON array: the claim if any, then the Jobs, of pipeline 0",
    )
    parser.add_argument("count", type=int)
    parser.add_argument("--on", choices=TRIGGERS, default="complete")
    options = parser.parse_args()
    bodies = [json.dumps(body) for body in json.loads(options.bodies.read_text())]
    print(
        json.dumps(
            asyncio.run(run(options.kubeconfig, bodies, options.count, options.on))
        ),
        flush=True,
    )
    sys.stdin.read()


if __name__ == "__main__":
    main()
