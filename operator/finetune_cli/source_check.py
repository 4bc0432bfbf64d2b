"""Looks at sources and targets of a manifest before anything starts: do they exist, can they be read, do they fit."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from finetune_cli.diagnostics import Diagnostic, closest_match
from finetune_cli.fields import Source, has_cluster_credentials, sources, targets
from finetune_cli.manifest.manifest import Manifest
from finetune_cli.manifest.value_check import is_one_name, resembles_repository
from finetune_cli.remote_check import Answer, is_remote, look_at
from finetune_cli.task_check import task_errors
from finetune_operator.api.spec import PipelineSpec
from finetune_trainer.contract import Environment
from finetune_trainer.contract.environment import InvalidLocation, NotMounted, is_pattern
from finetune_trainer.contract.uris import without_secrets
from finetune_trainer.exit_codes import PERMANENT_EXIT_CODES, ExitCode

NOT_LOOKED_AT = "not looked at; the stage that uses it reports whether it exists and may be used"


@dataclass(frozen=True)
class SourceProblem:
    """What is wrong with a source, and the fix."""

    source: Source
    message: str


@dataclass
class SourceReport:
    """What a look at the sources has found."""

    problems: list[SourceProblem] = field(default_factory=list)
    not_looked_at: list[SourceProblem] = field(default_factory=list)
    """Sources of which nothing is known, each with the reason."""


def check_manifest(
    manifest: Manifest, environment: Environment, *, validating: bool = False
) -> tuple[list[Diagnostic], list[str]]:
    """Return the errors that a look at sources, targets and task files finds, and what was not looked at.

    Only a run that starts here is refused for lack of credentials that the manifest takes from the cluster. Only in
    validating, a store that does not answer is an error.
    """
    report = check_sources(sources(manifest.spec), environment)
    _check_with_trainer(manifest.spec, environment, report, validating=validating)
    errors = [manifest.diagnostic(one.source.location, one.message) for one in report.problems]
    errors += task_errors(manifest, environment)
    return errors, [
        f"{without_secrets(one.source.uri)}: {one.message}" for one in report.not_looked_at
    ]


def check_sources(found: Iterable[Source], environment: Environment) -> SourceReport:
    """Look at every source that is a path of this machine."""
    report = SourceReport()
    for source in found:
        if is_remote(source.uri):
            continue
        try:
            path = environment.locate(source.uri)
        except NotMounted as error:
            report.not_looked_at.append(SourceProblem(source, str(error).partition(": ")[2]))
        except InvalidLocation as error:
            report.problems.append(SourceProblem(source, str(error)))
        else:
            report.problems += [
                SourceProblem(source, message) for message in _problems(source, path)
            ]
    return report


def _check_with_trainer(
    spec: PipelineSpec, environment: Environment, report: SourceReport, *, validating: bool
) -> None:
    """Look at every source and target in a store and at every target in a folder; add to the report what is wrong."""
    found = [source for source in (*sources(spec), *targets(spec)) if is_remote(source.uri)]
    found += _target_folders(spec, environment, report)
    answers = {answer.source: answer for answer in look_at(found, spec)} if found else {}
    for source in found:
        answer = answers.get(source, Answer(source, ExitCode.BUG, NOT_LOOKED_AT))
        if answer.exit_code in _refused_codes(spec, source, validating=validating):
            report.problems.append(SourceProblem(source, answer.message))
        elif answer.exit_code is not None:
            report.not_looked_at.append(SourceProblem(source, answer.message))


def _target_folders(
    spec: PipelineSpec, environment: Environment, report: SourceReport
) -> Iterator[Source]:
    """Yield the targets that are there on this machine, each with its absolute path as the URI."""
    for target in targets(spec):
        if is_remote(target.uri):
            continue
        try:
            path = environment.locate(target.uri).absolute()
        except NotMounted as error:
            report.not_looked_at.append(SourceProblem(target, str(error).partition(": ")[2]))
        except InvalidLocation as error:
            report.problems.append(SourceProblem(target, str(error)))
        else:
            if path.exists():  # push creates the others
                yield replace(target, uri=f"file://{path}")


def _refused_codes(spec: PipelineSpec, source: Source, *, validating: bool) -> set[ExitCode]:
    """Return the exit codes for which a manifest is refused."""
    refused = set(PERMANENT_EXIT_CODES)
    if validating:
        refused.add(ExitCode.UNAVAILABLE)
        if has_cluster_credentials(spec, source.stage):
            refused.remove(ExitCode.CREDENTIALS)
    return refused


def _problems(source: Source, path: Path) -> Iterator[str]:
    """Yield what is wrong with a path of this machine, as the stage that reads it would find it."""
    if is_pattern(path.name) and not path.exists():
        if not any(path.parent.glob(path.name)):
            yield f"{path} matches no file"
    elif not path.exists():
        yield f"{path} does not exist; {_suggestion(source, path)}"
    elif not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
        yield f"{path} cannot be read by this user; change its permissions"
    elif source.kind == "model" and not (path / "config.json").is_file():
        yield f"{path} is not a model in Hugging Face format: it has no config.json"
    elif source.kind == "adapter" and not (path / "adapter_config.json").is_file():
        yield f"{path} is no adapter in PEFT's format: it has no adapter_config.json"
    elif source.kind == "task" and not path.is_file():
        yield f"{path} is not a file; name the task's YAML file"
    elif path.is_file() and path.stat().st_size == 0:
        yield f"{path} is empty"


def _suggestion(source: Source, path: Path) -> str:
    if resembles_repository(source):
        return f"for the repository of the Hugging Face hub, write hf://{source.uri}"
    try:
        match = closest_match(path.name, [entry.name for entry in path.parent.iterdir()])
    except OSError:
        match = None
    if match:
        return f"did you mean {path.with_name(match)}?"
    hub = (
        f"; for a repository of the Hugging Face hub, write hf://ORG/{source.uri}"
        if is_one_name(source)
        else ""
    )
    return f"correct the URI or create it{hub}"
