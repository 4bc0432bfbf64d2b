"""The cache of programs, with a fake Go: a script that writes another script, which prints a version."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from testcluster import binaries, go_modules, toolchain
from testcluster.errors import TimedOut, UsageError

FAKE_GO = """#!{python} -IS
import json, os, pathlib, sys, time
if sys.argv[1] == "env":
    print(json.dumps({{"GOVERSION": os.environ["FAKE_VERSION"], "GOCACHE": "{here}", "GOMODCACHE": "{here}/pkg/mod"}}))
    sys.exit()
sys.stderr.write(os.environ["FAKE_ERROR"])
if sys.argv[1] in ("version", "mod"):
    print(os.environ["FAKE_INFORMATION"])
    sys.exit(bool(os.environ["FAKE_ERROR"]))
out = pathlib.Path(sys.argv[sys.argv.index("-o") + 1])
with out.open("w") as program:
    print("#!/bin/sh", file=program, flush=True)
    with open("{here}/calls", "a") as calls:
        print(sys.argv[-1].rpartition("/")[2], file=calls)
    time.sleep(float(os.environ["FAKE_SECONDS"]))
    print("echo", os.environ["FAKE_ANSWER"], file=program)
out.chmod(0o755)
sys.exit(bool(os.environ["FAKE_ERROR"]))
"""
BUILD = """
import sys
from testcluster import binaries, go_modules, toolchain
toolchain.REQUIRED_BYTES = 0  # as the fixture does in the process of the test: the disk may be smaller
print(binaries.build_missing(sys.argv[1:]))
"""
PROGRAMS = ["kubelet", "kube-proxy"]
KUBE_VERSION = go_modules.version(go_modules.BINARIES["kubelet"])
HELM_CONTROLLER = go_modules.version(go_modules.BINARIES["helm-controller"])
OF_HELM_CONTROLLER = "dep github.com/fluxcd/helm-controller"


@pytest.fixture
def go(tmp_path, monkeypatch):
    """The folder of the only Go on PATH; its file `calls` records what was built."""
    folder = tmp_path / "go"
    folder.mkdir()
    (folder / "go").write_text(FAKE_GO.format(python=sys.executable, here=folder))
    (folder / "go").chmod(0o755)
    settings = {
        "VERSION": "go9.9",
        "ERROR": "",
        "SECONDS": "0",
        "ANSWER": f"Kubernetes v{KUBE_VERSION}",
    }
    settings["INFORMATION"] = ""
    for name, value in settings.items():
        monkeypatch.setenv(f"FAKE_{name}", value)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    monkeypatch.setattr(toolchain, "REQUIRED_BYTES", 0)
    monkeypatch.setattr(toolchain, "REQUIRED_BYTES_OF_TESTS", 0)
    return folder


def calls(go):
    try:
        return (go / "calls").read_text().split()
    except FileNotFoundError:
        return []


def start(*names, **settings):
    """Start a build in another process, which leads a process group of its own."""
    environment = os.environ | {
        f"FAKE_{name}": value for name, value in settings.items()
    }
    command = [sys.executable, "-c", BUILD, *names]
    root = Path(binaries.__file__).parents[1]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command,
        cwd=root,
        env=environment,
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
    )


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for_calls(go, process):
    """Wait until a build has called Go."""
    wait_for(lambda: calls(go) or process.poll() is not None)
    assert process.poll() is None, process.communicate()


def content(folder):
    return {path.name for path in folder.iterdir() if path.name != ".lock"}


def test_missing_programs_are_built_and_reported(go):
    binaries.build_missing(["kubelet"])
    lines: list[str] = []
    folder = binaries.build_missing(PROGRAMS, lines.append)
    assert content(folder) == set(PROGRAMS)
    assert calls(go) == ["kubelet", "kube-proxy"]
    assert lines[0] == f"building kube-proxy {KUBE_VERSION} …"
    assert lines[1].startswith(f"kube-proxy {KUBE_VERSION} built in ")
    assert len(lines) == 2


def test_parallel_builds_share_the_work(go):
    first = start(*PROGRAMS, SECONDS="0.3")
    wait_for_calls(go, first)
    second = start(*PROGRAMS)
    outputs = [process.communicate(timeout=20) for process in (first, second)]
    assert outputs[0][0] == outputs[1][0] == f"{binaries.folder()}\n"
    assert f"waiting for process {first.pid} " in outputs[1][1]
    assert sorted(calls(go)) == sorted(PROGRAMS)


def test_build_after_a_killed_build_succeeds(go):
    killed = start(*PROGRAMS, SECONDS="60")
    wait_for_calls(go, killed)
    folder = binaries.folder()
    # Kill the builder only. Its compiler keeps writing, as it does after an out-of-memory kill.
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not content(folder) & set(PROGRAMS)
    try:
        assert binaries.build_missing(PROGRAMS) == folder
        assert content(folder) == set(PROGRAMS)
        for name in PROGRAMS:
            assert KUBE_VERSION in subprocess.check_output([folder / name], text=True)
    finally:
        os.killpg(killed.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "answer",
    [
        "Kubernetes v0.0.0-master",
        f"Kubernetes v{KUBE_VERSION}1",
        f"v1{KUBE_VERSION}",
        "''",
    ],
)
def test_program_with_another_version_is_refused(go, monkeypatch, answer):
    monkeypatch.setenv("FAKE_ANSWER", answer)
    with pytest.raises(
        UsageError, match=f"kubelet {KUBE_VERSION} was built but reports"
    ):
        binaries.build_missing(["kubelet"])
    assert content(binaries.folder()) == set()


def test_program_without_version_option_is_checked(go, monkeypatch):
    monkeypatch.setenv("FAKE_ANSWER", "usage")
    monkeypatch.setenv(
        "FAKE_INFORMATION",
        f"path github.com/fluxcd/helm-controller\n{OF_HELM_CONTROLLER} v{HELM_CONTROLLER} h1:x",
    )
    binaries.build_missing(["helm-controller"])
    assert content(binaries.folder("helm-controller")) == {"helm-controller"}


@pytest.mark.parametrize(
    "information",
    [
        "dep github.com/fluxcd/helm-controller v0.0.1",
        f"dep github.com/fluxcd/helm-controller/api v{HELM_CONTROLLER}",
        "",
    ],
)
def test_program_with_other_build_information_is_refused(go, monkeypatch, information):
    monkeypatch.setenv("FAKE_ANSWER", f"usage of {HELM_CONTROLLER}")
    monkeypatch.setenv("FAKE_INFORMATION", information)
    with pytest.raises(
        UsageError, match=f"helm-controller {HELM_CONTROLLER} was built but reports"
    ):
        binaries.build_missing(["helm-controller"])
    assert content(binaries.folder("helm-controller")) == set()


def test_source_of_a_program_is_its_module_folder(go, monkeypatch):
    monkeypatch.setenv("FAKE_INFORMATION", '{"Dir": "/modules/argo-cd"}')
    assert binaries.source("argocd") == Path("/modules/argo-cd")


def test_source_that_cannot_be_downloaded_is_refused(go, monkeypatch):
    monkeypatch.setenv("FAKE_ERROR", "exit")
    monkeypatch.setenv("FAKE_INFORMATION", '{"Error": "dial tcp: i/o timeout"}')
    with pytest.raises(
        UsageError, match="argocd: cannot download its source: dial tcp: i/o timeout"
    ):
        binaries.source("argocd")


def test_go_is_not_needed_when_everything_is_built(go, monkeypatch):
    folder = binaries.build_missing(PROGRAMS)
    monkeypatch.setenv("PATH", "")
    assert binaries.build_missing(PROGRAMS) == folder


def test_missing_go_is_refused_with_version_and_fix(go, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        UsageError,
        match=rf"Go {go_modules.needed_go(['containerd'])} or newer, .*no Go on this machine; install it",
    ):
        binaries.build_missing(["containerd"])
    assert not binaries.folder().exists()


@pytest.mark.parametrize("old", ["go1.26.5", "go1.26rc1", "go1.9.9", ""])
def test_old_go_is_refused_by_path_and_version(go, monkeypatch, old):
    monkeypatch.setenv("FAKE_VERSION", old)
    with pytest.raises(UsageError, match=f"{go}/go is {old or 'not usable'}; install"):
        binaries.build_missing(["containerd"])


def test_full_disk_is_refused_before_the_build(go, monkeypatch):
    monkeypatch.setattr(toolchain, "REQUIRED_BYTES", 1 << 60)
    with pytest.raises(
        UsageError,
        match=r"GiB free, .*free disk space, or set FINETUNE_CACHE, .* to folders on another disk",
    ):
        binaries.build_missing(PROGRAMS)
    assert not binaries.folder().exists()
    assert calls(go) == []


def test_program_for_tests_requires_less_space(go, monkeypatch):
    monkeypatch.setattr(toolchain, "REQUIRED_BYTES", 1 << 60)
    monkeypatch.setattr(toolchain, "REQUIRED_BYTES_OF_TESTS", 0)
    assert binaries._toolchain(["promql", "kubeadm"]) == str(go / "go")
    with pytest.raises(UsageError, match="GiB free"):
        binaries._toolchain(["promql", "kubectl"])


def test_download_of_sources_needs_no_space_for_a_build(go, monkeypatch):
    monkeypatch.setattr(toolchain, "REQUIRED_BYTES", 1 << 60)
    assert binaries._toolchain(["runc"], only_downloads=True) == str(go / "go")


def test_missing_c_compiler_is_refused_with_the_packages(go):
    with pytest.raises(UsageError, match="libseccomp-dev pkg-config gcc"):
        binaries.build_missing(["runc", *PROGRAMS])
    assert calls(go) == []


def test_failed_build_shows_the_end_of_compiler_output(go, monkeypatch):
    monkeypatch.setenv(
        "FAKE_ERROR", "\n".join(f"line {number}" for number in range(100))
    )
    with pytest.raises(TimedOut, match=r"(?s)output ends with:\nline 80\n.*line 99$"):
        binaries.build_missing(PROGRAMS)
    assert content(binaries.folder()) == set()


def test_unreachable_module_proxy_is_refused(go, monkeypatch):
    monkeypatch.setenv(
        "FAKE_ERROR", "go: example.org/x@v1: dial tcp 192.0.2.1:443: i/o timeout"
    )
    with pytest.raises(
        UsageError, match="cannot reach the Go module proxy; check the network"
    ):
        binaries.build_missing(PROGRAMS)


def test_unwritable_cache_is_refused(go, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="set FINETUNE_CACHE"):
        binaries.build_missing(PROGRAMS)


@pytest.mark.parametrize(
    "changed", ["etcd/go.sum", "etcd/go.mod", "pause/main.go", "pause/more/main.go"]
)
def test_changed_module_changes_the_folder(tmp_path, monkeypatch, changed):
    modules = shutil.copytree(go_modules.MODULES, tmp_path / "modules")
    before = binaries.folder()
    monkeypatch.setattr(go_modules, "MODULES", modules)
    assert binaries.folder() == before
    (modules / changed).parent.mkdir(exist_ok=True)
    with (modules / changed).open("a") as file:
        file.write("\n")
    assert binaries.folder() != before


def test_changed_module_of_tests_changes_its_own_folder_only(tmp_path, monkeypatch):
    modules = shutil.copytree(go_modules.MODULES, tmp_path / "modules")
    before = {name: binaries.folder(name) for name in go_modules.BINARIES}
    monkeypatch.setattr(go_modules, "MODULES", modules)
    with (modules / "argocd" / "go.sum").open("a") as file:
        file.write("\n")
    changed = {
        name for name, folder in before.items() if binaries.folder(name) != folder
    }
    assert changed == {"argocd", "luavm", "miniredis"}
    assert before["kubelet"] == binaries.folder()


def test_every_version_comes_from_go_mod():
    for name, binary in go_modules.BINARIES.items():
        known = go_modules.version(binary)
        go_mod = (go_modules.MODULES / binary.module / "go.mod").read_text()
        assert name == "pause" or re.search(
            rf" v{re.escape(known)}( //|$)", go_mod, re.MULTILINE
        )
        assert toolchain.parts(known)
