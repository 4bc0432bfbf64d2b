"""Texts of users, programs and clusters stay texts in a card, whatever they hold; and the card stays small."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cli.run_cards import PageReader, finished_record, with_text

from finetune_cli.card.markup import Markup, element, join, shortened, visible
from finetune_cli.card.page import page

HOSTILE = (
    "<script>alert(1)</script>",
    "</style></title></code></pre></svg><img src=x onerror=alert(1)>",
    "\" onload=alert(1) '",
    "<!-- --> ]]> &lt;b&gt; &#60;",
    "\x00\x07\x1b[31m\r\n\r",
    "\ud800 \ufffe \U0010ffff",
    "\u202etxt.exe\u2066",
    "{{7*7}} ${7*7} {% raw %}",
    "javascript:alert(1)",
)
SURROGATES = st.text(st.characters(), min_size=1, max_size=40)
LARGEST = 300_000


@pytest.fixture(scope="module")
def record():
    return finished_record(steps=300)


@pytest.fixture(scope="module")
def plain(record):
    """The card with a harmless text everywhere."""
    return PageReader(page(with_text(record, "x")))


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text_everywhere(record, plain, text):
    content = page(with_text(record, text))
    reader = PageReader(content)
    assert reader.tags == plain.tags
    assert reader.open == []
    # UTF-8 has no surrogates.
    assert content.encode()
    shown = visible(text)
    assert sum(shown in part for part in reader.texts) > 20
    assert "alert(1)" not in "".join(reader.values["class"])


def test_any_text_leaves_the_elements_as_they_are(record, plain):
    @settings(max_examples=25, deadline=None)
    @given(text=SURROGATES)
    def check(text):
        assert PageReader(page(with_text(record, text))).tags == plain.tags

    check()


def test_longest_texts_leave_the_card_small(record):
    """A character of HTML takes five bytes, and so may a character of another script."""
    for text in ("&" * 4096, "\U0001f600" * 4096):
        assert len(page(with_text(record, text)).encode()) < LARGEST


@given(text=SURROGATES)
def test_attribute_and_content_keep_a_text(text):
    content = element("p", text, title=text)
    reader = PageReader(content)
    assert reader.tags == [("p", "title")]
    assert reader.values["title"] == [visible(text)]
    assert "".join(reader.texts) == visible(text)


def test_sum_of_html_and_text_is_text():
    """So nothing becomes HTML by accident."""
    both = Markup("<b>") + "</b>"
    assert join([both]) == "&lt;b&gt;&lt;/b&gt;"


def test_long_text_is_cut_with_its_length():
    assert shortened("a" * 10, 10) == "a" * 10
    assert shortened("a" * 1200, 3) == "aaa … (1,200 characters)"
