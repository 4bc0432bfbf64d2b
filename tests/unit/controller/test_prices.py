"""The price list is read again when it changes, and no missing or broken list stops a pipeline."""

import asyncio
import json
import logging
import os
from datetime import UTC, date, datetime
from decimal import Decimal

import pytest
from support.operator.scenario import Scenario, a_pipeline

from finetune_operator.api.placement import PlacementDefaults
from finetune_operator.controller import prices
from finetune_operator.controller.metrics import REGISTRY
from finetune_operator.controller.prices import MAX_CHARACTERS, PricedSettings
from finetune_operator.core.settings import Settings

CLASSES = [
    {
        "name": "h100-spot",
        "capacity": "Spot",
        "accelerator": "nvidia.com/gpu",
        "price": "0.80",
    },
    {
        "name": "h100",
        "capacity": "OnDemand",
        "accelerator": "nvidia.com/gpu",
        "price": "3.10",
    },
]
CONFIGURED = Settings(
    placement_defaults=PlacementDefaults.model_validate({"nodeClasses": CLASSES})
)
GPU = {"resources": {"limits": {"nvidia.com/gpu": 1}}}


@pytest.fixture
def folder(tmp_path):
    """Return a folder as the kubelet writes it: the files are links through ..data, which is replaced as a whole."""
    (tmp_path / "prices.json").symlink_to("..data/prices.json")
    return tmp_path


def publish(folder, day, **prices):
    publish_text(folder, json.dumps({"date": day, "prices": prices}))


def publish_text(folder, text):
    version = folder / f"..{len(list(folder.iterdir()))}"
    version.mkdir()
    (version / "prices.json").write_text(text)
    os.utime(version / "prices.json", (0, 0))
    (folder / "..new").symlink_to(version.name)
    (folder / "..new").rename(folder / "..data")


def current(settings):
    defaults = settings.current.placement_defaults
    return {
        node_class.name: (node_class.price, node_class.price_date)
        for node_class in defaults.node_classes
    }


def oldest():
    return REGISTRY.get_sample_value("finetune_oldest_price_timestamp_seconds")


def seconds_at(year, month, day):
    return datetime(year, month, day, tzinfo=UTC).timestamp()


def test_list_replaces_the_prices_that_it_names(folder):
    publish(folder, "2026-05-04", **{"h100-spot": "0.95"})
    settings = PricedSettings(CONFIGURED, folder)
    assert current(settings) == {
        "h100-spot": (Decimal("0.95"), date(2026, 5, 4)),
        "h100": (Decimal("3.10"), None),
    }
    placement = settings.current.placement_defaults
    assert placement
    assert placement.currency == "USD"


def test_price_of_null_is_not_known(folder):
    publish(folder, "2026-05-04", h100=None)
    assert current(PricedSettings(CONFIGURED, folder))["h100"] == (
        None,
        date(2026, 5, 4),
    )


def test_yaml_list_with_plain_dates_and_numbers_is_read(tmp_path):
    (tmp_path / "prices.yaml").write_text(
        "date: 2026-05-04\nprices:\n  h100: 2.9\n  h100-spot:\n"
    )
    assert current(PricedSettings(CONFIGURED, tmp_path)) == {
        "h100-spot": (None, date(2026, 5, 4)),
        "h100": (Decimal("2.9"), date(2026, 5, 4)),
    }


