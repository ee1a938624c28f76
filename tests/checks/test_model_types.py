"""flashtrain.check on many types of transformers: no false alarm, and the leaks that transformers
5.23 has are found."""

from __future__ import annotations

import pytest
from checks.model_types import TYPES, model_of
from hybrid_models import CONFIGS, ON_ONE_DEVICE

import flashtrain
from flashtrain.integrations.huggingface_decoder import HuggingFaceDecoder

# Their masks are made without position_ids, so that documents see each other by attention.
LEAKING = ("gpt_oss", "opt")
# transformers refuses sdpa for soft caps and sinks.
EAGER = ("gemma2", "gpt_oss")
APART = {"documents apart", "packed equals alone"}


def found(model: object, ranks: int = 1) -> set[str]:
    report = flashtrain.check(model, ranks=ranks)
    assert len(report) >= 5
    assert {row.verdict for row in report} <= {"ok", "FAULT"}, f"\n{report}"
    return {row.check for row in report.faults}


@pytest.mark.parametrize("kind", TYPES)
def test_transformers_own_attention_keeps_documents_apart_where_it_does(kind: str) -> None:
    model = model_of(kind, "eager" if kind in EAGER else "sdpa")
    assert found(model) == (APART if kind in LEAKING else set())


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind != "opt"])
def test_our_attention_keeps_documents_apart(kind: str) -> None:
    assert found(model_of(kind)) == set()


@pytest.mark.parametrize("kind", CONFIGS)
def test_hybrids_leak_by_their_states_and_not_as_flashtrain_trains_them(kind: str) -> None:
    """The leak table: what documents do not share by attention they do by recurrences. Ours hand
    states on from rank to rank, and not from document to document."""
    model = model_of(kind, "eager")
    assert found(model) == APART
    ranks = 1 if kind in ON_ONE_DEVICE else 2
    assert found(HuggingFaceDecoder(model_of(kind)), ranks=ranks) == set()
