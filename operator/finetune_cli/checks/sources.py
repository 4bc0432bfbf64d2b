"""Looks at sources and targets of a manifest before anything starts: do they exist, can they be read, do they fit."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from finetune_cli.checks.chat_template import template_errors
from finetune_cli.checks.extras import missing_extras
from finetune_cli.checks.stores import StoreAnswer, is_remote, look_at
from finetune_cli.checks.task_loading import loading_problems
from finetune_cli.checks.tasks import task_errors
from finetune_cli.diagnostics import Diagnostic, closest_match
from finetune_cli.manifest.fields import (
    UriField,
    has_cluster_credentials,
    sources,
    targets,
)
from finetune_cli.manifest.manifest import Manifest
from finetune_cli.manifest.value_check import is_one_name, resembles_repository
from finetune_operator.api.spec import PipelineSpec
from finetune_trainer.contract import Environment
from finetune_trainer.contract.environment import (
    InvalidLocation,
    NotMounted,
    is_pattern,
)
from finetune_trainer.contract.uris import without_secrets
from finetune_trainer.exit_codes import PERMANENT_EXIT_CODES, ExitCode

NOT_LOOKED_AT = (
    "not looked at; the stage that uses it reports whether it exists and may be used"
)


@dataclass(frozen=True)
class UriProblem:
    """A problem with a source or a target, and its fix."""

    field: UriField
    message: str


@dataclass
class SourceReport:
    """The result of a check of sources and targets."""

    problems: list[UriProblem] = field(default_factory=list)
    not_looked_at: list[UriProblem] = field(default_factory=list)
    """Sources and targets that could not be checked, each with the reason."""
    has_unmounted_claim: bool = False
    """Whether a claim of the cluster has no folder on this machine."""


def check_manifest(
    manifest: Manifest, environment: Environment, *, validating: bool = False
) -> tuple[list[Diagnostic], list[str]]:
    """Return the errors in sources, targets and task files, and a line for each that was not looked at.

    Only a run that starts here is refused for lack of credentials that the manifest takes from the cluster. Only in
    validating, a store that does not answer is an error.
    """
    report = check_sources(sources(manifest.spec), environment)
    _check_with_trainer(manifest.spec, environment, report, validating=validating)
    errors = [
        manifest.diagnostic(problem.field.location, problem.message)
        for problem in report.problems
    ]
    errors += template_errors(manifest, environment)
    errors += task_errors(manifest, environment)
    loading_errors: list[Diagnostic] = []
    tasks_not_looked_at: list[str] = []
    # Loading lm-eval takes seconds, which a run and a plan do not wait for.
    if validating:
        loading_errors, tasks_not_looked_at = loading_problems(manifest, environment)
        # The metric of a gate may have an error already, which names the file.
        known = {error.path for error in errors}
        loading_errors = [error for error in loading_errors if error.path not in known]
    not_looked_at = [
        f"{without_secrets(problem.field.uri)}: {problem.message}"
        for problem in report.not_looked_at
    ]
    missing = list(missing_extras(manifest.spec))
    if report.has_unmounted_claim:
        # The manifest is for a cluster.
        not_looked_at += [
            f"spec.{'.'.join(map(str, location))}: {message}"
            for location, message in missing
        ]
    else:
        errors += [manifest.diagnostic(*problem) for problem in missing]
    return [*errors, *loading_errors], [*not_looked_at, *tasks_not_looked_at]


def check_sources(fields: Iterable[UriField], environment: Environment) -> SourceReport:
    """Check every source that is a path of this machine."""
    report = SourceReport()
    for source in fields:
        if is_remote(source.uri):
            continue
        path = _locate(source, environment, report)
        if path is not None:
            report.problems += [
                UriProblem(source, message) for message in path_problems(source, path)
            ]
    return report


def _locate(
    source: UriField, environment: Environment, report: SourceReport
) -> Path | None:
    """Return the path of a URI on this machine; None with an entry in the report if it has none."""
    try:
        return environment.locate(source.uri)
    except NotMounted as error:
        # A claim of the cluster: its content may be right.
        message = str(error).partition(": ")[2]
        report.has_unmounted_claim = True
        report.not_looked_at.append(UriProblem(source, message))
    except InvalidLocation as error:
        report.problems.append(UriProblem(source, str(error)))
    return None


def _check_with_trainer(
    spec: PipelineSpec,
    environment: Environment,
    report: SourceReport,
    *,
    validating: bool,
) -> None:
    """Check every source and target in a store and every target in a folder; add the problems to the report."""
    fields = [
        field for field in (*sources(spec), *targets(spec)) if is_remote(field.uri)
    ]
    fields += _target_folders(spec, environment, report)
    if not fields:
        # Without a field, no process of the trainer has to start.
        return
    answers = {answer.field: answer for answer in look_at(fields, spec)}
    for source in fields:
        answer = answers.get(source, StoreAnswer(source, ExitCode.BUG, NOT_LOOKED_AT))
        problem = UriProblem(source, answer.message)
        if answer.exit_code in _refused_codes(spec, source, validating=validating):
            report.problems.append(problem)
        elif answer.exit_code is not None:
            report.not_looked_at.append(problem)


def _target_folders(
    spec: PipelineSpec, environment: Environment, report: SourceReport
) -> Iterator[UriField]:
    """Yield the targets that are there on this machine, each with its absolute path as the URI."""
    for target in targets(spec):
        if is_remote(target.uri):
            continue
        path = _locate(target, environment, report)
        # Push creates a folder that does not exist.
        if path is not None and path.exists():
            yield replace(target, uri=f"file://{path.absolute()}")


def _refused_codes(
    spec: PipelineSpec, source: UriField, *, validating: bool
) -> set[ExitCode]:
    """Return the exit codes for which a manifest is refused."""
    refused = set(PERMANENT_EXIT_CODES)
    if validating:
        refused.add(ExitCode.UNAVAILABLE)
        # The credentials are in a Secret of the cluster, which this machine cannot read.
        if has_cluster_credentials(spec, source.stage):
            refused.remove(ExitCode.CREDENTIALS)
    return refused


def path_problems(source: UriField, path: Path) -> Iterator[str]:
    """Yield the problem of a path of this machine, as the stage that reads it would report it."""
    is_folder = path.is_dir()
    needed = os.R_OK
    if is_folder:
        # A folder can be entered only with the right to execute it.
        needed |= os.X_OK
    if is_pattern(path.name) and not path.exists():
        if not any(path.parent.glob(path.name)):
            yield f"{path} matches no file"
    elif not path.exists():
        yield f"{path} does not exist; {_suggestion(source, path)}"
    elif not os.access(path, needed):
        yield f"{path} cannot be read by this user; change its permissions"
    elif source.kind == "model" and not (path / "config.json").is_file():
        yield _no_model_problem(path)
    elif source.kind == "adapter" and not (path / "adapter_config.json").is_file():
        yield f"{path} is no adapter in PEFT's format: it has no adapter_config.json"
    elif source.kind == "task" and not path.is_file():
        yield f"{path} is not a file; name the task's YAML file"
    elif path.is_file() and path.stat().st_size == 0:
        yield f"{path} is empty"


def _no_model_problem(path: Path) -> str:
    if (path / "adapter_config.json").is_file():
        return f"{path} is an adapter: name its base model here, and the adapter in train.startFrom"
    return f"{path} is not a model in Hugging Face format: it has no config.json"


def _suggestion(source: UriField, path: Path) -> str:
    if resembles_repository(source):
        return f"for the repository of the Hugging Face hub, write hf://{source.uri}"
    match = _closest_neighbour(path)
    if match:
        return f"did you mean {path.with_name(match)}?"
    text = "correct the URI or create it"
    if is_one_name(source):
        text += (
            f"; for a repository of the Hugging Face hub, write hf://ORG/{source.uri}"
        )
    return text


def _closest_neighbour(path: Path) -> str | None:
    """Return the name in the same folder that is most similar; None if there is none or no such folder."""
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return None
    return closest_match(path.name, names)
