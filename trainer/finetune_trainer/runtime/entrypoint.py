"""Entry point of a stage's process: reads the config, runs the stage, writes the termination message."""

import importlib
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from pydantic import ValidationError

from finetune_trainer.contract import (
    AnyConfig,
    AnyResult,
    Environment,
    ExitCode,
    Failure,
    Interruption,
    TerminationMessage,
    parse_config,
)
from finetune_trainer.contract.environment import CONFIG
from finetune_trainer.runtime.device_errors import translate
from finetune_trainer.runtime.errors import (
    ConfigInvalid,
    Interrupted,
    MachineUnable,
    Replaced,
    ServiceUnavailable,
    StageError,
)
from finetune_trainer.runtime.fence import Attempt
from finetune_trainer.runtime.machine.space import FULL, more_space
from finetune_trainer.runtime.machine.writable import create_folder, describe_error
from finetune_trainer.runtime.progress.progress import (
    OtherRankProgress,
    ProgressReporter,
    log_line,
)
from finetune_trainer.runtime.pruning import prune
from finetune_trainer.runtime.stage_folder import (
    Context,
    exclusive,
    read_result,
    write_config,
    write_result,
    write_termination_message,
)
from finetune_trainer.runtime.watchdog import watched
from finetune_trainer.stop_signal import stop

STAGES = ("prepare", "train", "evaluate", "push", "deploy")


def main(arguments: list[str]) -> int:
    """Run a stage and return the exit code of the process."""
    if len(arguments) != 1 or arguments[0] not in STAGES:
        print(
            f"usage: python -m finetune_trainer {{{'|'.join(STAGES)}}}", file=sys.stderr
        )
        return ExitCode.CONFIG
    try:
        environment = Environment.read(os.environ)
    except ValueError as error:
        print(f"{arguments[0]}: {error}", file=sys.stderr)
        return ExitCode.CONFIG
    leave_out_bitsandbytes(arguments[0])
    message, code = run_stage(arguments[0], environment)
    # The heartbeat may see only now that this attempt was replaced. It must not end the process before this message.
    stop.claim_exit()
    write_termination_message(environment, message)
    return code


def run_stage(
    stage: str, environment: Environment
) -> tuple[TerminationMessage, ExitCode]:
    """Run a stage; return its termination message with the final progress, and its exit code."""
    # A list, because the reporter is also needed if the stage raises; empty if the stage did not start.
    reporters: list[ProgressReporter] = []
    message, code = _run_and_classify(stage, environment, reporters.append)
    progress = reporters[0].now if reporters else None
    return message.model_copy(update={"progress": progress}), code


OnStart = Callable[[ProgressReporter], None]


def _run_and_classify(
    stage: str, environment: Environment, on_start: OnStart
) -> tuple[TerminationMessage, ExitCode]:
    """Run a stage; the only function that turns an exception into an exit code."""
    interrupted = TerminationMessage(interruption=Interruption())
    stop.on_immediate_exit(lambda: write_termination_message(environment, interrupted))
    config: AnyConfig | None = None
    try:
        config = read_config(stage)
        result = run_or_reuse(config, environment, on_start)
        return TerminationMessage(result=result), ExitCode.DONE
    except (Interrupted, Replaced) as error:
        return report_interruption(stage, error), ExitCode.INTERRUPTED
    except StageError as error:
        return report_failure(stage, str(error), error), error.exit_code
    except OSError as error:
        log_line(traceback.format_exc())
        return _report_os_error(stage, error, environment)
    except Exception as error:  # noqa: BLE001  a bug needs a termination message, too
        log_line(traceback.format_exc())
        known = translate(error, config, environment) if config is not None else None
        if known is not None:
            return report_failure(stage, str(known), known), known.exit_code
        return report_failure(stage, f"{type(error).__name__}: {error}"), ExitCode.BUG


def _report_os_error(
    stage: str, error: OSError, environment: Environment
) -> tuple[TerminationMessage, ExitCode]:
    """Return the failure of a stage by an error of the operating system, which usually passes."""
    refusal = describe_error(error, environment.workspace)
    if refusal:
        return report_failure(stage, refusal), ConfigInvalid.exit_code
    # An error without a file name is from a write, such as ENOSPC. Writes outside the workspace name their file.
    text = str(error) if error.filename else f"{environment.workspace}: {error}"
    kind = MachineUnable if error.errno in FULL else ServiceUnavailable
    if kind is MachineUnable:
        text += f"; {more_space(environment)} and retry"
    return report_failure(stage, text, kind(text)), kind.exit_code


