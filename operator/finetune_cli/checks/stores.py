"""Looks at sources and targets in stores, in processes of the trainer: each has the environment of a stage."""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from finetune_cli.checks.store_access import environment_of
from finetune_cli.checks.trainer_process import ask
from finetune_cli.manifest.fields import UriField
from finetune_operator.api.spec import PipelineSpec
from finetune_trainer.contract.uris import ON_THIS_MACHINE, scheme_of, without_secrets
from finetune_trainer.exit_codes import ExitCode

PROGRAM = "finetune_trainer.stores.check"
Variables = tuple[tuple[str, str], ...]
"""Names and values of environment variables, in a form that is a key."""
KINDS = {"model": "model", "adapter": "adapter", "data": "dataset", "target": "target"}


@dataclass(frozen=True)
class StoreAnswer:
    """A store's answer about a source or a target."""

    field: UriField
    exit_code: int | None
    """Exit code of the stage that would fail; None if it would not."""
    message: str = ""


def is_remote(uri: str) -> bool:
    """Return whether a URI names a store, and no path of this machine or of a claim."""
    return scheme_of(uri) not in ON_THIS_MACHINE


def look_at(fields: Iterable[UriField], spec: PipelineSpec) -> Iterator[StoreAnswer]:
    """Yield the stores' answers about sources and targets; none if the trainer's packages are not installed."""
    # A process for each set of variables: a library reads them when it is imported, and often only then.
    groups: dict[Variables, list[UriField]] = {}
    for field in fields:
        pod = spec.stages()[field.stage].pod
        variables = tuple(sorted(pod.literal_env().items()))
        group = groups.setdefault(variables, [])
        group.append(field)
    # At least one worker: a pool of none is an error.
    workers = max(1, len(groups))
    with ThreadPoolExecutor(max_workers=workers) as pool:
        for answers in pool.map(_ask, groups.values(), groups.keys()):
            yield from answers


def _ask(fields: list[UriField], variables: Variables) -> list[StoreAnswer]:
    """Return an answer for each field about which the process reports."""
    environment, withheld = environment_of(dict(variables))
    items = [_item(field) for field in fields]
    # No answer is no error: the stage itself reports what is wrong.
    lines = ask(PROGRAM, items, environment) or []
    problems = [line["problem"] for line in lines]
    # Not strict: there are fewer lines than fields if the process was interrupted.
    answers = [
        _answer(field, problem)
        for field, problem in zip(fields, problems, strict=False)
    ]
    return [_without_credentials(answer, withheld) for answer in answers]


def _item(field: UriField) -> dict[str, str | None]:
    return {
        "uri": field.uri,
        "kind": KINDS[field.kind],
        "revision": field.revision,
        "config": field.config,
        "split": field.split,
    }


def _answer(field: UriField, problem: dict[str, Any] | None) -> StoreAnswer:
    if problem is None:
        return StoreAnswer(field, None)
    message = str(problem["message"])
    # A diagnostic has the field's path already.
    message = message.removeprefix("push.targets ")
    message = message.removeprefix(f"{without_secrets(field.uri)}: ")
    return StoreAnswer(field, int(problem["exit_code"]), message)


def _without_credentials(
    answer: StoreAnswer, withheld: Mapping[str, str]
) -> StoreAnswer:
    """Return that a store was not checked, if it refuses access and this shell's credentials were not sent to it."""
    name = withheld.get(scheme_of(answer.field.uri))
    if name is None or answer.exit_code != ExitCode.CREDENTIALS:
        return answer
    reason = f"the manifest sets {name}, so credentials of this shell are not sent"
    fix = f"set {name} in the shell to send them"
    message = f"not looked at: {reason}; {fix}: {answer.message}"
    return StoreAnswer(answer.field, ExitCode.BUG, message)
