"""Tests of deferred interrupts."""

import os
import signal
import threading

import pytest

from testcluster.interrupts import deferred_interrupt


def test_interrupt_is_raised_after_the_block():
    steps = []

    def interrupted():
        with deferred_interrupt():
            os.kill(os.getpid(), signal.SIGINT)
            steps.append("block")
        steps.append("never")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert steps == ["block"]


def test_interrupt_during_a_failure_has_the_failure_as_context():
    def failing():
        with deferred_interrupt():
            os.kill(os.getpid(), signal.SIGINT)
            raise ValueError("disk")

    with pytest.raises(KeyboardInterrupt) as raised:
        failing()
    assert isinstance(raised.value.__context__, ValueError)


def test_no_signal_leaves_the_previous_handler():
    before = signal.getsignal(signal.SIGINT)
    with deferred_interrupt():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_other_thread_runs_the_block_unchanged():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def run() -> None:
        with deferred_interrupt():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]
