"""`python -m support.stores.hub_process push URI FOLDER DIGEST` or `fetch URI CACHE`: a process that uses a hub.

It prints what it has published, or the folder that it has fetched. It ends like a stage, with the code of its error.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from support.stores.models import names_in

from finetune_trainer.runtime.errors import StageError
from finetune_trainer.stop_signal import stop
from finetune_trainer.stores.download import fetch
from finetune_trainer.stores.hub.source import HubSource
from finetune_trainer.stores.hub.target import HubTarget


def push(uri: str, folder: str, digest: str) -> str:
    published = HubTarget(uri).publish(Path(folder), digest, names_in(Path(folder)))
    return f"{published.uri} {published.sent_bytes}"


def fetch_model(uri: str, cache: str) -> str:
    return str(fetch(HubSource(uri, "model"), None, Path(cache))[0])


COMMANDS: dict[str, Callable[..., str]] = {"push": push, "fetch": fetch_model}


def main() -> int:
    command, *arguments = sys.argv[1:]
    try:
        with stop.deferred():
            print(COMMANDS[command](*arguments), flush=True)
    except StageError as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    stop.install()
    os._exit(
        main()
    )  # as a stage does: threads of the hub's library would hold up the end
