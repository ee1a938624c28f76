"""transformers models on our attention, compared with the same models on
transformers' eager attention."""

from __future__ import annotations

import sys

import pytest
import torch
import transformers
from huggingface_models import (
    CAUSAL,
    KINDS,
    build,
    logits_and_gradients,
    padding,
    pair,
    positions,
    tokens,
    worst,
)

from flashtrain.errors import UserError
from flashtrain.integrations import document_lengths, register_with_transformers
from flashtrain.integrations.huggingface_attention import NAME, attention

S = 17


def compare(kind, ids, real=None, **inputs):
    # GPT-2 and BERT compute their eager softmax in float64, the others in float32, where what is
    # hidden is NaN; gpt-oss' experts have no float64.
    exact = kind in ("gpt2", "bert")
    dtype = (
        torch.float64
        if exact or (kind != "gpt_oss" and "attention_mask" not in inputs)
        else torch.float32
    )
    tolerance = 1e-11 if exact else 2e-6 if dtype == torch.float64 else 2e-5
    ours, eager = pair(kind, dtype)
    logits, gradients = logits_and_gradients(ours, ids, real, **inputs)
    expected, expected_gradients = logits_and_gradients(eager, ids, real, **inputs)
    assert (logits - expected).abs().max().item() < tolerance * expected.abs().max().item()
    assert worst(gradients, expected_gradients) < 10 * tolerance


# Registration


def test_registering_gives_the_name_to_use_and_may_be_repeated():
    assert register_with_transformers() == NAME == register_with_transformers()
    assert "flash" not in NAME
    model = transformers.AutoModel.from_config(KINDS["llama"](), attn_implementation=NAME)
    assert model.config._attn_implementation == NAME


def test_a_model_is_switched_in_place():
    model = build("llama", "eager")
    before = model(tokens(2, S)).logits
    model.set_attn_implementation(register_with_transformers())
    assert model.config._attn_implementation == NAME
    torch.testing.assert_close(model(tokens(2, S)).logits, before, atol=1e-4, rtol=1e-4)


def test_a_missing_transformers_is_reported_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"pip install 'flashtrain\[hub\]'"):
        register_with_transformers()


# Equal to eager: logits and every parameter's gradient


@pytest.mark.parametrize("kind", KINDS)
def test_unpadded_batches_equal_eager(kind):
    compare(kind, tokens(2, S))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_batches_equal_eager_at_the_real_tokens(kind, side):
    real = padding(S, [S, 9, 1], side)
    compare(kind, tokens(3, S), real, attention_mask=real)


@pytest.mark.parametrize("kind", ["gpt2", "bert", "qwen3"])
def test_padding_between_real_tokens_and_a_mask_of_ones_equal_eager(kind):
    real = torch.ones(2, S, dtype=torch.long)
    compare(kind, tokens(2, S), attention_mask=real.clone())
    real[0, 4:7] = real[1, 0] = real[1, 8] = 0
    compare(kind, tokens(2, S), real, attention_mask=real)


# transformers counts Llama 4's chunks in the row, whatever is packed in it.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "llama4_text"])
def test_packed_documents_equal_the_same_documents_one_by_one(kind):
    model, ids = build(kind, register_with_transformers()), tokens(2, S)
    where = torch.cat((positions([7, 1, 9]), positions([10, 7])))
    packed = model(ids, position_ids=where, **document_lengths(where)).logits
    documents = [*ids[0].split([7, 1, 9]), *ids[1].split([10, 7])]
    single = torch.cat([model(document[None]).logits[0] for document in documents])
    torch.testing.assert_close(packed.flatten(0, 1), single, atol=1e-4, rtol=1e-4)


def test_a_bidirectional_model_that_hands_on_its_positions_needs_no_lengths():
    model, ids, lengths = build("bert", register_with_transformers()), tokens(1, S), [7, 1, 9]
    packed = model(ids, position_ids=positions(lengths)).logits[0]
    single = [model(document[None]).logits[0] for document in ids[0].split(lengths)]
    torch.testing.assert_close(packed, torch.cat(single), atol=1e-4, rtol=1e-4)


ROBERTA = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "pad_token_id": 1,
}
ROBERTA |= {"num_attention_heads": 4, "max_position_embeddings": 40}


@pytest.mark.parametrize("kind", ["roberta", "xlm-roberta", "camembert", "data2vec-text"])
def test_documents_of_robertas_family_begin_at_the_position_after_the_padding_index(kind):
    config = transformers.AutoConfig.for_model(kind, **ROBERTA)
    model = transformers.AutoModelForMaskedLM.from_config(
        config, attn_implementation=register_with_transformers()
    )
    ids, lengths = tokens(1, S), [7, 1, 9]
    alone = torch.cat(
        [model.eval()(document[None]).logits[0] for document in ids[0].split(lengths)]
    )
    where = positions(lengths) + 2
    for options in ({}, document_lengths(where)):
        packed = model(ids, position_ids=where, **options).logits[0]
        torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2", "bert", "modernbert"])
