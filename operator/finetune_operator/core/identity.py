"""Two hashes a stage: what determines its result, and how it runs.

Same identity and a result: reused, never run again. Same identity, another execution: a new attempt that
resumes. Another identity: another folder, a fresh start.
"""

import hashlib
import json
from collections.abc import Mapping

from finetune_operator.api.stages.base import StageSpec
from finetune_trainer.contract import RESULTS_VERSION, StageConfig

IDENTITY_DIGITS = 16
EXECUTION_FIELDS = (
    *("image", "command", "args", "resources", "placement", "env"),
    *("secret_refs", "service_account_name", "priority_class_name"),
)
PROGRAM_FIELDS = ("image", "command", "args", "env")


def identity_of(spec: StageSpec, config: StageConfig, contents: Mapping[str, str]) -> str:
    """Hash everything that determines the stage's result.

    What was left at its default is left out, so that an operator that knows more fields runs nothing anew; a default
    that changes raises RESULTS_VERSION.

    `contents` gives the digest of what lies behind a URI, where the cluster can see it: data that changed in
    place is other data. A container that is not ours determines its result too, and of a stage whose result is
    something that runs, how it runs is part of what it is.
    """
    said = config.model_dump(mode="json", exclude={"identity", *config.non_identity_fields}, exclude_defaults=True)
    program = spec.model_dump(mode="json", include=set(PROGRAM_FIELDS), exclude_defaults=True) if spec.command else {}
    runs = {"runs": execution_of(spec)} if spec.runs_server else {}
    seen = {text: contents[text] for text in config.strings() if text in contents}
    return _hash(
        {"version": RESULTS_VERSION, "stage": spec.name, "config": said, "program": program, "contents": seen, **runs}
    )


def execution_of(spec: StageSpec) -> str:
    """Hash how the stage runs: where, on what, with which image and environment.

    Without what was left at its default, so that an operator that knows more fields stops nobody's Job.
    """
    how = {*EXECUTION_FIELDS, *spec.non_identity_fields}
    return _hash(spec.model_dump(mode="json", include=how, exclude_defaults=True))


def _hash(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:IDENTITY_DIGITS]
