"""Trainings of several processes, in workspaces of their own; the processes are in one pod or in two."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from support.stores.servers import free_port
from support.trainer.forkserver import ForkedStage, ForkServer
from support.trainer.training import (
    adapter_digest,
    documents,
    environment,
    pairs,
    stage_folder,
    train_config,
    write_rows,
)

from finetune_trainer.contract import (
    Environment,
    ExitCode,
    TerminationMessage,
    TrainConfig,
)

STEPS = 24
LOG = "log"
PROCESSES = "finetune_trainer.training.distributed.processes"
PAIRS = "d" * 16
"""Identity of a prepare stage whose rows are pairs."""
PLAIN = {"lora": {"rank": 4, "alpha": 8}}
"""A recipe that draws no random numbers: other processes draw others."""
DPO = {"objective": "DPO", "optimizer": {"learning_rate": 1e-3}}
METHODS: dict[str, dict[str, Any]] = {
    "LoRA": {"lora": {"rank": 4, "alpha": 8, "dropout": 0.1}},
    "QLoRA": {
        "method": "QLoRA",
        "dtype": "BF16",
        "lora": {"rank": 4, "alpha": 8, "dropout": 0.1},
    },
    "Full": {"method": "Full", "dtype": "BF16", "lora": None, "neftune_noise_alpha": 5},
}
METHODS["LoRA, sharded"] = METHODS["LoRA"] | {"parallelism": "FSDP", "dtype": "BF16"}
METHODS["DPO"] = METHODS["LoRA"] | DPO
METHODS["DPO, sharded"] = METHODS["DPO"] | {"parallelism": "FSDP"}
METHODS["Full, sharded"] = METHODS["Full"] | {"parallelism": "FSDP"}
"""Recipes that draw random numbers, where the method can, by the names of their tests."""
TERMINATION = "termination.json"


def write_all_rows(workspace: Path) -> Path:
    """Write packed rows and pairs into a workspace, and return it."""
    write_rows(workspace, documents(60), documents(8, seed=5))
    write_rows(workspace, pairs(30), pairs(5, seed=5), prepared=PAIRS, pairs=True)
    return workspace


def config_of(model: Path, **changes: Any) -> TrainConfig:
    """Return the config of a short training."""
    recipe = {
        "max_steps": STEPS,
        "eval_steps": 7,
        "checkpoint": {"every_steps": 3},
    } | changes
    config = train_config(model, **recipe)
    return (
        config.model_copy(update={"prepare": PAIRS})
        if config.recipe.objective == "DPO"
        else config
    )


@dataclass
class Training:
    """A train stage of several processes in a workspace of its own."""

    server: ForkServer
    config: TrainConfig
    workspace: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    max_silence_seconds: int = 0

    def start(self) -> ForkedStage:
        """Start it with all its processes in one place."""
        (self.workspace / "progress.json").unlink(missing_ok=True)
        return self.server.start(
            self.config,
            replace(
                environment(self.workspace),
                max_silence_seconds=self.max_silence_seconds,
            ),
            self.workspace / LOG,
            ranks=self.config.recipe.processes,
            **self.options,
        )

    def start_pod(
        self, rank: int, port: int, more: Mapping[str, Any], **constants: object
    ) -> ForkedStage:
        """Start one of its pods, with what its environment has besides; the first one listens on the port."""
        options = {"constants": {f"{PROCESSES}.RENDEZVOUS_PORT": port} | constants}
        pod = _Pod(replace(self.environment_of(rank), **more))
        return self.server.start(
            self.config, pod, self.workspace / f"{LOG}-{rank}", **options
        )

    def start_pods(
        self,
        first: Mapping[str, Any] | None = None,
        second: Mapping[str, Any] | None = None,
    ) -> list[ForkedStage]:
        """Start two pods, with what their environments have besides."""
        (self.workspace / "progress.json").unlink(missing_ok=True)
        port = free_port()
        return [
            self.start_pod(rank, port, more or {})
            for rank, more in enumerate((first, second))
        ]

    def environment_of(self, rank: int) -> Environment:
        """Return the environment of a pod of several; all are on this machine."""
        log = self.workspace / f"termination-{rank}.json"
        return replace(
            environment(self.workspace),
            termination_log=log,
            node_rank=rank,
            master_address="127.0.0.1",
        )

    def step(self) -> int:
        """Return the last step that it has reported, or 0."""
        with suppress(OSError, ValueError):
            return int(
                json.loads((self.workspace / "progress.json").read_text())["step"]
            )
        return 0

    def run(self) -> "Training":
        """Run it to its end."""
        code = self.start().wait()
        assert code == ExitCode.DONE, self.log
        return self

    @property
    def log(self) -> str:
        """What its processes have logged."""
        return (self.workspace / LOG).read_text()

    def log_of(self, rank: int) -> str:
        """Return what a pod has logged."""
        return (self.workspace / f"{LOG}-{rank}").read_text()

    @property
    def digest(self) -> str:
        """The digest of the trained weights."""
        return adapter_digest(self.workspace)

    @property
    def losses(self) -> list[float]:
        """The losses of all steps in its metrics."""
        file = stage_folder(self.workspace) / "metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        return [row["loss"] for row in rows if "loss" in row]

    @property
    def message(self) -> TerminationMessage:
        """Its termination message, if all processes are in one place."""
        return self._message(TERMINATION)

    def message_of(self, rank: int) -> TerminationMessage:
        """Return the termination message of a pod."""
        return self._message(f"termination-{rank}.json")

    def _message(self, name: str) -> TerminationMessage:
        return TerminationMessage.model_validate_json(
            (self.workspace / name).read_text()
        )


@dataclass(frozen=True)
class _Pod:
    """An environment on a machine whose own name may have no address."""

    environment: Environment

    def variables(self) -> dict[str, str]:
        return self.environment.variables() | {"GLOO_SOCKET_IFNAME": "lo"}