def test_changed_list_is_used_while_the_operator_runs(folder, monkeypatch):
    monkeypatch.setattr(prices, "REFRESH_SECONDS", 0.01)
    publish(folder, "2026-05-04", h100="2.00")

    async def scenario():
        settings = PricedSettings(CONFIGURED, folder)
        running = asyncio.create_task(settings.run())
        publish(folder, "2026-05-05", h100="1.00")
        async with asyncio.timeout(10):
            while current(settings)["h100"] != (Decimal("1.00"), date(2026, 5, 5)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        running.cancel()

    asyncio.run(scenario())


def test_names_that_are_no_node_class_are_logged_once(folder, caplog):
    caplog.set_level(logging.INFO)
    publish(folder, "2026-05-04", h100="2.00", b200="5.00", a100=None)
    settings = PricedSettings(CONFIGURED, folder)
    settings.refresh()
    assert caplog.messages == [
        "prices of 2026-05-04 for 1 node classes; ignored, because placement.nodeClasses has no a100, b200"
    ]


BROKEN = {
    '{"date": "2026-05-04", "prices": {"h100": "cheap"}}': "prices.h100: Input should be a valid decimal, not 'cheap'",
    '{"date": "2026-05-04", "prices": {"h100": -1}}': "prices.h100: Input should be greater than or equal to 0, not -1",
    '{"date": "2026-05-04", "prices": {"h100": true}}': "prices.h100: ",
    '{"date": "May", "prices": {}}': "date: Input should be a valid date",
    '{"prices": {}}': "date: Field required",
    '{"date": "2026-05-04", "currency": "EUR", "prices": {}}': "currency: Extra inputs are not permitted",
    "{": "Expecting property name",
    "": "Expecting value",
    "[" * 60_000: "maximum recursion depth",
    " " * (MAX_CHARACTERS + 1): "has more than 65,536 characters",
}


@pytest.mark.parametrize(
    ("text", "problem"), BROKEN.items(), ids=lambda text: text[:60]
)
def test_broken_list_keeps_the_last_good_one(folder, caplog, text, problem):
    publish(folder, "2026-05-04", h100="2.00")
    settings = PricedSettings(CONFIGURED, folder)
    good = current(settings)
    publish_text(folder, text)
    settings.refresh()
    settings.refresh()
    assert current(settings) == good
    [line] = caplog.messages
    assert (
        f"cannot use the price list in {folder}, prices stay as they are: prices.json: "
        in line
    )
    assert problem in line
    assert ": write date" in line or "leave out" in line
    assert "\n" not in line


def test_broken_yaml_is_named_with_its_line(tmp_path, caplog):
    (tmp_path / "prices.yaml").write_text("date: 2026-05-04\nprices: {a: ]\n")
    assert PricedSettings(CONFIGURED, tmp_path).current == CONFIGURED
    [line] = caplog.messages
    assert "line 2" in line


def test_unreadable_list_is_logged_once_and_read_later(tmp_path, caplog):
    (tmp_path / "prices.json").mkdir()
    settings = PricedSettings(CONFIGURED, tmp_path)
    settings.refresh()
    [line] = caplog.messages
    assert "Is a directory" in line
    (tmp_path / "prices.json").rmdir()
    (tmp_path / "prices.json").write_text(
        '{"date": "2026-05-04", "prices": {"h100": "1"}}'
    )
    settings.refresh()
    assert current(settings)["h100"][0] == Decimal(1)


def test_operator_runs_with_the_configured_prices_without_a_list(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    settings = PricedSettings(CONFIGURED, tmp_path / "absent")
    settings.refresh()
    assert settings.current == CONFIGURED
    assert caplog.messages == [
        f"no price list in {tmp_path}/absent: the prices of placement.nodeClasses apply"
    ]


def test_deleted_list_leaves_the_configured_prices(folder):
    publish(folder, "2026-05-04", h100="2.00")
    settings = PricedSettings(CONFIGURED, folder)
    (folder / "prices.json").unlink()
    settings.refresh()
    assert settings.current == CONFIGURED
    assert oldest() == -1


def test_metric_shows_the_date_of_the_oldest_price(folder):
    publish(folder, "2026-05-04", **{"h100-spot": "0.95"})
    settings = PricedSettings(CONFIGURED, folder)
    assert oldest() == seconds_at(2026, 5, 4)
    publish(folder, "2026-06-01", **{"h100-spot": "0.95", "h100": "3.00"})
    settings.refresh()
    assert oldest() == seconds_at(2026, 6, 1)
    publish(folder, "2026-06-02", **{"h100-spot": None, "h100": None})
    settings.refresh()
    assert oldest() == -1


@pytest.mark.parametrize(
    "text",
    [None, "{", '{"date": "2026-05-04", "prices": {"h100-spot": null, "h100": null}}'],
)
def test_pipeline_succeeds_without_prices(folder, text):
    if text is not None:
        publish_text(folder, text)
    settings = PricedSettings(CONFIGURED, folder)
    scenario = Scenario(
        a_pipeline(train={"pod": GPU}), settings=settings.current
    ).run_before("train")
    assert scenario.attempt("train").capacity == "Spot"
    scenario.finish()
    assert scenario.status.phase == "Succeeded"
