"""Faults of the API server, of its watches, of clocks and of the Lease: nothing is lost, and nothing is done twice.

Each scenario disturbs one life while its second train process runs. The process succeeds during the disturbance, so
that the operator has something to miss. Within 30 s after the recovery evaluate must run. Several scenarios run at
the same time, each with an operator and a proxy of its own. FAULTS=all adds an outage of three minutes.
"""

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.faults import faults
from support.faults.faults import (
    Cut,
    Delay,
    EndWatch,
    Fault,
    Request,
    Rule,
    Stale,
    WatchEnd,
)
from support.faults.lease import add_standby, steal_lease
from support.faults.life import Life, Outcome, a_life
from support.faults.operators import OperatorForks
from support.faults.simulation import Simulation, simulation, until

from finetune_operator.controller.leader_election import LEASE_DURATION

PROGRESS_WITHIN = 30.0
"""Seconds from the recovery to the next stage."""
CLOCK_ERROR = 60.0
WATCHES_WITHIN = 60.0
"""Seconds."""
LIVES_AT_A_TIME = 9
"""With all at the same time, the operators' own work takes longer than what the limits allow, on two busy cores."""
ERROR_RATE = 0.05
Disturbance = Callable[[Life], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def rule_for(life: Life, rule: Rule, seconds: float) -> AsyncIterator[None]:
    """Apply a rule; after the body, keep it for these seconds."""
    life.proxy.rule = rule
    yield
    await asyncio.sleep(seconds)
    life.proxy.rule = faults.no_fault


def fault_of_watches(fault: Fault) -> Rule:
    """Return a rule that injects the fault into every watch."""

    def rule(request: Request) -> Fault | None:
        return fault if request.kind == "watch" else None

    return rule


def stale_answer(request: Request) -> Fault | None:
    """Inject a stale answer into every list."""
    return Stale() if request.is_list else None


def watches_end(how: WatchEnd) -> Disturbance:
    """End all watches once."""

    @asynccontextmanager
    async def disturb(life: Life) -> AsyncIterator[None]:
        async def ended() -> int:
            return life.proxy.end_watches(how)

        # On a busy machine the operator may still be opening its watches.
        await until(ended, WATCHES_WITHIN, "the operator has no watch")
        yield

    return disturb


def watches_keep_ending(how: WatchEnd, seconds: float = 8) -> Disturbance:
    """End all watches, and for some seconds each new watch."""

    @asynccontextmanager
    async def disturb(life: Life) -> AsyncIterator[None]:
        life.proxy.end_watches(how)
        async with rule_for(life, fault_of_watches(EndWatch(how)), seconds):
            yield

    return disturb


def watches_refused(fault: Fault, seconds: float = 5) -> Disturbance:
    """Close all watches, and answer new watches with an error for some seconds."""

    @asynccontextmanager
    async def disturb(life: Life) -> AsyncIterator[None]:
        life.proxy.end_watches(WatchEnd.CLOSED)
        async with rule_for(life, fault_of_watches(fault), seconds):
            yield

    return disturb


def everything_refused(fault: Fault, seconds: float) -> Disturbance:
    """Close all watches, and answer each request with the fault for some seconds."""

    @asynccontextmanager
    async def disturb(life: Life) -> AsyncIterator[None]:
        life.proxy.end_watches(WatchEnd.TRUNCATED)
        async with rule_for(life, lambda _: fault, seconds):
            yield

    return disturb


@asynccontextmanager
async def stale_lists(life: Life) -> AsyncIterator[None]:
    """Restart the operator, and answer its lists for some seconds as they were before train ended."""
    await life.proxy.remember_lists()
    async with rule_for(life, stale_answer, 8):
        await life.operator.restart()
        yield


@asynccontextmanager
async def stale_lists_of_the_beginning(life: Life) -> AsyncIterator[None]:
    """Restart the operator, and answer its lists for some seconds as they were when prepare ran."""
    async with rule_for(life, stale_answer, 8):
        await life.operator.restart()
        yield


def clock_becomes_wrong(seconds: float) -> Disturbance:
    """Restart the operator with a clock that is ahead or behind."""

    @asynccontextmanager
    async def disturb(life: Life) -> AsyncIterator[None]:
        life.operator.clock = seconds
        await life.operator.restart()
        yield

    return disturb


@asynccontextmanager
async def leader_killed(life: Life) -> AsyncIterator[None]:
    """Kill the leader; the standby may take over when the Lease has expired, which is the recovery."""
    life.operator.kill()
    yield
    await asyncio.sleep(LEASE_DURATION)


@asynccontextmanager
async def nothing(_life: Life) -> AsyncIterator[None]:
    """Disturb nothing at this moment."""
    yield


def random_errors(*errors: Fault, seed: int = 1) -> Rule:
    """Return a rule that injects one of the errors into a share of the requests."""
    return faults.random_faults(random.Random(seed), ERROR_RATE, *errors)


@dataclass(frozen=True)
class Scenario:
    """What happens to a life."""

    disturbance: Disturbance = nothing
    always: Callable[[], Rule] | None = None
    """The rule of the whole life."""
    standby: bool = False
    """Whether a second replica stands by."""
    stolen_in: tuple[str, ...] = ()
    """Stages in which the Lease is given to the other replica."""
    outage: float = 0.0
    """Seconds by which the life may take longer."""
    clock: float = 0.0
    """By how many seconds the clock of the first replica is ahead, and the standby's clock behind."""


CUTS = (Cut("before"), Cut("after"))
SCENARIOS = {
    "watch-closed": Scenario(watches_end(WatchEnd.CLOSED)),
    "watch-closed-again": Scenario(watches_keep_ending(WatchEnd.CLOSED)),
    "watch-truncated": Scenario(watches_end(WatchEnd.TRUNCATED)),
    "watch-silent": Scenario(watches_end(WatchEnd.SILENT)),
    "watch-gone": Scenario(watches_end(WatchEnd.GONE)),
    "watch-gone-again": Scenario(watches_keep_ending(WatchEnd.GONE)),
    "watch-answered-410": Scenario(watches_refused(faults.EXPIRED)),
    "watch-answered-500": Scenario(watches_refused(faults.BROKEN)),
    "stale-list": Scenario(stale_lists),
    "stale-list-of-the-beginning": Scenario(stale_lists_of_the_beginning),
    "down-20s": Scenario(everything_refused(Cut("before"), 20)),
    "silent-20s": Scenario(everything_refused(Delay(20), 20)),
    "busy-10s": Scenario(everything_refused(faults.BUSY, 10)),
    "unavailable-10s": Scenario(everything_refused(faults.UNAVAILABLE, 10)),
    "random-409": Scenario(always=lambda: random_errors(faults.CONFLICT)),
    "random-422": Scenario(always=lambda: random_errors(faults.INVALID)),
    "random-429": Scenario(always=lambda: random_errors(faults.BUSY)),
    "random-500": Scenario(always=lambda: random_errors(faults.BROKEN)),
    "random-cuts": Scenario(always=lambda: random_errors(*CUTS)),
    "random-mixture": Scenario(
        always=lambda: random_errors(
            faults.CONFLICT, faults.INVALID, faults.BUSY, faults.BROKEN, *CUTS
        )
    ),
    "clock-ahead": Scenario(clock=CLOCK_ERROR),
    "clock-behind": Scenario(clock=-CLOCK_ERROR),
    "clock-becomes-ahead": Scenario(clock_becomes_wrong(CLOCK_ERROR)),
    "clock-becomes-behind": Scenario(clock_becomes_wrong(-CLOCK_ERROR)),
    "lease-stolen-in-each-stage": Scenario(
        standby=True,
        stolen_in=("prepare", "train", "evaluate", "push", "deploy"),
        clock=CLOCK_ERROR,
    ),
    "leader-killed": Scenario(leader_killed, standby=True),
    "leader-killed-wrong-clocks": Scenario(
        leader_killed, standby=True, clock=CLOCK_ERROR
    ),
}
if os.environ.get("FAULTS") == "all":
    SCENARIOS["down-180s"] = Scenario(
        everything_refused(Cut("before"), 180), outage=180
    )


@dataclass
class Result:
    """The end of one scenario."""

    outcome: Outcome | None = None
    error: str = ""
    recovered_at: float = 0.0
    evaluated_at: float = 0.0

    @property
    def seconds_to_progress(self) -> float:
        """Return the time from the recovery to the process of evaluate; less than 0: it ran before the recovery."""
        return self.evaluated_at - self.recovered_at


class DisturbedLife:
    """One scenario."""

    def __init__(self, scenario: Scenario, life: Life) -> None:
        self.scenario = scenario
        self.life = life
        self.result = Result()
        self.recovery: asyncio.Task[None] | None = None

    async def run(self) -> Result:
        """Live the disturbed life."""
        scenario = self.scenario
        life = self.life
        life.finished_within += scenario.outage
        if scenario.always:
            life.proxy.rule = scenario.always()
        life.hooks = dict.fromkeys(scenario.stolen_in, self._steal)
        if not scenario.stolen_in:
            life.hooks["train"] = self._disturb
        if scenario.disturbance is stale_lists_of_the_beginning:
            life.hooks["prepare"] = lambda _pod: life.proxy.remember_lists()
        try:
            self.result.outcome = await life.run()
        except Exception as error:  # noqa: BLE001  one life must not end the others
            self.result.error = f"{type(error).__name__}: {error}"
        if self.recovery:
            await self.recovery
        self.result.evaluated_at = life.evaluated_at or time.monotonic()
        return self.result

    async def _steal(self, _pod) -> None:
        await steal_lease(self.life)
        self.result.recovered_at = time.monotonic()

    async def _disturb(self, _pod) -> None:
        active = asyncio.Event()
        self.recovery = asyncio.create_task(self._disturb_until_recovered(active))
        await active.wait()
        await asyncio.sleep(0.5)

    async def _disturb_until_recovered(self, active: asyncio.Event) -> None:
        async with self.scenario.disturbance(self.life):
            active.set()
        self.result.recovered_at = time.monotonic()


async def run_scenario(simulated: Simulation, name: str) -> Result:
    """Run one scenario in a namespace of its own."""
    scenario = SCENARIOS[name]
    namespace = f"fault-{name}"
    await simulated.create_namespace(namespace)
    async with AsyncExitStack() as stack:
        life = await stack.enter_async_context(
            a_life(simulated, namespace, "demo", clock=scenario.clock)
        )
        if scenario.standby:
            await add_standby(stack, life, clock=-scenario.clock)
        result = await DisturbedLife(scenario, life).run()
    await simulated.delete_namespace(namespace)
    return result


async def run_scenarios(
    kubeconfig: Path, forks: OperatorForks, folder: Path, names: list[str]
) -> dict[str, Result]:
    """Run an undisturbed life and the scenarios, several at the same time."""
    places = asyncio.Semaphore(LIVES_AT_A_TIME)

    async def run_in_place(name: str) -> Result:
        async with places:
            return await run_scenario(simulated, name)

    async with simulation(kubeconfig, forks, folder) as simulated:
        SCENARIOS.setdefault("none", Scenario())
        results = await asyncio.gather(
            *(run_in_place(name) for name in ("none", *names))
        )
    return dict(zip(("none", *names), results, strict=True))


@pytest.fixture(scope="module")
def results(kubeconfig, forks, tmp_path_factory, request) -> dict[str, Result]:
    """The results of the scenarios that this run has selected."""
    callspecs = [
        item.callspec.params
        for item in request.session.items
        if hasattr(item, "callspec")
    ]
    names = list(
        dict.fromkeys(
            params["scenario"]
            for params in callspecs
            if params.get("scenario") in SCENARIOS
        )
    )
    results = asyncio.run(
        run_scenarios(kubeconfig, forks, tmp_path_factory.mktemp("faults"), names)
    )
    for name, result in results.items():
        print(
            f"{name}: evaluate ran {result.seconds_to_progress:.1f} s after the recovery"
        )
    return results


@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name != "none"])
def test_life_survives_the_fault(scenario, results):
    expected = results["none"].outcome
    result = results[scenario]
    assert expected
    assert result.outcome, result.error
    assert not result.outcome.problems
    assert result.outcome.successes.keys() == expected.successes.keys()
    assert set(result.outcome.successes.values()) == {1}
    assert result.outcome.status == expected.status
    assert not result.outcome.leaked
    # The undisturbed life shows how long the cluster itself takes, which depends on the machine's other work.
    assert (
        result.seconds_to_progress
        <= PROGRESS_WITHIN + results["none"].seconds_to_progress
    )


def test_api_server_restart_loses_nothing(kubeconfig, control_plane, forks, tmp_path):
    if not hasattr(control_plane, "_control_plane_machine"):
        pytest.skip(
            "only the provider linux-namespaces can restart one program of its control plane"
        )
    machine = control_plane._control_plane_machine()

    @asynccontextmanager
    async def restart(_life: Life) -> AsyncIterator[None]:
        machine.restart("kube-apiserver")
        yield
        await asyncio.to_thread(control_plane.kube.wait_api, 60)

    async def live() -> Result:
        async with simulation(kubeconfig, forks, tmp_path) as simulated:
            await simulated.create_namespace("restarted")
            async with a_life(simulated, "restarted", "demo") as life:
                return await DisturbedLife(Scenario(restart), life).run()

    result = asyncio.run(live())
    assert result.outcome, result.error
    assert result.outcome.status["phase"] == "Succeeded"
    assert list(result.outcome.successes.values()) == [1, 1, 1, 1]
    assert not result.outcome.problems
    assert not result.outcome.leaked
    assert result.seconds_to_progress <= PROGRESS_WITHIN
