"""The files of a split of a data set repository, found as the library `datasets` finds them.

Only names and the YAML of README.md decide, so the answer is that of the commit they come from. Configs are those of
`configs` in the YAML. Files without one are assigned to splits by their names. Not supported: loading scripts,
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
UNDERSTOOD = frozenset(
    {"config_name", "data_files", "data_dir", "default", "version", "description", "features"}
)
"""Keys of a config. Others, such as `sep`, change how a file is parsed."""
NO_DATA = frozenset({"", ".md", ".py", ".yaml", ".yml"})
"""Extensions of files that describe a data set."""
FENCE = "---"


def files_of_split(
    uri: str, names: AbstractSet[str], readme: str, config: str | None, split: str | None
) -> frozenset[str]:
    """Return the names of the files that belong to a config and a split.

    `readme` is the text of README.md. None stands for the default config, and for the only split. Raise ConfigInvalid
    if that is ambiguous, unknown or not supported. The message names the configs or splits that there are.
    """
    chosen = _choose_config(uri, _configs(uri, readme), config)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).touch()
        found = _data_files(uri, chosen, root)
    files = found[_choose_split(uri, sorted(found), split)]
    return _of_one_format(uri, files)


def _configs(uri: str, readme: str) -> list[dict[str, Any]]:
    """Return the configs of the YAML; one named default if there are none."""
    lines = readme.lstrip("\ufeff").splitlines()
    if not lines or lines[0].strip() != FENCE or FENCE not in lines[1:]:
        return [{"config_name": "default"}]
    try:
        data = yaml.safe_load("\n".join(lines[1 : lines.index(FENCE, 1)]))
    except yaml.YAMLError as error:
        raise ConfigInvalid(
            f"{uri}: the YAML of its README.md cannot be read: {error}; name files by a path"
        ) from None
    configs = data.get("configs") if isinstance(data, dict) else None
    if not configs:
        return [{"config_name": "default"}]
    if not isinstance(configs, list) or not all(
        isinstance(item, dict) and "config_name" in item for item in configs
    ):
        raise ConfigInvalid(
            f"{uri}: configs of its README.md is no list with a config_name each; name files by a path"
        )
    return configs


def _choose_config(uri: str, configs: list[dict[str, Any]], name: str | None) -> dict[str, Any]:
    by_name = {str(config["config_name"]): config for config in configs}
    if name is None:
        marked = [
            key for key, config in by_name.items() if config.get("default") or key == "default"
        ]
        candidates = marked or list(by_name)
        name = candidates[0] if len(candidates) == 1 else None
    if name is None or name not in by_name:
        problem = f"has no config {name}" if name else "has several configs"
        raise ConfigInvalid(f"{uri} {problem}; set config to one of {', '.join(sorted(by_name))}")
    if unknown := sorted(by_name[name].keys() - UNDERSTOOD):
        raise ConfigInvalid(
            f"{uri}: its config {name} sets {unknown[0]}, which is not supported; name files by a path"
        )
    return by_name[name]


def _data_files(uri: str, config: dict[str, Any], root: Path) -> dict[str, list[str]]:
    """Return the files of each split; `root` has an empty file for each name of the repository."""
    from datasets.data_files import DataFilesDict, get_data_patterns  # noqa: PLC0415  takes seconds

    base = _inside(uri, str(config.get("data_dir") or ""))
    folder = (root / base).as_posix()
    try:
        patterns = (
            _patterns(uri, config["data_files"])
            if config.get("data_files")
            else get_data_patterns(folder)
        )
        found = DataFilesDict.from_patterns(patterns, base_path=folder)
    except FileNotFoundError:
        raise ConfigInvalid(
            f"{uri}: no files belong to its config {config['config_name']}; name files by a path: hf://ORG/NAME/PATH"
        ) from None
    return {
        str(split): [Path(file).relative_to(root).as_posix() for file in files]
        for split, files in found.items()
    }


def _patterns(uri: str, data_files: Any) -> dict[str, list[str]]:
    """Return the patterns of each split; files without one are of the split train."""
    items = data_files if isinstance(data_files, list) else [data_files]
    patterns: dict[str, list[str]] = {}
    for item in items:
        split, paths = (
            (item.get("split"), item.get("path")) if isinstance(item, dict) else ("train", item)
        )
        for path in paths if isinstance(paths, list) else [paths]:
            if not isinstance(path, str) or not isinstance(split, str):
                raise ConfigInvalid(
                    f"{uri}: data_files of its README.md has {item!r}; name files by a path"
                )
            patterns.setdefault(split, []).append(_inside(uri, path))
    return patterns


def _inside(uri: str, path: str) -> str:
    """Return a path of README.md; raise ConfigInvalid if it leaves the repository."""
    if path.startswith("/") or ".." in path.split("/") or "::" in path or "://" in path:
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
    form = counts.most_common(1)[0][0] if counts else None
    if form not in FORMATS.values():
        raise ConfigInvalid(
            f"{uri}: most of its files are {form or 'no data'}; supported are {', '.join(sorted(FORMATS))}"
        )
    return frozenset(file for file in files if FORMATS.get(extensions[file]) == form)
