"""Where a stage is: a line for people, a file for the laptop's runner, two HTTP pages for the cluster."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from typing_extensions import override

from finetune_trainer.contract import Environment, Progress
from finetune_trainer.contract.environment import METRICS_PORT
from finetune_trainer.runtime.errors import ServiceUnavailable

FILE_SECONDS = 0.1
LOG_SECONDS = 5.0
TERMINAL_SECONDS = 0.2


def log_line(words: str) -> None:
    """Put a line into the log; a log on a disk that is full costs the line and not the stage."""
    with contextlib.suppress(OSError):
        print(words, flush=True)


class ProgressReporter:
    """Keeps the newest Progress and tells it, each listener at its own pace."""

    def __init__(self, stage: str, environment: Environment) -> None:
        self.now = Progress(stage=stage, updated_at=datetime.now(UTC), step=0)  # noqa: TID251  an edge
        self._file = environment.progress_file
        self._written = self._printed = -1e9
        self._said = ""
        if environment.metrics_port:
            serve_metrics(environment.metrics_port, lambda: self.now)

    def update(self, **fields: Any) -> None:
        """Change what is known; fields are those of contract.Progress."""
        now = datetime.now(UTC)  # noqa: TID251  an edge
        self.now = self.now.model_copy(update={"updated_at": now, **fields})
        clock = time.monotonic()
        if self._file and (clock - self._written >= FILE_SECONDS or "note" in fields or "saved_step" in fields):
            self._written = clock
            _replace(self._file, self.now.model_dump_json(by_alias=True, exclude_none=True))
        if "note" in fields or clock - self._printed >= (TERMINAL_SECONDS if sys.stdout.isatty() else LOG_SECONDS):
            self._printed = clock
            self.log()

    def flush(self) -> None:
        """Tell the newest state now, whatever the pace."""
        if self._file:
            _replace(self._file, self.now.model_dump_json(by_alias=True, exclude_none=True))
        self.log()

    def log(self) -> None:
        """Print one line, if it is news: over the last one on a terminal, below it in a log."""
        words = line(self.now)
        if words == self._said:
            return
        self._said = words
        with contextlib.suppress(OSError):  # the log may lie on a disk that is full
            sys.stdout.write(f"\r\x1b[K{words}" if sys.stdout.isatty() else f"{words}\n")
            sys.stdout.flush()


def line(progress: Progress) -> str:
    """Give one line for people, without what is not known."""
    of = f"/{progress.total}" if progress.total else ""
    parts = [
        f"{progress.stage} {progress.step}{of}",
        f"loss {progress.loss:.4f}" if progress.loss is not None else "",
        f"validation loss {progress.validation_loss:.4f}" if progress.validation_loss is not None else "",
        f"{progress.tokens_per_second:,.0f} tok/s" if progress.tokens_per_second else "",
        f"ETA {progress.eta_seconds:.0f} s" if progress.eta_seconds is not None else "",
        progress.note,
    ]
    return "  ".join(part for part in parts if part)


def _replace(path: Path, text: str) -> None:
    # Atomic for readers, but not durable: progress is worth nothing after a power cut.
    temporary = path.with_name(path.name + ".new")
    with contextlib.suppress(OSError):  # nor is it worth the stage: on a full disk the work itself may still fit
        temporary.write_text(text)
        temporary.replace(path)


def serve_metrics(port: int, progress: Callable[[], Progress]) -> None:
    """Serve /metrics and /progress on all interfaces from a daemon thread; raise ServiceUnavailable without a port."""
    from prometheus_client import CollectorRegistry, make_wsgi_app  # noqa: PLC0415  only where a port was asked for
    from prometheus_client.core import GaugeMetricFamily, Metric  # noqa: PLC0415

    class Collector:
        def collect(self) -> Iterable[Metric]:
            values = progress().model_dump(exclude={"stage", "updated_at", "note"}, exclude_none=True)
            for name, value in values.items():
                family = GaugeMetricFamily(f"finetune_stage_{name}", f"{name} of the running stage", labels=["stage"])
                family.add_metric([progress().stage], value)
                yield family

    registry = CollectorRegistry()
    registry.register(Collector())
    metrics = make_wsgi_app(registry)

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ.get("PATH_INFO") != "/progress":
            pages: Iterable[bytes] = metrics(environ, start_response)
            return pages
        start_response("200 OK", [("Content-Type", "application/json")])
        return [progress().model_dump_json(by_alias=True, exclude_none=True).encode()]

    try:
        server = make_server("", port, app, handler_class=_QuietHandler)
    except (OSError, OverflowError) as error:
        raise ServiceUnavailable(f"{METRICS_PORT}: port {port} cannot be listened on: {error}") from error
    threading.Thread(target=server.serve_forever, daemon=True, name="metrics").start()


class _QuietHandler(WSGIRequestHandler):
    @override
    def log_message(self, *_args: Any) -> None:
        """Keep requests for metrics out of the log."""
