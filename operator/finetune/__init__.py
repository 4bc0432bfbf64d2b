"""The Python interface: the pipelines of `finetune`, over the same models and functions as the command line."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune.interface import *  # noqa: F403  all of its __all__
else:

    def __getattr__(name: str) -> Any:
        """Return a name of the interface, which is imported now: building the API's models takes a second or two."""
        return getattr(import_module("finetune.interface"), name)

    def __dir__() -> list[str]:
        """Return the names that an editor or a notebook completes."""
        return import_module("finetune.interface").__all__
