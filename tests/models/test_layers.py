"""Decoders whose layers differ: windows, layers without positions, and what files hold of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashtrain.errors import UserError
from flashtrain.models import Decoder, DecoderConfig
from flashtrain.models.attention_spec import AttentionSpec
from flashtrain.models.layer_spec import ExpertsSpec, layer_of
from flashtrain.settings.text import SequenceSharding
from flashtrain.tasks.context_run import check_shape
from flashtrain_kernels import masks

MIXED = ["window:8", "nope", "full", "chunk:8"]
PATTERNS = [[one] for one in MIXED] + [MIXED]


def build(pattern: list[str], attention: str = "sdpa") -> Decoder:
    torch.manual_seed(0)
    config = DecoderConfig.of_size(
        "demo", "llama", vocab_size=61, context=64, layers=4, width=32, heads=2, pattern=pattern
    )
    return Decoder(config, attention=attention, residual="weights").double().eval()


def tokens(length: int = 40) -> torch.Tensor:
    return torch.randint(0, 61, (2, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_tokens_one_by_one_give_what_the_whole_gives(pattern):
    model, rows = build(pattern), tokens()
    cache = model.new_cache()
    parts = [
        model(rows[:, :9], cache=cache),
        *(model(rows[:, t : t + 1], cache=cache) for t in range(9, 40)),
    ]
    torch.testing.assert_close(torch.cat(parts, 1)[..., :61], model(rows)[..., :61])


@pytest.mark.parametrize("attention", ["sdpa", "standard", "flash"])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_packed_documents_do_not_see_each_other_in_any_layer(pattern, attention):
    model, rows = build(pattern, attention), tokens()
    ids = (torch.arange(40) >= 17).long().expand(2, -1)
    positions = torch.cat((torch.arange(17), torch.arange(23)))[None].expand(2, -1)
    packed = model(rows, positions=positions, mask=masks.document(ids, causal=True))[..., :61]
    torch.testing.assert_close(packed[:, :17], model(rows[:, :17])[..., :61])
    torch.testing.assert_close(packed[:, 17:], model(rows[:, 17:])[..., :61])


@pytest.mark.parametrize("attention", ["sdpa", "standard", "flash"])
def test_a_layer_of_a_window_is_attention_under_the_mask_of_that_window(attention):
    narrow, plain, rows = build(["window:8"], attention), build(["full"], attention), tokens()
    window = masks.sliding_window(40, (7, 0))
    torch.testing.assert_close(narrow(rows)[..., :61], plain(rows, mask=window)[..., :61])


@pytest.mark.parametrize("attention", ["sdpa", "standard", "flash"])
def test_a_layer_of_a_chunk_is_block_diagonal_attention_and_blocks_count_from_their_document(
    attention,
):
    narrow, plain, rows = build(["chunk:8"], attention), build(["full"], attention), tokens()
    blocks = masks.document((torch.arange(40) // 8).expand(2, -1), causal=True)
    torch.testing.assert_close(narrow(rows)[..., :61], plain(rows, mask=blocks)[..., :61])
    mask = masks.document((torch.arange(40) >= 13).long().expand(2, -1), causal=True).chunked(8)
    start = torch.cat((torch.arange(13) // 8, 2 + torch.arange(27) // 8))
    assert torch.equal(mask.dense()[0], (start[:, None] == start).tril())


def test_layers_of_one_window_read_one_mask_which_is_planned_once(monkeypatch):
    planned = []
    monkeypatch.setattr(
        "flashtrain.models.layer_masks.plan_mask",
        lambda mask, *_, **__: planned.append(mask) or mask,
    )
    model, rows = build(["window:8", "window:8", "full"]), tokens()
    model(rows, mask=masks.causal(40))
    assert len(planned) == 2


def test_a_layer_without_positions_has_none():
    rows, spread = tokens(), torch.arange(40)[None] * 3
    torch.testing.assert_close(build(["nope"])(rows, positions=spread), build(["nope"])(rows))
    other = build(["full"])
    assert not torch.allclose(other(rows, positions=spread)[..., :61], other(rows)[..., :61])


def test_files_hold_alike_layers_by_their_sizes_and_others_one_by_one():
    for pattern in PATTERNS:
        config = build(pattern).config
        assert DecoderConfig.of_plain(config.plain()) == config
        assert all(layer_of(layer.plain()) == layer for layer in config.layers)
    old = {
        "vocab_size": 61,
        "vocab_rows": 64,
        "context": 64,
        "embed": 32,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "ffn": 48,
    }
    assert {name: DecoderConfig.of_plain(old).plain()[name] for name in old} == old


def test_flops_of_a_window_are_of_the_keys_that_it_sees():
    narrow, plain = build(["window:8"]), build(["full"])
    assert narrow.flops_per_token(8) == plain.flops_per_token(8)
    seen = 8 * (1 - 8 / 128) - 32
    assert narrow.flops_per_token(64) - plain.flops_per_token(64) == 4 * 12 * 32 * seen


def test_more_kinds_of_layers_than_torch_compiles_are_refused_rather_than_run_eagerly():
    many = DecoderConfig.of_size(
        "demo", vocab_size=61, context=64, layers=9, pattern=[f"window:{n}" for n in range(1, 10)]
    )
    with torch.device("meta"):
        model = Decoder(many, attention="sdpa")
    with pytest.raises(UserError, match="9 kinds of layers"):
        model.compile_blocks()


@pytest.mark.parametrize(
    "changes",
    [
        {"feed_forward": ExpertsSpec(64, experts=4, top=2)},
        {"mixer": AttentionSpec(4, 4, 8, value_dim=4)},
    ],
    ids=["experts", "narrow values"],
)
def test_layers_that_only_hugging_faces_classes_compute_are_refused_rather_than_made_as_others(
    changes,
):
    config = build(["full"]).config
    layers = tuple(replace(layer, **changes) for layer in config.layers)
    with pytest.raises(UserError, match=r"Use recipe=hf"):
        Decoder(replace(config, layers=layers), attention="sdpa")


def test_layers_whose_states_nothing_passes_on_are_refused_over_devices():
    class Stateful(AttentionSpec):
        crosses_devices = None

    config = build(["full"]).config
    shape = replace(config, layers=(replace(config.layers[0], mixer=Stateful(4, 4, 8)),))
    with pytest.raises(UserError, match="layers of attention with context_parallel=2"):
        check_shape(SequenceSharding(64, 2, "auto", "balanced", "fixed", 2), shape)


@pytest.mark.parametrize("word", ["window", "window:0", "window:x", "chunk", "full:3", "nopes"])
def test_a_word_that_names_no_layer_is_refused(word):
    with pytest.raises(UserError):
        build([word])


def test_a_mistyped_word_of_a_pattern_is_answered_with_the_words_and_the_registered_kinds():
    with pytest.raises(UserError, match=r"'windw'\. Did you mean 'window'\?.* attention.* nope"):
        build(["windw:64", "full"])
