"""`finetune validate --check` accepts the files that people have, and names a fix for the ones that are broken.

The preview runs in this process: a process of the trainer takes seconds for each manifest.
"""

import io
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.trainer import typical_data
from support.trainer.broken_data import MISTAKES, Mistake
from support.trainer.foreign_errors import FOREIGN
from support.trainer.shipped_templates import TRL_TEMPLATES
from support.trainer.typical_data import DataFile

from finetune_cli.__main__ import main
from finetune_trainer.contract import Environment
from finetune_trainer.contract.preview import PreviewReport, PreviewRequest
from finetune_trainer.preview.__main__ import with_log
from finetune_trainer.preview.preview import preview

Check = Callable[..., tuple[int, str]]


@pytest.fixture
def check(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Check:
    """A function that checks a manifest with these data sets; it returns exit code and output."""
    monkeypatch.chdir(tmp_path)

    def ask_here(
        _: object, environment: Environment, request: PreviewRequest
    ) -> PreviewReport:
        log = io.StringIO()
        with redirect_stdout(log):
            report = preview(request, environment)
        return with_log(report, log.getvalue())

    monkeypatch.setattr("finetune_cli.local.run.ask_trainer", ask_here)

    def check(datasets: list[dict[str, Any]], **changes: Any) -> tuple[int, str]:
        spec = {
            "model": {"uri": f"file://{tiny_model}"},
            "datasets": datasets,
            "validation": {"fraction": 0},
            "train": {},
            **changes,
        }
        document = {
            "apiVersion": "finetune.dev/v1alpha1",
            "kind": "FineTunePipeline",
            "metadata": {"name": "demo"},
            "spec": spec,
        }
        (tmp_path / "p.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
        code = main(["validate", "--check", "p.yaml"])
        return code, capsys.readouterr().out

    return check


TEMPLATES = {
    "none": (),
    "qwen3": (),
    "qwen2_5": ("has_reasoning",),
    "llama3_1": ("has_reasoning",),
    "gemma3": ("has_calls", "has_reasoning"),
    "phi3": ("has_calls", "has_reasoning"),
    "glm4moe": (),
}
"""Chat templates -> what they cannot render; the files with it must be refused, and are left out here."""


def without(files: dict[str, DataFile], parts: tuple[str, ...]) -> dict[str, DataFile]:
    return {
        name: file
        for name, file in files.items()
        if not any(getattr(file, part) for part in parts)
    }


@pytest.mark.parametrize("objective", ["SFT", "DPO"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_typical_files_are_accepted(
    check: Check, tmp_path: Path, template: str, objective: str
) -> None:
    every = typical_data.DPO if objective == "DPO" else typical_data.SFT
    files = without(every, TEMPLATES[template])
    prepare: dict[str, Any] = {"contextLength": 512}
    if template == "none":
        # The model has no template of its own: the trainer's renders no calls.
        files = without(every, ("has_calls", "has_reasoning"))
    else:
        (tmp_path / "template.jinja").write_text(TRL_TEMPLATES[template])
        prepare["chatTemplate"] = "template.jinja"
    datasets = typical_data.write(tmp_path, files)
    code, out = check(datasets, prepare=prepare, train={"objective": objective})
    assert code == 0, out
    assert " invalid" not in out


def test_thirty_typical_files_are_tried() -> None:
    assert len(typical_data.SFT) + len(typical_data.DPO) >= 30


REVIEWED = 22
"""Broken data sets that a review has tried."""


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_broken_data_has_a_line_and_a_fix(
    check: Check, tmp_path: Path, mistake: Mistake
) -> None:
    path = tmp_path / mistake.name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(mistake.content)
    changes = dict(mistake.changes)
    objective = changes.pop("objective", "SFT")
    uri = mistake.name.partition("/")[0]
    code, out = check(
        [{"uri": uri, **changes}],
        prepare={"contextLength": 128},
        train={"objective": objective},
    )
    assert code == 2
    # The line of the manifest, and in the data set the file with the line of the record.
    assert re.search(r"^p\.yaml:\d+: spec\.datasets", out, re.MULTILINE)
    assert (mistake.check or mistake.message) in out
    assert FOREIGN.search(out) is None


def test_all_reviewed_mistakes_are_tried() -> None:
    assert len(MISTAKES) >= REVIEWED
