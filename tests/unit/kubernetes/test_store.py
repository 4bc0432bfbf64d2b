"""The store: which version of an object counts, and what its indexes find."""

from unittest.mock import patch

import pytest

from finetune_operator.kubernetes.cache import store as module
from finetune_operator.kubernetes.cache.store import Store, TextStore, version_of

NAME = ("team", "one")


def an_object(version="", name="one", namespace="team", color="red"):
    return {
        "metadata": {
            "namespace": namespace,
            "name": name,
            "uid": "u",
            "resourceVersion": version,
        },
        "color": color,
    }


def a_store(*objects):
    store = Store(lambda raw: raw["color"], color=lambda color: [color])
    for raw in objects:
        store.update(raw)
    return store


@pytest.mark.parametrize(
    ("version", "news"),
    [("6", False), ("7", False), ("8", True), ("10", True), ("", True)],
)
def test_only_a_newer_version_is_news(version, news):
    """Versions are numbers: 10 is newer than 7. An object without a version is always believed."""
    assert a_store(an_object("7")).is_news(an_object(version)) is news


@pytest.mark.parametrize(("version", "news"), [("6", False), ("7", False), ("8", True)])
def test_late_answer_does_not_bring_a_deleted_object_back(version, news):
    store = a_store(an_object("5"))
    assert store.remove(NAME, 7) == "red"
    assert store.get(NAME) is None
    assert store.is_news(an_object(version)) is news


def test_object_created_again_is_stored():
    store = a_store(an_object("5"))
    store.remove(NAME, 7)
    store.update(an_object("8", color="blue"))
    assert store.get(NAME) == "blue"
    assert not store.is_news(an_object("7"))


def test_oldest_deletions_are_forgotten():
    with patch.object(module, "DELETIONS_KEPT", 2):
        store = a_store()
        for number, name in enumerate("abc", 1):
            store.remove(("team", name), number)
    assert [store.is_news(an_object("1", name)) for name in "abc"] == [
        True,
        False,
        False,
    ]


def test_removal_of_an_unknown_object_returns_none():
    assert a_store().remove(NAME, 3) is None


def test_index_follows_updates_and_removals():
    store = a_store(
        an_object("1"),
        an_object("1", name="two"),
        an_object("1", name="other", color="blue"),
    )
    assert len(store.select("color", "red")) == 2
    store.update(an_object("2", color="blue"))
    assert (store.select("color", "red"), store.select("color", "blue")) == (
        ["red"],
        ["blue", "blue"],
    )
    store.remove(NAME, 3)
    store.remove(("team", "other"), 3)
    assert store.select("color", "blue") == []
    assert set(store._index["color"]) == {"red"}, (
        "an empty entry of an index would stay forever"
    )


def test_only_objects_older_than_the_list_are_unlisted():
    store = a_store(
        an_object("1", "listed"),
        an_object("1", "missing"),
        an_object("9", "new"),
        an_object("1", "x", "other"),
    )
    assert list(store.unlisted({("team", "listed")}, 5, "team")) == [
        ("team", "missing")
    ]
    assert set(store.unlisted({("team", "listed")}, 5, None)) == {
        ("team", "missing"),
        ("other", "x"),
    }


@pytest.mark.parametrize(
    ("text", "number"), [("12", 12), ("", 0), (None, 0), ("abc", 0), ("²", 0)]
)
def test_version_that_is_no_number_is_zero(text, number):
    assert version_of({"metadata": {"resourceVersion": text}}) == number


def a_text_store(*objects):
    store = TextStore(
        dict, lambda raw: raw["color"] == "red", color=lambda raw: [raw["color"]]
    )
    for raw in objects:
        store.update(raw)
    return store


def test_text_store_returns_equal_objects():
    red = an_object("1")
    blue = an_object("1", name="two", color="blue")
    store = a_text_store(red, blue)
    assert store.get(NAME) == red
    assert store.get(("team", "two")) == blue
    assert store.select("color", "red") == [red]
    assert [bool(entry.text) for entry in store.entries.values()] == [True, False]
    assert store.remove(NAME) == red
    assert store.select("color", "red") == []


def test_text_store_follows_an_object_that_ends():
    store = a_text_store(an_object("1", color="blue"))
    store.update(an_object("2"))
    assert store.select("color", "blue") == []
    assert store.select("color", "red") == [an_object("2")]


def test_cleared_store_accepts_every_version():
    store = a_store(an_object("5"))
    store.remove(NAME, 7)
    store.update(an_object("8", name="two"))
    store.clear()
    assert len(store) == 0
    assert store.select("color", "red") == []
    assert store.is_news(an_object("1"))
