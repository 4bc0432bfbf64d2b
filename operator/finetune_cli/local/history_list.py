"""`finetune list --history` on this machine."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from finetune_cli.comparison.compare import Run
from finetune_cli.local.generations import as_run, generations_of
from finetune_cli.output.history_lines import history_lines
from finetune_cli.output.notes import with_notes
from finetune_cli.runs import RUNS
from finetune_operator.api.group import API_VERSION, KIND
from finetune_operator.errors import ClusterError
from finetune_operator.local.history import Generation
from finetune_operator.local.pipeline_file import to_object


def print_history(folders: Sequence[Path], *, as_json: bool) -> None:
    """Print all generations of these runs; a run that cannot be read has a line with the reason."""
    histories: list[tuple[Path, list[Generation]]] = []
    problems = []
    for folder in folders:
        try:
            histories.append((folder, generations_of(folder)))
        except ClusterError as error:
            # One damaged file must not hide the other runs.
            problems.append(str(error))
    if as_json:
        items = [_object(item) for _, history in histories for item in history]
        listed = {"apiVersion": API_VERSION, "kind": f"{KIND}List", "items": items}
        print(json.dumps(listed, indent=1))
        return
    now = datetime.now(UTC)  # noqa: TID251  an edge
    runs = [_runs(folder, history) for folder, history in histories]
    for line in (*history_lines(runs, now), *problems):
        print(line)


def _runs(folder: Path, history: Sequence[Generation]) -> list[Run]:
    # As the user selects it for `finetune compare`.
    name = folder.name if folder.parent == RUNS else str(folder)
    return [as_run(f"{name}@{generation.number}", generation) for generation in history]


def _object(generation: Generation) -> dict[str, Any]:
    return {"history": generation.number, **with_notes(to_object(generation.pipeline))}
