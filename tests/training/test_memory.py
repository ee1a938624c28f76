"""The memory estimate and the micro-batch chosen by it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from flashtrain import Decoder, DecoderConfig
from flashtrain.integrations.huggingface_specs import StateSpec
from flashtrain.models.activation_checkpointing import MemorySavings
from flashtrain.models.attention_spec import AttentionSpec
from flashtrain.models.layer_spec import FeedForwardSpec, LayerSpec, layers_alike
from flashtrain.training.memory import GIB, Blocks, MemoryEstimate, estimate_memory

SHAPE = ("layers", "embed", "heads", "ffn", "gated", "rotary", "residual", "by_autograd")
SAVINGS = ("checkpointing", "offload", "ffn_chunk", "loss_chunk")


def estimate(parameters: int, **options) -> MemoryEstimate:
    shape, savings = (
        {name: options.pop(name) for name in names if name in options} for names in (SHAPE, SAVINGS)
    )
    residual, gated = shape.pop("residual", "weights"), shape.pop("gated", False)
    by_autograd = shape.pop("by_autograd", False)
    layers = layers_alike(
        kv_heads=shape["heads"], activation="swiglu" if gated else "gelu", **shape
    )
    inner = replace(layers[0].feed_forward, by_autograd=by_autograd)
    layers = tuple(replace(layer, feed_forward=inner) for layer in layers)
    blocks = Blocks(shape["embed"], layers, residual=residual)
    return estimate_memory(parameters, blocks, savings=MemorySavings(**savings), **options)


OF_12_LAYERS = partial(
    estimate, layers=12, embed=768, heads=12, ffn=3072, vocab_rows=50304, context=1024
)
GPT2_124M = partial(OF_12_LAYERS, 124_475_904)


# Measured when the loss still stored all logits: here its pieces are as large as the batch. And
# when compiled layers still saved the outputs of their two norms.
@pytest.mark.parametrize(("micro_batch", "measured_gib"), [(64, 28.88), (32, 15.61)])
def test_gpt2_124m_is_estimated_as_it_was_measured_on_an_h200(micro_batch, measured_gib):
    estimate = GPT2_124M(micro_batch=micro_batch, loss_chunk=micro_batch * 1024)
    norms = 2 * 12 * micro_batch * 1024 * 768 * 2
    assert (estimate.total + norms) / GIB == pytest.approx(measured_gib, rel=0.05)


# recipes/results/gpt2-million-h200.json
@pytest.mark.parametrize(
    ("size", "options", "measured_gib"),
    [
        ("124m", {"context": 2**20, "checkpointing": "selective", "residual": "compute"}, 64.08),
        # Of a first step, which has no moments of AdamW yet: 8 bytes a parameter.
        (
            "1.3b",
            {"context": 2**19, "checkpointing": "full", "ffn_chunk": 16384, "loss_chunk": 2048},
            89.77 + 9.77,
        ),
    ],
)
def test_long_contexts_that_compute_again_are_estimated_above_what_was_measured(
    size, options, measured_gib
):
    shape = {"parameters": 123_700_000, "layers": 12, "embed": 768, "heads": 12, "ffn": 3072}
    large = {"parameters": 1_311_600_000, "layers": 24, "embed": 2048, "heads": 16, "ffn": 8192}
    large |= {"precision": "bf16-true", "master_weights": True}
    found = estimate(
        **(shape if size == "124m" else large),
        vocab_rows=50304,
        micro_batch=1,
        rotary=True,
        **options,
    )
    assert measured_gib < found.total / GIB < 1.07 * measured_gib


def test_on_a_cpu_the_mask_of_documents_and_copies_of_the_logits_are_counted():
    options = {"micro_batch": 4, "precision": "32-true", "compiled": False, "loss_chunk": 4096}
    plain, masked = (GPT2_124M(attention=name, **options) for name in ("sdpa", "masked"))
    # A float32 mask and booleans in each layer.
    assert masked.activations - plain.activations == 12 * 5 * 4 * 1024**2
    of_torch = GPT2_124M(attention="sdpa", kernels=False, **options)
    assert of_torch.logits - plain.logits == 2 * 4 * 4096 * 50304


def test_what_is_compiled_and_computed_again_needs_no_copies_of_all_weights():
    parameters, head = 124_475_904, 50304 * 768
    eager = (
        GPT2_124M(micro_batch=1, checkpointing=kind, compiled=False).weights
        for kind in ("none", "full")
    )
    assert set(eager) == {6 * parameters}  # autocast keeps them until the loss is there
    kept, again = (
        GPT2_124M(micro_batch=1, checkpointing=kind).weights for kind in ("none", "full")
    )
    assert kept - again == 2 * (parameters - head - 2 * ((parameters - head) // 12))


def test_sharded_gradients_are_whole_before_they_are_shared_out():
    head = 50304 * 768
    block = (124_475_904 - head) // 12 * 12  # all of them are gathered at once
    one, two = (
        GPT2_124M(micro_batch=1, checkpointing="full", shards=shards).block for shards in (1, 2)
    )
    # The buffer that a block is gathered in, its gradient, this one in float32 as it is sent;
    # the head's gradient.
    assert two - one == block * (2 + 2 + 4) + head * 2
    adapters = partial(GPT2_124M, micro_batch=1, checkpointing="full", frozen=124_000_000)
    assert adapters(shards=2).block - adapters(shards=1).block == pytest.approx(block * 2, rel=0.05)
    few = GPT2_124M(micro_batch=1, checkpointing="full", shards=2, frozen=4096)  # one norm, say
    whole = GPT2_124M(micro_batch=1, checkpointing="full", shards=2)
    # The output that an adapter would have.
    assert few.total == pytest.approx(whole.total, abs=1024 * 4 * 768 * 2)


@pytest.mark.parametrize(
    ("precision", "blocks", "bytes_of_a_block"),  # that are gathered together
    [("32-true", 10, 4 + 4 + 4), ("bf16-true", 12, 2 + 2 + 2)],
)
def test_sharded_gradients_are_sent_in_the_weights_own_type(precision, blocks, bytes_of_a_block):
    head = 50304 * 768
    one, two = (
        GPT2_124M(micro_batch=1, checkpointing="full", precision=precision, shards=shards).block
        for shards in (1, 2)
    )
    computed = bytes_of_a_block // 3
    assert two - one == (124_475_904 - head) // 12 * blocks * bytes_of_a_block + head * computed


def logits_of(tokens, **options):
    return GPT2_124M(micro_batch=tokens // 1024, **options).logits


def test_gradients_come_while_what_the_blocks_kept_goes():
    """Many tokens: the peak is the first block's backward. Few: the last
    one's. Never all of both."""
    long, short = (
        GPT2_124M(micro_batch=size, checkpointing="selective", offload=True) for size in (64, 1)
    )
    head = 50304 * 768 * 4
    of_block = (124_475_904 * 4 - head) // 12
    assert long.parts()["gradients"] == head + of_block
    assert long.parts()["activations"] == long.activations
    assert short.parts()["gradients"] == short.gradients
    assert short.parts()["activations"] <= short.activations // 12
    always = long.weights + long.optimizer + long.other
    assert long.total < always + long.gradients + long.activations + long.block


