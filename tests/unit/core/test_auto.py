"""The capacity of the next attempt, rule by rule."""

import random
from dataclasses import replace
from decimal import Decimal

import pytest
from support.operator.experience import HOUR, MINUTE, of, offer

from finetune_operator.api.placement import AUTO, ON_DEMAND, SPOT
from finetune_operator.core.capacity.decision import (
    Cause,
    Experience,
    Limits,
    NodeGroup,
    Offer,
)
from finetune_operator.core.capacity.policy import (
    MIN_PENDING,
    PENDING,
    decide,
    estimate,
    offers_in_turns,
    pays_to_return,
    pending_limit,
    reason_to_give_up,
    return_time,
)

H100 = [offer("h100-spot", Decimal("0.80"))], [offer("h100", Decimal("3.10"))]
A100 = [offer("a100-spot", Decimal("1.14"))], [offer("a100", Decimal("1.04"))]


def choose(offers, experience, capacity=AUTO, **limits):
    spot, on_demand = offers
    decision = decide(capacity, spot, on_demand, experience, Limits(**limits))
    return decision.capacity, decision.offer.node_class, decision.cause


@pytest.mark.parametrize(
    ("offers", "experience", "expected"),
    [
        (H100, of(4), (SPOT, "h100-spot", Cause.LOWER_COST)),
        (H100, Experience(), (SPOT, "h100-spot", Cause.LOWER_COST)),
        (A100, of(4), (ON_DEMAND, "a100", Cause.LOWER_COST)),
        (A100, Experience(), (ON_DEMAND, "a100", Cause.LOWER_COST)),
        (
            ([offer("b200-spot", Decimal("2.12"))], [offer("b200")]),
            of(4),
            (SPOT, "b200-spot", Cause.PRICE_UNKNOWN),
        ),
        (
            ([offer("4090-spot")], [offer("4090", Decimal("0.53"))]),
            of(4),
            (SPOT, "4090-spot", Cause.PRICE_UNKNOWN),
        ),
        (
            ([offer("")], [Offer(NodeGroup(ON_DEMAND))]),
            of(4),
            (SPOT, None, Cause.PRICE_UNKNOWN),
        ),
        (H100, of(0.4), (ON_DEMAND, "h100", Cause.SHORT_STAGE)),
        (H100, of(0.4, total=4 * HOUR), (SPOT, "h100-spot", Cause.LOWER_COST)),
        (H100, of(4, deadline=4.2 * HOUR), (ON_DEMAND, "h100", Cause.DEADLINE)),
        (H100, of(4, deadline=4.5 * HOUR), (SPOT, "h100-spot", Cause.LOWER_COST)),
        (
            H100,
            of(4, deadline=4.5 * HOUR, measured=False),
            (ON_DEMAND, "h100", Cause.DEADLINE),
        ),
        (
            H100,
            of(4, deadline=5.2 * HOUR, measured=False),
            (SPOT, "h100-spot", Cause.LOWER_COST),
        ),
        (
            H100,
            of(4, deadline=4.5 * HOUR, later_stages=HOUR),
            (ON_DEMAND, "h100", Cause.DEADLINE),
        ),
        (H100, Experience(deadline=100 * HOUR), (ON_DEMAND, "h100", Cause.DEADLINE)),
        (
            H100,
            of(4, interruptions=80, spot_time=HOUR, restart=15 * MINUTE),
            (ON_DEMAND, "h100", Cause.LOWER_COST),
        ),
    ],
)
def test_auto_chooses_by_deadline_duration_and_cost(offers, experience, expected):
    assert choose(offers, experience) == expected


@pytest.mark.parametrize(
    "cause", [Cause.INTERRUPTIONS, Cause.NO_CAPACITY, Cause.NO_PROGRESS]
)
def test_auto_goes_to_on_demand_after_last_spot_class(cause):
    assert choose(H100, of(4, given_up={"h100-spot": cause})) == (
        ON_DEMAND,
        "h100",
        cause,
    )


