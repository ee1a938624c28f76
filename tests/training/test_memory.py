"""The memory estimate and the micro-batch chosen by it."""

from __future__ import annotations

from functools import partial

import pytest

from flashtrain.errors import UserError
from flashtrain.training.memory import GIB, MemoryEstimate, choose_micro_batch, estimate_memory

GPT2_124M = partial(
    estimate_memory, 124_475_904, layers=12, embed=768, heads=12, ffn=3072, vocab_rows=50304, context=1024
)


def test_the_fixed_part_is_weights_gradients_and_two_adam_states():
    estimate = GPT2_124M(micro_batch=1)
    assert estimate.gradients == 4 * 124_475_904
    assert estimate.optimizer == 8 * 124_475_904
    assert estimate.weights == 6 * 124_475_904  # float32, and the half-precision copies of autocast


@pytest.mark.parametrize(("micro_batch", "measured_gib"), [(64, 28.88), (32, 15.61)])
def test_gpt2_124m_is_estimated_as_it_was_measured_on_an_h200(micro_batch, measured_gib):
    assert GPT2_124M(micro_batch=micro_batch).total / GIB == pytest.approx(measured_gib, rel=0.05)


def test_activations_and_logits_grow_with_the_batch_and_nothing_else_does():
    one, four = GPT2_124M(micro_batch=1), GPT2_124M(micro_batch=4)
    assert four.activations == pytest.approx(4 * one.activations, rel=1e-6)
    assert four.logits == 4 * one.logits
    assert (four.weights, four.gradients, four.optimizer) == (one.weights, one.gradients, one.optimizer)


def test_checkpointing_saves_activations_full_more_than_selective():
    sizes = [GPT2_124M(micro_batch=8, checkpointing=kind).activations for kind in ("none", "selective", "full")]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[2] < sizes[0] / 3


def test_standard_attention_is_quadratic_in_the_context_and_flash_linear():
    def activations(context, attention):
        options = {"layers": 12, "embed": 768, "heads": 12, "ffn": 3072, "vocab_rows": 50304, "micro_batch": 1}
        return estimate_memory(1, context=context, attention=attention, **options).activations

    assert activations(16384, "flash") == pytest.approx(4 * activations(4096, "flash"), rel=1e-6)
    assert activations(16384, "standard") > 12 * activations(4096, "standard")


def test_float32_and_eager_need_more_and_shards_less():
    base = GPT2_124M(micro_batch=8)
    assert GPT2_124M(micro_batch=8, precision="32-true").activations > base.activations
    assert GPT2_124M(micro_batch=8, compiled=False).activations > base.activations
    assert GPT2_124M(micro_batch=8, shards=8).optimizer == base.optimizer // 8


def test_the_estimate_reads_as_lines_that_end_with_the_total():
    lines = GPT2_124M(micro_batch=32).lines()
    assert lines[0].startswith("weights")
    assert lines[-1].startswith("total")
    assert all(line.endswith(" GiB") for line in lines)


def test_unknown_names_and_numbers_below_one_are_one_line():
    with pytest.raises(UserError, match="Did you mean 'bf16-mixed'"):
        GPT2_124M(micro_batch=1, precision="bf16-mixd")
    with pytest.raises(UserError, match="unknown activation checkpointing"):
        GPT2_124M(micro_batch=1, checkpointing="some")
    with pytest.raises(UserError, match="micro_batch must be 1 or more"):
        GPT2_124M(micro_batch=0)


def sized(gib_per_sample):
    return lambda batch: MemoryEstimate(0, 0, 0, int(batch * gib_per_sample * GIB), 0, 0)


def test_the_largest_divisor_that_fits_is_chosen():
    assert choose_micro_batch(64, 24 * GIB, sized(1)) == (16, 4)
    assert choose_micro_batch(48, 24 * GIB, sized(1)) == (16, 3)
    assert choose_micro_batch(7, 5 * GIB, sized(1)) == (1, 7)


def test_a_tenth_of_the_free_memory_stays_free():
    assert choose_micro_batch(16, 16 * GIB, sized(1)) == (8, 2)


def test_the_micro_batch_is_capped():
    assert choose_micro_batch(512, 10_000 * GIB, sized(1)) == (64, 8)


def test_a_sample_that_does_not_fit_names_the_numbers_and_what_to_change():
    with pytest.raises(
        UserError, match=r"one sample needs an estimated 30\.0 GiB .*21\.6 GiB .*shorter context"
    ) as error:
        choose_micro_batch(8, 24 * GIB, sized(30))
    assert "\n" not in str(error.value)
