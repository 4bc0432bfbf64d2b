"""The files that a published model takes from its base model: tokenizer, processors and chat templates.

They are copied byte for byte. A tokenizer that transformers saves again has the form of that release, which servers
with another release cannot read.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
TEMPLATES = "additional_chat_templates"
"""Folder of the templates that have a name."""
DEFAULT = "default"
"""Name of the template that is used if a request names none."""
PROCESSOR_TEMPLATES = ("chat_template.json", "processor_config.json")
"""Files in which processors of earlier releases keep their template, under the same key as the tokenizer."""
FILES = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "tekken.json"),
    *("vocab*.json", "vocab*.txt", "vocab.bpe", "merges*.txt", "encoder.json"),
    *("*.model", "tokenizer.model.*", "*.tiktoken"),
    *("processor_config.json", "*preprocessor_config.json", "normalizer.json"),
    *("chat_template.*", "*.jinja", f"{TEMPLATES}/*.jinja"),
)
"""Patterns of tokenizer and processor files. Other files of a base model, such as logs, are not published."""
CODE = "auto_map"
"""Key of a configuration that names classes in files of code, which are not published."""


def copy_base_files(base: Path, folder: Path) -> None:
    """Copy the tokenizer, the processors and the chat templates of the base model to an existing folder."""
    for pattern in FILES:
        for path in sorted(base.glob(pattern)):
            if path.is_file():
                target = folder / path.relative_to(base)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)
    for path in folder.glob("*_config.json"):
        settings = _read(path)
        if settings.pop(CODE, None) is not None:
            _write(path, settings)


def name_tokenizer_class(folder: Path, name: str) -> None:
    """Write the class of the base model's tokenizer to an adapter's tokenizer, if the base's config.json decides it.

    An adapter has no config.json. `name` is the class that transformers 5 has loaded.
    """
    path = folder / TOKENIZER_CONFIG
    settings = _read(path) if path.exists() else {}
    known = settings.get("tokenizer_class")
    if not (folder / "tokenizer.json").exists():
        return
    # transformers 5 has this class for all tokenizers without one, and transformers 4 the other class.
    if name == "TokenizersBackend":
        settings.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    elif known not in {name, f"{name}Fast"}:
        settings["tokenizer_class"] = name
    if settings.get("tokenizer_class") != known:
        _write(path, settings)


def set_chat_templates(folder: Path, templates: Mapping[str, str]) -> None:
    """Replace chat templates of a copied tokenizer by name, in the files and the form that the base model uses.

    Templates of other names stay.
    """
    if DEFAULT in templates:
        _set_in_processor(folder, templates[DEFAULT])
    known = chat_templates(folder)
    changed = {
        name: template
        for name, template in templates.items()
        if known.get(name) != template
    }
    if not changed:
        return
    config = folder / TOKENIZER_CONFIG
    # transformers reads no template of the configuration if there is a file of templates.
    has_files = (folder / TEMPLATE).exists() or (folder / TEMPLATES).exists()
    if has_files or not config.exists():
        _set_in_files(folder, changed)
    if (not has_files and config.exists()) or _has_key(config):
        _set_in_config(config, changed)


def chat_templates(folder: Path) -> dict[str, str]:
    """Return the chat templates of a tokenizer by name, as transformers reads them."""
    files = {path.stem: path for path in sorted(folder.glob(f"{TEMPLATES}/*.jinja"))}
    if (folder / TEMPLATE).is_file():
        files[DEFAULT] = folder / TEMPLATE
    if files:
        return {name: path.read_text() for name, path in files.items()}
    if not (folder / TOKENIZER_CONFIG).is_file():
        return {}
    return _by_name(_read(folder / TOKENIZER_CONFIG).get("chat_template"))


def _by_name(value: Any) -> dict[str, str]:
    """Return the templates of a configuration: a text, or templates with names. Only processors have an object."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, list):
        return {entry["name"]: entry["template"] for entry in value}
    return {DEFAULT: value} if value else {}


def _set_in_processor(folder: Path, template: str) -> None:
    """Replace the default template of a processor, which servers read before the tokenizer's."""
    for name in PROCESSOR_TEMPLATES:
        path = folder / name
        if _has_key(path):
            known = _by_name(_read(path)["chat_template"])
            if known.get(DEFAULT) != template:
                _set_in_config(path, {DEFAULT: template})


def _set_in_files(folder: Path, changed: Mapping[str, str]) -> None:
    for name, template in changed.items():
        path = folder / TEMPLATE
        if name != DEFAULT:
            path = folder / TEMPLATES / f"{name}.jinja"
            path.parent.mkdir(exist_ok=True)
        path.write_text(template)


def _set_in_config(path: Path, changed: Mapping[str, str]) -> None:
    settings = _read(path)
    value = settings.get("chat_template")
    templates = {**_by_name(value), **changed}
    if isinstance(value, dict):
        settings["chat_template"] = templates
    elif isinstance(value, list) or set(templates) != {DEFAULT}:
        settings["chat_template"] = [
            {"name": name, "template": template} for name, template in templates.items()
        ]
    else:
        settings["chat_template"] = templates[DEFAULT]
    _write(path, settings)


def _has_key(path: Path) -> bool:
    return path.is_file() and "chat_template" in _read(path)


def _read(path: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(path.read_bytes())
    return settings


def _write(path: Path, settings: dict[str, Any]) -> None:
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    path.write_text(f"{text}\n")
