"""Serve a model until SIGINT or SIGTERM: `python -m finetune_trainer.serving MODEL_DIR [--host HOST] [--port N]`."""

import sys

from finetune_trainer.stop_signal import stop

# Before the other imports, as in finetune_trainer.__main__: a signal may arrive while they run.
stop.install()

import argparse  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

from finetune_trainer.contract.engines import ALL_ADDRESSES, ENGINES  # noqa: E402
from finetune_trainer.exit_codes import ExitCode  # noqa: E402
from finetune_trainer.runtime.errors import (  # noqa: E402
    ConfigInvalid,
    Interrupted,
    ServiceUnavailable,
)
from finetune_trainer.serving.server import POLL_SECONDS, serving  # noqa: E402


def options_of(arguments: list[str]) -> argparse.Namespace:
    """Return the options of a command line; end the process with an error if they are wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m finetune_trainer.serving", description=__doc__
    )
    parser.add_argument(
        "model",
        type=Path,
        metavar="MODEL_DIR",
        help="folder of the model in Hugging Face format",
    )
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
    options = parser.parse_args(arguments)
    if not (options.model / "config.json").is_file():
        parser.error(
            f"{options.model} is not a model in Hugging Face format: it has no config.json"
        )
    return options


def main(arguments: list[str]) -> int:
    """Serve and return the exit code: 0 after a signal, 69 if the server exited by itself."""
    options = options_of(arguments)
    engine = ENGINES[options.engine]
    address = {"host": options.host, "port": options.port}
    try:
        # Deferred, so that a signal ends the block below, which stops the server.
        with stop.deferred(), serving(engine, options.model, stop, **address) as server:
            print(
                f"serving {server.model} at {server.url}; press Ctrl-C to stop",
                flush=True,
            )
            while not stop.requested and server.process.poll() is None:
                time.sleep(POLL_SECONDS)
    except Interrupted:
        return ExitCode.DONE
    except (ConfigInvalid, ServiceUnavailable) as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if stop.requested:
        return ExitCode.DONE
    # The server has exited by itself: a container must restart it.
    return ExitCode.UNAVAILABLE


sys.exit(main(sys.argv[1:]))
