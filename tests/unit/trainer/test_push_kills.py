"""Push processes that share one target: at the same time, and killed at any moment."""

import random
import re
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from support.adapters import make_adapter
from support.forkserver import ForkedStage, ForkServer
from support.stages import environment_in, read_termination_message

from finetune_trainer.contract import (
    DatasetSource,
    Environment,
    ExitCode,
    Lineage,
    ModelSource,
    PushConfig,
    PushRecipe,
    PushResult,
)
from finetune_trainer.files import SUFFIX_PATTERN
from finetune_trainer.publishing.published_model import describe, read_intact
from finetune_trainer.runtime.artifacts import verify
from finetune_trainer.serving.verify import verify_model

KILLS = 50


@dataclass
class Publisher:
    """A pipeline with a workspace of its own that pushes its adapter to the target that all of them share."""

    server: ForkServer
    config: PushConfig
    environment: Environment
    folder: Path

    def start(self, **options: object) -> ForkedStage:
        (self.environment.stage_dir("push", self.config.identity) / "result.json").unlink(missing_ok=True)
        return self.server.start(self.config, self.environment, self.folder / "log", **options)

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
def publishers(fork_server: ForkServer, tmp_path: Path, tiny_model: Path, target: Path) -> list[Publisher]:
    """Three pipelines with different adapters."""
    target.parent.mkdir(parents=True)
    found = []
    for seed, name in enumerate(("one", "two", "three")):
        environment = environment_in(tmp_path / name)
        make_adapter(environment.stage_dir("train", "adapter") / "output", tiny_model, seed=seed)
        config = PushConfig(
            identity=f"push-{name}",
            prepare="d1",
            train="adapter",
            model=ModelSource(uri=f"file://{tiny_model}"),
            dataset=DatasetSource(uri="hf://people/names/train.jsonl"),
            recipe=PushRecipe(target="pvc://models/names"),
            lineage=Lineage(pipeline="default/names", interruptions=0, lost_steps=0, lost_seconds=0),
        )
        claims = replace(environment, claims=tmp_path / "claims")
        found.append(Publisher(fork_server, config, claims, tmp_path / name))
    return found


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def unpublished(publishers: list[Publisher], target: Path) -> list[Publisher]:
    """Return two publishers whose model is not at the target, so that both have to replace it."""
    published = describe(target).about["identity"] if target.exists() else None
    return [publisher for publisher in publishers if publisher.config.identity != published][:2]


def sealed(target: Path) -> set[Path]:
    """Return the models that a push has written and is about to rename, or has just replaced."""
    return set(target.parent.glob(f".{target.name}.*/manifest.json"))


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two-renames"])
def test_two_pushes_at_once_publish_whole_models(publishers, target, tmp_path, exchange):
    """Both replace a third model. Their renames take long enough to overlap, if nothing kept them apart."""
    assert publishers[2].start().wait() == ExitCode.DONE
    moves = tmp_path / "moves"
    options = {"exchange": exchange, "slow_rename": 0.2, "moves": str(moves)}
    processes = [publisher.start(**options) for publisher in publishers[:2]]
    assert [process.wait() for process in processes] == [ExitCode.DONE] * 2
    recorded = [line.split() for line in moves.read_text().splitlines()]
    assert [moment for moment, _ in recorded] == ["begin", "end"] * 2
    last = publishers[[str(process.pid) for process in processes].index(recorded[-1][1])]
    assert publishers[0].result().digest != publishers[1].result().digest
    published = read_intact(target)
    assert published.about["identity"] == last.config.identity
    assert (published.digest, published.size) == (last.result().digest, last.result().size)
    assert names_in(target.parent) == [".names.lock", "names"]


def test_same_push_from_two_workspaces_publishes_one_model(publishers, target):
    one, two, _ = publishers
    two.config = one.config
    adapter = one.environment.stage_dir("train", "adapter") / "output"
    other = two.environment.stage_dir("train", "adapter") / "output"
    for path in adapter.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    processes = [one.start(slow_rename=0.1), two.start(slow_rename=0.1)]
    assert [process.wait() for process in processes] == [ExitCode.DONE] * 2
    assert one.result().digest == two.result().digest == read_intact(target).digest
    assert names_in(target.parent) == [".names.lock", "names"]


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two-renames"])
def test_killed_pushes_never_leave_half_a_model(publishers, target, exchange):
    """Two pushes run at the same time and are killed at random moments, most of them around their renames."""
    generator = random.Random(7)
    options = {"exchange": exchange, "slow_rename": 0.05, "slow_disk": 0.01}
    killed, left = 0, set()
    while killed < KILLS:
        before = sealed(target)
        processes = [publisher.start(**options) for publisher in unpublished(publishers, target)]
        if generator.random() < 0.8:
            processes[0].until(lambda old=before: bool(sealed(target) - old), 30)
        time.sleep(generator.uniform(0, 0.25))
        for process in processes:
            process.kill(signal.SIGKILL)
        killed += [process.wait() for process in processes].count(-signal.SIGKILL)
        left |= set(names_in(target.parent))
        if target.exists():
            verify(target)
    # The kills did hit: models that were written and not yet removed, and the moment between two renames.
    assert any(re.fullmatch(rf"\.names\.{SUFFIX_PATTERN}", name) for name in left)
    assert (".names.old" in left) is not exchange
    last = unpublished(publishers, target)[0]
    assert last.start(**options).wait() == ExitCode.DONE, last.log()
    assert verify_model(target, last.result().digest) == last.result().digest
    assert names_in(target.parent) == [".names.lock", "names"]
