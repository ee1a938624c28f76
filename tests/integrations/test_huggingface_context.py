"""What a transformers model is given where devices share a sequence, and what is refused
in a line before that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import huggingface_models
import hybrid_models
import pytest
import torch
import transformers
from torch import Tensor, nn

from flashtrain.distributed.context.layouts import contiguous
from flashtrain.distributed.context.sequence import ContextSequence
from flashtrain.distributed.context.strategy import ContextParallelStrategy
from flashtrain.errors import UserError
from flashtrain.integrations import register_with_transformers
from flashtrain.integrations.huggingface_decoder import HuggingFaceDecoder
from flashtrain.models.sharded_sequence import use_sharded_sequence
from flashtrain.tasks import LanguageModel
from flashtrain_kernels import masks

LENGTH, ROWS, DEGREE = 16, 2, 2
HELD = LENGTH // DEGREE
UNDER = "under context parallelism"


class Part(ContextSequence):
    """The second of two devices' part, of a sequence of which all is known here; attention is
    noted and passed over."""

    def __init__(self, *whole: Tensor) -> None:
        group: Any = SimpleNamespace(size=DEGREE, rank=1, data_group=None)
        super().__init__(contiguous(masks.causal(LENGTH), DEGREE), group, tokens=ROWS * LENGTH)
        self.known = whole
        self.asked: list[dict[str, Any]] = []

    def gathered(self, part: Tensor) -> Tensor:
        return next(x for x in self.known if torch.equal(self.shard(x), part))

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        self.asked.append(options)
        return q


def ours(kind: str = "llama", **changes: Any) -> nn.Module:
    return huggingface_models.build(kind, register_with_transformers(), **changes).train()


def of_config(config: Any) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=register_with_transformers()
    )


def tokens() -> Tensor:
    return huggingface_models.tokens(ROWS, HELD)


def positions_seen(model: nn.Module, **inputs: Any) -> Tensor:
    seen = []
    model.model.rotary_emb.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs.get("position_ids", args[-1])), with_kwargs=True
    )
    with use_sharded_sequence(Part()):
        model(**inputs)
    return seen[0]


def test_a_row_of_positions_for_all_rows_is_dealt() -> None:
    given = 3 * torch.arange(LENGTH)[None]
    found = positions_seen(ours(), input_ids=tokens(), position_ids=given)
    assert torch.equal(found, given[:, HELD:])


def refused(part: Part, model: nn.Module, **inputs: Any) -> str:
    with use_sharded_sequence(part), pytest.raises(UserError) as caught:
        model(**{"input_ids": tokens(), **inputs})
    assert "\n" not in str(caught.value)
    assert UNDER in str(caught.value)
    return str(caught.value)


def a_cache() -> Any:
    cache = transformers.DynamicCache()
    cache.update(torch.ones(ROWS, 2, 3, 8), torch.ones(ROWS, 2, 3, 8), 0)
    return cache


MIDDLE = torch.tensor([[1, 1, 0, 1] * 4] * ROWS)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {"attention_mask": torch.ones(ROWS, 1, HELD, HELD)},
            r"attention_mask of the shape (2, 1, 8, 8)",
        ),
        ({"attention_mask": MIDDLE[:, HELD:]}, "padding between tokens"),
        ({"position_ids": torch.zeros(3, ROWS, HELD)}, "position_ids of the shape (3, 2, 8)"),
        ({"past_key_values": a_cache()}, "past_key_values with tokens"),
        ({"cache": a_cache()}, "past_key_values with tokens"),
        ({"labels": tokens(), "num_items_in_batch": 5}, "num_items_in_batch"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 9, 16]), "cu_seq_lens_k": torch.tensor([0, 9, 16])},
            "end at 16",
        ),
    ],
)
def test_what_a_part_cannot_be_given_is_refused(inputs: dict[str, Any], message: str) -> None:
    assert message in refused(Part(MIDDLE, torch.ones(ROWS, LENGTH)), ours(), **inputs)


SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def test_a_model_whose_layers_mix_tokens_in_other_ways_is_refused() -> None:
    config = transformers.Qwen3NextConfig(
        **SIZES, num_key_value_heads=2, layer_types=["linear_attention"] * 2
    )
    assert "Qwen3NextForCausalLM mixes tokens by" in refused(Part(), of_config(config))
    jamba = transformers.JambaConfig(
        **SIZES, num_key_value_heads=2, use_mamba_kernels=False, num_experts=2
    )
    assert "JambaForCausalLM mixes tokens by" in refused(Part(), of_config(jamba))


@pytest.mark.parametrize(
    ("kind", "options", "layout"),
    [
        ("qwen3_5_text", {}, "zigzag"),
        ("falcon_h1", {}, "zigzag"),  # attention beside a state in each layer
        ("qwen3_5_text", {"method": "ulysses"}, "contiguous"),
        ("lfm3", {}, "contiguous"),  # attention within windows alone
        ("mamba2", {}, "contiguous"),  # none
        ("qwen3_5_text", {"layout": "contiguous"}, "contiguous"),
    ],
)
def test_runs_of_a_model_that_passes_states_are_few(
    kind: str, options: dict[str, str], layout: str
) -> None:
    strategy = ContextParallelStrategy(**options)
    strategy._lightning_module = LanguageModel(hybrid_models.decoder(kind, torch.float32))
    assert strategy._layout == layout


def test_a_model_of_attention_alone_keeps_the_layout_balanced() -> None:
    strategy = ContextParallelStrategy()
    strategy._lightning_module = LanguageModel(HuggingFaceDecoder(ours()))
    assert strategy._layout == "balanced"


@pytest.mark.parametrize("kind", ["jamba", "minimax", "zaya", "falcon_mamba"])
def test_hybrids_whose_states_do_not_pass_are_refused_on_a_part_of_a_sequence(kind: str) -> None:
    model = hybrid_models.decoder(kind, torch.float32)
    with use_sharded_sequence(Part()), pytest.raises(UserError, match=UNDER):
        model.loss(tokens(), tokens())


def test_positions_and_losses_of_a_models_own_making_are_refused() -> None:
    opt = of_config(transformers.OPTConfig(**{**SIZES, "word_embed_proj_dim": 32}, ffn_dim=48))
    assert "OPTForCausalLM may not count positions from 0" in refused(Part(), opt)
    config = huggingface_models.KINDS["llama"](num_labels=3)
    judge = transformers.LlamaForSequenceClassification._from_config(
        config, attn_implementation=register_with_transformers()
    )
    said = refused(Part(), judge, labels=torch.zeros(ROWS, dtype=torch.long))
    assert "LlamaForSequenceClassification computes its loss itself" in said


def test_queries_that_are_scaled_by_positions_of_a_device_are_refused() -> None:
    config = transformers.Llama4TextConfig(
        **SIZES, num_key_value_heads=2, head_dim=8, intermediate_size_mlp=24, num_local_experts=2,
        no_rope_layers=[1, 0], floor_scale=16,
    )  # fmt: skip
    assert "fewer than 16 tokens" in refused(Part(), of_config(config))
