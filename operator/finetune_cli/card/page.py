"""The whole page: one file without scripts, images and links to other files."""

import base64
import hashlib
from importlib.resources import files

from finetune_cli.card.costs import costs_section
from finetune_cli.card.lineage import lineage_section
from finetune_cli.card.markup import Markup, element, shortened
from finetune_cli.card.overview import heading, overview_section
from finetune_cli.card.record import RunRecord
from finetune_cli.card.samples import samples_section
from finetune_cli.card.scores import scores_section
from finetune_cli.card.timeline import timeline_section
from finetune_cli.card.training import training_section
from finetune_cli.card.usage import usage_section

GENERATOR = "finetune card"
"""Name of the program in the page, by which it is known as a card."""
SECTIONS = (
    overview_section,
    scores_section,
    samples_section,
    training_section,
    timeline_section,
    costs_section,
    usage_section,
    lineage_section,
)
"""The sections in the order of the page."""


def page(record: RunRecord) -> str:
    """Return the page of a run."""
    style = Markup((files("finetune_cli.card") / "style.css").read_text("utf-8"))
    title = f"{shortened(record.name)}: run card"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        # Nothing may be loaded or run, even if a text got through as HTML.
        element("meta", http_equiv="Content-Security-Policy", content=_policy(style)),
        element(
            "meta", name_="viewport", content="width=device-width, initial-scale=1"
        ),
        element("meta", name_="color-scheme", content="light dark"),
        element("meta", name_="generator", content=GENERATOR),
        element("title", title),
        element("style", style),
    )
    sections = [section(record) for section in SECTIONS]
    main = element("main", heading(record), *sections)
    footer = element("footer", element("p", _footer(record)))
    body = element("body", main, footer)
    return "<!DOCTYPE html>\n" + element("html", head, body, lang="en") + "\n"


def _policy(style: str) -> str:
    digest = hashlib.sha256(style.encode()).digest()
    allowed = base64.b64encode(digest).decode()
    return (
        f"default-src 'none'; style-src 'sha256-{allowed}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _footer(record: RunRecord) -> str:
    status = record.status
    if status.finished_at:
        return (
            f"Finished at {status.finished_at:%Y-%m-%d %H:%M} UTC. Made by {GENERATOR}."
        )
    if record.at:
        return f"State at {record.at:%Y-%m-%d %H:%M} UTC. Made by {GENERATOR}."
    return f"Made by {GENERATOR}."