def read_config(stage: str) -> AnyConfig:
    """Read the config from FINETUNE_CONFIG; raise ConfigInvalid if it is not a config of this stage."""
    try:
        config = parse_config(os.environ.get(CONFIG, ""))
    except ValidationError as error:
        raise ConfigInvalid(
            f"{CONFIG} is not the JSON of a {stage} config: {error}"
        ) from error
    if config.stage != stage:
        raise ConfigInvalid(f"{CONFIG} is for the stage {config.stage}, not {stage}")
    return config


def run_or_reuse(
    config: AnyConfig, environment: Environment, on_start: OnStart = lambda _: None
) -> AnyResult | None:
    """Return the existing result if its output is valid, else run the stage.

    Before the stage runs, `on_start` receives the progress reporter. If several processes run the stage together, only
    the first process has a result.
    """
    folder = environment.stage_dir(config.stage, config.identity)
    if environment.is_first:
        # Before the stage's packages are loaded, which takes seconds.
        create_folder(folder)
    module = importlib.import_module(f"finetune_trainer.stages.{config.stage}")
    if not environment.is_first:
        take_part(config, environment, module)
        return None
    attempt = Attempt(environment.pipeline_uid, environment.attempt)

    def on_replaced(error: Replaced) -> None:
        end_replaced(config.stage, environment, error)

    with (
        watched(config.stage, environment, stop) as watchdog,
        exclusive(folder, attempt, on_replaced) as fence,
    ):
        # First: the disk may be full.
        prune(config, environment, fence)
        existing = read_result(folder)
        if existing is not None and module.is_output_valid(
            existing, config, environment
        ):
            log_line(f"{config.stage}: reusing the existing result {existing.digest}")
            fields: dict[str, object] = {}
            if config.stage == "train":
                # A new identity has emptied the status: the curve is drawn again from the rows.
                fields = module.progress_of(existing, folder)
            reused = ProgressReporter(config.stage, environment)
            reused.report_reuse(fields)
            on_start(reused)
            return existing
        write_config(folder, config, fence)
        progress = ProgressReporter(config.stage, environment)
        watchdog.reporter = progress
        on_start(progress)
        with fence.raising_replaced():
            context = Context(environment, folder, progress, stop, fence)
            result: AnyResult = module.run(config, context)
            progress.flush()
            # This takes milliseconds, and a signal then leaves no unfinished file.
            with stop.deferred():
                write_result(folder, result, fence)
        return result


def leave_out_bitsandbytes(stage: str) -> None:
    """Keep PEFT from importing bitsandbytes in this process, which takes seconds and which few recipes use."""
    try:
        config = read_config(stage)
    except ConfigInvalid:
        # run_stage reports it.
        return
    if config.uses_bitsandbytes():
        return
    # Python's mark of a module that cannot be imported. A process that has imported it keeps it.
    sys.modules.setdefault("bitsandbytes", None)  # type: ignore[arg-type]  # typeshed knows modules only


def take_part(config: AnyConfig, environment: Environment, module: ModuleType) -> None:
    """Run the stage together with the first process, which alone has the folder. This process's files are dropped.

    Return at once if the first process has nothing to run.
    """
    existing = read_result(environment.stage_dir(config.stage, config.identity))
    if existing is not None and module.is_output_valid(existing, config, environment):
        return
    # Beside its termination log, whose folder the first process of this pod removes, even if this process is killed.
    # The first process of another pod has no such folder.
    parent = environment.termination_log.parent if environment.local_rank else None
    progress = OtherRankProgress(config.stage, environment)
    with tempfile.TemporaryDirectory(prefix="finetune-rank-", dir=parent) as folder:
        module.run(config, Context(environment, Path(folder), progress, stop))


def end_replaced(stage: str, environment: Environment, error: Replaced) -> None:
    """End this process, which was replaced: at once, or at the next boundary if a stop is deferred."""
    message = report_interruption(stage, error)
    stop.on_immediate_exit(lambda: write_termination_message(environment, message))
    stop.request()


def report_interruption(
    stage: str, error: Interrupted | Replaced
) -> TerminationMessage:
    """Return the termination message of a process that stops; log the reason, unless it is a signal."""
    if isinstance(error, Interrupted):
        interruption = Interruption(step=error.step, saved_step=error.saved_step)
        return TerminationMessage(interruption=interruption)
    log_line(f"{stage}: {error}")
    return TerminationMessage(interruption=Interruption(message=str(error)))


def report_failure(
    stage: str, text: str, error: StageError | None = None
) -> TerminationMessage:
    """Log a failure and return its termination message."""
    log_line(f"{stage}: {text}")
    device = error is not None and error.device
    machine = error is not None and error.machine
    failure = Failure(message=text, device=device, machine=machine)
    return TerminationMessage(failure=failure)
