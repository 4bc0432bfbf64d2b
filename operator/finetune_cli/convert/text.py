"""The manifest of a conversion as text, with its notes as comments."""

import textwrap

from finetune_cli.convert.conversion import Conversion
from finetune_cli.manifest.json_schema import EDITOR_LINE
from finetune_cli.manifest.yaml.writer import WIDTH, to_yaml


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
    body = to_yaml({"name": name}, conversion.spec)
    return "\n".join([*head, body])
