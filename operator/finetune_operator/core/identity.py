"""Two hashes of each stage: its identity (what determines the result) and its execution (how it runs).

Same identity and a result: the result is reused. Same identity, other execution: a new attempt resumes in the same
folder. Other identity: a new attempt starts from the beginning in another folder.
"""

import hashlib
import json
from collections.abc import Mapping

from finetune_operator.api.stages.base import StageSpec
from finetune_trainer.contract import RESULTS_VERSION, StageConfig

# Folders and labels carry it. 64 bits are enough for the runs of one pipeline.
IDENTITY_DIGITS = 16
EXECUTION_FIELDS = ("pod", "placement")
PROGRAM_FIELDS = ("image", "command", "args", "env")


def identity_of(
    spec: StageSpec, config: StageConfig, source_digests: Mapping[str, str]
) -> str:
    """Return the hash of everything that determines the stage's result.

    Fields at their default are left out. So a later version with more fields reruns no stage. A change of a default
    requires a new RESULTS_VERSION.

    `source_digests` maps URIs to content digests, for sources that the cluster can read. So data that was edited in
    place counts as other data. If the user replaces the program, the program is part of the identity. If the result is
    a running server, its execution is part of the identity.
    """
    excluded = {"identity", *config.non_identity_fields}
    config_fields = config.model_dump(
        mode="json", exclude=excluded, exclude_defaults=True
    )
    program = {}
    # Without a command, the stage runs the trainer: its image decides nothing about the result.
    if spec.pod.command:
        program = spec.pod.model_dump(
            mode="json", include=set(PROGRAM_FIELDS), exclude_defaults=True
        )
    contents = {
        uri: source_digests[uri] for uri in config.strings() if uri in source_digests
    }
    fields = {
        "version": RESULTS_VERSION,
        "stage": spec.name,
        "config": config_fields,
        "program": program,
        "contents": contents,
    }
    if spec.runs_server:
        fields["runs"] = execution_of(spec)
    return _hash(fields)


def execution_of(spec: StageSpec) -> str:
    """Return the hash of how the stage runs: its nodes, resources, image and environment.

    Fields at their default are left out, so that a later version with more fields stops no running Job.
    """
    fields = {*EXECUTION_FIELDS, *spec.non_identity_fields}
    content = spec.model_dump(mode="json", include=fields, exclude_defaults=True)
    placement = content.pop("placement", {})
    # The other fields of the placement concern the next attempt only.
    if "capacity" in placement:
        content["placement"] = placement["capacity"]
    return _hash(content)


def _hash(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:IDENTITY_DIGITS]
