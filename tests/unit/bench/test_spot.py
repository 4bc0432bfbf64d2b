"""The simulator of spot capacity: the optimum, the policies and the traces."""

import itertools
import json
import sys
from xml.etree import ElementTree as ET

import numpy as np
import pytest

import spot
from spot_bench.auto import auto, auto_without_deadline
from spot_bench.jobs import Job, draw_job
from spot_bench.optimum import optimum
from spot_bench.policies import POLICIES, greedy, uniform_progress
from spot_bench.simulation import start
from spot_bench.traces import FAMILIES, LENGTH, Trace, Zone, generate, read_trace

FOREVER = 10**6


def a_job(**fields) -> Job:
    known = {
        "work": 120,
        "restart": 3,
        "checkpoint": 5,
        "deadline": 360,
        "spot_price": 0.6,
        "on_demand_price": 3.0,
    }
    return Job(**known | {"estimate": 120} | fields)


def a_trace(*zones, graceful=False) -> Trace:
    """Return a trace with zones of a node class, each a list of intervals."""
    return Trace(
        "mine",
        [
            Zone("spot", 1.0, intervals, [graceful] * len(intervals))
            for intervals in zones
        ],
        FOREVER,
    )


def run(policy, job, trace):
    simulation = start(job, trace)
    policy(simulation)
    return simulation


def cheapest_plan(job, availability) -> float:
    """Return the lowest cost of all plans that say for each minute: wait, a zone, or on-demand nodes."""
    actions = [None, *range(len(availability)), "on-demand"]
    costs = [
        plan_cost(job, availability, plan)
        for plan in itertools.product(actions, repeat=job.deadline)
    ]
    return min(costs, default=float("inf"))


def plan_cost(job, availability, plan) -> float:
    cost = 0.0
    done = 0
    before = None
    age = 0
    for minute, action in enumerate(plan):
        if done == job.work:
            break
        if isinstance(action, int) and not availability[action][minute]:
            return float("inf")
        age = age + 1 if action == before else 1
        before = action
        if action is not None:
            cost += (
                job.on_demand_price if action == "on-demand" else job.spot_price
            ) / 60
            done += age > job.restart
    return cost if done == job.work else float("inf")


@pytest.mark.parametrize("seed", range(25))
def test_optimum_equals_cheapest_of_all_plans(seed):
    rng = np.random.default_rng(seed)
    deadline, zones = (9, 1) if seed % 2 else (7, 2)
    availability = rng.random((zones, deadline)) < rng.choice([0.5, 0.8])
    minutes = [
        [(minute, minute + 1) for minute in np.flatnonzero(row)] + [(500, 501)]
        for row in availability
    ]
    joined = [spot_intervals(zone) for zone in minutes]
    work = int(rng.integers(1, deadline - 1))
    restart = int(rng.integers(0, 3))
    job = a_job(
        work=work,
        restart=restart,
        deadline=deadline,
        on_demand_price=float(rng.choice([0.5, 1.0, 3.0])),
    )
    assert optimum(job, a_trace(*joined)) == pytest.approx(
        cheapest_plan(job, availability)
    )


def spot_intervals(minutes):
    """Return intervals of minutes that follow each other."""
    intervals: list[tuple[int, int]] = []
    for begin, end in minutes:
        if intervals and intervals[-1][1] == begin:
            intervals[-1] = (intervals[-1][0], int(end))
        else:
            intervals.append((int(begin), int(end)))
    return intervals


def test_optimum_is_infinite_if_deadline_cannot_be_met():
    assert optimum(a_job(deadline=122), a_trace([(0, FOREVER)])) == float("inf")


@pytest.mark.parametrize(("slack", "on_spot"), [(10, False), (11, True)])
def test_safe_optimum_uses_spot_only_with_reserve(slack, on_spot):
    job = a_job(deadline=120 + slack)
    cost = optimum(job, a_trace([(0, FOREVER)]), reserve=11)
    assert cost == pytest.approx(123 * (0.6 if on_spot else 3.0) / 60)


def test_auto_stays_on_spot_while_nothing_is_taken():
    simulation = run(auto, a_job(), a_trace([(0, FOREVER)]))
    assert simulation.history == [("spot", 0, 123)]
    assert simulation.cost == pytest.approx(123 * 0.6 / 60)


def test_auto_waits_for_spot_if_deadline_leaves_time():
    simulation = run(auto, a_job(deadline=720), a_trace([(100, FOREVER)]))
    assert simulation.history == [("wait", 0, 100), ("spot", 100, 223)]


def test_auto_meets_deadline_without_any_spot_capacity():
    simulation = run(auto, a_job(deadline=300), a_trace([(FOREVER - 1, FOREVER)]))
    assert not simulation.is_late
    assert {kind for kind, _, _ in simulation.history} == {"wait", "on-demand"}


def test_auto_runs_on_demand_at_once_if_there_is_no_slack():
    assert run(auto, a_job(deadline=124), a_trace([(0, FOREVER)])).history == [
        ("on-demand", 0, 123)
    ]


def test_auto_returns_to_spot_when_capacity_is_back():
    simulation = run(
        auto,
        a_job(work=600, estimate=600, deadline=900),
        a_trace([(0, 60), (400, FOREVER)]),
    )
    assert simulation.history[0][0] == "spot"
    assert simulation.history[-1][0] == "spot"
    assert "on-demand" in {kind for kind, _, _ in simulation.history}
    assert not simulation.is_late


