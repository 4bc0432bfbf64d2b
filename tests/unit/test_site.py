"""The docs as a site: it has every page and loads nothing from elsewhere, and manifests in the docs are valid."""

import importlib.util
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from support.browser import browser, shown_by_browser

from finetune_cli.__main__ import main
from finetune_cli.manifest.json_schema import manifest_schema
from finetune_cli.manifest.yaml import reader as yaml_reader

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MIGRATE = DOCS / "guides" / "migrate.md"
SCHEMA = manifest_schema()
KIND = "FineTunePipeline"
FIELDS = set(SCHEMA["properties"]["spec"]["properties"])
WITHOUT_SITE = importlib.util.find_spec("sphinx_external_toc") is None


class QuietHandler(SimpleHTTPRequestHandler):
    """A server of files without a line on stderr for each request."""

    def log_message(self, *_: Any) -> None:
        pass


def yaml_blocks(page: Path) -> Iterator[dict[str, Any]]:
    """Yield each YAML block of a page that is a mapping, read as the command line and kubectl read it."""
    for block in re.findall(
        r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL
    ):
        document = yaml_reader.parse(page, block.encode()).documents[0].plain()
        if isinstance(document, dict):
            yield document


def manifests() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield page and manifest of each block that is a manifest, or some fields of a spec."""
    for page in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]:
        for block in yaml_blocks(page):
            if set(block) <= FIELDS:
                yield page.stem, {"spec": block}
            elif block.get("kind", KIND) == KIND and "spec" in block:
                yield page.stem, block


@pytest.mark.parametrize(("page", "manifest"), [*manifests()])
def test_manifest_in_the_docs_has_the_shape_of_the_api(page, manifest):
    """Parts of a manifest need not have every required field."""
    errors = jsonschema.Draft7Validator(SCHEMA).iter_errors(manifest)
    is_part = "kind" not in manifest
    assert [
        error.message
        for error in errors
        if not (is_part and error.validator == "required")
    ] == []


def test_converted_config_of_the_docs_is_what_convert_writes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    *_, config, expected = yaml_blocks(MIGRATE)
    Path("axolotl.yaml").write_text(yaml.safe_dump(config))
    assert main(["convert", "axolotl.yaml", "-o", "pipeline.yaml"]) == 0
    [written] = yaml_reader.load(Path("pipeline.yaml")).documents
    assert written.plain()["spec"] == expected["spec"]


def pages(entries: list[dict[str, Any]]) -> set[str]:
    """Return the pages of the entries of the navigation, and of the entries below them."""
    listed = set()
    for entry in entries:
        listed |= pages(entry.get("entries", []))
        if "file" in entry:
            listed.add(f"{entry['file']}.md")
        else:
            paths = ROOT.glob(f"{entry['glob']}.md")
            listed |= {str(path.relative_to(ROOT)) for path in paths}
    return listed


def test_navigation_of_the_site_has_every_page_of_the_docs():
    toc = yaml.safe_load((DOCS / "toc.yml").read_text())
    listed = set().union(*(pages(part["entries"]) for part in toc["subtrees"]))
    assert {path for path in listed if not (ROOT / path).exists()} == set()
    written = {str(path.relative_to(ROOT)) for path in DOCS.rglob("*.md")}
    assert written - listed == set()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built as `make site` builds it, without a warning."""
    folder = tmp_path_factory.mktemp("build")
    options = re.search(
        r"^SITE := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    assert options
    arguments = options[1].replace("build/", f"{folder}/").split()
    build = [sys.executable, "-m", "sphinx", *arguments]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return folder / "site"


@pytest.mark.slow
@pytest.mark.skipif(WITHOUT_SITE, reason="the extra `site` is not installed")
def test_site_builds_without_a_warning_and_loads_nothing(site):
    files = [path for path in site.rglob("*.*") if path.is_file()]
    load = re.compile(
        r"<(?:link|script|img|iframe|source)\b[^>]*(?:src|href)=\"(?:https?:)?//[^>]*"
        r"|(?:url\(|@import )[\"']?https?:[^)]*"
    )
    texts = {
        path.name: path.read_text()
        for path in files
        if path.suffix in {".html", ".css", ".svg"}
    }
    assert {
        name: load.findall(text) for name, text in texts.items() if load.search(text)
    } == {}
    assert "setIndex" in (site / "searchindex.js").read_text()


@pytest.mark.slow
@pytest.mark.skipif(WITHOUT_SITE, reason="the extra `site` is not installed")
@pytest.mark.skipif(not browser(), reason="needs Chromium, which nothing installs here")
def test_search_in_a_browser_finds_pages_of_a_server_and_a_file(site):
    handler = partial(QuietHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        served = shown_by_browser(
            f"http://127.0.0.1:{server.server_address[1]}/search.html?q=eviction"
        )
        server.shutdown()
    for page in (served, shown_by_browser(f"{site.as_uri()}/search.html?q=eviction")):
        summary = re.search(r"found (\d+) pages matching the search query", page)
        assert summary
        assert int(summary[1]) > 3
        assert 'href="docs/guides/placement.html' in page
