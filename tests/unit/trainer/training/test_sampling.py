"""Samples are pure functions of their arguments."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from finetune_trainer.data.sampling import permutation, sample


def test_sample_is_the_same_in_every_version():
    """A score must not change because another version of NumPy asks other questions."""
    assert sample(5, 20, 42, "arc_easy") == [5, 8, 12, 13, 16]
    assert sample(5, 20, 42, "arc_hard") != sample(5, 20, 42, "arc_easy")
    assert sample(5, 20, 43, "arc_easy") != sample(5, 20, 42, "arc_easy")


@given(size=st.integers(1, 60), count=st.integers(1, 50), seed=st.integers(-5, 5))
def test_sample_is_sorted_and_without_repetition(size, count, seed):
    drawn = sample(size, count, seed, "task")
    assert drawn == sorted(set(drawn))
    assert len(drawn) == min(size, count)
    assert set(drawn) <= set(range(count))


def test_sample_is_uniform_over_the_questions():
    """The mean of 5 of the numbers below 100 has a standard deviation of 12.6: over 400 seeds that is 0.63."""
    means = [np.mean(sample(5, 100, seed, "task")) for seed in range(400)]
    assert abs(np.mean(means) - 49.5) < 4 * 0.63


def test_larger_sample_contains_the_smaller_one():
    assert set(sample(5, 50, 0, "task")) < set(sample(9, 50, 0, "task"))


def test_permutation_holds_every_number_once():
    assert sorted(permutation(50, 3, 2**63 + 1)) == list(range(50))