def test_auto_tries_other_spot_class_before_on_demand():
    spot = [
        offer("dear", Decimal("1.20")),
        offer("cheap", Decimal("0.80")),
        offer("unknown"),
    ]
    chosen = []
    given_up: dict[str, Cause] = {}
    for _ in range(4):
        capacity, name, _ = choose((spot, H100[1]), of(4, given_up=given_up))
        chosen.append((capacity, name))
        given_up = {**given_up, name: Cause.NO_CAPACITY}
    assert chosen == [
        (SPOT, "cheap"),
        (SPOT, "dear"),
        (SPOT, "unknown"),
        (ON_DEMAND, "h100"),
    ]


FULL = Cause.NO_CAPACITY


@pytest.mark.parametrize(
    ("second", "given_up", "spare", "expected"),
    [
        ("0.95", {"cheap": FULL}, 60, "second"),
        ("0.95", {"cheap": FULL, "second": FULL}, 60, "cheap"),
        ("0.95", {"second": FULL, "cheap": FULL}, 60, "second"),
        ("0.95", {"cheap": FULL, "second": FULL}, 9, "h100"),
        ("0.97", {"cheap": FULL, "second": FULL}, 60, "h100"),
        ("0.95", {"cheap": FULL, "second": Cause.INTERRUPTIONS}, 60, "h100"),
        (None, {"cheap": FULL, "second": FULL}, 60, "h100"),
    ],
)
def test_full_classes_at_a_similar_price_have_turns(second, given_up, spare, expected):
    spot = [
        offer("cheap", Decimal("0.80")),
        offer("second", second and Decimal(second)),
    ]
    experience = of(4, given_up=given_up, restart=MINUTE, loss=MINUTE)
    experience = replace(experience, deadline=(4 * 1.03 * 60 + 3 + spare) * MINUTE)
    assert choose((spot, H100[1]), experience)[1] == expected


@pytest.mark.parametrize(("pending", "expected"), [(None, "h100"), (HOUR, "h100")])
def test_full_classes_have_no_turns_without_a_deadline(pending, expected):
    spot = [offer("cheap", Decimal("0.80")), offer("second", Decimal("0.80"))]
    deadline = 10 * HOUR if pending else None
    experience = of(4, given_up={"cheap": FULL, "second": FULL}, deadline=deadline)
    assert choose((spot, H100[1]), experience, pending=pending)[1] == expected


def test_class_with_lower_expected_cost_comes_first():
    spot = [offer("taken", Decimal("0.80"), 6.0), offer("calm", Decimal("0.90"), 0.01)]
    assert choose((spot, H100[1]), of(4, restart=5 * MINUTE)) == (
        SPOT,
        "calm",
        Cause.LOWER_COST,
    )


def test_cheap_class_that_is_always_taken_has_no_turn():
    """Its expected cost is above the cost of on-demand nodes, so only the other class waits for most of the time."""
    spot = [offer("taken", Decimal("0.80"), 6.0), offer("calm", Decimal("0.90"), 0.01)]
    experience = of(4, restart=15 * MINUTE, loss=20 * MINUTE, deadline=25 * HOUR)
    assert offers_in_turns(spot, experience, Limits()) == []


@pytest.mark.parametrize("cause", [Cause.INTERRUPTIONS, Cause.NO_PROGRESS])
def test_deadline_keeps_interrupted_on_demand_class(cause):
    experience = of(4, deadline=4 * HOUR, given_up={"h100": cause})
    assert choose(H100, experience) == (ON_DEMAND, "h100", Cause.DEADLINE)


@pytest.mark.parametrize(("left", "capacity"), [(1, SPOT), (0, ON_DEMAND)])
def test_last_interruption_is_not_spent_on_spot(left, capacity):
    assert choose(H100, of(4, interruptions_left=left))[0] == capacity


