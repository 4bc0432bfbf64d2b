"""Code that a task names: lm-eval runs it only if the pipeline allows it for this task.

A task file is often on a volume that other users may write, and the process that loads it has the stage's Secrets.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import lm_eval
import lm_eval.api.task
import lm_eval.tasks._yaml_loader as yaml_loader
from lm_eval.api.registry import metric_registry

from finetune_trainer.runtime.errors import ConfigInvalid

FIX = "if you trust it, set allowCode: true for this task"
OWN_FOLDER = Path(lm_eval.__file__).resolve().parent
"""Code of lm-eval itself is part of the image, as the code here."""

_allows_code: ContextVar[bool] = ContextVar("allows_code", default=False)


class _Guarded:
    """A function of lm-eval that runs code of a task, behind a check."""

    def __init__(
        self, check: Callable[..., bool], function: Callable[..., Any]
    ) -> None:
        self._check = check
        self._function = function

    def __call__(self, *args: Any, **options: Any) -> Any:
        if _allows_code.get() or self._check(*args, **options):
            return self._function(*args, **options)
        # lm-eval reports a metric that is None as unknown.
        return None


def guard_code() -> None:
    """Make lm-eval refuse code of tasks, outside `allowing_code`."""
    # lm-eval has no setting for either.
    for module, name, check in (
        (yaml_loader, "_import_func_in_yml", _check_function),
        (lm_eval.api.task, "get_metric", _check_metric),
    ):
        present = getattr(module, name)
        if not isinstance(present, _Guarded):
            setattr(module, name, _Guarded(check, present))


@contextlib.contextmanager
def allowing_code(*, allowed: bool) -> Iterator[None]:
    """Set whether a task that is loaded in the block may run code."""
    token = _allows_code.set(allowed)
    try:
        yield
    finally:
        _allows_code.reset(token)


def _check_function(name: str, folder: Path) -> bool:
    """Raise ConfigInvalid unless the function is named in a file of lm-eval itself."""
    if folder.resolve().is_relative_to(OWN_FOLDER):
        return True
    raise ConfigInvalid(f"it runs code (!function {name}); {FIX}")


def _check_metric(name: str, hf_evaluate_metric: bool = False) -> bool:  # noqa: FBT001, FBT002  lm-eval's signature
    """Return whether the metric is in lm-eval's registry; raise ConfigInvalid if the task wants a script for it."""
    if hf_evaluate_metric:
        raise ConfigInvalid(f"its metric {name} is a script (hf_evaluate: true); {FIX}")
    # lm-eval would look for any other name in the package `evaluate`, which downloads and runs scripts.
    return name in metric_registry
