"""Looks at sources and targets in stores, in processes of the trainer: each has the environment of a stage."""

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from finetune_cli.fields import Source
from finetune_cli.store_access import environment_of
from finetune_operator.api.spec import PipelineSpec
from finetune_trainer.contract.uris import ON_THIS_MACHINE, scheme_of, without_secrets
from finetune_trainer.exit_codes import ExitCode

# Not isolated (-I): the process must find the packages where this one finds them.
COMMAND = (sys.executable, "-P", "-m", "finetune_trainer.stores.check")
LONGEST_SECONDS = 60.0
"""The process ends by itself before that, unless the machine is overloaded."""
KINDS = {"model": "model", "adapter": "adapter", "data": "dataset", "target": "target"}


@dataclass(frozen=True)
class Answer:
    """What a store says of a source or a target."""

    source: Source
    exit_code: int | None
    """Exit code of the stage that would fail; None if it would not."""
    message: str = ""


def is_remote(uri: str) -> bool:
    """Return whether a URI names a store, and no path of this machine or of a claim."""
    return scheme_of(uri) not in ON_THIS_MACHINE


def look_at(found: Iterable[Source], spec: PipelineSpec) -> Iterator[Answer]:
    """Yield what stores say of sources and targets. There is no answer if the trainer's packages are not installed."""
    groups: dict[tuple[tuple[str, str], ...], list[Source]] = {}
    for source in found:
        variables = spec.stages()[source.stage].pod.literal_env()
        groups.setdefault(tuple(sorted(variables.items())), []).append(source)
    with ThreadPoolExecutor(max_workers=max(1, len(groups))) as pool:
        for answers in pool.map(lambda group: _ask(group[1], dict(group[0])), groups.items()):
            yield from answers


def _ask(found: list[Source], variables: Mapping[str, str]) -> list[Answer]:
    """Return an answer for each source that the process answers."""
    environment, withheld = environment_of(variables)
    try:
        process = subprocess.run(
            COMMAND,
            input=json.dumps([_item(source) for source in found]),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=LONGEST_SECONDS,
            env=environment,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    problems = [json.loads(line)["problem"] for line in process.stdout.splitlines()]
    answers = (_answer(source, problem) for source, problem in zip(found, problems, strict=False))
    return [_without_credentials(answer, withheld) for answer in answers]


def _item(source: Source) -> dict[str, str | None]:
    selected = {"revision": source.revision, "config": source.config, "split": source.split}
    return {"uri": source.uri, "kind": KINDS[source.kind], **selected}


def _answer(source: Source, problem: dict[str, Any] | None) -> Answer:
    if problem is None:
        return Answer(source, None)
    message = (
        str(problem["message"])
        .removeprefix("push.targets ")
        .removeprefix(f"{without_secrets(source.uri)}: ")
    )
    return Answer(source, int(problem["exit_code"]), message)


def _without_credentials(answer: Answer, withheld: Mapping[str, str]) -> Answer:
    """Return that a store was not looked at, if it refuses access and this shell's credentials were not sent to it."""
    name = withheld.get(scheme_of(answer.source.uri))
    if name is None or answer.exit_code != ExitCode.CREDENTIALS:
        return answer
    why = f"the manifest sets {name}, so credentials of this shell are not sent; set {name} in the shell to send them"
    return Answer(answer.source, ExitCode.BUG, f"not looked at: {why}: {answer.message}")