@pytest.mark.parametrize(
    ("capacity", "node_class"), [(SPOT, "a100-spot"), (ON_DEMAND, "a100")]
)
def test_requested_capacity_is_kept_whatever_it_costs(capacity, node_class):
    given_up = {"a100-spot": Cause.NO_CAPACITY}
    experience = of(0.1, deadline=HOUR, given_up=given_up)
    expected = Cause.REQUESTED_DEARER if capacity == SPOT else Cause.REQUESTED
    assert choose(A100, experience, capacity) == (capacity, node_class, expected)
    assert choose(A100, of(4), capacity) == (capacity, node_class, expected)


def test_decision_has_numbers_of_both_capacities():
    experience = of(4, restart=3 * MINUTE, loss=MINUTE)
    spot = [offer("h100-spot", Decimal("0.80"), interruptions_per_hour=0.2)]
    decision = decide(AUTO, spot, H100[1], experience, Limits())
    assert decision.spot
    assert decision.on_demand
    assert decision.on_demand.cost == Decimal("12.40")
    assert decision.spot.rate == pytest.approx(0.2)
    assert float(decision.spot.cost) == pytest.approx(
        3.2 * (1 + 0.2 * (0.5 + 3) / 60), rel=1e-4
    )


def test_rate_moves_from_expected_to_observed():
    spot = offer("spot", Decimal(1), interruptions_per_hour=0.5)
    estimates = [
        estimate(spot, of(4, interruptions=n, spot_time=n * HOUR))
        for n in (0, 10, 1000)
    ]
    rates = [expected.rate for expected in estimates if expected]
    assert rates == [0.5, 0.75, pytest.approx(1, abs=0.01)]


def test_cost_has_no_end_if_interruptions_leave_no_time():
    spot = offer("spot", Decimal(1), interruptions_per_hour=60)
    expected = estimate(spot, of(4, restart=HOUR))
    assert expected
    assert expected.cost == Decimal("Infinity")


@pytest.mark.parametrize(
    ("rate", "restart", "loss"),
    [(0.5, 6, 20), (3, 10, 10), (0.2, 3, 240), (0, 3, 10), (5, 0, 0)],
)
def test_cost_is_that_of_many_simulated_runs(rate, restart, loss):
    rng = random.Random(1)
    runs = [
        hours_with_interruptions(rng, rate, restart / 60, loss / 60)
        for _ in range(2000)
    ]
    spot = offer("spot", Decimal(1), interruptions_per_hour=rate)
    expected = estimate(spot, of(4, restart=restart * MINUTE, loss=loss * MINUTE))
    assert expected
    assert float(expected.cost) == pytest.approx(sum(runs) / len(runs), rel=0.05)


def hours_with_interruptions(
    rng: random.Random, rate: float, restart: float, between: float
) -> float:
    """Return the hours that four hours of work take; the first start is not counted."""
    between = between or 0.001
    hours = 0.0
    done = 0.0
    ends = rng.expovariate(rate) if rate else float("inf")
    while done < 4:
        needed = min(between, 4 - done)
        if hours + needed <= ends:
            hours = hours + needed
            done = done + needed
            continue
        while ends < float(
            "inf"
        ):  # it begins again, until a restart is not interrupted
            hours = ends + restart
            ends = ends + rng.expovariate(rate)
            if hours <= ends:
                break
    return hours


