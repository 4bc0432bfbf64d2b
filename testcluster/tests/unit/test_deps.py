"""Installation of what clusters need, with scripts in place of dpkg-query and apt-get that keep a list of packages."""

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
for name in "$@"; do case "$name" in install|-*) ;; *) echo "$name" >> "$PACKAGES" ;; esac; done
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The file with the names of the installed packages; at first every package is installed."""
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


def uninstall(installed, *names):
    installed.write_text(
        "".join(f"{name}\n" for name in deps.PACKAGES if name not in names)
    )


def test_install_with_nothing_missing_runs_no_apt(installed, monkeypatch):
    monkeypatch.setenv("APT_FAILS", "apt-get must not run")
    deps.install(deps.missing())


def test_install_installs_missing_packages_only(installed, capsys):
    uninstall(installed, "nftables", "libc6-dev")
    deps.install(deps.missing())
    assert installed.read_text().split()[-2:] == ["libc6-dev", "nftables"]
    assert deps.missing() == []
    assert capsys.readouterr().err == "installing libc6-dev nftables …\n"


def test_install_without_root_names_the_apt_command(installed, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    uninstall(installed, "nftables", "buildah")
    with pytest.raises(UsageError, match="sudo apt install buildah nftables`"):
        deps.install(deps.missing())


def test_error_of_apt_is_shown(installed, monkeypatch):
    uninstall(installed, "nftables")
    monkeypatch.setenv("APT_FAILS", "Unable to fetch some archives")
    with pytest.raises(
        UsageError, match="apt-get update failed: E: Unable to fetch some archives"
    ):
        deps.install(deps.missing())


def test_without_dpkg_programs_and_files_are_checked(installed, tmp_path, monkeypatch):
    (tmp_path / "dpkg-query").unlink()
    header = tmp_path / "header.h"
    monkeypatch.setattr(
        deps, "PACKAGES", {"a": str(header), "b": "b-program", "c": "apt-get"}
    )
    assert deps.missing() == ["a", "b"]
    header.touch()
    assert deps.missing() == ["b"]


def test_unsuitable_machine_prints_one_line_and_exits_3(installed, monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    uninstall(installed, "nftables")
    assert deps.main() == 3
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("cluster-deps: CANNOT CREATE CLUSTERS ON THIS MACHINE: ")
