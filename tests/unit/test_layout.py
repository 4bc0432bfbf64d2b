import operator
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_operator_folder_does_not_hide_the_standard_librarys_operator_module():
    assert not (ROOT / "operator" / "__init__.py").exists()
    assert not list((ROOT / "operator").glob("*.py"))
    assert Path(operator.__file__).is_relative_to(sysconfig.get_path("stdlib"))