@pytest.mark.parametrize(
    ("experience", "limits", "expected"),
    [
        (of(4), Limits(), PENDING),
        (of(4), Limits(pending=HOUR), HOUR),
        (
            of(4, deadline=10 * HOUR, restart=MINUTE * 3, loss=MINUTE * 6.8),
            Limits(),
            0.9 * 5.666667 * HOUR,
        ),
        (of(4, deadline=10 * HOUR), Limits(pending=HOUR), HOUR),
        (
            of(1, deadline=1.1167 * HOUR, loss=0 * HOUR, restart=MINUTE),
            Limits(),
            MIN_PENDING,
        ),
        (
            of(1, deadline=1.1 * HOUR, loss=0 * HOUR, restart=MINUTE),
            Limits(),
            2.2 * MINUTE,
        ),
        (
            of(1, deadline=1.1 * HOUR, loss=0 * HOUR, restart=MINUTE),
            Limits(pending=MINUTE),
            MINUTE,
        ),
        (of(4, deadline=4 * HOUR), Limits(), 0 * HOUR),
        (Experience(deadline=HOUR), Limits(), PENDING),
    ],
)
def test_pod_waits_as_user_or_deadline_allows(experience, limits, expected):
    assert pending_limit(experience, limits) / MINUTE == pytest.approx(
        expected / MINUTE, rel=1e-3
    )


@pytest.mark.parametrize(
    ("interruptions", "fruitless", "deadline", "limits", "expected"),
    [
        (2, 2, None, Limits(), None),
        (3, 0, None, Limits(), Cause.INTERRUPTIONS),
        (0, 3, None, Limits(), Cause.NO_PROGRESS),
        (3, 0, None, Limits(interruptions=4), None),
        (1, 0, None, Limits(interruptions=1), Cause.INTERRUPTIONS),
        (0, 5, None, Limits(fruitless=5), Cause.NO_PROGRESS),
        (99, 99, 10 * HOUR, Limits(), None),
        (2, 0, 10 * HOUR, Limits(interruptions=2), Cause.INTERRUPTIONS),
        (0, 2, 10 * HOUR, Limits(fruitless=2), Cause.NO_PROGRESS),
    ],
)
def test_class_is_given_up_at_limit_in_a_row(
    interruptions, fruitless, deadline, limits, expected
):
    assert (
        reason_to_give_up(interruptions, fruitless, of(4, deadline=deadline), limits)
        is expected
    )


@pytest.mark.parametrize(
    ("cause", "attempts", "deadline", "expected"),
    [
        (Cause.NO_CAPACITY, 1, None, 30),
        (Cause.NO_CAPACITY, 3, None, 120),
        (Cause.NO_CAPACITY, 100, None, 30 * 2**10),
        (Cause.NO_CAPACITY, 3, 10 * HOUR, 30),
        (Cause.DEADLINE, 3, 10 * HOUR, 0),
    ],
)
def test_return_time_doubles_only_without_deadline(cause, attempts, deadline, expected):
    experience = of(4, on_demand_attempts=attempts, deadline=deadline)
    assert return_time(cause, experience, Limits()) == expected * MINUTE


@pytest.mark.parametrize(
    ("offers", "experience", "expected"),
    [
        (H100, of(4), True),
        (H100, of(0.2, total=4 * HOUR), False),
        (A100, of(4), False),
        (H100, of(4, deadline=4.2 * HOUR), False),
        (([offer("spot")], H100[1]), of(4), False),
        (H100, Experience(), False),
    ],
)
def test_running_attempt_returns_only_where_that_pays(offers, experience, expected):
    spot, on_demand = offers
    decision = decide(AUTO, spot, on_demand, experience, Limits())
    assert pays_to_return(decision, experience) is expected


def test_deadline_is_kept_after_interruption_in_worst_moment():
    """Two restarts, the lost work and the rest fit into the time that Auto asks for at least."""
    for hours in (1, 4, 24):
        for restart in (2, 10):
            experience = of(hours, restart=restart * MINUTE, loss=20 * MINUTE)
            assert experience.remaining
            needed = experience.remaining + 2 * experience.restart + experience.loss
            late = choose(
                H100,
                of(hours, restart=restart * MINUTE, loss=20 * MINUTE, deadline=needed),
            )
            assert late == (ON_DEMAND, "h100", Cause.DEADLINE)
            in_time = of(
                hours,
                restart=restart * MINUTE,
                loss=20 * MINUTE,
                deadline=needed + 0.031 * hours * HOUR,
            )
            assert choose(H100, in_time)[0] == SPOT
