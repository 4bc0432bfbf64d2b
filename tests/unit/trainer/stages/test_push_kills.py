"""Push processes that share one target: at the same time, and killed at any moment."""

import os
import random
import re
import shutil
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from support.operator.adapters import make_adapter
from support.trainer.forkserver import ForkedStage, ForkServer
from support.trainer.pushes import (
    folder_of,
    names_in,
    push_config,
    unfinished_in,
    verify_target,
)
from support.trainer.stages import environment_in, read_termination_message

from finetune_trainer.contract import Environment, ExitCode, PushConfig, PushResult
from finetune_trainer.publishing.published_model import read_published
from finetune_trainer.serving.verify import verify_model

KILLS = 50 if os.environ.get("TRAINING") == "all" else 20
MOST_KILLS = 200
UNFINISHED = {".sha256-.", ".latest."}
"""Names of a folder and of a link that are not yet renamed, without their random parts."""


@dataclass
class Publisher:
    """A pipeline with a workspace of its own that pushes its adapter to the target that all of them share."""

    server: ForkServer
    config: PushConfig
    environment: Environment
    folder: Path

    def start(self, **options: object) -> ForkedStage:
        (
            self.environment.stage_dir("push", self.config.identity) / "result.json"
        ).unlink(missing_ok=True)
        return self.server.start(
            self.config, self.environment, self.folder / "log", **options
        )

    def result(self) -> PushResult:
        result = read_termination_message(self.environment).result
        assert isinstance(result, PushResult), self.log()
        return result

    def log(self) -> str:
        return (self.folder / "log").read_text()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "claims" / "models" / "names"


@pytest.fixture
def publishers(
    fork_server: ForkServer, tmp_path: Path, tiny_model: Path, target: Path
) -> list[Publisher]:
    """Three pipelines with different adapters."""
    target.parent.mkdir(parents=True)
    publishers = []
    for seed, name in enumerate(("one", "two", "three")):
        environment = environment_in(tmp_path / name)
        make_adapter(
            environment.stage_dir("train", "adapter") / "output", tiny_model, seed=seed
        )
        config = push_config(tiny_model, identity=f"push-{name}", train="adapter")
        claims = replace(environment, claims=tmp_path / "claims")
        publishers.append(Publisher(fork_server, config, claims, tmp_path / name))
    return publishers


def publish_alone(publisher: Publisher) -> PushResult:
    assert publisher.start().wait() == ExitCode.DONE, publisher.log()
    return publisher.result()


def test_two_pushes_at_once_publish_both_models(publishers, target):
    """Files, folders and links take long enough to overlap."""
    third = publish_alone(publishers[2])
    processes = [publisher.start(slow_names=0.1) for publisher in publishers[:2]]
    assert [process.wait() for process in processes] == [ExitCode.DONE] * 2
    pushed = {publisher.result().digest for publisher in publishers[:2]}
    assert len(pushed - {third.digest}) == 2
    assert verify_target(target) == {
        digest.replace(":", "-") for digest in (third.digest, *pushed)
    }
    published = read_published(target / "latest")
    assert published
    assert published.digest in pushed
    assert unfinished_in(target) == []


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two-renames"])
def test_same_model_from_two_workspaces_is_published_once(publishers, target, exchange):
    """The second push replaces the model of the first push if it did not see that in time."""
    first, second, _ = publishers
    second.config = first.config
    adapter = first.environment.stage_dir("train", "adapter") / "output"
    other = second.environment.stage_dir("train", "adapter") / "output"
    for path in adapter.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    processes = [
        publisher.start(slow_names=0.1, exchange=exchange)
        for publisher in (first, second)
    ]
    assert [process.wait() for process in processes] == [ExitCode.DONE] * 2
    assert first.result().digest == second.result().digest
    folder = folder_of(target, first.result()).name
    assert names_in(target) == [".latest.lock", f".{folder}.lock", "latest", folder]
    assert verify_target(target) == {folder}


def latest_in(target: Path) -> str | None:
    """Return the digest that `latest` names, as the name of its folder."""
    link = target / "latest"
    if not link.is_symlink():
        return None
    return link.resolve().name


def kinds_of(names: list[str]) -> set[str]:
    """Return the names without their random parts."""
    return {re.sub(r"[0-9a-f]{8,}", "", name) for name in names}


def test_killed_pushes_never_leave_half_a_model(publishers, target):
    """Two pushes run at the same time and are killed at random moments, most of them while they publish."""
    generator = random.Random(7)
    options = {"slow_names": 0.05, "slow_disk": 0.005}
    folders = [folder_of(target, publish_alone(publisher)) for publisher in publishers]
    killed = 0
    left: list[str] = []
    switched: set[str | None] = set()
    expected = (UNFINISHED, {folder.name for folder in folders})
    # A loaded machine is seldom at the second rename within the 0.8 s below, and needs more kills to hit it.
    while killed < KILLS or (
        killed < MOST_KILLS and (kinds_of(left), switched) != expected
    ):
        before = unfinished_in(target)
        latest = latest_in(target)
        pushing = [index for index in range(3) if folders[index].name != latest][:2]
        # Without their folders, the pushes have something to write.
        for index in pushing:
            shutil.rmtree(folders[index], ignore_errors=True)
        processes = [publishers[index].start(**options) for index in pushing]
        if generator.random() < 0.8:
            processes[0].until(
                lambda old=before: bool(set(unfinished_in(target)) - set(old)), 30
            )
        time.sleep(generator.uniform(0, 0.8))
        for process in processes:
            process.kill(signal.SIGKILL)
        killed += [process.wait() for process in processes].count(-signal.SIGKILL)
        left += unfinished_in(target)
        switched.add(latest_in(target))
        assert latest in verify_target(target)
    # The kills did hit: folders and links that were begun and not yet renamed. Some pushes were done before theirs.
    assert (kinds_of(left), switched) == expected
    result = publish_alone(publishers[0])
    assert verify_model(target / "latest", result.digest) == result.digest
    assert folder_of(target, result).name in verify_target(target)
    assert unfinished_in(target) == []
