"""The manifest that ran on the laptop, applied to a cluster: evicted on the way, and the same model, byte for byte."""

import subprocess
import sys

import yaml

from e2e.pipelines.chart import Operator
from e2e.pipelines.story import Story
from e2e.pipelines.test_evictions import evict
from e2e.test_training_on_spot import DEMO, environment, laptop, material_for  # noqa: F401  laptop is a fixture
from e2e.world import World


def test_the_laptops_manifest_ends_with_the_laptops_model(operator: Operator, world: World, laptop):  # noqa: F811
    expected = published_on_the_laptop(laptop)
    material_for(world, laptop)
    manifest = yaml.safe_load((DEMO / "pipeline.yaml").read_text())
    manifest["spec"]["evaluate"]["gate"]["threshold"] = 0.0  # its toy base model has read next to nothing
    story = Story.begin(world, manifest)

    story.wait_state("train", "Running", seconds=120)
    story.until(lambda: (story.stage("train").get("progress") or {}).get("step", 0) > 40, 120)
    seen = story.stage("train")["progress"]
    assert seen["total"] == 342
    assert seen["tokensPerSecond"] > 0
    row = world.run("get", "ftp", "docstrings", "--no-headers").split()
    assert row[1:3] == ["Running", "train"]
    assert row[3].endswith("%")
    evict(world, story.pod("train").partition("/")[2])
    story.until(lambda: len(story.stage("train")["attempts"]) == 2, 90)

    world.run("wait", "--for=condition=Finished", "--timeout=300s", "ftp/docstrings", timeout=310)
    status = story.status
    assert status["phase"] == "Succeeded", story.told()
    first, second = status["stages"]["train"]["attempts"]
    assert (first["outcome"], first["exitCode"], second["outcome"]) == ("Interrupted", 75, "Succeeded")
    assert second["startStep"] == first["lastStep"]  # nothing was done twice
    assert status["interruptions"] == 1
    assert status["gate"]["passed"]
    assert status["stages"]["deploy"]["result"]["answer"]
    weights = "/claims/demo/published/docstrings/model.safetensors"
    model = world.run("exec", "filler", "--", "busybox", "sha256sum", weights)
    assert model.split()[0] == expected


def published_on_the_laptop(laptop) -> str:  # noqa: F811
    """Push there, too, and give the digest of the weights."""
    run = laptop.workspace.parents[1]
    where = ["--claim", f"demo={laptop.material}", "--workdir", str(run), "--until", "push"]
    command = ["finetune_cli", "run", str(DEMO / "pipeline.yaml"), *where]
    subprocess.run([sys.executable, "-m", *command], env=environment(), check=True)
    weights = laptop.material / "published" / "docstrings" / "model.safetensors"
    return subprocess.run(["sha256sum", str(weights)], capture_output=True, text=True, check=True).stdout.split()[0]
