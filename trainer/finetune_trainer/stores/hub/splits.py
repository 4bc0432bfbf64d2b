"""The files of a split of a data set repository, found as the library `datasets` finds them.

Only names and the YAML of README.md decide, so a commit always has the same splits. The field `configs` of the YAML
lists the configs. Files without a config are assigned to splits by their names. Not supported: loading scripts,
`dataset_infos.json`, data files in other places than the repository, and options for parsing them.
"""

import tempfile
from collections import Counter
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import yaml

from finetune_trainer.runtime.errors import ConfigInvalid

FORMATS = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
}
"""Extensions that stages read, and the builder of `datasets` that reads each."""
# Other keys, such as `sep`, change how a file is parsed. To ignore them would train on other records.
UNDERSTOOD = frozenset(
    {
        "config_name",
        "data_files",
        "data_dir",
        "default",
        "version",
        "description",
        "features",
    }
)
"""Keys of a config."""
NO_DATA = frozenset({"", ".md", ".py", ".yaml", ".yml"})
"""Extensions of files that describe a data set."""
FENCE = "---"


def files_of_split(
    uri: str,
    names: AbstractSet[str],
    readme: str,
    config: str | None,
    split: str | None,
) -> frozenset[str]:
    """Return the names of the files that belong to a config and a split.

    `readme` is the text of README.md. None stands for the default config, and for the only split. Raise ConfigInvalid
    if that is ambiguous, unknown or not supported. The message names the configs or splits that there are.
    """
    chosen = _choose_config(uri, _configs(uri, readme), config)
    # `datasets` matches patterns against a file system only, so each name becomes an empty file.
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        for name in names:
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        by_split = _data_files(uri, chosen, root)
    chosen_split = _choose_split(uri, sorted(by_split), split)
    return _of_one_format(uri, by_split[chosen_split])


def _configs(uri: str, readme: str) -> list[dict[str, Any]]:
    """Return the configs of the YAML; only the config default if there are none."""
    # Editors on Windows begin a file with a byte order mark.
    lines = readme.lstrip("\ufeff").splitlines()
    if not lines or lines[0].strip() != FENCE:
        return [{"config_name": "default"}]
    if FENCE not in lines[1:]:
        return [{"config_name": "default"}]
    end = lines.index(FENCE, 1)
    try:
        data = yaml.safe_load("\n".join(lines[1:end]))
    except yaml.YAMLError as error:
        raise ConfigInvalid(
            f"{uri}: the YAML of its README.md cannot be read: {error}; name files by a path"
        ) from None
    configs = data.get("configs") if isinstance(data, dict) else None
    if not configs:
        return [{"config_name": "default"}]
    is_list = isinstance(configs, list)
    have_names = is_list and all(_has_name(config) for config in configs)
    if not have_names:
        raise ConfigInvalid(
            f"{uri}: configs of its README.md is no list with a config_name each; name files by a path"
        )
    return list(configs)


def _has_name(config: object) -> bool:
    return isinstance(config, dict) and "config_name" in config


def _choose_config(
    uri: str, configs: list[dict[str, Any]], name: str | None
) -> dict[str, Any]:
    """Return the named config, or the default config; raise ConfigInvalid if there is none, or it is not supported."""
    by_name = {str(config["config_name"]): config for config in configs}
    if name is None:
        name = _default_name(by_name)
    if name is None or name not in by_name:
        problem = f"has no config {name}" if name else "has several configs"
        names = ", ".join(sorted(by_name))
        raise ConfigInvalid(f"{uri} {problem}; set config to one of {names}")
    config = by_name[name]
    unknown = sorted(config.keys() - UNDERSTOOD)
    if unknown:
        raise ConfigInvalid(
            f"{uri}: its config {name} sets {unknown[0]}, which is not supported; name files by a path"
        )
    return config


def _default_name(configs: dict[str, dict[str, Any]]) -> str | None:
    """Return the name of the config that is marked as default, or of the only config; None if that is ambiguous."""
    marked = [
        name
        for name, config in configs.items()
        if config.get("default") or name == "default"
    ]
    candidates = marked or list(configs)
    if len(candidates) != 1:
        return None
    return candidates[0]


def _data_files(uri: str, config: dict[str, Any], root: Path) -> dict[str, list[str]]:
    """Return the files of each split; `root` has an empty file for each name of the repository."""
    from datasets.data_files import DataFilesDict, get_data_patterns  # noqa: PLC0415  takes seconds

    base = _inside(uri, str(config.get("data_dir") or ""))
    folder = (root / base).as_posix()
    try:
        data_files = config.get("data_files")
        patterns = (
            _patterns(uri, data_files) if data_files else get_data_patterns(folder)
        )
        by_split = DataFilesDict.from_patterns(patterns, base_path=folder)
    except FileNotFoundError:
        raise ConfigInvalid(
            f"{uri}: no files belong to its config {config['config_name']}; name files by a path: hf://ORG/NAME/PATH"
        ) from None
    return {
        str(split): [Path(file).relative_to(root).as_posix() for file in files]
        for split, files in by_split.items()
    }


def _patterns(uri: str, data_files: Any) -> dict[str, list[str]]:
    """Return the patterns of each split; files without a split are of the split train."""
    patterns: dict[str, list[str]] = {}
    for item in _as_list(data_files):
        split: Any = "train"
        paths: Any = item
        if isinstance(item, dict):
            split = item.get("split")
            paths = item.get("path")
        for path in _as_list(paths):
            if not isinstance(path, str) or not isinstance(split, str):
                raise ConfigInvalid(
                    f"{uri}: data_files of its README.md has {item!r}; name files by a path"
                )
            patterns.setdefault(split, []).append(_inside(uri, path))
    return patterns


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    return [value]


def _inside(uri: str, path: str) -> str:
    """Return a path of README.md; raise ConfigInvalid if it leaves the repository."""
    # `datasets` follows :: and :// to archives and to other servers.
    is_outside = path.startswith("/") or ".." in path.split("/")
    if is_outside or "::" in path or "://" in path:
        raise ConfigInvalid(
            f"{uri}: its README.md names {path}, which is outside of the repository; not supported"
        )
    return path


def _choose_split(uri: str, splits: list[str], split: str | None) -> str:
    if split is None and len(splits) == 1:
        return splits[0]
    if split is None or split not in splits:
        problem = f"has no split {split}" if split else "has several splits"
        raise ConfigInvalid(f"{uri} {problem}; set split to one of {', '.join(splits)}")
    return split


def _of_one_format(uri: str, files: list[str]) -> frozenset[str]:
    """Return the files of the format that most of them have, as `datasets` does."""
    extensions = {file: Path(file).suffix.lower() for file in files}
    counts = Counter(
        FORMATS.get(extension, extension)
        for extension in extensions.values()
        if extension not in NO_DATA
    )
    form = None
    if counts:
        [(form, _)] = counts.most_common(1)
    if form not in FORMATS.values():
        raise ConfigInvalid(
            f"{uri}: most of its files are {form or 'no data'}; supported are {', '.join(sorted(FORMATS))}"
        )
    chosen = [file for file in files if FORMATS.get(extensions[file]) == form]
    return frozenset(chosen)
