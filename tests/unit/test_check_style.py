"""`.ci/check_style.py` reports a fault that is there, and nothing in what is fine."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
CORE = "operator/finetune_operator/core"


@pytest.fixture
def check_style(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / ".ci")
    return SimpleNamespace(**runpy.run_path(str(ROOT / ".ci" / "check_style.py")))


def modules(folder: str, count: int) -> list[str]:
    return [f"{folder}/module_{number}.py" for number in range(count)]


def test_folder_with_more_files_than_the_limit_is_reported(check_style):
    limit = check_style.FOLDER_FILES
    names = [*modules(CORE, limit), *modules(f"{CORE}/planning", limit + 1)]
    assert list(check_style.full_folders(names)) == [
        f"{CORE}/planning: {limit + 1} files, more than {limit}: sort them into folders by kind"
    ]


def test_only_modules_of_the_product_count_for_a_folder(check_style):
    limit = check_style.FOLDER_FILES
    others = [f"{CORE}/page.html", *modules("tests/unit/core", 2 * limit)]
    assert list(check_style.full_folders([*modules(CORE, limit), *others])) == []


def test_folders_with_an_exception_still_need_it(check_style):
    limit = check_style.FOLDER_FILES
    files = {
        folder: len(list((ROOT / folder).glob("*.py")))
        for folder in check_style.FOLDER_EXCEPTIONS
    }
    needed = {folder for folder, count in files.items() if count > limit}
    assert needed == set(check_style.FOLDER_EXCEPTIONS)


def test_loop_variable_each_is_reported_as_vague(check_style):
    problems = list(
        check_style.problems_in("test_x.py", "for each in (1, 2):\n    pass\n")
    )
    assert problems == [(1, "vague name 'each': one idea a line")]