@pytest.mark.parametrize("side", ["right", "left", "between"])
def test_packed_documents_beside_padding_do_not_see_each_other(kind, side):
    """As axolotl's pad_to_sequence_len gives them; and by numbers in the mask alone, as
    LlamaFactory's neat_packing."""
    model, lengths, empty = (
        build(kind, register_with_transformers()),
        [7, 1, 6],
        torch.zeros(1, 3, dtype=torch.long),
    )
    ids = tokens(1, 14)
    alone = torch.cat([model(document[None]).logits[0] for document in ids[0].split(lengths)])

    def padded(x, fill=empty):
        before, after = x.split([8, 6], 1)
        return torch.cat(
            {"right": (x, fill), "left": (fill, x), "between": (before, fill, after)}[side], 1
        )

    real, where, numbers = (
        padded(torch.ones_like(ids)),
        padded(positions(lengths)),
        [1] * 7 + [2] + [3] * 6,
    )
    for mask in (real, real.bool(), padded(torch.tensor([numbers]))):
        logits = model(padded(ids), attention_mask=mask, position_ids=where).logits[real.bool()]
        torch.testing.assert_close(logits, alone, atol=1e-4, rtol=1e-4)
    where = padded(positions([14]))
    by_numbers = model(
        padded(ids), attention_mask=padded(torch.tensor([numbers])), position_ids=where
    ).logits
    changed = ids.clone()
    changed[0, 0] = (ids[0, 0] + 1) % 61
    again = model(
        padded(changed), attention_mask=padded(torch.tensor([numbers])), position_ids=where
    ).logits
    assert torch.equal(again[real.bool()][7:], by_numbers[real.bool()][7:])


def test_positions_that_are_no_documents_separate_nothing():
    ours, eager = pair("bert")
    for where in (
        torch.full((1, S), 3),
        torch.zeros(1, S, dtype=torch.long),
        torch.arange(S).flip(0)[None],
    ):
        expected = eager(tokens(1, S), position_ids=where).logits
        torch.testing.assert_close(
            ours(tokens(1, S), position_ids=where).logits, expected, atol=1e-4, rtol=1e-4
        )


def test_a_causal_model_configured_to_see_both_ways_does():
    ours, eager = pair("llama", is_causal=False)
    ids = tokens(2, S)
    torch.testing.assert_close(ours(ids).logits, eager(ids).logits, atol=1e-4, rtol=1e-4)
    assert (ours(ids).logits - build("llama", NAME)(ids).logits).abs().max() > 0.1
    real = padding(S, [S, 6], "left")
    found, expected = (
        model(ids, attention_mask=real).logits[real.bool()] for model in (ours, eager)
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_mask_of_the_callers_own_is_used_as_it_is():
    ours, eager = pair("llama")
    visible = (
        torch.rand(2, 1, S, S, generator=torch.Generator().manual_seed(3)) < 0.5
    ) | torch.eye(S, dtype=torch.bool)
    added = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
    expected = eager(tokens(2, S), attention_mask=added).logits
    for mask in (added, visible):
        torch.testing.assert_close(
            ours(tokens(2, S), attention_mask=mask).logits, expected, atol=1e-4, rtol=1e-4
        )


def test_cross_attention_equals_eager():
    ours, eager = pair("gpt2", add_cross_attention=True)
    states = torch.randn(2, 11, 32, generator=torch.Generator().manual_seed(2))
    seen = padding(11, [11, 4], "right")
    inputs = {"encoder_hidden_states": states, "encoder_attention_mask": seen}
    torch.testing.assert_close(
        ours(tokens(2, S), **inputs).logits, eager(tokens(2, S), **inputs).logits
    )


def test_t5s_position_bias_and_its_gradient_equal_eager():
    models = []
    for implementation in (register_with_transformers(), "eager"):
        torch.manual_seed(0)
        sizes = {
            "vocab_size": 61,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
        }
        config = transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
        model = transformers.AutoModelForSeq2SeqLM.from_config(
            config, attn_implementation=implementation
        )
        models.append(model.eval())
    real = padding(S, [S, 6], "right")
    inputs = {"attention_mask": real, "decoder_input_ids": tokens(2, 9)}
    logits, gradients = logits_and_gradients(models[0], tokens(2, S), **inputs)
    expected, expected_gradients = logits_and_gradients(models[1], tokens(2, S), **inputs)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    name = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert expected_gradients[name].abs().max() > 0
    assert worst(gradients, expected_gradients) < 1e-3


# Training


# Renamed in later versions.
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", ["gpt2", "qwen2", "modernbert"])
def test_gradient_checkpointing_gives_the_same_gradients_with_dropout(kind, reentrant):
    dropout = {"attn_pdrop": 0.3} if kind == "gpt2" else {"attention_dropout": 0.3}
    real = padding(S, [S, 9], "left")

    def gradients(checkpointing):
        model = build(kind, register_with_transformers(), **dropout).train()
        model.config.use_cache = False
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        torch.manual_seed(7)
        return logits_and_gradients(model, tokens(2, S), real, attention_mask=real)

    (logits, plain), (again, checkpointed) = gradients(False), gradients(True)
    assert torch.equal(logits, again)
    assert worst(checkpointed, plain) < 1e-6


def test_dropout_is_the_same_for_a_left_padded_row_as_for_a_right_padded_one():
    model = build("llama", register_with_transformers(), attention_dropout=0.4).train()
    document = tokens(1, 9)
    filler = torch.full((1, 8), 2)
    rows = {"right": torch.cat((document, filler), 1), "left": torch.cat((filler, document), 1)}
    drawn = {}
    for side, ids in rows.items():
        real = padding(S, [9], side)
        torch.manual_seed(3)
        drawn[side] = model(
            ids, attention_mask=real, position_ids=(real.cumsum(1) - 1).clamp(min=0)
        ).logits[real.bool()]
    torch.testing.assert_close(drawn["left"], drawn["right"], atol=1e-4, rtol=1e-4)


def test_autocast_computes_in_its_dtype():
    model, ids = build("llama", register_with_transformers()), tokens(2, S)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(ids).logits
    expected = model(ids).logits
    assert (logits - expected).abs().max() < 0.1 * expected.abs().max()


def test_float32_queries_and_keys_beside_bfloat16_values_give_bfloat16():
    q, k, v = torch.randn(3, 1, 2, 8, 4).unbind(0)
    out, weights = attention(torch.nn.Module(), q, k, v.bfloat16(), None)
    assert out.dtype == torch.bfloat16
    assert out.shape == (1, 8, 2, 4)
    assert weights is None


def test_values_narrower_than_keys_are_computed_as_they_are():
    q, k = torch.randn(2, 1, 2, 8, 6, generator=torch.Generator().manual_seed(0)).unbind(0)
    v = torch.randn(1, 2, 8, 4)
    out, _ = attention(torch.nn.Module(), q, k, v, None)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out.transpose(1, 2), expected)


