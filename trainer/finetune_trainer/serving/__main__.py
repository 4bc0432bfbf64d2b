"""Serve a model until SIGINT or SIGTERM: `python -m finetune_trainer.serving MODEL [--host HOST] [--port N]`."""

import sys

from finetune_trainer.stop_signal import stop

# Before the other imports, as in finetune_trainer.__main__: a signal may arrive while they run.
stop.install()

import argparse  # noqa: E402
import os  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

from finetune_trainer.contract import Environment  # noqa: E402
from finetune_trainer.contract.engines import (  # noqa: E402
    ALL_ADDRESSES,
    ENGINES,
    model_name,
)
from finetune_trainer.exit_codes import ExitCode  # noqa: E402
from finetune_trainer.runtime.errors import (  # noqa: E402
    Interrupted,
    SourceNotFound,
    StageError,
)
from finetune_trainer.serving.server import POLL_SECONDS, serving  # noqa: E402


def options_of(arguments: list[str]) -> argparse.Namespace:
    """Return the options of a command line; end the process with an error if they are wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m finetune_trainer.serving", description=__doc__
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="folder of the model in Hugging Face format; or, in the environment of a stage, its URI in a store",
    )
    parser.add_argument("--pin", help="content of a base model at its store")
    parser.add_argument(
        "--host",
        default="",
        help=f"address to listen on; {ALL_ADDRESSES} for all addresses, of IPv4, too; by default the loopback",
    )
    parser.add_argument(
        "--port", type=int, default=0, help="port to listen on; 0 for any free port"
    )
    parser.add_argument(
        "--engine",
        choices=sorted(ENGINES),
        default="Transformers",
        help="model server to start",
    )
    return parser.parse_args(arguments)


def folder_of(model: str, pin: str | None) -> Path:
    """Return the folder of a model, which is downloaded first if it is in a store. Raise like `fetch_model`."""
    if "://" not in model:
        folder = Path(model)
        if not (folder / "config.json").is_file():
            raise SourceNotFound(
                f"{folder} is not a model in Hugging Face format: it has no config.json"
            )
        return folder
    # Most servers mount their model, and need no client of a store.
    from finetune_trainer.stores.model_files import (  # noqa: PLC0415
        fetch_model,
        fetch_published,
    )

    environment = Environment.read(os.environ)
    if pin:
        return fetch_model(model, environment, pin=pin).folder
    return fetch_published(model, environment)


def main(arguments: list[str]) -> int:
    """Serve and return the exit code: 0 after a signal, 69 if the server exited by itself, else as of a stage."""
    options = options_of(arguments)
    engine = ENGINES[options.engine]
    address = {"host": options.host, "port": options.port}
    name = model_name(options.model) if "://" in options.model else ""
    try:
        folder = folder_of(options.model, options.pin)
        # Deferred, so that a signal ends the block below, which stops the server.
        with (
            stop.deferred(),
            serving(engine, folder, stop, name=name, **address) as server,
        ):
            print(
                f"serving {server.model} at {server.url}; press Ctrl-C to stop",
                flush=True,
            )
            while not stop.requested and server.process.poll() is None:
                time.sleep(POLL_SECONDS)
    except Interrupted:
        return ExitCode.DONE
    except StageError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if stop.requested:
        return ExitCode.DONE
    # The server has exited by itself: a container must restart it.
    return ExitCode.UNAVAILABLE


sys.exit(main(sys.argv[1:]))
