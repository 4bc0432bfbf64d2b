"""The content of our images, inspected from a container that Kubernetes runs."""

import json

import pytest

from testcluster.kube_namespace import KubeNamespace, pod

INSPECT = """
import json, os, pathlib, re, shutil, sys
cuda = re.compile("nvidia|cuda|triton")
def importable(name):
    try:
        __import__(name)
    except ImportError:
        return False
    return True
def writable(folder):
    try:
        pathlib.Path(folder, "probe").write_text("x")
    except OSError:
        return False
    return True
def found(names, *roots):
    files = (f"{folder}/{file}" for root in roots for folder, _, inside in os.walk(root) for file in inside)
    # Empty files are mount points of the image build.
    return [file for file in files if (names is None or pathlib.Path(file).name in names) and os.path.getsize(file)]
print(json.dumps({
    "pid": os.getpid(), "uid": os.getuid(), "gid": os.getgid(),
    "programs": [name for name in ("gcc", "cc", "g++", "make", "pip", "uv", "git") if shutil.which(name)],
    "torch": importable("torch"), "transformers": importable("transformers"), "kopf": importable("kopf"),
    "kubernetes": importable("kubernetes"), "lm_eval": importable("lm_eval"), "trl": importable("trl"),
    "writable": [folder for folder in ("/opt/app", "/opt/venv", "/etc", "/tmp") if writable(folder)],
    "credentials": found({".netrc", "pip.conf", ".pypirc", "credentials"}, "/root", "/opt", "/tmp", "/etc"),
    "caches": found(None, "/root/.cache", "/var/cache/uv", "/tmp/uv-cache", "/opt/tools"),
    "bytecode": pathlib.Path("/opt/app").is_dir() and any(pathlib.Path("/opt/app").glob("**/*.pyc")),
    "main": importable(sys.argv[1]),
    "cuda": [path.name for path in pathlib.Path("/opt/venv").glob("lib/*/site-packages/*") if cuda.match(path.name)],
}))
"""


@pytest.mark.parametrize(
    ("name", "package"),
    [("operator", "finetune_operator"), ("trainer-cpu", "finetune_trainer")],
)
def test_image_holds_what_it_needs_and_no_build_tools(
    namespace: KubeNamespace, name: str, package: str
):
    namespace.create(
        pod(
            "inspect",
            "",
            image=f"finetune-{name}:dev",
            command=["python", "-c", INSPECT, package],
        )
    )
    phase = namespace.wait_phase("inspect", "Succeeded", "Failed", seconds=120)
    assert phase == "Succeeded", namespace.run("logs", "inspect")
    observed = json.loads(namespace.run("logs", "inspect").splitlines()[-1])
    trainer = name != "operator"
    assert (observed["pid"], observed["uid"], observed["gid"]) == (1, 65532, 65532)
    assert observed["programs"] == []
    assert (observed["torch"], observed["transformers"], observed["lm_eval"]) == (
        trainer,
        trainer,
        trainer,
    )
    assert observed["kopf"] is not trainer
    assert observed["trl"] is False
    assert observed["writable"] == ["/tmp"]
    assert observed["credentials"] == []
    assert observed["caches"] == []
    assert observed["bytecode"]
    assert observed["main"]
    assert observed["cuda"] == []


def test_cli_in_operator_image_runs_without_a_cluster(namespace: KubeNamespace):
    """The image holds every file that the command line needs."""
    namespace.create(
        pod(
            "help",
            "",
            image="finetune-operator:dev",
            command=["python", "-m", "finetune_cli", "init", "--help"],
        )
    )
    assert namespace.wait_phase("help", "Succeeded", "Failed") == "Succeeded", (
        namespace.run("logs", "help")
    )
