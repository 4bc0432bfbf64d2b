"""The step sampler and the targets of a batch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.trainer.training import document, write_rows

from finetune_trainer.contract import TrainRecipe
from finetune_trainer.data.documents import Document
from finetune_trainer.data.packing.rows import PackedRows
from finetune_trainer.data.sampling import permutation
from finetune_trainer.training.batches import StepSampler, load_batch


@given(
    rows=st.integers(1, 40),
    epochs=st.floats(0.1, 4),
    batch_size=st.integers(1, 7),
    accumulation=st.integers(1, 3),
    seed=st.integers(-(2**63), 2**64),
)
def test_every_row_is_sampled_once_per_epoch(
    rows, epochs, batch_size, accumulation, seed
):
    recipe = TrainRecipe(
        epochs=epochs,
        micro_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
    )
    sampler = StepSampler.of(recipe, rows, seed)
    sampled = np.concatenate(
        [sampler.rows_for_step(step) for step in range(sampler.steps)]
    )
    assert len(sampled) == max(1, round(epochs * rows))
    counts = np.bincount(sampled, minlength=rows)
    assert counts.max() - counts.min() <= 1
    assert all(
        len(sampler.rows_for_step(step)) == batch_size * accumulation
        for step in range(sampler.steps - 1)
    )


def test_all_steps_are_full_with_max_steps():
    sampler = StepSampler.of(
        TrainRecipe(max_steps=7, micro_batch_size=4, gradient_accumulation_steps=2),
        rows=3,
        seed=1,
    )
    assert sampler.steps == 7
    assert {len(sampler.rows_for_step(step)) for step in range(7)} == {8}


def test_order_of_rows_depends_on_seed_and_epoch():
    orders = {
        tuple(permutation(50, seed, epoch)) for seed in range(3) for epoch in range(3)
    }
    assert len(orders) == 9


def test_order_of_rows_is_the_same_in_every_version():
    """A run that resumes with a later version of NumPy or of the trainer must see the same rows."""
    assert list(permutation(10, 42, 0)) == [7, 1, 6, 4, 3, 5, 9, 0, 2, 8]


@pytest.fixture
def rows(tmp_path):
    first = document(0, 10, prompt=4)
    second = document(5, 6, prompt=2)
    return PackedRows(write_rows(tmp_path, [first, second], context_length=20), "train")


def test_targets_are_exactly_the_tokens_of_the_loss_mask(rows):
    batch = load_batch(rows, np.array([0]))
    positions = batch.target_positions.tolist()
    # Position t - 1 predicts token t: tokens 4 to 9 of the first document, 2 to 5 of the second.
    assert positions == [3, 4, 5, 6, 7, 8, 11, 12, 13, 14]
    assert batch.targets.tolist() == [
        rows.read([0]).tokens[0, position + 1] for position in positions
    ]


def test_batch_size_excludes_padding(rows):
    assert load_batch(rows, np.array([0])).size == 16
    assert load_batch(rows, np.array([0, 0])).size == 32


def test_first_token_of_a_document_is_never_a_target(tmp_path):
    unmasked = Document(document(0, 8).tokens, np.ones(8, dtype="u1"))
    rows = PackedRows(
        write_rows(tmp_path, [unmasked, unmasked], context_length=16), "train"
    )
    assert 7 not in load_batch(rows, np.array([0])).target_positions.tolist()


def test_target_positions_index_the_flattened_batch(rows):
    single = load_batch(rows, np.array([0]))
    double = load_batch(rows, np.array([0, 0]))
    assert double.target_positions.tolist() == single.target_positions.tolist() + [
        position + 20 for position in single.target_positions.tolist()
    ]
