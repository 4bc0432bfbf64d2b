"""From a config in the environment to a result, a termination message and an exit code."""

import importlib
import os
import sys
import traceback
from collections.abc import Callable

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
from finetune_trainer.contract import environment as names
from finetune_trainer.runtime.errors import ConfigInvalid, Interrupted, ServiceUnavailable, StageError
from finetune_trainer.runtime.progress import ProgressReporter, log_line
from finetune_trainer.runtime.stage_folder import (
    Context,
    exclusive,
    read_result,
    write_config,
    write_result,
    write_termination_message,
)
from finetune_trainer.stop_signal import stop

STAGES = ("prepare", "train", "evaluate", "push", "deploy")


def main(arguments: list[str]) -> int:
    """Run one stage and give the process's exit code."""
    if len(arguments) != 1 or arguments[0] not in STAGES:
        print(f"usage: python -m finetune_trainer {{{'|'.join(STAGES)}}}", file=sys.stderr)
        return ExitCode.CONFIG
    try:
        environment = Environment.read(os.environ)
    except ValueError as error:
        print(f"{arguments[0]}: {error}", file=sys.stderr)
        return ExitCode.CONFIG
    message, code = run_stage(arguments[0], environment)
    write_termination_message(environment, message)
    return code


def run_stage(stage: str, environment: Environment) -> tuple[TerminationMessage, ExitCode]:
    """Do the work, and say how it ended and where."""
    reporters: list[ProgressReporter] = []
    message, code = _run_and_classify(stage, environment, reporters.append)
    return message.model_copy(update={"progress": reporters[0].now if reporters else None}), code


OnStart = Callable[[ProgressReporter], None]


def _run_and_classify(stage: str, environment: Environment, began: OnStart) -> tuple[TerminationMessage, ExitCode]:
    """Do the work; the one place where an exception becomes an exit code."""
    stop.on_immediate_exit(
        lambda: write_termination_message(environment, TerminationMessage(interruption=Interruption()))
    )
    try:
        config = read_config(stage)
        return TerminationMessage(result=run_or_reuse(config, environment, began)), ExitCode.DONE
    except Interrupted as interrupted:
        where = Interruption(step=interrupted.step, saved_step=interrupted.saved_step)
        return TerminationMessage(interruption=where), ExitCode.INTERRUPTED
    except StageError as error:
        return report_failure(stage, str(error)), error.exit_code
    except OSError as error:
        log_line(traceback.format_exc())
        # A write to a full disk names no file; all writing goes to the workspace, or names its file.
        words = str(error) if error.filename else f"{environment.workspace}: {error}"
        return report_failure(stage, words), ServiceUnavailable.exit_code
    except MemoryError:
        return report_failure(stage, "out of memory: raise resources.memory or lower batchSize"), ExitCode.BUG
    except Exception as error:  # noqa: BLE001  a bug is reported like everything else
        log_line(traceback.format_exc())
        return report_failure(stage, f"{type(error).__name__}: {error}"), ExitCode.BUG


def read_config(stage: str) -> AnyConfig:
    """Raise ConfigInvalid where FINETUNE_CONFIG is not this stage's config."""
    try:
        config = parse_config(os.environ.get(names.CONFIG, ""))
    except ValidationError as error:
        raise ConfigInvalid(f"{names.CONFIG} is not the JSON of a {stage} config: {error}") from error
    if config.stage != stage:
        raise ConfigInvalid(f"{names.CONFIG} is for the stage {config.stage}, not {stage}")
    return config


def run_or_reuse(config: AnyConfig, environment: Environment, began: OnStart = lambda _: None) -> AnyResult:
    """Give the result that is there already, or make it; `began` is told who reports."""
    folder = environment.stage_dir(config.stage, config.identity)
    module = importlib.import_module(f"finetune_trainer.stages.{config.stage}")
    with exclusive(folder):
        done = read_result(folder)
        if done is not None and module.is_output_valid(done, config, environment):
            log_line(f"{config.stage}: done already, {done.digest}")
            return done
        write_config(folder, config)
        context = Context(environment, folder, ProgressReporter(config.stage, environment), stop)
        began(context.progress)
        result: AnyResult = module.run(config, context)
        context.progress.flush()
        write_result(folder, result)
        return result


def report_failure(stage: str, words: str) -> TerminationMessage:
    """Say it in the log and in the termination message."""
    log_line(f"{stage}: {words}")
    return TerminationMessage(failure=Failure(message=words))
