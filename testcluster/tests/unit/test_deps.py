"""Installing what clusters need, on a Debian whose dpkg and apt are scripts that keep a list of packages."""

import os

import pytest

from testcluster import deps
from testcluster.errors import UsageError

DPKG_QUERY = """#!/bin/sh
while read -r name; do echo "$name installed"; done < "$PACKAGES"
"""
APT_GET = """#!/bin/sh
[ -z "$APT_FAILS" ] || { echo "E: $APT_FAILS" >&2; exit 100; }
[ "$1" = install ] || exit 0
for word in "$@"; do case "$word" in install|-*) ;; *) echo "$word" >> "$PACKAGES" ;; esac; done
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The file with the names of the installed packages: all of them."""
    for name, script in {"dpkg-query": DPKG_QUERY, "apt-get": APT_GET}.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    packages = tmp_path / "packages"
    packages.write_text("".join(f"{name}\n" for name in deps.PACKAGES))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PACKAGES", str(packages))
    monkeypatch.setenv("APT_FAILS", "")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return packages


def without(installed, *names):
    installed.write_text("".join(f"{name}\n" for name in deps.PACKAGES if name not in names))


def test_nothing_happens_when_all_is_there(installed, monkeypatch):
    monkeypatch.setenv("APT_FAILS", "apt must not be asked")
    deps.install(deps.missing())


def test_what_is_missing_is_installed_and_nothing_else(installed, capsys):
    without(installed, "nftables", "libc6-dev")
    deps.install(deps.missing())
    assert installed.read_text().split()[-2:] == ["libc6-dev", "nftables"]
    assert deps.missing() == []
    assert capsys.readouterr().err == "installing libc6-dev nftables …\n"


def test_a_person_who_is_not_root_is_told_the_command(installed, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    without(installed, "nftables", "buildah")
    with pytest.raises(UsageError, match="sudo apt install buildah nftables`"):
        deps.install(deps.missing())


def test_apts_own_words_are_shown(installed, monkeypatch):
    without(installed, "nftables")
    monkeypatch.setenv("APT_FAILS", "Unable to fetch some archives")
    with pytest.raises(UsageError, match="apt-get update failed: E: Unable to fetch some archives"):
        deps.install(deps.missing())


def test_without_dpkg_a_program_or_file_is_enough(installed, tmp_path, monkeypatch):
    (tmp_path / "dpkg-query").unlink()
    there = tmp_path / "header.h"
    monkeypatch.setattr(deps, "PACKAGES", {"a": str(there), "b": "b-program", "c": "apt-get"})
    assert deps.missing() == ["a", "b"]
    there.touch()
    assert deps.missing() == ["b"]


def test_a_machine_that_lacks_something_gets_one_loud_line_and_a_status_of_its_own(installed, monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    without(installed, "nftables")
    assert deps.main() == 3
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("cluster-deps: NO CLUSTER CAN BE MADE HERE: ")
