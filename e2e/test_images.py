"""What is in our images, and what is not, seen from inside as Kubernetes runs them."""

import json

import pytest

from testcluster.kube_namespace import KubeNamespace, pod

LOOK = """
import json, os, pathlib, shutil, sys
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
def found(names, *places):
    files = (f"{folder}/{file}" for place in places for folder, _, inside in os.walk(place) for file in inside)
    # An empty file or folder is where something was mounted while the image was built.
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
}))
"""


@pytest.mark.parametrize(("name", "package"), [("operator", "finetune_operator"), ("trainer", "finetune_trainer")])
def test_what_is_in_an_image(namespace: KubeNamespace, name: str, package: str):
    namespace.create(pod("look", "", image=f"finetune-{name}:dev", command=["python", "-c", LOOK, package]))
    assert namespace.wait_phase("look", "Succeeded", "Failed", seconds=120) == "Succeeded", namespace.run(
        "logs", "look"
    )
    seen = json.loads(namespace.run("logs", "look").splitlines()[-1])
    trainer = name == "trainer"
    assert (seen["pid"], seen["uid"], seen["gid"]) == (1, 65532, 65532)
    assert seen["programs"] == []
    assert (seen["torch"], seen["transformers"], seen["lm_eval"]) == (trainer, trainer, trainer)
    assert seen["kopf"] is not trainer
    assert seen["trl"] is False
    assert seen["writable"] == ["/tmp"]
    assert seen["credentials"] == []
    assert seen["caches"] == []
    assert seen["bytecode"]
    assert seen["main"]


def test_the_command_line_in_the_operators_image_needs_nothing_but_its_files(namespace: KubeNamespace):
    namespace.create(
        pod("help", "", image="finetune-operator:dev", command=["python", "-m", "finetune_cli", "init", "--help"])
    )
    assert namespace.wait_phase("help", "Succeeded", "Failed") == "Succeeded", namespace.run("logs", "help")