# Generation


@pytest.mark.parametrize(
    ("kind", "cache"),
    [*((kind, "dynamic") for kind in CAUSAL), ("gpt2", "static"), ("qwen3", "static")],
)
def test_generation_equals_eager_token_for_token(kind, cache):
    ours, eager = pair(kind)
    real = padding(9, [9, 5], "left")  # longer than the sliding window, then much longer
    for inputs in ({}, {"attention_mask": real}):
        arguments = {**inputs, "max_new_tokens": 8, "do_sample": False, "disable_compile": True}
        if cache == "static":
            arguments["cache_implementation"] = "static"
        found = ours.generate(tokens(2, 9), **arguments)
        assert found.tolist() == eager.generate(tokens(2, 9), **arguments).tolist()
        assert found.shape == (2, 17)


# torch.compile


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "modernbert", "bert"])
def test_a_compiled_model_gives_the_same_logits(kind):
    torch._dynamo.reset()
    model, ids, real = (
        build(kind, register_with_transformers()),
        tokens(2, S),
        padding(S, [S, 9], "left"),
    )
    compiled = torch.compile(model, backend="eager")
    where = torch.cat((positions([7, 10]), positions([2, 3, 12])))
    packed = document_lengths(where) if kind != "qwen3" else {"position_ids": where}
    for inputs, kept in (
        ({"attention_mask": real}, real.bool()),
        (packed, torch.ones(2, S, dtype=torch.bool)),
    ):
        torch.testing.assert_close(
            compiled(ids, **inputs).logits[kept], model(ids, **inputs).logits[kept]
        )


# What cannot be


@pytest.mark.parametrize(
    ("mask", "options", "said"),
    [
        (None, {"output_attentions": True}, "output_attentions"),
        (torch.ones(1, 8), {}, r"attention_mask .* \(1, 8\)"),
    ],
)
def test_attention_weights_and_masks_of_two_dimensions_are_refused(mask, options, said):
    with pytest.raises(UserError, match=said):
        attention(torch.nn.Module(), *torch.randn(3, 1, 2, 8, 4).unbind(0), mask, **options)


def test_packed_documents_are_found_in_inference_mode_too() -> None:
    ours, eager = pair("llama")
    ids, documents = tokens(1, 9), positions([4, 5])
    with torch.inference_mode():
        packed = ours(ids, position_ids=documents.clone(), use_cache=False).logits
        alone = torch.cat([eager(part).logits for part in ids.split([4, 5], 1)], 1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "bert"])
def test_on_the_meta_device_shapes_are_those_of_the_cpu(kind: str) -> None:
    ids = tokens(2, S)
    inputs = {
        "attention_mask": padding(S, [17, 11], "left"),
        "position_ids": positions([5, 12]).expand(2, -1),
    }
    shapes = {}
    for device in ("cpu", "meta"):
        model = build(kind, register_with_transformers()).to(device)
        model.tie_weights()  # which a move to the meta device unties
        found = []
        for names in ([], ["attention_mask"], ["position_ids"], ["attention_mask", "position_ids"]):
            logits = model(
                ids.to(device), **{name: inputs[name].to(device) for name in names}
            ).logits
            gradients = torch.autograd.grad(
                logits.sum(), list(model.parameters()), allow_unused=True
            )
            found += [None if x is None else (x.shape, x.dtype) for x in (logits, *gradients)]
        shapes[device] = found
    assert shapes["meta"] == shapes["cpu"]
