"""Policies that run a job without knowing the future: the operator's Auto, and those it is compared with."""

from collections.abc import Callable
from math import ceil

from spot_bench.auto import auto, auto_with_probe
from spot_bench.simulation import Run

FOREVER = 10
"""Multiple of the deadline after which a policy that waits for spot nodes is stopped."""


def always_spot(run: Run) -> None:
    """Wait for spot nodes, however long that takes."""
    last = FOREVER * run.job.deadline
    while not run.is_done and run.now < last:
        start, zone = run.first_zone()
        run.wait(min(start, last))
        if start <= last:
            run.spot(zone)


def always_on_demand(run: Run) -> None:
    """Run one attempt on on-demand nodes."""
    run.on_demand()


def greedy(run: Run) -> None:
    """Wait for spot nodes while there is slack, then use on-demand nodes to the end (NSDI'24, 3.4).

    It sees without a pod whether there are spot nodes, as in the paper.
    """
    while not run.is_done:
        start, zone = run.first_zone()
        last = _last_idle(run)
        if start > last:
            run.wait(last)
            run.on_demand()
        else:
            run.wait(start)
            run.spot(zone)


def uniform_progress(run: Run) -> None:
    """Spread the work evenly over the time until the deadline (NSDI'24, 5.2.2).

    Spot nodes whenever there are any and the job is idle. On-demand nodes while it is idle and behind, until it is two
    changeovers ahead. From the moment when no changeover is left, on-demand nodes to the end. It sees without a pod, at
    each minute, whether there are spot nodes, as in the paper.
    """
    while not run.is_done:
        total = run.remaining() + run.done
        start, zone = run.first_zone()
        last = _last_idle(run)
        if run.now >= last:
            run.on_demand()
        elif start <= run.now:
            run.spot(zone)
        elif run.done < run.now * total / run.job.deadline:
            run.on_demand(_caught_up(run, total))
        else:
            behind = ceil(run.done * run.job.deadline / total) + 1
            run.wait(min(start, last, max(behind, run.now + 1)))


def _delay(run: Run) -> int:
    """Return what the paper calls the changeover delay: a restart and the work that an eviction may lose."""
    return run.job.restart + run.job.checkpoint


def _last_idle(run: Run) -> int:
    """Return the minute in which the Safety Net Rule ends all waiting: R(t) < C(t) + 2 d."""
    return max(run.now, int(run.job.deadline - run.remaining() - 2 * _delay(run)))


def _caught_up(run: Run, total: float) -> int:
    """Return when an attempt on on-demand nodes that starts now is as far as it should be two changeovers later.

    It ends then only if the safety net still allows it.
    """
    job = run.job
    rate = total / job.deadline
    ahead = 2 * _delay(run)
    ready = run.now + job.restart
    # The first t for which the work done + t - ready is at least the rate times t + ahead.
    end = (
        ceil((ready - run.done + ahead * rate) / (1 - rate))
        if rate < 1
        else job.deadline
    )
    return max(end, ready + 1)


Policy = Callable[[Run], None]

POLICIES: dict[str, Policy] = {
    "Auto": auto,
    "Auto with a probe": auto_with_probe,
    "Uniform Progress": uniform_progress,
    "greedy": greedy,
    "always spot": always_spot,
    "always on-demand": always_on_demand,
}
