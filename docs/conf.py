"""Settings of the site that `make site` builds with Sphinx.

The source folder is the whole repository, so a link that leaves docs/ leads to a page of the site or to a copy of the
file. docs/toc.yml has the navigation. A page that it lacks is a warning, as is a dead link, and a warning is an error.
"""

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
    """Show the pictures of layers in docs/concepts/architecture.md as plain text."""
    app.add_lexer("layers", TextLexer)
