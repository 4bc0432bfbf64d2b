import pytest

from finetune_operator.core.durations import format_duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (-3, "0s"),
        (0.04, "0.1s"),
        (0.96, "1s"),
        (46.4, "46s"),
        (59.6, "1m"),
        (785, "13m5s"),
        (3600, "1h"),
        (47133, "13h5m"),
        (86400 * 2 + 3600 * 4, "2d4h"),
    ],
)
def test_duration_has_its_two_largest_units(seconds, text):
    assert format_duration(seconds) == text