def test_gradients_that_stay_are_there_beside_all_that_is_kept():
    gone, stay = (GPT2_124M(micro_batch=64, gradients_stay=stay) for stay in (False, True))
    assert stay.parts()["gradients"] == stay.gradients == 4 * 124_475_904
    assert stay.parts()["activations"] == stay.activations
    assert stay.total - gone.total >= 4 * (124_475_904 - 50304 * 768) * 11 // 12


def test_the_embeddings_gradients_are_shared_out_when_the_blocks_are_done():
    """Of a large vocabulary this is more than any block's backward."""
    large = partial(OF_12_LAYERS, 200_000_000, vocab_rows=150_000, outside=150_000 * 768, shards=2,
                    context_degree=2,
                    micro_batch=1, checkpointing="full")  # fmt: skip
    assert large().parts()["gradients"] == 200_000_000 * 4 // 2
    gathered = 150_000 * 768 + 2 * ((200_000_000 - 150_000 * 768) // 12)
    assert large().parts()["temporary buffers"] == 150_000 * 768 * (2 + 4) - 2 * gathered


def test_a_step_of_float32_copies_holds_a_part_of_the_gradients_in_float32():
    bf16 = partial(GPT2_124M, precision="bf16-true", micro_batch=1)
    assert bf16().updating == 0
    assert bf16(master_weights=True).updating == 4 * 124_475_904  # fewer than the 2**28 of a part
    large = OF_12_LAYERS(2_000_000_000, precision="bf16-true", micro_batch=1, master_weights=True)
    assert large.updating == 4 * 2**28
    assert large.total >= 2_000_000_000 * (2 + 2 + 12) + 4 * 2**28


def test_logits_are_those_of_one_piece_of_the_loss():
    # The head's gradient, and a token's state with its own.
    table, gradient = 50304 * 768 * 4, 2 * 768 * 2
    assert logits_of(65536, loss_chunk=2048) == 2048 * 50304 * 2 + table + 65536 * gradient
    # Scaled in the backward, a second one.
    assert logits_of(1024, loss_chunk=2048) == 2 * table + 1024 * gradient
    assert logits_of(65536) == logits_of(65536, loss_chunk=8192)  # what the loss takes by itself


def test_the_feed_forward_in_pieces_needs_its_inner_width_for_one_piece_only():
    whole = GPT2_124M(micro_batch=64, checkpointing="full")
    pieces = GPT2_124M(micro_batch=64, checkpointing="full", ffn_chunk=4096)
    assert whole.block - pieces.block > 65536 * 2 * 3072 * 2 - 4096 * 4 * 3072 * 2
    assert GPT2_124M(micro_batch=1, checkpointing="full", ffn_chunk=4096) == GPT2_124M(
        micro_batch=1, checkpointing="full"
    )
    assert (
        GPT2_124M(micro_batch=64, ffn_chunk=4096).activations
        < GPT2_124M(micro_batch=64).activations
    )


def test_offloaded_inputs_are_counted_in_host_memory_as_its_allocator_rounds_them():
    kept = GPT2_124M(micro_batch=48, checkpointing="full")
    moved = GPT2_124M(micro_batch=48, checkpointing="full", offload=True)
    inputs = 48 * 1024 * 768 * 4
    assert kept.activations - moved.activations == 12 * inputs
    assert (kept.host, moved.host) == (0, 12 * 2**28)  # 144 MiB each, in blocks of 256
    large = GPT2_124M(micro_batch=144, checkpointing="selective", offload=True)
    assert large.host == 12 * (2**28 + 2**28)  # 432 MiB each, in a piece of 256 and one of 176
    assert (
        large.activations
        == GPT2_124M(micro_batch=144, checkpointing="selective").activations - 12 * 3 * inputs
    )


@pytest.mark.parametrize(
    ("options", "bytes_of_a_parameter"),
    [
        ({}, (6, 4, 8)),  # float32, and the half-precision copies of autocast
        ({"precision": "bf16-true"}, (2, 2, 4)),
        ({"precision": "bf16-true", "master_weights": True}, (2, 2, 12)),
        ({"master_weights": True}, (6, 4, 8)),  # of float32 weights none
    ],
)
def test_the_fixed_part_is_weights_gradients_two_adam_states_and_copies(
    options, bytes_of_a_parameter
):
    found = GPT2_124M(micro_batch=8, **options)
    assert (found.weights, found.gradients, found.optimizer) == tuple(
        124_475_904 * n for n in bytes_of_a_parameter
    )


LADDER = (
    {},
    {"checkpointing": "selective"},
    {"checkpointing": "full"},
    {"checkpointing": "full", "ffn_chunk": 16384, "loss_chunk": 2048},
    {"checkpointing": "full", "ffn_chunk": 16384, "loss_chunk": 2048, "offload": True},
)


@pytest.mark.parametrize("context", [1024, 65536, 1048576])
@pytest.mark.parametrize("micro_batch", [1, 64])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("attention", ["flash", "standard"])
def test_every_step_of_the_ladder_needs_no_more_than_the_one_before(
    context, micro_batch, gated, attention
):
    totals = [
        GPT2_124M(
            context=context, micro_batch=micro_batch, gated=gated, attention=attention, **step
        ).total
        for step in LADDER
    ]
    assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize("step", LADDER)
def test_the_estimate_grows_with_the_context_and_never_faster_than_it(step):
    totals = [GPT2_124M(context=2**power, micro_batch=1, **step).total for power in range(10, 23)]
    assert totals == sorted(totals)
    assert totals[-1] <= 2**12 * totals[0]
    assert totals[-1] / totals[-2] <= 2.01


def test_standard_attention_is_quadratic_in_the_context_and_flash_linear():
    def activations(context, attention):
        options = {
            "layers": 12,
            "embed": 768,
            "heads": 12,
            "ffn": 3072,
            "vocab_rows": 50304,
            "micro_batch": 1,
        }
        return estimate(1, context=context, attention=attention, **options).activations

    assert activations(16384, "flash") == pytest.approx(4 * activations(4096, "flash"), rel=1e-6)
    assert activations(16384, "standard") > 12 * activations(4096, "standard")


def test_autograd_through_a_gated_piece_holds_three_tensors_more():
    """As adapters and other activations need it; nothing of it without pieces."""
    gated = partial(GPT2_124M, micro_batch=64, checkpointing="full", gated=True)
    ours, autograd = (gated(ffn_chunk=32768, by_autograd=by) for by in (False, True))
    assert 0 < autograd.block - ours.block <= 3 * 32768 * 3072 * 2
    assert gated(by_autograd=True) == gated()


def test_what_devices_exchange_in_attention_is_not_there_beside_a_piece_of_the_feed_forward():
    """Of a block's two halves each has its own: the larger one is the block's
    peak, not their sum."""
    full = partial(GPT2_124M, micro_batch=64, checkpointing="full")
    whole, pieces = full(), full(ffn_chunk=32768)
    beside = pieces.block - full(ffn_chunk=1).block
    # Of the pieces' tensors, what attention's half does not need as well.
    assert 0 < beside < 32768 * 4 * 3072 * 2
    few, many = (full(ffn_chunk=32768, exchange=size) for size in (1000, 10 * GIB))
    assert few.block == pieces.block
    assert many.block == full(ffn_chunk=1, exchange=10 * GIB).block
    assert full(exchange=10 * GIB).block > whole.block


def test_each_byte_of_an_exchange_counts_where_the_exchange_is_the_peak_of_a_block():
    large = 2**30
    peaks = [GPT2_124M(micro_batch=1, exchange=large * times).block for times in (1, 2)]
    assert peaks[1] - peaks[0] == large


def saved_by_autograd(layers: int) -> int:
    """Bytes that autograd saves for the backward of a Decoder in eager mode under
    autocast, its weights apart."""
    config = DecoderConfig(128, 128, 64, 64, layers_alike(layers, 64, 4, 4, 256))
    model, sizes, alive = Decoder(config, attention="sdpa"), {}, []
    own = {weight.untyped_storage()._cdata for weight in model.parameters()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            sizes[storage._cdata] = storage.nbytes()
            alive.append(tensor)
        return tensor

    tokens = torch.zeros(4, 65, dtype=torch.int64)
    with (
        torch.autograd.graph.saved_tensors_hooks(note, lambda x: x),
        torch.autocast("cpu", torch.bfloat16),
    ):
        model.loss(tokens[:, :-1], tokens[:, 1:])
    return sum(sizes.values())


def test_what_autograd_saves_in_eager_mode_is_within_the_estimate():
    shape = {
        "embed": 64,
        "heads": 4,
        "ffn": 256,
        "vocab_rows": 128,
        "context": 64,
        "micro_batch": 4,
    }
    few, many = (
        estimate(10**6, layers=n, compiled=False, attention="sdpa", **shape).activations
        for n in (2, 6)
    )
    measured = saved_by_autograd(6) - saved_by_autograd(2)
    assert 0.7 * (many - few) < measured < many - few


def test_states_that_pass_are_saved_in_every_layer_unless_it_is_computed_again():
    states = LayerSpec(
        StateSpec("linear_attention", 64, 6, 256, 64, None, 4096, 64), FeedForwardSpec(64)
    )
    attention = LayerSpec(AttentionSpec(4, 4, 16), FeedForwardSpec(64))
    blocks = Blocks(64, (states, states, attention))
    given = {"vocab_rows": 512, "context": 2048, "micro_batch": 1, "context_degree": 2}

    def added(checkpointing: str) -> tuple[int, int]:
        savings = MemorySavings(checkpointing)
        without, having = (
            estimate_memory(10**6, blocks, savings=savings, state_saved=saved, **given)
            for saved in (0, 10**7)
        )
        return having.activations - without.activations, having.block - without.block

    assert added("none") == (2 * 10**7, 0)
    assert added("full") == (0, 10**7)
