"""Made-up long documents: what is in them, and what a reader of a part can score at most."""

from __future__ import annotations

import numpy as np
import pytest

from flashtrain.errors import UserError
from flashtrain_recipes.synthetic_documents import FILLER, SyntheticDocuments, best_micro_f1


def test_a_label_is_present_exactly_where_its_cue_is():
    documents = SyntheticDocuments(50, 300, labels=6)
    for number in range(50):
        tokens, present = documents.document(number)
        assert len(tokens) == 300
        assert [(tokens == label).sum() for label in range(6)] == present.astype(int).tolist()
        assert tokens.max() < documents.vocab_size == 6 + FILLER


def test_documents_follow_from_seed_and_number_alone():
    one, same, other = (
        SyntheticDocuments(9, 200),
        SyntheticDocuments(99, 200),
        SyntheticDocuments(9, 200, seed=1),
    )
    assert np.array_equal(one.document(5)[0], same.document(5)[0])
    assert not np.array_equal(one.document(5)[0], other.document(5)[0])
    assert not np.array_equal(one.document(5)[0], one.document(6)[0])


def test_cues_lie_anywhere_and_labels_are_as_frequent_as_asked():
    documents = SyntheticDocuments(3000, 40, labels=4, presence=0.3)
    places = [np.flatnonzero(documents.document(number)[0] < 4) for number in range(3000)]
    counts = np.bincount(np.concatenate(places), minlength=40)
    assert counts.sum() / 12000 == pytest.approx(0.3, abs=0.02)
    assert counts / counts.mean() == pytest.approx(np.ones(40), abs=0.4)


@pytest.mark.parametrize("presence", [0.1, 0.2, 0.5])
@pytest.mark.parametrize("share", [0, 1 / 32, 0.25, 0.5, 1])
def test_the_bound_for_documents_of_one_length_is_its_formula(share, presence):
    expected = max(2 * share / (1 + share), 2 * presence / (1 + presence))
    assert best_micro_f1(1024, round(1024 * share), presence) == pytest.approx(expected)


def test_no_rule_of_what_to_guess_scores_above_the_bound_and_one_reaches_it():
    documents = SyntheticDocuments(4000, 60, labels=3, presence=0.4)
    visible, present = (np.zeros((4000, 3), dtype=bool) for _ in range(2))
    for number in range(4000):
        tokens, present[number] = documents.document(number)
        visible[number] = [(tokens[:15] == label).any() for label in range(3)]
    guesses = [
        np.zeros((4000, 3), dtype=bool),
        np.arange(4000)[:, None] % 2 == 0,
        np.ones((4000, 3), dtype=bool),
    ]
    scores = [
        2 * ((visible | guess) & present).sum() / ((visible | guess).sum() + present.sum())
        for guess in guesses
    ]
    assert max(scores) == pytest.approx(best_micro_f1(60, 15, 0.4), abs=0.02)


def test_documents_that_cannot_be_made_are_one_line():
    with pytest.raises(UserError, match=r"length=7 with finetune\.labels=8"):
        SyntheticDocuments(3, 7)
