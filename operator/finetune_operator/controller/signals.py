"""SIGTERM and SIGINT: the process is asked to stop, whoever else would like to hear it."""

import asyncio
import signal


class StopSignal:
    """Notes that the process was asked to stop."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()

    def install(self) -> None:
        """Take the signals; to be called again after a library has taken them for itself."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.requested.set)
