"""15% of each sample, 80/10/10, and the same for the same keys."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtrain.data.keyed_random import hashed, uniform
from flashtrain.data.masking import mask_tokens, masked_count
from flashtrain.data.wordpiece import SpecialTokens

SPECIAL = SpecialTokens.past(50)


def samples_of(lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Samples of so many ordinary tokens each, between [CLS] and [SEP]; and each token's sample."""
    random = np.random.default_rng(sum(lengths))
    parts = [
        [SPECIAL.classify, *random.integers(0, 50, length), SPECIAL.separate] for length in lengths
    ]
    return np.concatenate(parts), np.repeat(np.arange(len(parts)), [len(part) for part in parts])


@settings(max_examples=60)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6), share=st.floats(0.01, 1))
def test_each_sample_has_its_share_of_labels_at_ordinary_tokens(lengths, share):
    tokens, samples = samples_of(lengths)
    masked = mask_tokens(tokens, samples, SPECIAL, keys=(1, samples), share=share)
    assert (np.diff(masked.positions) > 0).all()
    assert np.array_equal(masked.labels, tokens[masked.positions])
    assert (masked.labels < 50).all()
    assert (
        np.bincount(samples[masked.positions]).tolist()
        == masked_count(np.array(lengths), share).tolist()
    )
    untouched = np.delete(np.arange(len(tokens)), masked.positions)
    assert np.array_equal(masked.tokens[untouched], tokens[untouched])


def test_of_the_chosen_four_in_five_are_masked_one_in_ten_is_random_and_one_in_ten_stays():
    tokens, samples = samples_of([20000])
    masked = mask_tokens(tokens, samples, SPECIAL, keys=(3, samples))
    new = masked.tokens[masked.positions]
    assert len(new) == 3000
    assert (new == SPECIAL.mask).mean() == pytest.approx(0.8, abs=0.025)
    assert (new == masked.labels).mean() == pytest.approx(0.1 + 0.1 / 50, abs=0.02)
    others = new[(new != SPECIAL.mask) & (new != masked.labels)]
    assert others.max() < 50
    assert len(np.unique(others)) > 45


def test_every_place_is_chosen_about_as_often():
    tokens, samples = samples_of([20] * 4000)
    positions = mask_tokens(tokens, samples, SPECIAL, keys=(5, samples)).positions
    counts = np.bincount(positions % 22, minlength=22)
    assert counts[0] == counts[21] == 0
    assert counts[1:21] / 4000 == pytest.approx(np.full(20, 0.15), abs=0.03)


def test_the_numbers_never_change():
    assert hashed(1, 2).item() == 16216609496213459576
    assert hashed(np.arange(3), 7).tolist() == [
        hashed(0, 7).item(),
        hashed(1, 7).item(),
        hashed(2, 7).item(),
    ]
    draws = uniform(np.arange(20000), 4)
    assert 0 <= draws.min() <= draws.max() < 1
    assert draws.mean() == pytest.approx(0.5, abs=0.01)
