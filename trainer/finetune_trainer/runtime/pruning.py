"""Removes the results in the workspace that nothing uses any more, before a stage begins to work."""

from finetune_trainer.contract import AnyConfig, Environment
from finetune_trainer.result_folders import Unused, names_in, stages_of
from finetune_trainer.runtime.fence import Fence
from finetune_trainer.runtime.progress.progress import log_line


def prune(config: AnyConfig, environment: Environment, fence: Fence) -> None:
    """Remove what the environment does not keep. Raise Replaced if a newer attempt has the stage's folder.

    An error of the file system is logged: the stage can do without the space, or fails by itself.
    """
    pruning = environment.pruning
    if pruning is None:
        return
    own = f"{config.stage}/{config.identity}"
    # The stage may read the output of an earlier spec by its path.
    named = {own, *pruning.keep, *names_in(config.strings())}
    unused = Unused(
        environment.workspace,
        stages_of((own, *pruning.keep)),
        frozenset(named),
        pruning.keep_unused,
        environment.pipeline_uid,
        pruning.shared,
    )
    try:
        # A process that was replaced does not know what is used now.
        for folder in unused.prune(fence.check):
            log_line(
                f"removed {folder.name}, which nothing uses; workspace.keepUnused is {pruning.keep_unused}"
            )
    except OSError as error:
        log_line(f"unused results in {environment.workspace} stay: {error}")
