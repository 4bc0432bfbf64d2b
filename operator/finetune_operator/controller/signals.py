"""SIGTERM and SIGINT, which stop the operator."""

import asyncio
import signal


class ShutdownSignal:
    """A request to stop the process; `requested` is set once SIGTERM or SIGINT has arrived."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()

    def install(self) -> None:
        """Install the signal handlers. Call again after a library has installed its own, as kopf does."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.requested.set)
