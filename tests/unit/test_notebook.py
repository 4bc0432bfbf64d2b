"""The notebook of examples/python runs as it is, and its stored outputs are its own."""

import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from support.browser import browser, shown_by_browser
from support.cli.run_cards import PageReader
from typing_extensions import override

from finetune_cli.output.loss_curve import BLOCKS

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOK = EXAMPLES / "python/pipeline.ipynb"


COLOR = r"\x1b\[[0-9;]*m"
TIME = r"(\d+h)?(\d+m)?\d+s\b"
NUMBER = r"-?\d[\d,]*(\.\d+)?"


def outputs(notebook):
    """Return the texts below each cell, with a mark for each number: scores and times differ between machines.

    The curve of a loss is one mark, and a line may break at another place.
    """
    texts = []
    for cell in notebook.cells:
        shown = [
            output.get("text") or output.get("data", {}).get("text/plain", "")
            for output in cell.get("outputs", ())
        ]
        text = re.sub(COLOR, "", "".join(shown))
        text = re.sub(rf"[{BLOCKS}]+|{TIME}|{NUMBER}", "#", text)
        texts.append(" ".join(text.split()))
    return texts


class FrameReader(HTMLParser):
    """Reads the attributes of the frames in a page."""

    def __init__(self, page):
        super().__init__()
        self.frames = []
        self.feed(page)

    @override
    def handle_starttag(self, tag, attrs):
        if tag == "iframe":
            self.frames.append(dict(attrs))


def cards(notebook):
    """Return the page in each frame below a cell, as a browser reads it."""
    pages = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            html = output.get("data", {}).get("text/html", "")
            pages += [frame["srcdoc"] for frame in FrameReader(html).frames]
    return pages


@pytest.mark.skipif(
    os.environ.get("TRAINING") != "all",
    reason="TRAINING=all runs it: a whole pipeline of two minutes; tests/unit/cli/test_python_*.py has each call",
)
def test_notebook_runs_with_its_stored_outputs(tmp_path):
    for folder in ("demo", "python"):
        shutil.copytree(EXAMPLES / folder, tmp_path / folder)
    notebook = nbformat.read(tmp_path / "python/pipeline.ipynb", as_version=4)
    stored = outputs(notebook)
    place = {"metadata": {"path": str(tmp_path / "python")}}
    NotebookClient(notebook, timeout=600, resources=place).execute()
    assert outputs(notebook) == stored
    [card] = cards(notebook)
    text = PageReader(card).text
    assert "docstrings Succeeded" in text
    assert "Asked and got" in text
    if browser():
        page = tmp_path / "card.html"
        page.write_text(card)
        assert "Asked and got</h2>" in shown_by_browser(page.as_uri())


def test_notebook_watches_a_run_and_shows_its_card():
    """The card is not stored: it has the times and digests of one machine."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    sources = [cell.source for cell in notebook.cells]
    [stages] = [
        shown
        for source, shown in zip(sources, outputs(notebook), strict=True)
        if "run.watch()" in source
    ]
    for stage in ("prepare", "train", "evaluate"):
        assert f"✔ {stage} done in #" in stages
    assert "run" in sources


def test_outputs_name_no_folder_of_a_machine():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    texts = outputs(notebook)
    assert any(texts)
    assert not [text for text in texts if re.search(r"/(home|root|tmp|Users)/", text)]