def test_auto_without_deadline_leaves_spot_after_ten_minutes():
    simulation = run(auto_without_deadline, a_job(), a_trace([(FOREVER - 1, FOREVER)]))
    assert simulation.history[:2] == [("wait", 0, 10), ("on-demand", 10, 40)]


def test_auto_goes_on_demand_where_spot_costs_more():
    simulation = run(
        auto, a_job(spot_price=1.14, on_demand_price=1.04), a_trace([(0, FOREVER)])
    )
    assert simulation.history == [("on-demand", 0, 123)]


@pytest.mark.parametrize(("graceful", "done"), [(True, 57), (False, 55)])
def test_eviction_loses_work_after_last_checkpoint(graceful, done):
    simulation = start(a_job(), a_trace([(0, 60), (100, FOREVER)], graceful=graceful))
    assert simulation.spot(simulation.zones[0])
    assert simulation.done == done
    assert simulation.now == 60


def test_uniform_progress_runs_on_demand_only_when_behind():
    simulation = run(uniform_progress, a_job(deadline=246), a_trace([(40, FOREVER)]))
    kinds = [kind for kind, _, _ in simulation.history]
    assert kinds == ["wait", "on-demand", "wait", "spot"]
    assert not simulation.is_late


def test_policies_end_without_any_interval_of_capacity():
    job = a_job()
    late = {
        name: run(policy, job, a_trace([])).is_late for name, policy in POLICIES.items()
    }
    assert [name for name, is_late in late.items() if is_late] == ["always spot"]
    assert optimum(job, a_trace([])) == pytest.approx(job.on_demand_cost())


def test_greedy_waits_until_no_slack_is_left():
    simulation = run(greedy, a_job(deadline=300), a_trace([(200, FOREVER)]))
    assert simulation.history == [("wait", 0, 164), ("on-demand", 164, 287)]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_policy_beats_optimum_and_auto_is_never_late(family):
    for seed in range(4):
        rng = np.random.default_rng([7, seed])
        trace = generate(family, rng)
        jobs = (draw_job(rng) for _ in itertools.count())
        job = next(job for job in jobs if job.deadline <= 1500)
        lowest = optimum(job, trace)
        runs = {name: run(policy, job, trace) for name, policy in POLICIES.items()}
        assert not runs["Auto"].is_late
        assert all(job.is_late or job.cost >= lowest - 1e-9 for job in runs.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_intervals_of_trace_are_in_order_and_apart(family):
    for zone in generate(family, np.random.default_rng(5)).zones:
        edges = [edge for interval in zone.intervals for edge in interval]
        assert edges == sorted(set(edges))
        assert edges[0] >= 0
        assert edges[-1] <= LENGTH


def test_trace_repeats_after_its_length_from_any_minute():
    trace = Trace("mine", [Zone("spot", 1.0, [(10, 20)], [False])], 100, begin=15)
    zone = start(a_job(), trace).zones[0]
    assert [zone.next_start(minute) for minute in (0, 4, 5, 95, 104, 105)] == [
        0,
        4,
        95,
        95,
        104,
        195,
    ]
    assert [zone.end(minute)[0] for minute in (0, 95, 104)] == [5, 105, 105]


def test_csv_and_json_of_one_trace_are_the_same(tmp_path):
    (tmp_path / "mine.csv").write_text(
        "start,end,available\n0,1,1\n1,1.5,0\n1.5,2,1\n2,3,1\n"
    )
    (tmp_path / "mine.json").write_text(
        json.dumps(
            {
                "metadata": {"gap_seconds": 1800},
                "data": [1, 2, 0, 1, 1, 1],
            }
        ),
    )
    traces = [read_trace(tmp_path / name) for name in ("mine.csv", "mine.json")]
    assert [(trace.zones[0].intervals, trace.length) for trace in traces] == [
        ([(0, 60), (90, 180)], 180)
    ] * 2


@pytest.mark.parametrize(
    "content", ["", "from,to\n0,1\n", "start,end,available\n0,1,0\n"]
)
def test_file_without_capacity_is_refused(tmp_path, content):
    (tmp_path / "mine.csv").write_text(content)
    with pytest.raises(ValueError, match=r"mine\.csv: .* (name them|is needed)"):
        read_trace(tmp_path / "mine.csv")


def test_bench_prints_the_same_twice_and_draws(tmp_path, capsys, monkeypatch):
    printed = []
    for number in range(2):
        picture = tmp_path / f"{number}.svg"
        options = [
            "--traces",
            "1",
            "--family",
            "bursts",
            "--seed",
            "4",
            "--picture",
            str(picture),
        ]
        monkeypatch.setattr(sys, "argv", ["spot.py", *options])
        assert spot.main() == 0
        printed.append((capsys.readouterr().out, picture.read_text()))
    assert printed[0] == printed[1]
    assert "| bursts (1) |" in printed[0][0]
    ET.fromstring(printed[0][1])


def test_bench_runs_jobs_on_trace_of_user(tmp_path, capsys, monkeypatch):
    (tmp_path / "zone.csv").write_text("start,end,available\n0,7,1\n7,9,0\n")
    options = ["--traces", "2", "--trace", str(tmp_path / "zone.csv")]
    file = ["--json", str(tmp_path / "figures.json")]
    monkeypatch.setattr(sys, "argv", ["spot.py", *options, *file])
    assert spot.main() == 0
    printed = capsys.readouterr().out
    assert "| zone (2) |" in printed
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["command"] == ["spot.py", *options]
    [table] = figures["tables"]
    assert table["columns"] == ["median, p95, missed", *POLICIES]
    for row in table["rows"]:
        assert f"| {' | '.join(row)} |" in printed
