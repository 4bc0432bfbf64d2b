"""Checks values that the schema accepts and that are mistakes all the same.

These are secrets in clear text, repositories of the hub without their scheme, and gates that no score can pass.
"""

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from finetune_cli.manifest import pod_check
from finetune_cli.manifest.fields import (
    GateMetric,
    Location,
    UriField,
    gate_metrics,
    literal_variables,
    sources,
    targets,
    task_files,
)
from finetune_operator.api.spec import PipelineSpec

Finding = tuple[Location, str]
"""Location below spec, and message."""
# Endings of words, because some names have no _ between: GITHUBTOKEN.
SECRET_ENDINGS = ("TOKEN", "SECRET", "PASSWORD", "PASSPHRASE", "APIKEY", "ACCESSKEY")
PUBLIC_ENDINGS = frozenset({"FILE", "PATH", "DIR", "NAME", "URL", "URI", "ID"})
"""Endings of variables that say where a secret is or what it is called, such as HF_TOKEN_PATH."""
NO_SECRET = re.compile(r"|\d{1,4}|true|false|yes|no", re.IGNORECASE)
"""Values that switch something on or off, such as HF_HUB_DISABLE_IMPLICIT_TOKEN=1."""
FRACTIONS = frozenset({"acc", "acc_norm", "exact_match"})
"""Metrics of lm-eval that are between 0 and 1."""
HIGHER_IS_BETTER = FRACTIONS | {
    *("f1", "bleu", "chrf", "mcc", "rouge1", "rougeL", "reward_accuracy"),
}
LOWER_IS_BETTER = frozenset(
    {
        *("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte"),
        *("validation_loss", "loss", "brier_score", "ter", "wer", "cer"),
    }
)
"""Metrics of lm-eval and of held_out of which a smaller number is better, and other tools' names of such."""
PERCENT = 100
DATA_FILE = re.compile(r"[*?\[]|\.(jsonl|json|csv|parquet|gz|zst|txt)$")
WEB_PAGE = re.compile(
    r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/datasets/([\w.-]+/[\w.-]+)"
    r"(?:/(?:tree|viewer|blob)/.*)?/?"
)
VARIABLE = re.compile(r"[$][({]|[$][A-Za-z_]|[{]{2}")
"""A variable of a shell or of a template."""
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def errors(spec: PipelineSpec, folder: Path) -> Iterator[Finding]:
    """Yield values that cannot work; `folder` is the folder of the manifest."""
    for field in (*sources(spec), *targets(spec)):
        organisation = field.uri.partition("/")[0]
        if resembles_repository(field) and not (folder / organisation).exists():
            problem = f"there is no folder {organisation} beside the manifest"
            fix = f"for the hub write hf://{field.uri}, for a folder ./{field.uri}"
            yield field.location, f"{problem}; {fix}"
        if VARIABLE.search(field.uri):
            yield field.location, "variables are not replaced: write the whole URI"
    # A file of records may be at any https URL, so the schema also accepts a page of the hub.
    for field in sources(spec):
        page = WEB_PAGE.fullmatch(field.uri)
        if page:
            problem = "is a page of the hub, and no file of records"
            yield field.location, f"{problem}; write hf://{page[1]}"
    yield from pod_check.errors(spec)
    files = task_files(spec)
    for gate, finding in _closed_gates(spec):
        if gate.task not in files:
            yield finding


def warnings(spec: PipelineSpec) -> Iterator[Finding]:
    """Yield values that may be meant, but have a risk."""
    for variable in literal_variables(spec):
        name = variable.name
        if not _is_secret(name) or NO_SECRET.fullmatch(variable.value):
            continue
        problem = f"{name} seems to be a secret in clear text"
        fix = f"use envFrom: [{{secretRef: …}}], or valueFrom: {{secretKeyRef: …}} for {name}"
        yield variable.location, f"{problem}; {fix}"
    if spec.deadline and spec.deadline < datetime.now(UTC):  # noqa: TID251  an edge
        # No error: a finished pipeline stays in Git as it is.
        fix = "set a later time, or remove the key"
        yield ("deadline",), f"has passed, so that Auto avoids spot nodes; {fix}"
    for name, value in spec.prepare.chat_template_arguments.items():
        if not isinstance(value, str):
            continue
        if value.lower() in {"true", "false"}:
            location = ("prepare", "chatTemplateArguments", name)
            yield (
                location,
                f"{value!r} is a text, which Jinja takes for true; remove the quotes",
            )
    yield from pod_check.warnings(spec)
    yield from _inverted_gates(spec)
    files = task_files(spec)
    for gate, finding in _closed_gates(spec):
        # No error: the functions of a user's own task may compute the metric in percent.
        if gate.task in files:
            yield finding


def resembles_repository(field: UriField) -> bool:
    """Return whether a relative path has the form of ORG/NAME on the hub, and is no file of records."""
    return not _is_file(field) and REPOSITORY.fullmatch(field.uri) is not None


def is_one_name(field: UriField) -> bool:
    """Return whether a path is one name that a repository on the hub may have, such as gpt2, and no file of records."""
    name = f"org/{field.uri}"
    return not _is_file(field) and REPOSITORY.fullmatch(name) is not None


def _is_file(field: UriField) -> bool:
    if field.kind in {"template", "task"}:
        return True
    return field.kind == "data" and DATA_FILE.search(field.uri) is not None


def _is_secret(name: str) -> bool:
    words = name.upper().split("_")
    if words[-1] in PUBLIC_ENDINGS:
        return False
    return any(word == "KEY" or word.endswith(SECRET_ENDINGS) for word in words)


def _inverted_gates(spec: PipelineSpec) -> Iterator[Finding]:
    """Yield the gates that a worse model passes more easily."""
    # The error of a gate that no score passes says enough.
    closed = {gate.location for gate, _ in _closed_gates(spec)}
    for gate in gate_metrics(spec):
        if gate.location in closed:
            continue
        metric = gate.metric.partition(",")[0]
        asks_for_more = gate.operator.startswith("GreaterThan")
        better = ""
        if metric in LOWER_IS_BETTER and asks_for_more:
            better = "lower"
            operator = "LessThan"
        elif metric in HIGHER_IS_BETTER and not asks_for_more:
            better = "higher"
            operator = "GreaterThan"
        if better:
            problem = f"of {metric} a {better} number is better"
            problem += f", and the gate asks for {gate.words} {gate.value:g}"
            location = (*gate.location[:-1], "operator")
            yield location, f"{problem}; set operator to {operator}, unless you mean it"


def _closed_gates(spec: PipelineSpec) -> Iterator[tuple[GateMetric, Finding]]:
    """Yield the gates on a fraction that no score between 0 and 1 passes."""
    for gate in gate_metrics(spec):
        metric = gate.metric.partition(",")[0]
        compared = metric
        lowest = 0.0
        if gate.against_base:
            # The difference of two fractions may be negative.
            compared = f"{metric} minus the base model's"
            lowest = -1.0
        if metric not in FRACTIONS or gate.can_pass(lowest, 1.0):
            continue
        problem = f"no score is {gate.words} {gate.value:g}"
        message = f"{problem}: {compared} is between {lowest:g} and 1"
        # The likeliest mistake: the value was meant in percent.
        if 1 < gate.value <= PERCENT:
            fraction = gate.value / PERCENT
            message += f"; for {gate.value:g} % write {fraction:g}"
        yield gate, (gate.value_location, message)
