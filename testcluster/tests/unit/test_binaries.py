"""The cache of programs, with a Go that takes no time: a script that writes another script that tells a version."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from testcluster import binaries, toolchain
from testcluster.errors import TimedOut, UsageError

FAKE_GO = """#!{python} -IS
import json, os, pathlib, sys, time
if sys.argv[1] == "env":
    print(json.dumps({{"GOVERSION": os.environ["FAKE_VERSION"], "GOCACHE": "{here}", "GOMODCACHE": "{here}/pkg/mod"}}))
    sys.exit()
sys.stderr.write(os.environ["FAKE_ERROR"])
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
PROVIDE = "import sys; from testcluster import binaries; print(binaries.build_missing(sys.argv[1:]))"
KUBE = ["kubelet", "kube-proxy"]
NUMBER = binaries.version(binaries.BINARIES["kubelet"])


@pytest.fixture
def go(tmp_path, monkeypatch):
    """The folder of the only Go here; what it was asked to build is in its file `calls`."""
    here = tmp_path / "go"
    here.mkdir()
    (here / "go").write_text(FAKE_GO.format(python=sys.executable, here=here))
    (here / "go").chmod(0o755)
    answers = {"VERSION": "go9.9", "ERROR": "", "SECONDS": "0", "ANSWER": f"Kubernetes v{NUMBER}"}
    for name, value in answers.items():
        monkeypatch.setenv(f"FAKE_{name}", value)
    monkeypatch.setenv("PATH", str(here))
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    monkeypatch.setattr(toolchain, "ROOM", 0)
    return here


def calls(go):
    try:
        return (go / "calls").read_text().split()
    except FileNotFoundError:
        return []


def start(*names, **answers):
    environment = os.environ | {f"FAKE_{name}": value for name, value in answers.items()}
    command = [sys.executable, "-c", PROVIDE, *names]
    root = Path(binaries.__file__).parents[1]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=root, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


def wait_for(what, seconds=20):
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until
        time.sleep(0.01)


def content(folder):
    return {path.name for path in folder.iterdir() if path.name != ".lock"}


def test_what_is_missing_is_built_and_each_program_has_its_line(go):
    binaries.build_missing(["kubelet"])
    said = []
    folder = binaries.build_missing(KUBE, said.append)
    assert content(folder) == set(KUBE)
    assert calls(go) == ["kubelet", "kube-proxy"]
    assert said[0] == f"building kube-proxy {NUMBER} …"
    assert said[1].startswith(f"kube-proxy {NUMBER} built in ")
    assert len(said) == 2


def test_two_that_build_at_once_do_the_work_once_and_the_second_says_for_whom_it_waits(go):
    first = start(*KUBE, SECONDS="0.3")
    wait_for(lambda: calls(go))
    second = start(*KUBE)
    told = [process.communicate(timeout=20) for process in (first, second)]
    assert told[0][0] == told[1][0] == f"{binaries.folder()}\n"
    assert f"waiting for process {first.pid} " in told[1][1]
    assert sorted(calls(go)) == sorted(KUBE)


def test_what_a_killed_build_leaves_is_no_program_and_the_next_build_goes_on(go):
    killed = start(*KUBE, SECONDS="60")
    wait_for(lambda: calls(go))
    folder = binaries.folder()
    # Only the builder; its compiler writes on, as it does after an out-of-memory kill.
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not content(folder) & set(KUBE)
    try:
        assert binaries.build_missing(KUBE) == folder
        assert content(folder) == set(KUBE)
        for name in KUBE:
            assert NUMBER in subprocess.check_output([folder / name], text=True)
    finally:
        os.killpg(killed.pid, signal.SIGKILL)


@pytest.mark.parametrize("answer", ["Kubernetes v0.0.0-master", f"Kubernetes v{NUMBER}1", f"v1{NUMBER}", "''"])
def test_a_program_that_calls_itself_another_version_is_refused_and_not_kept(go, monkeypatch, answer):
    monkeypatch.setenv("FAKE_ANSWER", answer)
    with pytest.raises(UsageError, match=f"kubelet {NUMBER} was built but answers"):
        binaries.build_missing(["kubelet"])
    assert content(binaries.folder()) == set()


def test_with_everything_built_no_go_is_needed(go, monkeypatch):
    folder = binaries.build_missing(KUBE)
    monkeypatch.setenv("PATH", "")
    assert binaries.build_missing(KUBE) == folder


def test_without_go_it_says_which_go_and_how_to_get_it_and_begins_nothing(go, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        UsageError, match=rf"Go {binaries.needed_go(['containerd'])} or newer, .*no Go here; install it"
    ):
        binaries.build_missing(["containerd"])
    assert not binaries.folder().exists()


@pytest.mark.parametrize("old", ["go1.26.5", "go1.26rc1", "go1.9.9", ""])
def test_a_go_that_is_too_old_is_named(go, monkeypatch, old):
    monkeypatch.setenv("FAKE_VERSION", old)
    with pytest.raises(UsageError, match=f"{go}/go is {old or 'of no use'}; install"):
        binaries.build_missing(["containerd"])


def test_with_too_little_room_nothing_is_begun(go, monkeypatch):
    monkeypatch.setattr(toolchain, "ROOM", 1 << 60)
    with pytest.raises(UsageError, match=r"GiB free .*make room, or name folders on another disk with FINETUNE_CACHE"):
        binaries.build_missing(KUBE)
    assert not binaries.folder().exists()
    assert calls(go) == []


def test_runc_without_a_c_compiler_names_the_packages(go):
    with pytest.raises(UsageError, match="libseccomp-dev pkg-config gcc"):
        binaries.build_missing(["runc", *KUBE])
    assert calls(go) == []


def test_a_failed_build_shows_the_compilers_last_words(go, monkeypatch):
    monkeypatch.setenv("FAKE_ERROR", "\n".join(f"line {number}" for number in range(100)))
    with pytest.raises(TimedOut, match=r"(?s)last words:\nline 80\n.*line 99$"):
        binaries.build_missing(KUBE)
    assert content(binaries.folder()) == set()


def test_an_unreachable_network_is_named_as_such(go, monkeypatch):
    monkeypatch.setenv("FAKE_ERROR", "go: example.org/x@v1: dial tcp 192.0.2.1:443: i/o timeout")
    with pytest.raises(UsageError, match="proxy could not be reached; look at the network"):
        binaries.build_missing(KUBE)


def test_a_cache_that_cannot_be_written_is_refused(go, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="set FINETUNE_CACHE"):
        binaries.build_missing(KUBE)


@pytest.mark.parametrize("changed", ["etcd/go.sum", "etcd/go.mod", "pause/main.go"])
def test_another_version_or_source_is_another_folder(tmp_path, monkeypatch, changed):
    modules = shutil.copytree(binaries.MODULES, tmp_path / "modules")
    before = binaries.folder()
    monkeypatch.setattr(binaries, "MODULES", modules)
    assert binaries.folder() == before
    with (modules / changed).open("a") as file:
        file.write("\n")
    assert binaries.folder() != before


def test_every_program_has_one_version_and_it_stands_in_its_go_mod():
    for name, binary in binaries.BINARIES.items():
        known = binaries.version(binary)
        go_mod = (binaries.MODULES / binary.module / "go.mod").read_text()
        assert name == "pause" or re.search(rf" v{re.escape(known)}( //|$)", go_mod, re.MULTILINE)
        assert binaries.toolchain.parts(known)
