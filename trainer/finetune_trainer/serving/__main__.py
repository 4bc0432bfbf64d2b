"""`python -m finetune_trainer.serving MODEL_DIR [--host HOST] [--port N]`: serve until SIGINT or SIGTERM, then 0."""

import sys

from finetune_trainer.stop_signal import stop

stop.install()  # first, as in finetune_trainer.__main__

import argparse  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

from finetune_trainer.contract.engines import ENGINES  # noqa: E402
from finetune_trainer.exit_codes import ExitCode  # noqa: E402
from finetune_trainer.runtime.errors import ConfigInvalid, Interrupted, ServiceUnavailable  # noqa: E402
from finetune_trainer.serving.server import HOST, LOOK_SECONDS, serving  # noqa: E402


def main(arguments: list[str]) -> int:
    """Give the exit code: 0 where it was asked to stop, 69 where the server ended by itself."""
    parser = argparse.ArgumentParser(prog="python -m finetune_trainer.serving", description=__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL_DIR", help="a folder in Hugging Face format")
    parser.add_argument("--host", default=HOST, help="the address to listen on; 0.0.0.0: all")
    parser.add_argument("--port", type=int, default=0, help="0: any that is free")
    parser.add_argument("--engine", choices=sorted(ENGINES), default="transformers")
    chosen = parser.parse_args(arguments)
    if not (chosen.model / "config.json").is_file():
        parser.error(f"{chosen.model} holds no config.json, so it is no model in Hugging Face format")
    try:
        where = {"host": chosen.host, "port": chosen.port}
        with stop.deferred(), serving(ENGINES[chosen.engine], chosen.model, stop, **where) as server:
            print(f"serving {server.model} at {server.url}; Ctrl-C stops it", flush=True)
            while not stop.requested and server.process.poll() is None:
                time.sleep(LOOK_SECONDS)
    except Interrupted:
        return ExitCode.DONE
    except (ConfigInvalid, ServiceUnavailable) as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return ExitCode.DONE if stop.requested else ExitCode.UNAVAILABLE


sys.exit(main(sys.argv[1:]))
