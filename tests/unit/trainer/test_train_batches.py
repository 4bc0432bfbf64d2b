"""Which rows a step sees, and which tokens it is asked to predict."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.training import document, write_rows

from finetune_trainer.contract import TrainRecipe
from finetune_trainer.data.packing import Document, PackedRows
from finetune_trainer.training.batches import StepSampler, load_batch, permutation


@given(
    rows=st.integers(1, 40),
    epochs=st.floats(0.1, 4),
    batch_size=st.integers(1, 7),
    accumulation=st.integers(1, 3),
    seed=st.integers(-(2**63), 2**64),
)
def test_every_row_is_seen_as_often_as_the_epochs_say(rows, epochs, batch_size, accumulation, seed):
    recipe = TrainRecipe(epochs=epochs, batch_size=batch_size, gradient_accumulation=accumulation)
    course = StepSampler.of(recipe, rows, seed)
    seen = np.concatenate([course.rows_for_step(step) for step in range(course.steps)])
    assert len(seen) == max(1, round(epochs * rows))
    times = np.bincount(seen, minlength=rows)
    assert times.max() - times.min() <= 1
    assert all(len(course.rows_for_step(step)) == batch_size * accumulation for step in range(course.steps - 1))


def test_max_steps_are_all_full_steps():
    course = StepSampler.of(TrainRecipe(max_steps=7, batch_size=4, gradient_accumulation=2), rows=3, seed=1)
    assert course.steps == 7
    assert {len(course.rows_for_step(step)) for step in range(7)} == {8}


def test_epochs_and_seeds_have_their_own_orders():
    orders = {tuple(permutation(50, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_the_order_of_rows_never_changes_between_versions():
    # A checkpoint of today must find its rows in the same places tomorrow.
    assert list(permutation(10, 42, 0)) == [7, 1, 6, 4, 3, 5, 9, 0, 2, 8]


@pytest.fixture
def rows(tmp_path):
    first, second = document(0, 10, prompt=4), document(5, 6, prompt=2)
    return PackedRows(write_rows(tmp_path, [first, second], context_length=20), "train")


def test_a_batch_asks_for_the_counted_tokens_and_no_others(rows):
    batch = load_batch(rows, np.array([0]))
    places = batch.target_positions.tolist()
    # Token t is asked for at place t - 1: tokens 4 to 9 of the first document, 2 to 5 of the second.
    assert places == [3, 4, 5, 6, 7, 8, 11, 12, 13, 14]
    assert batch.targets.tolist() == [rows.tokens[0, place + 1] for place in places]


def test_padding_is_not_counted_as_tokens_seen(rows):
    assert load_batch(rows, np.array([0])).size == 16
    assert load_batch(rows, np.array([0, 0])).size == 32


def test_the_first_token_of_a_document_is_never_asked_for(tmp_path):
    wrong = Document(document(0, 8).tokens, np.ones(8, dtype="u1"))
    rows = PackedRows(write_rows(tmp_path, [wrong, wrong], context_length=16), "train")
    assert 7 not in load_batch(rows, np.array([0])).target_positions.tolist()


def test_places_of_the_second_row_lie_behind_the_first(rows):
    one, two = load_batch(rows, np.array([0])), load_batch(rows, np.array([0, 0]))
    assert two.target_positions.tolist() == one.target_positions.tolist() + [
        place + 20 for place in one.target_positions.tolist()
    ]
