"""The manifest of a conversion as text, with its notes as comments."""

import textwrap

import yaml

from finetune_cli.convert.conversion import Conversion
from finetune_cli.manifest.json_schema import EDITOR_LINE
from finetune_operator.api.group import API_VERSION, KIND

WIDTH = 118


def manifest_text(conversion: Conversion, name: str, tool: str, file: str) -> str:
    """Return the manifest; the notes stand at its top."""
    head = [EDITOR_LINE, f"# Converted from {file}, a config of {tool}."]
    if conversion.notes:
        head.append("# Not as it was there:")
    for setting, text in conversion.notes:
        head += textwrap.wrap(
            f"{setting}: {text}",
            WIDTH,
            initial_indent="# - ",
            subsequent_indent="#   ",
            break_on_hyphens=False,
        )
    document = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name},
        "spec": conversion.spec,
    }
    body = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=WIDTH)
    return "\n".join([*head, body])
