"""Settings of the site that `make site` builds with Sphinx.

The source folder is the whole repository, so a link that leaves docs/ leads to a page of the site or to a copy of the
file. docs/toc.yml has the navigation. A page that it lacks is a warning, as is a dead link, and a warning is an error.
"""

from typing import Any

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

project = "FineTunePipeline"
html_title = project
extensions = ["myst_parser", "sphinx_external_toc"]
external_toc_path = "docs/toc.yml"
include_patterns = [
    "*.md",
    "docs/**.md",
    "examples/**.md",
    "charts/**.md",
    "testcluster/**.md",
]
exclude_patterns = [".*", "**/.*"]
# Anchors as readers' programs make them, for each level of headings that the docs use.
myst_heading_anchors = 4
# A block without a language is output or shell, which Sphinx would read as Python.
highlight_language = "none"
html_theme = "furo"
html_copy_source = False
html_show_copyright = False


def setup(app: Sphinx) -> None:
    """Show the pictures of layers in docs/concepts/architecture.md as plain text, and mend the pages."""
    app.add_lexer("layers", TextLexer)
    # After the theme, which adds the navigation to the context.
    app.connect("html-page-context", add_accessibility, priority=900)


def add_accessibility(
    _app: Sphinx, _page: str, _template: str, context: dict[str, Any], _tree: object
) -> None:
    """Add what axe-core misses: the level of headings in the navigation, and a way by keyboard to what scrolls."""
    navigation = context["furo_navigation_tree"]
    level = 'role="heading" aria-level="2"'
    context["furo_navigation_tree"] = navigation.replace('role="heading"', level)
    body = context.get("body", "").replace("<pre>", '<pre tabindex="0">')
    table = 'class="table-wrapper'
    context["body"] = body.replace(table, f'tabindex="0" {table}')
